/* The protected request loop: every function and every misuse, with a device that is a port. */
#include "traced.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

/* Of the leak sanitizer, where the test is built with it. */
void __lsan_disable(void) __attribute__((weak));
void __lsan_enable(void) __attribute__((weak));

static pf_domain_t *domain;
static pf_arena_t *arena; /* mapped per use */
static pf_arena_t *whole;
static pf_port_t *port;

/* Sets up a domain, with nothing in use: what a case leaves in use for good stays with it. */
static void set_up(void) {
    struct pf_arena_opts opts = {.struct_size = sizeof opts, .size = 4 << 20};
    OK(pf_arena_create(domain, &opts, &arena));
    opts.policy = PF_POLICY_WHOLE;
    OK(pf_arena_create(domain, &opts, &whole));
    OK(pf_port_open(domain, &port));
}

static const uint32_t protections[] = {PF_PROTECT_STRICT, PF_PROTECT_REVOKE, PF_PROTECT_BATCH};

static pf_requests_t *loop_of(uint32_t protect, uint32_t depth, uint32_t held) {
    struct pf_requests_opts opts = {
        .struct_size = sizeof opts, .depth = depth, .held = held, .protect = protect};
    pf_requests_t *requests;
    OK(pf_requests_create(domain, &opts, &requests));
    return requests;
}

/* Polls until a request is reported, for a minute at most. */
static struct pf_done reported(pf_requests_t *requests) {
    struct pf_done done;
    for (int i = 0; i < 60; i++)
        if (VALUE(pf_requests_wait(requests, 1000000000, &done, 1)) == 1)
            return done;
    CHECK(!"reported");
    return done;
}

