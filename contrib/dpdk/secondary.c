/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * A primary and a secondary process of DPDK, and pools of the driver: what the secondary is
 * refused, what DPDK does without asking the driver, and what stays right in the primary.
 *   secondary EAL-OPTIONS     the primary, on lcore 0; it starts the secondary, on lcore 1 */
#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_log.h>
#include <rte_mempool.h>
#include <rte_memzone.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define OBJECTS 64
/* DPDK flushes a cache of 8 when more than 12 are in it. */
#define CACHE 8
#define FLUSHED 20

/* The condition holds. */
#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: not true: %s (%s)\n", __FILE__, __LINE__, #condition,          \
                    rte_strerror(rte_errno));                                                      \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* Memory lent by the primary, which both processes have. */
struct lent {
    void *single;
    void *cached[FLUSHED];
};

/* Returns the messages logged since the last call. */
static const char *logged(void) {
    static FILE *log;
    static char *text;
    static size_t len, before;
    if (log == NULL) {
        log = open_memstream(&text, &len);
        CHECK(log != NULL && rte_openlog_stream(log) == 0);
    }
    fflush(log);
    const char *since = text + before;
    before = len;
    return since;
}

static struct rte_mempool *create(const char *name, unsigned int cache) {
    struct rte_mempool *pool =
        rte_mempool_create_empty(name, OBJECTS, 64, cache, 0, SOCKET_ID_ANY, 0);
    CHECK(pool != NULL && rte_mempool_set_ops_byname(pool, "pinfold", NULL) == 0);
    CHECK(rte_mempool_populate_default(pool) == OBJECTS);
    return pool;
}

/* Each call that reaches the driver is refused, and says so. */
static void refused(struct rte_mempool *pool, void *object) {
    void *other;
    CHECK(rte_mempool_get(pool, &other) == -EPERM);
    const char *text = logged();
    CHECK(strstr(text, "pool single: dequeue: refused") != NULL);
    CHECK(strstr(text, "in its primary process") != NULL);
    CHECK(rte_mempool_ops_enqueue_bulk(pool, &object, 1) == -EPERM);
    CHECK(strstr(logged(), "pool single: enqueue: refused") != NULL);
    /* DPDK's function for it returns nothing. */
    rte_mempool_put(pool, object);
    CHECK(strstr(logged(), "pool single: enqueue: refused") != NULL);
    CHECK(rte_mempool_avail_count(pool) == 0);
    /* The operation alone: DPDK's function would also free the pool's memory, in both processes. */
    rte_mempool_get_ops(pool->ops_index)->free(pool);
    CHECK(strstr(logged(), "pool single: free: refused") != NULL && pool->pool_data != NULL);
}

/* DPDK's cache of this lcore is in the shared memory: what is in it does not reach the driver. */
static void cached(struct rte_mempool *pool, void *const *objects) {
    void *again[3];
    rte_mempool_put_bulk(pool, objects, 3);
    CHECK(rte_mempool_get_bulk(pool, again, 3) == 0);
    CHECK(strcmp(logged(), "") == 0);
    for (unsigned int i = 0; i < FLUSHED; i++) {
        rte_mempool_put(pool, objects[i]);
    }
    CHECK(strstr(logged(), "pool cached: enqueue: refused") != NULL);
}

/* A pool of the secondary's own is checked as in any process. */
static void own(void) {
    struct rte_mempool *pool = create("own", 0);
    void *object;
    CHECK(rte_mempool_get(pool, &object) == 0);
    rte_mempool_put(pool, object);
    CHECK(strcmp(logged(), "") == 0);
    rte_mempool_put(pool, object);
    CHECK(strstr(logged(), "freed twice") != NULL);
    CHECK(rte_mempool_avail_count(pool) == OBJECTS);
    rte_mempool_free(pool);
    logged();
}

static void secondary(void) {
    const struct rte_memzone *zone = rte_memzone_lookup("pinfold_lent");
    struct rte_mempool *single = rte_mempool_lookup("single");
    struct rte_mempool *with_cache = rte_mempool_lookup("cached");
    CHECK(zone != NULL && single != NULL && with_cache != NULL);
    const struct lent *lent = zone->addr;
    logged();
    refused(single, lent->single);
    cached(with_cache, lent->cached);
    own();
}

/* The secondary is this program, with the same options and the other lcore. */
static bool run_secondary(char **options, int n) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        options[n] = (char *)"--proc-type=secondary";
        options[n + 1] = (char *)"--lcores=1@0";
        execv("/proc/self/exe", options);
        _exit(127);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    return status == 0;
}

static void primary(char **options, int n) {
    const struct rte_memzone *zone =
        rte_memzone_reserve("pinfold_lent", sizeof(struct lent), SOCKET_ID_ANY, 0);
    CHECK(zone != NULL);
    struct lent *lent = zone->addr;
    struct rte_mempool *single = create("single", 0);
    struct rte_mempool *with_cache = create("cached", CACHE);
    CHECK(rte_mempool_get(single, &lent->single) == 0);
    CHECK(rte_mempool_get_bulk(with_cache, lent->cached, FLUSHED) == 0);
    logged();
    CHECK(run_secondary(options, n));

    /* Nothing of the secondary's has changed the state here. */
    CHECK(rte_mempool_avail_count(single) == OBJECTS - 1);
    rte_mempool_put(single, lent->single);
    CHECK(rte_mempool_avail_count(single) == OBJECTS);
    rte_mempool_put(single, lent->single);
    CHECK(strstr(logged(), "pool single: object") != NULL);
    rte_mempool_free(single);
    /* Objects in the secondary's cache when it was flushed stay in use. */
    unsigned int in_use = OBJECTS - rte_mempool_avail_count(with_cache);
    CHECK(in_use > 0 && in_use <= FLUSHED);
    rte_mempool_free(with_cache);
    CHECK(rte_memzone_free(zone) == 0);
    puts("ok");
}

int main(int argc, char **argv) {
    static char *options[64];
    CHECK(argc + 2 < 64);
    memcpy(options, argv, argc * sizeof(*argv));
    bool is_secondary = strncmp(argv[argc - 1], "--lcores=1", 10) == 0;
    char *own[64];
    memcpy(own, options, sizeof(own));
    int n = argc;
    if (!is_secondary) {
        own[n++] = (char *)"--lcores=0@0";
    }
    CHECK(rte_eal_init(n, own) >= 0);
    CHECK(rte_eal_process_type() == (is_secondary ? RTE_PROC_SECONDARY : RTE_PROC_PRIMARY));
    if (is_secondary) {
        secondary();
    } else {
        primary(options, argc);
    }
    CHECK(rte_openlog_stream(NULL) == 0);
    return rte_eal_cleanup() == 0 ? 0 : 1;
}
