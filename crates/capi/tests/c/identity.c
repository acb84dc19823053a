/* Memory has one identity in the process: no bytes have two owners, whichever domain asks. */
#include "check.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

static pf_domain_t *first, *second;
static const size_t size = 2 << 20, page = 4096;

static char *pages(size_t bytes) {
    char *va = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(va != MAP_FAILED);
    return va;
}

static int arena_at(pf_domain_t *domain, void *va, size_t bytes, pf_arena_t **out) {
    struct pf_arena_opts opts = {
        .struct_size = sizeof opts, .size = bytes, .va = va, .policy = PF_POLICY_WHOLE};
    return pf_arena_create(domain, &opts, out);
}

static pf_pool_t *new_pool(pf_arena_t *arena, size_t bytes) {
    struct pf_pool_opts opts = {.struct_size = sizeof opts, .size = bytes};
    pf_pool_t *pool;
    OK(pf_pool_create(arena, &opts, &pool));
    return pool;
}

/* Memory that is an arena: of the library's own, or of the program. */
static void of_an_arena(char *own) {
    pf_arena_t *arena, *other;
    pf_reg_t *reg;
    pf_domain_t *both[] = {first, second};
    OK(arena_at(first, own, 4 * size, &arena));
    struct pf_region region = {.struct_size = sizeof region};
    OK(pf_arena_region(arena, &region));
    char *at = region.addr;
    for (int i = 0; i < 2; i++) {
        /* The same, inside, over each end, around. */
        REFUSED(EEXIST, "pf_arena_map_into", pf_register(both[i], at, region.len, &reg));
        REFUSED(EEXIST, "an arena", pf_register(both[i], at + page, page, &reg));
        REFUSED(EEXIST, "an arena", arena_at(both[i], at, region.len, &other));
        REFUSED(EEXIST, "an arena", arena_at(both[i], at + size, size, &other));
        if (own == NULL)
            continue;
        REFUSED(EEXIST, "an arena", pf_register(both[i], at - page, 2 * page, &reg));
        REFUSED(EEXIST, "an arena", pf_register(both[i], at + region.len - page, 2 * page, &reg));
        REFUSED(EEXIST, "an arena", pf_register(both[i], at - page, region.len + 2 * page, &reg));
        REFUSED(EEXIST, "an arena", arena_at(both[i], at - page, 2 * page, &other));
        REFUSED(EEXIST, "an arena", arena_at(both[i], at + region.len - page, 2 * page, &other));
        /* Its neighbours are others'. */
        OK(pf_register(both[i], at - page, page, &reg));
        OK(pf_reg_destroy(reg));
        OK(arena_at(both[i], at + region.len, page, &other));
        OK(pf_arena_destroy(other));
    }
    /* It is in two domains by pf_arena_map_into, where it is the same arena. */
    OK(pf_arena_map_into(arena, second, NULL));
    REFUSED(EEXIST, "an arena", pf_register(second, at, region.len, &reg));
    void *memory = pf_alloc(arena, page, NULL);
    REFUSED(EEXIST, "an arena", pf_register(second, memory, page, &reg));
    OK(pf_free(arena, memory));
    OK(pf_arena_destroy(arena));
    if (own == NULL)
        return;
    /* It is the program's again. */
    OK(pf_register(second, own, 4 * size, &reg));
    OK(pf_reg_destroy(reg));
}

/* Registered memory may be registered in another domain, as the same bytes, and is nothing else. */
static void of_a_registration(char *own) {
    pf_arena_t *arena;
    pf_reg_t *one, *two, *none;
    OK(pf_register(first, own, size, &one));
    REFUSED(EEXIST, "registered", pf_register(first, own, size, &none));
    REFUSED(EEXIST, "registered", pf_register(second, own, size - page, &none));
    REFUSED(EEXIST, "registered", pf_register(second, own + page, size - page, &none));
    REFUSED(EEXIST, "registered", pf_register(second, own + size - page, 2 * page, &none));
    REFUSED(EEXIST, "registered", pf_register(second, own - page, size + 2 * page, &none));
    OK(pf_register(second, own, size, &two));
    REFUSED(EEXIST, "registered", arena_at(second, own, size, &arena));
    OK(pf_reg_destroy(one));
    /* The second has it still. */
    REFUSED(EEXIST, "registered", arena_at(first, own + page, page, &arena));
    REFUSED(EEXIST, "registered", pf_register(first, own, page, &none));
    OK(pf_reg_destroy(two));
    OK(arena_at(first, own, size, &arena));
    OK(pf_arena_destroy(arena));
}