static void refusals(void) {
    struct pf_requests_opts opts = {.struct_size = sizeof opts, .depth = 2};
    pf_requests_t *requests = NULL;
    REFUSED(EFAULT, "`out` is NULL", pf_requests_create(domain, &opts, NULL));
    REFUSED(EBADF, "not of a domain", pf_requests_create((pf_domain_t *)arena, &opts, &requests));
    REFUSED(EFAULT, "`opts` is NULL", pf_requests_create(domain, NULL, &requests));
    opts.depth = 0;
    REFUSED(EINVAL, "depth 0", pf_requests_create(domain, &opts, &requests));
    opts.depth = 1 << 20, opts.held = 1;
    REFUSED(EINVAL, "1048576", pf_requests_create(domain, &opts, &requests));
    opts.depth = 2, opts.held = 0, opts.protect = 5;
    REFUSED(EINVAL, "protection 5", pf_requests_create(domain, &opts, &requests));
    opts.protect = 0, opts.flags = 1;
    REFUSED(EINVAL, "flags 0x1", pf_requests_create(domain, &opts, &requests));
    CHECK(requests == NULL);
    opts.flags = 0;
    OK(pf_requests_create(domain, &opts, &requests));

    char *memory = pf_alloc(arena, 8192, NULL);
    struct pf_payload payload = {.va = memory, .len = 4096, .dir = PF_FROM_DEVICE}, bad[9];
    uint64_t token = 7, iovas[9];
    struct pf_done done;
    for (int i = 0; i < 9; i++)
        bad[i] = payload;
    REFUSED(EFAULT, "`token` is NULL", pf_requests_begin(requests, &payload, 1, NULL, iovas));
    REFUSED(EFAULT, "`payloads` is NULL", pf_requests_begin(requests, NULL, 1, &token, iovas));
    REFUSED(EFAULT, "`iovas` is NULL", pf_requests_begin(requests, &payload, 1, &token, NULL));
    REFUSED(EINVAL, "9 payloads", pf_requests_begin(requests, bad, 9, &token, iovas));
    for (int i = 0; i < 8; i += 1 + i) {
        char index[32];
        snprintf(index, sizeof index, "payload %d", i);
        bad[i].dir = 4;
        REFUSED(EINVAL, index, pf_requests_begin(requests, bad, 8, &token, iovas));
        CHECK(strstr(pf_strerror_last(), "direction 4") != NULL);
        bad[i].dir = PF_BIDIR, bad[i].len = 0;
        REFUSED(EINVAL, index, pf_requests_begin(requests, bad, 8, &token, iovas));
        bad[i].len = 8193;
        REFUSED(EINVAL, index, pf_requests_begin(requests, bad, 8, &token, iovas));
        bad[i].len = 1, bad[i].va = &payload;
        REFUSED(ENXIO, index, pf_requests_begin(requests, bad, 8, &token, iovas));
        bad[i].va = memory, bad[i].reserved = 1;
        REFUSED(EINVAL, index, pf_requests_begin(requests, bad, 8, &token, iovas));
        bad[i] = payload;
    }
    CHECK(token == 7);
    OK(pf_free(arena, memory)); /* nothing is mapped, and nothing in use */
    memory = payload.va = pf_alloc(arena, 8192, NULL);

    OK(pf_requests_begin(requests, &payload, 1, &token, iovas));
    pf_requests_t *other = loop_of(PF_PROTECT_STRICT, 2, 0);
    const uint64_t forged[] = {0, UINT64_MAX, token ^ 1, token + (1 << 20), token ^ 1ull << 63};
    for (int i = 0; i < 5; i++) {
        REFUSED(ESTALE, "never began", pf_requests_completed(requests, forged[i], 0));
        REFUSED(ESTALE, "never began", pf_requests_refused(requests, forged[i]));
        REFUSED(ESTALE, "never began", pf_requests_lost(requests, forged[i]));
    }
    REFUSED(ESTALE, "never began", pf_requests_completed(other, token, 0));
    REFUSED(EBUSY, "in use by 1", pf_free(arena, memory));
    REFUSED(EBUSY, "at the device: 1", pf_requests_destroy(requests));
    CHECK(VALUE(pf_requests_poll(requests, NULL, 0)) == 0);
    OK(pf_requests_completed(requests, token, 5));
    REFUSED(ESTALE, "has ended", pf_requests_completed(requests, token, 6));
    REFUSED(ESTALE, "has ended", pf_requests_refused(requests, token));
    REFUSED(ESTALE, "has ended", pf_requests_lost(requests, token));
    REFUSED(EBUSY, "not reported: 1", pf_requests_destroy(requests));
    REFUSED(EFAULT, "`done` is NULL", pf_requests_poll(requests, NULL, 1));
    REFUSED(EFAULT, "`done` is NULL", pf_requests_wait(requests, 0, NULL, 1));
    CHECK(VALUE(pf_requests_poll(requests, NULL, 0)) == 0); /* strict: it has ended here */
    OK(pf_free(arena, memory));
    REFUSED(EBUSY, "not reported: 1", pf_requests_destroy(requests));
    CHECK(VALUE(pf_requests_poll(requests, &done, 1)) == 1);
    CHECK(done.token == token && done.result == 5 && done.end == PF_END_QUIESCED && done.error == 0);
    REFUSED(ESTALE, "was reported", pf_requests_completed(requests, token, 0));

    REFUSED(EBADF, "no handle", pf_requests_begin(NULL, NULL, 0, &token, NULL));
    REFUSED(EBADF, "no handle", pf_requests_completed(NULL, 0, 0));
    REFUSED(EBADF, "no handle", pf_requests_refused(NULL, 0));
    REFUSED(EBADF, "no handle", pf_requests_lost(NULL, 0));
    REFUSED(EBADF, "no handle", pf_requests_stopped(NULL));
    REFUSED(EBADF, "no handle", pf_requests_poll(NULL, &done, 1));
    REFUSED(EBADF, "no handle", pf_requests_wait(NULL, 0, &done, 1));
    REFUSED(EBADF, "no handle", pf_requests_fd(NULL));
    REFUSED(EBADF, "not of a request loop", pf_requests_destroy((pf_requests_t *)domain));
    OK(pf_requests_destroy(NULL));
    OK(pf_requests_destroy(other));
    OK(pf_requests_destroy(requests));
    REFUSED(EBADF, "destroyed", pf_requests_poll(requests, &done, 1));
    REFUSED(EBADF, "destroyed", pf_requests_destroy(requests));
}

