/* faults NAME [clean]: plants the fault that `pinfold check` reports as NAME, or does the same right. */
#include "driver.h"
#include <sys/syscall.h>

static int wrong;

/* Half of the tests need a command that takes a while: one in 16 does. The others are harmless. */
#define ROUNDS 48
static void pause_us(int us) { usleep(us); }

static void dma_unmapped(void)
{
	start(ENTRIES);
	if (!wrong) CHECK(!map(FREE, 1, BOTH));
	struct sqe c = read_to(1, FREE);
	run(&io, &c);
	if (!wrong) CHECK(!unmap(FREE, 1));
	stop();
}
/* Five findings of one kind that differ, and two that do not. */
static void repeated(void)
{
	start(ENTRIES);
	if (!wrong) CHECK(!map(FREE, 5, BOTH));
	for (int i = 0; i < 5; i++) { struct sqe c = read_to(i, FREE + i); run(&io, &c); }
	for (int i = 0; wrong && i < 2; i++) run(&io, &(struct sqe){ .opcode = 0x7e, .cid = 9, .nsid = 1 });
	if (!wrong) CHECK(!unmap(FREE, 5));
	stop();
}
static void dma_remapped(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 1, BOTH));
	for (int i = 0; i < ROUNDS; i++) {
		struct sqe c = read_to(i, FREE);
		queue(&io, &c);
		doorbell(&io);
		if (wrong) {
			pause_us(150);
			CHECK(!unmap(FREE, 1));
			CHECK(!map_at(AT(FREE), BUF(FREE + 1 + i % 2), PAGE, BOTH));
		}
		complete(&io, NULL);
		if (!wrong) {
			CHECK(!unmap(FREE, 1));
			CHECK(!map_at(AT(FREE), BUF(FREE + 1 + i % 2), PAGE, BOTH));
		}
	}
	CHECK(!unmap(FREE, 1));
	stop();
}
static void unmap_in_flight(void)
{
	start(ENTRIES);
	for (int i = 0; i < ROUNDS; i++) {
		CHECK(!map(FREE, 1, BOTH));
		struct sqe c = read_to(i, FREE);
		queue(&io, &c);
		doorbell(&io);
		if (wrong) { pause_us(150); CHECK(!unmap(FREE, 1)); }
		complete(&io, NULL);
		if (!wrong) CHECK(!unmap(FREE, 1));
	}
	stop();
}
static void memory_gone(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 1, BOTH));
	if (wrong) munmap(BUF(FREE), PAGE);
	struct sqe c = read_to(1, FREE);
	run(&io, &c);
	CHECK(!unmap(FREE, 1));
	stop();
}
/* With --watch-memory: memory that goes while it is mapped, and no access to it. */
static uint8_t *going;
static int going_fd;
static void goes(void (*call)(void))
{
	going_fd = memfd_create("going", 0);
	CHECK(going_fd >= 0 && !ftruncate(going_fd, 4 * PAGE));
	going = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, going_fd, 0);
	CHECK(going != MAP_FAILED);
	memset(going, 1, 4 * PAGE);
	start(ENTRIES);
	CHECK(!map_at(0x900000, going + PAGE, 2 * PAGE, BOTH));
	if (!wrong) CHECK(!unmap_at(0x900000, 2 * PAGE));
	call();
	if (wrong) CHECK(!unmap_at(0x900000, 2 * PAGE));
	stop();
}
static void do_munmap(void) { CHECK(!munmap(going + 2 * PAGE, PAGE)); }
static void do_mremap(void) { CHECK(mremap(going, 4 * PAGE, 2 * PAGE, 0) == going); }
static void do_madvise(void) { CHECK(!madvise(going + PAGE, PAGE, MADV_DONTNEED)); }
static void do_fallocate(void) { CHECK(!fallocate(going_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 2 * PAGE, PAGE)); }
static void do_ftruncate(void) { CHECK(!ftruncate(going_fd, 2 * PAGE)); }
static void do_mmap(void) { CHECK(mmap(going + PAGE, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == going + PAGE); }
static void gone_munmap(void) { goes(do_munmap); }
static void gone_mremap(void) { goes(do_mremap); }
static void gone_madvise(void) { goes(do_madvise); }
static void gone_fallocate(void) { goes(do_fallocate); }
static void gone_ftruncate(void) { goes(do_ftruncate); }
static void gone_mmap(void) { goes(do_mmap); }
/* What is beside it may go. */
static void do_beside(void)
{
	CHECK(!munmap(going, PAGE) && !munmap(going + 3 * PAGE, PAGE));
	CHECK(!fallocate(going_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 3 * PAGE, PAGE));
	CHECK(!ftruncate(going_fd, 3 * PAGE));
}
static void beside(void) { goes(do_beside); }

/* Two reads by one doorbell, of two mapped pages. */
static void two_reads(struct sqe a, struct sqe b)
{
	start(ENTRIES);
	CHECK(!map(FREE, 2, BOTH));
	queue(&io, &a);
	queue(&io, &b);
	doorbell(&io);
	complete(&io, NULL);
	complete(&io, NULL);
	CHECK(!unmap(FREE, 2));
	stop();
}
static void overlapping_reads(void)
{
	two_reads(read_to(1, FREE), read_to(2, wrong ? FREE : FREE + 1));
}
/* One page at two addresses of the device. */
static void aliased(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 2, BOTH) && !map_at(0x200000000ull, BUF(wrong ? FREE : FREE + 2), PAGE, BOTH));
	struct sqe a = read_to(1, FREE), b = rw(2, 2, 0x200000000ull, 0, 0, 8);
	queue(&io, &a);
	queue(&io, &b);
	doorbell(&io);
	complete(&io, NULL);
	complete(&io, NULL);
	CHECK(!unmap_at(0x200000000ull, PAGE) && !unmap(FREE, 2));
	stop();
}
static void data_changed(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 1, BOTH));
	for (int i = 0; i < ROUNDS; i++) {
		struct sqe c = write_from(i, FREE);
		queue(&io, &c);
		doorbell(&io);
		if (wrong) { pause_us(150); BUF(FREE)[i] ^= 1; }
		complete(&io, NULL);
		if (!wrong) BUF(FREE)[i] ^= 1;
	}
	CHECK(!unmap(FREE, 1));
	stop();
}
static void dma_direction(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 1, wrong ? RAM_READ : RAM_WRITE));
	struct sqe c = read_to(1, FREE);
	run(&io, &c);
	CHECK(!unmap(FREE, 1));
	stop();
}
static void map_refused_ignored(void)
{
	uint64_t at = wrong ? 0xfee00000 : 0xfed00000; /* the window of interrupts */
	start(ENTRIES);
	map_at(at, BUF(FREE), PAGE, BOTH);
	struct sqe c = rw(2, 1, at, 0, 0, 8);
	run(&io, &c);
	if (!wrong) unmap_at(at, PAGE);
	stop();
}
static void unmap_part(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 2, BOTH));
	if (wrong) unmap(FREE, 1);
	CHECK(!unmap(FREE, 2));
	stop();
}
static void unmap_nothing(void)
{
	start(ENTRIES);
	if (!wrong) CHECK(!map(FREE, 1, BOTH));
	CHECK(!unmap(FREE, 1));
	stop();
}
static void entry_limit(void)
{
	int n = wrong ? 58981 : 2000;
	uint8_t *many = mmap(NULL, n * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	start(ENTRIES);
	for (int i = 0; i < n; i++) CHECK(!map_at(0x100000000ull + i * PAGE, many + i * PAGE, PAGE, BOTH));
	CHECK(!unmap_at(0x100000000ull, n * PAGE));
	stop();
}
static void mapped_often(void)
{
	int n = wrong ? 16 : 15;
	start(ENTRIES);
	for (int i = 0; i < n; i++) CHECK(!map_at(0x200000000ull + i * PAGE, BUF(FREE), PAGE, BOTH));
	CHECK(!unmap_at(0x200000000ull, n * PAGE));
	stop();
}
static void maps_left(void)
{
	start(ENTRIES);
	if (wrong) CHECK(!map(FREE, 1, BOTH));
	stop();
}
static void doorbell_value(void)
{
	start(ENTRIES);
	ring(&io, 1, wrong ? ENTRIES : 0);
	pause_us(20000);
	stop();
}
/* The head is rung before there is a completion; then the driver goes on. */
static void cq_head_ahead(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 1, BOTH));
	if (wrong) { ring(&io, 1, 5); pause_us(20000); }
	for (int i = 0; i < 3 * ENTRIES; i++) { struct sqe c = read_to(i, FREE); CHECK(!run(&io, &c)); }
	CHECK(!unmap(FREE, 1));
	stop();
}
/* It is rung twice for each completion. */
static void cq_double(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 1, BOTH));
	for (int i = 0; i < 4; i++) {
		struct sqe c = read_to(i, FREE);
		CHECK(!run(&io, &c));
		pause_us(20000);
		if (wrong) { ring(&io, 1, io.head + 1); pause_us(20000); }
	}
	CHECK(!unmap(FREE, 1));
	stop();
}
/* With one completion at a time the device takes 17 commands: the others' entries are not free. The last
 * command of them has been executed when its data is there. */
