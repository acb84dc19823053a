/* Page pools: every function, and every misuse. */
#include "traced.h"
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>

#define MIB (1 << 20)
#define PAGES 1024

static pf_domain_t *domain;
static pf_arena_t *arena;

static pf_arena_t *new_arena(uint32_t policy) {
    struct pf_arena_opts opts = {.struct_size = sizeof opts, .size = PAGES * 4096, .policy = policy};
    pf_arena_t *created;
    OK(pf_arena_create(domain, &opts, &created));
    return created;
}

static pf_pages_t *new_pages(unsigned page_bytes) {
    pf_pages_t *pages;
    OK(pf_pages_create(arena, page_bytes, 0, &pages));
    return pages;
}

static void create(void) {
    pf_pages_t *pages = NULL;
    REFUSED(EFAULT, "`out` is NULL", pf_pages_create(arena, 4096, 0, NULL));
    REFUSED(EBADF, "no handle of an arena", pf_pages_create(NULL, 4096, 0, &pages));
    static const unsigned wrong[] = {0, 1, 4095, 4097, 12288, 4 * MIB, UINT_MAX, 1u << 31};
    for (unsigned i = 0; i < 8; i++)
        REFUSED(EINVAL, "at most 2097152", pf_pages_create(arena, wrong[i], 0, &pages));
    REFUSED(EINVAL, "ring of 100 pages", pf_pages_create(arena, 4096, 100, &pages));
    REFUSED(EINVAL, "ring of 2097152 pages", pf_pages_create(arena, 4096, 2 * MIB, &pages));
    CHECK(pages == NULL);
    pages = new_pages(4096);
    REFUSED(EBUSY, "1 pools", pf_arena_destroy(arena));
    REFUSED(EBADF, "not of a pool", pf_pool_destroy((pf_pool_t *)pages));
    OK(pf_pages_destroy(pages));
    REFUSED(EBADF, "destroyed", pf_pages_destroy(pages));
    pf_block_t block = {0};
    unsigned bad = 99;
    REFUSED(EBADF, "destroyed", pf_pages_fill(pages, &block, 1));
    REFUSED(EBADF, "destroyed", pf_pages_recycle(pages, &block, 1, &bad));
    REFUSED(EBADF, "destroyed", pf_pages_return(pages, &block, 1, &bad));
    CHECK(bad == 99 && block.va == NULL);
    OK(pf_pages_destroy(NULL));
}

typedef int give_back(pf_pages_t *, const pf_block_t *, unsigned, unsigned *);

static void fill_and_give_back(unsigned page_bytes, give_back *give) {
    pf_pages_t *pages = new_pages(page_bytes), *other = new_pages(page_bytes);
    pf_block_t slots[100] = {0}, kept;
    const unsigned all = page_bytes > 16384 ? 2 : 100;
    unsigned bad = 99;
    REFUSED(EFAULT, "`slots` is NULL", pf_pages_fill(pages, NULL, 1));
    REFUSED(EINVAL, "at most 2147483647", pf_pages_fill(pages, slots, (unsigned)INT_MAX + 1));
    REFUSED(EFAULT, "`blocks` is NULL", give(pages, NULL, 1, &bad));
    CHECK(VALUE(pf_pages_fill(pages, NULL, 0)) == 0);
    OK(give(pages, NULL, 0, &bad));
    for (unsigned i = 0; i < 100; i++)
        slots[i].tag = i;
    CHECK(VALUE(pf_pages_fill(pages, slots, all)) == (int)all);
    for (unsigned i = 0; i < all; i++) {
        uint64_t iova;
        CHECK(slots[i].va != NULL && (uintptr_t)slots[i].va % 4096 == 0);
        CHECK(slots[i].len == page_bytes && slots[i].tag == i);
        OK(pf_iova(domain, slots[i].va, page_bytes, &iova));
        CHECK(iova == slots[i].iova);
        memset(slots[i].va, (int)i, page_bytes);
    }
    for (unsigned i = 0; i < all; i++)
        CHECK(((unsigned char *)slots[i].va)[0] == i);
    REFUSED(EINVAL, "pf_pages_recycle", pf_free(arena, slots[0].va));
    REFUSED(EBUSY, all == 2 ? "2 pages are in use" : "100 pages are in use", pf_pages_destroy(pages));
    /* Only the holes are filled. */
    kept = slots[1];
    OK(give(pages, slots, 1, &bad));
    slots[0].va = NULL;
    CHECK(VALUE(pf_pages_fill(pages, slots, all)) == (int)all);
    CHECK(slots[0].va != NULL && slots[1].va == kept.va);
    /* Refused: nothing has changed. */
    kept = slots[1];
    slots[1].iova += 4096;
    REFUSED(EINVAL, "page 1 of 2", give(pages, slots, 2, &bad));
    CHECK(bad == 1);
    slots[1].va = (char *)kept.va + 1;
    REFUSED(EINVAL, "no block or page starts", give(pages, slots + 1, 1, NULL));
    slots[1].va = &kept;
    REFUSED(EINVAL, "in no page of this pool", give(pages, slots + 1, 1, &bad));
    CHECK(bad == 0);
    slots[1] = kept;
    REFUSED(EINVAL, "in no page of this pool", give(other, slots + 1, 1, &bad));
    REFUSED(EINVAL, "freed", give(pages, slots, 1, &bad));
    slots[0].va = NULL;
    OK(give(pages, slots, all, &bad));
    REFUSED(EINVAL, "freed", give(pages, slots + 1, 1, &bad));
    OK(pf_pages_destroy(other));
    OK(pf_pages_destroy(pages));
    uint64_t iova;
    REFUSED(EINVAL, "not allocated", pf_iova(domain, slots[1].va, 1, &iova));
}