/* A request of every number of payloads, with the directions mixed, goes to the device and back. */
static void there_and_back(uint32_t protect) {
    pf_requests_t *requests = loop_of(protect, 4, 0);
    char *memory = pf_alloc(arena, 8 * 8192, NULL);
    for (unsigned n = 0; n <= 8; n++) {
        struct pf_payload payloads[8];
        uint64_t token, iovas[8];
        char byte;
        memset(memory, 0x11, 8 * 8192);
        for (unsigned i = 0; i < n; i++)
            payloads[i] = (struct pf_payload){
                .va = memory + i * 8192 + i, .len = 4096, .dir = i % 3 + 1};
        OK(pf_requests_begin(requests, payloads, n, &token, n ? iovas : NULL));
        CHECK(token != 0 && pf_token_slot(token) < 8);
        for (unsigned i = 0; i < n; i++) {
            CHECK(iovas[i] % 4096 == i);
            uint32_t dir = payloads[i].dir;
            CHECK((pf_port_read(port, iovas[i], &byte, 1) == 0) == (dir != PF_FROM_DEVICE));
            CHECK((pf_port_write(port, iovas[i] + 4095, "w", 1) == 0) == (dir != PF_TO_DEVICE));
            CHECK(memory[i * 8192 + i + 4095] == (dir == PF_TO_DEVICE ? 0x11 : 'w'));
        }
        if (n)
            REFUSED(EBUSY, "in use by", pf_free(arena, memory));
        OK(pf_requests_completed(requests, token, n));
        struct pf_done done = reported(requests);
        CHECK(done.token == token && done.result == n && done.end == PF_END_QUIESCED);
        for (unsigned i = 0; i < n; i++) {
            REFUSED(EFAULT, "no mapping", pf_port_write(port, iovas[i], "x", 1));
            REFUSED(EFAULT, "no mapping", pf_port_read(port, iovas[i], &byte, 1));
        }
    }
    OK(pf_free(arena, memory));
    OK(pf_requests_destroy(requests));
}

/* What ends otherwise: never submitted, lost, stopped. */
static void otherwise(uint32_t protect) {
    pf_requests_t *requests = loop_of(protect, 2, 2);
    char *memory = pf_alloc(arena, 4 * 4096, NULL);
    struct pf_payload payloads[4];
    uint64_t tokens[4], iovas[4];
    struct pf_done done[4];
    for (int i = 0; i < 4; i++)
        payloads[i] = (struct pf_payload){memory + i * 4096, 4096, PF_FROM_DEVICE, 0};
    OK(pf_requests_begin(requests, &payloads[0], 1, &tokens[0], &iovas[0]));
    OK(pf_requests_refused(requests, tokens[0]));
    REFUSED(EFAULT, "no mapping", pf_port_write(port, iovas[0], "x", 1));
    REFUSED(ESTALE, "was reported", pf_requests_refused(requests, tokens[0]));
    CHECK(VALUE(pf_requests_poll(requests, done, 4)) == 0);

    for (int i = 0; i < 2; i++)
        OK(pf_requests_begin(requests, &payloads[i], 1, &tokens[i], &iovas[i]));
    REFUSED(EAGAIN, "the depth", pf_requests_begin(requests, &payloads[2], 1, &tokens[2], &iovas[2]));
    /* Lost: it takes no place of the depth, and stays mapped. */
    for (int i = 0; i < 2; i++) {
        OK(pf_requests_lost(requests, tokens[i]));
        REFUSED(ESTALE, "given up", pf_requests_lost(requests, tokens[i]));
        OK(pf_requests_begin(requests, &payloads[i + 2], 1, &tokens[i + 2], &iovas[i + 2]));
        OK(pf_port_write(port, iovas[i], "late", 4));
    }
    uint64_t none;
    REFUSED(EAGAIN, "the depth", pf_requests_begin(requests, NULL, 0, &none, NULL));
    OK(pf_requests_lost(requests, tokens[2]));
    REFUSED(EAGAIN, "3 are lost", pf_requests_begin(requests, NULL, 0, &none, NULL));
    CHECK(pf_token_slot(tokens[2]) != pf_token_slot(tokens[0]));
    OK(pf_requests_completed(requests, tokens[1], 11)); /* after all */
    *done = reported(requests);
    CHECK(done->token == tokens[1] && done->result == 11 && done->end == PF_END_QUIESCED);
    OK(pf_requests_stopped(requests));
    for (int i = 0; i < 3; i++) {
        *done = reported(requests);
        CHECK(done->result == 0 && done->end == PF_END_QUIESCED && done->token != tokens[1]);
    }
    REFUSED(EFAULT, "no mapping", pf_port_write(port, iovas[0], "x", 1));
    OK(pf_free(arena, memory));
    OK(pf_requests_destroy(requests));
}

