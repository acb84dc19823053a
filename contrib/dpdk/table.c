/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * The layout of a pool's memory, and the way from an address to an object's record.
 *
 * libpinfold cuts a range into units of 2 MiB (1 GiB for objects that are larger), and no object
 * crosses from one into the next. Where DPDK wants no object to cross a page, that is the same rule
 * for pages of 2 MiB, once the range starts at one; smaller pages are the pool's boundary. */
#include "pool.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define SHIFT_2M 21
#define SHIFT_1G 30
#define INVERSE_SHIFT 35

struct layout layout_of(const struct rte_mempool *mempool, size_t page) {
    struct layout layout = {
        .stride = mempool->header_size + mempool->elt_size + mempool->trailer_size,
    };
    layout.group_shift = layout.stride <= 1u << SHIFT_2M ? SHIFT_2M : SHIFT_1G;
    if (page >= layout.stride) {
        layout.page = page;
        layout.group_shift = RTE_MIN(layout.group_shift, (uint32_t)rte_bsf64(page));
    }
    layout.per_group = (1u << layout.group_shift) / layout.stride;
    layout.inverse = (1ull << INVERSE_SHIFT) / layout.stride + 1;
    return layout;
}

bool layout_is_bounded(const struct layout *layout) {
    return layout->group_shift < SHIFT_2M;
}

size_t layout_bytes(const struct layout *layout, uint64_t objects) {
    if (objects == 0) {
        return 0;
    }
    uint64_t before = (objects - 1) / layout->per_group;
    uint64_t last = objects - before * layout->per_group;
    return (before << layout->group_shift) + last * layout->stride;
}

/* Returns how many objects `len` bytes hold from the start of a group. */
static uint64_t objects_in(const struct layout *layout, size_t len) {
    uint64_t groups = len >> layout->group_shift;
    uint64_t rest = len & ((1ul << layout->group_shift) - 1);
    return groups * layout->per_group + RTE_MIN(rest / layout->stride, (uint64_t)layout->per_group);
}

/* Adds one range, which starts at a group. */
static int piece_add(struct pool *pool, char *va, uint32_t objects) {
    struct piece *pieces = realloc(pool->pieces, (pool->n_pieces + 1) * sizeof(*pieces));
    if (pieces == NULL) {
        return -ENOMEM;
    }
    pool->pieces = pieces;
    size_t len = layout_bytes(&pool->layout, objects);
    /* The objects keep their addresses for devices in their headers, where DPDK puts them. So the
     * pool's own are those of the process: always linear, also where DPDK knows none. */
    int64_t added = pf_pool_add(pool->blocks, va, len, (uintptr_t)va);
    if (added < 0) {
        return added;
    }
    uint32_t at = pool->n_pieces;
    while (at > 0 && pieces[at - 1].start > (uintptr_t)va) {
        at--;
    }
    memmove(&pieces[at + 1], &pieces[at], (pool->n_pieces - at) * sizeof(*pieces));
    pieces[at] = (struct piece){(uintptr_t)va, (uintptr_t)va + len, objects, pool->n_objects};
    pool->n_pieces++;
    pool->n_objects += objects;
    return added == objects ? 0 : -EPROTO;
}

int pieces_add(struct pool *pool, char *va, size_t len, unsigned int most) {
    const struct layout *layout = &pool->layout;
    uint64_t first = 0;
    most = RTE_MIN(most, pool->mempool->size - pool->n_objects);
    /* A range that starts inside a page is added in two parts, of which the second starts at a
     * page. The first is left out where ranges must start at a page. */
    size_t head = RTE_PTR_ALIGN_CEIL(va, 1ul << layout->group_shift) - va;
    if (layout->page != 0 && head != 0) {
        head = RTE_MIN(head, len);
        if (!layout_is_bounded(layout)) {
            first = RTE_MIN(head / layout->stride, (uint64_t)most);
        }
        if (first > 0) {
            int error = piece_add(pool, va, first);
            if (error < 0) {
                return error;
            }
        }
        va += head;
        len -= head;
    }
    uint64_t rest = RTE_MIN(objects_in(layout, len), most - first);
    if (rest > 0) {
        int error = piece_add(pool, va, rest);
        if (error < 0) {
            /* The added part stays, and its number is returned. */
            return first > 0 ? (int)first : error;
        }
    }
    return first + rest;
}

char *piece_object(const struct pool *pool, const struct piece *piece, uint32_t index) {
    const struct layout *layout = &pool->layout;
    uint64_t group = index / layout->per_group;
    uint64_t within = index % layout->per_group;
    return (char *)piece->start + (group << layout->group_shift) + within * layout->stride;
}

const struct piece *piece_find(const struct pool *pool, uintptr_t address) {
    uint32_t low = 0;
    uint32_t high = pool->n_pieces;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        const struct piece *piece = &pool->pieces[middle];
        if (address < piece->start) {
            high = middle;
        } else if (address >= piece->end) {
            low = middle + 1;
        } else {
            return piece;
        }
    }
    return NULL;
}

struct record *record_find(const struct pool *pool, uintptr_t address) {
    const struct piece *piece = piece_find(pool, address);
    if (piece == NULL) {
        return NULL;
    }
    const struct layout *layout = &pool->layout;
    uint64_t offset = address - piece->start;
    uint64_t within = offset & ((1ul << layout->group_shift) - 1);
    /* Exact for multiples; what is no multiple is found out by the product. */
    uint64_t object = within * layout->inverse >> INVERSE_SHIFT;
    if (within != object * layout->stride || object >= layout->per_group) {
        return NULL;
    }
    uint64_t index = (offset >> layout->group_shift) * layout->per_group + object;
    return index < piece->objects ? &pool->records[piece->first + index] : NULL;
}
