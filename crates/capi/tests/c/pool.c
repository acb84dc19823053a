/* Pools and caches: every function, and every misuse. */
#include "traced.h"
#include <pthread.h>
#include <stdalign.h>
#include <stdint.h>

#define MIB (1 << 20)
#define HUGE_SIZE ((size_t)-1 / 2)

static pf_domain_t *domain;
static pf_arena_t *arena;

static pf_arena_t *new_arena(uint64_t size, uint32_t policy) {
    struct pf_arena_opts opts = {.struct_size = sizeof opts, .size = size, .policy = policy};
    pf_arena_t *created;
    OK(pf_arena_create(domain, &opts, &created));
    return created;
}

static pf_pool_t *new_pool(pf_arena_t *from, size_t size) {
    struct pf_pool_opts opts = {.struct_size = sizeof opts, .name = "blocks", .size = size};
    pf_pool_t *pool;
    OK(pf_pool_create(from, &opts, &pool));
    return pool;
}

static pf_cache_t *new_cache(pf_pool_t *pool) {
    pf_cache_t *cache;
    OK(pf_pool_cache(pool, &cache));
    return cache;
}

static struct pf_pool_stats stats_of(pf_pool_t *pool) {
    struct pf_pool_stats stats = {.struct_size = sizeof stats};
    OK(pf_pool_stats(pool, &stats));
    return stats;
}

static void create(void) {
    struct pf_pool_opts opts = {.struct_size = sizeof opts, .size = 256};
    pf_pool_t *pool = NULL;
    REFUSED(EFAULT, "`out` is NULL", pf_pool_create(arena, &opts, NULL));
    REFUSED(EBADF, "no handle of an arena", pf_pool_create((pf_arena_t *)&opts, &opts, &pool));
    REFUSED(EBADF, "not of an arena", pf_pool_create((pf_arena_t *)domain, &opts, &pool));
    REFUSED(EFAULT, "`opts` is NULL", pf_pool_create(arena, NULL, &pool));
    opts.struct_size = 8;
    REFUSED(EINVAL, "8 bytes", pf_pool_create(arena, &opts, &pool));
    opts.struct_size = sizeof opts;
    opts.size = 0;
    REFUSED(EINVAL, "0 bytes", pf_pool_create(arena, &opts, &pool));
    opts.size = 256;
    opts.flags = 6;
    REFUSED(EINVAL, "flags 0x6", pf_pool_create(arena, &opts, &pool));
    opts.flags = 0;
    opts.reserved = 9;
    REFUSED(EINVAL, "reserved 0x9", pf_pool_create(arena, &opts, &pool));
    opts.reserved = 0;
    opts.size = HUGE_SIZE;
    REFUSED(EINVAL, "9223372036854775807 bytes", pf_pool_create(arena, &opts, &pool));
    opts.size = 8 * MIB;
    REFUSED(EINVAL, "8388608 bytes", pf_pool_create(arena, &opts, &pool));
    opts.size = 256;
    opts.align = 3;
    REFUSED(EINVAL, "alignment 3", pf_pool_create(arena, &opts, &pool));
    opts.align = 0;
    opts.boundary = 128;
    REFUSED(EINVAL, "boundary 128", pf_pool_create(arena, &opts, &pool));
    opts.boundary = 0;
    opts.minimum = 10;
    opts.maximum = 5;
    REFUSED(EINVAL, "10 to 5 blocks", pf_pool_create(arena, &opts, &pool));
    opts.maximum = 0;
    opts.minimum = MIB;
    REFUSED(ENOMEM, "reserve 1048576 blocks", pf_pool_create(arena, &opts, &pool));
    opts.minimum = 1;
    REFUSED(EINVAL, "without an arena", pf_pool_create(NULL, &opts, &pool));
    opts.minimum = 0;
    opts.name = "\xff";
    REFUSED(EINVAL, "not UTF-8", pf_pool_create(arena, &opts, &pool));
    opts.name = "two\nlines";
    REFUSED(EINVAL, "control character", pf_pool_create(arena, &opts, &pool));
    CHECK(pool == NULL);
    /* Nothing of the arena is left in use. */
    struct {
        struct pf_pool_opts opts;
        uint64_t later;
    } longer = {.opts = {.struct_size = sizeof longer, .size = 256}};
    longer.later = 1;
    REFUSED(E2BIG, "is set", pf_pool_create(arena, &longer.opts, &pool));
    longer.later = 0;
    OK(pf_pool_create(arena, &longer.opts, &pool));
    /* The arena cannot end before its pools, also one that has nothing of it. */
    REFUSED(EBUSY, "1 pools", pf_arena_destroy(arena));
    REFUSED(EFAULT, "`out` is NULL", pf_pool_cache(pool, NULL));
    pf_cache_t *cache;
    REFUSED(EBADF, "no handle of a pool", pf_pool_cache(NULL, &cache));
    OK(pf_pool_destroy(pool));
    REFUSED(EBADF, "destroyed", pf_pool_destroy(pool));
    REFUSED(EBADF, "destroyed", pf_pool_cache(pool, &cache));
    OK(pf_pool_destroy(NULL));
    /* The smallest block. */
    pool = new_pool(arena, 1);
    OK(pf_pool_destroy(pool));
}

