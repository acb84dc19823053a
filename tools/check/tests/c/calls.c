/* calls [type1|iommufd|msi|width] [BDF]: every call of VFIO that `pinfold check` answers, right and wrong, a line for each answer.
 * The lines are compared with those of the kernel in the virtual machine (tests/kernel): contrib/check/kernel records them. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/vfio.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#define PAGE 4096ull
static const char *bdf = "0000:01:00.0";
static int container, group, device, iommufd;
static uint8_t *memory;
static void *volatile bad_pointer = (void *)8;

static const char *name(int error)
{
	static char other[16];
	switch (error) {
	case EINVAL: return "EINVAL"; case EEXIST: return "EEXIST"; case ENOENT: return "ENOENT"; case EFAULT: return "EFAULT";
	case ENOTTY: return "ENOTTY"; case EBUSY: return "EBUSY"; case ENODEV: return "ENODEV"; case ENOSPC: return "ENOSPC";
	case ENOMEM: return "ENOMEM"; case EBADF: return "EBADF"; case EBADFD: return "EBADFD"; case EOVERFLOW: return "EOVERFLOW";
	case E2BIG: return "E2BIG"; case EMSGSIZE: return "EMSGSIZE"; case EOPNOTSUPP: return "EOPNOTSUPP"; case EPERM: return "EPERM";
	case EADDRINUSE: return "EADDRINUSE"; case EAGAIN: return "EAGAIN"; case ERANGE: return "ERANGE"; case EACCES: return "EACCES";
	}
	snprintf(other, sizeof other, "%d", error);
	return other;
}
static long say(const char *what, long answer)
{
	int error = errno;
	if (answer < 0) printf("%s: %s\n", what, name(error));
	else printf("%s: %ld\n", what, answer);
	return answer;
}
/* A descriptor's number says nothing. */
static int say_fd(const char *what, int fd)
{
	int error = errno;
	printf("%s: %s\n", what, fd < 0 ? name(error) : "a descriptor");
	return fd;
}

static int map(uint64_t iova, void *at, uint64_t size, uint32_t flags)
{
	struct vfio_iommu_type1_dma_map map = { .argsz = sizeof map, .flags = flags, .vaddr = (uintptr_t)at, .iova = iova, .size = size };
	return ioctl(container, VFIO_IOMMU_MAP_DMA, &map);
}
static long unmap(uint64_t iova, uint64_t size, uint32_t flags)
{
	struct vfio_iommu_type1_dma_unmap unmap = { .argsz = sizeof unmap, .flags = flags, .iova = iova, .size = size };
	int answer = ioctl(container, VFIO_IOMMU_UNMAP_DMA, &unmap);
	return answer < 0 ? answer : (long)unmap.size;
}

static int group_number(void)
{
	char path[128], link[256] = "";
	snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/iommu_group", bdf);
	ssize_t len = readlink(path, link, sizeof link - 1);
	if (len < 0) { perror(path); exit(9); }
	return atoi(strrchr(link, '/') + 1);
}

static void info(void)
{
	union { struct vfio_iommu_type1_info info; uint8_t bytes[512]; } i = { .info.argsz = 15 };
	say("info, argsz too small", ioctl(container, VFIO_IOMMU_GET_INFO, &i));
	i.info.argsz = 16;
	say("info, the first version", ioctl(container, VFIO_IOMMU_GET_INFO, &i));
	printf("info: flags %x, argsz grew %d, 4 KiB pages %d, 2 MiB pages %d\n", i.info.flags, i.info.argsz > 16,
		!!(i.info.iova_pgsizes & PAGE), !!(i.info.iova_pgsizes & 2 << 20));
	i.info.argsz = sizeof i;
	say("info, with a chain", ioctl(container, VFIO_IOMMU_GET_INFO, &i));
	printf("info: argsz %d, chain at %u\n", i.info.argsz == sizeof i, i.info.cap_offset);
	for (uint32_t at = i.info.cap_offset; at && at < sizeof i - 64;) {
		struct vfio_info_cap_header *head = (void *)(i.bytes + at);
		printf("capability %u version %u at %u:", head->id, head->version, at);
		if (head->id == 1) {
			struct vfio_iommu_type1_info_cap_iova_range *r = (void *)head;
			for (uint32_t n = 0; n < r->nr_iovas; n++)
				printf(" %llx-%llx", r->iova_ranges[n].start, r->iova_ranges[n].end);
		} else if (head->id == 3) {
			printf(" %u", ((struct vfio_iommu_type1_info_dma_avail *)head)->avail);
		}
		printf("\n");
		at = head->next;
	}
}

