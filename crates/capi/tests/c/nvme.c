/* Controllers and queues: random reads and writes against a copy, with every protection; scattered
 * memory, flushes, discards, descriptors; every misuse. */
#include "traced.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

enum { BLOCK = 512, DEPTH = 32, CAPACITY = 32 << 20, MOST = 1 << 20 };
#define LONG 60000000000u /* ns: an error, if it lasts as long */

/* Of each protection; fewer under a checker (see scripts/capi). */
static unsigned requests = 10000;

static pf_domain_t *domain;
/* Mapped as a whole, and per use. */
static pf_arena_t *whole, *per_use;
static pf_nvme_t *nvme;
static unsigned char shadow[CAPACITY];

static _Thread_local uint64_t state = 88172645463325252u;

static uint64_t number(uint64_t below) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % below;
}

static pf_arena_t *arena(uint64_t size, uint32_t policy) {
    struct pf_arena_opts opts = {.struct_size = sizeof opts, .size = size, .policy = policy};
    pf_arena_t *made;
    OK(pf_arena_create(domain, &opts, &made));
    return made;
}

static pf_queue_t *queue(uint32_t depth, uint32_t protect, uint32_t flags) {
    struct pf_queue_opts opts = {
        .struct_size = sizeof opts, .depth = depth, .protect = protect, .flags = flags};
    pf_queue_t *made;
    OK(pf_queue_create(nvme, &opts, &made));
    return made;
}

static pf_arena_t *memory_for(uint32_t protect) {
    return protect == PF_PROTECT_STATIC ? whole : per_use;
}

/* Submits one and waits for its report. */
static struct pf_completion run(pf_queue_t *on, struct pf_request request) {
    struct pf_completion done;
    request.user_data = number(UINT64_MAX);
    CHECK(VALUE(pf_submit(on, &request, 1)) == 1);
    CHECK(VALUE(pf_queue_wait(on, UINT64_MAX)) == 1);
    CHECK(VALUE(pf_complete(on, &done, 1)) == 1 && done.user_data == request.user_data);
    return done;
}

static void open_and_look(void) {
    struct pf_nvme_opts opts = {.struct_size = sizeof opts, .size = CAPACITY};
    REFUSED(EFAULT, "`out` is NULL", pf_nvme_open(domain, whole, &opts, NULL));
    REFUSED(EBADF, "no handle of a domain", pf_nvme_open(NULL, whole, &opts, &nvme));
    REFUSED(EBADF, "not of an arena", pf_nvme_open(domain, (pf_arena_t *)domain, &opts, &nvme));
    REFUSED(EFAULT, "`opts` is NULL", pf_nvme_open(domain, whole, NULL, &nvme));
    opts.flags = 4;
    REFUSED(EINVAL, "flags 0x4", pf_nvme_open(domain, whole, &opts, &nvme));
    opts.flags = 0;
    opts.block_bytes = 1000;
    REFUSED(EINVAL, "block size of 1000", pf_nvme_open(domain, whole, &opts, &nvme));
    opts.block_bytes = 0;
    opts.size = 100;
    REFUSED(EINVAL, "100 bytes", pf_nvme_open(domain, whole, &opts, &nvme));
    opts.size = (1ull << 44) + 1;
    REFUSED(EINVAL, "in memory", pf_nvme_open(domain, whole, &opts, &nvme));
    opts.size = UINT64_MAX;
    REFUSED(EINVAL, "in memory", pf_nvme_open(domain, whole, &opts, &nvme));
    opts.size = CAPACITY;
    opts.bdf = "0000:01:00.0";
    REFUSED(ENODEV, "not attached", pf_nvme_open(domain, whole, &opts, &nvme));
    opts.bdf = NULL;
    opts.path = "/nonexistent/image";
    REFUSED(ENOENT, "/nonexistent/image", pf_nvme_open(domain, whole, &opts, &nvme));
    opts.path = "/proc/self/comm"; /* takes any length, and has none */
    REFUSED(EINVAL, "cannot be grown", pf_nvme_open(domain, whole, &opts, &nvme));
    opts.path = NULL;
    pf_domain_t *other;
    OK(pf_domain_soft(&other));
    REFUSED(ENXIO, "pf_arena_map_into", pf_nvme_open(other, whole, &opts, &nvme));
    /* An arena of another domain that was mapped into this one, at another address. */
    struct pf_arena_opts first = {.struct_size = sizeof first, .size = 1 << 20};
    pf_arena_t *before;
    uint64_t here, there;
    void *memory = pf_alloc(whole, 1, &here);
    OK(pf_arena_create(other, &first, &before));
    OK(pf_arena_map_into(whole, other, NULL));
    OK(pf_iova(other, memory, 1, &there));
    CHECK(here != there);
    OK(pf_nvme_open(other, whole, &opts, &nvme));
    OK(pf_nvme_destroy(nvme));
    OK(pf_free(whole, memory));
    OK(pf_arena_destroy(before));
    OK(pf_domain_destroy(other));
    OK(pf_nvme_open(domain, whole, &opts, &nvme));

    struct pf_nvme_info info = {.struct_size = sizeof info};
    OK(pf_nvme_info(nvme, 0, &info));
    CHECK(info.capacity == CAPACITY && info.block_bytes == BLOCK && info.nsid == 1);
    CHECK(info.max_transfer == 64 << 20 && info.max_command == 1 << 20 && info.max_depth == 1023);
    CHECK(info.flags & PF_NVME_DISCARD && info.struct_size == sizeof info);
    REFUSED(ENODEV, "namespace 2", pf_nvme_info(nvme, 2, &info));
    REFUSED(EFAULT, "`info` is NULL", pf_nvme_info(nvme, 1, NULL));
    info.struct_size = 7;
    REFUSED(EINVAL, "7 bytes", pf_nvme_info(nvme, 1, &info));
    REFUSED(EBADF, "not of a controller", pf_nvme_info((pf_nvme_t *)domain, 1, &info));
    REFUSED(EBADF, "not of a controller", pf_nvme_destroy((pf_nvme_t *)whole));
    OK(pf_nvme_destroy(NULL));
}