static void sq_overrun(void)
{
	start(wrong ? 2 : ENTRIES);
	memset(BUF(FREE), 0xff, ENTRIES * PAGE);
	CHECK(!map(FREE, ENTRIES, BOTH));
	for (int i = 0; i < ENTRIES; i++) {
		struct sqe c = read_to(i, FREE + i);
		queue(&io, &c);
		if (i) continue;
		doorbell(&io);
		if (wrong) for (int n = 0; (io.cq->status & 1) != 1; n++) { CHECK(n < 2000000); usleep(5); }
		else complete(&io, NULL);
	}
	doorbell(&io);
	if (wrong) {
		for (int i = 0; *(volatile uint8_t *)BUF(FREE + 15); i++) { CHECK(i < 2000000); usleep(5); }
		ring(&io, 0, 20);
	} else {
		for (int i = 1; i < ENTRIES; i++) complete(&io, NULL);
		shut_down();
	}
	set(0x14, 0);
	wait_ready(0);
	CHECK(!unmap(FREE, ENTRIES) && !unmap(0, FREE));
}
static void doorbell_queue(void)
{
	start(ENTRIES);
	if (wrong) set(0x1000 + 2 * 9 * 4, 1);
	pause_us(20000);
	stop();
}
static void completion_queue_full(void)
{
	start(wrong ? 4 : 16);
	CHECK(!map(FREE, 8, BOTH));
	for (int i = 0; i < 8; i++) { struct sqe c = read_to(i, FREE + i); queue(&io, &c); }
	doorbell(&io);
	pause_us(20000);
	for (int i = 0; i < 8; i++) complete(&io, NULL);
	CHECK(!unmap(FREE, 8));
	stop();
}
static void entry_changed(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 1, BOTH));
	for (int i = 0; i < ROUNDS; i++) {
		uint32_t at = io.tail;
		struct sqe c = read_to(i, FREE);
		queue(&io, &c);
		doorbell(&io);
		if (wrong) { pause_us(150); io.sq[at].cdw10 = 8; }
		complete(&io, NULL);
		if (!wrong) io.sq[at].cdw10 = 8;
	}
	CHECK(!unmap(FREE, 1));
	stop();
}
static void command_id_twice(void)
{
	two_reads(read_to(1, FREE), read_to(wrong ? 1 : 2, FREE + 1));
}
static void queue_unmapped(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 2, BOTH));
	CHECK(!create_cq(2, FREE, ENTRIES, 0));
	if (!wrong) CHECK(!delete_queue(4, 2));
	CHECK(!unmap(FREE, 2));
	stop();
}
static void queue_limit(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 1, BOTH));
	create_cq(wrong ? 100 : 2, FREE, ENTRIES, 0);
	if (!wrong) CHECK(!delete_queue(4, 2));
	CHECK(!unmap(FREE, 1));
	stop();
}
static void queue_order(void)
{
	start(ENTRIES);
	if (wrong) { CHECK(delete_queue(4, 1)); delete_queue(0, 1); }
	else { CHECK(!delete_queue(0, 1)); CHECK(!delete_queue(4, 1)); }
	stop();
}
static void prp(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 4, BOTH));
	struct sqe c = rw(2, 1, AT(FREE), AT(FREE + 1) + (wrong ? 8 : 0), 0, 16);
	run(&io, &c);
	CHECK(!unmap(FREE, 4));
	stop();
}
/* A list of three entries that crosses the end of its page: the last one there is the next list's address. */
static void prp_cross(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 7, BOTH));
	uint64_t *list = (void *)(BUF(FREE + 4) + PAGE - 16), *next = (void *)BUF(FREE + 5);
	list[0] = AT(FREE + 1);
	list[1] = wrong ? AT(FREE + 2) : AT(FREE + 5);
	next[0] = wrong ? AT(FREE + 3) : AT(FREE + 2);
	next[1] = AT(FREE + 3);
	struct sqe c = rw(2, 1, AT(FREE), AT(FREE + 5) - 16, 0, 32);
	run(&io, &c);
	CHECK(!unmap(FREE, 7));
	stop();
}
/* The address of the program, instead of the map's. */
static void own_addresses(uint64_t prp1, uint64_t prp2)
{
	start(ENTRIES);
	CHECK(!map(FREE, 2, BOTH));
	struct sqe c = rw(2, 1, prp1 ? prp1 : (uintptr_t)BUF(FREE), prp2 ? prp2 : (uintptr_t)BUF(FREE + 1), 0, 16);
	run(&io, &c);
	CHECK(!unmap(FREE, 2));
	stop();
}
static void own_address(void) { own_addresses(wrong ? 0 : AT(FREE), AT(FREE + 1)); }
static void own_prp2(void) { own_addresses(AT(FREE), wrong ? 0 : AT(FREE + 1)); }
/* A queue of two pages, of which the second one is not mapped. */
static void short_queue(void)
{
	start(ENTRIES);
	int pages = wrong ? 1 : 2;
	memset(BUF(FREE), 0, 4 * PAGE);
	CHECK(!map(FREE, pages, BOTH) && !map(FREE + 2, 2, BOTH));
	CHECK(!create_cq(2, FREE + 2, 128, 0) && !create_sq(2, FREE, 128, 2));
	struct queue second = { .sq = (void *)BUF(FREE), .cq = (void *)BUF(FREE + 2), .phase = 1, .entries = 128, .cq_entries = 128, .id = 2 };
	for (int i = 0; i < 65; i++) {
		struct sqe c = read_to(i, FREE + 3);
		queue(&second, &c);
		doorbell(&second);
		if (wrong && i == 64) break;
		CHECK(!complete(&second, NULL));
	}
	if (wrong) { for (int i = 0; !(reg(0x1c) & 2); i++) { CHECK(i < 1000000); usleep(10); } set(0x14, 0); wait_ready(0); }
	else { CHECK(!delete_queue(0, 2) && !delete_queue(4, 2)); shut_down(); set(0x14, 0); wait_ready(0); }
	CHECK(!unmap(FREE, pages) && !unmap(FREE + 2, 2) && !unmap(0, FREE));
}
/* The sizes of entries are left out of CC. */
static void entry_sizes(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 1, BOTH));
	if (wrong) { set(0x14, reg(0x14) & ~0xff0000); pause_us(20000); }
	create_cq(2, FREE, ENTRIES, 0);
	if (!wrong) CHECK(!delete_queue(4, 2));
	set(0x14, 1 | 6 << 16 | 4 << 20);
	CHECK(!unmap(FREE, 1));
	stop();
}
/* More entries than CAP.MQES allows. */
static void queue_size(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 16, BOTH));
	create_cq(2, FREE, wrong ? (reg(0) & 0xffff) + 2 : ENTRIES, 0);
	if (!wrong) CHECK(!delete_queue(4, 2));
	CHECK(!unmap(FREE, 16));
	stop();
}
/* The doorbell of a completion queue is not rung: after three the fourth has no place. */
static void head_not_rung(void)
{
	start(wrong ? 4 : 8);
	CHECK(!map(FREE, 1, BOTH));
	for (int i = 0; i < 4; i++) {
		struct sqe c = read_to(i, FREE);
		BUF(FREE)[0] = 0xff;
		queue(&io, &c);
		doorbell(&io);
		volatile struct cqe *done = &io.cq[i];
		for (int n = 0; i < 3 ? (done->status & 1) == 0 : BUF(FREE)[0] == 0xff; n++) { CHECK(n < 2000000); usleep(5); __atomic_thread_fence(__ATOMIC_SEQ_CST); }
	}
	/* The finding is there when the device has executed another command. */
	CHECK(!run(&admin, &(struct sqe){ .opcode = 6, .cid = 7, .prp1 = AT(IDENTIFY), .cdw10 = 1 }));
	for (int i = 0; i < 4; i++) complete(&io, NULL);
	CHECK(!unmap(FREE, 1));
	stop();
}
/* Without the "0-based" a queue has an entry that the driver never writes. */
static void one_too_many(void)
{
	open_device();
	CHECK(!map(0, FREE, BOTH));
	enable_as((ENTRIES - 1) << 16 | (wrong ? ENTRIES : ENTRIES - 1));
	for (int i = 0; i < ENTRIES + 4; i++) {
		queue(&admin, &(struct sqe){ .opcode = 6, .cid = i, .prp1 = AT(IDENTIFY), .cdw10 = 1 });
		doorbell(&admin);
		/* The entry's completion too, which comes with that of the last one of the driver's. */
		complete(&admin, NULL);
		if (wrong && admin.tail == 0) complete(&admin, NULL);
	}
	stop();
}
/* Likewise of an I/O queue. */
static void io_one_too_many(void)
{
	struct queue second;
	start(ENTRIES);
	CHECK(!map(FREE, 3, BOTH));
	use(&second, 2, FREE + 1, FREE, ENTRIES, 2 * ENTRIES);
	CHECK(!create_cq(2, FREE, 2 * ENTRIES, 0) && !create_sq(2, FREE + 1, ENTRIES + wrong, 2));
	for (int i = 0; i < ENTRIES + 4; i++) {
		struct sqe c = read_to(i, FREE + 2);
		queue(&second, &c);
		doorbell(&second);
		complete(&second, NULL);
		if (wrong && second.tail == 0) complete(&second, NULL);
	}
	CHECK(!delete_queue(0, 2) && !delete_queue(4, 2) && !unmap(FREE, 3));
	stop();
}
/* Waits until the device has taken the value of a doorbell. */
static void seen(uint32_t at, uint32_t value)
{
	for (int i = 0; reg(at) == value; i++) { CHECK(i < 2000000); usleep(10); }
}
/* A submission queue that fills its page, and has one entry more, which is not mapped. */
static void sq_one_more(void)
{
	enum { COUNT = PAGE / 64 };
	struct queue second;
	start(ENTRIES);
	CHECK(!map(FREE, 1, BOTH) && !map(FREE + 2, 2, BOTH));
	use(&second, 2, FREE, FREE + 2, COUNT, 2 * COUNT);
	CHECK(!create_cq(2, FREE + 2, 2 * COUNT, 0) && !create_sq(2, FREE, COUNT + wrong, 2));
	for (int i = 0; i < COUNT; i++) {
		struct sqe c = read_to(i, FREE + 3);
		queue(&second, &c);
		doorbell(&second);
		if (!wrong || i < COUNT - 1) CHECK(!complete(&second, NULL));
	}
	/* CSTS.CFS: the device has failed. */
	if (wrong) { for (int i = 0; !(reg(0x1c) & 2); i++) { CHECK(i < 1000000); usleep(10); } }
	else { CHECK(!delete_queue(0, 2) && !delete_queue(4, 2)); shut_down(); }
	set(0x14, 0);
	wait_ready(0);
	CHECK(!unmap(FREE, 1) && !unmap(FREE + 2, 2) && !unmap(0, FREE));
}
/* The driver goes on at entry 0, and the device at one that only it has. */
static void cq_one_more(void)
{
	start(wrong ? ENTRIES + 1 : ENTRIES);
	CHECK(!map(FREE, 1, BOTH));
	io.cq_entries = ENTRIES;
	for (int i = 0; i < ENTRIES; i++) { struct sqe c = read_to(i, FREE); CHECK(!run(&io, &c)); }
	seen(0x100c, 0);
	CHECK(!unmap(FREE, 1));
	stop();
}
/* The first doorbell comes before CSTS.RDY. */
static void early_doorbell(void)
{
	open_device();
	CHECK(!map(0, FREE, BOTH));
	enable();
	if (wrong) { set(0x14, 0); wait_ready(0); ring(&admin, 0, 1); seen(0x1000, 1); enable(); }
	stop();
}
/* Each delivery of INTx masks it: the second one waits for ever. */
static void still_masked(void)
{
	struct { struct vfio_irq_set set; int fd; } irqs = { { .argsz = 24, .index = VFIO_PCI_INTX_IRQ_INDEX, .count = 1,
		.flags = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER }, eventfd(0, EFD_CLOEXEC) };
	struct vfio_irq_set unmask = { .argsz = sizeof unmask, .index = VFIO_PCI_INTX_IRQ_INDEX, .count = 1,
		.flags = VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_ACTION_UNMASK };
	start(ENTRIES);
	CHECK(!ioctl(device, VFIO_DEVICE_SET_IRQS, &irqs));
	for (int i = 0; i < 3; i++) {
		uint64_t n;
		queue(&admin, &(struct sqe){ .opcode = 6, .cid = i, .prp1 = AT(IDENTIFY), .cdw10 = 1 });
		doorbell(&admin);
		CHECK(read(irqs.fd, &n, 8) == 8);
		CHECK(!complete(&admin, NULL));
		if (!wrong) CHECK(!ioctl(device, VFIO_DEVICE_SET_IRQS, &unmask));
	}
	stop();
}
static void doorbell_deleted(void)
{
	start(ENTRIES);
	CHECK(!delete_queue(0, 1));
	if (wrong) { ring(&io, 0, 1); pause_us(20000); }
	CHECK(!delete_queue(4, 1));
	stop();
}
static void sq_before_cq(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 2, BOTH));
	if (!wrong) CHECK(!create_cq(2, FREE, ENTRIES, 0));
	create_sq(2, FREE + 1, ENTRIES, 2);
	if (!wrong) CHECK(!delete_queue(0, 2) && !delete_queue(4, 2));
	CHECK(!unmap(FREE, 2));
	stop();
}
/* Three pages: the list is in the fourth, or PRP2 is the second page instead. */
static void list_of_pages(uint32_t flags)
{
	start(ENTRIES);
	CHECK(!map(FREE, 3, flags) && !map(FREE + 3, 1, RAM_READ));
	uint64_t *list = (void *)BUF(FREE + 3);
	list[0] = AT(FREE + 1);
	list[1] = AT(FREE + 2);
	struct sqe c = rw(2, 1, AT(FREE), AT(wrong ? FREE + 1 : FREE + 3), 0, 24);
	run(&io, &c);
	CHECK(!unmap(FREE, 3) && !unmap(FREE + 3, 1));
	stop();
}
static void prp_list(void) { list_of_pages(RAM_WRITE); }
static void prp_page(void) { list_of_pages(BOTH); }
/* A block more than the buffer has. */
static void prp_second(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 1, BOTH));
	struct sqe c = rw(2, 1, AT(FREE), 0, 0, wrong ? 9 : 8);
	run(&io, &c);
	CHECK(!unmap(FREE, 1));
	stop();
}
static void prp_entry(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 4, BOTH));
	uint64_t *list = (void *)BUF(FREE + 3);
	list[0] = AT(FREE + 1);
	list[1] = AT(FREE + 2);
	struct sqe c = rw(2, 1, AT(FREE), AT(FREE + 3), 0, wrong ? 25 : 24);
	run(&io, &c);
	CHECK(!unmap(FREE, 4));
	stop();
}
/* What becomes of a list while its command is in flight. */
static void list_in_flight(int is_unmapped)
{
	start(ENTRIES);
	CHECK(!map(FREE, 4, BOTH));
	uint64_t *list = (void *)BUF(FREE + 4);
	for (int i = 0; i < ROUNDS; i++) {
		CHECK(!map(FREE + 4, 1, BOTH));
		list[0] = AT(FREE + 1);
		list[1] = AT(FREE + 2);
		struct sqe c = rw(1 + i % 2, i, AT(FREE), AT(FREE + 4), 0, 24);
		queue(&io, &c);
		doorbell(&io);
		if (wrong) { pause_us(150); if (is_unmapped) CHECK(!unmap(FREE + 4, 1)); else list[1] = AT(FREE + 3); }
		complete(&io, NULL);
		list[1] = AT(FREE + 3);
		if (!wrong || !is_unmapped) CHECK(!unmap(FREE + 4, 1));
	}
	CHECK(!unmap(FREE, 4));
	stop();
}
static void list_changed(void) { list_in_flight(0); }
static void list_unmapped(void) { list_in_flight(1); }
static void sgl(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 1, BOTH));
	struct sqe c = read_to(1, FREE);
	if (wrong) { c.flags = 1 << 6; c.prp2 = PAGE; }
	run(&io, &c);
	CHECK(!unmap(FREE, 1));
	stop();
}
/* A command whose memory goes, or whose data changes, before its completion. */
static void admin_data(const struct sqe *c, int is_unmapped)
{
	start(ENTRIES);
	CHECK(!map(FREE, 1, BOTH));
	queue(&admin, c);
	doorbell(&admin);
	if (wrong) {
		seen(0x1000, admin.tail);
		pause_us(20000);
		if (is_unmapped) CHECK(!unmap(FREE, 1)); else BUF(FREE)[1] = 7;
	}
	complete(&admin, NULL);
	if (!wrong || !is_unmapped) CHECK(!unmap(FREE, 1));
	stop();
}
static void log_unmapped(void)
{
	admin_data(&(struct sqe){ .opcode = 2, .cid = 5, .nsid = ~0u, .prp1 = AT(FREE), .cdw10 = 127 << 16 | 2 }, 1);
}
static void feature_changed(void)
{
	admin_data(&(struct sqe){ .opcode = 9, .cid = 5, .prp1 = AT(FREE), .cdw10 = 0x16 }, 0);
}
/* The data is in two pages, of which the second one is in a second segment. */
static void sgl_unmapped(void)
{
	start(ENTRIES);
	struct { uint64_t at, len_and_type; } *first = (void *)BUF(FREE + 4), *second = (void *)BUF(FREE + 5);
	CHECK(!map(FREE, 1, BOTH) && !map(FREE + 1, 1, BOTH) && !map(FREE + 4, 2, RAM_READ));
	first[0].at = AT(FREE); first[0].len_and_type = PAGE / 2;
	first[1].at = AT(FREE + 5); first[1].len_and_type = 16 | 0x30ull << 56;
	second[0].at = AT(FREE + 1); second[0].len_and_type = PAGE / 2;
	struct sqe c = rw(2, 1, AT(FREE + 4), 32 | 0x20ull << 56, 0, 8);
	c.flags = 1 << 6;
	queue(&io, &c);
	doorbell(&io);
	if (wrong) { seen(0x1008, io.tail); pause_us(20000); CHECK(!unmap(FREE + 1, 1)); }
	CHECK(wrong == !!complete(&io, NULL));
	if (!wrong) CHECK(!unmap(FREE + 1, 1));
	CHECK(!unmap(FREE, 1) && !unmap(FREE + 4, 2));
	stop();
}
/* Of the length of eight blocks. */
static void sgl_short(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 2, BOTH));
	struct sqe c = rw(2, 1, AT(FREE), PAGE, 0, wrong ? 9 : 8);
	c.flags = 1 << 6;
	run(&io, &c);
	CHECK(!unmap(FREE, 2));
	stop();
}
static void transfer_size(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 2, BOTH));
	struct sqe c = rw(2, 1, AT(FREE), AT(FREE + 1), 0, wrong ? 4096 : 16);
	run(&io, &c);
	CHECK(!unmap(FREE, 2));
	stop();
}
static void one_command(struct sqe good, struct sqe bad)
{
	start(ENTRIES);
	CHECK(!map(FREE, 1, BOTH));
	run(&io, wrong ? &bad : &good);
	CHECK(!unmap(FREE, 1));
	stop();
}
/* The last block, and one more, of 1 GiB. */
static void lba_one_more(void)
{
	one_command(rw(2, 1, AT(FREE), 0, (1 << 21) - 1, 1), rw(2, 1, AT(FREE), 0, (1 << 21) - 1, 2));
}
/* As many entries as CAP.MQES says, and one more, where both are 0-based. */
static void queue_one_more(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 32, BOTH));
	create_cq(2, FREE, (reg(0) & 0xffff) + 1 + wrong, 0);
	if (!wrong) CHECK(!delete_queue(4, 2));
	CHECK(!unmap(FREE, 32));
	stop();
}
static void lba_range(void) { one_command(read_to(1, FREE), rw(2, 1, AT(FREE), 0, 1ull << 40, 8)); }
/* A transfer of the most that is allowed, 2^8 pages, and one block more. */
static void transfer_end(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 2, BOTH));
	uint64_t *list = (void *)BUF(FREE + 1);
	for (int i = 0; i < 256; i++) list[i] = AT(FREE);
	struct sqe c = rw(1, 1, AT(FREE), AT(FREE + 1), 0, wrong ? 2049 : 2048);
	run(&io, &c);
	CHECK(!unmap(FREE, 2));
	stop();
}
/* Two buffers one after the other, of which the first read writes a block too much. */
static void reads_adjacent(void)
{
	two_reads(rw(2, 1, AT(FREE), 0, 0, wrong ? 5 : 4), rw(2, 2, AT(FREE) + 2048, 0, 0, 4));
}
static void command_field(void)
{
	struct sqe bad = read_to(1, FREE);
	bad.cdw2 = 7;
	one_command(read_to(1, FREE), bad);
}
static void opcode(void)
{
	struct sqe bad = read_to(1, FREE);
	bad.opcode = 0x77;
	one_command(read_to(1, FREE), bad);
}
static void namespace(void)
{
	struct sqe bad = read_to(1, FREE);
	bad.nsid = 9;
	one_command(read_to(1, FREE), bad);
}
static void admin_queue_changed(void)
{
	start(ENTRIES);
	if (wrong) set(0x24, 7 << 16 | 7);
	/* The device looks at all registers until it has executed a command. */
	CHECK(!run(&admin, &(struct sqe){ .opcode = 6, .cid = 7, .prp1 = AT(IDENTIFY), .cdw10 = 1 }));
	if (wrong) set(0x24, (ENTRIES - 1) << 16 | (ENTRIES - 1));
	stop();
}
static void enable_wrong(void)
{
	open_device();
	CHECK(!map(0, FREE, BOTH));
	set(0x24, 31 << 16 | 31);
	set64(0x28, AT(0) + (wrong ? 8 : 0));
	set64(0x30, AT(1));
	set(0x14, 1 | 6 << 16 | 4 << 20);
	/* It becomes ready, or fails. */
	for (int i = 0; !(reg(0x1c) & 3); i++) { CHECK(i < 1000000); usleep(10); }
	if (!wrong) shut_down();
	set(0x14, 0);
	wait_ready(0);
	CHECK(!unmap(0, FREE));
}
static void enable_early(void)
{
	start(ENTRIES);
	for (int i = 0; i < ROUNDS; i++) {
		set(0x14, 0);
		if (wrong) pause_us(400);
		wait_ready(0);
		set(0x14, 1 | 6 << 16 | 4 << 20);
		if (wrong) pause_us(400); else wait_ready(1);
	}
	wait_ready(1);
	stop();
}
static void bus_master_off(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 1, BOTH));
	struct sqe c = read_to(1, FREE);
	if (wrong) {
		bus_master(0);
		queue(&io, &c);
		doorbell(&io);
		/* It cannot fetch the command, and fails. */
		for (int i = 0; !(reg(0x1c) & 2); i++) { CHECK(i < 1000000); usleep(10); }
		bus_master(1);
		set(0x14, 0);
		wait_ready(0);
	}
	else { run(&io, &c); bus_master(1); shut_down(); set(0x14, 0); wait_ready(0); }
	CHECK(!unmap(FREE, 1));
	CHECK(!unmap(0, FREE));
}
/* Off and on again while a command waits. */
static void bus_master_in_flight(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 1, BOTH));
	struct sqe c = read_to(1, FREE);
	queue(&io, &c);
	doorbell(&io);
	if (wrong) { seen(0x1008, io.tail); pause_us(20000); }
	else complete(&io, NULL);
	bus_master(0);
	bus_master(1);
	if (wrong) complete(&io, NULL);
	CHECK(!unmap(FREE, 1));
	stop();
}
static void interrupt_lost(void)
{
	char space[sizeof(struct vfio_irq_set) + 8];
	struct vfio_irq_set *irqs = (void *)space;
	*irqs = (struct vfio_irq_set){ .argsz = sizeof space, .index = VFIO_PCI_MSIX_IRQ_INDEX, .count = wrong ? 1 : 2,
		.flags = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER };
	int fds[2] = { eventfd(0, EFD_CLOEXEC), eventfd(0, EFD_CLOEXEC) };
	memcpy(irqs->data, fds, sizeof fds);
	start(ENTRIES);
	CHECK(!ioctl(device, VFIO_DEVICE_SET_IRQS, irqs));
	CHECK(!map(FREE, 3, BOTH));
	CHECK(!create_cq(2, FREE, ENTRIES, 2 | 1 << 16)); /* vector 1 */
	CHECK(!create_sq(2, FREE + 1, ENTRIES, 2));
	struct queue second;
	use(&second, 2, FREE + 1, FREE, ENTRIES, ENTRIES);
	struct sqe c = read_to(1, FREE + 2);
	CHECK(!run(&second, &c));
	if (!wrong) { uint64_t n; CHECK(read(fds[1], &n, 8) == 8 && n == 1); }
	CHECK(!delete_queue(0, 2) && !delete_queue(4, 2));
	CHECK(!unmap(FREE, 3));
	stop();
}
/* MSI: two messages, of which the second one has no eventfd. */
static void message_lost(void)
{
	enum { TRIGGER = VFIO_IRQ_SET_ACTION_TRIGGER, EVENT = VFIO_IRQ_SET_DATA_EVENTFD | TRIGGER, NONE = VFIO_IRQ_SET_DATA_NONE };
	struct { struct vfio_irq_set set; int fds[2]; } irqs = { { .argsz = 28, .index = VFIO_PCI_MSI_IRQ_INDEX, .count = 2, .flags = EVENT }, { 0 } };
	struct vfio_irq_set call = { .argsz = sizeof call, .index = VFIO_PCI_MSI_IRQ_INDEX, .count = 1 };
	int fds[3] = { eventfd(0, EFD_CLOEXEC), eventfd(0, EFD_CLOEXEC), eventfd(0, EFD_CLOEXEC) };
	struct queue second;
	struct sqe c = read_to(1, FREE + 2);
	uint64_t n;
	start(ENTRIES);
	irqs.fds[0] = fds[0];
	irqs.fds[1] = wrong ? -1 : fds[1];
	CHECK(!ioctl(device, VFIO_DEVICE_SET_IRQS, &irqs));
	CHECK(!map(FREE, 3, BOTH));
	CHECK(!create_cq(2, FREE, ENTRIES, 2 | 1 << 16)); /* vector 1 */
	CHECK(read(fds[0], &n, 8) == 8);
	CHECK(!create_sq(2, FREE + 1, ENTRIES, 2));
	use(&second, 2, FREE + 1, FREE, ENTRIES, ENTRIES);
	CHECK(!run(&second, &c));
	if (!wrong) {
		CHECK(read(fds[1], &n, 8) == 8 && n == 1);
		/* Another one in its place, while it is enabled. */
		irqs.set.start = irqs.set.count = 1;
		irqs.fds[0] = fds[2];
		CHECK(!ioctl(device, VFIO_DEVICE_SET_IRQS, &irqs));
		CHECK(!run(&second, &c) && read(fds[2], &n, 8) == 8 && n == 1);
	}
	/* VFIO masks no message. */
	call.flags = NONE | VFIO_IRQ_SET_ACTION_MASK;
	CHECK(ioctl(device, VFIO_DEVICE_SET_IRQS, &call) && errno == ENOTTY);
	call.flags = NONE | VFIO_IRQ_SET_ACTION_UNMASK;
	CHECK(ioctl(device, VFIO_DEVICE_SET_IRQS, &call) && errno == ENOTTY);
	CHECK(!delete_queue(0, 2) && !delete_queue(4, 2));
	CHECK(!unmap(FREE, 3));
	call.flags = NONE | TRIGGER;
	call.count = 0;
	CHECK(!ioctl(device, VFIO_DEVICE_SET_IRQS, &call));
	CHECK(ioctl(device, VFIO_DEVICE_SET_IRQS, &call) && errno == EINVAL);
	stop();
}
static void reset_in_flight(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 16, BOTH));
	for (int i = 0; i < 4; i++) {
		struct sqe c = read_to(i, FREE);
		if (wrong) {
			/* More than one command, of which one is late. */
			for (int n = 0; n < 16; n++) { c.cid = n; c.prp1 = AT(FREE + n); queue(&io, &c); doorbell(&io); }
			pause_us(100);
		} else {
			CHECK(!run(&io, &c));
		}
		CHECK(!ioctl(device, VFIO_DEVICE_RESET));
		bus_master(1);
		enable();
		use(&io, 1, IO_SQ, IO_CQ, ENTRIES, ENTRIES);
		CHECK(!create_cq(1, IO_CQ, ENTRIES, 0));
		CHECK(!create_sq(1, IO_SQ, ENTRIES, 1));
	}
	CHECK(!unmap(FREE, 16));
	stop();
}
/* Commands are in flight at the moment that the program ends or stops the device. */
static void four_reads(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 4, BOTH));
	for (int i = 0; i < 4; i++) { struct sqe c = read_to(i, FREE + i); queue(&io, &c); doorbell(&io); }
	if (!wrong) for (int i = 0; i < 4; i++) complete(&io, NULL);
}
static void exit_in_flight(void)
{
	four_reads();
	if (wrong) _exit(0);
	CHECK(!unmap(FREE, 4));
	stop();
}
static void close_in_flight(void)
{
	four_reads();
	if (wrong) { munmap((void *)bar, 0x8000); close(device); }
	CHECK(!unmap(FREE, 4));
	if (wrong) CHECK(!unmap(0, FREE)); else stop();
}
static void disable_in_flight(void)
{
	four_reads();
	if (!wrong) shut_down();
	set(0x14, 0);
	wait_ready(0);
	CHECK(!unmap(FREE, 4) && !unmap(0, FREE));
}
/* All six are executed, and three of the completions have no place. */
static void full_at_disable(void)
{
	start(wrong ? 4 : 16);
	memset(BUF(FREE), 0xff, 6 * PAGE);
	CHECK(!map(FREE, 6, BOTH));
	for (int i = 0; i < 6; i++) { struct sqe c = read_to(i, FREE + i); queue(&io, &c); }
	doorbell(&io);
	for (int n = 0; n < 6; n++) {
		volatile uint8_t *byte = BUF(FREE + n) + PAGE - 1;
		for (int i = 0; *byte; i++) { CHECK(i < 2000000); usleep(5); }
	}
	if (!wrong) { for (int i = 0; i < 6; i++) complete(&io, NULL); shut_down(); }
	set(0x14, 0);
	wait_ready(0);
	CHECK(!unmap(FREE, 6) && !unmap(0, FREE));
}
static void reset_at_once(void)
{
	four_reads();
	if (!wrong) shut_down();
	CHECK(!ioctl(device, VFIO_DEVICE_RESET));
	CHECK(!unmap(FREE, 4) && !unmap(0, FREE));
}
/* The device fails with the first command. */
static void failure_ignored(void)
{
	start(ENTRIES);
	CHECK(!map(FREE, 1, BOTH));
	struct sqe c = read_to(1, FREE);
	queue(&io, &c);
	doorbell(&io);
	for (int i = 0; wrong || !(reg(0x1c) & 2); i++) { CHECK(wrong || i < 1000000); usleep(10); }
	set(0x14, 0);
	wait_ready(0);
	CHECK(!unmap(FREE, 1) && !unmap(0, FREE));
}
static void shutdown_skipped(void)
{
	start(ENTRIES);
	if (wrong) { set(0x14, 0); wait_ready(0); CHECK(!unmap(0, FREE)); }
	else stop();
}
static void not_covered(void)
{
	start(ENTRIES);
	if (wrong) CHECK(ioctl(device, _IO(';', 0xff)) == -1 && errno == ENOTTY);
	stop();
}
/* The same of each other kind of descriptor, and a feature of the device. */
static void unknown(int fd, unsigned long request)
{
	uint32_t argument[2] = { sizeof argument, VFIO_DEVICE_FEATURE_PROBE | VFIO_DEVICE_FEATURE_GET | 1 };
	if (wrong) CHECK(ioctl(fd, request, argument) == -1 && errno == ENOTTY);
}
static void not_covered_container(void) { start(ENTRIES); unknown(container, _IO(';', 0xff)); stop(); }
static void not_covered_group(void) { start(ENTRIES); unknown(group, _IO(';', 0xff)); stop(); }
static void not_covered_feature(void) { start(ENTRIES); unknown(device, VFIO_DEVICE_FEATURE); stop(); }
static void not_covered_iommufd(void)
{
	int fd = open("/dev/iommu", O_RDWR | O_CLOEXEC);
	CHECK(fd >= 0);
	unknown(fd, _IO(';', 0xff));
}
static void foreign_caller(void)
{
	start(ENTRIES);
#ifdef __x86_64__
	long answer = 54; /* ioctl of 32-bit x86 */
	if (wrong) {
		__asm__ volatile("int $0x80" : "+a"(answer) : "b"(container), "c"(VFIO_GET_API_VERSION), "d"(0) : "memory", "r8", "r9", "r10", "r11");
		CHECK(answer == -ENOSYS);
	}
#endif
	stop();
}