static void maps(void)
{
	const uint32_t rw = VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE;
	void *constant = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct vfio_iommu_type1_dma_map small = { .argsz = 31, .flags = rw };
	say("map, argsz too small", ioctl(container, VFIO_IOMMU_MAP_DMA, &small));
	say("map, a bad pointer", ioctl(container, VFIO_IOMMU_MAP_DMA, 8));
	say("map, size 0", map(0x100000, memory, 0, rw));
	say("map, an odd size", map(0x100000, memory, 100, rw));
	say("map, an odd iova", map(0x100100, memory, PAGE, rw));
	say("map, an odd address", map(0x100000, memory + 8, PAGE, rw));
	say("map, no direction", map(0x100000, memory, PAGE, 0));
	say("map, unknown flags", map(0x100000, memory, PAGE, rw | 1 << 9));
	say("map, an address to update", map(0x100000, memory, PAGE, 1 << 2));
	say("map, a wrapping iova", map(~0xfffull, memory, 2 * PAGE, rw));
	say("map, a wrapping address", map(0x100000, (void *)~0xfffull, 2 * PAGE, rw));
	say("map, nothing there", map(0x100000, (void *)0x10000, PAGE, rw));
	say("map, constant memory to write", map(0x100000, constant, PAGE, rw));
	say("map, constant memory to read", map(0x100000, constant, PAGE, VFIO_DMA_MAP_FLAG_READ));
	say("unmap it", unmap(0x100000, PAGE, 0));
	say("map, the window of interrupts", map(0xfee00000, memory, PAGE, rw));
	say("map, beyond the width", map(1ull << 60, memory, PAGE, rw));
	say("map four pages", map(0x100000, memory, 4 * PAGE, rw));
	say("map the same", map(0x100000, memory, 4 * PAGE, rw));
	say("map a part of it", map(0x102000, memory, PAGE, rw));
	say("map across its end", map(0x103000, memory, 4 * PAGE, rw));
	say("map around it", map(0xff000, memory, 8 * PAGE, rw));
	say("map behind it", map(0x104000, memory, 2 * PAGE, rw));
	say("the same memory again", map(0x200000, memory, 4 * PAGE, rw));
	struct vfio_iommu_type1_dma_unmap less = { .argsz = 23 };
	say("unmap, argsz too small", ioctl(container, VFIO_IOMMU_UNMAP_DMA, &less));
	say("unmap, size 0", unmap(0x100000, 0, 0));
	say("unmap, an odd size", unmap(0x100000, 100, 0));
	say("unmap, an odd iova", unmap(0x100100, PAGE, 0));
	say("unmap, wrapping", unmap(~0xfffull, 2 * PAGE, 0));
	say("unmap, unknown flags", unmap(0x100000, PAGE, 1 << 9));
	say("unmap, the first of four", unmap(0x100000, PAGE, 0));
	say("unmap, the last of four", unmap(0x103000, PAGE, 0));
	say("unmap, in the middle", unmap(0x101000, PAGE, 0));
	say("unmap, across two", unmap(0x103000, 2 * PAGE, 0));
	say("unmap, nothing", unmap(0x800000, PAGE, 0));
	say("unmap two at once", unmap(0x100000, 6 * PAGE, 0));
	say("unmap a large range", unmap(0, 1ull << 32, 0));
	say("unmap all, with a size", unmap(0, PAGE, VFIO_DMA_UNMAP_FLAG_ALL));
	say("map for unmap all", map(0x100000, memory, PAGE, rw));
	say("unmap all", unmap(0, 0, VFIO_DMA_UNMAP_FLAG_ALL));
}

/* Version 1 has no rule for an unmap that cuts a mapping. */
static void version_1(void)
{
	const uint32_t rw = VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE;
	say("v1, map four pages", map(0x100000, memory, 4 * PAGE, rw));
	say("v1, map the same", map(0x100000, memory, 4 * PAGE, rw));
	say("v1, map behind it", map(0x104000, memory + 4 * PAGE, 2 * PAGE, rw));
	say("v1, map apart", map(0x108000, memory, PAGE, rw));
	say("v1, unmap in the middle", unmap(0x101000, PAGE, 0));
	say("v1, unmap the end", unmap(0x103000, PAGE, 0));
	say("v1, unmap from the middle on, and what follows", unmap(0x102000, 4 * PAGE, 0));
	say("v1, unmap from the gap on", unmap(0x106000, 3 * PAGE, 0));
	say("v1, unmap the first page", unmap(0x100000, PAGE, 0));
	say("v1, unmap what was there", unmap(0x101000, 3 * PAGE, 0));
	say("v1, unmap the first page of the next", unmap(0x103000, 2 * PAGE, 0));
	say("v1, map for unmap all", map(0x100000, memory, PAGE, rw));
	say("v1, unmap all", unmap(0, 0, VFIO_DMA_UNMAP_FLAG_ALL));
}

/* Where the width of the IOMMU shows. */
static void width(void)
{
	const uint32_t rw = VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE;
	info();
	for (int bits = 38; bits < 58; bits++) {
		char what[32];
		snprintf(what, sizeof what, "map at 2^%d", bits);
		if (!say(what, map(1ull << bits, memory, PAGE, rw))) unmap(1ull << bits, PAGE, 0);
		snprintf(what, sizeof what, "map below 2^%d", bits);
		if (!say(what, map((1ull << bits) - PAGE, memory, PAGE, rw))) unmap((1ull << bits) - PAGE, PAGE, 0);
		snprintf(what, sizeof what, "map across 2^%d", bits);
		if (!say(what, map((1ull << bits) - PAGE, memory, 2 * PAGE, rw))) unmap((1ull << bits) - PAGE, 2 * PAGE, 0);
	}
}