/* Memory of a pool that devices use: a mapping is within it, and it ends after them. */
static void mapped(void) {
    struct pf_arena_opts opts = {
        .struct_size = sizeof opts, .size = 16 * MIB, .policy = PF_POLICY_WHOLE};
    pf_arena_t *whole;
    pf_owner_t *owner;
    pf_block_t block;
    pf_map_t map;
    uint64_t iova;
    char end[64];
    OK(pf_arena_create(domain, &opts, &whole));
    OK(pf_owner_create(domain, &owner));
    pf_pool_t *pool = new_pool(whole, 4096);
    pf_cache_t *cache = new_cache(pool);
    OK(pf_get(cache, &block));
    OK(pf_put(cache, &block));
    OK(pf_cache_destroy(cache));
    size_t len = 4096;
    while (pf_map(owner, block.va, len, PF_BIDIR, &map, &iova) == 0) {
        CHECK(pf_unmap(owner, map) == PF_STAYS_MAPPED);
        len += 4096;
    }
    snprintf(end, sizeof end, "which ends at %#zx", (uintptr_t)block.va + len - 4096);
    REFUSED(EINVAL, end, pf_map(owner, block.va, len, PF_BIDIR, &map, &iova));
    OK(pf_map(owner, block.va, 4096, PF_BIDIR, &map, &iova));
    REFUSED(EBUSY, "in use by 1 mapping", pf_pool_destroy(pool));
    CHECK(pf_unmap(owner, map) == PF_STAYS_MAPPED);
    OK(pf_owner_destroy(owner));
    OK(pf_pool_destroy(pool));
    OK(pf_arena_destroy(whole));
}