/* A slot is not used again before its request is reported, however few reports are taken. */
static void slots(void) {
    pf_requests_t *requests = loop_of(PF_PROTECT_STRICT, 2, 1);
    uint64_t tokens[3], token;
    struct pf_done done;
    for (int i = 0; i < 3; i++) {
        OK(pf_requests_begin(requests, NULL, 0, &tokens[i], NULL));
        OK(pf_requests_completed(requests, tokens[i], (uint64_t)i));
    }
    CHECK(VALUE(pf_requests_poll(requests, NULL, 0)) == 0);
    REFUSED(EAGAIN, "3 reports", pf_requests_begin(requests, NULL, 0, &token, NULL));
    CHECK(VALUE(pf_requests_poll(requests, &done, 1)) == 1 && done.token == tokens[0]);
    OK(pf_requests_begin(requests, NULL, 0, &token, NULL));
    CHECK(pf_token_slot(token) == pf_token_slot(tokens[0]) && token != tokens[0]);
    REFUSED(ESTALE, "was reported", pf_requests_completed(requests, tokens[0], 0));
    OK(pf_requests_completed(requests, token, 3));
    for (uint64_t i = 1; i < 4; i++) {
        done = reported(requests);
        CHECK(done.result == i && done.token == (i < 3 ? tokens[i] : token));
    }
    OK(pf_requests_destroy(requests));
}

/* What stays mapped: of a whole arena, registered, and blocks of pools. */
static void stays(void) {
    static char own[4 * 4096] __attribute__((aligned(4096)));
    struct pf_pool_opts options = {.struct_size = sizeof options, .size = 256, .align = 256};
    pf_pool_t *pool;
    pf_cache_t *cache;
    pf_reg_t *reg;
    pf_block_t block;
    uint64_t iova, token;
    OK(pf_register(domain, own, sizeof own, &reg));
    OK(pf_pool_create(arena, &options, &pool));
    OK(pf_pool_cache(pool, &cache));
    OK(pf_get(cache, &block));
    char *memory = pf_alloc(whole, 4096, &iova);
    const struct pf_payload payloads[] = {{memory + 3, 100, PF_BIDIR, 0},
                                          {own + 4096, 100, PF_TO_DEVICE, 0},
                                          {block.va, 256, PF_FROM_DEVICE, 0}};
    uint64_t own_iova, iovas[3];
    OK(pf_iova(domain, own, 1, &own_iova));
    for (uint32_t protect = 1; protect <= 4; protect++) {
        pf_requests_t *requests = loop_of(protect, 2, 0);
        OK(pf_requests_begin(requests, payloads, 3, &token, iovas));
        CHECK(iovas[0] == iova + 3);
        CHECK(iovas[1] == own_iova + 4096);
        CHECK(iovas[2] == block.iova);
        REFUSED(EBUSY, "in use by", pf_free(whole, memory));
        OK(pf_requests_completed(requests, token, 0));
        struct pf_done done = reported(requests);
        CHECK(done.end == PF_END_STAYS_MAPPED && done.error == 0);
        OK(pf_requests_begin(requests, payloads, 1, &token, iovas));
        CHECK(pf_requests_refused(requests, token) == PF_STAYS_MAPPED);
        OK(pf_port_write(port, iova + 3, "still", 5));
        OK(pf_requests_begin(requests, NULL, 0, &token, NULL));
        OK(pf_requests_completed(requests, token, 0));
        CHECK(reported(requests).end == PF_END_QUIESCED);
        /* Beside what does not stay: refused with PF_PROTECT_STATIC, and all of it is given back. */
        char *per_use = pf_alloc(arena, 4096, NULL);
        struct pf_payload both[] = {payloads[0], {per_use, 4096, PF_BIDIR, 0}};
        if (protect == PF_PROTECT_STATIC) {
            REFUSED(ENXIO, "payload 1", pf_requests_begin(requests, both, 2, &token, iovas));
        } else {
            OK(pf_requests_begin(requests, both, 2, &token, iovas));
            OK(pf_requests_completed(requests, token, 0));
            CHECK(reported(requests).end == PF_END_STAYS_MAPPED);
            REFUSED(EFAULT, "no mapping", pf_port_write(port, iovas[1], "x", 1));
        }
        OK(pf_free(arena, per_use));
        OK(pf_requests_destroy(requests));
    }
    OK(pf_free(whole, memory));
    OK(pf_put(cache, &block));
    OK(pf_cache_destroy(cache));
    OK(pf_pool_destroy(pool));
    OK(pf_reg_destroy(reg));
}

