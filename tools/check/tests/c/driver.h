/* A small NVMe driver over VFIO type 1, for the tests of `pinfold check`: polled, one I/O queue. */
#ifndef DRIVER_H
#define DRIVER_H
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
#include <unistd.h>

static const char *BDF = "0000:01:00.0", *GROUP = "/dev/vfio/7";
#define PAGE 4096ull
#define ENTRIES 32
#define RAM_READ VFIO_DMA_MAP_FLAG_READ
#define RAM_WRITE VFIO_DMA_MAP_FLAG_WRITE
#define BOTH (RAM_READ | RAM_WRITE)

#define CHECK(what) do { if (!(what)) { fprintf(stderr, "%s:%d: %s: %m\n", __FILE__, __LINE__, #what); exit(9); } } while (0)

struct sqe { uint8_t opcode, flags; uint16_t cid; uint32_t nsid, cdw2, cdw3; uint64_t mptr, prp1, prp2; uint32_t cdw10, cdw11, cdw12, cdw13, cdw14, cdw15; };
struct cqe { uint32_t result, high; uint16_t sqhd, sqid, cid, status; };
struct queue { volatile struct sqe *sq; volatile struct cqe *cq; uint32_t tail, head, phase, entries, cq_entries; int id; };

static int container, group, device;
static volatile uint8_t *bar;
static struct queue admin, io;
static uint8_t *memory;            /* anonymous pages, mapped at the IOVA of their offset + BASE */
#define BASE 0x100000ull
#define PAGES 64
#define AT(page) (BASE + (page) * PAGE)
#define BUF(page) (memory + (page) * PAGE)
enum { ADMIN_SQ, ADMIN_CQ, IO_SQ, IO_CQ, IDENTIFY, FREE = 8 }; /* pages; from FREE on they are the test's */

static uint32_t reg(uint32_t at) { return *(volatile uint32_t *)(bar + at); }
static void set(uint32_t at, uint32_t value) { *(volatile uint32_t *)(bar + at) = value; }
static void set64(uint32_t at, uint64_t value) { set(at, (uint32_t)value); set(at + 4, (uint32_t)(value >> 32)); }

static int map_at(uint64_t iova, void *at, uint64_t len, uint32_t flags)
{
	struct vfio_iommu_type1_dma_map map = { .argsz = sizeof map, .flags = flags, .vaddr = (uintptr_t)at, .iova = iova, .size = len };
	return ioctl(container, VFIO_IOMMU_MAP_DMA, &map);
}
static int unmap_at(uint64_t iova, uint64_t len)
{
	struct vfio_iommu_type1_dma_unmap unmap = { .argsz = sizeof unmap, .iova = iova, .size = len };
	return ioctl(container, VFIO_IOMMU_UNMAP_DMA, &unmap);
}
static int map(int page, int pages, uint32_t flags) { return map_at(AT(page), BUF(page), pages * PAGE, flags); }
static int unmap(int page, int pages) { return unmap_at(AT(page), pages * PAGE); }

static void bus_master(int on)
{
	uint16_t command;
	off_t at = ((off_t)VFIO_PCI_CONFIG_REGION_INDEX << 40) + 4;
	CHECK(pread(device, &command, 2, at) == 2);
	command = on ? command | 6 : command & ~4;
	CHECK(pwrite(device, &command, 2, at) == 2);
}

static void open_device(void)
{
	struct vfio_group_status status = { .argsz = sizeof status };
	struct vfio_region_info region = { .argsz = sizeof region, .index = 0 };
	CHECK((container = open("/dev/vfio/vfio", O_RDWR | O_CLOEXEC)) >= 0);
	CHECK((group = open(GROUP, O_RDWR | O_CLOEXEC)) >= 0);
	CHECK(ioctl(container, VFIO_GET_API_VERSION) == VFIO_API_VERSION);
	CHECK(ioctl(container, VFIO_CHECK_EXTENSION, VFIO_TYPE1v2_IOMMU) == 1);
	CHECK(!ioctl(group, VFIO_GROUP_GET_STATUS, &status) && (status.flags & VFIO_GROUP_FLAGS_VIABLE));
	CHECK(!ioctl(group, VFIO_GROUP_SET_CONTAINER, &container));
	CHECK(!ioctl(container, VFIO_SET_IOMMU, VFIO_TYPE1v2_IOMMU));
	CHECK((device = ioctl(group, VFIO_GROUP_GET_DEVICE_FD, BDF)) >= 0);
	CHECK(!ioctl(device, VFIO_DEVICE_GET_REGION_INFO, &region));
	bar = mmap(NULL, region.size, PROT_READ | PROT_WRITE, MAP_SHARED, device, region.offset);
	CHECK(bar != MAP_FAILED);
	memory = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(memory != MAP_FAILED);
	bus_master(1);
}

