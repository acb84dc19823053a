/* attack MODE: programs that do to `pinfold check` what none should do. Each ends by itself, or is killed. */
#include "driver.h"
#include <pthread.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>

static uint64_t state = 88172645463325252ull;
static uint64_t next_of(uint64_t *state) { *state ^= *state << 13; *state ^= *state >> 7; return *state ^= *state << 17; }
static uint64_t next(void) { return next_of(&state); }

/* Requests of every kind with arguments that mean nothing, or nearly something. */
static void forged(void)
{
	open_device();
	int iommufd = open("/dev/iommu", O_RDWR), fds[] = { container, group, device, iommufd, 0, -1, 999 };
	uint32_t *page = (void *)BUF(0);
	for (int i = 0; i < 30000; i++) {
		for (int n = 0; n < 16; n++) page[n] = next() % 4 ? next() % 64 : next();
		uint64_t pointers[] = { 0, 8, (uintptr_t)page, (uintptr_t)BUF(PAGES) - 4, (uintptr_t)BUF(PAGES), ~0ull, ~0ull << 12, next() };
		page[0] = next() % 8 ? 64 : next();
		unsigned long request = 0x3b00 | (next() % 2 ? 100 + next() % 25 : 0x80 + next() % 16);
		/* Not the ones that end the device, all the time. */
		ioctl(fds[next() % 7], request | (next() % 16 ? 0 : next() << 16), pointers[next() % 3 ? 2 : next() % 8]);
		if (i % 8 == 0) {
			off_t at = (off_t)(next() % 10) << 40 | next() % 8192;
			if (next() % 2) pread(device, (void *)pointers[next() % 3 ? 2 : 1], next() % 2 ? next() : 64, at);
			else pwrite(device, (void *)pointers[next() % 8], next() % 64, at);
		}
		if (i % 64 == 0) {
			int fd = open(i % 128 ? "/dev/vfio/vfio" : "/dev/iommu", O_RDWR | (next() % 2 ? O_CLOEXEC : O_NONBLOCK));
			CHECK(fd >= 0);
			close(fd);
			syscall(SYS_openat, AT_FDCWD, pointers[next() % 8], O_RDWR);
			syscall(SYS_openat2, AT_FDCWD, "/dev/vfio/vfio", pointers[next() % 8], next() % 64);
		}
	}
}

/* All registers, all the time. */
static void registers(void)
{
	open_device();
	CHECK(!map(0, PAGES, BOTH));
	for (int round = 0; round < 40; round++) {
		enable();
		for (int i = 0; i < 2000; i++) {
			uint32_t at = next() % 4 ? 0x1000 + next() % 64 * 4 : next() % 0x8000 & ~3;
			if (at != 0x14) set(at, next() % 4 ? next() % 64 : next());
			/* The admin queue has commands that mean nothing. */
			for (int n = 0; n < 8; n++) ((uint64_t *)BUF(ADMIN_SQ))[next() % 256] = next() % 2 ? next() % 16 : AT(next() % PAGES);
		}
		set(0x14, next());
		set(0x14, 0);
		wait_ready(0);
	}
	CHECK(!ioctl(device, VFIO_DEVICE_RESET));
}