/* The descriptor is readable when a poll finds something, and only then. */
static void descriptor(void) {
    pf_requests_t *requests = loop_of(PF_PROTECT_BATCH, 8, 0);
    char *memory = pf_alloc(arena, 4096, NULL);
    struct pf_payload payload = {memory, 4096, PF_BIDIR, 0};
    struct pollfd ready = {.events = POLLIN};
    uint64_t token, iova;
    struct pf_done done;
    int fd = ready.fd = (int)VALUE(pf_requests_fd(requests));
    CHECK(poll(&ready, 1, 0) == 0);
    for (int round = 0; round < 100; round++) {
        OK(pf_requests_begin(requests, &payload, 1, &token, &iova));
        CHECK(VALUE(pf_requests_fd(requests)) == fd && poll(&ready, 1, 0) == 0);
        OK(pf_requests_completed(requests, token, 0));
        int found = 0;
        for (int looks = 0; found == 0 && looks < 4; looks++) {
            CHECK(VALUE(pf_requests_fd(requests)) == fd && poll(&ready, 1, 60000) == 1);
            found = (int)VALUE(pf_requests_poll(requests, &done, 1));
        }
        CHECK(found == 1);
    }
    /* Reports that were not taken. */
    for (int i = 0; i < 2; i++) {
        OK(pf_requests_begin(requests, NULL, 0, &token, NULL));
        OK(pf_requests_completed(requests, token, 0));
    }
    CHECK(VALUE(pf_requests_poll(requests, &done, 1)) == 1);
    CHECK(VALUE(pf_requests_fd(requests)) == fd && poll(&ready, 1, 0) == 1);
    CHECK(VALUE(pf_requests_wait(requests, UINT64_MAX, &done, 1)) == 1);
    CHECK(VALUE(pf_requests_fd(requests)) == fd && poll(&ready, 1, 0) == 0);
    OK(pf_free(arena, memory));
    OK(pf_requests_destroy(requests));
    CHECK(poll(&ready, 1, 0) == 1 && ready.revents == POLLNVAL);
}

/* A program that closes the descriptors that it was given stops no call, and loses no file that it
 * opens in their place. */
static void closed_by_the_program(void) {
    struct pf_arena_opts opts = {
        .struct_size = sizeof opts, .size = 1 << 20, .sources = PF_SOURCE_MEMFD};
    struct pf_region region = {.struct_size = sizeof region};
    pf_requests_t *requests = loop_of(PF_PROTECT_BATCH, 2, 0);
    pf_arena_t *shared;
    pf_owner_t *owner;
    OK(pf_owner_create(domain, &owner));
    OK(pf_arena_create(domain, &opts, &shared));
    OK(pf_arena_region(shared, &region));
    int fds[] = {(int)VALUE(pf_requests_fd(requests)), (int)VALUE(pf_quiesce_fd(owner)), region.fd};
    for (int i = 0; i < 3; i++) {
        int own = open("/dev/null", O_RDONLY | O_CLOEXEC);
        CHECK(own >= 0 && dup2(own, fds[i]) == fds[i] && close(own) == 0);
    }
    char *memory = pf_alloc(shared, 4096, NULL);
    struct pf_payload payload = {memory, 4096, PF_BIDIR, 0};
    uint64_t token, iova;
    OK(pf_requests_begin(requests, &payload, 1, &token, &iova));
    OK(pf_requests_completed(requests, token, 5));
    CHECK(VALUE(pf_requests_fd(requests)) == fds[0]);
    CHECK(reported(requests).result == 5);
    OK(pf_free(shared, memory));
    OK(pf_requests_destroy(requests));
    OK(pf_owner_destroy(owner));
    OK(pf_arena_destroy(shared));
    for (int i = 0; i < 3; i++)
        CHECK(fcntl(fds[i], F_GETFD) >= 0 && close(fds[i]) == 0);
    /* And without another file. */
    requests = loop_of(PF_PROTECT_BATCH, 2, 0);
    CHECK(close((int)VALUE(pf_requests_fd(requests))) == 0);
    OK(pf_requests_destroy(requests));
}

/* Ends a loop with a request that is given up. Its addresses stay in use, and what the library keeps
 * for them is a leak that is meant: valgrind.supp names this function to valgrind. */
static void __attribute__((noinline)) lost_for_good(const struct pf_payload *payloads,
                                                    uint64_t *iovas) {
    uint64_t token;
    if (__lsan_disable)
        __lsan_disable();
    pf_requests_t *requests = loop_of(PF_PROTECT_BATCH, 4, 0);
    OK(pf_requests_begin(requests, payloads, 2, &token, iovas));
    if (__lsan_enable)
        __lsan_enable();
    OK(pf_requests_lost(requests, token));
    OK(pf_requests_destroy(requests));
}