static void limits(void)
{
	const uint32_t rw = VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE;
	struct rlimit two = { 2 * PAGE, 2 * PAGE };
	if (setrlimit(RLIMIT_MEMLOCK, &two) || setresuid(1, 1, 1)) perror("limits");
	say("locked, within the limit", map(0x100000, memory, 2 * PAGE, rw));
	say("locked, one page more", map(0x200000, memory + 2 * PAGE, PAGE, rw));
	say("locked, the same page", map(0x200000, memory, PAGE, rw));
	say("locked, unmap", unmap(0x100000, 2 * PAGE, 0));
	say("locked, again", map(0x200000, memory, PAGE, rw));
	say("locked, the end", unmap(0x200000, PAGE, 0));
}

static int irqs(uint32_t index, uint32_t start, uint32_t count, uint32_t flags, const int *fds, uint32_t argsz)
{
	char space[sizeof(struct vfio_irq_set) + 64] = { 0 };
	struct vfio_irq_set *set = (void *)space;
	*set = (struct vfio_irq_set){ .argsz = argsz, .flags = flags, .index = index, .start = start, .count = count };
	if (fds) memcpy(set->data, fds, 4 * count);
	return ioctl(device, VFIO_DEVICE_SET_IRQS, set);
}

#define CONFIG ((off_t)7 << 40)
static int capability(uint8_t id)
{
	uint8_t at = 0, head[2];
	if (pread(device, &at, 1, CONFIG + 0x34) != 1) return -1;
	for (int n = 0; at && n < 48; n++, at = head[1]) {
		if (pread(device, head, 2, CONFIG + at) != 2) return -1;
		if (head[0] == id) return at;
	}
	return -1;
}
static int msix_enable(void)
{
	uint16_t control;
	int at = capability(0x11);
	return at < 0 || pread(device, &control, 2, CONFIG + at + 2) != 2 ? -1 : control >> 15;
}

