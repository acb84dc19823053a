/* virtio NAME [clean [BDF NODE]]: a small virtio-blk driver over VFIO type 1, polled, with one queue, which plants
 * the fault that `pinfold check` reports as NAME, or does the same right. */
#include "driver.h"

static int wrong;

#define SIZE 16
#define VIRTIO_OK 0
enum { RINGS, HEADERS, STATUS }; /* pages; from FREE on they are the test's */
enum { READ = 0, WRITE = 1, FLUSH = 4, GET_ID = 8 };
enum { NEXT = 1, DEVICE_WRITES = 2 };
#define FEATURES (1ull << 9 | 1ull << 32 | 1ull << 33)

struct desc { uint64_t addr; uint32_t len; uint16_t flags, next; };
struct header { uint32_t kind, reserved; uint64_t sector; };
static volatile struct desc *desc;
static volatile uint16_t *avail, *used; /* flags, index, ring */
static uint16_t submitted, seen;
static uint32_t common, notify; /* in BAR 4 and BAR 0 */

static void config_read(int at, void *to, size_t len)
{
	CHECK(pread(device, to, len, ((off_t)VFIO_PCI_CONFIG_REGION_INDEX << 40) + at) == (ssize_t)len);
}
static uint64_t get(uint32_t at, size_t len)
{
	uint64_t value = 0;
	CHECK(pread(device, &value, len, (4ll << 40) + common + at) == (ssize_t)len);
	return value;
}
static void put(uint32_t at, uint64_t value, size_t len)
{
	CHECK(pwrite(device, &value, len, (4ll << 40) + common + at) == (ssize_t)len);
}

static void find_structures(void)
{
	uint8_t at, cap[20], found = 0;
	config_read(0x34, &at, 1);
	while (at) {
		config_read(at, cap, sizeof cap);
		uint32_t offset;
		memcpy(&offset, cap + 8, 4);
		if (cap[0] == 9 && cap[3] == 1) { CHECK(cap[4] == 4); common = offset; found |= 1; }
		if (cap[0] == 9 && cap[3] == 2) { CHECK(cap[4] == 0); notify = offset; found |= 2; }
		at = cap[1];
	}
	CHECK(found == 3);
}
static void status(uint8_t value) { put(0x14, value, 1); }
static void reset(void) { status(0); while (get(0x14, 1)) usleep(10); }

/* Up to FEATURES_OK. */
static void negotiate(uint64_t features)
{
	reset();
	status(1);
	status(3);
	for (int half = 0; half < 2; half++) {
		put(0x08, half, 4);
		put(0x0c, features >> 32 * half & 0xffffffff, 4);
	}
	status(11);
}
/* The queue, up to its enabling. */
static void set_queue(uint16_t size)
{
	memset(BUF(RINGS), 0, PAGE);
	desc = (void *)BUF(RINGS);
	avail = (void *)(BUF(RINGS) + 1024);
	used = (void *)(BUF(RINGS) + 2048);
	submitted = seen = 0;
	put(0x16, 0, 2);
	put(0x18, size, 2);
	put(0x20, AT(RINGS), 4);
	put(0x24, 0, 4);
	put(0x28, AT(RINGS) + 1024, 4);
	put(0x2c, 0, 4);
	put(0x30, AT(RINGS) + 2048, 4);
	put(0x34, 0, 4);
}
static void open_disk(void)
{
	open_device();
	CHECK(!map(0, FREE, BOTH));
	find_structures();
}
static void start_disk(void)
{
	open_disk();
	negotiate(FEATURES);
	CHECK(get(0x14, 1) == 11);
	set_queue(SIZE);
	put(0x1c, 1, 2);
	status(15);
}
static void stop_disk(void)
{
	reset();
	CHECK(!unmap(0, FREE));
}