static void create_queues(void) {
    struct pf_queue_opts opts = {.struct_size = sizeof opts, .depth = 4};
    pf_queue_t *made, *others[16];
    REFUSED(EFAULT, "`out` is NULL", pf_queue_create(nvme, &opts, NULL));
    REFUSED(EBADF, "no handle", pf_queue_create(NULL, &opts, &made));
    REFUSED(EFAULT, "`opts` is NULL", pf_queue_create(nvme, NULL, &made));
    opts.depth = 0;
    REFUSED(EINVAL, "depth of 0", pf_queue_create(nvme, &opts, &made));
    opts.depth = UINT32_MAX;
    REFUSED(EINVAL, "4294967295", pf_queue_create(nvme, &opts, &made));
    opts.depth = 4;
    opts.protect = 5;
    REFUSED(EINVAL, "protection 5", pf_queue_create(nvme, &opts, &made));
    opts.protect = 0;
    opts.flags = 2;
    REFUSED(EINVAL, "flags 0x2", pf_queue_create(nvme, &opts, &made));
    opts.flags = PF_QUEUE_INTERRUPT;
    opts.reserved = 1;
    REFUSED(EINVAL, "reserved 0x1", pf_queue_create(nvme, &opts, &made));
    opts.reserved = 0;
    /* All that there are, twice: what was refused has kept nothing. */
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 16; i++)
            OK(pf_queue_create(nvme, &opts, &others[i]));
        REFUSED(ENOSPC, "", pf_queue_create(nvme, &opts, &made));
        REFUSED(EBUSY, "16 queues", pf_nvme_destroy(nvme));
        for (int i = 0; i < 16; i++)
            OK(pf_queue_destroy(others[i]));
    }
    REFUSED(EBADF, "destroyed", pf_queue_destroy(others[0]));
    REFUSED(EBADF, "not of a queue", pf_queue_destroy((pf_queue_t *)nvme));
    OK(pf_queue_destroy(NULL));
}

/* A request in flight, and its memory. */
struct slot {
    unsigned char *memory;
    uint64_t offset;
    uint32_t bytes;
    bool busy, writes;
};

/* What one thread does with a queue of its own, in its own part of the namespace. */
struct job {
    uint32_t protect, flags;
    unsigned requests;
    uint64_t first, bytes;
};

/* Takes a free slot with a range that no other has; false if there is none. */
static bool take_slot(struct slot *slots, const struct job *job, int *taken) {
    for (int i = 0; i < DEPTH; i++) {
        struct slot *slot = &slots[i];
        if (slot->busy)
            continue;
        slot->bytes = BLOCK << number(12);
        slot->bytes -= BLOCK * number(slot->bytes / BLOCK / 2 + 1);
        slot->offset = job->first + BLOCK * number((job->bytes - slot->bytes) / BLOCK);
        bool apart = true;
        for (int j = 0; j < DEPTH; j++)
            apart &= !slots[j].busy || slots[j].offset >= slot->offset + slot->bytes ||
                     slot->offset >= slots[j].offset + slots[j].bytes;
        *taken = i;
        if (apart)
            return true;
    }
    return false;
}