static void get_and_put(void) {
    pf_pool_t *pool = new_pool(arena, 200), *other = new_pool(arena, 200);
    pf_cache_t *cache = new_cache(pool), *foreign = new_cache(other);
    pf_block_t block = {.tag = 77}, again = {0};
    REFUSED(EFAULT, "`block` is NULL", pf_get(cache, NULL));
    REFUSED(EFAULT, "`block` is NULL", pf_put(cache, NULL));
    REFUSED(EBADF, "no handle of a cache", pf_get(NULL, &block));
    REFUSED(EBADF, "not of a cache", pf_get((pf_cache_t *)pool, &block));
    OK(pf_get(cache, &block));
    CHECK(block.va != NULL && block.len == 200 && block.tag == 77);
    memset(block.va, 0xee, 200);
    /* A device may have it, and it is not the arena's to free. */
    uint64_t iova = 0;
    OK(pf_iova(domain, (char *)block.va + 100, 100, &iova));
    CHECK(iova == block.iova + 100);
    REFUSED(EINVAL, "block of a pool", pf_free(arena, block.va));
    REFUSED(EINVAL, "block of a pool", pf_free(arena, (char *)block.va - (uintptr_t)block.va % 4096));
    REFUSED(EINVAL, "no memory of this pool", pf_put(foreign, &block));
    again = block;
    again.va = NULL;
    REFUSED(EINVAL, "va is NULL", pf_put(cache, &again));
    again.va = (char *)block.va + 8;
    REFUSED(EINVAL, "no block or page starts", pf_put(cache, &again));
    again = block;
    again.iova += 200;
    REFUSED(EINVAL, "for the device", pf_put(cache, &again));
    again.iova = block.iova;
    again.va = &again;
    REFUSED(EINVAL, "no memory of this pool", pf_put(cache, &again));
    REFUSED(EBUSY, "1 blocks of pool \"blocks\" are in use", pf_pool_destroy(pool));
    OK(pf_put(cache, &block));
    REFUSED(EINVAL, "freed before", pf_put(cache, &block));
    REFUSED(EBUSY, "1 caches", pf_pool_destroy(pool));
    /* What one cache allocated, another frees; also after that cache has ended. */
    pf_cache_t *second = new_cache(pool);
    OK(pf_get(second, &block));
    OK(pf_cache_destroy(second));
    REFUSED(EBADF, "destroyed", pf_cache_destroy(second));
    REFUSED(EBADF, "destroyed", pf_get(second, &again));
    OK(pf_put(cache, &block));
    OK(pf_cache_destroy(cache));
    REFUSED(EBADF, "destroyed", pf_put(cache, &block));
    OK(pf_cache_destroy(NULL));
    OK(pf_cache_destroy(foreign));
    OK(pf_pool_destroy(other));
    OK(pf_pool_destroy(pool));
    /* Its memory is the arena's again. */
    REFUSED(EINVAL, "not allocated", pf_iova(domain, block.va, 1, &iova));
}

static void bulk(void) {
    struct pf_pool_opts opts = {.struct_size = sizeof opts, .size = 4096, .maximum = 100};
    pf_pool_t *pool;
    OK(pf_pool_create(arena, &opts, &pool));
    pf_cache_t *cache = new_cache(pool);
    static pf_block_t blocks[128];
    unsigned bad = 99;
    REFUSED(EFAULT, "`blocks` is NULL", pf_get_bulk(cache, NULL, 1));
    REFUSED(EFAULT, "`blocks` is NULL", pf_put_bulk(cache, NULL, 1, &bad));
    OK(pf_get_bulk(cache, NULL, 0));
    OK(pf_put_bulk(cache, NULL, 0, &bad));
    REFUSED(EBADF, "no handle", pf_get_bulk(NULL, blocks, 1));
    REFUSED(EBADF, "no handle", pf_put_bulk(NULL, blocks, 1, &bad));
    for (unsigned i = 0; i < 128; i++)
        blocks[i] = (pf_block_t){.va = &bad, .tag = i};
    /* All or none, at the maximum. */
    REFUSED(ENOMEM, "100 of 101 blocks are available", pf_get_bulk(cache, blocks, 101));
    REFUSED(ENOMEM, "may have 100 blocks", pf_get_bulk(cache, blocks, 101));
    for (unsigned i = 0; i < 128; i++)
        CHECK(blocks[i].va == (i < 101 ? NULL : (void *)&bad) && blocks[i].tag == i);
    CHECK(stats_of(pool).in_use == 0);
    /* What the blocks of a refused call name stays allocated. */
    pf_block_t live;
    OK(pf_get(cache, &live));
    for (unsigned i = 0; i < 100; i++)
        blocks[i] = (pf_block_t){.va = live.va, .iova = live.iova, .len = live.len, .tag = i};
    REFUSED(ENOMEM, "99 of 100 blocks are available", pf_get_bulk(cache, blocks, 100));
    CHECK(stats_of(pool).in_use == 1);
    OK(pf_put(cache, &live));
    OK(pf_get_bulk(cache, blocks, 100));
    CHECK(stats_of(pool).in_use == 100);
    for (unsigned i = 0; i < 100; i++) {
        CHECK(blocks[i].len == 4096 && blocks[i].tag == i);
        for (unsigned j = 0; j < i; j++)
            CHECK(blocks[j].va != blocks[i].va && blocks[j].iova != blocks[i].iova);
    }
    REFUSED(ENOMEM, "may have 100 blocks", pf_get(cache, &blocks[100]));
    /* Refused in the middle: those before are free, the others are not. */
    pf_block_t kept = blocks[40];
    blocks[40].iova++;
    REFUSED(EINVAL, "block 40 of 100", pf_put_bulk(cache, blocks, 100, &bad));
    CHECK(bad == 40 && stats_of(pool).in_use == 60);
    blocks[40] = kept;
    OK(pf_put_bulk(cache, blocks + 40, 60, &bad));
    REFUSED(EINVAL, "block 0 of 1 ", pf_put_bulk(cache, blocks + 99, 1, NULL));
    CHECK(bad == 40 && stats_of(pool).in_use == 0);
    /* The same block twice in one call. */
    OK(pf_get_bulk(cache, blocks, 2));
    blocks[2] = blocks[0];
    REFUSED(EINVAL, "freed before", pf_put_bulk(cache, blocks, 3, &bad));
    CHECK(bad == 2 && stats_of(pool).in_use == 0);
    OK(pf_cache_destroy(cache));
    OK(pf_pool_destroy(pool));
}