/* As many as the arena has, and no more. */
static void exhausted(void) {
    pf_pages_t *pages = new_pages(4096);
    static pf_block_t slots[PAGES + 100];
    memset(slots, 0, sizeof slots);
    CHECK(VALUE(pf_pages_fill(pages, slots, PAGES + 100)) == PAGES);
    CHECK(VALUE(pf_pages_fill(pages, slots, PAGES + 100)) == PAGES);
    OK(pf_pages_return(pages, slots, 700, NULL));
    for (unsigned i = 0; i < 700; i++)
        slots[i].va = NULL;
    CHECK(VALUE(pf_pages_fill(pages, slots, PAGES + 100)) == PAGES);
    OK(pf_pages_recycle(pages, slots, PAGES + 100, NULL));
    OK(pf_pages_destroy(pages));
    void *whole = pf_alloc(arena, PAGES * 4096, NULL);
    CHECK(whole != NULL);
    OK(pf_free(arena, whole));
}

static void traced(void) {
    pf_pages_t *pages = new_pages(4096);
    pf_block_t slots[2] = {0};
    uintptr_t at[4];
    pf_trace_set(note, &events, NULL);
    at[0] = here();
    VALUE(pf_pages_fill(pages, slots, 2));
    at[1] = here();
    OK(pf_pages_recycle(pages, slots, 1, NULL));
    at[2] = here();
    OK(pf_pages_return(pages, slots + 1, 1, NULL));
    at[3] = here();
    CHECK(pf_pages_return(pages, slots + 1, 1, NULL) == -EINVAL);
    pf_trace_set(NULL, NULL, NULL);
    CHECK(events == 4);
    static const unsigned calls[] = {0, 0, 1, 2};
    for (unsigned i = 0; i < 4; i++) {
        uintptr_t caller = (uintptr_t)seen[i].caller;
        CHECK(seen[i].kind == (i < 2 ? PF_EVENT_ALLOC : PF_EVENT_FREE) && seen[i].len == 4096);
        CHECK(seen[i].va == slots[i % 2].va && seen[i].iova == slots[i % 2].iova);
        CHECK(at[calls[i]] < caller && caller < at[calls[i] + 1]);
        CHECK(seen[i].handle == (uint64_t)(uintptr_t)pages);
    }
    OK(pf_pages_destroy(pages));
}

#define ROUNDS 20000
static pf_pages_t *shared;
static pf_block_t ring[64];
static unsigned long in, out, busy;

