/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * A driver for a device that the library does not know, and a model of that device: the copy engine
 * of docs/guide.md. A descriptor says from where to where it copies; its address is written to the
 * engine's register SUBMIT. The engine reaches source and target during their request, and no longer.
 * The model is a thread with a port of the software IOMMU; with a real engine pf_device_open() and
 * pf_write64() take its place. */
#include <errno.h>
#include <pinfold.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { DEPTH = 4, COPIES = 64, BYTES = 4096, DONE = 1, FAULTED = 2 };

struct descriptor {
    uint64_t source, target; /* where the engine reads, and writes */
    uint32_t length;         /* bytes, BYTES at most */
    uint32_t status;         /* by the engine, last: DONE or FAULTED */
    uint64_t reserved;
};

static int check(int result) {
    if (result < 0) {
        fprintf(stderr, "%s\n", pf_strerror_last());
        exit(1);
    }
    return result;
}

/* The engine: carries out descriptors until nothing more can be submitted. */
struct engine {
    pf_port_t *port;
    int submitted; /* the end of a pipe: the register */
};

static void *run_engine(void *arg) {
    struct engine *engine = arg;
    struct descriptor copy;
    uint64_t at;
    char data[BYTES];

    while (read(engine->submitted, &at, sizeof at) == sizeof at) {
        check(pf_port_read(engine->port, at, &copy, sizeof copy));
        uint32_t length = copy.length < BYTES ? copy.length : BYTES, status = DONE;
        if (pf_port_read(engine->port, copy.source, data, length) < 0 ||
            pf_port_write(engine->port, copy.target, data, length) < 0)
            status = FAULTED;
        check(pf_port_write(engine->port, at + offsetof(struct descriptor, status), &status, 4));
    }
    return NULL;
}

/* The driver: of each request its descriptor, by the slot of its token. */
struct driver {
    pf_requests_t *requests;
    pf_cache_t *descriptors;
    int submit;
    struct {
        uint64_t token; /* 0: nothing is at the engine */
        pf_block_t descriptor;
        char *source, *target;
        uint64_t target_iova;
    } slots[2 * DEPTH];
};

/* Begins a copy; returns 0 if the engine has enough to do. */
static int submit(struct driver *driver, char *source, char *target) {
    struct pf_payload payloads[] = {{.va = source, .len = BYTES, .dir = PF_TO_DEVICE},
                                    {.va = target, .len = BYTES, .dir = PF_FROM_DEVICE}};
    uint64_t token, iovas[2];
    int begun = pf_requests_begin(driver->requests, payloads, 2, &token, iovas);

    if (begun == -EAGAIN)
        return 0;
    check(begun);
    pf_block_t block;
    if (pf_get(driver->descriptors, &block) < 0) {
        check(pf_requests_refused(driver->requests, token)); /* the engine has not seen it */
        return 0;
    }
    struct descriptor copy = {.source = iovas[0], .target = iovas[1], .length = BYTES};
    memcpy(block.va, &copy, sizeof copy);
    uint32_t slot = pf_token_slot(token);
    driver->slots[slot].token = token;
    driver->slots[slot].descriptor = block;
    driver->slots[slot].source = source;
    driver->slots[slot].target = target;
    driver->slots[slot].target_iova = iovas[1];
    if (write(driver->submit, &block.iova, sizeof block.iova) != sizeof block.iova)
        exit(1);
    return 1;
}

/* Says which requests have completed, and takes the reports of those whose memory is ours again. */
static int poll_driver(struct driver *driver, struct pf_done *done, unsigned int max) {
    for (int i = 0; i < 2 * DEPTH; i++) {
        if (driver->slots[i].token == 0)
            continue;
        struct descriptor *copy = driver->slots[i].descriptor.va;
        uint32_t status = __atomic_load_n(&copy->status, __ATOMIC_ACQUIRE);
        if (status == 0)
            continue;
        check(pf_requests_completed(driver->requests, driver->slots[i].token, status));
        check(pf_put(driver->descriptors, &driver->slots[i].descriptor));
        driver->slots[i].token = 0;
    }
    return check(pf_requests_poll(driver->requests, done, max));
}