static void devices(void)
{
	struct vfio_device_info d = { .argsz = 15 };
	say("device info, argsz too small", ioctl(device, VFIO_DEVICE_GET_INFO, &d));
	d.argsz = sizeof d;
	say("device info", ioctl(device, VFIO_DEVICE_GET_INFO, &d));
	printf("device: flags %x, %u regions, %u kinds of interrupts\n", d.flags & 3, d.num_regions, d.num_irqs);
	for (uint32_t n = 0; n < 10; n++) {
		char what[32];
		union { struct vfio_region_info info; char bytes[256]; } r = { .info = { .argsz = 32, .index = n } };
		snprintf(what, sizeof what, "region %u", n);
		/* The size of BARs, and ROMs, are the device's. */
		if (!say(what, ioctl(device, VFIO_DEVICE_GET_REGION_INFO, &r)) && (n == 0 || n == 7))
			printf("region %u: flags %x, at %llx, has a size %d\n", n, r.info.flags & 7, r.info.offset, r.info.size > 0);
	}
	struct vfio_region_info less = { .argsz = 31 };
	say("region, argsz too small", ioctl(device, VFIO_DEVICE_GET_REGION_INFO, &less));
	for (uint32_t n = 0; n < 6; n++) {
		char what[32];
		struct vfio_irq_info i = { .argsz = sizeof i, .index = n };
		snprintf(what, sizeof what, "interrupts %u", n);
		if (!say(what, ioctl(device, VFIO_DEVICE_GET_IRQ_INFO, &i)) && n != 1) printf("interrupts %u: flags %x, some %d\n", n, i.flags & 7, i.count > 0);
	}
	const uint32_t event = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER, none = VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_ACTION_TRIGGER;
	int fds[2] = { eventfd(0, EFD_NONBLOCK), eventfd(0, EFD_NONBLOCK) }, file = open("/proc/self/exe", O_RDONLY), bad[2] = { fds[0], 999 };
	uint64_t n;
	say("irqs, argsz too small", irqs(2, 0, 1, event, fds, 19));
	say("irqs, no room for data", irqs(2, 0, 2, event, fds, 24));
	say("irqs, an unknown kind", irqs(9, 0, 1, event, fds, 24));
	say("irqs, two kinds of data", irqs(2, 0, 1, event | VFIO_IRQ_SET_DATA_NONE, fds, 24));
	say("irqs, unknown flags", irqs(2, 0, 1, event | 1 << 9, fds, 24));
	say("irqs, too many", irqs(2, 4000, 1, event, fds, 24));
	say("irqs, a wrapping count", irqs(2, 1, ~0u, none, NULL, 20));
	say("irqs, no eventfd", irqs(2, 0, 1, event, &file, 24));
	say("irqs, a bad descriptor", irqs(2, 0, 2, event, bad, 28));
	say("irqs, MSI-X off, without any", irqs(2, 0, 0, none, NULL, 20));
	say("irqs, INTx off, without it", irqs(0, 0, 0, none, NULL, 20));
	say("irqs, MSI-X is enabled", msix_enable());
	say("irqs, two of MSI-X", irqs(2, 0, 2, event, fds, 28));
	say("irqs, MSI-X is enabled", msix_enable());
	say("irqs, INTx beside MSI-X", irqs(0, 0, 1, event, fds, 24));
	say("irqs, a trigger without data", irqs(2, 1, 1, none, NULL, 20));
	say("irqs, it arrived", read(fds[1], &n, 8));
	say("irqs, mask MSI-X", irqs(2, 0, 1, VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_ACTION_MASK, NULL, 20));
	say("irqs, off", irqs(2, 0, 0, none, NULL, 20));
	say("irqs, a trigger of none", irqs(2, 0, 1, none, NULL, 20));
	say("irqs, INTx", irqs(0, 0, 1, event, fds, 24));
	say("irqs, mask INTx", irqs(0, 0, 1, VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_ACTION_MASK, NULL, 20));
	say("irqs, unmask INTx", irqs(0, 0, 1, VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_ACTION_UNMASK, NULL, 20));
	say("irqs, INTx off", irqs(0, 0, 0, none, NULL, 20));
	say("irqs, MSI-X is enabled", msix_enable());
	say("irqs, the request", irqs(4, 0, 1, event, fds, 24));
	say("irqs, a trigger of the request", irqs(4, 0, 1, none, NULL, 20));
	say("irqs, it arrived", read(fds[0], &n, 8));
	say("irqs, no request", irqs(4, 0, 1, event, &(int){ -1 }, 24));
	say("irqs, the request has descriptor -2", irqs(4, 0, 1, event, &(int){ -2 }, 24));
	say("irqs, INTx has descriptor -2", irqs(0, 0, 1, event, &(int){ -2 }, 24));
	say("irqs, INTx off", irqs(0, 0, 0, none, NULL, 20));
	say("irqs, MSI-X has descriptor -2", irqs(2, 0, 1, event, &(int){ -2 }, 24));
	say("irqs, an eventfd more", irqs(2, 1, 1, event, fds, 24));
	say("irqs, none more", irqs(2, 0, 0, event, NULL, 20));
	say("irqs, a trigger beyond them", irqs(2, 2, 1, none, NULL, 20));
	say("irqs, MSI-X off", irqs(2, 0, 0, none, NULL, 20));
	say("reset", ioctl(device, VFIO_DEVICE_RESET));
	say("an unknown request", ioctl(device, _IO(';', 0xfe)));

	const off_t config = CONFIG;
	uint32_t value = 0;
	uint16_t command;
	say("config, read", pread(device, &value, 4, config + 8));
	printf("config: class %06x\n", value >> 8);
	say("config, write what is constant", pwrite(device, "\0\0\0\0", 4, config + 8));
	say("config, read", pread(device, &value, 4, config + 8));
	printf("config: class %06x\n", value >> 8);
	say("config, beyond its end", pread(device, &value, 4, config + 4096));
	static uint8_t all[4097];
	say("config, across its end", pread(device, all, 8, config + 4092));
	say("config, to its end", pread(device, all, 8, config + 4088));
	say("config, all of it", pread(device, all, 4096, config));
	say("config, more than all", pread(device, all, 4097, config));
	say("config, write across its end", pwrite(device, all, 8, config + 4092));
	say("config, nothing", pread(device, all, 0, config));
	say("config, write nothing", pwrite(device, all, 0, config));
	say("config, nothing at its end", pread(device, all, 0, config + 4096));
	say("config, three bytes", pread(device, all, 3, config + 1));
	say("config, a bad buffer", pread(device, bad_pointer, 4, config));
	say("config, the command", pread(device, &command, 2, config + 4));
	printf("config: memory decoding %d, bus mastering %d\n", !!(command & 2), !!(command & 4));
	command |= 4;
	say("config, bus mastering", pwrite(device, &command, 2, config + 4));
	say("config, the command", pread(device, &command, 2, config + 4));
	printf("config: bus mastering %d\n", !!(command & 4));
	uint32_t ones = ~0u, old;
	say("config, BAR 0", pread(device, &old, 4, config + 0x10));
	say("config, all ones", pwrite(device, &ones, 4, config + 0x10));
	say("config, its size", pread(device, &value, 4, config + 0x10));
	printf("config: the size is a power of two %d, its type %x\n", !((~(value & ~15u) + 1) & ~(value & ~15u)), value & 15);
	say("config, back", pwrite(device, &old, 4, config + 0x10));
	say("a region that does not exist", pread(device, &value, 4, (off_t)8 << 40));
}