static void stats_and_report(void) {
    pf_pool_t *pool = new_pool(arena, 1000);
    pf_cache_t *cache = new_cache(pool);
    pf_block_t blocks[3];
    OK(pf_get_bulk(cache, blocks, 3));
    struct pf_pool_stats stats = stats_of(pool);
    CHECK(stats.block_bytes == 1000 && stats.in_use == 3 && stats.blocks >= 3);
    CHECK(stats.in_use + stats.free == stats.blocks && stats.peak >= 3 && stats.cached > 0);
    CHECK(stats.chunks == 1 && stats.bytes >= 3000 && stats.damaged == 0);
    REFUSED(EFAULT, "`stats` is NULL", pf_pool_stats(pool, NULL));
    stats.struct_size = 0;
    REFUSED(EINVAL, "0 bytes", pf_pool_stats(pool, &stats));
    REFUSED(EBADF, "no handle of a pool", pf_pool_stats(NULL, &stats));
    /* An older program's struct ends earlier, a newer one's later. */
    struct {
        struct pf_pool_stats known;
        uint64_t later;
    } longer = {.known = {.struct_size = sizeof longer}, .later = 5};
    OK(pf_pool_stats(pool, &longer.known));
    CHECK(longer.later == 0 && longer.known.in_use == 3 && longer.known.struct_size == sizeof longer);
    struct pf_pool_stats shorter = {.struct_size = offsetof(struct pf_pool_stats, in_use), .in_use = 9};
    OK(pf_pool_stats(pool, &shorter));
    CHECK(shorter.block_bytes == 1000 && shorter.blocks == stats.blocks && shorter.in_use == 9);

    char report[256], expected[256];
    int length = snprintf(expected, sizeof expected, "poolinfo - 0.1\n%-16s %4u %4u %4u %2u\n", "blocks",
                          3, (unsigned)stats.blocks, 1000, 1);
    CHECK(pf_pool_report(pool, NULL, 0) == length);
    CHECK(pf_pool_report(pool, report, sizeof report) == length && strcmp(report, expected) == 0);
    memset(report, 'x', sizeof report);
    CHECK(pf_pool_report(pool, report, 10) == length);
    CHECK(strcmp(report, "poolinfo ") == 0 && report[10] == 'x');
    CHECK(pf_pool_report(pool, report, 1) == length && report[0] == 0);
    REFUSED(EFAULT, "`text` is NULL", pf_pool_report(pool, NULL, 10));
    REFUSED(EBADF, "no handle of a pool", pf_pool_report(NULL, report, 10));

    /* A cache keeps its free blocks, and so their memory. */
    CHECK(pf_pool_shrink(pool) == 0);
    OK(pf_put_bulk(cache, blocks, 3, NULL));
    CHECK(pf_pool_shrink(pool) == 0);
    OK(pf_cache_destroy(cache));
    CHECK(pf_pool_shrink(pool) == (int64_t)stats.bytes);
    CHECK(stats_of(pool).blocks == 0);
    REFUSED(EBADF, "no handle of a pool", pf_pool_shrink(NULL));
    OK(pf_pool_destroy(pool));
}

