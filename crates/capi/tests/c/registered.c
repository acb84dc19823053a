/* Registered memory: every function, and every misuse. */
#include "check.h"
#include <fcntl.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static pf_domain_t *domain;
static const size_t size = 2 << 20;
static char *memory;
static pf_reg_t *reg;

static char *pages(size_t bytes, int protection) {
    char *va = mmap(NULL, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(va != MAP_FAILED);
    return va;
}

static void create(void) {
    pf_reg_t *other;
    pf_domain_t *second;
    uint64_t iova, there;
    OK(pf_domain_soft(&domain));
    OK(pf_domain_soft(&second));
    memory = pages(size, PROT_READ | PROT_WRITE);
    REFUSED(EFAULT, "`out` is NULL", pf_register(domain, memory, size, NULL));
    REFUSED(EBADF, "no handle of a domain", pf_register(NULL, memory, size, &reg));
    REFUSED(EFAULT, "`va` is NULL", pf_register(domain, NULL, size, &reg));
    REFUSED(EINVAL, "multiples of 4096", pf_register(domain, memory + 1, size - 4096, &reg));
    REFUSED(EINVAL, "multiples of 4096", pf_register(domain, memory, size - 1, &reg));
    REFUSED(EINVAL, "multiples of 4096", pf_register(domain, memory, 0, &reg));
    REFUSED(EINVAL, "beyond the last address", pf_register(domain, memory, SIZE_MAX - 4095, &reg));
    REFUSED(EFAULT, "cannot be read and written", pf_register(domain, memory, (size_t)1 << 46, &reg));
    /* Not mapped, and only to be read. */
    char *hole = pages(3 * 4096, PROT_READ | PROT_WRITE);
    CHECK(munmap(hole + 4096, 4096) == 0);
    REFUSED(EFAULT, "cannot be read and written", pf_register(domain, hole, 3 * 4096, &other));
    char *constant = pages(4096, PROT_READ);
    REFUSED(EFAULT, "cannot be read and written", pf_register(domain, constant, 4096, &other));

    OK(pf_register(domain, memory, size, &reg));
    OK(pf_iova(domain, memory + 12345, size - 12345, &iova));
    CHECK(iova % 4096 == 12345 % 4096);
    REFUSED(EINVAL, "not inside", pf_iova(domain, memory, size + 1, &iova));
    /* Overlaps, in any way. */
    REFUSED(EEXIST, "pf_reg_destroy", pf_register(domain, memory, size, &other));
    REFUSED(EEXIST, "pf_reg_destroy", pf_register(domain, memory + 4096, 4096, &other));
    char *longer = pages(4 * 4096, PROT_READ | PROT_WRITE);
    pf_reg_t *middle;
    OK(pf_register(domain, longer + 4096, 4096, &middle));
    REFUSED(EEXIST, "0x1000 bytes", pf_register(domain, longer, 4 * 4096, &other));
    REFUSED(EEXIST, "0x1000 bytes", pf_register(domain, longer, 2 * 4096, &other));
    OK(pf_register(domain, longer, 4096, &other));
    OK(pf_reg_destroy(other));
    OK(pf_reg_destroy(middle));
    OK(pf_register(domain, longer, 4 * 4096, &other));
    OK(pf_reg_destroy(other));
    REFUSED(EBADF, "destroyed", pf_reg_destroy(other));
    struct pf_arena_opts opts = {.struct_size = sizeof opts, .size = size};
    pf_arena_t *arena;
    opts.va = memory;
    REFUSED(EEXIST, "are registered", pf_arena_create(domain, &opts, &arena));
    opts.va = NULL;
    OK(pf_arena_create(domain, &opts, &arena));
    char *buffer = pf_alloc(arena, 8192, NULL);
    REFUSED(EEXIST, "an arena's", pf_register(domain, buffer, 8192, &other));
    /* In a second domain. */
    OK(pf_register(second, memory, size, &other));
    OK(pf_iova(second, memory, size, &there));
    OK(pf_reg_destroy(other));
    REFUSED(ENXIO, "no memory of this domain", pf_iova(second, memory, 1, &there));
    OK(pf_iova(domain, memory, size, &there));
    OK(pf_free(arena, buffer));
    OK(pf_arena_destroy(arena));
    OK(pf_domain_destroy(second));
    REFUSED(EBADF, "not of a registration", pf_reg_destroy((pf_reg_t *)domain));
    REFUSED(EBADF, "no handle", pf_reg_destroy((pf_reg_t *)&reg));
    OK(pf_reg_destroy(NULL));
}

static void mapped(void) {
    pf_owner_t *owner;
    pf_map_t map;
    pf_ticket_t ticket;
    uint64_t iova, fixed;
    OK(pf_owner_create(domain, &owner));
    OK(pf_map(owner, memory + 100, 200, PF_TO_DEVICE, &map, &iova));
    OK(pf_iova(domain, memory + 100, 200, &fixed));
    CHECK(iova == fixed);
    REFUSED(EBUSY, "1 mapping", pf_reg_destroy(reg));
    CHECK(pf_revoke_many(owner, &map, 1, &ticket) == PF_STAYS_MAPPED);
    REFUSED(EBUSY, "1 mapping", pf_reg_destroy(reg));
    OK(pf_wait(owner, ticket, 0));
    OK(pf_owner_destroy(owner));
}

static void described(void) {
    pf_block_t segment[2] = {{.tag = 77}, {.tag = 78}};
    uint64_t iova, prp[2] = {1, 2}, kept[2] = {1, 2};
    OK(pf_iova(domain, memory, 1, &iova));
    REFUSED(EFAULT, "`segments` is NULL", pf_segments(reg, 0, 1, NULL, 1));
    REFUSED(EBADF, "no handle", pf_segments(NULL, 0, 1, segment, 1));
    REFUSED(EINVAL, "at least 1", pf_segments(reg, 0, 0, segment, 1));
    REFUSED(EINVAL, "not inside", pf_segments(reg, size, 1, segment, 1));
    REFUSED(EINVAL, "not inside", pf_segments(reg, SIZE_MAX, 2, segment, 1));
    REFUSED(EINVAL, "not inside", pf_segments(reg, 1, size, segment, 1));
    REFUSED(ENOSPC, "0 segments", pf_segments(reg, 0, 1, segment, 0));
    CHECK(segment[0].va == NULL && segment[0].tag == 77);
    CHECK(pf_segments(reg, 5001, 100001, segment, 2) == 1);
    CHECK(segment[0].va == memory + 5001 && segment[0].iova == iova + 5001);
    CHECK(segment[0].len == 100001 && segment[0].tag == 77 && segment[1].va == NULL);

    /* PRP entries: one page, two, and lists. */
    REFUSED(EFAULT, "`prp` is NULL", pf_prp(reg, 0, 1, NULL, 0, NULL));
    REFUSED(EFAULT, "`lists` is NULL", pf_prp(reg, 0, 1, NULL, 1, prp));
    REFUSED(EBADF, "not of a registration", pf_prp((pf_reg_t *)domain, 0, 1, NULL, 0, prp));
    REFUSED(EINVAL, "multiple of 4", pf_prp(reg, 2, 4096, NULL, 0, prp));
    REFUSED(EINVAL, "not inside", pf_prp(reg, 4096, size, NULL, 0, prp));
    REFUSED(ENOSPC, "all 0 list pages", pf_prp(reg, 0, 3 * 4096, NULL, 0, prp));
    CHECK(memcmp(prp, kept, sizeof prp) == 0);
    CHECK(pf_prp(reg, 512, 3584, NULL, 0, prp) == 0 && prp[0] == iova + 512 && prp[1] == 0);
    CHECK(pf_prp(reg, 512, 3585, NULL, 0, prp) == 0 && prp[1] == iova + 4096);
    uint64_t *list = (uint64_t *)pages(4096, PROT_READ | PROT_WRITE);
    pf_block_t lists[2] = {{.va = list, .iova = 0x7000000, .len = 4096}, {.va = NULL}};
    REFUSED(EFAULT, "list page 1", pf_prp(reg, 0, 3 * 4096, lists, 2, prp));
    lists[1] = (pf_block_t){.va = (char *)list + 4, .len = 4096};
    REFUSED(EINVAL, "list page 1", pf_prp(reg, 0, 3 * 4096, lists, 2, prp));
    CHECK(pf_prp(reg, 512, 3 * 4096, lists, 1, prp) == 1);
    CHECK(prp[0] == iova + 512 && prp[1] == 0x7000000);
    for (int i = 0; i < 3; i++)
        CHECK(list[i] == iova + 4096 * (i + 1));
    /* More than are used, which are looked at all the same; not those behind the 64th. */
    static pf_block_t many[66];
    for (int i = 0; i < 64; i++)
        many[i] = lists[0];
    CHECK(pf_prp(reg, 512, 3 * 4096, many, 66, prp) == 1 && prp[1] == 0x7000000);
    many[63].va = NULL;
    REFUSED(EFAULT, "list page 63", pf_prp(reg, 512, 3 * 4096, many, 66, prp));
    /* An array that is not aligned. */
    static char bytes[1 + sizeof(pf_block_t)];
    memcpy(bytes + 1, lists, sizeof *lists);
    CHECK(pf_prp(reg, 512, 3 * 4096, (const pf_block_t *)(const void *)(bytes + 1), 1, prp) == 1);
    lists[0].iova++;
    REFUSED(EINVAL, "as a list page", pf_prp(reg, 0, 3 * 4096, lists, 1, prp));
    lists[0].iova--;
    lists[0].len = 2048;
    REFUSED(EINVAL, "as a list page", pf_prp(reg, 0, 3 * 4096, lists, 1, prp));

    /* An SGL: one descriptor, since the memory is one piece. */
    uint8_t sgl[16] = {0}, expected[16] = {0};
    REFUSED(EFAULT, "`sgl1` is NULL", pf_sgl(reg, 0, 1, NULL, 0, NULL));
    REFUSED(EINVAL, "not inside", pf_sgl(reg, 0, size + 1, NULL, 0, sgl));
    REFUSED(EBADF, "no handle", pf_sgl(NULL, 0, 1, NULL, 0, sgl));
    REFUSED(EFAULT, "`lists` is NULL", pf_sgl(reg, 0, 1, NULL, 1, sgl));
    CHECK(pf_sgl(reg, 4097, 1000001, lists, 1, sgl) == 0);
    CHECK(pf_sgl(reg, 4097, 1000001, NULL, 0, sgl) == 0);
    uint64_t address = iova + 4097;
    uint32_t len = 1000001;
    memcpy(expected, &address, 8);
    memcpy(expected + 8, &len, 4);
    CHECK(memcmp(sgl, expected, 16) == 0);
}

/* A ring by system calls. */
struct ring {
    int fd;
    struct io_uring_params params;
    char *rings;
    struct io_uring_sqe *entries;
};

static int open_ring(struct ring *ring) {
    memset(ring, 0, sizeof *ring);
    ring->fd = (int)syscall(SYS_io_uring_setup, 4, &ring->params);
    if (ring->fd < 0)
        return 0;
    CHECK(ring->params.features & IORING_FEAT_SINGLE_MMAP);
    size_t bytes = ring->params.cq_off.cqes + ring->params.cq_entries * sizeof(struct io_uring_cqe);
    ring->rings = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ring->fd, IORING_OFF_SQ_RING);
    ring->entries = mmap(NULL, 4 * sizeof *ring->entries, PROT_READ | PROT_WRITE, MAP_SHARED, ring->fd,
                         IORING_OFF_SQES);
    CHECK(ring->rings != MAP_FAILED && ring->entries != MAP_FAILED);
    return 1;
}

