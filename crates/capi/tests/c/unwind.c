/* What walks the stack passes every function that reports to a hook: the hook finds the program. */
#include "check.h"
#include <dlfcn.h>
#include <execinfo.h>
#include <unistd.h>

static int hooks;
/* Where calls() returns to, in main(). */
static const void *in_main;

static void hook(void *arg, const struct pf_event *event) {
    void *frames[256];
    int count = backtrace(frames, 256), at = 0;
    /* The caller that the event names is on the stack, and main() behind it. */
    while (at < count && frames[at] != event->caller)
        at++;
    while (at < count && frames[at] != in_main)
        at++;
    if (at == count) {
        fprintf(stderr, "%s: main is not among %d frames\n", (const char *)arg, count);
        exit(1);
    }
    hooks++;
}

/* The call reports an event. */
#define TRACED(call)                                                                               \
    do {                                                                                           \
        int before = hooks;                                                                        \
        pf_trace_set(hook, #call, NULL);                                                           \
        VALUE(call);                                                                              \
        pf_trace_set(NULL, NULL, NULL);                                                            \
        if (hooks == before) {                                                                     \
            fprintf(stderr, "no event: %s\n", #call);                                              \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static pf_domain_t *domain;
static pf_arena_t *arena;

static void objects(void) {
    pf_pool_t *pool;
    pf_cache_t *cache;
    pf_frames_t *frames;
    pf_pages_t *pages;
    struct pf_pool_opts opts = {.struct_size = sizeof opts, .name = "blocks", .size = 64};
    OK(pf_pool_create(arena, &opts, &pool));
    OK(pf_pool_cache(pool, &cache));
    OK(pf_frames_create(arena, &frames));
    OK(pf_pages_create(arena, 4096, 16, &pages));
    pf_block_t blocks[4];
    memset(blocks, 0, sizeof blocks);
    TRACED(pf_get(cache, blocks));
    TRACED(pf_put(cache, blocks));
    memset(blocks, 0, sizeof blocks);
    TRACED(pf_get_bulk(cache, blocks, 4));
    TRACED(pf_put_bulk(cache, blocks, 4, NULL));
    void *slots[4] = {NULL}, *head;
    TRACED(pf_frames_fill(frames, slots, 4));
    TRACED(pf_frames_free(frames, slots, 4));
    TRACED(pf_frames_list(frames, 1, &head));
    OK(pf_free(arena, head));
    memset(blocks, 0, sizeof blocks);
    TRACED(pf_pages_fill(pages, blocks, 4));
    TRACED(pf_pages_recycle(pages, blocks, 2, NULL));
    TRACED(pf_pages_return(pages, blocks + 2, 2, NULL));
    OK(pf_pages_destroy(pages));
    OK(pf_frames_destroy(frames));
    OK(pf_cache_destroy(cache));
    OK(pf_pool_destroy(pool));
}

__attribute__((noinline)) static void calls(void) {
    in_main = __builtin_return_address(0);
    void *memory;
    pf_owner_t *owner;
    OK(pf_owner_create(domain, &owner));
    TRACED((memory = pf_alloc(arena, 8192, NULL)) == NULL ? -1 : 0);
    pf_map_t map, two[2];
    uint64_t iova, iovas[2];
    pf_ticket_t ticket;
    struct iovec iov[2] = {{memory, 100}, {(char *)memory + 4096, 100}};
    TRACED(pf_map(owner, memory, 8192, PF_BIDIR, &map, &iova));
    TRACED(pf_unmap(owner, map));
    TRACED(pf_map_many(owner, iov, 2, PF_BIDIR, two, iovas));
    TRACED(pf_revoke_many(owner, two, 2, &ticket));
    OK(pf_wait(owner, ticket, UINT64_MAX));
    OK(pf_owner_destroy(owner));

    struct pf_nvme_opts model = {.struct_size = sizeof model, .size = 1 << 20};
    struct pf_queue_opts depth = {.struct_size = sizeof depth, .depth = 4};
    pf_nvme_t *nvme;
    pf_queue_t *queue;
    OK(pf_nvme_open(domain, arena, &model, &nvme));
    OK(pf_queue_create(nvme, &depth, &queue));
    struct iovec part = {memory, 512};
    struct pf_request read = {.op = PF_READ, .nsid = 1, .iov = &part, .iovcnt = 1};
    struct pf_completion done;
    TRACED(pf_submit(queue, &read, 1));
    TRACED(pf_queue_wait(queue, UINT64_MAX));
    CHECK(VALUE(pf_complete(queue, &done, 1)) == 1);
    VALUE(pf_submit(queue, &read, 1));
    int before = hooks;
    pf_trace_set(hook, "pf_complete", NULL);
    while (VALUE(pf_complete(queue, &done, 1)) == 0)
        usleep(1000);
    pf_trace_set(NULL, NULL, NULL);
    CHECK(hooks > before);
    OK(pf_queue_destroy(queue));
    OK(pf_nvme_destroy(nvme));
    TRACED(pf_free(arena, memory));
    objects();
}

/* A profiler may stop inside any of them: each is described to unwinders. */
static void described(void) {
    static const char *const names[] = {
        "pf_alloc",       "pf_free",        "pf_get",          "pf_put",          "pf_get_bulk",
        "pf_put_bulk",    "pf_frames_fill", "pf_frames_list",  "pf_frames_free",  "pf_map",
        "pf_map_many",    "pf_unmap",       "pf_revoke_many",  "pf_pages_fill",   "pf_pages_return",
        "pf_submit",      "pf_complete",    "pf_pages_recycle", "pf_queue_wait",
        "pf_requests_begin", "pf_requests_completed", "pf_requests_refused", "pf_requests_stopped",
    };
    struct {
        void *text, *data, *function;
    } bases;
    const void *(*find)(void *, void *);
    *(void **)&find = dlsym(RTLD_DEFAULT, "_Unwind_Find_FDE");
    if (find == NULL) {
        puts("unwind: this C library has no _Unwind_Find_FDE");
        return;
    }
    for (size_t at = 0; at < sizeof names / sizeof *names; at++) {
        char *function = dlsym(RTLD_DEFAULT, names[at]);
        if (function == NULL || find(function + 1, &bases) == NULL) {
            fprintf(stderr, "%s is not described\n", names[at]);
            exit(1);
        }
        CHECK(bases.function == function);
    }
}

int main(void) {
    struct pf_arena_opts opts = {.struct_size = sizeof opts, .size = 8 << 20};
    /* The first one loads a library, which is no allocation of the calls that are traced. */
    void *frame;
    CHECK(backtrace(&frame, 1) == 1);
    OK(pf_domain_soft(&domain));
    OK(pf_arena_create(domain, &opts, &arena));
    calls();
    described();
    OK(pf_arena_destroy(arena));
    OK(pf_domain_destroy(domain));
    puts("unwind: ok");
    return 0;
}
