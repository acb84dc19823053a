// driver: an NVMe driver over VFIO type 1 whose goroutines map, submit and unmap at the same time, and
// a child that executes with the device's descriptor. FAULT=1 in the environment unmaps half of a
// mapping. It uses few packages, as each is compiled with it.
package main

import (
	"sync/atomic"
	"syscall"
	"unsafe"
)

const (
	page       = 4096
	base       = 0x100000
	entries    = 32
	goroutines = 8
	rounds     = 50
	config     = 7 << 40

	setContainer = 0x3b68
	setIOMMU     = 0x3b66
	getDevice    = 0x3b6a
	deviceInfo   = 0x3b6b
	mapDMA       = 0x3b71
	unmapDMA     = 0x3b72
)

type mapArgs struct {
	size, flags      uint32
	vaddr, iova, len uint64
}
type unmapArgs struct {
	size, flags uint32
	iova, len   uint64
}
type infoArgs struct{ size, flags, regions, irqs, chain, pad uint32 }
type command struct {
	op         uint32 // the identifier is in its upper half
	nsid       uint32
	reserved   [2]uint64
	prp1, prp2 uint64
	dwords     [6]uint32
}

var (
	container, device int
	bar, memory       []byte
	one               = make(chan bool, 1) // who has sent to it has the admin queue
	submitted         uint32
)

func check(ok bool, what string) {
	if !ok {
		println("driver:", what)
		syscall.Exit(9)
	}
}

func ioctl(fd int, request uintptr, arg unsafe.Pointer) (int, syscall.Errno) {
	value, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), request, uintptr(arg))
	return int(value), errno
}

func reg(at int) *uint32      { return (*uint32)(unsafe.Pointer(&bar[at])) }
func read(at int) uint32      { return atomic.LoadUint32(reg(at)) }
func set(at int, to uint32)   { atomic.StoreUint32(reg(at), to) }
func set64(at int, to uint64) { set(at, uint32(to)); set(at+4, uint32(to>>32)) }
func address(n int) uint64    { return base + uint64(n)*page }
func buffer(n int) []byte     { return memory[n*page : (n+1)*page] }

func mapPages(n, pages int) {
	at := unsafe.Pointer(&memory[n*page])
	args := mapArgs{32, 3, uint64(uintptr(at)), address(n), uint64(pages) * page}
	_, errno := ioctl(container, mapDMA, unsafe.Pointer(&args))
	check(errno == 0, "map: "+errno.Error())
}

//go:noinline
func unmapPages(n, pages int) syscall.Errno {
	args := unmapArgs{24, 0, address(n), uint64(pages) * page}
	_, errno := ioctl(container, unmapDMA, unsafe.Pointer(&args))
	return errno
}

func wait(what string, done func() bool) {
	for n := 0; !done(); n++ {
		check(n < 1000000, what)
		pause := syscall.Timespec{Nsec: 60000}
		syscall.Nanosleep(&pause, nil)
	}
}

// Executes Identify Controller into a page.
func identify(n int) {
	one <- true
	defer func() { <-one }()
	slot := submitted % entries
	at := (*command)(unsafe.Pointer(&buffer(0)[slot*64]))
	*at = command{op: 6 | submitted<<16, prp1: address(n), dwords: [6]uint32{1}}
	phase := 1 &^ (submitted / entries)
	last := (*uint32)(unsafe.Pointer(&buffer(1)[slot*16+12]))
	submitted++
	set(0x1000, submitted%entries)
	wait("a completion", func() bool { return atomic.LoadUint32(last)>>16&1 == phase })
	check(atomic.LoadUint32(last)>>17 == 0, "the command failed")
	set(0x1004, submitted%entries)
}

func start() {
	var err error
	container, err = syscall.Open("/dev/vfio/vfio", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	check(err == nil, "the container")
	group, err := syscall.Open("/dev/vfio/7", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	check(err == nil, "the group")
	fd := int32(container)
	_, errno := ioctl(group, setContainer, unsafe.Pointer(&fd))
	check(errno == 0, "set the container")
	_, _, errno = syscall.Syscall(syscall.SYS_IOCTL, uintptr(container), setIOMMU, 3)
	check(errno == 0, "set the IOMMU")
	name := []byte("0000:01:00.0\x00")
	device, errno = ioctl(group, getDevice, unsafe.Pointer(&name[0]))
	check(errno == 0, "the device")
	bar, err = syscall.Mmap(device, 0, 0x2000, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	check(err == nil, "BAR 0")
	memory, err = syscall.Mmap(-1, 0, 64*page, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	check(err == nil, "memory")
	n, err := syscall.Pwrite(device, []byte{6, 0}, config+4)
	check(n == 2 && err == nil, "bus mastering")
	mapPages(0, 2)
	set(0x24, (entries-1)<<16|(entries-1))
	set64(0x28, address(0))
	set64(0x30, address(1))
	set(0x14, 1|6<<16|4<<20)
	wait("ready", func() bool { return read(0x1c)&1 == 1 })
}

func stop() {
	set(0x14, read(0x14)|1<<14)
	wait("the shutdown", func() bool { return read(0x1c)>>2&3 == 2 })
	set(0x14, 0)
	wait("a reset", func() bool { return read(0x1c)&1 == 0 })
	check(unmapPages(0, 2) == 0, "unmap")
}

// What each goroutine does with two pages of its own.
func work(n int, done chan bool) {
	_, wrong := syscall.Getenv("FAULT")
	class := make([]byte, 4)
	for i := 0; i < rounds; i++ {
		mapPages(n, 2)
		identify(n)
		check(string(buffer(n)[4:11]) == "PINFOLD", "the serial number")
		got, err := syscall.Pread(device, class, config+8)
		check(got == 4 && err == nil && class[3] == 1, "configuration space")
		if wrong && i == 0 && n == 2 {
			check(unmapPages(n, 1) == syscall.EINVAL, "a part was unmapped")
		}
		check(unmapPages(n, 2) == 0, "unmap")
	}
	done <- true
}

// A child that executes this program with the device as descriptor 3.
func child() {
	attributes := syscall.ProcAttr{Env: []string{"CHILD=1"}, Files: []uintptr{0, 1, 2, uintptr(device)}}
	pid, err := syscall.ForkExec("/proc/self/exe", []string{"driver"}, &attributes)
	check(err == nil, "a child")
	var status syscall.WaitStatus
	_, err = syscall.Wait4(pid, &status, 0, nil)
	check(err == nil && status.Exited() && status.ExitStatus() == 0, "the child failed")
}

func main() {
	if _, is := syscall.Getenv("CHILD"); is {
		info := infoArgs{size: 24}
		_, errno := ioctl(3, deviceInfo, unsafe.Pointer(&info))
		check(errno == 0 && info.regions == 9, "the device of the parent")
		return
	}
	start()
	done := make(chan bool)
	for i := 0; i < goroutines; i++ {
		go work(2+2*i, done)
	}
	child()
	for i := 0; i < goroutines; i++ {
		<-done
	}
	stop()
}
