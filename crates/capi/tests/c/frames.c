/* Handles of frames: every function, and every misuse. */
#include "traced.h"
#include <limits.h>
#include <pthread.h>
#include <stdint.h>

#define FRAMES 1024

static pf_domain_t *domain;
static pf_arena_t *arena;

static pf_arena_t *new_arena(uint32_t policy) {
    struct pf_arena_opts opts = {.struct_size = sizeof opts, .size = FRAMES * 4096, .policy = policy};
    pf_arena_t *created;
    OK(pf_arena_create(domain, &opts, &created));
    return created;
}

static pf_frames_t *new_frames(pf_arena_t *from) {
    pf_frames_t *frames;
    OK(pf_frames_create(from, &frames));
    return frames;
}

static void create(void) {
    pf_frames_t *frames = NULL;
    REFUSED(EFAULT, "`out` is NULL", pf_frames_create(arena, NULL));
    REFUSED(EBADF, "no handle of an arena", pf_frames_create(NULL, &frames));
    REFUSED(EBADF, "not of an arena", pf_frames_create((pf_arena_t *)domain, &frames));
    CHECK(frames == NULL);
    frames = new_frames(arena);
    /* The arena does not end before its handles. */
    REFUSED(EBUSY, "1 pools, controllers and handles", pf_arena_destroy(arena));
    OK(pf_frames_destroy(frames));
    REFUSED(EBADF, "destroyed", pf_frames_destroy(frames));
    void *slot = NULL;
    REFUSED(EBADF, "destroyed", pf_frames_fill(frames, &slot, 1));
    REFUSED(EBADF, "destroyed", pf_frames_list(frames, 1, &slot));
    REFUSED(EBADF, "destroyed", pf_frames_free(frames, &slot, 1));
    REFUSED(EBADF, "not of a frames handle", pf_frames_fill((pf_frames_t *)arena, &slot, 1));
    OK(pf_frames_destroy(NULL));
}

static void fill_and_free(void) {
    pf_frames_t *frames = new_frames(arena);
    static void *slots[FRAMES + 200], *kept;
    REFUSED(EFAULT, "`slots` is NULL", pf_frames_fill(frames, NULL, 1));
    REFUSED(EFAULT, "`slots` is NULL", pf_frames_free(frames, NULL, 1));
    CHECK(VALUE(pf_frames_fill(frames, NULL, 0)) == 0);
    OK(pf_frames_free(frames, NULL, 0));
    REFUSED(EINVAL, "at most 2147483647", pf_frames_fill(frames, slots, (unsigned)INT_MAX + 1));
    REFUSED(EINVAL, "at most 2147483647", pf_frames_free(frames, slots, (unsigned)INT_MAX + 1));
    REFUSED(EINVAL, "at most 2147483647", pf_frames_list(frames, (unsigned)INT_MAX + 1, slots));
    CHECK(VALUE(pf_frames_fill(frames, slots, 150)) == 150);
    for (unsigned i = 0; i < 150; i++) {
        CHECK(slots[i] != NULL && (uintptr_t)slots[i] % 4096 == 0);
        memset(slots[i], (int)i, 4096);
    }
    for (unsigned i = 0; i < 150; i++)
        CHECK(((unsigned char *)slots[i])[4095] == i && ((unsigned char *)slots[i])[0] == i);
    CHECK(slots[150] == NULL);
    /* A device may have them. */
    uint64_t iova;
    OK(pf_iova(domain, slots[7], 4096, &iova));
    char where[64];
    snprintf(where, sizeof where, "4096 bytes at %#zx", (size_t)slots[7]);
    REFUSED(EINVAL, where, pf_iova(domain, slots[7], 4097, &iova));
    /* Only the holes are filled. */
    kept = slots[6];
    OK(pf_frames_free(frames, slots + 3, 2));
    CHECK(slots[3] == NULL && slots[4] == NULL);
    REFUSED(EBUSY, "handles of frames allocate", pf_arena_destroy(arena));
    CHECK(VALUE(pf_frames_fill(frames, slots, 150)) == 150);
    CHECK(slots[6] == kept && slots[3] != NULL && slots[4] != NULL);
    /* pf_free frees them, and the handle frees what pf_alloc allocated. */
    OK(pf_free(arena, slots[0]));
    REFUSED(EINVAL, "slot 0 of 150", pf_frames_free(frames, slots, 150));
    REFUSED(EINVAL, "freed before", pf_frames_free(frames, slots, 150));
    slots[0] = pf_alloc(arena, 4096, NULL);
    slots[1] = (pf_free(arena, slots[1]), pf_alloc(arena, 10000, NULL));
    CHECK(slots[0] != NULL && slots[1] != NULL);
    /* Refused in the middle: that slot and those behind it stay. */
    void *pages = pf_alloc(arena, 10000, NULL);
    kept = slots[60];
    slots[60] = (char *)pages + 4096;
    REFUSED(EINVAL, "inside the allocation", pf_frames_free(frames, slots, 150));
    REFUSED(EINVAL, "slot 60 of 150", pf_frames_free(frames, slots, 150));
    CHECK(slots[59] == NULL && slots[60] == (char *)pages + 4096 && slots[61] != NULL);
    slots[60] = (char *)kept + 1;
    REFUSED(EINVAL, "not where its allocation begins", pf_frames_free(frames, slots, 150));
    slots[60] = &iova;
    REFUSED(EINVAL, "not in this arena", pf_frames_free(frames, slots, 150));
    slots[60] = kept;
    void *twice = slots[70];
    slots[70] = kept;
    REFUSED(EINVAL, "slot 70 of 150", pf_frames_free(frames, slots, 150));
    slots[70] = twice;
    OK(pf_frames_free(frames, slots, 150));
    for (unsigned i = 0; i < 150; i++)
        CHECK(slots[i] == NULL);
    OK(pf_free(arena, pages));
    /* All of the arena, and then no more; a second handle frees it. */
    CHECK(VALUE(pf_frames_fill(frames, slots, FRAMES + 200)) == FRAMES);
    CHECK(slots[FRAMES - 1] != NULL && slots[FRAMES] == NULL);
    CHECK(VALUE(pf_frames_fill(frames, slots, FRAMES + 200)) == FRAMES);
    CHECK(VALUE(pf_frames_list(frames, 5, &kept)) == 0 && kept == NULL);
    pf_frames_t *second = new_frames(arena);
    OK(pf_frames_destroy(frames));
    OK(pf_frames_free(second, slots, FRAMES + 200));
    REFUSED(EBUSY, "handles of frames allocate", pf_arena_destroy(arena));
    OK(pf_frames_destroy(second));
    /* Nothing is left in a handle. */
    void *all = pf_alloc(arena, FRAMES * 4096, NULL);
    CHECK(all != NULL);
    OK(pf_free(arena, all));
}

