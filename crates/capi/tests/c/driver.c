/* Devices: a driver for an NVMe controller, as far as its admin queue, and every misuse. Run under
 * `pinfold check --nvme soft:64M --nvme soft:64M`, whose devices it drives, and on the devices of the
 * virtual machine. The word `type1` leaves out iommufd, for a kernel without. */
#include "check.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define FIRST "0000:01:00.0"
#define SECOND "0000:02:00.0"

enum { CAP = 0, VS = 8, CC = 0x14, CSTS = 0x1c, AQA = 0x24, ASQ = 0x28, ACQ = 0x30, DOORBELLS = 0x1000 };
enum { DEPTH = 4 };

/* An admin queue. */
struct admin {
    struct pf_bar bar;
    char *memory; /* submissions, completions, and data: a page each */
    uint64_t iova;
    uint32_t stride, tail, head, phase;
};

static void wait_ready(const struct pf_bar *bar, uint32_t ready) {
    for (int i = 0; (pf_read32(bar, CSTS) & 1) != ready; i++) {
        CHECK(i < 60000);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
}

static void enable(struct admin *admin, pf_device_t *device, char *memory, uint64_t iova) {
    struct pf_bar again;
    memset(memory, 0, 3 * 4096);
    *admin = (struct admin){.memory = memory, .iova = iova, .phase = 1};
    OK(pf_device_bar(device, 0, &admin->bar));
    OK(pf_device_bar(device, 0, &again));
    CHECK(again.addr == admin->bar.addr && again.len == admin->bar.len && again.len >= 8192);
    OK(pf_device_bus_master(device, 1));
    uint64_t cap = pf_read64(&admin->bar, CAP);
    admin->stride = 4u << (cap >> 32 & 15);
    CHECK(pf_read32(&admin->bar, VS) >= 0x10000);
    /* The same bytes, in each width. */
    for (unsigned i = 0; i < 8; i++) {
        CHECK(pf_read8(&admin->bar, CAP + i) == (uint8_t)(cap >> 8 * i));
        if (i % 2 == 0)
            CHECK(pf_read16(&admin->bar, CAP + i) == (uint16_t)(cap >> 8 * i));
        if (i % 4 == 0)
            CHECK(pf_read32(&admin->bar, CAP + i) == (uint32_t)(cap >> 8 * i));
    }
    pf_write32(&admin->bar, CC, 0);
    wait_ready(&admin->bar, 0);
    pf_write32(&admin->bar, AQA, (DEPTH - 1) << 16 | (DEPTH - 1));
    pf_write64(&admin->bar, ASQ, iova);
    pf_write64(&admin->bar, ACQ, iova + 4096);
    CHECK(pf_read64(&admin->bar, ASQ) == iova);
    pf_write32(&admin->bar, CC, 4 << 20 | 6 << 16 | 1);
    wait_ready(&admin->bar, 1);
}

static void disable(struct admin *admin) {
    pf_write32(&admin->bar, CC, 4 << 20 | 6 << 16 | 1 << 14 | 1); /* shutdown */
    for (int i = 0; (pf_read32(&admin->bar, CSTS) >> 2 & 3) != 2; i++) {
        CHECK(i < 60000);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    pf_write32(&admin->bar, CC, 4 << 20 | 6 << 16);
    wait_ready(&admin->bar, 0);
}

/* Has the controller write 4096 bytes about itself to `data`. */
static void identify(struct admin *admin, uint64_t data, int fd) {
    uint32_t *command = (uint32_t *)(void *)(admin->memory + admin->tail * 64);
    uint32_t *completion = (uint32_t *)(void *)(admin->memory + 4096 + admin->head * 16);
    memset(command, 0, 64);
    command[0] = 6 | 7 << 16;
    command[6] = (uint32_t)data, command[7] = (uint32_t)(data >> 32);
    command[10] = 1;
    admin->tail = (admin->tail + 1) % DEPTH;
    pf_write32(&admin->bar, DOORBELLS, admin->tail);
    if (fd >= 0) {
        struct pollfd raised = {.fd = fd, .events = POLLIN};
        uint64_t count;
        CHECK(poll(&raised, 1, 60000) == 1);
        CHECK(read(fd, &count, sizeof count) == sizeof count && count == 1);
        CHECK(read(fd, &count, sizeof count) == -1 && errno == EAGAIN);
    }
    while ((__atomic_load_n(&completion[3], __ATOMIC_ACQUIRE) >> 16 & 1) != admin->phase) {
    }
    CHECK(completion[3] >> 17 == 0 && (completion[3] & 0xffff) == 7);
    admin->head = (admin->head + 1) % DEPTH;
    admin->phase ^= admin->head == 0;
    pf_write32(&admin->bar, DOORBELLS + admin->stride, admin->head);
}

/* Whether it is what a controller says of itself: its largest queue entries are 64 and 16 bytes. */
static int identified(const char *data) {
    return (data[512] & 15) == 6 && (data[513] & 15) == 4;
}

/* Memory that was mapped before there was a device, and after; two devices in one domain. */
static void before_any_device(uint32_t interface) {
    struct pf_arena_opts opts = {
        .struct_size = sizeof opts, .size = 1 << 20, .policy = PF_POLICY_WHOLE};
    static char own[4096] __attribute__((aligned(4096)));
    pf_domain_t *domain, *other, *none;
    pf_device_t *devices[2], *no_device;
    pf_arena_t *whole, *arena;
    pf_owner_t *owner;
    pf_reg_t *reg;
    pf_map_t early, gone, late;
    uint64_t iova, own_iova, early_iova, gone_iova, late_iova;
    struct admin admin[2];
    struct pf_domain_opts of = {.struct_size = sizeof of, .iommu = interface};
    OK(pf_domain_create(&of, &domain));
    OK(pf_arena_create(domain, &opts, &whole));
    opts.policy = PF_POLICY_PER_USE;
    OK(pf_arena_create(domain, &opts, &arena));
    OK(pf_owner_create(domain, &owner));
    OK(pf_register(domain, own, sizeof own, &reg));
    OK(pf_iova(domain, own, 1, &own_iova));
    char *memory = pf_alloc(whole, 2 * 3 * 4096, &iova), *buffers = pf_alloc(arena, 3 * 4096, NULL);
    OK(pf_map(owner, buffers, 4096, PF_FROM_DEVICE, &early, &early_iova));
    OK(pf_map(owner, buffers + 4096, 4096, PF_BIDIR, &gone, &gone_iova));
    OK(pf_unmap(owner, gone));

    OK(pf_device_open(domain, FIRST, &devices[0]));
    REFUSED(EBUSY, FIRST, pf_device_open(domain, FIRST, &devices[1]));
    OK(pf_domain_attach(domain, SECOND));
    OK(pf_device_open(domain, SECOND, &devices[1]));
    REFUSED(EBUSY, "open already", pf_device_open(domain, SECOND, &devices[1]));
    REFUSED(EEXIST, SECOND, pf_domain_attach(domain, SECOND));
    REFUSED(EEXIST, SECOND, pf_domain_attach(domain, "02:00.0"));
    /* A device of this process, in whatever way it is its, is no other domain's. */
    OK(pf_domain_create(&of, &other));
    REFUSED(EBUSY, "open already", pf_domain_attach(domain, FIRST));
    REFUSED(EBUSY, "open already", pf_domain_attach(other, FIRST));
    REFUSED(EBUSY, "open already", pf_domain_vfio(FIRST, interface, &none));
    /* It has a driver, which still drives it after the refusal. */
    REFUSED(EBUSY, "pf_device_destroy", pf_domain_detach(domain, SECOND));
    REFUSED(ENODEV, "not attached", pf_domain_detach(domain, FIRST));
    OK(pf_map(owner, buffers + 8192, 4096, PF_FROM_DEVICE, &late, &late_iova));
    for (int i = 0; i < 2; i++) {
        enable(&admin[i], devices[i], memory + i * 3 * 4096, iova + (uint64_t)i * 3 * 4096);
        memset(buffers, 0, 3 * 4096), memset(own, 0, 4096);
        identify(&admin[i], admin[i].iova + 8192, -1);
        identify(&admin[i], early_iova, -1);
        identify(&admin[i], late_iova, -1);
        identify(&admin[i], own_iova, -1);
        identify(&admin[i], own_iova, -1); /* the ring's first place again */
        CHECK(identified(admin[i].memory + 8192) && identified(buffers) && identified(buffers + 8192));
        CHECK(identified(own) && !identified(buffers + 4096));
    }
    for (int i = 0; i < 2; i++) {
        disable(&admin[i]);
        OK(pf_device_destroy(devices[i]));
    }
    /* It was closed; the second one is still attached, and may be opened again. */
    REFUSED(EBUSY, "another domain", pf_device_open(other, SECOND, &no_device));
    REFUSED(EBUSY, "another domain", pf_domain_attach(other, SECOND));
    REFUSED(EBUSY, "another domain", pf_domain_vfio("02:00.0", interface, &none));
    /* The first one's group was closed with it: another domain can have it, and gives it back. */
    OK(pf_device_open(other, FIRST, &no_device));
    OK(pf_device_destroy(no_device));
    OK(pf_device_open(domain, SECOND, &devices[1]));
    OK(pf_device_destroy(devices[1]));
    OK(pf_device_open(domain, FIRST, &devices[0]));
    OK(pf_device_destroy(devices[0]));
    OK(pf_domain_detach(domain, "02:00.0"));
    OK(pf_domain_attach(domain, SECOND));
    OK(pf_domain_detach(domain, SECOND));
    /* What is mapped stays so without a device. */
    OK(pf_device_open(domain, FIRST, &devices[0]));
    memset(buffers, 0, 4096);
    enable(&admin[0], devices[0], memory, iova);
    identify(&admin[0], early_iova, -1);
    CHECK(identified(buffers));
    disable(&admin[0]);
    OK(pf_device_destroy(devices[0]));
    OK(pf_domain_destroy(other));
    OK(pf_unmap(owner, early));
    OK(pf_unmap(owner, late));
    OK(pf_owner_destroy(owner));
    OK(pf_reg_destroy(reg));
    OK(pf_free(whole, memory));
    OK(pf_free(arena, buffers));
    OK(pf_arena_destroy(whole));
    OK(pf_arena_destroy(arena));
    /* Nothing is mapped, so that the domain keeps no device from others. What is mapped from now on is
     * again found by the next device. */
    OK(pf_domain_vfio(FIRST, interface, &none));
    OK(pf_domain_destroy(none));
    opts.policy = PF_POLICY_WHOLE;
    OK(pf_arena_create(domain, &opts, &whole));
    memory = pf_alloc(whole, 3 * 4096, &iova);
    OK(pf_device_open(domain, FIRST, &devices[0]));
    enable(&admin[0], devices[0], memory, iova);
    identify(&admin[0], iova + 8192, -1);
    CHECK(identified(memory + 8192));
    disable(&admin[0]);
    OK(pf_device_destroy(devices[0]));
    OK(pf_free(whole, memory));
    OK(pf_arena_destroy(whole));
    OK(pf_domain_destroy(domain));
}

/* iommufd, as <linux/iommufd.h> has it from Linux 6.2 on. */
static int iommufd_call(int fd, unsigned number, void *argument) {
    return ioctl(fd, _IO(';', 0x80 + number), argument);
}

struct ioas_map {
    uint32_t size, flags, ioas, reserved;
    uint64_t va, len, iova;
};

struct ioas_unmap {
    uint32_t size, ioas;
    uint64_t iova, len;
};

/* Whether the program can unmap `len` bytes: then they were mapped. */
static int unmapped(int fd, uint32_t ioas, uint64_t iova, uint64_t len) {
    struct ioas_unmap one = {.size = sizeof one, .ioas = ioas, .iova = iova, .len = len};
    int failed = iommufd_call(fd, 6, &one);
    CHECK(failed == 0 ? one.len == len : errno == ENOENT);
    return failed == 0;
}

/* A domain in an address space of the program: it maps at the addresses that it was given, a device
 * reaches what both have mapped, and its end unmaps what it has mapped and nothing else. */
static void imported(void) {
    enum { OWN = 0x200000, FROM = 0x40000000, LEN = 64 << 20 };
    struct pf_arena_opts opts = {
        .struct_size = sizeof opts, .size = 1 << 19, .policy = PF_POLICY_WHOLE};
    static char own[4096] __attribute__((aligned(4096)));
    uint32_t alloc[3] = {sizeof alloc};
    int fd = open("/dev/iommu", O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0 && iommufd_call(fd, 1, alloc) == 0);
    uint32_t ioas = alloc[2];
    struct ioas_map map = {sizeof map, 7, ioas, 0, (uintptr_t)own, sizeof own, OWN};
    CHECK(iommufd_call(fd, 5, &map) == 0);

    pf_domain_t *domain;
    pf_device_t *device;
    pf_arena_t *whole, *per_use, *none;
    pf_owner_t *owner;
    pf_map_t mapped;
    struct admin admin;
    uint64_t iova, mapped_iova;
    struct pf_domain_opts of = {.struct_size = sizeof of, .ioas = ioas, .iommufd = fd,
                                .iova = FROM, .iova_len = LEN};
    OK(pf_domain_create(&of, &domain));
    OK(pf_arena_create(domain, &opts, &whole));
    opts.policy = PF_POLICY_PER_USE;
    OK(pf_arena_create(domain, &opts, &per_use));
    OK(pf_owner_create(domain, &owner));
    char *memory = pf_alloc(whole, 3 * 4096, &iova), *buffer = pf_alloc(per_use, 4096, NULL);
    OK(pf_map(owner, buffer, 4096, PF_FROM_DEVICE, &mapped, &mapped_iova));
    CHECK(iova >= FROM && iova + 3 * 4096 <= FROM + LEN);
    CHECK(mapped_iova >= FROM && mapped_iova + 4096 <= FROM + LEN);
    /* Its addresses are used up, although the address space has others. */
    opts.policy = PF_POLICY_WHOLE, opts.size = LEN;
    CHECK(pf_arena_create(domain, &opts, &none) < 0);

    OK(pf_device_open(domain, FIRST, &device));
    enable(&admin, device, memory, iova);
    identify(&admin, iova + 8192, -1);
    identify(&admin, mapped_iova, -1);
    identify(&admin, OWN, -1);
    CHECK(identified(memory + 8192) && identified(buffer) && identified(own));
    disable(&admin);
    OK(pf_device_destroy(device));

    OK(pf_unmap(owner, mapped));
    CHECK(!unmapped(fd, ioas, mapped_iova, 4096));
    OK(pf_owner_destroy(owner));
    OK(pf_free(whole, memory));
    OK(pf_free(per_use, buffer));
    OK(pf_domain_destroy(domain));
    /* Its objects keep it, and what is theirs. */
    OK(pf_arena_destroy(per_use));
    OK(pf_arena_destroy(whole));
    CHECK(!unmapped(fd, ioas, FROM, LEN));
    CHECK(fcntl(fd, F_GETFD) == FD_CLOEXEC && unmapped(fd, ioas, OWN, sizeof own));
    CHECK(iommufd_call(fd, 5, &map) == 0 && unmapped(fd, ioas, OWN, sizeof own));

    /* All addresses, and none of its own is made. */
    of.iova = of.iova_len = 0;
    OK(pf_domain_create(&of, &domain));
    OK(pf_arena_create(domain, &opts, &whole));
    OK(pf_arena_destroy(whole));
    OK(pf_domain_destroy(domain));

    of.ioas = 77;
    REFUSED(ENOENT, "IOMMU_IOAS_IOVA_RANGES", pf_domain_create(&of, &domain));
    of.ioas = ioas, of.iommu = PF_IOMMU_TYPE1;
    REFUSED(EINVAL, "PF_IOMMU_TYPE1", pf_domain_create(&of, &domain));
    of.iommu = PF_IOMMU_IOMMUFD, of.iommufd = -1;
    REFUSED(EBADF, "iommufd -1", pf_domain_create(&of, &domain));
    of.iommufd = 1 << 20;
    REFUSED(EBADF, "descriptor 1048576", pf_domain_create(&of, &domain));
    of.iommufd = open("/dev/null", O_RDWR | O_CLOEXEC);
    REFUSED(ENOTTY, "IOMMU_IOAS_IOVA_RANGES", pf_domain_create(&of, &domain));
    CHECK(close(of.iommufd) == 0);
    of.iommufd = fd, of.iova = FROM, of.iova_len = 4096, of.ioas = 0;
    REFUSED(EINVAL, "without `ioas`", pf_domain_create(&of, &domain));
    /* The window of interrupts alone. */
    of.iova = 0xfee00000, of.ioas = ioas;
    CHECK(pf_domain_create(&of, &domain) < 0);

    struct {
        uint32_t size, id;
    } destroy = {sizeof destroy, ioas};
    /* `pinfold check` sees that the device was closed a moment later. */
    for (int i = 0; iommufd_call(fd, 0, &destroy) != 0; i++) {
        CHECK(errno == EBUSY && i < 60000);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    CHECK(close(fd) == 0);
}

/* Memory that the kernel cannot pin when the first device comes: the device is refused, and the domain
 * as before. With iommufd the kernel pins it at once. */
static void refused_by_the_kernel(void) {
    char *own = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct pf_arena_opts opts = {
        .struct_size = sizeof opts, .size = 1 << 20, .policy = PF_POLICY_WHOLE};
    pf_domain_t *domain;
    pf_device_t *device;
    pf_arena_t *arena;
    pf_reg_t *reg;
    struct admin admin;
    uint64_t iova, own_iova;
    struct pf_domain_opts of = {.struct_size = sizeof of, .iommu = PF_IOMMU_TYPE1};
    OK(pf_domain_create(&of, &domain));
    OK(pf_arena_create(domain, &opts, &arena));
    OK(pf_register(domain, own, 8192, &reg));
    OK(pf_iova(domain, own, 1, &own_iova));
    CHECK(own != MAP_FAILED && munmap(own, 8192) == 0);
    REFUSED(EFAULT, "VFIO_IOMMU_MAP_DMA", pf_device_open(domain, FIRST, &device));
    REFUSED(EFAULT, "VFIO_IOMMU_MAP_DMA", pf_domain_attach(domain, FIRST));
    CHECK(mmap(own, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == own);
    OK(pf_device_open(domain, FIRST, &device));
    char *memory = pf_alloc(arena, 3 * 4096, &iova);
    enable(&admin, device, memory, iova);
    identify(&admin, own_iova, -1);
    CHECK(identified(own));
    disable(&admin);
    OK(pf_device_destroy(device));
    OK(pf_reg_destroy(reg));
    CHECK(munmap(own, 8192) == 0);
    OK(pf_free(arena, memory));
    OK(pf_arena_destroy(arena));
    OK(pf_domain_destroy(domain));
}

static uint16_t command_register(pf_device_t *device) {
    uint16_t value;
    OK(pf_device_config_read(device, 4, &value, 2));
    return value;
}

/* Configuration space, bus mastering, interrupts, reset. */
static void driven(uint32_t interface) {
    struct pf_arena_opts opts = {
        .struct_size = sizeof opts, .size = 1 << 20, .policy = PF_POLICY_WHOLE};
    pf_domain_t *domain;
    pf_device_t *device;
    pf_arena_t *arena;
    struct pf_bar bar;
    struct admin admin;
    uint64_t iova;
    uint32_t id, word;
    uint8_t class[3], bytes[64], other[64];
    int fds[4096];
    OK(pf_domain_vfio(FIRST, interface, &domain));
    OK(pf_device_open(domain, FIRST, &device));
    OK(pf_arena_create(domain, &opts, &arena));
    char *memory = pf_alloc(arena, 3 * 4096, &iova);

    OK(pf_device_config_read(device, 0, &id, 4));
    OK(pf_device_config_read(device, 9, class, 3));
    CHECK(id != 0 && id != UINT32_MAX && class[2] == 1 && class[1] == 8 && class[0] == 2);
    OK(pf_device_config_read(device, 0, bytes, sizeof bytes));
    for (uint64_t at = 0; at < 64; at++)
        OK(pf_device_config_read(device, at, other + at, 1));
    CHECK(memcmp(bytes, other, sizeof bytes) == 0 && memcmp(bytes, &id, 4) == 0);
    /* The line of an interrupt is the program's own to write. */
    bytes[0] = 0x5a;
    OK(pf_device_config_write(device, 0x3c, bytes, 1));
    OK(pf_device_config_read(device, 0x3c, other, 1));
    CHECK(other[0] == 0x5a);
    OK(pf_device_config_read(device, 0, NULL, 0));
    OK(pf_device_config_write(device, 0, NULL, 0));
    REFUSED(EFAULT, "`buf` is NULL", pf_device_config_read(device, 0, NULL, 1));
    REFUSED(EFAULT, "`buf` is NULL", pf_device_config_write(device, 0, NULL, 1));
    REFUSED(EINVAL, "at most 4096", pf_device_config_read(device, 0, memory, 4097));
    REFUSED(EINVAL, "at most 4096", pf_device_config_write(device, 0, memory, 4097));
    REFUSED(EINVAL, "of configuration space", pf_device_config_read(device, 4096, &word, 1));
    REFUSED(EINVAL, "not inside", pf_device_config_write(device, UINT64_MAX, &word, 4));

    CHECK((command_register(device) & 4) == 0);
    OK(pf_device_bus_master(device, 1));
    CHECK((command_register(device) & 6) == 6);
    OK(pf_device_bus_master(device, 0));
    CHECK((command_register(device) & 6) == 2);
    REFUSED(EINVAL, "on 2", pf_device_bus_master(device, 2));

    REFUSED(EFAULT, "`bar` is NULL", pf_device_bar(device, 0, NULL));
    REFUSED(ENXIO, "BAR 6", pf_device_bar(device, 6, &bar));
    REFUSED(ENXIO, "BAR 4294967295", pf_device_bar(device, UINT32_MAX, &bar));
    REFUSED(ENXIO, "BAR 3", pf_device_bar(device, 3, &bar));

    int has = (int)VALUE(pf_device_irqs(device, 0, NULL));
    CHECK(has > 1 && has < 4096);
    REFUSED(EFAULT, "`fds` is NULL", pf_device_irqs(device, 1, NULL));
    REFUSED(EINVAL, "it has", pf_device_irqs(device, (unsigned)has + 1, fds));
    CHECK(VALUE(pf_device_irqs(device, 2, fds)) == has);
    REFUSED(EBUSY, "pf_device_irqs with 0", pf_device_irqs(device, 1, fds + 2));
    enable(&admin, device, memory, iova);
    for (int i = 0; i < 6; i++) {
        memset(memory + 8192, 0, 4096);
        identify(&admin, iova + 8192, fds[0]);
        CHECK(identified(memory + 8192));
    }
    CHECK(poll(&(struct pollfd){.fd = fds[1], .events = POLLIN}, 1, 0) == 0);
    disable(&admin);
    /* All of them, after those were given back. */
    int before = fds[0];
    VALUE(pf_device_irqs(device, 0, NULL));
    CHECK(write(before, "12345678", 8) == -1 && errno == EBADF);
    VALUE(pf_device_irqs(device, (unsigned)has, fds));
    enable(&admin, device, memory, iova);
    identify(&admin, iova + 8192, fds[0]);
    /* A reset ends all of it. */
    OK(pf_device_reset(device));
    CHECK((pf_read32(&admin.bar, CSTS) & 1) == 0 && (pf_read32(&admin.bar, CC) & 1) == 0);
    enable(&admin, device, memory, iova);
    identify(&admin, iova + 8192, -1);
    disable(&admin);
    /* It is driven by one driver. */
    struct pf_nvme_opts controller = {.struct_size = sizeof controller, .bdf = FIRST};
    pf_nvme_t *nvme;
    REFUSED(EBUSY, "pf_device_destroy", pf_nvme_open(domain, arena, &controller, &nvme));
    OK(pf_device_destroy(device));
    CHECK(write(fds[0], "12345678", 8) == -1 && errno == EBADF);
    REFUSED(EBADF, "destroyed", pf_device_destroy(device));
    REFUSED(EBADF, "destroyed", pf_device_bar(device, 0, &bar));
    OK(pf_nvme_open(domain, arena, &controller, &nvme));
    REFUSED(EBUSY, "pf_nvme_destroy", pf_device_open(domain, FIRST, &device));
    REFUSED(EBUSY, "pf_nvme_destroy", pf_domain_detach(domain, FIRST));
    OK(pf_nvme_destroy(nvme));
    OK(pf_device_open(domain, FIRST, &device));
    CHECK((command_register(device) & 4) == 0); /* the driver before has switched it off */
    OK(pf_device_bus_master(device, 1));
    OK(pf_device_destroy(device));
    OK(pf_device_open(domain, FIRST, &device));
    CHECK((command_register(device) & 4) == 0);
    /* The device keeps what it needs of its domain. */
    OK(pf_free(arena, memory));
    OK(pf_arena_destroy(arena));
    REFUSED(EBUSY, "pf_device_destroy", pf_domain_detach(domain, FIRST));
    OK(pf_domain_destroy(domain));
    OK(pf_device_config_read(device, 0, &word, 4));
    CHECK(word == id);
    /* Closed by the program: the library closes nothing in its place. */
    VALUE(pf_device_irqs(device, 2, fds));
    int own = open("/dev/null", O_RDONLY | O_CLOEXEC);
    CHECK(own >= 0 && dup2(own, fds[0]) == fds[0] && close(fds[1]) == 0);
    OK(pf_device_destroy(device));
    CHECK(fcntl(fds[0], F_GETFD) >= 0 && close(fds[0]) == 0 && close(own) == 0);
}

static void *disturb(void *device) {
    struct pf_bar bar;
    for (int i = 0; i < 2000; i++)
        OK(pf_device_bar(device, 0, &bar));
    return NULL;
}

static void refusals(void) {
    pf_domain_t *domain, *soft;
    pf_device_t *device = NULL;
    struct pf_bar bar;
    uint32_t word;
    struct pf_domain_opts opts = {.struct_size = sizeof opts, .iommu = 7};
    REFUSED(EFAULT, "`out` is NULL", pf_domain_create(NULL, NULL));
    REFUSED(EINVAL, "iommu 0x7", pf_domain_create(&opts, &domain));
    opts.iommu = PF_IOMMU_BEST;
    opts.reserved = 1;
    REFUSED(EINVAL, "reserved 0x1", pf_domain_create(&opts, &domain));
    opts.reserved = 0;
    opts.struct_size = 0;
    REFUSED(EINVAL, "set their first field to sizeof", pf_domain_create(&opts, &domain));
    OK(pf_domain_create(NULL, &domain));
    OK(pf_domain_soft(&soft));
    REFUSED(EFAULT, "`out` is NULL", pf_device_open(domain, FIRST, NULL));
    REFUSED(EFAULT, "`bdf` is NULL", pf_device_open(domain, NULL, &device));
    REFUSED(EINVAL, "nonsense", pf_device_open(domain, "nonsense", &device));
    REFUSED(ENODEV, "fffe:1f:1f.7", pf_device_open(domain, "fffe:1f:1f.7", &device));
    REFUSED(ENOTSUP, "pf_domain_create", pf_device_open(soft, FIRST, &device));
    REFUSED(EBADF, "no handle of a domain", pf_device_open(NULL, FIRST, &device));
    CHECK(device == NULL);
    pf_port_t *port;
    REFUSED(ENOTSUP, "pf_domain_soft", pf_port_open(domain, &port));
    REFUSED(EBADF, "no handle", pf_device_bar(NULL, 0, &bar));
    REFUSED(EBADF, "no handle", pf_device_config_read(NULL, 0, &word, 4));
    REFUSED(EBADF, "no handle", pf_device_config_write(NULL, 0, &word, 4));
    REFUSED(EBADF, "no handle", pf_device_irqs(NULL, 0, NULL));
    REFUSED(EBADF, "no handle", pf_device_bus_master(NULL, 1));
    REFUSED(EBADF, "no handle", pf_device_reset(NULL));
    OK(pf_device_destroy(NULL));
    /* From several threads. */
    pthread_t threads[2];
    OK(pf_device_open(domain, FIRST, &device));
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&threads[i], NULL, disturb, device) == 0);
    for (int i = 0; i < 2; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    OK(pf_device_destroy(device));
    OK(pf_domain_destroy(soft));
    OK(pf_domain_destroy(domain));
}

int main(int argc, char **argv) {
    static const uint32_t interfaces[] = {PF_IOMMU_TYPE1, PF_IOMMU_BEST, PF_IOMMU_IOMMUFD};
    int without = argc > 1 && strcmp(argv[1], "type1") == 0;
    refusals();
    refused_by_the_kernel();
    if (!without)
        imported();
    for (int i = 0; i < (without ? 2 : 3); i++) {
        before_any_device(interfaces[i]);
        driven(interfaces[i]);
    }
    puts("driver: ok");
    return 0;
}