/* Memory of the program, in pieces that are aligned to 64 bytes only. */
static void own_memory(void) {
    alignas(64) static char memory[4][64 * 100];
    struct pf_pool_opts opts = {.struct_size = sizeof opts, .size = 192, .align = 64, .maximum = 80};
    pf_pool_t *pool;
    OK(pf_pool_create(NULL, &opts, &pool));
    pf_cache_t *cache = new_cache(pool);
    pf_block_t blocks[80];
    REFUSED(ENOMEM, "0 blocks were added", pf_get(cache, &blocks[0]));
    REFUSED(EFAULT, "`va` is NULL", pf_pool_add(pool, NULL, 6400, 0));
    REFUSED(EBADF, "no handle of a pool", pf_pool_add(NULL, memory[0], 6400, 0));
    REFUSED(EINVAL, "multiples of 64", pf_pool_add(pool, memory[0] + 32, 6300, 0));
    REFUSED(EINVAL, "multiples of 64", pf_pool_add(pool, memory[0], 6400, 32));
    REFUSED(EINVAL, "no block of 192 bytes fits", pf_pool_add(pool, memory[0], 191, 0));
    REFUSED(EINVAL, "end beyond 64 bits", pf_pool_add(pool, memory[0], 6400, -(uint64_t)64));
    REFUSED(EINVAL, "end beyond 64 bits", pf_pool_add(pool, memory[0], SIZE_MAX - 63, 0));
    REFUSED(ENOSPC, "the pool may have 80 blocks", pf_pool_add(pool, memory[0], 192 * 81, 0));
    REFUSED(EINVAL, "0 bytes", pf_pool_add(pool, memory[0], 0, 0));
    CHECK(VALUE(pf_pool_add(pool, memory[0], 6400, 0x10000)) == 33);
    REFUSED(EEXIST, "the pool's already", pf_pool_add(pool, memory[0], 6400, 0x10000));
    REFUSED(EEXIST, "the pool's already", pf_pool_add(pool, memory[0] + 6336, 192, 0));
    CHECK(VALUE(pf_pool_add(pool, memory[2], 6400, 0x50000)) == 33);
    REFUSED(EEXIST, "the pool's already", pf_pool_add(pool, memory[1], 12800, 0));
    REFUSED(ENOSPC, "80 blocks and has 66", pf_pool_add(pool, memory[1], 6400, 0x20000));
    CHECK(VALUE(pf_pool_add(pool, memory[1], 192 * 14, 0x20000)) == 14);
    struct pf_pool_stats stats = stats_of(pool);
    CHECK(stats.blocks == 80 && stats.chunks == 3 && stats.block_bytes == 192);
    OK(pf_get_bulk(cache, blocks, 80));
    REFUSED(ENOMEM, "80 blocks were added", pf_get(cache, blocks));
    for (unsigned i = 0; i < 80; i++) {
        uintptr_t at = (char *)blocks[i].va - memory[0];
        unsigned piece = at / 6400;
        static const uint64_t starts[] = {0x10000, 0x20000, 0x50000};
        CHECK(piece < 3 && at % 6400 % 192 == 0);
        CHECK(blocks[i].iova == starts[piece] + at % 6400);
    }
    OK(pf_put_bulk(cache, blocks, 80, NULL));
    CHECK(pf_pool_shrink(pool) == 0);
    OK(pf_cache_destroy(cache));
    OK(pf_pool_destroy(pool));
    /* It is the program's again. */
    pool = new_pool(NULL, 64);
    CHECK(VALUE(pf_pool_add(pool, memory, sizeof memory, 0)) == 400);
    OK(pf_pool_destroy(pool));
    /* More memory for a pool of an arena; but not the arena's own. */
    pool = new_pool(arena, 64);
    struct pf_region region = {.struct_size = sizeof region};
    OK(pf_arena_region(arena, &region));
    REFUSED(EEXIST, "the pool's already", pf_pool_add(pool, region.addr, 4096, region.iova));
    CHECK(VALUE(pf_pool_add(pool, memory, sizeof memory, 0)) == 400);
    OK(pf_pool_destroy(pool));
}