/* An IOMMU that is slow, hangs, or fails, as pf_domain_soft_with() makes it. */
static void goes_wrong(void) {
    enum { SLOW, HANGS, FAILS };
    const uint64_t soon = 20000000;
    pf_domain_t *none = NULL;
    struct pf_domain_soft_opts opts = {.struct_size = 8};
    REFUSED(EINVAL, "sizeof", pf_domain_soft_with(&opts, &none));
    REFUSED(EFAULT, "`out` is NULL", pf_domain_soft_with(NULL, NULL));
    CHECK(none == NULL);
    OK(pf_domain_soft_with(NULL, &none));
    OK(pf_domain_destroy(none));
    for (int how = SLOW; how <= FAILS; how++) {
        opts = (struct pf_domain_soft_opts){.struct_size = sizeof opts, .timeout_ns = soon};
        opts.flush_ns = how == SLOW ? 10 * soon : 0;
        opts.hang_from = how == HANGS, opts.fail_from = how == FAILS ? 2 : 0;
        OK(pf_domain_soft_with(&opts, &domain));
        set_up();
        struct pf_requests_opts loop = {.struct_size = sizeof loop,
                                        .depth = 1,
                                        .flush_ns = soon,
                                        .protect = PF_PROTECT_BATCH};
        pf_requests_t *requests;
        OK(pf_requests_create(domain, &loop, &requests));
        char *memory = pf_alloc(arena, 4096, NULL);
        struct pf_payload payload = {memory, 4096, PF_BIDIR, 0};
        struct pf_held held = {.struct_size = sizeof held};
        struct pf_done done;
        uint64_t token, iova;
        /* The first flush succeeds where the second is the first to fail. */
        for (int i = how == FAILS ? 0 : 1; i < 2; i++) {
            OK(pf_requests_begin(requests, &payload, 1, &token, &iova));
            OK(pf_requests_completed(requests, token, 7));
            done = reported(requests);
            CHECK(done.token == token && done.result == 7);
            CHECK(i == 1 || done.end == PF_END_QUIESCED);
        }
        if (how != SLOW)
            REFUSED(EBUSY, "in use by 1", pf_free(arena, memory));
        if (how == SLOW) {
            /* Late, unless this thread has had no processor until the flush had completed. */
            if (done.end == PF_END_LATE)
                done = reported(requests);
            CHECK(done.token == token && done.end == PF_END_QUIESCED);
            OK(pf_free(arena, memory));
            OK(pf_requests_destroy(requests));
            continue;
        } else if (how == HANGS) {
            CHECK(done.end == PF_END_LATE && done.error == -ETIMEDOUT);
            char why[512];
            VALUE(pf_quarantine(domain, &held, why, sizeof why));
            CHECK(held.quarantined == 0 && held.lost == 0);
            CHECK(strstr(why, "4096 bytes were revoked, and are in use") != NULL);
        } else {
            CHECK(done.end == PF_END_LOST && done.error == -EIO);
            char why[512];
            VALUE(pf_quarantine(domain, &held, why, sizeof why));
            CHECK(held.quarantined == 1 && held.quarantined_bytes == 4096 && held.lost == 0);
            CHECK(strstr(why, "1 mapping (4096 bytes) could not be revoked") != NULL);
            CHECK(held.process_bytes == 0);
            /* Beside one that is given up for good, which is counted as that. */
            uint64_t iovas[2];
            char *two = pf_alloc(arena, 8192, NULL);
            struct pf_payload payloads[] = {{two, 1, PF_BIDIR, 0}, {two + 4096, 1, PF_BIDIR, 0}};
            lost_for_good(payloads, iovas);
            VALUE(pf_quarantine(domain, &held, why, sizeof why));
            CHECK(held.quarantined == 1 && held.quarantined_bytes == 4096 && held.lost == 1);
        }
        /* A call that waits. */
        pf_owner_t *owner;
        pf_map_t map;
        char *other = pf_alloc(arena, 4096, NULL);
        OK(pf_owner_create(domain, &owner));
        OK(pf_map(owner, other, 4096, PF_BIDIR, &map, &iova));
        REFUSED(how == FAILS ? EIO : ETIMEDOUT, "flush", pf_unmap(owner, map));
    }
}