/* Reads a file into registered memory, and returns the result. */
static int read_fixed(struct ring *ring, int file, void *to, unsigned len, unsigned index) {
    unsigned *tail = (unsigned *)(ring->rings + ring->params.sq_off.tail);
    unsigned *array = (unsigned *)(ring->rings + ring->params.sq_off.array);
    unsigned mask = *(unsigned *)(ring->rings + ring->params.sq_off.ring_mask);
    ring->entries[*tail & mask] = (struct io_uring_sqe){.opcode = IORING_OP_READ_FIXED,
                                                        .fd = file,
                                                        .addr = (uintptr_t)to,
                                                        .len = len,
                                                        .buf_index = (uint16_t)index};
    array[*tail & mask] = *tail & mask;
    __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
    CHECK(syscall(SYS_io_uring_enter, ring->fd, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) == 1);
    unsigned *head = (unsigned *)(ring->rings + ring->params.cq_off.head);
    struct io_uring_cqe *done = (void *)(ring->rings + ring->params.cq_off.cqes);
    unsigned done_mask = *(unsigned *)(ring->rings + ring->params.cq_off.ring_mask);
    CHECK(__atomic_load_n((unsigned *)(ring->rings + ring->params.cq_off.tail), __ATOMIC_ACQUIRE) !=
          *head);
    int result = done[*head & done_mask].res;
    __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
    return result;
}