static int msi_enable(void)
{
	uint16_t control;
	int at = capability(5);
	return at < 0 || pread(device, &control, 2, CONFIG + at + 2) != 2 ? -1 : control & 1;
}
static int set_msi_enable(void)
{
	uint16_t control;
	int at = capability(5);
	if (at < 0 || pread(device, &control, 2, CONFIG + at + 2) != 2) return -1;
	control |= 1;
	return pwrite(device, &control, 2, CONFIG + at + 2);
}
/* Message-signalled interrupts without a table: of a device that has several. */
static void messages(void)
{
	const uint32_t event = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER, none = VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_ACTION_TRIGGER;
	const uint32_t flag = VFIO_IRQ_SET_DATA_BOOL | VFIO_IRQ_SET_ACTION_TRIGGER;
	int fds[4], file = open("/proc/self/exe", O_RDONLY);
	uint64_t n;
	for (int i = 0; i < 4; i++) fds[i] = eventfd(0, EFD_NONBLOCK);
	struct vfio_irq_info i = { .argsz = sizeof i, .index = 1 };
	say("messages", ioctl(device, VFIO_DEVICE_GET_IRQ_INFO, &i));
	printf("messages: flags %x, several %d, a power of two %d\n", i.flags, i.count > 3, i.count && !(i.count & (i.count - 1)));
	say("enabled", msi_enable());
	say("a trigger of none", irqs(1, 0, 1, none, NULL, 20));
	say("off, without any", irqs(1, 0, 0, none, NULL, 20));
	say("too many", irqs(1, i.count, 1, event, fds, 24));
	say("no eventfd", irqs(1, 0, 1, event, &file, 24));
	say("enabled", msi_enable());
	say("two", irqs(1, 0, 2, event, fds, 28));
	say("enabled", msi_enable());
	say("trigger the second", irqs(1, 1, 1, none, NULL, 20));
	say("the first", read(fds[0], &n, 8));
	say("the second", read(fds[1], &n, 8));
	say("trigger both", irqs(1, 0, 2, none, NULL, 20));
	say("the first", read(fds[0], &n, 8));
	say("the second", read(fds[1], &n, 8));
	char space[24] = { 0 };
	struct vfio_irq_set *set = (void *)space;
	*set = (struct vfio_irq_set){ .argsz = 22, .flags = flag, .index = 1, .count = 2 };
	set->data[1] = 1;
	say("trigger the second, by a flag", ioctl(device, VFIO_DEVICE_SET_IRQS, set));
	say("the first", read(fds[0], &n, 8));
	say("the second", read(fds[1], &n, 8));
	say("a third", irqs(1, 2, 1, event, fds + 2, 24));
	say("two of which one is more", irqs(1, 1, 2, event, fds + 1, 28));
	say("trigger the second", irqs(1, 1, 1, none, NULL, 20));
	say("the second", read(fds[1], &n, 8));
	say("trigger a third", irqs(1, 2, 1, none, NULL, 20));
	say("another for the second", irqs(1, 1, 1, event, fds + 3, 24));
	say("trigger the second", irqs(1, 1, 1, none, NULL, 20));
	say("the old one", read(fds[1], &n, 8));
	say("the new one", read(fds[3], &n, 8));
	say("none for the second", irqs(1, 1, 1, event, &(int){ -1 }, 24));
	say("trigger the second", irqs(1, 1, 1, none, NULL, 20));
	say("the new one", read(fds[3], &n, 8));
	say("descriptor -2", irqs(1, 1, 1, event, &(int){ -2 }, 24));
	say("mask", irqs(1, 0, 1, VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_ACTION_MASK, NULL, 20));
	say("unmask", irqs(1, 0, 1, VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_ACTION_UNMASK, NULL, 20));
	say("INTx beside", irqs(0, 0, 1, event, fds, 24));
	say("INTx off beside", irqs(0, 0, 0, none, NULL, 20));
	say("off", irqs(1, 0, 0, none, NULL, 20));
	say("enabled", msi_enable());
	say("four", irqs(1, 0, 4, event, fds, 36));
	say("trigger the fourth", irqs(1, 3, 1, none, NULL, 20));
	say("the fourth", read(fds[3], &n, 8));
	say("off", irqs(1, 0, 0, none, NULL, 20));
	say("the fourth alone", irqs(1, 3, 1, event, fds + 3, 24));
	say("trigger the fourth", irqs(1, 3, 1, none, NULL, 20));
	say("the fourth", read(fds[3], &n, 8));
	say("trigger the first", irqs(1, 0, 1, none, NULL, 20));
	say("off", irqs(1, 0, 0, none, NULL, 20));
	say("two, of which the second is no eventfd", irqs(1, 0, 2, event, (int[]){ fds[0], file }, 28));
	say("enabled", msi_enable());
	say("none of both", irqs(1, 0, 2, event, (int[]){ -1, -1 }, 28));
	say("enabled", msi_enable());
	say("enable in configuration space", set_msi_enable());
	say("enabled", msi_enable());
	say("off", irqs(1, 0, 0, none, NULL, 20));
	say("enabled", msi_enable());
	say("enable in configuration space", set_msi_enable());
	say("enabled", msi_enable());
	say("no eventfds, while all is off", irqs(1, 0, 0, event, NULL, 20));
}

/* What the descriptor has of the caller's flags. */
static void flags(const char *what, int fd)
{
	int status = fcntl(fd, F_GETFL);
	printf("%s: close on exec %d, mode %d, nonblocking %d\n", what, fcntl(fd, F_GETFD) & FD_CLOEXEC, status & O_ACCMODE, !!(status & O_NONBLOCK));
}
/* Each open has its own file description: what is set of one is not seen of another. */
static void opens(const char *path)
{
	int first = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK), second = open(path, O_RDWR);
	flags("the first open", first);
	flags("the second open", second);
	fcntl(second, F_SETFL, O_RDWR | O_NONBLOCK);
	fcntl(first, F_SETFL, O_RDWR);
	flags("the first open, changed", first);
	flags("the second open, changed", second);
	close(first);
	close(second);
}