/* A virtio disk: its registers, its rings and its notifications, all the time. */
static void disk(void)
{
	open_device();
	CHECK(!map(0, PAGES, BOTH));
	uint64_t *words = (void *)memory;
	off_t registers = 4ll << 40;
	for (int round = 0; round < 300; round++) {
		uint8_t status = 0;
		uint16_t one = 1;
		pwrite(device, &status, 1, registers + 0x14);
		/* Half of the rounds begin as a driver does, so that the rings are looked at. */
		if (round % 2) {
			for (uint32_t half = 0; half < 2; half++) {
				uint32_t value = half ? 3 : next() & (next() % 8 ? 0x10001244 : ~0u);
				pwrite(device, &half, 4, registers + 0x08);
				pwrite(device, &value, 4, registers + 0x0c);
			}
			status = 11;
			pwrite(device, &status, 1, registers + 0x14);
			for (uint16_t id = 0; id < 4; id++) {
				pwrite(device, &id, 2, registers + 0x16);
				uint64_t rings[3];
				for (int n = 0; n < 3; n++) rings[n] = next() % 8 ? AT(next() % 16) + next() % 512 * 8 : next();
				pwrite(device, rings, sizeof rings, registers + 0x20);
				pwrite(device, &one, 2, registers + 0x1c);
			}
			status = 15;
			pwrite(device, &status, 1, registers + 0x14);
		}
		for (int i = 0; i < 40; i++) {
			for (int n = 0; n < 256; n++) {
				uint64_t small = next() % 4 | (next() % 8) << 16 | (next() % 32) << 32 | (next() % 8) << 48;
				words[next() % (16 * PAGE / 8)] = next() % 2 ? small : next() % 2 ? AT(next() % PAGES) : next();
			}
			((volatile uint16_t *)bar)[next() % 64] = next();
			uint64_t value = next();
			if (next() % 4 == 0) pwrite(device, &value, next() % 9, registers + next() % 0x40);
			if (next() % 4 == 0) pread(device, &value, next() % 9, registers + (next() % 2 ? next() % 0x4008 : next() % 0x40));
		}
	}
	CHECK(!ioctl(device, VFIO_DEVICE_RESET));
	CHECK(!unmap(0, PAGES));
}