/* Reads and writes of 512 bytes to 1 MiB. */
static void *random_requests(void *arg) {
    const struct job *job = arg;
    struct slot slots[DEPTH] = {0};
    pf_arena_t *from = memory_for(job->protect);
    pf_queue_t *on = queue(DEPTH, job->protect, job->flags);
    for (int i = 0; i < DEPTH; i++)
        CHECK((slots[i].memory = pf_alloc(from, MOST, NULL)) != NULL);
    unsigned submitted = 0, reported = 0;
    while (reported < job->requests) {
        struct pf_request batch[8];
        struct iovec iov[8];
        unsigned count = 0, last = number(8) + 1;
        int taken;
        while (count < last && submitted + count < job->requests &&
               take_slot(slots, job, &taken)) {
            struct slot *slot = &slots[taken];
            slot->busy = true;
            slot->writes = number(2);
            if (slot->writes) {
                for (uint32_t at = 0; at < slot->bytes; at += 8)
                    memcpy(slot->memory + at, &(uint64_t){number(UINT64_MAX)}, 8);
                memcpy(shadow + slot->offset, slot->memory, slot->bytes);
            } else {
                memset(slot->memory, 0xa5, slot->bytes);
            }
            iov[count] = (struct iovec){slot->memory, slot->bytes};
            batch[count] = (struct pf_request){.op = slot->writes ? PF_WRITE : PF_READ,
                                               .nsid = 1,
                                               .offset = slot->offset,
                                               .iov = &iov[count],
                                               .iovcnt = 1,
                                               .user_data = taken};
            count++;
        }
        CHECK(VALUE(pf_submit(on, batch, count)) == count);
        submitted += count;
        if (submitted - reported == DEPTH || count == 0)
            CHECK(VALUE(pf_queue_wait(on, LONG)) > 0);
        struct pf_completion done[5];
        int found = VALUE(pf_complete(on, done, 5));
        for (int i = 0; i < found; i++) {
            struct slot *slot = &slots[done[i].user_data];
            CHECK(done[i].result == 0 && done[i].status == 0 && slot->busy);
            if (!slot->writes)
                CHECK(memcmp(slot->memory, shadow + slot->offset, slot->bytes) == 0);
            slot->busy = false;
        }
        reported += found;
    }
    OK(pf_queue_destroy(on));
    for (int i = 0; i < DEPTH; i++)
        OK(pf_free(from, slots[i].memory));
    return NULL;
}