static void extensions(const char *when)
{
	for (int n = 0; n < 12; n++) {
		char what[48];
		snprintf(what, sizeof what, "extension %d %s", n, when);
		say(what, ioctl(container, VFIO_CHECK_EXTENSION, n));
	}
}
static int type1(void)
{
	char path[32];
	int second, number = group_number();
	struct vfio_group_status status = { .argsz = 7 };
	snprintf(path, sizeof path, "/dev/vfio/%d", number);
	opens("/dev/vfio/vfio");
	container = say_fd("open the container", open("/dev/vfio/vfio", O_RDWR));
	say("version", ioctl(container, VFIO_GET_API_VERSION));
	extensions("without a group");
	say("set without a group", ioctl(container, VFIO_SET_IOMMU, VFIO_TYPE1v2_IOMMU));
	say("info without an IOMMU", ioctl(container, VFIO_IOMMU_GET_INFO, NULL));
	group = say_fd("open the group", open(path, O_RDWR));
	say_fd("open it twice", open(path, O_RDWR));
	say("status, argsz too small", ioctl(group, VFIO_GROUP_GET_STATUS, &status));
	status.argsz = sizeof status;
	say("status", ioctl(group, VFIO_GROUP_GET_STATUS, &status));
	printf("status: %x\n", status.flags);
	say_fd("a device without a container", ioctl(group, VFIO_GROUP_GET_DEVICE_FD, bdf));
	say("unset without a container", ioctl(group, VFIO_GROUP_UNSET_CONTAINER));
	second = -1;
	say("set container -1", ioctl(group, VFIO_GROUP_SET_CONTAINER, &second));
	second = 999;
	say("set container 999", ioctl(group, VFIO_GROUP_SET_CONTAINER, &second));
	say("set the group as a container", ioctl(group, VFIO_GROUP_SET_CONTAINER, &group));
	say("set container, a bad pointer", ioctl(group, VFIO_GROUP_SET_CONTAINER, 8));
	say("set container", ioctl(group, VFIO_GROUP_SET_CONTAINER, &container));
	say("set container twice", ioctl(group, VFIO_GROUP_SET_CONTAINER, &container));
	extensions("with a group");
	say("status", ioctl(group, VFIO_GROUP_GET_STATUS, &status));
	printf("status: %x\n", status.flags);
	say_fd("a device without an IOMMU", ioctl(group, VFIO_GROUP_GET_DEVICE_FD, bdf));
	say("set an unknown IOMMU", ioctl(container, VFIO_SET_IOMMU, 99));
	say("set the IOMMU of nested domains", ioctl(container, VFIO_SET_IOMMU, 6));
	say("set the IOMMU", ioctl(container, VFIO_SET_IOMMU, VFIO_TYPE1v2_IOMMU));
	say("set it twice", ioctl(container, VFIO_SET_IOMMU, VFIO_TYPE1v2_IOMMU));
	extensions("with an IOMMU");
	say_fd("a device of another name", ioctl(group, VFIO_GROUP_GET_DEVICE_FD, "0000:7f:00.0"));
	say_fd("a name at a bad pointer", ioctl(group, VFIO_GROUP_GET_DEVICE_FD, 8));
	device = say_fd("the device", ioctl(group, VFIO_GROUP_GET_DEVICE_FD, bdf));
	flags("the device", device);
	say("unset with a device", ioctl(group, VFIO_GROUP_UNSET_CONTAINER));
	say("an unknown request of a container", ioctl(container, _IO(';', 0xfe)));
	say("an unknown request of a group", ioctl(group, _IO(';', 0xfe)));
	info();
	maps();
	devices();
	close(device);
	say("unset", ioctl(group, VFIO_GROUP_UNSET_CONTAINER));
	say("set container again", ioctl(group, VFIO_GROUP_SET_CONTAINER, &container));
	say("set version 1", ioctl(container, VFIO_SET_IOMMU, VFIO_TYPE1_IOMMU));
	version_1();
	say("unset", ioctl(group, VFIO_GROUP_UNSET_CONTAINER));
	say("set container again", ioctl(group, VFIO_GROUP_SET_CONTAINER, &container));
	say("set version 2", ioctl(container, VFIO_SET_IOMMU, VFIO_TYPE1v2_IOMMU));
	limits();
	say("unset", ioctl(group, VFIO_GROUP_UNSET_CONTAINER));
	say("map without an IOMMU", map(0x100000, memory, PAGE, 3));
	close(group);
	group = say_fd("open the group again", open(path, O_RDWR));
	return 0;
}

/* A device of a container of type 1, for what needs no more. */
static int with_device(void (*run)(void))
{
	char path[32];
	snprintf(path, sizeof path, "/dev/vfio/%d", group_number());
	container = open("/dev/vfio/vfio", O_RDWR);
	group = open(path, O_RDWR);
	say("set container", ioctl(group, VFIO_GROUP_SET_CONTAINER, &container));
	say("set the IOMMU", ioctl(container, VFIO_SET_IOMMU, VFIO_TYPE1v2_IOMMU));
	device = say_fd("the device", ioctl(group, VFIO_GROUP_GET_DEVICE_FD, bdf));
	run();
	return 0;
}

/* linux/iommufd.h, which Debian 12's headers do not have in full. */
#define IOMMU(n) _IO(';', 0x80 + (n))
struct alloc { uint32_t size, flags, id; };
struct destroy { uint32_t size, id; };
struct ranges { uint32_t size, id, count, reserved; uint64_t at, alignment; };
struct ioas_map { uint32_t size, flags, id, reserved; uint64_t va, len, iova; };
struct ioas_copy { uint32_t size, flags, to, from; uint64_t len, to_iova, from_iova; };
struct ioas_unmap { uint32_t size, id; uint64_t iova, len; };
struct bind { uint32_t argsz, flags; int32_t iommufd; uint32_t id; };
struct attach { uint32_t argsz, flags, id; };