static void list(void) {
    pf_frames_t *frames = new_frames(arena);
    static void *slots[FRAMES];
    void *head = &head;
    REFUSED(EFAULT, "`head` is NULL", pf_frames_list(frames, 3, NULL));
    CHECK(VALUE(pf_frames_list(frames, 0, &head)) == 0 && head == NULL);
    static const unsigned wanted[] = {1, 64, 65, 300, 2000};
    for (unsigned i = 0; i < 5; i++) {
        unsigned listed = VALUE(pf_frames_list(frames, wanted[i], &head)), count = 0;
        CHECK(listed == (wanted[i] < FRAMES ? wanted[i] : FRAMES));
        for (void *frame = head; frame != NULL; frame = *(void **)frame)
            slots[count++] = frame;
        CHECK(count == listed);
        OK(pf_frames_free(frames, slots, count));
    }
    OK(pf_frames_destroy(frames));
}

/* A pool's memory and that of another arena is not a frame of this one. */
static void foreign(void) {
    pf_arena_t *other = new_arena(PF_POLICY_PER_USE);
    pf_frames_t *frames = new_frames(arena), *others = new_frames(other);
    void *slot = NULL, *kept;
    CHECK(VALUE(pf_frames_fill(others, &slot, 1)) == 1);
    kept = slot;
    REFUSED(EINVAL, "not in this arena", pf_frames_free(frames, &slot, 1));
    CHECK(slot == kept);
    OK(pf_frames_free(others, &slot, 1));
    struct pf_pool_opts opts = {.struct_size = sizeof opts, .size = 4096};
    pf_pool_t *pool;
    pf_cache_t *cache;
    pf_block_t block;
    OK(pf_pool_create(arena, &opts, &pool));
    OK(pf_pool_cache(pool, &cache));
    OK(pf_get(cache, &block));
    slot = block.va;
    REFUSED(EINVAL, "block of a pool", pf_frames_free(frames, &slot, 1));
    OK(pf_put(cache, &block));
    OK(pf_cache_destroy(cache));
    OK(pf_pool_destroy(pool));
    OK(pf_frames_destroy(frames));
    OK(pf_frames_destroy(others));
    OK(pf_arena_destroy(other));
}