/* Takes pages out of the ring, and returns them from this thread. */
static void *return_elsewhere(void *arg) {
    (void)arg;
    for (;;) {
        unsigned long at = __atomic_load_n(&out, __ATOMIC_RELAXED);
        if (at == ROUNDS)
            return NULL;
        if (at == __atomic_load_n(&in, __ATOMIC_ACQUIRE)) {
            /* On one processor the others run now, and not when this thread's time is up. */
            sched_yield();
            continue;
        }
        pf_block_t page = ring[at % 64];
        if (!__atomic_compare_exchange_n(&out, &at, at + 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
            continue;
        CHECK(*(unsigned long *)page.va == at);
        *(unsigned long *)page.va = ~0ul;
        int code;
        /* Refused while the other thread tries to end the pool. */
        while ((code = pf_pages_return(shared, &page, 1, NULL)) == -EBUSY)
            ;
        CHECK(code == 0);
    }
}

/* The consumer fills while other threads return, and none of them is refused. */
static void returned_elsewhere(void) {
    shared = new_pages(4096);
    pf_block_t held = {0};
    CHECK(VALUE(pf_pages_fill(shared, &held, 1)) == 1);
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        CHECK(pthread_create(&threads[i], NULL, return_elsewhere, NULL) == 0);
    for (unsigned long at = 0; at < ROUNDS; at++) {
        while (at - __atomic_load_n(&out, __ATOMIC_ACQUIRE) >= 32) {
            CHECK(pf_pages_destroy(shared) == -EBUSY);
            sched_yield();
        }
        pf_block_t page = {0};
        /* No other thread is the consumer, or ends the pool. None is there while the arena is full
         * and a thread that returns the next page is interrupted. */
        while (VALUE(pf_pages_fill(shared, &page, 1)) == 0)
            sched_yield();
        *(unsigned long *)page.va = at;
        ring[at % 64] = page;
        __atomic_store_n(&in, at + 1, __ATOMIC_RELEASE);
    }
    for (int i = 0; i < 3; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    REFUSED(EBUSY, "1 pages are in use", pf_pages_destroy(shared));
    OK(pf_pages_return(shared, &held, 1, NULL));
    OK(pf_pages_destroy(shared));
}

static void *consume(void *stop) {
    while (!__atomic_load_n((int *)stop, __ATOMIC_RELAXED)) {
        pf_block_t pages[8] = {0};
        int code = pf_pages_fill(shared, pages, 8);
        if (code == -EBUSY) {
            CHECK(strstr(pf_strerror_last(), "another thread") != NULL);
            __atomic_fetch_add(&busy, 1, __ATOMIC_RELAXED);
            continue;
        }
        CHECK(code == 8);
        while ((code = pf_pages_recycle(shared, pages, 8, NULL)) == -EBUSY)
            ;
        CHECK(code == 0);
    }
    return NULL;
}

/* A second consumer is refused. */
static void two_consumers(void) {
    shared = new_pages(4096);
    int stop = 0;
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        CHECK(pthread_create(&threads[i], NULL, consume, &stop) == 0);
    while (__atomic_load_n(&busy, __ATOMIC_RELAXED) < 20)
        sched_yield();
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < 3; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    OK(pf_pages_destroy(shared));
}

static pf_block_t kept[PAGES];
static unsigned long returned, refused;

static void *return_all(void *arg) {
    (void)arg;
    for (unsigned i = 0; i < PAGES; i++) {
        int code = pf_pages_return(shared, &kept[i], 1, NULL);
        CHECK(code == 0 || code == -EINVAL);
        __atomic_fetch_add(code == 0 ? &returned : &refused, 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

/* Of threads that return the same pages nothing is lost and nothing is had twice. */
static void returned_twice(void) {
    shared = new_pages(4096);
    for (unsigned round = 0; round < 10; round++) {
        memset(kept, 0, sizeof kept);
        CHECK(VALUE(pf_pages_fill(shared, kept, PAGES)) == PAGES);
        pthread_t threads[3];
        for (int i = 0; i < 3; i++)
            CHECK(pthread_create(&threads[i], NULL, return_all, NULL) == 0);
        for (int i = 0; i < 3; i++)
            CHECK(pthread_join(threads[i], NULL) == 0);
        CHECK(returned >= PAGES && returned + refused == 3 * PAGES);
        returned = refused = 0;
        memset(kept, 0, sizeof kept);
        CHECK(VALUE(pf_pages_fill(shared, kept, PAGES)) == PAGES);
        for (unsigned i = 0; i < PAGES; i++)
            *(unsigned *)kept[i].va = i;
        for (unsigned i = 0; i < PAGES; i++)
            CHECK(*(unsigned *)kept[i].va == i);
        OK(pf_pages_recycle(shared, kept, PAGES, NULL));
    }
    OK(pf_pages_destroy(shared));
}

/* As many as there can be, and one more. */
static void full_table(void) {
    static pf_pages_t *pools[65536];
    for (unsigned i = 0; i < 65536; i++)
        OK(pf_pages_create(arena, 4096, 1, &pools[i]));
    pf_pages_t *more = NULL;
    REFUSED(ENFILE, "65536 handles of page pools", pf_pages_create(arena, 4096, 1, &more));
    CHECK(more == NULL);
    for (unsigned i = 0; i < 65536; i++)
        OK(pf_pages_destroy(pools[i]));
}

int main(void) {
    OK(pf_domain_soft(&domain));
    for (unsigned policy = PF_POLICY_WHOLE; policy >= PF_POLICY_PER_USE; policy--) {
        arena = new_arena(policy);
        if (policy == PF_POLICY_WHOLE) {
            create();
            fill_and_give_back(4096, pf_pages_recycle);
            fill_and_give_back(16384, pf_pages_return);
            fill_and_give_back(2 * MIB, pf_pages_recycle);
            traced();
            full_table();
        }
        exhausted();
        returned_elsewhere();
        in = out = 0;
        two_consumers();
        returned_twice();
        OK(pf_arena_destroy(arena));
    }
    OK(pf_domain_destroy(domain));
    puts("pages: ok");
    return 0;
}
