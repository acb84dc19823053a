/* Ports of a software domain: a C program tests its own revocations, and every misuse. */
#include "check.h"
#include <pthread.h>
#include <sched.h>

static pf_domain_t *domain;
static pf_arena_t *arena;
static pf_owner_t *owner;
static pf_port_t *port;

static void create(void) {
    struct pf_arena_opts opts = {.struct_size = sizeof opts, .size = 4 << 20};
    OK(pf_domain_soft(&domain));
    OK(pf_arena_create(domain, &opts, &arena));
    OK(pf_owner_create(domain, &owner));
    REFUSED(EFAULT, "`out` is NULL", pf_port_open(domain, NULL));
    REFUSED(EBADF, "not of a domain", pf_port_open((pf_domain_t *)owner, &port));
    OK(pf_port_open(domain, &port));
    REFUSED(EBADF, "not of a port", pf_port_destroy((pf_port_t *)owner));
    OK(pf_port_destroy(NULL));
}

static struct pf_fault faults(pf_port_t *of) {
    struct pf_fault fault = {.struct_size = sizeof fault, .reserved = 7};
    OK(pf_port_fault(of, &fault));
    CHECK(fault.struct_size == sizeof fault && fault.reserved == 0);
    return fault;
}

/* A write lands while the memory is mapped, and faults from the end of its revocation on. */
static void revoked(void) {
    char *memory = pf_alloc(arena, 3 * 4096, NULL), seen[16] = "";
    pf_map_t map;
    pf_ticket_t ticket;
    uint64_t iova;
    struct pf_fault fault = faults(port);
    CHECK(fault.count == 0 && fault.iova == 0 && fault.kind == 0);

    OK(pf_map(owner, memory + 5, 100, PF_FROM_DEVICE, &map, &iova));
    OK(pf_port_write(port, iova, "a packet", 9));
    CHECK(strcmp(memory + 5, "a packet") == 0);
    REFUSED(EFAULT, "does not allow reads", pf_port_read(port, iova, seen, 9));
    fault = faults(port);
    CHECK(fault.count == 1 && fault.iova == iova && fault.kind == PF_FAULT_NO_READ);
    OK(pf_unmap(owner, map));
    REFUSED(EFAULT, "no mapping", pf_port_write(port, iova, "too late", 9));
    fault = faults(port);
    CHECK(fault.count == 2 && fault.iova == iova && fault.kind == PF_FAULT_NOT_MAPPED);
    CHECK(strcmp(memory + 5, "a packet") == 0);

    OK(pf_map(owner, memory, 4096, PF_TO_DEVICE, &map, &iova));
    OK(pf_port_read(port, iova + 5, seen, 9));
    CHECK(strcmp(seen, "a packet") == 0);
    REFUSED(EFAULT, "does not allow writes", pf_port_write(port, iova, "x", 1));
    CHECK(faults(port).kind == PF_FAULT_NO_WRITE);
    OK(pf_revoke_many(owner, &map, 1, &ticket));
    OK(pf_wait(owner, ticket, UINT64_MAX));
    REFUSED(EFAULT, "no mapping", pf_port_read(port, iova, seen, 9));
    OK(pf_free(arena, memory));
}

/* Across pages, up to the first that is not mapped; each page on its own, in both directions. */
static void across_pages(void) {
    char *memory = pf_alloc(arena, 4 * 4096, NULL);
    static char from[3 * 4096], to[3 * 4096];
    pf_map_t map;
    uint64_t iova;
    for (size_t i = 0; i < sizeof from; i++)
        from[i] = (char)(i % 251 + 1);
    memset(memory, 0, 4 * 4096);
    OK(pf_map(owner, memory, 4 * 4096, PF_BIDIR, &map, &iova));
    for (size_t at = 0; at < 4096; at += 1365) {
        OK(pf_port_write(port, iova + at, from, sizeof from));
        OK(pf_port_read(port, iova + at, to, sizeof to));
        CHECK(memcmp(memory + at, from, sizeof from) == 0 && memcmp(from, to, sizeof to) == 0);
    }
    /* Of each length, at each alignment: those that are read at once, too. */
    for (size_t len = 0; len < 10; len++)
        for (size_t at = 4088; at < 4096; at++) {
            char back[10];
            memset(memory + 4080, 0x55, 32);
            OK(pf_port_write(port, iova + at, from, len));
            CHECK(memcmp(memory + at, from, len) == 0 && memory[at - 1] == 0x55 && memory[at + len] == 0x55);
            OK(pf_port_read(port, iova + at, back, len));
            CHECK(memcmp(back, from, len) == 0);
        }
    /* Memory of the domain itself as the buffer. */
    OK(pf_port_write(port, iova, memory + 4096, 100));
    OK(pf_port_read(port, iova, memory + 1, 4));
    OK(pf_unmap(owner, map));

    OK(pf_map(owner, memory, 8192, PF_BIDIR, &map, &iova));
    memset(memory, 0, 8192), memset(to, 0, sizeof to);
    uint64_t before = faults(port).count;
    REFUSED(EFAULT, "12288 bytes", pf_port_write(port, iova + 4096, from, sizeof from));
    struct pf_fault fault = faults(port);
    CHECK(fault.count == before + 1 && fault.iova == iova + 8192);
    CHECK(memcmp(memory + 4096, from, 4096) == 0);
    REFUSED(EFAULT, "12288 bytes", pf_port_read(port, iova + 4096, to, sizeof to));
    CHECK(faults(port).iova == iova + 8192 && memcmp(to, from, 4096) == 0 && to[4096] == 0);
    OK(pf_unmap(owner, map));
    OK(pf_free(arena, memory));
}

