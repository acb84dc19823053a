/* An end that is refused refuses no call of another thread: threads use an object of each kind, while
   it is tried over and over to destroy it, which something of it keeps from ending. Arenas: arena.c. */
#include "check.h"
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

static pf_domain_t *domain;
static pf_arena_t *arena;
static pf_pool_t *pool;
static pf_pages_t *pages;
static pf_reg_t *reg;
static pf_owner_t *owner;
static pf_requests_t *requests;
static pf_nvme_t *nvme;
static pf_queue_t *queue;
static char *memory;
static const size_t size = 1 << 20;

/* A thread: what it does with the object, and how often it has. */
struct user {
    void (*use)(struct user *user);
    pthread_t thread;
    unsigned long rounds;
    pf_cache_t *cache;
};

static int stop;

static void *repeat(void *arg) {
    struct user *user = arg;
    while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
        user->use(user);
        __atomic_fetch_add(&user->rounds, 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

/* Whether each has had the object often enough. */
static int enough(struct user *users, unsigned n) {
    for (unsigned i = 0; i < n; i++)
        if (__atomic_load_n(&users[i].rounds, __ATOMIC_RELAXED) < 100)
            return 0;
    return 1;
}

/* Tries to end an object while they use it. */
static void refused(int (*end)(void), struct user *users, unsigned n) {
    __atomic_store_n(&stop, 0, __ATOMIC_RELAXED);
    for (unsigned i = 0; i < n; i++)
        CHECK(pthread_create(&users[i].thread, NULL, repeat, &users[i]) == 0);
    for (unsigned tries = 0; tries < 3000 || !enough(users, n); tries++) {
        CHECK(end() == -EBUSY);
        /* A checker has one thread at a time. */
        if (tries % 16 == 0)
            sched_yield();
    }
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    for (unsigned i = 0; i < n; i++)
        CHECK(pthread_join(users[i].thread, NULL) == 0);
}

#define COUNT(array) (sizeof(array) / sizeof *(array))

static int end_pool(void) { return pf_pool_destroy(pool); }

static void get_and_put(struct user *user) {
    pf_block_t blocks[40];
    OK(pf_get(user->cache, &blocks[0]));
    OK(pf_get_bulk(user->cache, blocks + 1, 39));
    OK(pf_put_bulk(user->cache, blocks, 39, NULL));
    OK(pf_put(user->cache, &blocks[39]));
}

static void get_through_a_new_cache(struct user *user) {
    OK(pf_pool_cache(pool, &user->cache));
    get_and_put(user);
    OK(pf_cache_destroy(user->cache));
}

static void look_at_pool(struct user *user) {
    (void)user;
    struct pf_pool_stats stats = {.struct_size = sizeof stats};
    OK(pf_pool_stats(pool, &stats));
    CHECK(stats.in_use > 0);
    VALUE(pf_pool_report(pool, NULL, 0));
    VALUE(pf_stats(pool, NULL, 0));
    VALUE(pf_stats_json(pool, NULL, 0));
    VALUE(pf_pool_shrink(pool));
    REFUSED(EEXIST, "already", pf_pool_add(pool, memory, size, 0));
}

static void of_a_pool(void) {
    struct pf_pool_opts opts = {.struct_size = sizeof opts, .size = 256};
    pf_cache_t *keeper;
    pf_block_t kept[500];
    OK(pf_pool_create(arena, &opts, &pool));
    VALUE(pf_pool_add(pool, memory, size, 0));
    OK(pf_pool_cache(pool, &keeper));
    OK(pf_get_bulk(keeper, kept, COUNT(kept)));
    struct user users[] = {{.use = get_and_put},
                           {.use = get_and_put},
                           {.use = get_through_a_new_cache},
                           {.use = look_at_pool}};
    for (unsigned i = 0; i < 2; i++)
        OK(pf_pool_cache(pool, &users[i].cache));
    /* Without the last, which is nearly always in a call with the pool, and with it. */
    refused(end_pool, users, COUNT(users) - 1);
    refused(end_pool, users, COUNT(users));
    for (unsigned i = 0; i < 2; i++)
        OK(pf_cache_destroy(users[i].cache));
    OK(pf_put_bulk(keeper, kept, COUNT(kept), NULL));
    OK(pf_cache_destroy(keeper));
    OK(pf_pool_destroy(pool));
}

static int end_pages(void) { return pf_pages_destroy(pages); }

/* Pages on the way from the consumer to the thread that returns them. */
static pf_block_t on_the_way[4];
static int are_on_the_way;

static void consume(struct user *user) {
    (void)user;
    pf_block_t slots[8] = {{.va = NULL}};
    CHECK(VALUE(pf_pages_fill(pages, slots, 8)) == 8);
    if (!__atomic_load_n(&are_on_the_way, __ATOMIC_ACQUIRE)) {
        memcpy(on_the_way, slots, sizeof on_the_way);
        __atomic_store_n(&are_on_the_way, 1, __ATOMIC_RELEASE);
        OK(pf_pages_recycle(pages, slots + 4, 4, NULL));
    } else {
        OK(pf_pages_recycle(pages, slots, 8, NULL));
    }
}

static void return_pages(struct user *user) {
    (void)user;
    while (!__atomic_load_n(&are_on_the_way, __ATOMIC_ACQUIRE)) {
        if (__atomic_load_n(&stop, __ATOMIC_RELAXED))
            return;
        sched_yield();
    }
    OK(pf_pages_return(pages, on_the_way, 4, NULL));
    __atomic_store_n(&are_on_the_way, 0, __ATOMIC_RELEASE);
}

/* Refused while the consumer is in a call, and does not refuse that. */
static void look_at_pages(struct user *user) {
    (void)user;
    int counters = pf_stats(pages, NULL, 0);
    CHECK(counters > 0 || counters == -EBUSY);
}

static void of_pages(void) {
    pf_block_t kept = {.va = NULL};
    OK(pf_pages_create(arena, 4096, 16, &pages));
    CHECK(VALUE(pf_pages_fill(pages, &kept, 1)) == 1);
    struct user users[] = {{.use = consume}, {.use = return_pages}, {.use = look_at_pages}};
    refused(end_pages, users, COUNT(users));
    if (are_on_the_way)
        OK(pf_pages_return(pages, on_the_way, 4, NULL));
    OK(pf_pages_return(pages, &kept, 1, NULL));
    OK(pf_pages_destroy(pages));
}

static int end_reg(void) { return pf_reg_destroy(reg); }

static void describe(struct user *user) {
    (void)user;
    pf_block_t segment;
    uint64_t iova, prp[2];
    uint8_t sgl[16];
    CHECK(pf_segments(reg, 100, 5000, &segment, 1) == 1);
    OK(pf_prp(reg, 0, 8192, NULL, 0, prp));
    OK(pf_sgl(reg, 0, 8192, NULL, 0, sgl));
    OK(pf_iova(domain, memory, size, &iova));
}

static int end_owner(void) { return pf_owner_destroy(owner); }

static void map_and_unmap(struct user *user) {
    (void)user;
    pf_map_t map;
    pf_ticket_t ticket;
    uint64_t iova;
    OK(pf_map(owner, memory, 4096, PF_BIDIR, &map, &iova));
    CHECK(VALUE(pf_unmap(owner, map)) == PF_STAYS_MAPPED);
    OK(pf_map(owner, memory, 4096, PF_BIDIR, &map, &iova));
    CHECK(VALUE(pf_revoke_many(owner, &map, 1, &ticket)) == PF_STAYS_MAPPED);
    OK(pf_wait(owner, ticket, UINT64_MAX));
}

static void of_a_registration_and_an_owner(void) {
    pf_map_t kept;
    uint64_t iova;
    OK(pf_register(domain, memory, size, &reg));
    OK(pf_owner_create(domain, &owner));
    OK(pf_map(owner, memory, 4096, PF_BIDIR, &kept, &iova));
    struct user of_reg[] = {{.use = describe}, {.use = describe}, {.use = map_and_unmap}};
    refused(end_reg, of_reg, COUNT(of_reg));
    struct user of_owner[] = {{.use = map_and_unmap}};
    refused(end_owner, of_owner, COUNT(of_owner));
    CHECK(VALUE(pf_unmap(owner, kept)) == PF_STAYS_MAPPED);
    OK(pf_owner_destroy(owner));
    OK(pf_reg_destroy(reg));
}

static int end_requests(void) { return pf_requests_destroy(requests); }

static void request(struct user *user) {
    (void)user;
    uint64_t token;
    struct pf_done done;
    OK(pf_requests_begin(requests, NULL, 0, &token, NULL));
    OK(pf_requests_refused(requests, token));
    OK(pf_requests_begin(requests, NULL, 0, &token, NULL));
    OK(pf_requests_completed(requests, token, 7));
    CHECK(VALUE(pf_requests_poll(requests, &done, 1)) == 1);
    CHECK(done.token == token && done.result == 7);
}

static void of_a_loop(void) {
    struct pf_requests_opts opts = {.struct_size = sizeof opts, .depth = 4};
    uint64_t kept;
    OK(pf_requests_create(domain, &opts, &requests));
    OK(pf_requests_begin(requests, NULL, 0, &kept, NULL));
    struct user users[] = {{.use = request}};
    refused(end_requests, users, COUNT(users));
    OK(pf_requests_refused(requests, kept));
    OK(pf_requests_destroy(requests));
}

static int end_nvme(void) { return pf_nvme_destroy(nvme); }

static void look_at_nvme(struct user *user) {
    (void)user;
    struct pf_nvme_info info = {.struct_size = sizeof info};
    OK(pf_nvme_info(nvme, 0, &info));
    VALUE(pf_stats(nvme, NULL, 0));
}

static void create_a_queue(struct user *user) {
    (void)user;
    struct pf_queue_opts opts = {.struct_size = sizeof opts, .depth = 2};
    pf_queue_t *other;
    OK(pf_queue_create(nvme, &opts, &other));
    OK(pf_queue_destroy(other));
}

static int end_queue(void) { return pf_queue_destroy(queue); }

static void submit(void) {
    struct pf_request flush = {.op = PF_FLUSH, .nsid = 1};
    CHECK(VALUE(pf_submit(queue, &flush, 1)) == 1);
}

/* One more than is reported stays unreported. */
static void complete(struct user *user) {
    (void)user;
    struct pf_completion completion;
    submit();
    while (VALUE(pf_queue_wait(queue, 1000000000)) == 0)
        ;
    CHECK(VALUE(pf_complete(queue, &completion, 1)) == 1 && completion.result == 0);
}

/* Refused while the queue's thread is in a call, and does not refuse that. */
static void look_at_queue(struct user *user) {
    (void)user;
    int counters = pf_stats(queue, NULL, 0);
    CHECK(counters > 0 || counters == -EBUSY);
}

static void of_a_controller_and_a_queue(void) {
    struct pf_nvme_opts opts = {.struct_size = sizeof opts, .size = 1 << 20};
    struct pf_queue_opts queue_opts = {.struct_size = sizeof queue_opts, .depth = 4};
    OK(pf_nvme_open(domain, arena, &opts, &nvme));
    OK(pf_queue_create(nvme, &queue_opts, &queue));
    struct user of_nvme[] = {{.use = look_at_nvme}, {.use = look_at_nvme}, {.use = create_a_queue}};
    refused(end_nvme, of_nvme, COUNT(of_nvme));
    submit();
    struct user of_queue[] = {{.use = complete}, {.use = look_at_queue}};
    refused(end_queue, of_queue, COUNT(of_queue));
    struct pf_completion last;
    while (VALUE(pf_complete(queue, &last, 1)) == 0)
        ;
    OK(pf_queue_destroy(queue));
    OK(pf_nvme_destroy(nvme));
}

int main(void) {
    /* A call that waits for ever. */
    alarm(600);
    struct pf_arena_opts opts = {
        .struct_size = sizeof opts, .size = 16 << 20, .policy = PF_POLICY_WHOLE};
    OK(pf_domain_soft(&domain));
    OK(pf_arena_create(domain, &opts, &arena));
    memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    of_a_pool();
    of_pages();
    of_a_registration_and_an_owner();
    of_a_loop();
    of_a_controller_and_a_queue();
    CHECK(munmap(memory, size) == 0);
    OK(pf_arena_destroy(arena));
    OK(pf_domain_destroy(domain));
    puts("ends: ok");
    return 0;
}
