/* Memory that follows the caller's numbers and is not there is ENOMEM, and nothing has changed: the
   n-th large allocation of a call fails, for each n; and RLIMIT_AS. */
#include "check.h"
#include <stdint.h>
#include <sys/mman.h>
#include <sys/resource.h>

/* What is allocated for a number is larger than this here, what is fixed is smaller. */
#define LARGE 60000
enum { MANY = 4096 };

static pf_domain_t *domain;

#if defined(__SANITIZE_ADDRESS__)
static int counting(void) { return 0; }
static int left, failed, lasting;
#else
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

/* How many large allocations succeed before one fails, and where that is `lasting` all that follow
   it; -1: all succeed. */
static int left = -1, failed, lasting;
/* A checker has functions of its own in place of these. */
static int called;

static int counting(void) { return __atomic_load_n(&called, __ATOMIC_RELAXED); }

static int fails(size_t bytes) {
    __atomic_store_n(&called, 1, __ATOMIC_RELAXED);
    if (bytes < LARGE || left < 0)
        return 0;
    if (left > 0) {
        left--;
        return 0;
    }
    if (!lasting)
        left = -1;
    errno = ENOMEM;
    return failed = 1;
}

void *malloc(size_t bytes) { return fails(bytes) ? NULL : __libc_malloc(bytes); }

void *calloc(size_t count, size_t bytes) {
    return fails(count * bytes) ? NULL : __libc_calloc(count, bytes);
}

void *realloc(void *old, size_t bytes) { return fails(bytes) ? NULL : __libc_realloc(old, bytes); }

void *aligned_alloc(size_t align, size_t bytes) {
    return fails(bytes) ? NULL : __libc_memalign(align, bytes);
}

int posix_memalign(void **out, size_t align, size_t bytes) {
    void *memory = aligned_alloc(align, bytes);
    if (memory != NULL)
        *out = memory;
    return memory != NULL ? 0 : ENOMEM;
}
#endif

/* The call is ENOMEM while one of its large allocations fails, of which it has at least `least`. */
#define EACH(least, call)                                                                          \
    do {                                                                                           \
        int number = 0;                                                                            \
        for (;; number++) {                                                                        \
            left = number, failed = 0;                                                             \
            long result = (call);                                                                  \
            left = -1;                                                                             \
            if (!failed) {                                                                         \
                VALUE(result);                                                                     \
                break;                                                                             \
            }                                                                                      \
            CHECK(result == -ENOMEM && pf_strerror_last()[0] != 0);                                \
        }                                                                                          \
        CHECK(number >= (least) || !counting());                                                   \
    } while (0)

/* The call succeeds, and has no large allocation. */
#define NONE(call)                                                                                 \
    do {                                                                                           \
        left = 0, failed = 0;                                                                      \
        long result = (call);                                                                      \
        left = -1;                                                                                 \
        VALUE(result);                                                                             \
        CHECK(!failed);                                                                            \
    } while (0)

