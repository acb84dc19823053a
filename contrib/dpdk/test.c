/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Tests of the driver: layouts, counts, threads, and wrong frees.
 *   test EAL-OPTIONS (with two lcores at least) */
#include <pthread.h>
#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_launch.h>
#include <rte_log.h>
#include <rte_malloc.h>
#include <rte_mempool.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* The condition holds. */
#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);              \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* Returns the output since the last call, in a buffer of its own. */
static const char *printed(void) {
    static FILE *log;
    static char *text, *copy;
    static size_t len, before;
    if (log == NULL) {
        log = open_memstream(&text, &len);
        CHECK(rte_openlog_stream(log) == 0);
    }
    fflush(log);
    free(copy);
    copy = strdup(text + before);
    before = len;
    return copy;
}

static struct rte_mempool *empty(const char *name, unsigned int n, unsigned int size,
                                 unsigned int cache, unsigned int flags) {
    struct rte_mempool *pool =
        rte_mempool_create_empty(name, n, size, cache, 0, SOCKET_ID_ANY, flags);
    CHECK(pool != NULL);
    CHECK(rte_mempool_set_ops_byname(pool, "pinfold", NULL) == 0);
    return pool;
}

/* Takes all objects, fills each, sees that no other was touched, and frees them. */
static void take_all(struct rte_mempool *pool, unsigned int n) {
    unsigned char **objects = calloc(n + 1, sizeof(*objects));
    size_t page;
    CHECK(rte_mempool_get_page_size(pool, &page) == 0);
    size_t stride = pool->header_size + pool->elt_size + pool->trailer_size;
    CHECK(rte_mempool_avail_count(pool) == n);
    CHECK(rte_mempool_get_bulk(pool, (void **)objects, n + 1) < 0);
    CHECK(rte_mempool_avail_count(pool) == n);
    for (unsigned int i = 0; i < n; i++) {
        CHECK(rte_mempool_get(pool, (void **)&objects[i]) == 0);
        CHECK(rte_mempool_from_obj(objects[i]) == pool);
        uintptr_t start = (uintptr_t)objects[i] - pool->header_size;
        CHECK(page < stride || start / page == (start + stride - 1) / page);
        rte_iova_t iova = rte_mempool_virt2iova(objects[i]);
        /* The kernel may move pages that are not DPDK's own to other physical addresses. */
        bool moves = rte_eal_iova_mode() == RTE_IOVA_PA &&
                     rte_mem_virt2memseg(objects[i], NULL) == NULL;
        CHECK(iova == RTE_BAD_IOVA || moves || iova == rte_mem_virt2iova(objects[i]));
        memset(objects[i], i % 251, pool->elt_size);
    }
    CHECK(rte_mempool_get(pool, (void **)&objects[n]) < 0);
    CHECK(rte_mempool_avail_count(pool) == 0);
    for (unsigned int i = 0; i < n; i++) {
        CHECK(objects[i][0] == i % 251 && objects[i][pool->elt_size - 1] == i % 251);
        CHECK(rte_mempool_from_obj(objects[i]) == pool);
    }
    rte_mempool_put_bulk(pool, (void **)objects, n);
    CHECK(rte_mempool_avail_count(pool) == n);
    free(objects);
}

/* Objects of any size lie in any memory as DPDK wants them, and none is lost. */
static void layouts(void) {
    static const struct {
        unsigned int n, size, cache, flags;
    } cases[] = {
        {1, 1, 0, 0},
        {1000, 64, 0, RTE_MEMPOOL_F_NO_CACHE_ALIGN | RTE_MEMPOOL_F_NO_SPREAD},
        {100000, 24, 0, RTE_MEMPOOL_F_NO_CACHE_ALIGN | RTE_MEMPOOL_F_NO_SPREAD},
        {2047, 2176, 0, 0},
        {5000, 2176, 0, RTE_MEMPOOL_F_NO_IOVA_CONTIG},
        {3000, 4096, 0, 0},
        {1500, 9000, 0, 0},
        {40, 700000, 0, 0},
        {20, 1500000, 0, RTE_MEMPOOL_F_NO_IOVA_CONTIG},
        {10, 2200000, 0, RTE_MEMPOOL_F_NO_IOVA_CONTIG},
        {5, 5000000, 0, RTE_MEMPOOL_F_NO_IOVA_CONTIG},
    };
    for (unsigned int i = 0; i < RTE_DIM(cases); i++) {
        unsigned int n = cases[i].n;
        struct rte_mempool *pool =
            empty("layout", n, cases[i].size, cases[i].cache, cases[i].flags);
        CHECK(rte_mempool_populate_default(pool) == (int)n);
        take_all(pool, n);
        rte_mempool_free(pool);

        /* Where DPDK itself finds no place for all, at least as many as with its ring; but which of
         * these pages are contiguous for devices is chance. */
        pool = empty("ring", n, cases[i].size, cases[i].cache, cases[i].flags);
        CHECK(rte_mempool_set_ops_byname(pool, "ring_mp_mc", NULL) == 0);
        int with_ring = rte_mempool_populate_anon(pool);
        rte_mempool_free(pool);
        pool = empty("anon", n, cases[i].size, cases[i].cache, cases[i].flags);
        n = rte_mempool_populate_anon(pool);
        bool chance = cases[i].size > 2176 && rte_eal_iova_mode() == RTE_IOVA_PA &&
                      (cases[i].flags & RTE_MEMPOOL_F_NO_IOVA_CONTIG) == 0;
        CHECK((int)n >= with_ring || chance);
        take_all(pool, n);
        rte_mempool_free(pool);
    }
}

