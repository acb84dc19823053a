/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Processor time of taking an object and freeing it, beside DPDK's ring, without caches.
 *   bench EAL-OPTIONS
 * The time of the thread, the least of many rounds: other programs of the machine are not in it. */
#include <rte_eal.h>
#include <rte_mempool.h>
#include <stdio.h>
#include <time.h>

#define OBJECTS 8191
#define ROUNDS 25
#define OPERATIONS 200000

static double now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return now.tv_sec * 1e9 + now.tv_nsec;
}

static double least_ns(struct rte_mempool *pool, unsigned int bulk) {
    void *objects[64];
    double least = 1e18;
    for (unsigned int round = 0; round < ROUNDS; round++) {
        double start = now_ns();
        for (unsigned int i = 0; i < OPERATIONS / bulk; i++) {
            if (rte_mempool_get_bulk(pool, objects, bulk) == 0) {
                rte_mempool_put_bulk(pool, objects, bulk);
            }
        }
        least = RTE_MIN(least, (now_ns() - start) / OPERATIONS);
    }
    return least;
}

int main(int argc, char **argv) {
    static const char *const ops[] = {"ring_mp_mc", "pinfold"};
    struct rte_mempool *pools[RTE_DIM(ops)];
    if (rte_eal_init(argc, argv) < 0) {
        return 2;
    }
    for (unsigned int i = 0; i < RTE_DIM(ops); i++) {
        pools[i] = rte_mempool_create_empty(ops[i], OBJECTS, 2048, 0, 0, SOCKET_ID_ANY, 0);
        if (pools[i] == NULL || rte_mempool_set_ops_byname(pools[i], ops[i], NULL) < 0 ||
            rte_mempool_populate_default(pools[i]) < 0) {
            fprintf(stderr, "no pool of %s\n", ops[i]);
            return 1;
        }
    }
    printf("ns an object   %14s %14s\n", ops[0], ops[1]);
    for (unsigned int bulk = 1; bulk <= 64; bulk *= 4) {
        printf("%2u at a time   %14.1f %14.1f\n", bulk, least_ns(pools[0], bulk),
               least_ns(pools[1], bulk));
    }
    return 0;
}