static void with_all_protections(void) {
    for (uint32_t protect = PF_PROTECT_STRICT; protect <= PF_PROTECT_STATIC; protect++) {
        struct job job = {.protect = protect,
                          .flags = protect % 2 ? PF_QUEUE_INTERRUPT : 0,
                          .requests = requests,
                          .bytes = CAPACITY};
        random_requests(&job);
    }
    /* Four threads beside each other, each with another protection. */
    pthread_t threads[4];
    struct job jobs[4];
    for (uint32_t i = 0; i < 4; i++) {
        jobs[i] = (struct job){.protect = PF_PROTECT_STRICT + i,
                               .flags = i % 2 ? 0 : PF_QUEUE_INTERRUPT,
                               .requests = requests / 20,
                               .first = i * (CAPACITY / 4),
                               .bytes = CAPACITY / 4};
        CHECK(pthread_create(&threads[i], NULL, random_requests, &jobs[i]) == 0);
    }
    for (int i = 0; i < 4; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
}

/* Scattered memory, in pieces as small as a controller without SGLs can use. */
static void vectored(uint32_t protect) {
    enum { PAGE = 4096, PAGES = 64, BYTES = 2048 + 20 * PAGE + 1024 };
    pf_arena_t *from = memory_for(protect);
    pf_queue_t *on = queue(4, protect, 0);
    unsigned char *memory = pf_alloc(from, PAGES * PAGE, NULL), *flat = pf_alloc(from, BYTES, NULL);
    struct iovec iov[64], one = {flat, BYTES};
    CHECK(memory != NULL && flat != NULL);
    /* The end of a page, pages in any order, two in pieces that follow each other, the start of
     * one. */
    unsigned count = 0;
    iov[count++] = (struct iovec){memory + PAGE + 2048, 2048};
    for (int page = 0; page < 18; page++)
        iov[count++] = (struct iovec){memory + (60 - 3 * page) * PAGE, PAGE};
    for (int part = 0; part < 8; part++)
        iov[count++] = (struct iovec){memory + 2 * PAGE + part * 1024, 1024};
    iov[count++] = (struct iovec){memory + 62 * PAGE, 1024};
    uint64_t offset = 3 * BLOCK;
    for (int at = 0; at < BYTES; at++)
        flat[at] = number(256);
    memcpy(shadow + offset, flat, BYTES);
    struct pf_request write = {.op = PF_WRITE, .nsid = 1, .offset = offset, .iov = &one, .iovcnt = 1};
    struct pf_request read = {.op = PF_READ, .nsid = 1, .offset = offset, .iov = iov, .iovcnt = count};
    CHECK(run(on, write).result == 0);
    memset(memory, 0, PAGES * PAGE);
    read.len = BYTES;
    CHECK(run(on, read).result == 0);
    unsigned char *expected = flat;
    for (unsigned i = 0; i < count; i++) {
        CHECK(memcmp(iov[i].iov_base, expected, iov[i].iov_len) == 0);
        expected += iov[i].iov_len;
    }
    /* And no byte beside it. */
    for (int at = 0; at < PAGES * PAGE; at++)
        memory[at] = 0x5c;
    CHECK(run(on, read).result == 0);
    unsigned written = 0;
    for (unsigned i = 0; i < count; i++)
        memset(iov[i].iov_base, 0x5c, iov[i].iov_len);
    for (int at = 0; at < PAGES * PAGE; at++)
        written += memory[at] != 0x5c;
    CHECK(written == 0);
    /* The most entries. */
    struct iovec many[1025];
    for (int i = 0; i < 1025; i++)
        many[i] = (struct iovec){memory + number(PAGES) * PAGE, PAGE};
    read = (struct pf_request){.op = PF_READ, .nsid = 1, .iov = many, .iovcnt = 1024};
    CHECK(run(on, read).result == 0);
    CHECK(memcmp(many[1023].iov_base, shadow + 1023 * PAGE, PAGE) == 0);
    read.iovcnt = 1025;
    REFUSED(EINVAL, "1025 entries", pf_submit(on, &read, 1));

    /* What the controller cannot be given. */
    read.iovcnt = 1;
    many[0] = (struct iovec){memory + 2, 512};
    REFUSED(EINVAL, "iov[0], 512 bytes at 0x", pf_submit(on, &read, 1));
    read.iovcnt = 2;
    many[0] = (struct iovec){memory, 512};
    many[1] = (struct iovec){memory + PAGE, 512};
    REFUSED(EINVAL, "iov[0], 512 bytes at 0x", pf_submit(on, &read, 1));
    many[0] = (struct iovec){memory, PAGE};
    many[1] = (struct iovec){memory + 3 * PAGE + 512, 512};
    REFUSED(EINVAL, "iov[1], 512 bytes at 0x", pf_submit(on, &read, 1));
    many[1] = (struct iovec){memory + 3 * PAGE, 512};
    CHECK(run(on, read).result == 0);
    /* Aligned to 4 suffices for the first. */
    read.iovcnt = 1;
    many[0] = (struct iovec){memory + 4, 1024};
    CHECK(run(on, read).result == 0 && memcmp(memory + 4, shadow, 1024) == 0);
    OK(pf_queue_destroy(on));
    OK(pf_free(from, memory));
    OK(pf_free(from, flat));
}

static void flush_and_discard(void) {
    pf_queue_t *on = queue(2, PF_PROTECT_BATCH, 0);
    unsigned char *memory = pf_alloc(per_use, 8192, NULL);
    struct iovec iov = {memory, 8192};
    memset(memory, 0x77, 8192);
    struct pf_request request = {.op = PF_WRITE, .nsid = 1, .iov = &iov, .iovcnt = 1};
    CHECK(run(on, request).result == 0);
    struct pf_request flush = {.op = PF_FLUSH, .nsid = 1};
    CHECK(run(on, flush).result == 0);
    struct pf_request discard = {.op = PF_DISCARD, .nsid = 1, .offset = 512, .len = 1024};
    CHECK(run(on, discard).result == 0);
    request.op = PF_READ;
    CHECK(run(on, request).result == 0);
    for (int at = 0; at < 8192; at++)
        CHECK(memory[at] == (at >= 512 && at < 1536 ? 0 : 0x77));
    memcpy(shadow, memory, 8192);
    flush.len = 512;
    REFUSED(EINVAL, "a flush", pf_submit(on, &flush, 1));
    flush.len = 0;
    flush.nsid = 9;
    REFUSED(ENODEV, "namespace 9", pf_submit(on, &flush, 1));
    discard.len = 0;
    REFUSED(EINVAL, "0 bytes at 512", pf_submit(on, &discard, 1));
    discard.len = 100;
    REFUSED(EINVAL, "100 bytes at 512", pf_submit(on, &discard, 1));
    discard.len = CAPACITY;
    REFUSED(EINVAL, "beyond the end", pf_submit(on, &discard, 1));
    OK(pf_queue_destroy(on));
    OK(pf_free(per_use, memory));
}

/* Calls that are refused change nothing: the queue is as it was. */
static void refused(uint32_t protect) {
    pf_arena_t *from = memory_for(protect);
    pf_queue_t *on = queue(2, protect, 0);
    unsigned char *memory = pf_alloc(from, 8192, NULL), *freed = pf_alloc(from, 8192, NULL);
    struct iovec iov = {memory, 512};
    const struct pf_request good = {.op = PF_READ, .nsid = 1, .iov = &iov, .iovcnt = 1};
    struct pf_request request = good;
    struct pf_completion done[4];
    OK(pf_free(from, freed));
    REFUSED(EBADF, "no handle of a queue", pf_submit(NULL, &request, 1));
    REFUSED(EBADF, "not of a queue", pf_submit((pf_queue_t *)nvme, &request, 1));
    REFUSED(EFAULT, "`requests` is NULL", pf_submit(on, NULL, 1));
    CHECK(pf_submit(on, NULL, 0) == 0);
    REFUSED(EBADF, "not of a queue", pf_complete((pf_queue_t *)from, done, 1));
    REFUSED(EFAULT, "`completions` is NULL", pf_complete(on, NULL, 1));
    CHECK(pf_complete(on, NULL, 0) == 0 && pf_complete(on, done, 4) == 0);
    REFUSED(EBADF, "not of a queue", pf_queue_wait((pf_queue_t *)from, 0));
    CHECK(pf_queue_wait(on, UINT64_MAX) == 0);
    REFUSED(ENOTSUP, "PF_QUEUE_INTERRUPT", pf_queue_fd(on));
    REFUSED(EBADF, "no handle", pf_queue_fd(NULL));

    for (uint32_t op = 0; op < 10; op += op == 0 ? 6 : 1) {
        request.op = op;
        REFUSED(EINVAL, "operation", pf_submit(on, &request, 1));
    }
    request = good, request.flags = 1;
    REFUSED(EINVAL, "flags 0x1", pf_submit(on, &request, 1));
    request = good, request.nsid = 0;
    REFUSED(ENODEV, "namespace 0", pf_submit(on, &request, 1));
    request = good, request.nsid = UINT32_MAX;
    REFUSED(ENODEV, "4294967295", pf_submit(on, &request, 1));
    request = good, request.offset = 100;
    REFUSED(EINVAL, "512 bytes at 100", pf_submit(on, &request, 1));
    request = good, request.offset = CAPACITY;
    REFUSED(EINVAL, "beyond the end", pf_submit(on, &request, 1));
    request = good, request.offset = UINT64_MAX - 511;
    REFUSED(EINVAL, "beyond the end", pf_submit(on, &request, 1));
    request = good, request.len = 1024;
    REFUSED(EINVAL, "`len` is 1024", pf_submit(on, &request, 1));
    request = good, request.iov = NULL;
    REFUSED(EFAULT, "`iov` is NULL", pf_submit(on, &request, 1));
    request = good, request.iovcnt = 0;
    REFUSED(EINVAL, "0 entries", pf_submit(on, &request, 1));
    request = good, request.iovcnt = UINT32_MAX;
    REFUSED(EINVAL, "4294967295 entries", pf_submit(on, &request, 1));
    request = good, request.iov = (struct iovec *)((char *)&iov + 1);
    REFUSED(EINVAL, "aligned", pf_submit(on, &request, 1));
    request = good;
    iov.iov_len = 0;
    REFUSED(EINVAL, "iov[0] at 0x", pf_submit(on, &request, 1));
    iov.iov_len = 100;
    REFUSED(EINVAL, "100 bytes at 0", pf_submit(on, &request, 1));
    iov.iov_len = SIZE_MAX;
    REFUSED(EINVAL, "18446744073709551615 bytes", pf_submit(on, &request, 1));
    iov.iov_len = (64 << 20) + 512;
    REFUSED(EINVAL, "at most 67108864", pf_submit(on, &request, 1));
    iov.iov_len = 16384;
    REFUSED(EINVAL, "iov[0]: 16384 bytes at 0x", pf_submit(on, &request, 1));
    iov = (struct iovec){freed, 512};
    REFUSED(EINVAL, "freed before", pf_submit(on, &request, 1));
    iov.iov_base = NULL;
    REFUSED(ENXIO, "no memory of this domain", pf_submit(on, &request, 1));
    iov.iov_base = done;
    REFUSED(ENXIO, "no memory of this domain", pf_submit(on, &request, 1));
    iov.iov_base = (void *)UINTPTR_MAX;
    REFUSED(ENXIO, "no memory of this domain", pf_submit(on, &request, 1));
    /* The second entry: the first is no longer in use after the refusal. */
    struct iovec two[2] = {{memory, 4096}, {freed, 512}};
    request.iov = two, request.iovcnt = 2;
    REFUSED(EINVAL, "iov[1]", pf_submit(on, &request, 1));
    /* Memory that the other protections need. */
    pf_arena_t *wrong = protect == PF_PROTECT_STATIC ? per_use : whole;
    iov.iov_base = pf_alloc(wrong, 512, NULL);
    request = good;
    if (protect == PF_PROTECT_STATIC)
        REFUSED(ENXIO, "not mapped as a whole", pf_submit(on, &request, 1));
    else
        REFUSED(EINVAL, "stays mapped", pf_submit(on, &request, 1));
    OK(pf_free(wrong, iov.iov_base));

    /* In flight: its memory, its queue, its controller and its arena stay. */
    iov.iov_base = memory;
    CHECK(VALUE(pf_submit(on, &request, 1)) == 1);
    REFUSED(EBUSY, "1 mapping or request", pf_free(from, memory));
    REFUSED(EBUSY, "the queue has 1 request not", pf_queue_destroy(on));
    REFUSED(EBUSY, "1 queue:", pf_nvme_destroy(nvme));
    REFUSED(EBUSY, "bytes of the arena are in use", pf_arena_destroy(from));
    /* Of three that follow, one fits; then none. */
    struct pf_request three[3] = {good, good, good};
    CHECK(VALUE(pf_submit(on, three, 3)) == 1);
    REFUSED(EBUSY, "2 mappings or requests", pf_free(from, memory));
    REFUSED(EAGAIN, "2 requests are unreported", pf_submit(on, three, 3));
    /* Completed, but not reported. */
    CHECK(VALUE(pf_queue_wait(on, LONG)) > 0);
    REFUSED(EBUSY, "2 requests", pf_queue_destroy(on));
    REFUSED(EAGAIN, "2 requests are unreported", pf_submit(on, &request, 1));
    for (int left = 2; left > 0;) {
        CHECK(VALUE(pf_queue_wait(on, LONG)) > 0);
        CHECK(VALUE(pf_complete(on, done, 1)) == 1 && done[0].result == 0);
        left--;
    }
    /* The first of three is accepted, the second refused: it is reported by the next call. */
    three[1].offset = 1;
    CHECK(VALUE(pf_submit(on, three, 3)) == 1);
    REFUSED(EINVAL, "512 bytes at 1", pf_submit(on, three + 1, 2));
    CHECK(VALUE(pf_queue_wait(on, LONG)) == 1 && VALUE(pf_complete(on, done, 4)) == 1);
    OK(pf_free(from, memory));
    OK(pf_queue_destroy(on));
    REFUSED(EBADF, "destroyed", pf_submit(on, &request, 1));
    REFUSED(EBADF, "destroyed", pf_complete(on, done, 1));
    REFUSED(EBADF, "destroyed", pf_queue_destroy(on));
}

/* An event loop: the descriptor is readable when there is something to report, and not else. */
static void by_descriptor(uint32_t protect) {
    pf_arena_t *from = memory_for(protect);
    pf_queue_t *on = queue(8, protect, PF_QUEUE_INTERRUPT);
    struct pollfd event = {.fd = VALUE(pf_queue_fd(on)), .events = POLLIN};
    unsigned char *memory = pf_alloc(from, 8 * 4096, NULL);
    struct pf_completion done[8];
    CHECK(VALUE(pf_complete(on, done, 8)) == 0 && poll(&event, 1, 0) == 0);
    for (int round = 0; round < 50; round++) {
        struct iovec iov[8];
        struct pf_request batch[8];
        int count = number(8) + 1;
        for (int i = 0; i < count; i++) {
            iov[i] = (struct iovec){memory + 4096 * i, 4096};
            batch[i] = (struct pf_request){
                .op = PF_READ, .nsid = 1, .offset = 4096 * i, .iov = &iov[i], .iovcnt = 1};
        }
        CHECK(VALUE(pf_submit(on, batch, count)) == count);
        while (count > 0) {
            CHECK(poll(&event, 1, 60000) == 1 && event.revents == POLLIN);
            int found;
            while ((found = VALUE(pf_complete(on, done, 3))) > 0)
                count -= found;
        }
        CHECK(poll(&event, 1, 0) == 0);
    }
    CHECK(memcmp(memory, shadow, 4096) == 0);
    OK(pf_queue_destroy(on));
    OK(pf_free(from, memory));
}

static int stop;

static void *look(void *on) {
    struct pf_completion done;
    for (unsigned looks = 1; !__atomic_load_n(&stop, __ATOMIC_RELAXED); looks++) {
        int found = pf_complete(on, &done, 0);
        CHECK(found == 0 || (found == -EBUSY && strstr(pf_strerror_last(), "has not ended")));
        /* Valgrind would switch in the middle of a call, always; one processor never would. */
        if (looks % (requests < 1000 ? 32 : 1024) == 0)
            sched_yield();
    }
    return NULL;
}

/* A second thread is refused, and disturbs nothing. */
static void by_two_threads(void) {
    pf_queue_t *on = queue(1, PF_PROTECT_STRICT, 0);
    unsigned char *memory = pf_alloc(per_use, 4096, NULL);
    struct iovec iov = {memory, 4096};
    const struct pf_request request = {.op = PF_READ, .nsid = 1, .iov = &iov, .iovcnt = 1};
    struct pf_completion done;
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, look, on) == 0);
    unsigned refusals = 0, reported = 0;
    for (unsigned rounds = 0; reported < requests / 10 || refusals < requests / 200; rounds++) {
        int accepted = pf_submit(on, &request, 1);
        CHECK(accepted == 1 || accepted == -EBUSY || accepted == -EAGAIN);
        int found = pf_complete(on, &done, 1);
        CHECK(found >= 0 || found == -EBUSY);
        refusals += (accepted == -EBUSY) + (found == -EBUSY);
        reported += found > 0;
        CHECK(rounds < 100000000);
    }
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    CHECK(pthread_join(thread, NULL) == 0);
    while (pf_queue_wait(on, LONG) > 0)
        CHECK(VALUE(pf_complete(on, &done, 1)) == 1);
    OK(pf_queue_destroy(on));
    OK(pf_free(per_use, memory));
}