static void ring(struct queue *q, int is_cq, uint32_t value) { set(0x1000 + (2 * q->id + is_cq) * (4 << (reg(4) & 15)), value); }

static void wait_ready(uint32_t ready)
{
	for (int i = 0; (reg(0x1c) & 1) != ready; i++) { CHECK(i < 1000000); usleep(10); }
}

static void use(struct queue *q, int id, int sq, int cq, uint32_t entries, uint32_t cq_entries)
{
	memset(BUF(sq), 0, PAGE);
	memset(BUF(cq), 0, PAGE);
	*q = (struct queue){ .sq = (void *)BUF(sq), .cq = (void *)BUF(cq), .phase = 1, .entries = entries, .cq_entries = cq_entries, .id = id };
}

static void enable_as(uint32_t aqa)
{
	set(0x14, 0);
	wait_ready(0);
	use(&admin, 0, ADMIN_SQ, ADMIN_CQ, ENTRIES, ENTRIES);
	set(0x24, aqa);
	set64(0x28, AT(ADMIN_SQ));
	set64(0x30, AT(ADMIN_CQ));
	set(0x14, 1 | 6 << 16 | 4 << 20);
	wait_ready(1);
}

static void enable(void) { enable_as((ENTRIES - 1) << 16 | (ENTRIES - 1)); }

static void queue(struct queue *q, const struct sqe *command)
{
	memcpy((void *)&q->sq[q->tail], command, sizeof *command);
	q->tail = (q->tail + 1) % q->entries;
}
static void doorbell(struct queue *q) { __atomic_thread_fence(__ATOMIC_SEQ_CST); ring(q, 0, q->tail); }

/* Waits for one completion; returns its status without the phase. `cid` may be null. */
static int complete(struct queue *q, uint16_t *cid)
{
	volatile struct cqe *c = &q->cq[q->head];
	for (int i = 0; (c->status & 1) != q->phase; i++) { CHECK(i < 2000000); if (i > 100) usleep(5); }
	int status = c->status >> 1;
	if (cid) *cid = c->cid;
	if (++q->head == q->cq_entries) { q->head = 0; q->phase ^= 1; }
	ring(q, 1, q->head);
	return status;
}

static int run(struct queue *q, const struct sqe *command) { queue(q, command); doorbell(q); return complete(q, NULL); }

static int create_cq(int id, int page, uint32_t entries, uint32_t flags)
{
	return run(&admin, &(struct sqe){ .opcode = 5, .cid = 1, .prp1 = AT(page), .cdw10 = (entries - 1) << 16 | id, .cdw11 = 1 | flags });
}
static int create_sq(int id, int page, uint32_t entries, int cq)
{
	return run(&admin, &(struct sqe){ .opcode = 1, .cid = 2, .prp1 = AT(page), .cdw10 = (entries - 1) << 16 | id, .cdw11 = cq << 16 | 1 });
}
static int delete_queue(int opcode, int id) { return run(&admin, &(struct sqe){ .opcode = opcode, .cid = 3, .cdw10 = id }); }

/* Enabled, identified, with an I/O queue of `cq_entries` completions. */
static void start(uint32_t cq_entries)
{
	open_device();
	CHECK(!map(0, FREE, BOTH));
	enable();
	CHECK(!run(&admin, &(struct sqe){ .opcode = 6, .cid = 7, .prp1 = AT(IDENTIFY), .cdw10 = 1 }));
	use(&io, 1, IO_SQ, IO_CQ, ENTRIES, cq_entries);
	CHECK(!create_cq(1, IO_CQ, cq_entries, 0));
	CHECK(!create_sq(1, IO_SQ, ENTRIES, 1));
}

static struct sqe rw(int opcode, uint16_t cid, uint64_t prp1, uint64_t prp2, uint64_t lba, uint32_t blocks)
{
	return (struct sqe){ .opcode = opcode, .cid = cid, .nsid = 1, .prp1 = prp1, .prp2 = prp2,
		.cdw10 = (uint32_t)lba, .cdw11 = (uint32_t)(lba >> 32), .cdw12 = blocks - 1 };
}
static struct sqe read_to(uint16_t cid, int page) { return rw(2, cid, AT(page), 0, 0, 8); }
static struct sqe write_from(uint16_t cid, int page) { return rw(1, cid, AT(page), 0, 0, 8); }

static void shut_down(void)
{
	set(0x14, reg(0x14) | 1 << 14);
	for (int i = 0; (reg(0x1c) >> 2 & 3) != 2; i++) { CHECK(i < 1000000); usleep(10); }
}

/* The end of a clean run. */
static void stop(void)
{
	shut_down();
	set(0x14, 0);
	wait_ready(0);
	CHECK(!unmap(0, FREE));
}
#endif