/* With --watch-memory: calls by which memory goes, with arguments that mean nothing, or nearly something. */
static void *memory_calls(void *unused)
{
	(void)unused;
	uint64_t own = 88172645463325252ull + (uintptr_t)&own;
#define NEXT() next_of(&own)
	for (int i = 0; i < 1500; i++) {
		uint8_t *page = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
		uint64_t near[] = { 0, (uintptr_t)page, (uintptr_t)page + 4 * PAGE, 1ull << 62, ~0ull, ~0ull << 12 };
		uint64_t sizes[] = { 0, 1, PAGE, ~0ull, 1ull << 63, ~0ull << 12 };
		/* Only what is not this program's: past its own pages there is nothing to lose. */
		syscall(SYS_madvise, near[NEXT() % 6], sizes[NEXT() % 3], NEXT() % 30);
		syscall(SYS_mremap, near[3 + NEXT() % 3], sizes[NEXT() % 6], sizes[NEXT() % 6], NEXT() % 8, near[NEXT() % 6]);
		syscall(SYS_munmap, near[3 + NEXT() % 3], sizes[NEXT() % 6]);
		syscall(SYS_mmap, near[3 + NEXT() % 3], sizes[NEXT() % 6], 3, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		syscall(SYS_fallocate, (int)(NEXT() % 3) - 1 + 100, NEXT() % 64, sizes[NEXT() % 6], sizes[NEXT() % 6]);
		syscall(SYS_ftruncate, NEXT() % 2 ? -1 : 999, sizes[NEXT() % 6]);
		munmap(page, 4 * PAGE);
	}
	return NULL;
}
static void goes(void)
{
	pthread_t threads[4];
	open_device();
	CHECK(!map(FREE, 4, BOTH));
	for (int i = 0; i < 4; i++) CHECK(!pthread_create(&threads[i], NULL, memory_calls, NULL));
	/* Children are killed in the middle of it. */
	for (int i = 0; i < 20; i++) {
		pid_t pid = fork();
		if (!pid) { memory_calls(NULL); _exit(0); }
		usleep(next() % 5000);
		kill(pid, SIGKILL);
		CHECK(waitpid(pid, NULL, 0) == pid);
	}
	for (int i = 0; i < 4; i++) CHECK(!pthread_join(threads[i], NULL));
	CHECK(!unmap(FREE, 4));
}

static void *closer(void *unused)
{
	(void)unused;
	for (int i = 0; i < 3000; i++) { int fd = 3 + next() % 40; close(fd); if (i % 10 == 0) usleep(100); }
	return NULL;
}
/* Descriptors end while their calls wait for an answer. */
static void closed(void)
{
	pthread_t thread;
	open_device();
	pthread_create(&thread, NULL, closer, NULL);
	for (int i = 0; i < 3000; i++) {
		int c = open("/dev/vfio/vfio", O_RDWR), g = open("/dev/vfio/7", O_RDWR);
		ioctl(g, VFIO_GROUP_SET_CONTAINER, &c);
		ioctl(c, VFIO_SET_IOMMU, VFIO_TYPE1v2_IOMMU);
		int d = ioctl(g, VFIO_GROUP_GET_DEVICE_FD, BDF);
		ioctl(d, VFIO_DEVICE_RESET);
		close(d);
		close(g);
		close(c);
	}
	pthread_join(thread, NULL);
}

/* The memory belongs to a process that executes another program with the device open and a command queued. */
static void executes(char *self)
{
	start(ENTRIES);
	CHECK(!map(FREE, 1, BOTH));
	fcntl(device, F_SETFD, 0);
	fcntl(container, F_SETFD, 0);
	fcntl(group, F_SETFD, 0);
	struct sqe c = read_to(1, FREE);
	queue(&io, &c);
	doorbell(&io);
	execl(self, self, "executed", NULL);
	_exit(8);
}
static void executed(void)
{
	/* The descriptors are open, and the device accesses memory that is gone. */
	for (int i = 0; i < 64; i++) {
		struct vfio_device_info info = { .argsz = sizeof info };
		if (!ioctl(i, VFIO_DEVICE_GET_INFO, &info)) { usleep(20000); return; }
	}
	exit(7);
}

/* A child uses what its parent has opened; the parent ends first. */
static void outlives(void)
{
	start(ENTRIES);
	pid_t parent = getpid();
	if (fork()) _exit(0);
	while (getppid() == parent) usleep(1000);
	uint8_t *own = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(!map_at(0x900000, own, PAGE, BOTH));
	struct vfio_device_info info = { .argsz = sizeof info };
	CHECK(!ioctl(device, VFIO_DEVICE_GET_INFO, &info));
	usleep(50000);
}

/* A process uses what another one has opened, and passed on by a socket. */
static void passed(void)
{
	int pair[2], fds[3];
	CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
	pid_t child = fork();
	CHECK(child >= 0);
	char byte = 0;
	union { char bytes[CMSG_SPACE(sizeof fds)]; struct cmsghdr align; } space = { .bytes = { 0 } };
	struct iovec one = { &byte, 1 };
	struct msghdr message = { .msg_iov = &one, .msg_iovlen = 1, .msg_control = &space, .msg_controllen = sizeof space };
	if (child) {
		open_device();
		struct cmsghdr *header = CMSG_FIRSTHDR(&message);
		*header = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof fds), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS };
		memcpy(CMSG_DATA(header), (int[]){ container, group, device }, sizeof fds);
		CHECK(sendmsg(pair[0], &message, 0) == 1);
		CHECK(!munmap((void *)bar, 0x8000) && !close(container) && !close(group) && !close(device));
		int status;
		CHECK(waitpid(child, &status, 0) == child && !status);
		return;
	}
	CHECK(recvmsg(pair[1], &message, 0) == 1);
	memcpy(fds, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fds);
	container = fds[0], group = fds[1], device = fds[2];
	bar = mmap(NULL, 0x8000, PROT_READ | PROT_WRITE, MAP_SHARED, device, 0);
	memory = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(bar != MAP_FAILED && memory != MAP_FAILED && !map(0, FREE, BOTH));
	enable();
	CHECK(!run(&admin, &(struct sqe){ .opcode = 6, .cid = 7, .prp1 = AT(IDENTIFY), .cdw10 = 1 }));
	CHECK(BUF(IDENTIFY)[512] == 0x66); /* SQES */
	stop();
}

/* vfork's child makes calls while its parent waits. */
static void vforks(void)
{
	open_device();
	for (int i = 0; i < 200; i++) {
		pid_t pid = vfork();
		if (!pid) {
			struct vfio_device_info info = { .argsz = sizeof info };
			_exit(ioctl(device, VFIO_DEVICE_GET_INFO, &info) ? 1 : 0);
		}
		int status;
		CHECK(waitpid(pid, &status, 0) == pid && !status);
	}
}

static volatile int signals;
static void count(int signal) { (void)signal; signals++; }
/* Signals arrive while calls wait for their answers: none is lost, and none is made twice. */
static void interrupted(void)
{
	struct itimerval every = { { 0, 50 }, { 0, 50 } };
	open_device();
	signal(SIGALRM, count);
	setitimer(ITIMER_REAL, &every, NULL);
	for (int i = 0; i < 2000 || (signals <= 100 && i < 100000); i++) {
		CHECK(!map(FREE, 1, BOTH));
		CHECK(!unmap(FREE, 1));
	}
	CHECK(signals > 100);
}