/* A model on a file: what was written and flushed is in it. */
static void on_a_file(void) {
    char path[] = "/tmp/pinfold-nvme-XXXXXX";
    int file = mkstemp(path);
    CHECK(file >= 0);
    struct pf_nvme_opts opts = {
        .struct_size = sizeof opts, .path = path, .size = 1 << 20, .block_bytes = 4096};
    pf_nvme_t *memory_model = nvme;
    struct pf_nvme_info info = {.struct_size = sizeof info};
    OK(pf_nvme_open(domain, per_use, &opts, &nvme));
    OK(pf_nvme_info(nvme, 1, &info));
    CHECK(info.block_bytes == 4096 && info.capacity == 1 << 20);
    pf_queue_t *on = queue(1, PF_PROTECT_STRICT, 0);
    unsigned char *memory = pf_alloc(per_use, 4096, NULL), found[4096];
    memset(memory, 0x42, 4096);
    struct iovec iov = {memory, 4096};
    struct pf_request request = {
        .op = PF_WRITE, .nsid = 1, .offset = 8192, .iov = &iov, .iovcnt = 1};
    CHECK(run(on, request).result == 0);
    CHECK(run(on, (struct pf_request){.op = PF_FLUSH, .nsid = 1}).result == 0);
    CHECK(pread(file, found, 4096, 8192) == 4096 && memcmp(found, memory, 4096) == 0);
    /* The file has become shorter: the medium fails, and the request with it. */
    CHECK(ftruncate(file, 4096) == 0);
    request.op = PF_READ;
    struct pf_completion failed = run(on, request);
    CHECK(failed.result == -EIO && failed.status != 0 && !(failed.status & PF_LOST));
    OK(pf_free(per_use, memory));
    OK(pf_queue_destroy(on));
    OK(pf_nvme_destroy(nvme));
    nvme = memory_model;
    close(file);
    unlink(path);
}