/* Exported, so that reports have their names. */
__attribute__((noinline)) void the_right_free(struct rte_mempool *pool, void *object) {
    rte_mempool_put(pool, object);
}

__attribute__((noinline)) void a_wrong_free(struct rte_mempool *pool, void *object) {
    rte_mempool_put(pool, object);
}

/* The objects that begin a piece. */
static void *begins[8];
static uint32_t begins_at[RTE_DIM(begins)];

static void find_begins(struct rte_mempool *pool, void *arg, void *object, unsigned int index) {
    (void)pool;
    (void)arg;
    for (unsigned int i = 0; i < RTE_DIM(begins); i++) {
        if (begins_at[i] == index) {
            begins[i] = object;
        }
    }
}

/* Each object has a record of its own, whatever piece it is in: the first of each are freed by
 * different functions, then again. */
static void records(struct rte_mempool *pool, unsigned int n, unsigned int n_begins) {
    void **objects = calloc(n, sizeof(*objects));
    CHECK(rte_mempool_obj_iter(pool, find_begins, NULL) == n);
    CHECK(rte_mempool_get_bulk(pool, objects, n) == 0);
    CHECK(n_begins >= 3);
    for (unsigned int i = 0; i < n_begins; i++) {
        (i % 2 == 0 ? the_right_free : a_wrong_free)(pool, begins[i]);
    }
    printed();
    for (unsigned int i = 0; i < n_begins; i++) {
        rte_mempool_put(pool, begins[i]);
        const char *by = i % 2 == 0 ? "previous free: lcore 0, the_right_free+"
                                    : "previous free: lcore 0, a_wrong_free+";
        CHECK(strstr(printed(), by) != NULL);
    }
    rte_mempool_put_bulk(pool, objects, n);
    CHECK(rte_mempool_avail_count(pool) == n);
    free(objects);
}

/* Memory in pieces that begin anywhere: as many objects as DPDK's own layout has there, but for
 * one in each 2 MiB, and those before the first page; together no more than the pool's size. */
static void pieces(void) {
    struct rte_mempool *pool = empty("pieces", 3000, 2048, 0, 0);
    struct rte_mempool *ring = empty("ring", 3000, 2048, 0, 0);
    CHECK(rte_mempool_set_ops_byname(ring, "ring_mp_mc", NULL) == 0);
    static const size_t sizes[] = {100,     2500,    8500,    30000,   30000,
                                   3 << 20, 1 << 20, 1 << 20, 12 << 20};
    unsigned int n_begins = 0;
    void *memory[RTE_DIM(sizes)];
    int n = 0;
    for (unsigned int i = 0; i < RTE_DIM(sizes); i++) {
        memory[i] = rte_malloc(NULL, sizes[i], 64);
        CHECK(memory[i] != NULL);
        char *start = (char *)memory[i] + 24; /* not at a cache line */
        size_t len = sizes[i] - 24;
        int by_ring = rte_mempool_populate_iova(ring, start, RTE_BAD_IOVA, len, NULL, NULL);
        int added = rte_mempool_populate_iova(pool, start, RTE_BAD_IOVA, len, NULL, NULL);
        int fewer = (len >> 21) + 2;
        CHECK(added >= by_ring - fewer);
        if (added > 0 && n_begins < RTE_DIM(begins)) {
            begins_at[n_begins++] = n;
        }
        CHECK(pool->populated_size == (uint32_t)(n += RTE_MAX(added, 0)));
    }
    CHECK(n == 3000);
    rte_mempool_free(ring);
    take_all(pool, n);
    records(pool, n, n_begins);
    rte_mempool_free(pool);
    printed();
    for (unsigned int i = 0; i < RTE_DIM(sizes); i++) {
        rte_free(memory[i]);
    }
}

