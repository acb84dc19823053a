/* Calls on a thread whose stack is as small as docs/c.md allows: 64 KiB, and 128 KiB where the library
 * is not optimised, which the size of its file tells: the first argument. */
#include "check.h"
#include <pthread.h>
#include <sys/stat.h>

static void *calls(void *arg) {
    (void)arg;
    pf_domain_t *domain;
    pf_arena_t *arena;
    pf_owner_t *owner;
    pf_pool_t *pool;
    pf_cache_t *cache;
    pf_nvme_t *nvme;
    pf_map_t map;
    pf_block_t block;
    uint64_t iova;
    struct pf_arena_opts opts = {.struct_size = sizeof opts, .size = 16 << 20};
    struct pf_pool_opts blocks = {.struct_size = sizeof blocks, .name = "stack", .size = 128};
    struct pf_nvme_opts medium = {.struct_size = sizeof medium, .size = 1 << 20};
    OK(pf_domain_soft(&domain));
    OK(pf_arena_create(domain, &opts, &arena));
    OK(pf_owner_create(domain, &owner));
    void *memory = pf_alloc(arena, 1 << 20, NULL);
    CHECK(memory != NULL);
    OK(pf_map(owner, memory, 1 << 20, PF_FROM_DEVICE, &map, &iova));
    OK(pf_unmap(owner, map));
    OK(pf_pool_create(arena, &blocks, &pool));
    OK(pf_pool_cache(pool, &cache));
    OK(pf_get(cache, &block));
    OK(pf_put(cache, &block));
    OK(pf_nvme_open(domain, arena, &medium, &nvme));
    char json[4096];
    pf_stats_json(domain, json, sizeof json);
    OK(pf_nvme_destroy(nvme));
    OK(pf_cache_destroy(cache));
    OK(pf_pool_destroy(pool));
    OK(pf_free(arena, memory));
    OK(pf_owner_destroy(owner));
    OK(pf_arena_destroy(arena));
    OK(pf_domain_destroy(domain));
    return NULL;
}

int main(int argc, char **argv) {
    CHECK(argc > 1);
    /* Without optimisation the shared library has more than twice as many bytes. */
    struct stat library;
    CHECK(stat(argv[1], &library) == 0);
    size_t size = library.st_size < (8 << 20) ? 64 << 10 : 128 << 10;
    pthread_attr_t small;
    pthread_t thread;
    CHECK(pthread_attr_init(&small) == 0 && pthread_attr_setstacksize(&small, size) == 0);
    CHECK(pthread_create(&thread, &small, calls, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0 && pthread_attr_destroy(&small) == 0);
    puts("stack: ok");
    return 0;
}