static void ring_queue(int queue) { *(volatile uint16_t *)(bar + notify + 4 * queue) = queue; }
static void publish(uint16_t head)
{
	avail[2 + submitted % SIZE] = head;
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	avail[1] = ++submitted;
}
static void chain(int head, uint32_t kind, uint64_t sector, uint64_t data, uint32_t len)
{
	((struct header *)BUF(HEADERS))[head] = (struct header){ kind, 0, sector };
	BUF(STATUS)[head] = 0xff;
	desc[head] = (struct desc){ AT(HEADERS) + head * sizeof(struct header), sizeof(struct header), NEXT, len ? head + 1 : head + 2 };
	desc[head + 1] = (struct desc){ data, len, NEXT | (kind == WRITE ? 0 : DEVICE_WRITES), head + 2 };
	desc[head + 2] = (struct desc){ AT(STATUS) + head, 1, DEVICE_WRITES, 0 };
}
static void submit(int head, uint32_t kind, uint64_t sector, uint64_t data, uint32_t len)
{
	chain(head, kind, sector, data, len);
	publish(head);
	ring_queue(0);
}
/* Waits for one completion; returns its status. */
static int finish(void)
{
	for (int i = 0; used[1] == seen; i++) { CHECK(i < 6000000); usleep(10); }
	uint32_t head = *(volatile uint32_t *)(used + 2 + 4 * (seen++ % SIZE));
	return BUF(STATUS)[head];
}
static int request(uint32_t kind, uint64_t sector, int page, uint32_t len)
{
	submit(0, kind, sector, AT(page), len);
	return finish();
}

/* The device is late with every request. The rounds pause longer and longer: in one of them the request
 * was fetched before, and is not executed yet. */
#define EACH_ROUND(pause) for (int pause = 20000; pause <= 320000; pause *= 4)