static uint32_t ioas;
static int imap(uint32_t id, uint32_t flags, void *at, uint64_t len, uint64_t iova)
{
	return ioctl(iommufd, IOMMU(5), &(struct ioas_map){ sizeof(struct ioas_map), flags, id, 0, (uintptr_t)at, len, iova });
}
static long iunmap(uint32_t id, uint64_t iova, uint64_t len)
{
	struct ioas_unmap u = { sizeof u, id, iova, len };
	int answer = ioctl(iommufd, IOMMU(6), &u);
	return answer < 0 ? answer : (long)u.len;
}
static void iranges(const char *what, uint32_t room)
{
	struct { uint64_t first, last; } list[8] = { 0 };
	struct ranges r = { sizeof r, ioas, room, 0, (uintptr_t)list, 0 };
	long answer = say(what, ioctl(iommufd, IOMMU(4), &r));
	printf("ranges: %u, alignment %llu:", r.count, (unsigned long long)r.alignment);
	for (uint32_t n = 0; !answer && n < r.count; n++) printf(" %llx-%llx", (unsigned long long)list[n].first, (unsigned long long)list[n].last);
	printf("\n");
}

/* Pages count once that are in several places by copies, and again where they are mapped again. */
static void ilimits(void)
{
	struct rlimit two = { 2 * PAGE, 2 * PAGE };
	struct ioas_copy c = { sizeof c, 7, ioas, ioas, PAGE, 0x400000, 0x100000 };
	struct alloc a = { sizeof a, 0, 0 };
	if (setrlimit(RLIMIT_MEMLOCK, &two) || setresuid(1, 1, 1)) perror("limits");
	say("locked, within the limit", imap(ioas, 7, memory, 2 * PAGE, 0x100000));
	say("locked, one page more", imap(ioas, 7, memory + 2 * PAGE, PAGE, 0x200000));
	say("locked, the same page", imap(ioas, 7, memory, PAGE, 0x200000));
	say("locked, unmap", iunmap(ioas, 0x100000, 2 * PAGE));
	say("locked, a page", imap(ioas, 7, memory, PAGE, 0x100000));
	say("locked, its copy", ioctl(iommufd, IOMMU(3), &c));
	say("locked, the same page again", imap(ioas, 7, memory, PAGE, 0x200000));
	say("locked, a third", imap(ioas, 7, memory + PAGE, PAGE, 0x300000));
	say("locked, unmap the page", iunmap(ioas, 0x100000, PAGE));
	say("locked, a page beside its copy", imap(ioas, 7, memory, PAGE, 0x100000));
	say("locked, unmap the copy", iunmap(ioas, 0x400000, PAGE));
	say("locked, a page in its place", imap(ioas, 7, memory, PAGE, 0x100000));
	say("locked, another space", ioctl(iommufd, IOMMU(1), &a));
	say("locked, three pages without a device", imap(a.id, 7, memory, 3 * PAGE, 0x100000));
	say("locked, attach to them", ioctl(device, _IO(';', 119), &(struct attach){ sizeof(struct attach), 0, a.id }));
	say("locked, nothing in the device's", iunmap(ioas, 0, ~0ull));
	say("locked, attach to them", ioctl(device, _IO(';', 119), &(struct attach){ sizeof(struct attach), 0, a.id }));
	say("locked, two pages are in the device's", imap(ioas, 7, memory, 2 * PAGE, 0x100000));
	say("locked, they are destroyed", ioctl(iommufd, IOMMU(0), &(struct destroy){ 8, a.id }));
	say("locked, the end", iunmap(ioas, 0, ~0ull));
}