static void refusals(void) {
    char byte = 0;
    uint64_t before = faults(port).count;
    struct pf_fault fault = {.struct_size = 8};
    REFUSED(EFAULT, "`buf` is NULL", pf_port_read(port, 4096, NULL, 1));
    REFUSED(EFAULT, "`buf` is NULL", pf_port_write(port, 4096, NULL, 1));
    OK(pf_port_read(port, 4096, NULL, 0));
    OK(pf_port_write(port, 4096, NULL, 0));
    REFUSED(EFAULT, "`fault` is NULL", pf_port_fault(port, NULL));
    REFUSED(EINVAL, "8 bytes", pf_port_fault(port, &fault));
    REFUSED(EBADF, "no handle of a port", pf_port_read(NULL, 4096, &byte, 1));
    REFUSED(EBADF, "no handle of a port", pf_port_write(NULL, 4096, &byte, 1));
    REFUSED(EBADF, "no handle of a port", pf_port_fault(NULL, &fault));
    CHECK(faults(port).count == before);
    /* Addresses that no table translates, and those that wrap. */
    for (int i = 0; i < 3; i++) {
        static const uint64_t far[] = {UINT64_MAX, UINT64_MAX - 4095, 1ull << 60};
        REFUSED(EFAULT, "faulted at", pf_port_read(port, far[i], &byte, 1));
        CHECK(faults(port).iova == far[i]);
    }
    CHECK(faults(port).count == before + 3);
}

enum { ROUNDS = 2000 };

/* The device: takes a value, then says so. */
static void *device(void *iova) {
    uint64_t at = *(uint64_t *)iova;
    for (uint32_t round = 1; round <= ROUNDS; round++) {
        uint64_t value[2] = {round, ~(uint64_t)round};
        uint32_t seen;
        while (OK(pf_port_read(port, at + 4, &seen, 4)), seen != round)
            sched_yield();
        OK(pf_port_write(port, at + 8, value, sizeof value));
        OK(pf_port_write(port, at, &round, 4));
    }
    return NULL;
}

/* A word of 4 bytes carries what was done before it, in both directions. */
static void ordered(void) {
    char *memory = pf_alloc(arena, 4096, NULL);
    pthread_t thread;
    pf_map_t map;
    uint64_t iova;
    memset(memory, 0, 64);
    OK(pf_map(owner, memory, 4096, PF_BIDIR, &map, &iova));
    CHECK(pthread_create(&thread, NULL, device, &iova) == 0);
    for (uint32_t round = 1; round <= ROUNDS; round++) {
        __atomic_store_n((uint32_t *)(void *)(memory + 4), round, __ATOMIC_RELEASE);
        while (__atomic_load_n((uint32_t *)(void *)memory, __ATOMIC_ACQUIRE) != round)
            sched_yield();
        uint64_t value[2];
        memcpy(value, memory + 8, sizeof value);
        CHECK(value[0] == round && value[1] == ~(uint64_t)round);
    }
    CHECK(pthread_join(thread, NULL) == 0);
    OK(pf_unmap(owner, map));
    OK(pf_free(arena, memory));
}

int main(void) {
    char byte = 0;
    pf_port_t *second;
    create();
    revoked();
    across_pages();
    refusals();
    ordered();
    /* Each port has faults of its own; it does not keep the domain from ending. */
    OK(pf_port_open(domain, &second));
    CHECK(faults(second).count == 0);
    OK(pf_port_destroy(port));
    REFUSED(EBADF, "destroyed", pf_port_destroy(port));
    REFUSED(EBADF, "destroyed", pf_port_read(port, 4096, &byte, 1));
    OK(pf_owner_destroy(owner));
    OK(pf_arena_destroy(arena));
    OK(pf_domain_destroy(domain));
    REFUSED(EFAULT, "no mapping", pf_port_read(second, 4096, &byte, 1));
    OK(pf_port_destroy(second));
    puts("port: ok");
    return 0;
}