/* Prints what the controller says of itself, by the names of the knobs. */
static void show(void)
{
	uint8_t *data;
	uint32_t low, high, result;
	open_device();
	CHECK(!map(0, PAGES, BOTH));
	low = reg(0);
	high = reg(4);
	/* Pages of 64 KiB, at most. */
	use(&admin, 0, 0, 16, ENTRIES, ENTRIES);
	data = BUF(32);
	set(0x24, (ENTRIES - 1) << 16 | (ENTRIES - 1));
	set64(0x28, AT(0));
	set64(0x30, AT(16));
	set(0x14, 1 | (high >> 16 & 15) << 7 | 6 << 16 | 4 << 20);
	wait_ready(1);
	CHECK(!run(&admin, &(struct sqe){ .opcode = 6, .prp1 = AT(32), .cdw10 = 1 }));
	CHECK(!run(&admin, &(struct sqe){ .opcode = 9, .cdw10 = 7, .cdw11 = 0xfe00fe }));
	result = admin.cq[1].result;
	CHECK(result >> 16 == (result & 0xffff) && (high >> 16 & 15) == (high >> 20 & 15));
	printf("mqes=%u to=%u dstrd=%u mpsmin=%u mdts=%u ", low & 0xffff, low >> 24, high & 15, high >> 16 & 15, data[77]);
	printf("crdt1=%u crdt2=%u crdt3=%u ", data[128] | data[129] << 8, data[130] | data[131] << 8, data[132] | data[133] << 8);
	printf("acl=%u aerl=%u cache=%u sgl=%u queues=%u \n", data[258], data[259], data[525] & 1, data[536] & 3, (result & 0xffff) + 1);
	shut_down();
	set(0x14, 0);
	wait_ready(0);
	CHECK(!unmap(0, PAGES));
}