static void plain(void)
{
	start_disk();
	CHECK(!map(FREE, 2, BOTH));
	for (int i = 0; i < 40; i++) {
		memset(BUF(FREE), i + 1, PAGE);
		CHECK(request(WRITE, i * 8, FREE, PAGE) == VIRTIO_OK && request(FLUSH, 0, FREE, 0) == VIRTIO_OK);
		CHECK(request(READ, i * 8, FREE + 1, PAGE) == VIRTIO_OK && !memcmp(BUF(FREE), BUF(FREE + 1), PAGE));
	}
	CHECK(request(GET_ID, 0, FREE, 20) == VIRTIO_OK && !strcmp((char *)BUF(FREE), "pinfold-model-disk"));
	/* A disk of 4 MiB. */
	uint64_t sectors;
	CHECK(pread(device, &sectors, 8, (4ll << 40) + 0x2000) == 8 && sectors == 8192);
	/* Without memory decoding there are no registers. */
	off_t at = ((off_t)VFIO_PCI_CONFIG_REGION_INDEX << 40) + 4;
	CHECK(pwrite(device, "\4", 1, at) == 1 && pread(device, &sectors, 8, (4ll << 40) + 0x2000) < 0 && errno == EIO);
	CHECK(pwrite(device, &sectors, 8, 4ll << 40) < 0 && errno == EIO && pwrite(device, "\6", 1, at) == 1);
	CHECK(!unmap(FREE, 2));
	stop_disk();
}
static void dma_unmapped(void)
{
	start_disk();
	if (!wrong) CHECK(!map(FREE, 1, BOTH));
	CHECK(request(READ, 0, FREE, PAGE) == (wrong ? 1 : 0));
	if (!wrong) CHECK(!unmap(FREE, 1));
	stop_disk();
}
static void dma_remapped(void)
{
	start_disk();
	CHECK(!map(FREE, 1, BOTH));
	EACH_ROUND(pause) {
		submit(0, READ, 0, AT(FREE), PAGE);
		if (!wrong) finish(); else usleep(pause);
		CHECK(!unmap(FREE, 1));
		CHECK(!map_at(AT(FREE), BUF(FREE + 1), PAGE, BOTH));
		if (wrong) finish();
	}
	CHECK(!unmap(FREE, 1));
	stop_disk();
}
static void unmap_in_flight(void)
{
	start_disk();
	EACH_ROUND(pause) {
		CHECK(!map(FREE, 1, BOTH));
		submit(0, READ, 0, AT(FREE), PAGE);
		if (!wrong) finish(); else usleep(pause);
		CHECK(!unmap(FREE, 1));
		if (wrong) finish();
	}
	stop_disk();
}
static void memory_gone(void)
{
	start_disk();
	CHECK(!map(FREE, 1, BOTH));
	if (wrong) munmap(BUF(FREE), PAGE);
	request(READ, 0, FREE, PAGE);
	CHECK(!unmap(FREE, 1));
	stop_disk();
}
static void overlapping_reads(void)
{
	start_disk();
	CHECK(!map(FREE, 2, BOTH));
	chain(0, READ, 0, AT(FREE), PAGE);
	chain(3, READ, 8, AT(wrong ? FREE : FREE + 1), PAGE);
	publish(0);
	publish(3);
	ring_queue(0);
	finish();
	finish();
	CHECK(!unmap(FREE, 2));
	stop_disk();
}
static void data_changed(void)
{
	start_disk();
	CHECK(!map(FREE, 1, BOTH));
	EACH_ROUND(pause) {
		submit(0, WRITE, 0, AT(FREE), PAGE);
		if (!wrong) finish(); else usleep(pause);
		BUF(FREE)[pause / 1000] ^= 1;
		if (wrong) finish();
	}
	CHECK(!unmap(FREE, 1));
	stop_disk();
}
static void entry_changed(void)
{
	start_disk();
	CHECK(!map(FREE, 2, BOTH));
	EACH_ROUND(pause) {
		submit(0, READ, 0, AT(FREE), PAGE);
		if (!wrong) finish(); else usleep(pause);
		desc[1].addr = AT(FREE + 1);
		if (wrong) finish();
	}
	CHECK(!unmap(FREE, 2));
	stop_disk();
}
static void dma_direction(void)
{
	start_disk();
	CHECK(!map(FREE, 1, wrong ? RAM_READ : RAM_WRITE));
	request(READ, 0, FREE, PAGE);
	CHECK(!unmap(FREE, 1));
	stop_disk();
}
static void command_id_twice(void)
{
	start_disk();
	CHECK(!map(FREE, 2, BOTH));
	chain(0, WRITE, 0, AT(FREE), PAGE);
	chain(3, WRITE, 8, AT(FREE + 1), PAGE);
	publish(0);
	publish(wrong ? 0 : 3);
	ring_queue(0);
	finish();
	finish();
	CHECK(!unmap(FREE, 2));
	stop_disk();
}
static void doorbell_queue(void)
{
	start_disk();
	if (wrong) ring_queue(1);
	/* The device looks at all notifications before it serves this. */
	CHECK(request(FLUSH, 0, FREE, 0) == VIRTIO_OK);
	stop_disk();
}
static void queue_unmapped(void)
{
	start_disk();
	if (wrong) { CHECK(!unmap(0, FREE)); reset(); }
	else stop_disk();
}
static void queue_limit(void)
{
	open_disk();
	negotiate(FEATURES);
	set_queue(wrong ? 12 : SIZE);
	put(0x1c, 1, 2);
	stop_disk();
}
static void queue_order(void)
{
	open_disk();
	if (wrong) { reset(); status(3); } else negotiate(FEATURES);
	set_queue(SIZE);
	put(0x1c, 1, 2);
	CHECK(get(0x1c, 2) == !wrong);
	stop_disk();
}
static void virtqueue(void)
{
	start_disk();
	CHECK(!map(FREE, 1, BOTH));
	chain(0, READ, 0, AT(FREE), PAGE);
	if (wrong) desc[1].next = SIZE;
	publish(0);
	ring_queue(0);
	if (wrong) for (int i = 0; !(get(0x14, 1) & 0x40); i++) { CHECK(i < 600000); usleep(100); }
	else finish();
	CHECK(!unmap(FREE, 1));
	stop_disk();
}
static void features(void)
{
	open_disk();
	/* Without VIRTIO_F_ACCESS_PLATFORM the device would use physical addresses. */
	negotiate(wrong ? FEATURES & ~(1ull << 33) : FEATURES);
	CHECK(get(0x14, 1) == (wrong ? 3 : 11));
	stop_disk();
}
static void lba_range(void)
{
	start_disk();
	CHECK(!map(FREE, 1, BOTH));
	CHECK(request(READ, wrong ? 8192 - 7 : 8192 - 8, FREE, PAGE) == wrong);
	CHECK(!unmap(FREE, 1));
	stop_disk();
}
static void command_field(void)
{
	start_disk();
	CHECK(!map(FREE, 1, BOTH));
	CHECK(request(READ, 0, FREE, wrong ? 100 : 512) == wrong);
	CHECK(!unmap(FREE, 1));
	stop_disk();
}
static void opcode(void)
{
	start_disk();
	CHECK(request(wrong ? 13 : FLUSH, 0, FREE, 0) == (wrong ? 2 : 0));
	stop_disk();
}
static void bus_master_off(void)
{
	start_disk();
	if (wrong) bus_master(0);
	submit(0, FLUSH, 0, 0, 0);
	if (wrong) for (int i = 0; !(get(0x14, 1) & 0x40); i++) { CHECK(i < 600000); usleep(100); }
	else finish();
	stop_disk();
}
static void interrupt_lost(void)
{
	char space[sizeof(struct vfio_irq_set) + 8];
	struct vfio_irq_set *irqs = (void *)space;
	*irqs = (struct vfio_irq_set){ .argsz = sizeof space, .index = VFIO_PCI_MSIX_IRQ_INDEX, .count = wrong ? 1 : 2,
		.flags = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER };
	int fds[2] = { eventfd(0, EFD_CLOEXEC), eventfd(0, EFD_CLOEXEC) };
	memcpy(irqs->data, fds, sizeof fds);
	open_disk();
	CHECK(!ioctl(device, VFIO_DEVICE_SET_IRQS, irqs));
	negotiate(FEATURES);
	set_queue(SIZE);
	put(0x1a, 1, 2); /* vector 1 */
	put(0x1c, 1, 2);
	status(15);
	CHECK(request(FLUSH, 0, FREE, 0) == VIRTIO_OK);
	if (!wrong) { uint64_t n; CHECK(read(fds[1], &n, 8) == 8 && n == 1); }
	/* The interrupt of the first follows its completion, and is before the second one. */
	CHECK(request(FLUSH, 0, FREE, 0) == VIRTIO_OK);
	stop_disk();
}
static void reset_in_flight(void)
{
	start_disk();
	CHECK(!map(FREE, 1, BOTH));
	EACH_ROUND(pause) {
		submit(0, READ, 0, AT(FREE), PAGE);
		if (!wrong) finish(); else usleep(pause);
		CHECK(!ioctl(device, VFIO_DEVICE_RESET));
		negotiate(FEATURES);
		set_queue(SIZE);
		put(0x1c, 1, 2);
		status(15);
	}
	CHECK(!unmap(FREE, 1));
	stop_disk();
}
/* Three requests are in flight at the moment that the program ends or stops the device. */
static void three_reads(void)
{
	start_disk();
	CHECK(!map(FREE, 3, BOTH));
	for (int i = 0; i < 3; i++) submit(4 * i, READ, 0, AT(FREE + i), PAGE);
	if (!wrong) for (int i = 0; i < 3; i++) finish();
}
static void disable_in_flight(void)
{
	three_reads();
	reset();
	CHECK(!unmap(FREE, 3) && !unmap(0, FREE));
}
static void reset_at_once(void)
{
	three_reads();
	CHECK(!ioctl(device, VFIO_DEVICE_RESET));
	CHECK(!unmap(FREE, 3) && !unmap(0, FREE));
}
static void close_in_flight(void)
{
	three_reads();
	munmap((void *)bar, 0x4000);
	close(device);
	CHECK(!unmap(FREE, 3) && !unmap(0, FREE));
}
/* The pin: masked when it is delivered, and its cause is read from the interrupt status. */
static void pin(void)
{
	char space[sizeof(struct vfio_irq_set) + 4];
	struct vfio_irq_set *irqs = (void *)space;
	*irqs = (struct vfio_irq_set){ .argsz = sizeof space, .index = VFIO_PCI_INTX_IRQ_INDEX, .count = 1,
		.flags = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER };
	int event = eventfd(0, EFD_CLOEXEC);
	uint64_t n;
	uint8_t isr;
	memcpy(irqs->data, &event, 4);
	start_disk();
	CHECK(!ioctl(device, VFIO_DEVICE_SET_IRQS, irqs));
	CHECK(request(FLUSH, 0, FREE, 0) == VIRTIO_OK);
	CHECK(read(event, &n, 8) == 8 && n == 1);
	CHECK(pread(device, &isr, 1, (4ll << 40) + 0x1000) == 1 && isr == 1);
	CHECK(pread(device, &isr, 1, (4ll << 40) + 0x1000) == 1 && isr == 0);
	/* BAR 4 ends, cannot be mapped, and has no MSI. */
	CHECK(pread(device, &isr, 1, (4ll << 40) + 0x4000) == -1 && errno == EINVAL);
	struct vfio_region_info region = { .argsz = sizeof region, .index = 4 };
	CHECK(!ioctl(device, VFIO_DEVICE_GET_REGION_INFO, &region));
	CHECK(region.size == 0x4000 && !(region.flags & VFIO_REGION_INFO_FLAG_MMAP));
	struct vfio_irq_info info = { .argsz = sizeof info, .index = VFIO_PCI_MSI_IRQ_INDEX };
	CHECK(!ioctl(device, VFIO_DEVICE_GET_IRQ_INFO, &info) && info.count == 0);
	stop_disk();
}

