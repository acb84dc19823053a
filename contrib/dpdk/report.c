/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * The output of the driver: refused frees with both places, and counters. */
#include "pool.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <rte_debug.h>
#include <rte_log.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Refused frees of a pool that are printed; the rest is counted. */
#define MOST_REPORTS 100

static int log_type;
static struct pool *pools;
static rte_spinlock_t pools_lock = RTE_SPINLOCK_INITIALIZER;

RTE_INIT(pinfold_log) {
    log_type = rte_log_register("mempool.pinfold");
    if (log_type < 0) {
        log_type = RTE_LOGTYPE_MEMPOOL;
    } else {
        rte_log_set_level(log_type, RTE_LOG_NOTICE);
    }
}

bool is_set(const char *name, const char *value) {
    const char *is = getenv(name);
    return is != NULL && strcmp(is, value) == 0;
}

void pools_link(struct pool *pool) {
    rte_spinlock_lock(&pools_lock);
    pool->next = pools;
    pools = pool;
    rte_spinlock_unlock(&pools_lock);
}

void pools_unlink(struct pool *pool) {
    rte_spinlock_lock(&pools_lock);
    struct pool **at = &pools;
    while (*at != NULL && *at != pool) {
        at = &(*at)->next;
    }
    if (*at != NULL) {
        *at = pool->next;
    }
    rte_spinlock_unlock(&pools_lock);
}

/* Writes the name of the other pool that has this object, or nothing. */
static void other_pool(const struct pool *pool, uintptr_t object, char *name, size_t size) {
    name[0] = '\0';
    rte_spinlock_lock(&pools_lock);
    for (struct pool *other = pools; other != NULL; other = other->next) {
        if (other == pool) {
            continue;
        }
        struct lane *lane = &other->lanes[RTE_MAX_LCORE];
        rte_spinlock_lock(&lane->lock);
        bool has = record_find(other, object - other->header_size) != NULL;
        rte_spinlock_unlock(&lane->lock);
        if (has) {
            snprintf(name, size, "; it is an object of pool %s", other->name);
            break;
        }
    }
    rte_spinlock_unlock(&pools_lock);
}

/* Writes "lcore 1, function+0x12 (file+0x1234)": the second form is what addr2line takes. */
static void describe(place_t place, char *text, size_t size) {
    if (place == 0) {
        snprintf(text, size, "never");
        return;
    }
    /* The last byte of the call: the instruction behind it may be of another line. */
    void *address = (void *)((place & ((1ull << 48) - 1)) - 1);
    unsigned int lcore = place >> 48;
    char who[32] = "a thread without an lcore";
    if (lcore != 0) {
        snprintf(who, sizeof(who), "lcore %u", lcore - 1);
    }
    Dl_info info;
    if (dladdr(address, &info) == 0 || info.dli_fname == NULL) {
        snprintf(text, size, "%s, %p", who, address);
        return;
    }
    uintptr_t in_file = (uintptr_t)address - (uintptr_t)info.dli_fbase;
    if (info.dli_sname == NULL) {
        snprintf(text, size, "%s, %s+0x%" PRIxPTR, who, info.dli_fname, in_file);
    } else {
        snprintf(text, size, "%s, %s+0x%" PRIxPTR " (%s+0x%" PRIxPTR ")", who, info.dli_sname,
                 (uintptr_t)address - (uintptr_t)info.dli_saddr, info.dli_fname, in_file);
    }
}

void report_refused(struct pool *pool, void *object, place_t now, place_t before,
                    const char *why) {
    uint64_t count = __atomic_add_fetch(&pool->refused, 1, __ATOMIC_RELAXED);
    bool abort_now = is_set("PINFOLD_ABORT", "1");
    if (count > MOST_REPORTS && !abort_now) {
        return;
    }
    /* The pieces are changed with every lane locked, so one locked lane keeps them. */
    struct lane *lane = &pool->lanes[RTE_MAX_LCORE];
    uintptr_t start = (uintptr_t)object - pool->header_size;
    rte_spinlock_lock(&lane->lock);
    bool in_pool = piece_find(pool, start) != NULL;
    struct record *record = record_find(pool, start);
    place_t taken = record == NULL ? 0 : __atomic_load_n(&record->taken, __ATOMIC_RELAXED);
    rte_spinlock_unlock(&lane->lock);
    char text[2048], place[512], other[128];
    describe(now, place, sizeof(place));
    int len;
    if (record != NULL) {
        len = snprintf(text, sizeof(text), "pool %s: object %p freed twice\n  this free:     %s\n",
                       pool->name, object, place);
        describe(before, place, sizeof(place));
        len += snprintf(text + len, sizeof(text) - len, "  previous free: %s\n", place);
        describe(taken, place, sizeof(place));
        len += snprintf(text + len, sizeof(text) - len, "  last taken:    %s\n", place);
    } else {
        other_pool(pool, (uintptr_t)object, other, sizeof(other));
        len = snprintf(text, sizeof(text), "pool %s: %p freed, %s%s\n  this free:     %s\n",
                       pool->name, object,
                       in_pool ? "but no object starts there" : "which is not of this pool", other,
                       place);
    }
    snprintf(text + len, sizeof(text) - len, "  not enqueued:  %s%s\n", why,
             count == MOST_REPORTS ? "\n  further ones of this pool are counted only" : "");
    rte_log(RTE_LOG_ERR, log_type, "PINFOLD: %s", text);
    if (abort_now) {
        rte_panic("PINFOLD_ABORT is 1: an object of pool %s was freed wrongly\n", pool->name);
    }
}

void report_counters(const struct pool *pool) {
    uint64_t taken = 0;
    uint64_t freed = 0;
    for (unsigned int i = 0; i <= RTE_MAX_LCORE; i++) {
        taken += pool->lanes[i].taken;
        freed += pool->lanes[i].freed;
    }
    if (pool->refused > 0 || is_set("PINFOLD_STATS", "1")) {
        rte_log(RTE_LOG_NOTICE, log_type,
                "PINFOLD: pool %s: %u objects, %" PRIu64 " taken, %" PRIu64 " freed, %" PRIu64
                " frees refused\n",
                pool->name, pool->n_objects, taken, freed, pool->refused);
    }
}

void report_error(const struct rte_mempool *mempool, const char *what, const char *why) {
    rte_log(RTE_LOG_ERR, log_type, "PINFOLD: pool %s: %s: %s\n", mempool->name, what, why);
}

/* The counters of the pools that the program did not free. */
RTE_FINI(pinfold_end) {
    for (struct pool *pool = pools; pool != NULL; pool = pool->next) {
        report_counters(pool);
    }
}
