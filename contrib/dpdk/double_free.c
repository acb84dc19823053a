/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Frees an object twice, and counts the operations until that is reported.
 *   double_free EAL-OPTIONS -- OPS CACHE_SIZE frees|pairs */
#include <rte_eal.h>
#include <rte_log.h>
#include <rte_mempool.h>
#include <stdlib.h>
#include <string.h>

#define OBJECTS 4095
static void *held[2000], *all[2 * OBJECTS];

__attribute__((noinline)) void first_free(struct rte_mempool *pool) {
    rte_mempool_put(pool, held[0]);
}

__attribute__((noinline)) void second_free(struct rte_mempool *pool) {
    rte_mempool_put(pool, held[0]);
}

int main(int argc, char **argv) {
    int args = rte_eal_init(argc, argv);
    if (args < 0 || argc - args != 4) {
        return fputs("usage: double_free EAL-OPTIONS -- OPS CACHE_SIZE frees|pairs\n", stderr), 2;
    }
    const char *ops = argv[args + 1], *then = argv[args + 3];
    struct rte_mempool *pool = rte_mempool_create_empty(
        "demo", OBJECTS, 2048, atoi(argv[args + 2]), 0, SOCKET_ID_ANY, 0);
    if (pool == NULL || rte_mempool_set_ops_byname(pool, ops, NULL) < 0 ||
        rte_mempool_populate_default(pool) < 0 || rte_mempool_get_bulk(pool, held, 2000) < 0) {
        return fprintf(stderr, "no pool of %s\n", ops), 2;
    }
    char *text = NULL; /* the log, as a user sees it */
    size_t len = 0;
    FILE *log = open_memstream(&text, &len);
    if (getenv("PINFOLD_ABORT") == NULL) {
        rte_openlog_stream(log);
    }

    first_free(pool);
    second_free(pool);

    unsigned int n = 0, pairs = strcmp(then, "pairs") == 0;
    for (fflush(log); len == 0 && n < (pairs ? 1000000 : 1999); n++, fflush(log)) {
        void *object = held[(n + 1) % 2000];
        if (!pairs || rte_mempool_get(pool, &object) == 0) {
            rte_mempool_put(pool, object);
        }
    }
    printf("ops %s, cache %s, then %s: %s after %u operations\n%s", ops, argv[args + 2], then,
           len > 0 ? "reported" : "not reported", n, text);

    unsigned int twice = 0; /* objects that two users have */
    for (n = 0; n < 2 * OBJECTS && rte_mempool_get(pool, &all[n]) == 0; n++) {
        for (unsigned int i = 0; i < n; i++) {
            twice += all[i] == all[n];
        }
    }
    printf("of %u objects that were then taken, %u had been taken already\n", n, twice);
    rte_openlog_stream(NULL);
    rte_eal_cleanup();
    return len > 0 && twice == 0 ? 0 : 1;
}
