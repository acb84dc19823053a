/* Controllers and queues: random reads and writes against a copy, with every protection; scattered
 * memory, flushes, discards, descriptors; every misuse. */
#include "check.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>
#include <unistd.h>

enum { BLOCK = 512, DEPTH = 32, CAPACITY = 32 << 20, MOST = 1 << 20 };

static pf_domain_t *domain;
/* Mapped as a whole, and per use. */
static pf_arena_t *whole, *per_use;
static pf_nvme_t *nvme;
static unsigned char shadow[CAPACITY];

static uint64_t state = 88172645463325252u;
static uint64_t number(uint64_t below) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % below;
}

static pf_arena_t *arena(uint64_t size, uint32_t policy) {
    struct pf_arena_opts opts = {.opts_size = sizeof opts, .size = size, .policy = policy};
    pf_arena_t *made;
    OK(pf_arena_create(domain, &opts, &made));
    return made;
}

static pf_queue_t *queue(uint32_t depth, uint32_t protect, uint32_t flags) {
    struct pf_queue_opts opts = {
        .opts_size = sizeof opts, .depth = depth, .protect = protect, .flags = flags};
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
    CHECK(OK(pf_submit(on, &request, 1)) == 1);
    CHECK(OK(pf_queue_wait(on, UINT64_MAX)) == 1);
    CHECK(OK(pf_complete(on, &done, 1)) == 1 && done.user_data == request.user_data);
    return done;
}

static void open_and_look(void) {
    struct pf_nvme_opts opts = {.opts_size = sizeof opts, .size = CAPACITY};
    REFUSED(EFAULT, "`out` is NULL", pf_nvme_open(domain, whole, &opts, NULL));
    REFUSED(EBADF, "no handle of a domain", pf_nvme_open(NULL, whole, &opts, &nvme));
    REFUSED(EBADF, "not of a arena", pf_nvme_open(domain, (pf_arena_t *)domain, &opts, &nvme));
    REFUSED(EINVAL, "0 bytes", pf_nvme_open(domain, whole, NULL, &nvme));
    opts.flags = 4;
    REFUSED(EINVAL, "flags 0x4", pf_nvme_open(domain, whole, &opts, &nvme));
    opts.flags = 0;
    opts.block_bytes = 1000;
    REFUSED(EINVAL, "block size of 1000", pf_nvme_open(domain, whole, &opts, &nvme));
    opts.block_bytes = 0;
    opts.size = 100;
    REFUSED(EINVAL, "100 bytes", pf_nvme_open(domain, whole, &opts, &nvme));
    opts.size = CAPACITY;
    opts.bdf = "0000:01:00.0";
    REFUSED(ENODEV, "not attached", pf_nvme_open(domain, whole, &opts, &nvme));
    opts.bdf = NULL;
    opts.path = "/nonexistent/image";
    REFUSED(ENOENT, "/nonexistent/image", pf_nvme_open(domain, whole, &opts, &nvme));
    opts.path = NULL;
    pf_domain_t *other;
    OK(pf_domain_soft(&other));
    REFUSED(ENXIO, "pf_arena_map_into", pf_nvme_open(other, whole, &opts, &nvme));
    /* An arena of another domain that was mapped into this one. */
    OK(pf_arena_map_into(whole, other, NULL));
    OK(pf_nvme_open(other, whole, &opts, &nvme));
    OK(pf_nvme_put(nvme));
    OK(pf_domain_put(other));
    OK(pf_nvme_open(domain, whole, &opts, &nvme));

    struct pf_nvme_info info = {.info_size = sizeof info};
    OK(pf_nvme_info(nvme, 0, &info));
    CHECK(info.capacity == CAPACITY && info.block_bytes == BLOCK && info.nsid == 1);
    CHECK(info.max_transfer == 64 << 20 && info.max_command == 1 << 20 && info.max_depth == 1023);
    CHECK(info.flags & PF_NVME_DISCARD && info.info_size == sizeof info);
    REFUSED(ENODEV, "namespace 2", pf_nvme_info(nvme, 2, &info));
    REFUSED(EFAULT, "`info` is NULL", pf_nvme_info(nvme, 1, NULL));
    info.info_size = 7;
    REFUSED(EINVAL, "7 bytes", pf_nvme_info(nvme, 1, &info));
    REFUSED(EBADF, "not of a controller", pf_nvme_info((pf_nvme_t *)domain, 1, &info));
    REFUSED(EBADF, "not of a controller", pf_nvme_put((pf_nvme_t *)whole));
    OK(pf_nvme_put(NULL));
}