/* Zeroed options protect: of an arena, whose controller works from it too, and of a queue. */
static void defaults(void) {
    pf_arena_t *zeroed = arena(8 << 20, 0);
    struct pf_nvme_opts opts = {.struct_size = sizeof opts, .size = 1 << 20};
    struct pf_queue_opts depth = {.struct_size = sizeof depth, .depth = 4};
    pf_nvme_t *other;
    pf_queue_t *on;
    uint64_t iova = 1;
    void *memory = pf_alloc(zeroed, 4096, &iova), *stays = pf_alloc(whole, 4096, NULL);
    CHECK(memory != NULL && iova == 0 && stays != NULL);
    OK(pf_nvme_open(domain, zeroed, &opts, &other));
    OK(pf_queue_create(other, &depth, &on));
    struct iovec iov = {memory, 4096};
    struct pf_request read = {.op = PF_READ, .nsid = 1, .iov = &iov, .iovcnt = 1};
    CHECK(run(on, read).result == 0);
    CHECK(pf_iova(domain, memory, 4096, &iova) < 0);
    iov.iov_base = stays;
    REFUSED(EINVAL, "stays mapped", pf_submit(on, &read, 1));
    OK(pf_free(zeroed, memory));
    OK(pf_free(whole, stays));
    OK(pf_queue_destroy(on));
    OK(pf_nvme_destroy(other));
    OK(pf_arena_destroy(zeroed));
}