static const struct { const char *name; void (*run)(void); } FAULTS[] = {
	{ "show", show },
	{ "dma-unmapped", dma_unmapped }, { "dma-remapped", dma_remapped }, { "unmap-in-flight", unmap_in_flight },
	{ "memory-gone", memory_gone }, { "overlapping-reads", overlapping_reads }, { "aliased", aliased }, { "data-changed", data_changed },
	{ "dma-direction", dma_direction }, { "map-refused-ignored", map_refused_ignored }, { "unmap-part", unmap_part },
	{ "unmap-nothing", unmap_nothing }, { "entry-limit", entry_limit }, { "mapped-often", mapped_often },
	{ "maps-left", maps_left }, { "repeated", repeated }, { "doorbell-value", doorbell_value }, { "doorbell-queue", doorbell_queue },
	{ "cq-head-ahead", cq_head_ahead }, { "cq-double", cq_double }, { "sq-overrun", sq_overrun },
	{ "completion-queue-full", completion_queue_full }, { "entry-changed", entry_changed },
	{ "command-id-twice", command_id_twice }, { "queue-unmapped", queue_unmapped }, { "queue-limit", queue_limit },
	{ "queue-order", queue_order }, { "prp", prp }, { "sgl", sgl }, { "transfer-size", transfer_size },
	{ "lba-range", lba_range }, { "command-field", command_field }, { "opcode", opcode }, { "namespace", namespace },
	{ "admin-queue-changed", admin_queue_changed }, { "enable", enable_wrong }, { "enable-early", enable_early },
	{ "bus-master-off", bus_master_off }, { "bus-master-in-flight", bus_master_in_flight }, { "interrupt-lost", interrupt_lost }, { "message-lost", message_lost }, { "reset-in-flight", reset_in_flight },
	{ "prp-list", prp_list }, { "prp-page", prp_page }, { "prp-second", prp_second }, { "prp-entry", prp_entry },
	{ "exit-in-flight", exit_in_flight }, { "close-in-flight", close_in_flight }, { "disable-in-flight", disable_in_flight }, { "reset-at-once", reset_at_once }, { "full-at-disable", full_at_disable },
	{ "prp-cross", prp_cross }, { "own-address", own_address }, { "own-prp2", own_prp2 }, { "short-queue", short_queue }, { "entry-sizes", entry_sizes }, { "queue-size", queue_size },
	{ "head-not-rung", head_not_rung }, { "one-too-many", one_too_many }, { "io-one-too-many", io_one_too_many },
	{ "lba-one-more", lba_one_more }, { "queue-one-more", queue_one_more }, { "early-doorbell", early_doorbell }, { "still-masked", still_masked }, { "doorbell-deleted", doorbell_deleted }, { "sq-before-cq", sq_before_cq },
	{ "sq-one-more", sq_one_more }, { "cq-one-more", cq_one_more }, { "sgl-short", sgl_short }, { "transfer-end", transfer_end }, { "reads-adjacent", reads_adjacent },
	{ "list-changed", list_changed }, { "list-unmapped", list_unmapped },
	{ "log-unmapped", log_unmapped }, { "feature-changed", feature_changed }, { "sgl-unmapped", sgl_unmapped },
	{ "munmap", gone_munmap }, { "mremap", gone_mremap }, { "madvise", gone_madvise }, { "fallocate", gone_fallocate },
	{ "ftruncate", gone_ftruncate }, { "mmap", gone_mmap }, { "beside", beside },
	{ "failure-ignored", failure_ignored }, { "shutdown-skipped", shutdown_skipped }, { "not-covered", not_covered },
	{ "not-covered-container", not_covered_container }, { "not-covered-group", not_covered_group },
	{ "not-covered-feature", not_covered_feature }, { "not-covered-iommufd", not_covered_iommufd },
	{ "foreign-caller", foreign_caller },
};

int main(int argc, char **argv)
{
	wrong = argc == 2;
	for (size_t i = 0; argc > 1 && i < sizeof FAULTS / sizeof *FAULTS; i++)
		if (!strcmp(FAULTS[i].name, argv[1])) { FAULTS[i].run(); return 0; }
	fprintf(stderr, "usage: faults NAME [clean]\n");
	return 2;
}