/* What was given up is counted until it has ended, and for good where its loop has ended. */
static void given_up(void) {
    pf_requests_t *requests = loop_of(PF_PROTECT_BATCH, 4, 0);
    struct pf_held held = {.struct_size = sizeof held}, before = held;
    char *memory = pf_alloc(arena, 3 * 4096, NULL), why[1024];
    uint64_t whole_iova, tokens[3], iovas[2];
    char *kept = pf_alloc(whole, 4096, &whole_iova);
    struct pf_payload payloads[] = {{memory + 4000, 200, PF_BIDIR, 0}, {kept, 1, PF_BIDIR, 0}};
    VALUE(pf_quarantine(domain, &before, why, sizeof why));
    CHECK(before.lost == 0 && before.lost_bytes == 0 && strstr(why, "no memory is held") != NULL);
    for (int i = 0; i < 3; i++) {
        OK(pf_requests_begin(requests, payloads, 2, &tokens[i], iovas));
        OK(pf_requests_lost(requests, tokens[i]));
        REFUSED(ESTALE, "given up", pf_requests_refused(requests, tokens[i]));
        REFUSED(ESTALE, "given up", pf_requests_lost(requests, tokens[i]));
    }
    VALUE(pf_quarantine(domain, &held, why, sizeof why));
    CHECK(held.lost == 3 && held.lost_bytes == 3 * 3 * 4096 && held.quarantined == 0);
    CHECK(strstr(why, "given up: 3 requests (36864 bytes)") != NULL);
    /* Not that of slot 0, which ends with the rest. */
    OK(pf_requests_completed(requests, tokens[pf_token_slot(tokens[0]) == 0], 0));
    VALUE(pf_quarantine(domain, &held, why, sizeof why));
    CHECK(held.lost == 2 && held.lost_bytes == 2 * 3 * 4096);
    OK(pf_requests_stopped(requests));
    VALUE(pf_quarantine(domain, &held, why, sizeof why));
    CHECK(held.lost == 0 && held.lost_bytes == 0 && strstr(why, "no memory is held") != NULL);
    for (int i = 0; i < 3; i++)
        CHECK(reported(requests).end == PF_END_STAYS_MAPPED);
    OK(pf_requests_destroy(requests));
    /* For good: the memory is in use, and counted once. */
    lost_for_good(payloads, iovas);
    VALUE(pf_quarantine(domain, &held, why, sizeof why));
    CHECK(held.lost == 1 && held.lost_bytes == 3 * 4096);
    CHECK(held.quarantined == 0 && held.quarantined_bytes == 0 && held.deferred == 0);
    CHECK(held.process_bytes == before.process_bytes);
    CHECK(strstr(why, "1 request (12288 bytes) had been given up when their loop") != NULL);
    CHECK(strstr(why, "invalidation unit") == NULL && strstr(why, "given up: ") == NULL);
    REFUSED(EBUSY, "in use by 1 mapping or request", pf_free(arena, memory));
    REFUSED(EBUSY, "in use by 1 mapping or request", pf_free(whole, kept));
    /* What is in use for good is the domain's until the process ends. */
    OK(pf_port_write(port, iovas[0], "late", 4));
}

static int between(uintptr_t first, const void *caller, uintptr_t last) {
    return first < (uintptr_t)caller && (uintptr_t)caller < last;
}

/* Each payload is mapped once and revoked once, in the call that says so. */
static void traced(void) {
    events = 0;
    pf_requests_t *requests = loop_of(PF_PROTECT_STRICT, 4, 0);
    char *memory = pf_alloc(arena, 3 * 4096, NULL);
    struct pf_payload payloads[] = {{memory + 7, 100, PF_TO_DEVICE, 0},
                                    {memory + 4096, 8192, PF_FROM_DEVICE, 0}};
    uint64_t tokens[3], iovas[2];
    pf_trace_set(note, &events, NULL);
    uintptr_t before = here();
    int begun = pf_requests_begin(requests, payloads, 2, tokens, iovas);
    uintptr_t start = here();
    OK(begun);
    CHECK(events == 2 && seen[0].kind == PF_EVENT_MAP && seen[1].kind == PF_EVENT_MAP);
    CHECK(seen[0].va == memory + 7 && seen[0].iova == iovas[0] && seen[0].len == 100);
    CHECK(seen[1].va == memory + 4096 && seen[1].iova == iovas[1] && seen[1].len == 8192);
    CHECK(seen[0].handle == (uint64_t)(uintptr_t)requests);
    CHECK(between(before, seen[0].caller, start) && between(before, seen[1].caller, start));
    for (int i = 1; i < 3; i++)
        OK(pf_requests_begin(requests, payloads, 2, &tokens[i], iovas));
    events = 0;
    OK(pf_requests_lost(requests, tokens[2]));
    CHECK(events == 0);
    start = here();
    int completed = pf_requests_completed(requests, tokens[0], 0);
    uintptr_t second = here();
    int refused = pf_requests_refused(requests, tokens[1]);
    uintptr_t third = here();
    int stopped = pf_requests_stopped(requests);
    uintptr_t end = here();
    OK(completed), OK(refused), OK(stopped);
    CHECK(events == 6);
    for (int i = 0; i < 6; i++) {
        CHECK(seen[i].kind == PF_EVENT_REVOKE && seen[i].va == payloads[i % 2].va);
        CHECK(seen[i].len == payloads[i % 2].len && seen[i].iova != 0);
    }
    CHECK(between(start, seen[1].caller, second) && between(second, seen[3].caller, third));
    CHECK(between(third, seen[5].caller, end));
    CHECK(reported(requests).token == tokens[0] && reported(requests).token == tokens[2]);
    OK(pf_requests_stopped(requests));
    CHECK(events == 6);
    pf_trace_set(NULL, NULL, NULL);
    OK(pf_free(arena, memory));
    OK(pf_requests_destroy(requests));
}