static const struct { const char *name; void (*run)(void); } FAULTS[] = {
	{ "plain", plain }, { "pin", pin }, { "dma-unmapped", dma_unmapped }, { "dma-remapped", dma_remapped },
	{ "unmap-in-flight", unmap_in_flight }, { "memory-gone", memory_gone }, { "overlapping-reads", overlapping_reads },
	{ "data-changed", data_changed }, { "entry-changed", entry_changed }, { "dma-direction", dma_direction },
	{ "command-id-twice", command_id_twice }, { "doorbell-queue", doorbell_queue }, { "queue-unmapped", queue_unmapped },
	{ "queue-limit", queue_limit }, { "queue-order", queue_order }, { "virtqueue", virtqueue }, { "features", features },
	{ "lba-range", lba_range }, { "command-field", command_field }, { "opcode", opcode },
	{ "bus-master-off", bus_master_off }, { "interrupt-lost", interrupt_lost }, { "reset-in-flight", reset_in_flight },
	{ "disable-in-flight", disable_in_flight }, { "reset-at-once", reset_at_once }, { "close-in-flight", close_in_flight },
};

int main(int argc, char **argv)
{
	wrong = argc == 2;
	if (argc == 5) { BDF = argv[3]; GROUP = argv[4]; }
	for (size_t i = 0; argc > 1 && i < sizeof FAULTS / sizeof *FAULTS; i++)
		if (!strcmp(FAULTS[i].name, argv[1])) { FAULTS[i].run(); return 0; }
	fprintf(stderr, "usage: virtio NAME [clean [BDF NODE]]\n");
	return 2;
}