static void arenas(void) {
    struct pf_arena_opts opts = {.struct_size = sizeof opts, .size = 64 << 20};
    char *own = mmap(NULL, opts.size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(own != MAP_FAILED);
    pf_arena_t *arena;
    pf_reg_t *reg;
    EACH(1, pf_arena_create(domain, &opts, &arena));
    OK(pf_arena_destroy(arena));
    /* One of its allocations is that of 8 bytes for each page. */
    int described = 0;
    do {
        left = described, failed = 0;
        int result = pf_arena_create(domain, &opts, &arena);
        left = -1;
        if (result == 0)
            OK(pf_arena_destroy(arena));
        described++;
    } while (failed && strstr(pf_strerror_last(), "131072 bytes that describe") == NULL);
    CHECK(failed || !counting());
    /* The program's own memory is its own again after each. */
    opts.va = own;
    EACH(1, pf_arena_create(domain, &opts, &arena));
    CHECK(pf_register(domain, own, opts.size, &reg) == -EEXIST);
    OK(pf_arena_destroy(arena));
    EACH(0, pf_register(domain, own, opts.size, &reg));
    OK(pf_reg_destroy(reg));
    CHECK(munmap(own, opts.size) == 0);
}

static void mappings(void) {
    static pf_map_t maps[MANY];
    static uint64_t iovas[MANY];
    static struct iovec iov[MANY];
    struct pf_arena_opts opts = {
        .struct_size = sizeof opts, .size = 4 << 20, .policy = PF_POLICY_PER_USE};
    pf_arena_t *arena;
    pf_owner_t *owner;
    pf_ticket_t ticket;
    OK(pf_arena_create(domain, &opts, &arena));
    OK(pf_owner_create(domain, &owner));
    char *memory = pf_alloc(arena, 4096, NULL);
    for (int i = 0; i < MANY; i++)
        iov[i] = (struct iovec){memory, 64};
    EACH(3, pf_map_many(owner, iov, MANY, PF_BIDIR, maps, iovas));
    EACH(1, pf_revoke_many(owner, maps, MANY, &ticket));
    OK(pf_wait(owner, ticket, UINT64_MAX));
    /* No more room is made than the owner has mappings. */
    REFUSED(ESTALE, "mapping 0", pf_revoke_many(owner, maps, UINT32_MAX, &ticket));
    OK(pf_free(arena, memory));
    OK(pf_owner_destroy(owner));

    /* One by one: where the owner has more mappings than ever. */
    OK(pf_owner_create(domain, &owner));
    memory = pf_alloc(arena, 4096, NULL);
    int grown = 0;
    for (int i = 0; i < MANY; i++) {
        left = 0, failed = 0;
        long result = pf_map(owner, memory, 64, PF_BIDIR, &maps[i], &iovas[i]);
        left = -1;
        CHECK(result == (failed ? -ENOMEM : 0));
        grown += failed;
        if (failed)
            OK(pf_map(owner, memory, 64, PF_BIDIR, &maps[i], &iovas[i]));
    }
    CHECK(grown > 0 || !counting());
    OK(pf_revoke_many(owner, maps, MANY, &ticket));
    OK(pf_wait(owner, ticket, UINT64_MAX));
    OK(pf_owner_destroy(owner));
    OK(pf_free(arena, memory));
    OK(pf_arena_destroy(arena));
}

static pf_arena_t *new_arena(size_t bytes) {
    struct pf_arena_opts opts = {.struct_size = sizeof opts, .size = bytes, .sources = PF_SOURCE_PLAIN};
    pf_arena_t *arena;
    OK(pf_arena_create(domain, &opts, &arena));
    return arena;
}

/* A pool's states of blocks, and the tables that lead to them. */
static void pools(void) {
    enum { BLOCKS = 300000 };
    static pf_block_t blocks[BLOCKS];
    pf_arena_t *arena = new_arena(16 << 20);
    struct pf_pool_opts opts = {.struct_size = sizeof opts, .size = 16, .minimum = BLOCKS};
    pf_pool_t *pool;
    pf_cache_t *cache;
    EACH(3, pf_pool_create(arena, &opts, &pool));
    OK(pf_pool_destroy(pool));
    /* Of what is allocated, none is the pool's after it. */
    opts.minimum = 0;
    OK(pf_pool_create(arena, &opts, &pool));
    OK(pf_pool_cache(pool, &cache));
    /* A call that is refused once by the pool tries again. */
    lasting = 1;
    EACH(3, pf_get_bulk(cache, blocks, BLOCKS));
    lasting = 0;
    OK(pf_put_bulk(cache, blocks, BLOCKS, NULL));
    char *own = mmap(NULL, 4 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(own != MAP_FAILED);
    EACH(2, pf_pool_add(pool, own, 4 << 20, 0));
    OK(pf_cache_destroy(cache));
    OK(pf_pool_destroy(pool));
    CHECK(munmap(own, 4 << 20) == 0);
    OK(pf_arena_destroy(arena));
}

/* Pools of many chunks: each of the arena's free runs is one page. */
static void chunks(void) {
    enum { PAGES = 16384 };
    static void *runs[PAGES];
    static pf_block_t blocks[PAGES];
    pf_arena_t *arena = new_arena((size_t)PAGES * 4096);
    unsigned many = 0;
    while (many < PAGES && (runs[many] = pf_alloc(arena, 4096, NULL)) != NULL)
        many++;
    unsigned half = 0;
    for (unsigned i = 0; i < many; i++)
        if ((uintptr_t)runs[i] / 4096 % 2 == 0) {
            OK(pf_free(arena, runs[i]));
            runs[i] = NULL;
            half++;
        }
    CHECK(half > PAGES / 4);

    struct pf_pool_opts opts = {.struct_size = sizeof opts, .size = 4096, .align = 4096};
    struct pf_pool_stats stats = {.struct_size = sizeof stats};
    pf_pool_t *pool;
    pf_cache_t *cache;
    OK(pf_pool_create(arena, &opts, &pool));
    OK(pf_pool_cache(pool, &cache));
    lasting = 1;
    EACH(1, pf_get_bulk(cache, blocks, half));
    lasting = 0;
    NONE(pf_pool_stats(pool, &stats));
    CHECK(stats.chunks == half);
    NONE(pf_pool_report(pool, NULL, 0));
    NONE(pf_stats(pool, NULL, 0));
    left = 0;
    REFUSED(EBUSY, "blocks of pool", pf_pool_destroy(pool));
    left = -1;
    OK(pf_put_bulk(cache, blocks, half, NULL));
    OK(pf_cache_destroy(cache));
    /* What there is no memory for stays for the next call. */
    int64_t bytes = 0;
    int lacked = 0;
    do {
        left = 0, failed = 0;
        int64_t some = pf_pool_shrink(pool);
        left = -1;
        CHECK(VALUE(some) > 0);
        bytes += some;
        lacked += failed;
    } while (bytes < (int64_t)half * 4096);
    CHECK(lacked > 0 || !counting());
    OK(pf_pool_destroy(pool));

    pf_pages_t *pages;
    EACH(1, pf_pages_create(arena, 4096, 1 << 20, &pages));
    OK(pf_pages_destroy(pages));
    OK(pf_pages_create(arena, 4096, 1, &pages));
    memset(blocks, 0, sizeof blocks);
    /* Fewer pages where there is no memory for what describes them. */
    int filled;
    lacked = 0;
    do {
        left = 0, failed = 0;
        filled = pf_pages_fill(pages, blocks, half);
        left = -1;
        CHECK(filled == (int)half || failed);
        lacked += failed;
        if (failed)
            filled = (int)VALUE(pf_pages_fill(pages, blocks, (unsigned)filled + 1));
    } while (filled < (int)half);
    CHECK(lacked > 0 || !counting());
    /* More than the ring has room for. */
    NONE(pf_pages_return(pages, blocks, half, NULL));
    OK(pf_pages_destroy(pages));
    for (unsigned i = 0; i < many; i++)
        OK(pf_free(arena, runs[i]));
    OK(pf_arena_destroy(arena));
}

static void queues(void) {
    pf_arena_t *arena = new_arena(8 << 20);
    /* 32 bytes for each 2 MiB of the medium. */
    struct pf_nvme_opts opts = {.struct_size = sizeof opts, .size = 16ull << 30};
    struct pf_queue_opts queue_opts = {.struct_size = sizeof queue_opts, .depth = 1023};
    pf_nvme_t *nvme;
    pf_queue_t *queue;
    EACH(1, pf_nvme_open(domain, arena, &opts, &nvme));
    EACH(4, pf_queue_create(nvme, &queue_opts, &queue));
    OK(pf_queue_destroy(queue));
    OK(pf_nvme_destroy(nvme));
    OK(pf_arena_destroy(arena));
}

static void requests(void) {
    struct pf_requests_opts opts = {
        .struct_size = sizeof opts, .depth = 1 << 14, .held = 1 << 14};
    pf_requests_t *requests;
    EACH(5, pf_requests_create(domain, &opts, &requests));
    for (unsigned i = 0; i < opts.depth; i++) {
        uint64_t token;
        OK(pf_requests_begin(requests, NULL, 0, &token, NULL));
    }
    NONE(pf_requests_stopped(requests));
    static struct pf_done done[1 << 14];
    CHECK(VALUE(pf_requests_poll(requests, done, opts.depth)) == (int)opts.depth);
    OK(pf_requests_destroy(requests));
}

static size_t address_space(void) {
    FILE *file = fopen("/proc/self/statm", "r");
    size_t pages = 0;
    CHECK(file != NULL && fscanf(file, "%zu", &pages) == 1);
    fclose(file);
    return pages * 4096;
}

static void limited(void) {
    struct rlimit before, limit;
    CHECK(getrlimit(RLIMIT_AS, &before) == 0);
    limit = before;
    struct pf_arena_opts opts = {.struct_size = sizeof opts, .size = 64 << 20};
    pf_arena_t *arena;
    /* Room for nothing of it, and for less and less of what it takes beside its memory. */
    for (size_t room = 0; room < 80 << 20; room += 3 << 20) {
        limit.rlim_cur = address_space() + room;
        CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
        int result = pf_arena_create(domain, &opts, &arena);
        CHECK(setrlimit(RLIMIT_AS, &before) == 0);
        CHECK(result == 0 || (result == -ENOMEM && pf_strerror_last()[0] != 0));
        if (result == 0)
            OK(pf_arena_destroy(arena));
        else
            CHECK(room < 72 << 20);
    }
}

int main(void) {
    OK(pf_domain_soft(&domain));
    arenas();
    mappings();
    requests();
    pools();
    chunks();
    queues();
    /* AddressSanitizer takes more than any limit. */
    if (counting())
        limited();
    OK(pf_domain_destroy(domain));
    puts("nomem: ok");
    return 0;
}