static int iommufds(const char *node)
{
	struct alloc a = { 11, 0, 0 };
	struct { struct alloc a; uint32_t more; } long_one = { { sizeof long_one, 0, 0 }, 0 };
	opens("/dev/iommu");
	iommufd = say_fd("open iommufd", open("/dev/iommu", O_RDWR));
	say("alloc, size too small", ioctl(iommufd, IOMMU(1), &a));
	a = (struct alloc){ sizeof a, 1, 0 };
	say("alloc, unknown flags", ioctl(iommufd, IOMMU(1), &a));
	say("alloc, a bad pointer", ioctl(iommufd, IOMMU(1), 8));
	say("alloc, a longer structure", ioctl(iommufd, IOMMU(1), &long_one));
	long_one.more = 7;
	say("alloc, an unknown field", ioctl(iommufd, IOMMU(1), &long_one));
	a = (struct alloc){ sizeof a, 0, 0 };
	say("alloc", ioctl(iommufd, IOMMU(1), &a));
	ioas = a.id;
	say("an unknown request", ioctl(iommufd, _IO(';', 0xfe)));
	iranges("ranges without a device", 8);
	opens(node);
	/* A container's and an iommufd's have one mode under check. */
	device = open(node, O_RDONLY);
	flags("the device, to read", device);
	say("map BAR 0 to write", mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, device, 0) == MAP_FAILED ? -1 : 0);
	close(device);
	device = say_fd("open the device", open(node, O_RDWR));
	struct vfio_device_info d = { .argsz = sizeof d };
	say("device info before the bind", ioctl(device, VFIO_DEVICE_GET_INFO, &d));
	uint32_t value;
	say("config before the bind", pread(device, &value, 4, (off_t)7 << 40));
	struct attach at = { sizeof at, 0, ioas };
	say("attach before the bind", ioctl(device, _IO(';', 119), &at));
	struct bind b = { 15, 0, iommufd, 0 };
	say("bind, argsz too small", ioctl(device, _IO(';', 118), &b));
	b = (struct bind){ sizeof b, 0, 999, 0 };
	say("bind to a bad descriptor", ioctl(device, _IO(';', 118), &b));
	b = (struct bind){ sizeof b, 8, iommufd, 0 };
	say("bind with flags", ioctl(device, _IO(';', 118), &b));
	b = (struct bind){ sizeof b, 0, device, 0 };
	say("bind to itself", ioctl(device, _IO(';', 118), &b));
	b = (struct bind){ sizeof b, 0, iommufd, 0 };
	say("bind", ioctl(device, _IO(';', 118), &b));
	say("bind twice", ioctl(device, _IO(';', 118), &b));
	at.id = 999;
	say("attach to nothing", ioctl(device, _IO(';', 119), &at));
	at = (struct attach){ sizeof at, 0, ioas };
	say("attach", ioctl(device, _IO(';', 119), &at));
	say("destroy what is used", ioctl(iommufd, IOMMU(0), &(struct destroy){ 8, ioas }));
	say("destroy nothing", ioctl(iommufd, IOMMU(0), &(struct destroy){ 8, 999 }));
	iranges("ranges", 8);
	iranges("ranges, no room", 0);

	void *constant = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	say("map, unknown flags", imap(ioas, 7 | 1 << 9, memory, PAGE, 0x100000));
	say("map, no direction", imap(ioas, 1, memory, PAGE, 0x100000));
	say("map, no such space", imap(999, 7, memory, PAGE, 0x100000));
	say("map, length 0", imap(ioas, 7, memory, 0, 0x100000));
	say("map, an odd length", imap(ioas, 7, memory, 100, 0x100000));
	say("map, an odd iova", imap(ioas, 7, memory, PAGE, 0x100100));
	say("map, a wrapping iova", imap(ioas, 7, memory, 2 * PAGE, ~0xfffull));
	say("map, a wrapping address", imap(ioas, 7, (void *)~0xfffull, 2 * PAGE, 0x100000));
	say("map, nothing there", imap(ioas, 7, (void *)0x10000, PAGE, 0x100000));
	say("map, constant memory to write", imap(ioas, 7, constant, PAGE, 0x100000));
	say("map, the window of interrupts", imap(ioas, 7, memory, PAGE, 0xfee00000));
	say("map, beyond the width", imap(ioas, 7, memory, PAGE, 1ull << 60));
	say("map four pages", imap(ioas, 7, memory, 4 * PAGE, 0x100000));
	say("map the same", imap(ioas, 7, memory, 4 * PAGE, 0x100000));
	say("map across its end", imap(ioas, 7, memory, 2 * PAGE, 0x103000));
	say("map behind it", imap(ioas, 7, memory, 2 * PAGE, 0x104000));
	struct ioas_copy c = { sizeof c, 7, ioas, ioas, 2 * PAGE, 0x300000, 0x101000 };
	say("copy a part", ioctl(iommufd, IOMMU(3), &c));
	say("copy to the same place", ioctl(iommufd, IOMMU(3), &c));
	c.from_iova = 0x900000;
	c.to_iova = 0x400000;
	say("copy nothing", ioctl(iommufd, IOMMU(3), &c));
	say("unmap the copy", iunmap(ioas, 0x300000, 2 * PAGE));
	say("unmap, the first of four", iunmap(ioas, 0x100000, PAGE));
	say("unmap, the last of four", iunmap(ioas, 0x103000, PAGE));
	say("unmap, nothing", iunmap(ioas, 0x800000, PAGE));
	say("unmap, length 0", iunmap(ioas, 0x100000, 0));
	say("unmap, wrapping", iunmap(ioas, ~0xfffull, 2 * PAGE));
	say("unmap two at once", iunmap(ioas, 0x100000, 6 * PAGE));
	say("unmap all of nothing", iunmap(ioas, 0, ~0ull));
	say("map for all", imap(ioas, 7, memory, PAGE, 0x100000));
	say("unmap all", iunmap(ioas, 0, ~0ull));
	devices();
	ilimits();
	say("detach", ioctl(device, _IO(';', 120), &(struct destroy){ 8, 0 }));
	say("destroy", ioctl(iommufd, IOMMU(0), &(struct destroy){ 8, ioas }));
	return 0;
}

int main(int argc, char **argv)
{
	char node[64] = "/dev/vfio/devices/vfio0";
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc > 2) bdf = argv[2];
	memory = mmap(NULL, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	memset(memory, 1, 16 * PAGE);
	if (argc > 1 && !strcmp(argv[1], "iommufd")) return iommufds(node);
	if (argc > 1 && !strcmp(argv[1], "msi")) return with_device(messages);
	return argc > 1 && !strcmp(argv[1], "width") ? with_device(width) : type1();
}