/* The blocks of a pool are no other owner's, and what a pool has is in use. */
static void of_a_pool(char *own) {
    pf_pool_t *pool = new_pool(NULL, 256), *other = new_pool(NULL, 256);
    pf_arena_t *arena, *none;
    pf_reg_t *reg;
    VALUE(pf_pool_add(pool, own + 256, size - 256, 0x10000));
    REFUSED(EEXIST, "a pool", pf_pool_add(other, own + 256, size - 256, 0x10000));
    REFUSED(EEXIST, "a pool", pf_pool_add(other, own + page, 256, 0));
    REFUSED(EEXIST, "a pool", arena_at(first, own, page, &none));
    /* The bytes before it, behind memory that is registered. */
    OK(pf_register(first, own - page, page, &reg));
    VALUE(pf_pool_add(other, own, 256, 0));
    OK(pf_reg_destroy(reg));
    OK(pf_pool_destroy(other));
    OK(pf_pool_destroy(pool));

    /* In registered memory: it cannot be unregistered. */
    pool = new_pool(NULL, 256), other = new_pool(NULL, 256);
    pf_reg_t *again;
    uint64_t iova;
    OK(pf_register(first, own, size, &reg));
    OK(pf_register(second, own, size, &again));
    OK(pf_iova(first, own + page, size - page, &iova));
    REFUSED(EEXIST, "registered", pf_pool_add(pool, own + page, size, iova));
    REFUSED(EEXIST, "registered", pf_pool_add(pool, own - page, 2 * page, 0));
    VALUE(pf_pool_add(pool, own + page, size - page, iova));
    REFUSED(EEXIST, "a pool", pf_pool_add(other, own + size - page, page, iova));
    REFUSED(EBUSY, "in use by 1 mapping", pf_reg_destroy(reg));
    REFUSED(EBUSY, "in use by", pf_reg_destroy(again));
    OK(pf_pool_destroy(pool));
    OK(pf_reg_destroy(reg));
    OK(pf_reg_destroy(again));

    /* In memory of an arena: what is allocated, and no other pool's. */
    pool = new_pool(NULL, 256);
    OK(arena_at(first, NULL, 4 << 20, &arena));
    char *memory = pf_alloc(arena, 4 * page, &iova);
    REFUSED(EINVAL, "not all allocated", pf_pool_add(pool, memory, 5 * page, iova));
    REFUSED(EEXIST, "an arena", pf_pool_add(pool, memory, 8 << 20, iova));
    VALUE(pf_pool_add(pool, memory, 2 * page, iova));
    VALUE(pf_pool_add(pool, memory + 2 * page, 2 * page, iova + 2 * page));
    REFUSED(EEXIST, "a pool", pf_pool_add(other, memory + page, page, iova + page));
    REFUSED(EBUSY, "in use by 2", pf_free(arena, memory));
    OK(pf_pool_destroy(pool));
    OK(pf_free(arena, memory));
    pf_pool_t *within = new_pool(arena, 8192);
    pf_cache_t *cache;
    pf_block_t block;
    OK(pf_pool_cache(within, &cache));
    OK(pf_get(cache, &block));
    REFUSED(EEXIST, "a pool", pf_pool_add(other, block.va, block.len, block.iova));
    OK(pf_put(cache, &block));
    OK(pf_cache_destroy(cache));
    OK(pf_pool_destroy(within));
    REFUSED(EINVAL, "not allocated", pf_pool_add(other, memory, page, iova));
    OK(pf_pool_destroy(other));
    OK(pf_arena_destroy(arena));
}

static char *raced;
static pthread_barrier_t start;

static void *take(void *domain) {
    long owned = 0;
    for (int i = 0; i < 100; i++) {
        pf_reg_t *reg = NULL;
        pf_arena_t *arena = NULL;
        pthread_barrier_wait(&start);
        int code = i % 2 == 0 ? arena_at(domain, raced, page, &arena)
                              : pf_register(domain, raced, (1 + (domain == first)) * page, &reg);
        CHECK(code == 0 || code == -EEXIST);
        owned += code == 0;
        __atomic_fetch_add((int *)raced, code == 0, __ATOMIC_RELAXED);
        pthread_barrier_wait(&start);
        CHECK(__atomic_load_n((int *)raced, __ATOMIC_RELAXED) == 1);
        pthread_barrier_wait(&start);
        __atomic_store_n((int *)raced, 0, __ATOMIC_RELAXED);
        OK(pf_arena_destroy(arena));
        OK(pf_reg_destroy(reg));
    }
    return (void *)owned;
}

/* Two threads take the same bytes at once, for different domains: one has them. */
static void raced_for(char *own) {
    pthread_t thread;
    void *theirs;
    raced = own;
    CHECK(pthread_barrier_init(&start, NULL, 2) == 0);
    CHECK(pthread_create(&thread, NULL, take, second) == 0);
    long ours = (long)take(first);
    CHECK(pthread_join(thread, &theirs) == 0);
    CHECK(ours + (long)theirs == 100);
}

int main(void) {
    OK(pf_domain_soft(&first));
    OK(pf_domain_soft(&second));
    char *own = pages(6 * size) + size;
    of_an_arena(NULL);
    of_an_arena(own);
    of_a_registration(own);
    of_a_pool(own);
    raced_for(own);
    OK(pf_domain_destroy(first));
    OK(pf_domain_destroy(second));
    puts("identity: ok");
    return 0;
}