static void debug(void) {
    struct pf_pool_opts opts = {.struct_size = sizeof opts, .size = 64, .flags = PF_POOL_DEBUG};
    pf_pool_t *pool;
    OK(pf_pool_create(arena, &opts, &pool));
    pf_cache_t *cache = new_cache(pool);
    pf_block_t block;
    OK(pf_get(cache, &block));
    REFUSED(EBUSY, "by cache 1", pf_pool_destroy(pool));
    OK(pf_put(cache, &block));
    ((char *)block.va)[5] = 1;
    OK(pf_get(cache, &block));
    CHECK(stats_of(pool).damaged == 1);
    OK(pf_put(cache, &block));
    OK(pf_cache_destroy(cache));
    OK(pf_pool_destroy(pool));
}

/* Chunks are mapped for the device as they are acquired. */
static void mapped_per_use(void) {
    pf_arena_t *per_use = new_arena(MIB, PF_POLICY_PER_USE);
    pf_pool_t *pool = new_pool(per_use, 128);
    pf_cache_t *cache = new_cache(pool);
    pf_block_t block;
    OK(pf_get(cache, &block));
    CHECK(block.iova != 0);
    /* All of the arena, and then no more. */
    static pf_block_t all[MIB / 128];
    REFUSED(ENOMEM, "no free block", pf_get_bulk(cache, all, MIB / 128));
    OK(pf_get_bulk(cache, all, MIB / 128 - 1));
    REFUSED(ENOMEM, "larger arena", pf_get(cache, &all[MIB / 128 - 1]));
    OK(pf_put_bulk(cache, all, MIB / 128 - 1, NULL));
    OK(pf_put(cache, &block));
    REFUSED(EBUSY, "bytes of the arena are in use", pf_arena_destroy(per_use));
    OK(pf_cache_destroy(cache));
    OK(pf_pool_destroy(pool));
    OK(pf_arena_destroy(per_use));
}

static void traced(void) {
    struct pf_pool_opts opts = {.struct_size = sizeof opts, .size = 64, .maximum = 64};
    pf_pool_t *pool;
    OK(pf_pool_create(arena, &opts, &pool));
    pf_cache_t *cache = new_cache(pool);
    static pf_block_t blocks[65];
    pf_trace_set(note, &events, NULL);
    uintptr_t at[5];
    at[0] = here();
    OK(pf_get(cache, &blocks[0]));
    at[1] = here();
    OK(pf_put(cache, &blocks[0]));
    at[2] = here();
    OK(pf_get_bulk(cache, blocks, 3));
    at[3] = here();
    OK(pf_put_bulk(cache, blocks, 3, NULL));
    at[4] = here();
    CHECK(events == 8);
    static const unsigned calls[] = {0, 1, 2, 2, 2, 3, 3, 3};
    for (unsigned i = 0; i < 8; i++) {
        CHECK(seen[i].kind == (calls[i] % 2 ? PF_EVENT_FREE : PF_EVENT_ALLOC));
        CHECK(seen[i].len == 64 && seen[i].handle == (uint64_t)(uintptr_t)cache);
        uintptr_t caller = (uintptr_t)seen[i].caller;
        CHECK(at[calls[i]] < caller && caller < at[calls[i] + 1]);
    }
    for (unsigned i = 0; i < 3; i++)
        CHECK(seen[2 + i].va == blocks[i].va && seen[5 + i].iova == blocks[i].iova);
    /* What is refused is no event. */
    events = 0;
    CHECK(pf_get_bulk(cache, blocks, 65) == -ENOMEM);
    CHECK(pf_put(cache, &blocks[0]) == -EINVAL);
    CHECK(events == 0);
    pf_trace_set(NULL, NULL, NULL);
    OK(pf_cache_destroy(cache));
    OK(pf_pool_destroy(pool));
}

struct shared {
    pf_pool_t *pool;
    pf_cache_t *cache;
    int stop;
    unsigned long done, refused;
};

static void *share_a_cache(void *arg) {
    struct shared *shared = arg;
    while (!__atomic_load_n(&shared->stop, __ATOMIC_RELAXED)) {
        pf_block_t block;
        int code = pf_get(shared->cache, &block);
        if (code == 0) {
            memset(block.va, (int)(uintptr_t)&block, 64);
            do
                code = pf_put(shared->cache, &block);
            while (code == -EBUSY);
            CHECK(code == 0);
            __atomic_fetch_add(&shared->done, 1, __ATOMIC_RELAXED);
        } else {
            CHECK(code == -EBUSY && strstr(pf_strerror_last(), "has not ended") != NULL);
            __atomic_fetch_add(&shared->refused, 1, __ATOMIC_RELAXED);
        }
    }
    return NULL;
}

