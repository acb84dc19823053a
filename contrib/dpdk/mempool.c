/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * The mempool driver "pinfold": rte_mempool_ops over a DMA pool of libpinfold, which checks each
 * free. README.md says how programs use it. */
#include "pool.h"

#include <errno.h>
#include <rte_cycles.h>
#include <rte_errno.h>
#include <rte_malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The most free objects that a lane keeps: the rest is where every lane finds it. */
#define LANE_OBJECTS 256

/* The target of `pool_data`, in memory that secondary processes share. They have no pool there:
 * its state is the primary process's. */
struct door {
    uint64_t process;
    struct pool *pool;
};

/* A random number: process numbers repeat in containers. */
static uint64_t this_process;

static struct pool *pool_of(const struct rte_mempool *mempool) {
    const struct door *door = mempool->pool_data;
    return likely(door != NULL && door->process == this_process) ? door->pool : NULL;
}

/* Refuses an operation on a pool of another process. DPDK ignores that a free was refused, so the
 * log says it: the first hundred times. */
static int refuse_other_process(const struct rte_mempool *mempool, const char *operation) {
    static unsigned int told;
    if (__atomic_fetch_add(&told, 1, __ATOMIC_RELAXED) < 100) {
        report_error(mempool, operation,
                     "refused: the pool's state is in its primary process; pools that secondary "
                     "processes use need a driver of DPDK's");
    }
    return -EPERM;
}

/* The caller of the operation: the function that DPDK's inline functions are compiled into. */
static place_t place_of(const void *caller) {
    return ((uintptr_t)caller & ((1ull << 48) - 1)) | (uint64_t)(rte_lcore_id() + 1) << 48;
}

/* Locks the lane of this thread, and makes sure that it has a handle. */
static struct lane *lane_enter(struct pool *pool) {
    unsigned int id = RTE_MIN(rte_lcore_id(), (unsigned int)RTE_MAX_LCORE);
    struct lane *lane = &pool->lanes[id];
    rte_spinlock_lock(&lane->lock);
    if (unlikely(lane->cache == NULL) && pf_pool_cache(pool->blocks, &lane->cache) < 0) {
        /* Handles or memory are used up: the last lane has had its handle from the start. */
        lane->cache = NULL;
        rte_spinlock_unlock(&lane->lock);
        lane = &pool->lanes[RTE_MAX_LCORE];
        rte_spinlock_lock(&lane->lock);
    }
    return lane;
}

static void lanes_lock(struct pool *pool) {
    for (unsigned int i = 0; i <= RTE_MAX_LCORE; i++) {
        rte_spinlock_lock(&pool->lanes[i].lock);
    }
}

static void lanes_unlock(struct pool *pool) {
    for (unsigned int i = 0; i <= RTE_MAX_LCORE; i++) {
        rte_spinlock_unlock(&pool->lanes[i].lock);
    }
}

static inline pf_block_t block_of(const struct pool *pool, void *object) {
    /* No pointer arithmetic: a wrong free may pass any value. */
    uintptr_t start = (uintptr_t)object - pool->header_size;
    return (pf_block_t){.va = (void *)start, .iova = start, .len = pool->layout.stride};
}

static inline void *object_of(const struct pool *pool, const pf_block_t *block) {
    return (char *)block->va + pool->header_size;
}

/* Frees objects that this call has just taken. */
static void give_back(struct pool *pool, struct lane *lane, void **objects, unsigned int n) {
    for (unsigned int i = 0; i < n; i++) {
        pf_block_t block = block_of(pool, objects[i]);
        /* Refused only if the program has freed it meanwhile; then it is free. */
        (void)pf_put(lane->cache, &block);
    }
}

/* Takes objects through one lane, which is locked. Returns how many. */
static unsigned int take(struct pool *pool, struct lane *lane, void **objects, unsigned int n) {
    pf_block_t blocks[BATCH];
    unsigned int taken = 0;
    while (taken < n) {
        unsigned int some = RTE_MIN(n - taken, (unsigned int)BATCH);
        if (pf_get_bulk(lane->cache, blocks, some) < 0) {
            break;
        }
        for (unsigned int i = 0; i < some; i++) {
            objects[taken + i] = object_of(pool, &blocks[i]);
        }
        taken += some;
    }
    return taken;
}

/* Takes objects wherever they are, from the handles of other lcores, too: a mempool that has `n`
 * free objects gives them to any lcore. No lane is locked. */