static void in_a_ring(void) {
    struct ring ring;
    int null = open("/dev/null", O_RDWR);
    REFUSED(EBADF, "no ring", pf_uring_register(reg, -1, 0));
    REFUSED(EBADF, "not a usable io_uring", pf_uring_register(reg, null, 0));
    if (!open_ring(&ring)) {
        printf("registered: no io_uring here (%s): its part is skipped\n", strerror(errno));
        return;
    }
    REFUSED(EBADF, "no handle", pf_uring_register(NULL, ring.fd, 0));
    REFUSED(ENXIO, "sparse", pf_uring_register(reg, ring.fd, 0));
    struct io_uring_rsrc_register table = {.nr = 4, .flags = IORING_RSRC_REGISTER_SPARSE};
    CHECK(syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_BUFFERS2, &table, sizeof table) == 0);
    REFUSED(EINVAL, "table has no", pf_uring_register(reg, ring.fd, 4));
    REFUSED(EINVAL, "place 65536", pf_uring_register(reg, ring.fd, 65536));
    REFUSED(ENOENT, "not at place 2", pf_uring_unregister(reg, ring.fd, 2));

    char name[] = "/tmp/pinfold-capi-XXXXXX", text[] = "through a fixed buffer";
    int file = mkstemp(name);
    CHECK(file >= 0 && unlink(name) == 0);
    CHECK(pwrite(file, text, sizeof text, 0) == sizeof text);
    CHECK(read_fixed(&ring, file, memory + 5000, sizeof text, 2) == -EFAULT);
    OK(pf_uring_register(reg, ring.fd, 2));
    OK(pf_uring_register(reg, ring.fd, 2)); /* again: replaced */
    REFUSED(EBUSY, "in 1 ring table", pf_reg_destroy(reg));
    CHECK(read_fixed(&ring, file, memory + 5000, sizeof text, 2) == sizeof text);
    CHECK(strcmp(memory + 5000, text) == 0);
    CHECK(read_fixed(&ring, file, memory + 5000, sizeof text, 1) == -EFAULT);
    OK(pf_uring_register(reg, ring.fd, 0));
    REFUSED(EBUSY, "in 2 ring tables", pf_reg_destroy(reg));
    OK(pf_uring_unregister(reg, ring.fd, 2));
    REFUSED(ENOENT, "not at place 2", pf_uring_unregister(reg, ring.fd, 2));
    CHECK(read_fixed(&ring, file, memory + 5000, sizeof text, 2) == -EFAULT);
    CHECK(read_fixed(&ring, file, memory, sizeof text, 0) == sizeof text);
    /* Another registration takes the place, which its end by the first one does not empty. */
    char *more = pages(4096, PROT_READ | PROT_WRITE);
    pf_reg_t *second;
    OK(pf_register(domain, more, 4096, &second));
    OK(pf_uring_register(reg, ring.fd, 1));
    OK(pf_uring_register(second, ring.fd, 1));
    REFUSED(EBUSY, "in 1 ring table", pf_reg_destroy(reg));
    REFUSED(ENOENT, "not at place 1", pf_uring_unregister(reg, ring.fd, 1));
    CHECK(read_fixed(&ring, file, more, sizeof text, 1) == sizeof text);
    REFUSED(EBUSY, "in 1 ring table", pf_reg_destroy(second));
    OK(pf_uring_unregister(second, ring.fd, 1));
    OK(pf_reg_destroy(second));
    CHECK(munmap(more, 4096) == 0);
    /* An arena, which is registered nowhere else for it, and is not ended meanwhile. */
    struct pf_arena_opts opts = {.struct_size = sizeof opts, .size = size, .policy = PF_POLICY_PER_USE};
    pf_arena_t *arena;
    OK(pf_arena_create(domain, &opts, &arena));
    char *buffer = pf_alloc(arena, 8192, NULL);
    REFUSED(EBADF, "not of an arena", pf_uring_register_arena((pf_arena_t *)reg, ring.fd, 1));
    REFUSED(EBADF, "not a usable io_uring", pf_uring_register_arena(arena, null, 1));
    REFUSED(EINVAL, "table has no", pf_uring_register_arena(arena, ring.fd, 4));
    CHECK(read_fixed(&ring, file, buffer + 100, sizeof text, 1) == -EFAULT);
    OK(pf_uring_register_arena(arena, ring.fd, 1));
    CHECK(read_fixed(&ring, file, buffer + 100, sizeof text, 1) == sizeof text);
    CHECK(strcmp(buffer + 100, text) == 0);
    OK(pf_free(arena, buffer));
    REFUSED(EBUSY, "in 1 ring table", pf_arena_destroy(arena));
    REFUSED(ENOENT, "not at place 2", pf_uring_unregister_arena(arena, ring.fd, 2));
    REFUSED(ENOENT, "not at place 1", pf_uring_unregister(reg, ring.fd, 1));
    OK(pf_uring_unregister_arena(arena, ring.fd, 1));
    CHECK(read_fixed(&ring, file, buffer + 100, sizeof text, 1) == -EFAULT);
    OK(pf_uring_register_arena(arena, ring.fd, 1));
    OK(pf_uring_register(reg, ring.fd, 1)); /* replaced */
    REFUSED(ENOENT, "not at place 1", pf_uring_unregister_arena(arena, ring.fd, 1));
    OK(pf_arena_destroy(arena));
    OK(pf_uring_unregister(reg, ring.fd, 1));
    REFUSED(EBADF, "destroyed", pf_uring_register_arena(arena, ring.fd, 1));
    /* Another ring takes the number of one that was closed. */
    struct ring other;
    CHECK(open_ring(&other));
    CHECK(syscall(SYS_io_uring_register, other.fd, IORING_REGISTER_BUFFERS2, &table, sizeof table) == 0);
    struct iovec there = {memory, 4096};
    struct io_uring_rsrc_update2 update = {.data = (uintptr_t)&there, .nr = 1};
    CHECK(syscall(SYS_io_uring_register, other.fd, IORING_REGISTER_BUFFERS_UPDATE, &update,
                  sizeof update) == 1);
    CHECK(dup2(other.fd, ring.fd) == ring.fd);
    OK(pf_uring_unregister(reg, ring.fd, 0));
    CHECK(read_fixed(&other, file, memory, sizeof text, 0) == sizeof text);
    /* A table that the program has unregistered. */
    OK(pf_uring_register(reg, other.fd, 3));
    CHECK(syscall(SYS_io_uring_register, other.fd, IORING_UNREGISTER_BUFFERS, NULL, 0) == 0);
    OK(pf_uring_unregister(reg, other.fd, 3));
    REFUSED(ENXIO, "sparse", pf_uring_register(reg, other.fd, 3));
    close(ring.fd), close(other.fd);
    /* A ring by two numbers: what takes the place by the one is what has it by the other. */
    OK(pf_arena_create(domain, &opts, &arena));
    CHECK(open_ring(&ring));
    CHECK(syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_BUFFERS2, &table, sizeof table) == 0);
    int same = dup(ring.fd);
    CHECK(same >= 0);
    OK(pf_uring_register_arena(arena, ring.fd, 0));
    OK(pf_uring_register(reg, same, 0));
    REFUSED(ENOENT, "not at place 0", pf_uring_unregister_arena(arena, ring.fd, 0));
    CHECK(read_fixed(&ring, file, memory, sizeof text, 0) == sizeof text);
    OK(pf_arena_destroy(arena));
    OK(pf_uring_unregister(reg, ring.fd, 0));
    /* A number of two rings, the first of which lives: each has its memory. */
    OK(pf_arena_create(domain, &opts, &arena));
    buffer = pf_alloc(arena, 4096, NULL);
    OK(pf_uring_register_arena(arena, ring.fd, 1));
    OK(pf_uring_register(reg, ring.fd, 2));
    CHECK(open_ring(&other));
    CHECK(syscall(SYS_io_uring_register, other.fd, IORING_REGISTER_BUFFERS2, &table, sizeof table) == 0);
    int number = ring.fd;
    CHECK(dup2(other.fd, number) == number);
    ring.fd = same;
    OK(pf_uring_register(reg, number, 1));
    OK(pf_uring_register(reg, number, 2));
    CHECK(read_fixed(&ring, file, buffer, sizeof text, 1) == sizeof text);
    OK(pf_free(arena, buffer));
    REFUSED(EBUSY, "in 1 ring table", pf_arena_destroy(arena));
    REFUSED(EBUSY, "in 3 ring tables", pf_reg_destroy(reg));
    /* The one that has the number now, and then the one that had it. */
    OK(pf_uring_unregister(reg, number, 2));
    CHECK(read_fixed(&ring, file, memory, sizeof text, 2) == sizeof text);
    CHECK(read_fixed(&other, file, memory, sizeof text, 2) == -EFAULT);
    OK(pf_uring_unregister(reg, number, 2));
    CHECK(read_fixed(&ring, file, memory, sizeof text, 2) == -EFAULT);
    REFUSED(ENOENT, "not at place 2", pf_uring_unregister(reg, number, 2));
    OK(pf_uring_unregister_arena(arena, number, 1));
    OK(pf_uring_unregister(reg, number, 1));
    OK(pf_arena_destroy(arena));
    close(number), close(same), close(other.fd), close(file), close(null);
}