/* Memory of the program that is registered, and a block of a pool. */
static void other_memory(void) {
    enum { BYTES = 1 << 16 };
    pf_queue_t *on = queue(4, PF_PROTECT_STATIC, 0), *strict = queue(4, PF_PROTECT_STRICT, 0);
    unsigned char *own = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(own != MAP_FAILED);
    struct iovec iov = {own + 512, BYTES - 512};
    struct pf_request read = {.op = PF_READ, .nsid = 1, .offset = 1024, .iov = &iov, .iovcnt = 1};
    struct pf_completion done;
    pf_reg_t *registered;
    REFUSED(ENXIO, "pf_register", pf_submit(on, &read, 1));
    OK(pf_register(domain, own, BYTES, &registered));
    CHECK(run(on, read).result == 0 && memcmp(own + 512, shadow + 1024, BYTES - 512) == 0);
    REFUSED(EINVAL, "stays mapped", pf_submit(strict, &read, 1));
    CHECK(VALUE(pf_submit(on, &read, 1)) == 1);
    CHECK(pf_reg_destroy(registered) == -EBUSY);
    CHECK(VALUE(pf_queue_wait(on, LONG)) == 1 && VALUE(pf_complete(on, &done, 1)) == 1);
    OK(pf_reg_destroy(registered));
    REFUSED(ENXIO, "pf_register", pf_submit(on, &read, 1));
    CHECK(munmap(own, BYTES) == 0);

    /* A block of a pool stays mapped, whatever the arena's policy is. */
    struct pf_pool_opts opts = {.struct_size = sizeof opts, .size = 4096, .align = 4096};
    pf_arena_t *arenas[2] = {whole, per_use};
    pf_owner_t *owner;
    OK(pf_owner_create(domain, &owner));
    for (int at = 0; at < 2; at++) {
        pf_pool_t *pool;
        pf_cache_t *cache;
        pf_block_t block;
        uint64_t iova;
        OK(pf_pool_create(arenas[at], &opts, &pool));
        OK(pf_pool_cache(pool, &cache));
        OK(pf_get(cache, &block));
        OK(pf_iova(domain, (char *)block.va + 100, 7, &iova));
        CHECK(iova == block.iova + 100);
        iov = (struct iovec){block.va, 4096};
        CHECK(run(on, read).result == 0 && memcmp(block.va, shadow + 1024, 4096) == 0);
        REFUSED(EINVAL, "stays mapped", pf_submit(strict, &read, 1));
        if (arenas[at] == per_use) {
            pf_map_t map;
            struct iovec piece = {block.va, 4096};
            REFUSED(EINVAL, "are a pool's", pf_map(owner, block.va, 8, PF_BIDIR, &map, &iova));
            REFUSED(EINVAL, "piece 0", pf_map_many(owner, &piece, 1, PF_BIDIR, &map, &iova));
        }
        OK(pf_put(cache, &block));
        OK(pf_cache_destroy(cache));
        OK(pf_pool_destroy(pool));
    }
    OK(pf_owner_destroy(owner));
    OK(pf_queue_destroy(on));
    OK(pf_queue_destroy(strict));
}