static void *kept[4096];

/* Takes all of a pool, and frees it, in the lcore or thread that runs it. */
static int take_and_free(void *arg) {
    struct rte_mempool *pool = arg;
    for (unsigned int round = 0; round < 100; round++) {
        CHECK(rte_mempool_get_bulk(pool, kept, pool->size) == 0);
        rte_mempool_put_bulk(pool, kept, pool->size);
    }
    return 0;
}

static void *take_and_free_in_thread(void *arg) {
    take_and_free(arg);
    return NULL;
}

static int mix(void *arg) {
    struct rte_mempool *pool = arg;
    void *objects[100];
    for (unsigned int i = 0; i < 200000; i++) {
        unsigned int n = 1 + (i * 2654435761u >> 16) % RTE_DIM(objects);
        if (rte_mempool_get_bulk(pool, objects, n) == 0) {
            for (unsigned int j = 0; j < n; j++) {
                uint64_t *owner = objects[j];
                CHECK(__atomic_exchange_n(owner, 1, __ATOMIC_RELAXED) == 0);
            }
            for (unsigned int j = 0; j < n; j++) {
                __atomic_store_n((uint64_t *)objects[j], 0, __ATOMIC_RELAXED);
            }
            rte_mempool_put_bulk(pool, objects, n);
        }
    }
    return 0;
}

/* Each lcore, and a thread without one, has all objects that are free, wherever they were freed. */
static void threads(void) {
    struct rte_mempool *pool = empty("threads", 4096, 64, 0, 0);
    CHECK(rte_mempool_populate_default(pool) == 4096);
    unsigned int lcore;
    for (unsigned int round = 0; round < 3; round++) {
        take_and_free(pool);
        RTE_LCORE_FOREACH_WORKER(lcore) {
            CHECK(rte_eal_remote_launch(take_and_free, pool, lcore) == 0);
            CHECK(rte_eal_wait_lcore(lcore) == 0);
        }
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, take_and_free_in_thread, pool) == 0);
        pthread_join(thread, NULL);
    }
    rte_mempool_free(pool);

    /* All at once, with fewer objects than they want. */
    pool = empty("mixed", 150, 64, 0, 0);
    CHECK(rte_mempool_populate_default(pool) == 150);
    void *objects[150];
    CHECK(rte_mempool_get_bulk(pool, objects, 150) == 0);
    for (unsigned int i = 0; i < 150; i++) {
        memset(objects[i], 0, 8);
    }
    rte_mempool_put_bulk(pool, objects, 150);
    CHECK(rte_eal_mp_remote_launch(mix, pool, CALL_MAIN) == 0);
    rte_eal_mp_wait_lcore();
    CHECK(rte_mempool_avail_count(pool) == 150);
    CHECK(strcmp(printed(), "") == 0);
    rte_mempool_free(pool);
}

__attribute__((noinline)) void the_last_get(struct rte_mempool *pool, void **object) {
    CHECK(rte_mempool_get(pool, object) == 0);
}

/* A report names this free, the one that freed the object, and the get before that. */
static void places(struct rte_mempool *pool) {
    void *object;
    the_last_get(pool, &object);
    the_right_free(pool, object);
    for (unsigned int i = 0; i < 3; i++) {
        a_wrong_free(pool, object);
        const char *text = printed();
        CHECK(strstr(text, "this free:     lcore 0, a_wrong_free+") != NULL);
        CHECK(strstr(text, "previous free: lcore 0, the_right_free+") != NULL);
        CHECK(strstr(text, "last taken:    lcore 0, the_last_get+") != NULL);
    }
}