static int take_from_all(struct pool *pool, void **objects, unsigned int n) {
    unsigned int taken = 0;
    /* One lcore at a time, so that two do not each find a part of what would do for one. */
    rte_spinlock_lock(&pool->taking);
    for (unsigned int i = 0; i <= RTE_MAX_LCORE && taken < n; i++) {
        struct lane *lane = &pool->lanes[i];
        if (__atomic_load_n(&lane->cache, __ATOMIC_RELAXED) == NULL) {
            continue;
        }
        pf_block_t block;
        rte_spinlock_lock(&lane->lock);
        while (taken < n && pf_get(lane->cache, &block) >= 0) {
            objects[taken++] = object_of(pool, &block);
        }
        rte_spinlock_unlock(&lane->lock);
    }
    if (taken < n) {
        struct lane *lane = lane_enter(pool);
        give_back(pool, lane, objects, taken);
        rte_spinlock_unlock(&lane->lock);
    }
    rte_spinlock_unlock(&pool->taking);
    return taken < n ? -ENOBUFS : 0;
}

static int pinfold_dequeue(struct rte_mempool *mempool, void **objects, unsigned int n) {
    struct pool *pool = pool_of(mempool);
    if (unlikely(pool == NULL)) {
        return refuse_other_process(mempool, "dequeue");
    }
    place_t place = place_of(__builtin_return_address(0));
    struct lane *lane = lane_enter(pool);
    unsigned int taken = take(pool, lane, objects, n);
    if (unlikely(taken < n)) {
        give_back(pool, lane, objects, taken);
        rte_spinlock_unlock(&lane->lock);
        int error = take_from_all(pool, objects, n);
        if (error < 0) {
            return error;
        }
        lane = lane_enter(pool);
    }
    lane->taken += n;
    for (unsigned int i = 0; i < n; i++) {
        struct record *record = record_find(pool, (uintptr_t)objects[i] - pool->header_size);
        __atomic_store_n(&record->taken, place, __ATOMIC_RELAXED);
    }
    rte_spinlock_unlock(&lane->lock);
    return 0;
}

static int pinfold_enqueue(struct rte_mempool *mempool, void *const *objects, unsigned int n) {
    struct pool *pool = pool_of(mempool);
    if (unlikely(pool == NULL)) {
        return refuse_other_process(mempool, "enqueue");
    }
    place_t place = place_of(__builtin_return_address(0));
    pf_block_t blocks[BATCH];
    struct record *records[BATCH];
    place_t before[BATCH];
    int result = 0;
    struct lane *lane = lane_enter(pool);
    for (unsigned int from = 0; from < n; from += BATCH) {
        unsigned int some = RTE_MIN(n - from, (unsigned int)BATCH);
        /* The place is stored first: as soon as the object is free, another lcore may take it, and
         * free it. If the free is refused, the place before it is stored again. */
        for (unsigned int i = 0; i < some; i++) {
            blocks[i] = block_of(pool, objects[from + i]);
            records[i] = record_find(pool, (uintptr_t)blocks[i].va);
            before[i] = 0;
            if (likely(records[i] != NULL)) {
                before[i] = __atomic_load_n(&records[i]->freed, __ATOMIC_RELAXED);
                __atomic_store_n(&records[i]->freed, place, __ATOMIC_RELAXED);
            }
        }
        lane->freed += some;
        unsigned int done = 0;
        while (done < some) {
            unsigned int bad = 0;
            int error = pf_put_bulk(lane->cache, &blocks[done], some - done, &bad);
            if (likely(error >= 0)) {
                break;
            }
            if (unlikely(error != -EINVAL)) {
                /* No object is wrong: the process was forked, or libpinfold has a defect. */
                rte_spinlock_unlock(&lane->lock);
                report_error(mempool, "enqueue", pf_strerror_last());
                return error;
            }
            done += bad;
            lane->freed--;
            if (records[done] != NULL) {
                __atomic_store_n(&records[done]->freed, before[done], __ATOMIC_RELAXED);
            }
            rte_spinlock_unlock(&lane->lock);
            report_refused(pool, objects[from + done], place, before[done], pf_strerror_last());
            result = -EINVAL;
            lane = lane_enter(pool);
            done++;
        }
    }
    rte_spinlock_unlock(&lane->lock);
    return result;
}