/* The hook sees what a queue maps and revokes. */
static void traced(void) {
    pf_queue_t *on = queue(1, PF_PROTECT_STRICT, 0);
    unsigned char *memory = pf_alloc(per_use, 3 * 4096, NULL);
    struct iovec iov[2] = {{memory + 4096 + 512, 4096 - 512}, {memory, 512}};
    const struct pf_request request = {.op = PF_READ, .nsid = 1, .iov = iov, .iovcnt = 2};
    struct pf_completion done;
    pf_trace_set(note, &events, NULL);
    uintptr_t before = here();
    CHECK(pf_submit(on, &request, 1) == 1);
    uintptr_t between = here();
    CHECK(pf_queue_wait(on, LONG) == 1);
    uintptr_t after = here();
    CHECK(pf_complete(on, &done, 1) == 1 && done.result == 0);
    pf_trace_set(NULL, NULL, NULL);
    CHECK(events == 4);
    for (int i = 0; i < 4; i++) {
        uintptr_t caller = (uintptr_t)seen[i].caller;
        CHECK(seen[i].kind == (i < 2 ? PF_EVENT_MAP : PF_EVENT_REVOKE));
        CHECK(seen[i].va == iov[i % 2].iov_base && seen[i].len == iov[i % 2].iov_len);
        CHECK(seen[i].iova != 0 && seen[i].iova == seen[i % 2].iova);
        CHECK(seen[i].handle == (uint64_t)(uintptr_t)on);
        CHECK(i < 2 ? before < caller && caller < between : between < caller && caller < after);
    }
    OK(pf_queue_destroy(on));
    OK(pf_free(per_use, memory));
}

static void *put_until_told(void *to_put) {
    int code = -EBUSY;
    while (code == -EBUSY && !__atomic_load_n(&stop, __ATOMIC_RELAXED))
        code = pf_arena_destroy(to_put);
    return (void *)(intptr_t)code;
}

/* A thread ends the arena while another one opens a controller on it: one of them is refused. */
static void opened_while_the_arena_ends(void) {
    struct pf_nvme_opts opts = {.struct_size = sizeof opts, .size = 1 << 20};
    for (int i = 0; i < 100; i++) {
        pf_arena_t *rings = arena(2 << 20, PF_POLICY_WHOLE);
        pf_nvme_t *opened = NULL;
        pthread_t thread;
        void *put;
        __atomic_store_n(&stop, 0, __ATOMIC_RELAXED);
        CHECK(pthread_create(&thread, NULL, put_until_told, rings) == 0);
        int code = pf_nvme_open(domain, rings, &opts, &opened);
        __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
        CHECK(pthread_join(thread, &put) == 0);
        CHECK((code == 0) == (put != NULL));
        OK(pf_nvme_destroy(opened));
        if (put != NULL)
            OK(pf_arena_destroy(rings));
    }
}

int main(void) {
    const char *checker = getenv("CHECKER");
    if (checker != NULL)
        requests = strcmp(checker, "valgrind") == 0 ? 60 : 1000;
    OK(pf_domain_soft(&domain));
    whole = arena(80 << 20, PF_POLICY_WHOLE);
    per_use = arena(160 << 20, PF_POLICY_PER_USE);
    open_and_look();
    create_queues();
    with_all_protections();
    for (uint32_t protect = PF_PROTECT_STRICT; protect <= PF_PROTECT_STATIC; protect++) {
        vectored(protect);
        refused(protect);
        by_descriptor(protect);
    }
    defaults();
    flush_and_discard();
    other_memory();
    by_two_threads();
    traced();
    opened_while_the_arena_ends();
    on_a_file();
    OK(pf_nvme_destroy(nvme));
    REFUSED(EBADF, "destroyed", pf_nvme_destroy(nvme));
    OK(pf_arena_destroy(whole));
    OK(pf_arena_destroy(per_use));
    OK(pf_domain_destroy(domain));
    puts("nvme: ok");
    return 0;
}