/* Children are killed at any time. */
static void killed(void)
{
	for (int i = 0; i < 60; i++) {
		pid_t pid = fork();
		if (!pid) {
			start(ENTRIES);
			for (;;) {
				CHECK(!map(FREE, 4, BOTH));
				for (int n = 0; n < 4; n++) { struct sqe c = read_to(n, FREE + n); queue(&io, &c); }
				doorbell(&io);
				for (int n = 0; n < 4; n++) complete(&io, NULL);
				CHECK(!unmap(FREE, 4));
			}
		}
		usleep(next() % 20000);
		kill(pid, SIGKILL);
		waitpid(pid, NULL, 0);
	}
}

/* 10^5 maps: the limit of a container is reached, and is a clean error. */
static void many(void)
{
	const int n = 100000;
	uint8_t *space = mmap(NULL, n * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	int done = 0;
	open_device();
	while (done < n && !map_at(0x100000000ull + done * PAGE, space + done * PAGE, PAGE, BOTH)) done++;
	CHECK(done == 65535 && errno == ENOSPC);
	CHECK(!unmap_at(0, 1ull << 38));
}

/* The descriptors are abused as what they are underneath. */
static void underneath(void)
{
	char bytes[4096];
	start(ENTRIES);
	for (int i = 0; i < 500; i++) {
		int c = open("/dev/vfio/vfio", O_RDWR | O_NONBLOCK);
		while (write(c, bytes, sizeof bytes) > 0) ;
		shutdown(c, i % 3);
		ioctl(c, VFIO_GET_API_VERSION);
		close(c);
	}
	CHECK(ftruncate(device, 0) < 0 && ftruncate(device, 1 << 20) < 0);
	fallocate(device, 3, 0, 0x8000); /* a hole */
	memset((void *)bar, 0xff, 0x8000);
	for (int i = 0; reg(0x1c) == ~0u; i++) { CHECK(i < 1000000); usleep(10); }
	memset((void *)bar, 0, 0x8000);
	/* The controller looks at each of 5,000 wrong doorbells, the last of which is at 5ffch. */
	for (int i = 0; reg(0x5ffc) != ~0u; i++) { CHECK(i < 1000000); usleep(10); }
	/* That may have been before it saw CC.EN 0. It writes CSTS again, which is 0 only after that: 0 from
	   the memset would say nothing, and an enable before it would be no change of CC.EN. */
	set(0x1c, ~0u);
	for (int i = 0; reg(0x1c) != 0; i++) { CHECK(i < 1000000); usleep(10); }
	int full = eventfd(0, 0);
	uint64_t most = ~0ull - 1;
	CHECK(write(full, &most, 8) == 8);
	char space[sizeof(struct vfio_irq_set) + 4];
	struct vfio_irq_set *irqs = (void *)space;
	*irqs = (struct vfio_irq_set){ .argsz = sizeof space, .index = 2, .count = 1, .flags = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER };
	memcpy(irqs->data, &full, 4);
	CHECK(!ioctl(device, VFIO_DEVICE_SET_IRQS, irqs));
	enable();
	for (int i = 0; i < 8; i++) run(&admin, &(struct sqe){ .opcode = 6, .cid = 7, .prp1 = AT(IDENTIFY), .cdw10 = 1 });
}

/* Sets one eventfd of MSI-X, and raises its interrupt. */
static int raise_interrupt(int event)
{
	char space[sizeof(struct vfio_irq_set) + 4];
	struct vfio_irq_set *irqs = (void *)space;
	*irqs = (struct vfio_irq_set){ .argsz = sizeof space, .index = 2, .count = 1, .flags = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER };
	memcpy(irqs->data, &event, 4);
	if (ioctl(device, VFIO_DEVICE_SET_IRQS, irqs)) return -1;
	*irqs = (struct vfio_irq_set){ .argsz = sizeof *irqs, .index = 2, .count = 1, .flags = VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_ACTION_TRIGGER };
	return ioctl(device, VFIO_DEVICE_SET_IRQS, irqs);
}

/* A thread with descriptors of its own, in which an eventfd has the number that is a file's in the others'. */
static int file;
static void *own_descriptors(void *unused)
{
	CHECK(!unshare(CLONE_FILES));
	int event = eventfd(0, 0);
	uint64_t count = 0;
	CHECK(dup2(event, file) == file);
	/* Before Linux 6.9 the eventfd of one thread cannot be had. */
	if (raise_interrupt(file)) CHECK(errno == EINVAL);
	else CHECK(read(event, &count, 8) == 8 && count == 1);
	return unused;
}
static void tables(void)
{
	struct stat found;
	pthread_t thread;
	open_device();
	CHECK((file = memfd_create("file", 0)) >= 0);
	CHECK(!pthread_create(&thread, NULL, own_descriptors, NULL) && !pthread_join(thread, NULL));
	CHECK(!fstat(file, &found) && found.st_size == 0);
}

/* A file is put at the number of an eventfd, and taken away again, while the call looks at it. */
static int events, swapped;
static volatile int swap_ends;
static void *swap_descriptors(void *unused)
{
	while (!swap_ends) CHECK(dup2(file, swapped) == swapped && dup2(events, swapped) == swapped);
	return unused;
}
static void swaps(void)
{
	struct stat found;
	pthread_t thread;
	open_device();
	CHECK((file = memfd_create("file", 0)) >= 0 && (events = eventfd(0, 0)) >= 0 && (swapped = dup(events)) >= 0);
	CHECK(!pthread_create(&thread, NULL, swap_descriptors, NULL));
	for (int i = 0; i < 3000; i++) if (raise_interrupt(swapped)) CHECK(errno == EINVAL);
	swap_ends = 1;
	CHECK(!pthread_join(thread, NULL));
	CHECK(!fstat(file, &found) && found.st_size == 0);
}

/* All is done by a thread whose process has no first thread any more. */
static void *without_first(void *first)
{
	char path[64], line[256] = "";
	snprintf(path, sizeof path, "/proc/%d/stat", (int)getpid());
	CHECK(!pthread_join(*(pthread_t *)first, NULL));
	do {
		int stat = open(path, O_RDONLY);
		CHECK(read(stat, line, sizeof line - 1) > 0 && !close(stat));
	} while (!strstr(line, ") Z "));
	start(ENTRIES);
	CHECK(!raise_interrupt(eventfd(0, 0)));
	struct sqe c = read_to(1, FREE);
	CHECK(!map(FREE, 1, BOTH) && run(&io, &c) == 0 && !unmap(FREE, 1));
	CHECK(!unmap(FREE, 1));
	stop();
	exit(0);
}
static void first_ends(void)
{
	static pthread_t first, other;
	first = pthread_self();
	CHECK(!pthread_create(&other, NULL, without_first, &first));
	pthread_exit(NULL);
}

/* The program's file is gone, and a pipe has the name that the kernel then reports for it. */
static void piped(void)
{
	char path[4096], gone[4200];
	ssize_t bytes = readlink("/proc/self/exe", path, sizeof path - 1);
	CHECK(bytes > 0);
	path[bytes] = 0;
	snprintf(gone, sizeof gone, "%s.copy", path);
	int from = open(path, O_RDONLY), to = open(gone, O_WRONLY | O_CREAT | O_TRUNC, 0700);
	while ((bytes = read(from, path, sizeof path)) > 0) CHECK(write(to, path, bytes) == bytes);
	CHECK(!close(from) && !close(to));
	execl(gone, gone, "pipe", NULL);
	exit(8);
}
static void pipe_in_place(char *self)
{
	char gone[4200];
	CHECK(!unlink(self));
	snprintf(gone, sizeof gone, "%s (deleted)", self);
	CHECK(!mkfifo(gone, 0600));
	open_device();
	CHECK(!unmap(FREE, 1));
	CHECK(!unlink(gone));
}

/* Paths of every kind to a node; what the kernel refuses is refused. */
static int resolved(int folder, const char *path, uint64_t flags, uint64_t resolve, size_t size)
{
	uint64_t how[3] = { flags, 0, resolve };
	return syscall(SYS_openat2, folder, path, how, size);
}
static int is_container(int fd) { return fd >= 0 && ioctl(fd, VFIO_GET_API_VERSION) == 0 && !close(fd); }
static void paths(void)
{
	enum { NO_XDEV = 1, NO_SYMLINKS = 4, BENEATH = 8, IN_ROOT = 16 };
	char folder[] = "/tmp/pinfold-paths-XXXXXX", link[64], path[64];
	const char *node = "/dev/vfio/vfio";
	CHECK(mkdtemp(folder));
	snprintf(link, sizeof link, "%s/vfio", folder);
	CHECK(!symlink(node, link) && !chdir(folder));
	int at = open(folder, O_PATH), dev = open("/dev", O_PATH), top = open("/", O_PATH);
	CHECK(is_container(open(link, O_RDWR)) && is_container(open("vfio", O_RDWR)) && is_container(openat(at, "vfio", O_RDWR)));
	CHECK(is_container(openat(dev, "vfio/vfio", O_RDWR)) && is_container(openat(dev, "../dev/vfio/vfio", O_RDWR)));
	CHECK(is_container(resolved(at, node, O_RDWR, 0, 24)) && is_container(resolved(at, node, O_RDWR, NO_SYMLINKS, 24)));
	CHECK(is_container(resolved(dev, "vfio/vfio", O_RDWR, BENEATH | NO_XDEV, 24)));
	CHECK(is_container(resolved(dev, "/vfio/vfio", O_RDWR, IN_ROOT, 24)));
	CHECK(resolved(at, node, O_RDWR, BENEATH, 24) < 0 && errno == EXDEV);
	CHECK(resolved(at, node, O_RDWR, IN_ROOT, 24) < 0 && errno == ENOENT);
	CHECK(resolved(at, "vfio", O_RDWR, BENEATH, 24) < 0 && errno == EXDEV);
	CHECK(resolved(at, "vfio", O_RDWR, NO_SYMLINKS, 24) < 0 && errno == ELOOP);
	CHECK(resolved(at, node, O_RDWR, 0, 8) < 0 && errno == EINVAL);
	CHECK(resolved(at, node, O_RDWR | 1ull << 40, 0, 24) < 0 && errno == EINVAL);
	CHECK(open("vfio", O_RDWR | O_NOFOLLOW) < 0 && errno == ELOOP);
	CHECK(open(node, O_RDWR | O_DIRECTORY) < 0 && errno == ENOTDIR);
	CHECK(open(node, O_RDWR | O_CREAT | O_EXCL, 0600) < 0 && errno == EEXIST);
	/* By a descriptor: a node is opened, and a device is not opened again. */
	snprintf(path, sizeof path, "/proc/self/fd/%d", open(node, O_PATH));
	CHECK(is_container(open(path, O_RDWR)));
	CHECK(open(path, O_RDWR | O_NOFOLLOW) < 0 && errno == ELOOP);
	open_device();
	snprintf(path, sizeof path, "/proc/thread-self/fd/%d", device);
	CHECK(open(path, O_RDWR) < 0 && errno == ENXIO);
	snprintf(path, sizeof path, "/proc/%d/fd/%d", getpid(), device);
	CHECK(open(path, O_RDWR) < 0 && errno == ENXIO);
	snprintf(path, sizeof path, "/proc/self/task/%d/fd/%d", getpid(), device);
	CHECK(open(path, O_RDWR) < 0 && errno == ENXIO);
	snprintf(path, sizeof path, "/proc/%d/fd/%d", getpid(), open(node, O_PATH));
	CHECK(is_container(open(path, O_RDWR)));
	snprintf(path, sizeof path, "/dev/fd/%d", container);
	CHECK(open(path, O_RDWR) < 0 && errno == ENXIO);
	/* In a root of its own. */
	snprintf(path, sizeof path, "%s/inside", folder);
	CHECK(!unlink(link) && !mkdir(path, 0700) && !mount("/dev", path, NULL, MS_BIND | MS_REC, NULL));
	CHECK(!chroot(folder) && !chdir("/inside") && is_container(open("vfio/vfio", O_RDWR)));
	CHECK(!symlink("/inside/vfio/vfio", "/vfio") && !chdir("/") && is_container(open("vfio", O_RDWR)));
	CHECK(!unlink("/vfio") && !umount2("/inside", MNT_DETACH) && !rmdir("/inside"));
	CHECK(!fchdir(top) && !chroot(".") && !rmdir(folder));
}

/* A process that nobody but root may look at. */
static void hidden(void)
{
	CHECK(!prctl(PR_SET_DUMPABLE, 0));
	printf("hidden: %d\n", is_container(open("/dev/vfio/vfio", O_RDWR)));
}

/* Descriptors of VFIO are descriptors like others: copied over one another, and closed by ranges. */
static void copied(void)
{
	start(ENTRIES);
	const struct sqe identify = { .opcode = 6, .cid = 7, .prp1 = AT(IDENTIFY), .cdw10 = 1 };
	int own = container, null = open("/dev/null", O_RDWR | O_CLOEXEC);
	CHECK(dup2(device, 100) == 100 && dup2(own, 101) == 101 && dup2(group, 102) == 102);
	CHECK(!close(device) && !close(group) && dup2(null, own) == own);
	device = 100, group = 102;
	CHECK(map(FREE, 1, BOTH) && errno == ENOTTY);
	container = 101;
	CHECK(!map(FREE, 1, BOTH) && !unmap(FREE, 1) && !run(&admin, &identify));
	/* Memory of the program in place of a page of registers, whose place the device has not. */
	CHECK(mmap((void *)bar, PAGE, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == bar);
	memset((void *)bar, 0xff, PAGE);
	CHECK(mmap((void *)bar, PAGE, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_SHARED, device, 0) == bar && !run(&admin, &identify));
	stop();
	CHECK(!syscall(SYS_close_range, 3, ~0u, 0));
	/* The map keeps the device open, and with it the group. */
	CHECK(open(GROUP, O_RDWR) < 0 && errno == EBUSY);
	CHECK(!munmap((void *)bar, 0x8000));
	open_device();
	set(0x14, 0);
}

/* An iommufd chooses the addresses of very many maps. */
static void chosen(void)
{
	struct { uint32_t size, flags, id; } alloc = { sizeof alloc, 0, 0 };
	struct { uint32_t size, flags, id, reserved; uint64_t at, len, iova; } map;
	struct { uint32_t size, id; uint64_t iova, len; } unmap;
	int iommufd = open("/dev/iommu", O_RDWR);
	uint8_t *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(!ioctl(iommufd, 0x3b81, &alloc));
	for (uint64_t i = 0; i < 20000; i++) {
		map = (typeof(map)){ sizeof map, 6, alloc.id, 0, (uintptr_t)page, PAGE, 0 };
		CHECK(!ioctl(iommufd, 0x3b85, &map) && map.iova == (i + 1) * PAGE);
	}
	unmap = (typeof(unmap)){ sizeof unmap, alloc.id, 0, ~0ull };
	CHECK(!ioctl(iommufd, 0x3b86, &unmap) && unmap.len == 20000 * PAGE);
}

/* An address that an IOMMU of 39 bits does not translate; 48 bits do. */
static void wide(void)
{
	open_device();
	if (map_at(1ull << 40, BUF(0), PAGE, BOTH)) exit(errno == EINVAL ? 22 : 9);
	CHECK(map_at(1ull << 48, BUF(0), PAGE, BOTH) && errno == EINVAL);
	CHECK(!unmap_at(1ull << 40, PAGE));
}

/* No descriptor is free for what is opened. */
static void full(void)
{
	struct rlimit few = { 8, 8 };
	int opened = 0;
	setrlimit(RLIMIT_NOFILE, &few);
	while (open("/dev/vfio/vfio", O_RDWR) >= 0) opened++;
	CHECK(errno == EMFILE && opened > 0 && opened < 8);
}

/* A process of its own session, which ignores all that can be ignored, forever. */
static void daemon_forever(void)
{
	open_device();
	if (fork()) _exit(0);
	setsid();
	if (fork()) _exit(0);
	for (int i = 1; i < 32; i++) signal(i, SIG_IGN);
	for (;;) pause();
}

/* A device that is enabled, and not used. */
static void idle(void)
{
	start(ENTRIES);
	puts("idle");
	fflush(stdout);
	sleep(60);
	stop();
}

/* A command in flight when the device fails: it is reset, and all is unmapped. */
static void failed(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 1, BOTH));
	struct sqe c = read_to(1, FREE);
	queue(&io, &c);
	doorbell(&io);
	for (int i = 0; !(reg(0x1c) & 2); i++) { CHECK(i < 1000000); usleep(10); }
	set(0x14, 0);
	wait_ready(0);
	CHECK(!unmap(FREE, 1) && !unmap(0, FREE));
}

