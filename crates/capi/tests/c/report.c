/* Reports: counters as structs and as JSON. */
#include "check.h"

static uint64_t value(const void *handle, const char *name) {
    struct pf_counter counters[64];
    int count = (int)VALUE(pf_stats(handle, counters, 64));
    CHECK(count <= 64);
    for (int at = 0; at < count; at++) {
        CHECK(strlen(counters[at].unit) > 0 && counters[at].kind <= PF_COUNTER_PEAK);
        size_t end = strlen(counters[at].meaning);
        CHECK(end > 0 && counters[at].meaning[end - 1] == '.');
        if (strcmp(counters[at].name, name) == 0)
            return counters[at].value;
    }
    fprintf(stderr, "no counter %s\n", name);
    exit(1);
}

int main(void) {
    pf_domain_t *domain;
    pf_arena_t *arena;
    struct pf_arena_opts opts = {.struct_size = sizeof opts, .size = 1 << 20, .policy = PF_POLICY_WHOLE};
    OK(pf_domain_soft(&domain));
    OK(pf_arena_create(domain, &opts, &arena));
    CHECK(value(domain, "static_mappings") == 1);
    CHECK(value(domain, "timed_out") == 0);
    uint64_t frames = value(arena, "frames");
    CHECK(frames >= 256 && value(arena, "bytes") == frames * 4096);
    void *memory = pf_alloc(arena, 3 * 4096, NULL);
    CHECK(value(arena, "frames_in_use") == 3);
    OK(pf_free(arena, memory));
    CHECK(value(arena, "frames_in_use") == 0);
    CHECK(value(arena, "frames_peak") >= 3);

    /* The strings are the same ones each time, and nothing is written beyond `max`. */
    struct pf_counter two[2], again[2];
    two[1].value = 4711;
    int count = (int)VALUE(pf_stats(arena, two, 1));
    CHECK(count > 2 && two[1].value == 4711);
    CHECK(VALUE(pf_stats(arena, NULL, 1000)) == count);
    VALUE(pf_stats(arena, again, 1));
    CHECK(two[0].name == again[0].name && two[0].meaning == again[0].meaning);

    char text[4096], part[16];
    int len = (int)VALUE(pf_stats_json(arena, text, sizeof text));
    CHECK((size_t)len == strlen(text) && text[0] == '{' && text[len - 1] == '}');
    CHECK(strstr(text, "\"frames_in_use\":0") != NULL);
    memset(part, 'x', sizeof part);
    CHECK(VALUE(pf_stats_json(arena, part, 8)) == len);
    CHECK(memcmp(part, text, 7) == 0 && part[7] == '\0' && part[8] == 'x');
    CHECK(VALUE(pf_stats_json(arena, NULL, 0)) == len);

    /* The other kinds of objects. */
    struct pf_pool_opts blocks = {.struct_size = sizeof blocks, .name = "blocks", .size = 64};
    struct pf_nvme_opts model = {.struct_size = sizeof model, .size = 1 << 20};
    struct pf_queue_opts depth = {.struct_size = sizeof depth, .depth = 4};
    pf_pool_t *pool;
    pf_cache_t *cache;
    pf_block_t block;
    pf_pages_t *pages;
    pf_nvme_t *nvme;
    pf_queue_t *queue;
    OK(pf_pool_create(arena, &blocks, &pool));
    OK(pf_pool_cache(pool, &cache));
    OK(pf_get(cache, &block));
    CHECK(value(pool, "in_use") == 1 && value(pool, "block_bytes") == 64);
    OK(pf_put(cache, &block));
    OK(pf_cache_destroy(cache));
    CHECK(value(pool, "in_use") == 0);
    OK(pf_pool_destroy(pool));
    OK(pf_pages_create(arena, 4096, 0, &pages));
    CHECK(value(pages, "in_use") == 0 && value(pages, "fast") == 0);
    OK(pf_pages_destroy(pages));
    OK(pf_nvme_open(domain, arena, &model, &nvme));
    OK(pf_queue_create(nvme, &depth, &queue));
    CHECK(value(nvme, "resets") == 1);
    struct pf_request flush = {.op = PF_FLUSH, .nsid = 1};
    struct pf_completion done;
    CHECK(VALUE(pf_submit(queue, &flush, 1)) == 1);
    while (VALUE(pf_complete(queue, &done, 1)) == 0)
        VALUE(pf_queue_wait(queue, 1000000));
    CHECK(value(queue, "requests") == 1 && value(queue, "completions") == 1);
    OK(pf_queue_destroy(queue));
    REFUSED(EBADF, "destroyed", pf_stats(queue, two, 1));
    OK(pf_nvme_destroy(nvme));

    REFUSED(EBADF, "no handle of an object", pf_stats(NULL, two, 1));
    REFUSED(EBADF, "no handle of an object", pf_stats(two, two, 1));
    REFUSED(EBADF, "no handle of an object", pf_stats_json(text, text, 1));
    OK(pf_arena_destroy(arena));
    REFUSED(EBADF, "destroyed", pf_stats(arena, two, 1));
    OK(pf_domain_destroy(domain));
    puts("report: ok");
    return 0;
}
