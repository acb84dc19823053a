/* What the library sets on memory of the program, and gives back: MADV_DONTFORK and mlock, unless
   the program had set them; a refused call changes nothing. */
#include "check.h"
#include <pthread.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static pf_domain_t *domain;
static const size_t page = 4096, size = 16 * 4096;
static char *va;

/* By the system call: AddressSanitizer has no mlock. */
static int lock(void *at, size_t bytes) { return (int)syscall(SYS_mlock, at, bytes); }
static int unlock(void *at, size_t bytes) { return (int)syscall(SYS_munlock, at, bytes); }

/* Whether VmFlags of the mapping at `at` has `flag`. */
static int has(const char *at, const char *flag) {
    FILE *file = fopen("/proc/self/smaps", "r");
    CHECK(file != NULL);
    char line[1024], wanted[8];
    snprintf(wanted, sizeof wanted, " %s ", flag);
    int inside = 0, found = -1;
    while (fgets(line, sizeof line, file) != NULL) {
        unsigned long start, end;
        if (sscanf(line, "%lx-%lx ", &start, &end) == 2)
            inside = start <= (uintptr_t)at && (uintptr_t)at < end;
        else if (inside && strncmp(line, "VmFlags:", 8) == 0)
            found = strstr(line, wanted) != NULL;
    }
    fclose(file);
    CHECK(found >= 0);
    return found;
}

static int create(char *at, size_t bytes, unsigned node, pf_arena_t **out) {
    struct pf_arena_opts opts = {
        .struct_size = sizeof opts, .size = bytes, .va = at, .numa_node_plus_one = node};
    return pf_arena_create(domain, &opts, out);
}

static void ours_alone(void) {
    pf_arena_t *arena, *other;
    pf_reg_t *reg;
    OK(create(va, size, 0, &arena));
    int locked = has(va, "lo");
    CHECK(has(va, "dc") && has(va + size - page, "dc"));
    /* Refused: nothing changes. */
    CHECK(create(va, size, 0, &other) == -EEXIST);
    CHECK(create(va + page, page, 0, &other) == -EEXIST);
    CHECK(pf_register(domain, va, size, &reg) == -EEXIST);
    for (size_t at = 0; at < size; at += page)
        CHECK(has(va + at, "dc") && has(va + at, "lo") == locked);
    OK(pf_arena_destroy(arena));
    for (size_t at = 0; at < size; at += page)
        CHECK(!has(va + at, "dc") && !has(va + at, "lo"));
}

/* Parts of it were set by the program. */
static void the_programs(void) {
    pf_arena_t *arena;
    if (lock(va + 4 * page, 4 * page) != 0) {
        printf("attributes: mlock is refused (%s): skipped\n", strerror(errno));
        return;
    }
    CHECK(madvise(va + 6 * page, 4 * page, MADV_DONTFORK) == 0);
    for (int i = 0; i < 2; i++) {
        OK(create(va, size, 0, &arena));
        for (size_t at = 0; at < size; at += page)
            CHECK(has(va + at, "dc"));
        OK(pf_arena_destroy(arena));
        /* A node that does not exist: refused after what comes before. */
        CHECK(create(va, size, 1001, &arena) < 0);
        for (size_t at = 0; at < 16; at++) {
            CHECK(has(va + at * page, "lo") == (at >= 4 && at < 8));
            CHECK(has(va + at * page, "dc") == (at >= 6 && at < 10));
        }
    }
    CHECK(unlock(va, size) == 0 && madvise(va, size, MADV_DOFORK) == 0);
    /* Registered memory, and a pool's, keep what they have. */
    pf_reg_t *reg;
    CHECK(lock(va, page) == 0);
    OK(pf_register(domain, va, size, &reg));
    CHECK(has(va, "lo") && !has(va + page, "lo") && !has(va, "dc"));
    OK(pf_reg_destroy(reg));
    CHECK(has(va, "lo") && !has(va + page, "lo"));
    CHECK(unlock(va, size) == 0);
}

/* The NUMA policy: the number of the mode (linux/mempolicy.h), and its nodes. */
static long policy(char *at) {
    int mode = -1;
    unsigned long nodes[16] = {0};
    if (syscall(SYS_get_mempolicy, &mode, nodes, 1024, at, 2 /* MPOL_F_ADDR */) != 0)
        return -1;
    return (long)(mode << 8 | nodes[0]);
}

static void nodes(void) {
    enum { PREFERRED = 1, BIND = 2 };
    unsigned long node0[16] = {1};
    pf_arena_t *arena;
    if (syscall(SYS_mbind, va + 4 * page, 4 * page, PREFERRED, node0, 1024, 0) != 0) {
        printf("attributes: no NUMA policies here (%s): skipped\n", strerror(errno));
        return;
    }
    for (int i = 0; i < 2; i++) {
        OK(create(va, size, 1, &arena));
        CHECK(policy(va) == (BIND << 8 | 1) && policy(va + 5 * page) == (BIND << 8 | 1));
        OK(pf_arena_destroy(arena));
        /* Refused after it was bound. */
        CHECK(mprotect(va + size - page, page, PROT_READ) == 0);
        CHECK(create(va, size, 1, &arena) == -EFAULT);
        CHECK(mprotect(va + size - page, page, PROT_READ | PROT_WRITE) == 0);
        for (int at = 0; at < 16; at++)
            CHECK(policy(va + at * page) == (at >= 4 && at < 8 ? PREFERRED << 8 | 1 : 0));
    }
    CHECK(syscall(SYS_mbind, va, size, 0, NULL, 0, 0) == 0);
}

/* Refused at its last page, when the rest was set already. */
static void refused_late(void) {
    pf_arena_t *arena;
    CHECK(mprotect(va + size - page, page, PROT_READ) == 0);
    CHECK(create(va, size, 0, &arena) == -EFAULT);
    for (size_t at = 0; at < size; at += page)
        CHECK(!has(va + at, "dc") && !has(va + at, "lo"));
    CHECK(mprotect(va + size - page, page, PROT_READ | PROT_WRITE) == 0);
}

/* Of threads that want the same memory, one has it, until the attributes of its arena are undone:
   those of the next owner's arena stay. */
enum { SHARED = 8 << 20 };
static char *shared;
static int seen;

static void *next_owner(void *unused) {
    (void)unused;
    struct timespec end, now, use = {.tv_nsec = 2000000};
    clock_gettime(CLOCK_MONOTONIC, &end);
    do {
        pf_arena_t *arena;
        int refused = create(shared, SHARED, 0, &arena);
        if (refused == 0) {
            /* As long as the one before is undone. */
            nanosleep(&use, NULL);
            CHECK(has(shared, "dc") && has(shared + SHARED - page, "dc"));
            __atomic_fetch_add(&seen, 1, __ATOMIC_RELAXED);
            OK(pf_arena_destroy(arena));
        } else {
            CHECK(refused == -EEXIST);
        }
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while (now.tv_sec < end.tv_sec + 5);
    return NULL;
}

static void one_after_another(void) {
    shared = mmap(NULL, SHARED, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        CHECK(pthread_create(&threads[i], NULL, next_owner, NULL) == 0);
    for (int i = 0; i < 3; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(seen > 0 && munmap(shared, SHARED) == 0);
}

int main(void) {
    OK(pf_domain_soft(&domain));
    va = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(va != MAP_FAILED);
    ours_alone();
    the_programs();
    refused_late();
    nodes();
    one_after_another();
    CHECK(munmap(va, size) == 0);
    OK(pf_domain_destroy(domain));
    puts("attributes: ok");
    return 0;
}