/* A command in flight when the device is removed: the program is asked for it, and all is unmapped. */
static void removed(void)
{
	start(ENTRIES);
	char buffer[sizeof(struct vfio_irq_set) + 4];
	struct vfio_irq_set *irqs = (void *)buffer;
	int event = eventfd(0, EFD_CLOEXEC);
	*irqs = (struct vfio_irq_set){ .argsz = sizeof buffer, .flags = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER,
		.index = VFIO_PCI_REQ_IRQ_INDEX, .count = 1 };
	memcpy(irqs->data, &event, 4);
	CHECK(!ioctl(device, VFIO_DEVICE_SET_IRQS, irqs));
	CHECK(!map(FREE, 1, BOTH));
	uint32_t id = 0;
	uint64_t count;
	off_t config = (off_t)VFIO_PCI_CONFIG_REGION_INDEX << 40;
	CHECK(pread(device, &id, 4, config) == 4 && id != ~0u);
	struct sqe c = read_to(1, FREE);
	queue(&io, &c);
	doorbell(&io);
	CHECK(read(event, &count, 8) == 8);
	CHECK(reg(0) == ~0u && reg(0x14) == ~0u && reg(0x1c) == ~0u);
	CHECK(pread(device, &id, 4, config) == 4 && id == ~0u);
	CHECK(!unmap(FREE, 1) && !unmap(0, FREE));
}