static void traced(void) {
    pf_frames_t *frames = new_frames(arena);
    void *slots[2] = {NULL, NULL}, *kept[2], *head;
    uintptr_t at[4];
    pf_trace_set(note, &events, NULL);
    at[0] = here();
    VALUE(pf_frames_fill(frames, slots, 2));
    at[1] = here();
    memcpy(kept, slots, sizeof kept);
    OK(pf_frames_free(frames, slots, 2));
    at[2] = here();
    VALUE(pf_frames_list(frames, 2, &head));
    at[3] = here();
    CHECK(events == 6);
    pf_trace_set(NULL, NULL, NULL);
    for (unsigned i = 0; i < 6; i++) {
        uint64_t iova;
        CHECK(seen[i].kind == (i / 2 == 1 ? PF_EVENT_FREE : PF_EVENT_ALLOC) && seen[i].len == 4096);
        CHECK(seen[i].handle == (uint64_t)(uintptr_t)frames);
        uintptr_t caller = (uintptr_t)seen[i].caller;
        CHECK(at[i / 2] < caller && caller < at[i / 2 + 1]);
        CHECK(i >= 4 || seen[i].va == kept[i % 2]);
        if (i >= 4)
            OK(pf_iova(domain, seen[i].va, 1, &iova));
        CHECK(i < 4 || seen[i].iova == iova);
    }
    CHECK(head == seen[4].va && *(void **)head == seen[5].va);
    slots[0] = seen[4].va, slots[1] = seen[5].va;
    OK(pf_frames_free(frames, slots, 2));
    OK(pf_frames_destroy(frames));
}

struct shared {
    pf_frames_t *frames;
    int stop;
    unsigned long done, refused;
};

static void *share_a_handle(void *arg) {
    struct shared *shared = arg;
    while (!__atomic_load_n(&shared->stop, __ATOMIC_RELAXED)) {
        void *slots[8] = {NULL};
        int code = pf_frames_fill(shared->frames, slots, 8);
        if (code == -EBUSY) {
            __atomic_fetch_add(&shared->refused, 1, __ATOMIC_RELAXED);
            continue;
        }
        CHECK(code == 8);
        while ((code = pf_frames_free(shared->frames, slots, 8)) == -EBUSY)
            ;
        CHECK(code == 0);
        __atomic_fetch_add(&shared->done, 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

static void *own_a_handle(void *arg) {
    (void)arg;
    for (unsigned round = 0; round < 200; round++) {
        pf_frames_t *frames = new_frames(arena);
        void *slots[40] = {NULL};
        CHECK(VALUE(pf_frames_fill(frames, slots, 40)) == 40);
        for (unsigned i = 0; i < 40; i++)
            memset(slots[i], (int)round, 4096);
        OK(pf_frames_free(frames, slots, 40));
        OK(pf_frames_destroy(frames));
    }
    return NULL;
}

static void *kept_slots[FRAMES];
static unsigned long freed, refused;

/* Each frame is freed by one of the threads that try. */
static void *free_all(void *arg) {
    (void)arg;
    pf_frames_t *frames = new_frames(arena);
    for (unsigned i = 0; i < FRAMES; i++) {
        void *slot = kept_slots[i];
        int code = pf_frames_free(frames, &slot, 1);
        CHECK(code == 0 || code == -EINVAL);
        __atomic_fetch_add(code == 0 ? &freed : &refused, 1, __ATOMIC_RELAXED);
    }
    OK(pf_frames_destroy(frames));
    return NULL;
}

static void in_threads(unsigned count, void *(*run)(void *), void *arg) {
    pthread_t threads[8];
    for (unsigned i = 0; i < count; i++)
        CHECK(pthread_create(&threads[i], NULL, run, arg) == 0);
    struct shared *shared = arg;
    if (shared != NULL) {
        while (__atomic_load_n(&shared->refused, __ATOMIC_RELAXED) < 20)
            CHECK(pf_arena_destroy(arena) == -EBUSY);
        __atomic_store_n(&shared->stop, 1, __ATOMIC_RELAXED);
    }
    for (unsigned i = 0; i < count; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
}

static void threads(void) {
    struct shared shared = {.frames = new_frames(arena)};
    in_threads(4, share_a_handle, &shared);
    CHECK(shared.done > 0);
    in_threads(4, own_a_handle, NULL);
    for (unsigned round = 0; round < 20; round++) {
        memset(kept_slots, 0, sizeof kept_slots);
        unsigned count = VALUE(pf_frames_fill(shared.frames, kept_slots, FRAMES));
        freed = refused = 0;
        in_threads(4, free_all, NULL);
        CHECK(freed == count && freed + refused == 4 * FRAMES);
    }
    OK(pf_frames_destroy(shared.frames));
}

/* As many as there can be, and one more. */
static void full_table(void) {
    static pf_frames_t *handles[65536];
    for (unsigned i = 0; i < 65536; i++)
        handles[i] = new_frames(arena);
    pf_frames_t *more = NULL;
    REFUSED(ENFILE, "65536 handles of frames handles", pf_frames_create(arena, &more));
    CHECK(more == NULL);
    for (unsigned i = 0; i < 65536; i++)
        OK(pf_frames_destroy(handles[i]));
}

int main(void) {
    OK(pf_domain_soft(&domain));
    arena = new_arena(PF_POLICY_WHOLE);
    create();
    fill_and_free();
    list();
    foreign();
    traced();
    threads();
    full_table();
    OK(pf_arena_destroy(arena));
    OK(pf_domain_destroy(domain));
    puts("frames: ok");
    return 0;
}