static unsigned int pinfold_get_count(const struct rte_mempool *mempool) {
    const struct pool *pool = pool_of(mempool);
    struct pf_pool_stats stats = {.struct_size = sizeof(stats)};
    if (pool == NULL || pf_pool_stats(pool->blocks, &stats) < 0) {
        return 0;
    }
    return stats.blocks - stats.in_use;
}

static ssize_t pinfold_calc_mem_size(const struct rte_mempool *mempool, uint32_t objects,
                                     uint32_t page_shift, size_t *min_chunk_size, size_t *align) {
    size_t page = page_shift == 0 ? 0 : (size_t)1 << page_shift;
    struct layout layout = layout_of(mempool, page);
    *min_chunk_size = layout.stride;
    *align = layout_is_bounded(&layout) ? page : RTE_MEMPOOL_ALIGN;
    if (page == 0) {
        return layout_bytes(&layout, objects);
    }
    if (layout.page != 0) {
        /* Less than an object is lost in front of the first page. */
        return layout_bytes(&layout, objects) + layout.stride - 1;
    }
    /* Objects of several pages: each in a range of its own, or as many in a group as fit, whichever
     * takes more. */
    size_t alone = RTE_ALIGN_CEIL((size_t)layout.stride, page);
    size_t in_group = ((size_t)1 << layout.group_shift) / layout.per_group + 1;
    return RTE_MAX(alone, in_group) * objects;
}

static int pinfold_populate(struct rte_mempool *mempool, unsigned int most, void *va,
                            rte_iova_t iova, size_t len, rte_mempool_populate_obj_cb_t *each,
                            void *arg) {
    struct pool *pool = pool_of(mempool);
    if (pool == NULL) {
        return refuse_other_process(mempool, "populate");
    }
    /* No lcore takes an object before it has its header. */
    lanes_lock(pool);
    uint32_t first = pool->n_objects;
    int added = pieces_add(pool, va, len, most);
    if (added < 0) {
        report_error(mempool, "populate", pf_strerror_last());
    }
    for (uint32_t i = 0; i < pool->n_pieces; i++) {
        const struct piece *piece = &pool->pieces[i];
        for (uint32_t j = 0; piece->first >= first && j < piece->objects; j++) {
            char *object = piece_object(pool, piece, j) + pool->header_size;
            each(mempool, arg, object,
                 iova == RTE_BAD_IOVA ? RTE_BAD_IOVA : iova + (object - (char *)va));
        }
    }
    lanes_unlock(pool);
    return added;
}

static void pool_end(struct pool *pool) {
    /* DPDK has taken the free objects out. Objects in use are freed here, whoever owns them:
     * libpinfold ends no pool with blocks in use. Their memory is gone already, and is not touched. */
    struct lane *lane = &pool->lanes[RTE_MAX_LCORE];
    for (uint32_t i = 0; lane->cache != NULL && i < pool->n_pieces; i++) {
        for (uint32_t j = 0; j < pool->pieces[i].objects; j++) {
            char *start = piece_object(pool, &pool->pieces[i], j);
            pf_block_t block = {.va = start, .iova = (uintptr_t)start, .len = pool->layout.stride};
            (void)pf_put(lane->cache, &block);
        }
    }
    for (unsigned int i = 0; i <= RTE_MAX_LCORE; i++) {
        if (pool->lanes[i].cache != NULL) {
            (void)pf_cache_destroy(pool->lanes[i].cache);
        }
    }
    if (pool->blocks != NULL && pf_pool_destroy(pool->blocks) < 0) {
        report_error(pool->mempool, "free", pf_strerror_last());
    }
    free(pool->pieces);
    free(pool->records);
    free(pool);
}

static void pinfold_free(struct rte_mempool *mempool) {
    struct pool *pool = pool_of(mempool);
    if (pool == NULL) {
        if (mempool->pool_data != NULL) {
            (void)refuse_other_process(mempool, "free");
        }
        return;
    }
    report_counters(pool);
    pools_unlink(pool);
    rte_free(mempool->pool_data);
    mempool->pool_data = NULL;
    pool_end(pool);
}

/* Lets DPDK's caches hold nothing, so that each free reaches the driver at once. Their structures
 * stay, because the place of the program's private data follows from `cache_size`. */
static void disable_caches(struct rte_mempool *mempool) {
    for (unsigned int i = 0; mempool->cache_size != 0 && i < RTE_MAX_LCORE; i++) {
        mempool->local_cache[i].size = 0;
        mempool->local_cache[i].flushthresh = 0;
    }
}