static void *own_a_cache(void *arg) {
    struct shared *shared = arg;
    for (unsigned round = 0; round < 200; round++) {
        pf_cache_t *cache = new_cache(shared->pool);
        pf_block_t blocks[40];
        OK(pf_get_bulk(cache, blocks, 40));
        for (unsigned i = 0; i < 40; i++)
            memset(blocks[i].va, (int)round, 64);
        OK(pf_put_bulk(cache, blocks, 40, NULL));
        OK(pf_cache_destroy(cache));
    }
    return NULL;
}

/* A cache that two threads use is refused to one of them; caches of their own are not. The pool
   does not end meanwhile. */
static void threads(void) {
    struct shared shared = {.pool = new_pool(arena, 64)};
    shared.cache = new_cache(shared.pool);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, share_a_cache, &shared) == 0);
    while (__atomic_load_n(&shared.refused, __ATOMIC_RELAXED) < 20)
        CHECK(pf_pool_destroy(shared.pool) == -EBUSY);
    __atomic_store_n(&shared.stop, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < 4; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(shared.done > 0 && stats_of(shared.pool).in_use == 0);
    for (int i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, own_a_cache, &shared) == 0);
    for (int i = 0; i < 4; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(stats_of(shared.pool).in_use == 0);
    OK(pf_cache_destroy(shared.cache));
    OK(pf_pool_destroy(shared.pool));
}

/* As many as there can be, and one more. */
static void full_table(void) {
    static pf_cache_t *caches[65536];
    struct pf_pool_opts opts = {.struct_size = sizeof opts, .size = 4096, .cached_bytes = 1};
    pf_pool_t *pool;
    OK(pf_pool_create(arena, &opts, &pool));
    for (unsigned i = 0; i < 65536; i++)
        OK(pf_pool_cache(pool, &caches[i]));
    pf_cache_t *more = NULL;
    REFUSED(ENFILE, "65536 handles of caches", pf_pool_cache(pool, &more));
    CHECK(more == NULL);
    REFUSED(EBUSY, "65536 caches", pf_pool_destroy(pool));
    for (unsigned i = 0; i < 65536; i++)
        OK(pf_cache_destroy(caches[i]));
    OK(pf_pool_destroy(pool));
}

/* A block has 1 byte to 1 GiB, in the options and after its rounding. */
static void largest_blocks(void) {
    struct pf_pool_opts opts = {.struct_size = sizeof opts, .size = 1ul << 30};
    struct pf_pool_stats stats = {.struct_size = sizeof stats};
    pf_pool_t *large;
    for (int less = 0; less < 2; less++) {
        opts.size = (1ul << 30) - (size_t)less, opts.align = less ? 4096 : 0;
        OK(pf_pool_create(NULL, &opts, &large));
        OK(pf_pool_stats(large, &stats));
        CHECK(stats.block_bytes == 1ul << 30);
        OK(pf_pool_destroy(large));
    }
    opts.align = 0;
    size_t refused[] = {0, (1ul << 30) + 1, INT32_MAX, UINT32_MAX, 1ul << 32, SIZE_MAX};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        opts.size = refused[i];
        REFUSED(EINVAL, "1 to 1073741824 bytes", pf_pool_create(NULL, &opts, &large));
    }
    opts.size = 16, opts.align = 1ul << 31;
    REFUSED(EINVAL, "at most 1073741824 bytes", pf_pool_create(NULL, &opts, &large));
}

int main(void) {
    largest_blocks();
    OK(pf_domain_soft(&domain));
    arena = new_arena(4 * MIB, PF_POLICY_WHOLE);
    create();
    mapped();
    get_and_put();
    bulk();
    stats_and_report();
    own_memory();
    debug();
    mapped_per_use();
    traced();
    threads();
    full_table();
    OK(pf_arena_destroy(arena));
    OK(pf_domain_destroy(domain));
    puts("pool: ok");
    return 0;
}