static void *disturb(void *requests) {
    struct pf_done done;
    for (int i = 0; i < 20000; i++) {
        int result = pf_requests_poll(requests, &done, 0);
        CHECK(result == 0 || result == -EBUSY);
    }
    return NULL;
}

static void call_again(void *loop, const struct pf_event *event) {
    struct pf_done done;
    (void)event;
    REFUSED(EBUSY, "whose hook makes this call", pf_requests_poll(loop, &done, 1));
}

/* A hook cannot call the loop whose call it is in, and is told that it is this call. */
static void by_its_hook(void) {
    pf_requests_t *requests = loop_of(PF_PROTECT_STRICT, 1, 0);
    struct pf_payload payload = {pf_alloc(arena, 4096, NULL), 4096, PF_BIDIR, 0};
    uint64_t token, iova;
    pf_trace_set(call_again, requests, NULL);
    OK(pf_requests_begin(requests, &payload, 1, &token, &iova));
    pf_trace_set(NULL, NULL, NULL);
    OK(pf_requests_refused(requests, token));
    OK(pf_free(arena, payload.va));
    OK(pf_requests_destroy(requests));
}

/* Two threads with one loop: each call is refused, or alone. */
static void by_two_threads(void) {
    pf_requests_t *requests = loop_of(PF_PROTECT_BATCH, 2, 0);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, disturb, requests) == 0);
    for (int i = 0; i < 2000; i++) {
        struct pf_done done;
        uint64_t token;
        int result;
        while ((result = pf_requests_begin(requests, NULL, 0, &token, NULL)) == -EBUSY)
            sched_yield();
        OK(result);
        while ((result = pf_requests_completed(requests, token, 0)) == -EBUSY)
            sched_yield();
        OK(result);
        while ((result = pf_requests_poll(requests, &done, 1)) == -EBUSY)
            sched_yield();
        CHECK(VALUE(result) == 1 && done.token == token);
    }
    CHECK(pthread_join(thread, NULL) == 0);
    OK(pf_requests_destroy(requests));
}

int main(void) {
    OK(pf_domain_soft(&domain));
    set_up();
    refusals();
    for (int i = 0; i < 3; i++) {
        there_and_back(protections[i]);
        otherwise(protections[i]);
    }
    slots();
    stays();
    descriptor();
    closed_by_the_program();
    traced();
    by_its_hook();
    by_two_threads();
    /* A loop keeps its domain. */
    pf_requests_t *requests = loop_of(PF_PROTECT_STRICT, 1, 0);
    OK(pf_port_destroy(port));
    OK(pf_arena_destroy(whole));
    OK(pf_domain_destroy(domain));
    char *memory = pf_alloc(arena, 4096, NULL);
    struct pf_payload payload = {memory, 4096, PF_FROM_DEVICE, 0};
    uint64_t token, iova;
    OK(pf_requests_begin(requests, &payload, 1, &token, &iova));
    OK(pf_requests_completed(requests, token, 0));
    CHECK(reported(requests).token == token);
    OK(pf_free(arena, memory));
    OK(pf_requests_destroy(requests));
    OK(pf_domain_soft(&domain));
    set_up();
    given_up();
    goes_wrong();
    puts("requests: ok");
    return 0;
}