static void *use(void *stop) {
    pf_owner_t *owner;
    OK(pf_owner_create(domain, &owner));
    while (!__atomic_load_n((int *)stop, __ATOMIC_RELAXED)) {
        pf_map_t map;
        uint64_t iova;
        int result = pf_map(owner, memory, 4096, PF_BIDIR, &map, &iova);
        CHECK(result == 0 || result == -ENXIO);
        if (result == 0)
            CHECK(pf_unmap(owner, map) == PF_STAYS_MAPPED);
        usleep(20);
    }
    OK(pf_owner_destroy(owner));
    return NULL;
}

/* Threads map the memory while it is unregistered and registered: no mapping outlives it. */
static void ended_by_threads(void) {
    pthread_t threads[4];
    int stop = 0, ended = 0;
    for (int i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, use, &stop) == 0);
    for (int tries = 0; tries < 2000 || ended < 20; tries++) {
        int result = pf_reg_destroy(reg);
        CHECK(result == 0 || result == -EBUSY);
        if (result == 0) {
            ended++;
            OK(pf_register(domain, memory, size, &reg));
        }
    }
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < 4; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
}

static void full(void) {
    static pf_reg_t *regs[65536];
    const unsigned most = 65535; /* and the one of the other tests */
    char *many = pages((size_t)65536 * 4096, PROT_READ | PROT_WRITE);
    pf_reg_t *none;
    for (unsigned i = 0; i < most; i++)
        OK(pf_register(domain, many + (size_t)i * 4096, 4096, &regs[i]));
    REFUSED(ENFILE, "65536 handles", pf_register(domain, many + (size_t)most * 4096, 4096, &none));
    uint64_t iova;
    REFUSED(ENXIO, "no memory", pf_iova(domain, many + (size_t)most * 4096, 1, &iova));
    for (unsigned i = 0; i < most; i++)
        OK(pf_reg_destroy(regs[i]));
    CHECK(munmap(many, (size_t)65536 * 4096) == 0);
}

int main(void) {
    create();
    mapped();
    described();
    in_a_ring();
    ended_by_threads();
    full();
    /* The domain's handle first: the registration keeps the domain. */
    OK(pf_domain_destroy(domain));
    OK(pf_reg_destroy(reg));
    REFUSED(EBADF, "destroyed", pf_reg_destroy(reg));
    pf_block_t segment;
    REFUSED(EBADF, "destroyed", pf_segments(reg, 0, 1, &segment, 1));
    REFUSED(EBADF, "destroyed", pf_uring_unregister(reg, 0, 0));
    CHECK(munmap(memory, size) == 0);
    puts("registered: ok");
    return 0;
}