static int pool_start(struct pool *pool, struct rte_mempool *mempool) {
    size_t page;
    int error = rte_mempool_get_page_size(mempool, &page);
    if (error < 0) {
        report_error(mempool, "alloc", "its NUMA node is unknown");
        return error;
    }
    pool->mempool = mempool;
    snprintf(pool->name, sizeof(pool->name), "%s", mempool->name);
    pool->header_size = mempool->header_size;
    pool->layout = layout_of(mempool, page);
    pool->records = calloc(mempool->size, sizeof(*pool->records));
    if (pool->records == NULL) {
        report_error(mempool, "alloc", "no memory for its records of 16 bytes an object");
        return -ENOMEM;
    }
    /* Lanes keep an eighth of the pool together, at most. */
    uint32_t share = mempool->size / (8 * RTE_MAX(rte_lcore_count(), 1u));
    struct pf_pool_opts opts = {
        .struct_size = sizeof(opts),
        .name = mempool->name,
        .size = pool->layout.stride,
        .align = sizeof(uint64_t),
        .boundary = layout_is_bounded(&pool->layout) ? page : 0,
        .cached_bytes = (uint64_t)RTE_MAX(RTE_MIN(share, (uint32_t)LANE_OBJECTS), 1u) *
                        pool->layout.stride,
    };
    error = pf_pool_create(NULL, &opts, &pool->blocks);
    if (error >= 0) {
        error = pf_pool_cache(pool->blocks, &pool->lanes[RTE_MAX_LCORE].cache);
    }
    unsigned int lcore;
    RTE_LCORE_FOREACH(lcore) {
        if (error >= 0) {
            error = pf_pool_cache(pool->blocks, &pool->lanes[lcore].cache);
        }
    }
    if (error < 0) {
        report_error(mempool, "alloc", pf_strerror_last());
    }
    return error;
}

static int pinfold_alloc(struct rte_mempool *mempool) {
    struct pool *pool = NULL;
    struct door *door = rte_zmalloc("pinfold", sizeof(*door), 0);
    if (door == NULL || posix_memalign((void **)&pool, RTE_CACHE_LINE_SIZE, sizeof(*pool)) != 0) {
        rte_free(door);
        report_error(mempool, "alloc", "no memory");
        return -ENOMEM;
    }
    memset(pool, 0, sizeof(*pool));
    int error = pool_start(pool, mempool);
    if (error < 0) {
        rte_free(door);
        pool_end(pool);
        rte_errno = -error;
        return error;
    }
    if (is_set("PINFOLD_CACHE", "0")) {
        disable_caches(mempool);
    }
    *door = (struct door){this_process, pool};
    mempool->pool_data = door;
    pools_link(pool);
    return 0;
}

static const struct rte_mempool_ops pinfold_ops = {
    .name = "pinfold",
    .alloc = pinfold_alloc,
    .free = pinfold_free,
    .enqueue = pinfold_enqueue,
    .dequeue = pinfold_dequeue,
    .get_count = pinfold_get_count,
    .calc_mem_size = pinfold_calc_mem_size,
    .populate = pinfold_populate,
};

/* Makes rte_mempool_create() and the rings' names create checked pools, too. */
static void replace_rings(void) {
    static const char *const names[] = {"ring_mp_mc", "ring_sp_sc", "ring_mp_sc", "ring_sp_mc"};
    for (unsigned int i = 0; i < RTE_DIM(names); i++) {
        struct rte_mempool_ops ops = pinfold_ops;
        snprintf(ops.name, sizeof(ops.name), "%s", names[i]);
        unsigned int at = 0;
        while (at < rte_mempool_ops_table.num_ops &&
               strcmp(rte_mempool_ops_table.ops[at].name, ops.name) != 0) {
            at++;
        }
        if (at < rte_mempool_ops_table.num_ops) {
            rte_mempool_ops_table.ops[at] = ops;
        } else {
            /* Linked statically, the rings' driver may come later: the first of a name is used. */
            rte_mempool_register_ops(&ops);
        }
    }
}

RTE_INIT(pinfold_register) {
    if (getentropy(&this_process, sizeof(this_process)) != 0) {
        this_process = rte_rdtsc() ^ (uint64_t)getpid() << 32;
    }
    rte_mempool_register_ops(&pinfold_ops);
    if (is_set("PINFOLD_REPLACE", "1")) {
        replace_rings();
    }
}
