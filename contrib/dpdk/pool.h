/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Declarations shared by the files of the driver: one checked pool behind one rte_mempool. */
#ifndef PINFOLD_POOL_H
#define PINFOLD_POOL_H

#include <pinfold.h>
#include <rte_lcore.h>
#include <rte_mempool.h>
#include <rte_spinlock.h>
#include <stdbool.h>
#include <stdint.h>

/* Objects that one call of libpinfold passes. */
#define BATCH 64

/* A return address in bits 47 to 0, and one more than the lcore in bits 63 to 48. 0: none yet. One
 * word, so that both are always of the same call. */
typedef uint64_t place_t;

/* The last call that took an object, and the last one that freed it. */
struct record {
    place_t taken;
    place_t freed;
};

/* One range of the pool's memory. It consists of groups of `1 << group_shift` bytes, each with
 * `per_group` objects (the last one may have fewer), one behind the other from its start. */
struct piece {
    uintptr_t start;
    uintptr_t end;
    uint32_t objects;
    /* The record of its first object. */
    uint32_t first;
};

/* One lcore's handle. Its lock is free except when another lcore collects free objects, or in the
 * lane of threads without an lcore. */
struct lane {
    rte_spinlock_t lock;
    pf_cache_t *cache;
    uint64_t taken;
    uint64_t freed;
} __rte_cache_aligned;

/* The placement of objects. */
struct layout {
    /* Header, element and trailer: the distance of objects in a group. */
    uint32_t stride;
    /* log2 of the bytes that no object crosses: a page, or 2 MiB; 1 GiB for larger objects. */
    uint32_t group_shift;
    uint32_t per_group;
    /* 2^35 / stride, rounded up: the quotient of any multiple of the stride below 2^30. */
    uint32_t inverse;
    /* The pages that no object crosses, in bytes; 0: any address will do, or an object has several
     * pages. */
    size_t page;
};

struct pool {
    struct rte_mempool *mempool;
    /* Its name, which outlives it. */
    char name[RTE_MEMPOOL_NAMESIZE];
    pf_pool_t *blocks;
    uint32_t header_size;
    struct layout layout;
    /* Sorted by address. Changed with every lane locked. */
    struct piece *pieces;
    uint32_t n_pieces;
    uint32_t n_objects;
    /* One for each of `mempool->size` objects. */
    struct record *records;
    /* Held while the lanes are searched for free objects. Taken before a lane's lock. */
    rte_spinlock_t taking;
    /* Free calls that were refused. */
    uint64_t refused;
    /* For the list of all pools. */
    struct pool *next;
    /* By lcore; the last is that of threads without one. */
    struct lane lanes[RTE_MAX_LCORE + 1];
};

/* table.c: from addresses to records. */

/* Returns the layout of a pool's objects. `page`: bytes of the pages that they must not cross,
 * where they fit into one; 0: none. */
struct layout layout_of(const struct rte_mempool *mempool, size_t page);
/* Returns whether ranges must start at a page: libpinfold keeps the objects inside pages. */
bool layout_is_bounded(const struct layout *layout);
/* Returns how many bytes `objects` objects take from the start of a group. */
size_t layout_bytes(const struct layout *layout, uint64_t objects);
/* Adds the memory from `va` as up to `most` objects. Every lane is locked. Returns how many, or
 * -errno; then nothing was added. */
int pieces_add(struct pool *pool, char *va, size_t len, unsigned int most);
/* Returns the start of an object of a piece. */
char *piece_object(const struct pool *pool, const struct piece *piece, uint32_t index);
/* Returns the piece that has this address; NULL if none has. */
const struct piece *piece_find(const struct pool *pool, uintptr_t address);
/* Returns the record of the object whose header starts at `address`; NULL if none does. */
struct record *record_find(const struct pool *pool, uintptr_t address);

/* report.c: printed output. */

/* The pools of this process, for reports. */
void pools_link(struct pool *pool);
void pools_unlink(struct pool *pool);
/* Reports a free that was refused. `before` is the free before it, `why` libpinfold's sentence. No
 * lane is locked. */
void report_refused(struct pool *pool, void *object, place_t now, place_t before, const char *why);
/* Prints a pool's counters, if a free was refused, or PINFOLD_STATS is 1. */
void report_counters(const struct pool *pool);
/* Prints an error of the driver. */
void report_error(const struct rte_mempool *mempool, const char *what, const char *why);
/* Returns whether the environment sets `name` to `value`. */
bool is_set(const char *name, const char *value);

#endif
