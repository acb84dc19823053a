/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Writes to an NVMe controller and reads it back, eight requests in flight: the device reaches each
 * buffer only during its request. The controller is a model; a real one differs in two lines. */
#include <pinfold.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEPTH = 8, REQUESTS = 64, BYTES = 64 << 10 };

static int check(int result) {
    if (result < 0) {
        fprintf(stderr, "%s\n", pf_strerror_last());
        exit(1);
    }
    return result;
}

static void transfer(pf_queue_t *queue, uint32_t op, char *buffers[DEPTH]) {
    uint64_t number[DEPTH]; /* the request that has the buffer */
    unsigned int free[DEPTH], n_free = DEPTH, submitted = 0, done = 0;

    for (unsigned int i = 0; i < DEPTH; i++)
        free[i] = i;
    while (done < REQUESTS) {
        for (; n_free > 0 && submitted < REQUESTS; submitted++) {
            unsigned int i = free[--n_free];
            struct iovec iov = {buffers[i], BYTES}; /* pf_submit() copies it */
            struct pf_request request = {.op = op, .nsid = 1, .iov = &iov, .iovcnt = 1,
                                         .offset = (uint64_t)submitted * BYTES, .user_data = i};
            memset(buffers[i], op == PF_WRITE ? (int)submitted : 0xff, BYTES);
            number[i] = submitted;
            check(pf_submit(queue, &request, 1));
        }
        struct pf_completion completions[DEPTH];
        check(pf_queue_wait(queue, UINT64_MAX));
        for (int left = check(pf_complete(queue, completions, DEPTH)); left > 0; left--, done++) {
            unsigned int i = (unsigned int)completions[left - 1].user_data;
            char expected = (char)number[i];
            if (completions[left - 1].result < 0 || buffers[i][0] != expected ||
                memcmp(buffers[i], buffers[i] + 1, BYTES - 1) != 0) {
                fprintf(stderr, "request %u: %d\n", (unsigned int)number[i],
                        completions[left - 1].result);
                exit(1);
            }
            free[n_free++] = i;
        }
    }
}

static void flush(pf_queue_t *queue) {
    struct pf_request request = {.op = PF_FLUSH, .nsid = 1};
    struct pf_completion completion;

    check(pf_submit(queue, &request, 1));
    check(pf_queue_wait(queue, UINT64_MAX));
    if (check(pf_complete(queue, &completion, 1)) != 1 || completion.result < 0)
        exit(1);
}

int main(void) {
    /* The controller's own memory; and the buffers, which it reaches only during requests. */
    struct pf_arena_opts rings = {
        .struct_size = sizeof rings, .size = 2 << 20, .policy = PF_POLICY_WHOLE};
    struct pf_arena_opts data = {.struct_size = sizeof data, .size = 4 << 20};
    /* With `bdf` it is a device. */
    struct pf_nvme_opts model = {.struct_size = sizeof model, .size = 16 << 20};
    struct pf_queue_opts options = {
        .struct_size = sizeof options, .depth = DEPTH, .protect = PF_PROTECT_BATCH};
    pf_domain_t *domain;
    pf_arena_t *own, *arena;
    pf_nvme_t *nvme;
    pf_queue_t *queue;
    char *buffers[DEPTH];

    check(pf_domain_soft(&domain)); /* pf_domain_vfio("0000:01:00.0", PF_IOMMU_BEST, &domain) */
    check(pf_arena_create(domain, &rings, &own));
    check(pf_arena_create(domain, &data, &arena));
    check(pf_nvme_open(domain, own, &model, &nvme));
    check(pf_queue_create(nvme, &options, &queue));
    for (int i = 0; i < DEPTH; i++)
        check((buffers[i] = pf_alloc(arena, BYTES, NULL)) == NULL ? -1 : 0);

    transfer(queue, PF_WRITE, buffers);
    flush(queue);
    transfer(queue, PF_READ, buffers);
    printf("%d requests of %d bytes, written, flushed and read\n", REQUESTS, BYTES);

    check(pf_queue_destroy(queue));
    check(pf_nvme_destroy(nvme));
    for (int i = 0; i < DEPTH; i++)
        check(pf_free(arena, buffers[i]));
    check(pf_arena_destroy(arena));
    check(pf_arena_destroy(own));
    check(pf_domain_destroy(domain));
    return 0;
}