static void create_queues(void) {
    struct pf_queue_opts opts = {.opts_size = sizeof opts, .depth = 4};
    pf_queue_t *made, *others[16];
    REFUSED(EFAULT, "`out` is NULL", pf_queue_create(nvme, &opts, NULL));
    REFUSED(EBADF, "no handle", pf_queue_create(NULL, &opts, &made));
    REFUSED(EINVAL, "depth of 0", pf_queue_create(nvme, NULL, &made));
    opts.depth = UINT32_MAX;
    REFUSED(EINVAL, "4294967295", pf_queue_create(nvme, &opts, &made));
    opts.depth = 4;
    opts.protect = 4;
    REFUSED(EINVAL, "protection 4", pf_queue_create(nvme, &opts, &made));
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
        REFUSED(EBUSY, "16 queues", pf_nvme_put(nvme));
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

/* Random reads and writes, of 512 bytes to 1 MiB, each of a range that no other in flight has. */
static void random_requests(uint32_t protect, uint32_t flags, unsigned requests) {
    static struct slot slots[DEPTH];
    pf_arena_t *from = memory_for(protect);
    pf_queue_t *on = queue(DEPTH, protect, flags);
    for (int i = 0; i < DEPTH; i++)
        CHECK((slots[i].memory = pf_alloc(from, MOST, NULL)) != NULL);
    unsigned submitted = 0, reported = 0, full = 0;
    while (reported < requests) {
        struct pf_request batch[8];
        struct iovec iov[8];
        unsigned count = 0, last = number(8) + 1;
        for (int i = 0; i < DEPTH && count < last && submitted + count < requests; i++) {
            struct slot *slot = &slots[i];
            if (slot->busy)
                continue;
            slot->bytes = BLOCK << number(12);
            slot->bytes -= slot->bytes > BLOCK ? BLOCK * number(slot->bytes / BLOCK / 2) : 0;
            slot->offset = BLOCK * number((CAPACITY - slot->bytes) / BLOCK);
            bool apart = true;
            for (int j = 0; j < DEPTH; j++)
                apart &= !slots[j].busy || slots[j].offset >= slot->offset + slot->bytes ||
                         slot->offset >= slots[j].offset + slots[j].bytes;
            if (!apart)
                continue;
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
                                               .user_data = i};
            count++;
        }
        CHECK(OK(pf_submit(on, batch, count)) == count);
        submitted += count;
        full += count == 0;
        if (submitted - reported == DEPTH || count == 0)
            CHECK(OK(pf_queue_wait(on, 10000000000u)) > 0);
        struct pf_completion done[5];
        int found = OK(pf_complete(on, done, 5));
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
}

int main(void) {
    OK(pf_domain_soft(&domain));
    whole = arena(48 << 20, PF_POLICY_WHOLE);
    per_use = arena(48 << 20, PF_POLICY_PER_USE);
    open_and_look();
    create_queues();
    random_requests(PF_PROTECT_STATIC, 0, 10000);
    (void)run;
    OK(pf_nvme_put(nvme));
    REFUSED(EBADF, "destroyed", pf_nvme_put(nvme));
    OK(pf_arena_put(whole));
    OK(pf_arena_put(per_use));
    OK(pf_domain_put(domain));
    puts("nvme: ok");
    return 0;
}