/* Each wrong free is refused and reported, and the objects beside it are freed. */
static void wrong_frees(void) {
    struct rte_mempool *pool = empty("wrong", 500, 2048, 0, 0);
    struct rte_mempool *other = empty("other", 10, 2048, 0, 0);
    CHECK(rte_mempool_populate_default(pool) == 500);
    CHECK(rte_mempool_populate_default(other) == 10);
    void *objects[200], *foreign;
    CHECK(rte_mempool_get_bulk(pool, objects, 200) == 0);
    CHECK(rte_mempool_get(other, &foreign) == 0);
    printed();

    /* Of another pool, inside of an object, of no pool, null. */
    rte_mempool_put(pool, foreign);
    CHECK(strstr(printed(), "it is an object of pool other") != NULL);
    rte_mempool_put(pool, (char *)objects[3] + 64);
    CHECK(strstr(printed(), "no object starts there") != NULL);
    rte_mempool_put(pool, &pool);
    CHECK(strstr(printed(), "which is not of this pool") != NULL);
    rte_mempool_put(pool, NULL);
    CHECK(strstr(printed(), "which is not of this pool") != NULL);
    CHECK(rte_mempool_avail_count(pool) == 300);

    /* In a bulk: two of 200 are wrong, one of them freed twice in the same call. */
    objects[100] = objects[7];
    objects[150] = foreign;
    rte_mempool_put_bulk(pool, objects, 200);
    const char *text = printed();
    const char *twice = strstr(text, "freed twice");
    CHECK(twice != NULL && strstr(twice + 1, "freed twice") == NULL);
    CHECK(strstr(twice, "previous free: lcore 0, ") != NULL);
    CHECK(strstr(twice, "it is an object of pool other") != NULL);
    CHECK(rte_mempool_avail_count(pool) == 498);
    CHECK(rte_mempool_ops_enqueue_bulk(pool, &objects[7], 1) == -EINVAL);
    rte_mempool_put(other, foreign);
    CHECK(rte_mempool_avail_count(other) == 10);

    places(pool);

    /* Reports end, counting does not. */
    for (unsigned int i = 0; i < 200; i++) {
        rte_mempool_put(pool, objects[7]);
    }
    text = printed();
    unsigned int reports = 0;
    for (text = strstr(text, "freed twice"); text != NULL; text = strstr(text + 1, "freed twice")) {
        reports++;
    }
    CHECK(reports == 90); /* 10 were printed before */
    rte_mempool_free(pool);
    CHECK(strstr(printed(), "210 frees refused") != NULL);
    rte_mempool_free(other);
    CHECK(strcmp(printed(), "") == 0);
}

/* A child by fork has no pool: it allocates and frees nothing, and logs the reason. */
static void forked(void) {
    struct rte_mempool *pool = empty("forked", 10, 64, 0, 0);
    CHECK(rte_mempool_populate_default(pool) == 10);
    void *object, *other;
    CHECK(rte_mempool_get(pool, &object) == 0);
    pid_t child = fork();
    if (child == 0) {
        bool refused = rte_mempool_get(pool, &other) < 0 &&
                       rte_mempool_ops_enqueue_bulk(pool, &object, 1) == -EPERM &&
                       strstr(printed(), "forked") != NULL;
        _exit(refused ? 0 : 1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    rte_mempool_put(pool, object);
    CHECK(rte_mempool_avail_count(pool) == 10);
    rte_mempool_free(pool);
    CHECK(strcmp(printed(), "") == 0);
}

/* A secondary process's view of a pool, with a number of another process in its shared part:
 * nothing is allocated or freed, and the log says so. */
static void other_process(void) {
    struct rte_mempool *pool = empty("shared", 10, 64, 0, 0);
    CHECK(rte_mempool_populate_default(pool) == 10);
    void *object, *other;
    CHECK(rte_mempool_get(pool, &object) == 0);
    uint64_t *process = pool->pool_data;
    *process += 1;
    CHECK(rte_mempool_get(pool, &other) == -EPERM);
    CHECK(strstr(printed(), "pool shared: dequeue: refused") != NULL);
    rte_mempool_put(pool, object);
    CHECK(strstr(printed(), "pool shared: enqueue: refused") != NULL);
    CHECK(rte_mempool_avail_count(pool) == 0);
    *process -= 1;
    CHECK(rte_mempool_avail_count(pool) == 9);
    rte_mempool_put(pool, object);
    CHECK(rte_mempool_avail_count(pool) == 10);
    rte_mempool_free(pool);
    CHECK(strcmp(printed(), "") == 0);
}

int main(int argc, char **argv) {
    CHECK(rte_eal_init(argc, argv) >= 0);
    CHECK(rte_lcore_count() >= 2);
    printed();
    layouts();
    pieces();
    threads();
    wrong_frees();
    forked();
    other_process();
    rte_openlog_stream(NULL);
    puts("ok");
    return 0;
}
