/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Processor time of allocating an object and freeing it:
 *   bench EAL-OPTIONS
 * First the two mempool drivers without DPDK's caches; then the bulk rows of pinfold-bench
 * (pool/bulk-32, pool/bulk-512: objects of 64 bytes, of each of which a word is written) for DPDK's
 * mempool and for libpinfold's functions, in one program.
 * The time of the thread, the least of many rounds, in which the subjects take turns: other programs
 * of the machine are not in it. */
#include <pinfold.h>
#include <rte_eal.h>
#include <rte_mempool.h>
#include <stdio.h>
#include <time.h>

#define OBJECTS 8191
#define ROUNDS 25
#define OPERATIONS 200000
#define MOST 512

/* One way of allocating and freeing `n` objects; returns 0. */
struct subject {
    const char *name;
    int (*take_and_free)(void *of, unsigned int n);
    void *of;
};

static int of_mempool(void *of, unsigned int n) {
    void *objects[MOST];
    if (rte_mempool_get_bulk(of, objects, n) != 0) {
        return 1;
    }
    for (unsigned int i = 0; i < n; i++) {
        *(volatile uint64_t *)objects[i] = i;
    }
    rte_mempool_put_bulk(of, objects, n);
    return 0;
}

static int of_pinfold(void *of, unsigned int n) {
    struct pf_block_t blocks[MOST];
    if (pf_get_bulk(of, blocks, n) != 0) {
        return 1;
    }
    for (unsigned int i = 0; i < n; i++) {
        *(volatile uint64_t *)blocks[i].va = i;
    }
    return pf_put_bulk(of, blocks, n, NULL) != 0;
}

static double now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return now.tv_sec * 1e9 + now.tv_nsec;
}

/* Prints a row: nanoseconds an object, of each subject. */
static int row(const struct subject *subjects, unsigned int n_subjects, unsigned int n) {
    double least[4] = {1e18, 1e18, 1e18, 1e18};
    for (unsigned int round = 0; round < ROUNDS; round++) {
        for (unsigned int at = 0; at < n_subjects; at++) {
            const struct subject *subject = &subjects[at];
            double start = now_ns();
            for (unsigned int i = 0; i < OPERATIONS / n; i++) {
                if (subject->take_and_free(subject->of, n) != 0) {
                    fprintf(stderr, "%s: no %u objects\n", subject->name, n);
                    return 1;
                }
            }
            least[at] = RTE_MIN(least[at], (now_ns() - start) / (OPERATIONS / n * n));
        }
    }
    printf("%3u at a time  ", n);
    for (unsigned int at = 0; at < n_subjects; at++) {
        printf(" %16.2f", least[at]);
    }
    printf("\n");
    return 0;
}

static void head(const struct subject *subjects, unsigned int n) {
    printf("ns an object   ");
    for (unsigned int at = 0; at < n; at++) {
        printf(" %16s", subjects[at].name);
    }
    printf("\n");
}

static struct rte_mempool *mempool(const char *name, const char *ops, unsigned int bytes,
                                   unsigned int cache) {
    struct rte_mempool *pool =
        rte_mempool_create_empty(name, OBJECTS, bytes, cache, 0, SOCKET_ID_ANY, 0);
    if (pool == NULL || rte_mempool_set_ops_byname(pool, ops, NULL) < 0 ||
        rte_mempool_populate_default(pool) < 0) {
        fprintf(stderr, "no pool %s of %s\n", name, ops);
        return NULL;
    }
    return pool;
}

/* A cache of a pool of libpinfold with blocks of 64 bytes. */
static struct pf_cache_t *pinfold(void) {
    const struct pf_arena_opts arena_opts = {.struct_size = sizeof arena_opts, .size = 4 << 20};
    const struct pf_pool_opts pool_opts = {
        .struct_size = sizeof pool_opts, .size = 64, .maximum = OBJECTS};
    struct pf_domain_t *domain;
    struct pf_arena_t *arena;
    struct pf_pool_t *pool;
    struct pf_cache_t *cache;
    if (pf_domain_soft(&domain) != 0 || pf_arena_create(domain, &arena_opts, &arena) != 0 ||
        pf_pool_create(arena, &pool_opts, &pool) != 0 || pf_pool_cache(pool, &cache) != 0) {
        fprintf(stderr, "libpinfold: %s\n", pf_strerror_last());
        return NULL;
    }
    return cache;
}

int main(int argc, char **argv) {
    if (rte_eal_init(argc, argv) < 0) {
        return 2;
    }
    const struct subject drivers[] = {
        {"ring_mp_mc", of_mempool, mempool("ring", "ring_mp_mc", 2048, 0)},
        {"pinfold", of_mempool, mempool("pinfold", "pinfold", 2048, 0)},
    };
    /* DPDK's largest cache, of the lcore: without it, each call is the ring's. */
    const struct subject bulk[] = {
        {"DPDK, cache 512", of_mempool, mempool("cached", "ring_mp_mc", 64, 512)},
        {"DPDK, no cache", of_mempool, mempool("uncached", "ring_mp_mc", 64, 0)},
        {"libpinfold", of_pinfold, pinfold()},
    };
    int failed = drivers[0].of == NULL || drivers[1].of == NULL;
    for (unsigned int at = 0; at < RTE_DIM(bulk); at++) {
        failed |= bulk[at].of == NULL;
    }
    if (failed) {
        return 1;
    }
    head(drivers, RTE_DIM(drivers));
    for (unsigned int n = 1; n <= 64; n *= 4) {
        failed |= row(drivers, RTE_DIM(drivers), n);
    }
    head(bulk, RTE_DIM(bulk));
    failed |= row(bulk, RTE_DIM(bulk), 1) | row(bulk, RTE_DIM(bulk), 32) |
              row(bulk, RTE_DIM(bulk), 512);
    return failed;
}