/* A file system of its own, which never answers: nobody learns what a name there is. */
static void stalled(const char *folder)
{
	char options[99], path[PATH_MAX];
	int fuse = open("/dev/fuse", O_RDWR | O_CLOEXEC);
	snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=%u,group_id=%u", fuse, getuid(), getgid());
	if (fuse < 0 || mount("attack", folder, "fuse", 0, options)) { puts("no FUSE"); return; }
	puts("stalled");
	fflush(stdout);
	snprintf(path, sizeof path, "%s/vfio", folder);
	open(path, O_RDWR);
	for (;;) pause();
}

int main(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "";
	if (!strcmp(mode, "forged")) forged();
	else if (!strcmp(mode, "registers")) registers();
	else if (!strcmp(mode, "disk")) disk();
	else if (!strcmp(mode, "goes")) goes();
	else if (!strcmp(mode, "closed")) closed();
	else if (!strcmp(mode, "executes")) executes(argv[0]);
	else if (!strcmp(mode, "executed")) executed();
	else if (!strcmp(mode, "outlives")) outlives();
	else if (!strcmp(mode, "passed")) passed();
	else if (!strcmp(mode, "vforks")) vforks();
	else if (!strcmp(mode, "interrupted")) interrupted();
	else if (!strcmp(mode, "killed")) killed();
	else if (!strcmp(mode, "many")) many();
	else if (!strcmp(mode, "underneath")) underneath();
	else if (!strcmp(mode, "tables")) tables();
	else if (!strcmp(mode, "swaps")) swaps();
	else if (!strcmp(mode, "first-ends")) first_ends();
	else if (!strcmp(mode, "piped")) piped();
	else if (!strcmp(mode, "pipe")) pipe_in_place(argv[0]);
	else if (!strcmp(mode, "paths")) paths();
	else if (!strcmp(mode, "hidden")) hidden();
	else if (!strcmp(mode, "copied")) copied();
	else if (!strcmp(mode, "chosen")) chosen();
	else if (!strcmp(mode, "wide")) wide();
	else if (!strcmp(mode, "full")) full();
	else if (!strcmp(mode, "daemon")) daemon_forever();
	else if (!strcmp(mode, "idle")) idle();
	else if (!strcmp(mode, "failed")) failed();
	else if (!strcmp(mode, "removed")) removed();
	else if (!strcmp(mode, "stalled")) stalled(argc > 2 ? argv[2] : "/mnt");
	else { fprintf(stderr, "usage: attack MODE\n"); return 2; }
	return 0;
}