int main(void) {
    struct pf_arena_opts memory = {.struct_size = sizeof memory, .size = 4 << 20};
    struct pf_pool_opts blocks = {.struct_size = sizeof blocks, .size = sizeof(struct descriptor),
                                  .align = sizeof(struct descriptor)};
    struct pf_requests_opts loop = {
        .struct_size = sizeof loop, .depth = DEPTH, .protect = PF_PROTECT_BATCH};
    struct driver driver = {0};
    struct engine engine;
    pf_domain_t *domain;
    pf_arena_t *arena;
    pf_pool_t *pool;
    pthread_t thread;
    int pipe_fds[2], submitted = 0, copied = 0;
    char *buffers[2 * DEPTH], *free_buffers[2 * DEPTH], *last;
    unsigned int n_free = 2 * DEPTH;

    check(pf_domain_soft(&domain));
    check(pf_arena_create(domain, &memory, &arena));
    check(pf_pool_create(arena, &blocks, &pool));
    check(pf_pool_cache(pool, &driver.descriptors));
    check(pf_requests_create(domain, &loop, &driver.requests));
    check(pf_port_open(domain, &engine.port));
    if (pipe(pipe_fds) != 0)
        return 1;
    engine.submitted = pipe_fds[0];
    driver.submit = pipe_fds[1];
    if (pthread_create(&thread, NULL, run_engine, &engine) != 0)
        return 1;
    for (int i = 0; i < 2 * DEPTH; i++)
        if ((free_buffers[i] = buffers[i] = pf_alloc(arena, 2 * BYTES, NULL)) == NULL)
            check(-1);

    while (copied < COPIES) {
        for (; n_free > 0 && submitted < COPIES; submitted++) {
            char *buffer = free_buffers[n_free - 1]; /* its second half is the target */
            memset(buffer, submitted, BYTES);
            if (!submit(&driver, buffer, buffer + BYTES))
                break;
            n_free--;
        }
        struct pf_done done[DEPTH];
        for (int left = poll_driver(&driver, done, DEPTH); left > 0; left--) {
            uint32_t slot = pf_token_slot(done[left - 1].token);
            last = driver.slots[slot].source;
            if (done[left - 1].end != PF_END_QUIESCED)
                return fprintf(stderr, "the engine still reaches a copy: end %u\n",
                               (unsigned int)done[left - 1].end), 1;
            if (done[left - 1].result != DONE ||
                memcmp(last, driver.slots[slot].target, BYTES) != 0)
                return fprintf(stderr, "a copy failed\n"), 1;
            free_buffers[n_free++] = last;
            copied++;
        }
    }
    printf("%d copies of %d bytes\n", copied, BYTES);

    close(driver.submit);
    pthread_join(thread, NULL);
    close(engine.submitted);
    /* An engine that writes once more reaches nothing. */
    if (pf_port_write(engine.port, driver.slots[0].target_iova, "late", 4) != -EFAULT)
        return fprintf(stderr, "the target of a copy that has ended is still reached\n"), 1;
    printf("%s\n", pf_strerror_last());
    struct pf_fault fault = {.struct_size = sizeof fault};
    check(pf_port_fault(engine.port, &fault));
    if (fault.count != 1 || fault.kind != PF_FAULT_NOT_MAPPED)
        return fprintf(stderr, "the engine faulted before\n"), 1;
    check(pf_port_destroy(engine.port));
    check(pf_requests_destroy(driver.requests));
    check(pf_cache_destroy(driver.descriptors));
    check(pf_pool_destroy(pool));
    for (int i = 0; i < 2 * DEPTH; i++)
        check(pf_free(arena, buffers[i]));
    check(pf_arena_destroy(arena));
    check(pf_domain_destroy(domain));
    return 0;
}
