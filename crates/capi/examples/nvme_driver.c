/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * A driver for an NVMe controller in C, as far as reads go: identifies it, and makes 100,000 random
 * reads of 16 KiB at a depth of 32, each of which the controller reaches its buffer for, and no longer.
 * PRP lists are in blocks of a pool. (pf_nvme_open() is the library's own driver.) Without hardware:
 *
 *     pinfold check --nvme soft:64M -- ./nvme_driver 0000:01:00.0 */
#include <errno.h>
#include <pinfold.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define FIRST "0000:01:00.0"

enum { CAP = 0, CC = 0x14, CSTS = 0x1c, AQA = 0x24, ASQ = 0x28, ACQ = 0x30, DOORBELLS = 0x1000 };
enum { IDENTIFY = 6, CREATE_SQ = 1, CREATE_CQ = 5, DELETE_SQ = 0, DELETE_CQ = 4, READ = 2 };
enum { DEPTH = 32, ENTRIES = 64, READS = 100000, BYTES = 16384, PAGE = 4096 };

/* A submission queue and its completion queue, a page each. */
struct queue {
    uint32_t (*commands)[16], (*completions)[4];
    uint32_t id, entries, tail, head, phase;
};

struct controller {
    pf_device_t *device;
    struct pf_bar bar;
    uint32_t stride, block_bytes, read_bytes;
    uint64_t blocks;
    struct queue admin, io;
    char *data; /* what it says of itself */
    uint64_t memory_iova;
};

static int check(int result) {
    if (result < 0) {
        fprintf(stderr, "%s\n", pf_strerror_last());
        exit(1);
    }
    return result;
}

static void fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    exit(1);
}

static void wait_status(struct controller *nvme, uint32_t mask, uint32_t value) {
    for (int i = 0; (pf_read32(&nvme->bar, CSTS) & mask) != value; i++) {
        if (i == 30000)
            fail("the controller does not answer");
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
}

/* Appends a command and rings the doorbell; `cdw` are its words 10 to 12. */
static void submit(struct controller *nvme, struct queue *queue, uint32_t opcode, uint32_t id,
                   uint32_t nsid, const uint64_t prp[2], const uint32_t cdw[3]) {
    uint32_t *command = queue->commands[queue->tail];
    memset(command, 0, 64);
    command[0] = opcode | id << 16;
    command[1] = nsid;
    memcpy(command + 6, prp, 16);
    memcpy(command + 10, cdw, 12);
    queue->tail = (queue->tail + 1) % queue->entries;
    pf_write32(&nvme->bar, DOORBELLS + 2 * queue->id * nvme->stride, queue->tail);
}

/* Takes a completion: returns the number of its command, or -1 if there is none. */
static int complete(struct controller *nvme, struct queue *queue, uint32_t *status) {
    uint32_t *completion = queue->completions[queue->head];
    uint32_t word = __atomic_load_n(&completion[3], __ATOMIC_ACQUIRE);
    if ((word >> 16 & 1) != queue->phase)
        return -1;
    *status = word >> 17;
    queue->head = (queue->head + 1) % queue->entries;
    queue->phase ^= queue->head == 0;
    pf_write32(&nvme->bar, DOORBELLS + (2 * queue->id + 1) * nvme->stride, queue->head);
    return (int)(word & 0xffff);
}

static void admin(struct controller *nvme, uint32_t opcode, uint32_t nsid, uint64_t prp1,
                  uint32_t cdw10, uint32_t cdw11) {
    uint32_t status;
    submit(nvme, &nvme->admin, opcode, 0, nsid, (uint64_t[]){prp1, 0}, (uint32_t[]){cdw10, cdw11, 0});
    while (complete(nvme, &nvme->admin, &status) < 0) {
    }
    if (status != 0)
        fail("the controller refuses an admin command");
}

/* Brings the controller up with a queue for reads. `memory` has five pages that it always reaches. */
static void start(struct controller *nvme, char *memory) {
    uint64_t iova = nvme->memory_iova;
    struct queue *queues[] = {&nvme->admin, &nvme->io};
    memset(memory, 0, 5 * PAGE);
    for (uint32_t id = 0; id < 2; id++)
        *queues[id] = (struct queue){.commands = (void *)(memory + 2 * id * PAGE),
                                     .completions = (void *)(memory + (2 * id + 1) * PAGE),
                                     .id = id, .entries = ENTRIES, .phase = 1};
    nvme->data = memory + 4 * PAGE;

    check(pf_device_bar(nvme->device, 0, &nvme->bar));
    check(pf_device_bus_master(nvme->device, 1));
    uint64_t cap = pf_read64(&nvme->bar, CAP);
    nvme->stride = 4u << (cap >> 32 & 15);
    if ((cap & 0xffff) + 1 < ENTRIES)
        nvme->admin.entries = nvme->io.entries = (uint32_t)(cap & 0xffff) + 1;
    pf_write32(&nvme->bar, CC, 0);
    wait_status(nvme, 1, 0);
    uint32_t last = nvme->admin.entries - 1;
    pf_write32(&nvme->bar, AQA, last << 16 | last);
    pf_write64(&nvme->bar, ASQ, iova);
    pf_write64(&nvme->bar, ACQ, iova + PAGE);
    pf_write32(&nvme->bar, CC, 4 << 20 | 6 << 16 | 1);
    wait_status(nvme, 1, 1);

    admin(nvme, IDENTIFY, 0, iova + 4 * PAGE, 1, 0);
    printf("model %.40s\n", nvme->data + 24);
    nvme->read_bytes = BYTES;
    if (nvme->data[77] != 0 && PAGE << nvme->data[77] < BYTES)
        nvme->read_bytes = (uint32_t)PAGE << nvme->data[77]; /* its largest transfer */
    admin(nvme, IDENTIFY, 1, iova + 4 * PAGE, 0, 0);
    memcpy(&nvme->blocks, nvme->data, 8);
    uint32_t format; /* the one in use, whose block is a power of two */
    memcpy(&format, nvme->data + 128 + 4 * (nvme->data[26] & 15), 4);
    nvme->block_bytes = 1u << (format >> 16 & 0xff);
    admin(nvme, CREATE_CQ, 0, iova + 3 * PAGE, last << 16 | 1, 1);
    admin(nvme, CREATE_SQ, 0, iova + 2 * PAGE, last << 16 | 1, 1 << 16 | 1);
}

static void stop(struct controller *nvme) {
    admin(nvme, DELETE_SQ, 0, 0, 1, 0);
    admin(nvme, DELETE_CQ, 0, 0, 1, 0);
    pf_write32(&nvme->bar, CC, 4 << 20 | 6 << 16 | 1 << 14 | 1); /* shutdown */
    wait_status(nvme, 3 << 2, 2 << 2);
    pf_write32(&nvme->bar, CC, 4 << 20 | 6 << 16);
    wait_status(nvme, 1, 0);
}

/* A read, by the slot of its token, which is the number of its command. */
struct read {
    uint64_t token;
    char *buffer;
    pf_block_t list; /* of PRP entries */
};

/* Reads at random; returns whether the queue had room for it. */
static int read_at_random(struct controller *nvme, pf_requests_t *requests, pf_cache_t *lists,
                          struct read *reads, char *buffer) {
    static uint64_t random = 88172645463325252;
    struct pf_payload payload = {.va = buffer, .len = nvme->read_bytes, .dir = PF_FROM_DEVICE};
    uint64_t token, iova;
    int begun = pf_requests_begin(requests, &payload, 1, &token, &iova);

    if (begun == -EAGAIN)
        return 0;
    check(begun);
    struct read *read = &reads[pf_token_slot(token)];
    *read = (struct read){.token = token, .buffer = buffer};
    check(pf_get(lists, &read->list));
    uint32_t pages = nvme->read_bytes / PAGE, blocks = nvme->read_bytes / nvme->block_bytes;
    uint64_t prp[2] = {iova, pages > 2 ? read->list.iova : iova + PAGE};
    for (uint32_t page = 1; page < pages; page++)
        ((uint64_t *)read->list.va)[page - 1] = iova + page * PAGE;
    if (pages == 1)
        prp[1] = 0;
    random ^= random << 13, random ^= random >> 7, random ^= random << 17;
    uint64_t at = random % (nvme->blocks - blocks + 1);
    uint32_t cdw[] = {(uint32_t)at, (uint32_t)(at >> 32), blocks - 1};
    submit(nvme, &nvme->io, READ, pf_token_slot(token), 1, prp, cdw);
    return 1;
}

static void read_all(struct controller *nvme, pf_requests_t *requests, pf_cache_t *lists,
                     char *buffers, int count) {
    struct read reads[2 * DEPTH];
    char *unused[2 * DEPTH];
    int n_unused = 2 * DEPTH, begun = 0, ended = 0, id;
    uint32_t status;

    for (int i = 0; i < 2 * DEPTH; i++)
        unused[i] = buffers + i * BYTES;
    while (ended < count) {
        while (n_unused > 0 && begun < count &&
               read_at_random(nvme, requests, lists, reads, unused[n_unused - 1])) {
            n_unused--;
            begun++;
        }
        while ((id = complete(nvme, &nvme->io, &status)) >= 0) {
            check(pf_requests_completed(requests, reads[id].token, status));
            check(pf_put(lists, &reads[id].list));
        }
        struct pf_done done[DEPTH];
        for (int left = check(pf_requests_poll(requests, done, DEPTH)); left > 0; left--, ended++) {
            if (done[left - 1].result != 0 || done[left - 1].end != PF_END_QUIESCED)
                fail("a read failed");
            unused[n_unused++] = reads[pf_token_slot(done[left - 1].token)].buffer;
        }
    }
}

int main(int argc, char **argv) {
    /* What the controller always reaches, and what it reaches during a request. */
    struct pf_arena_opts rings = {
        .struct_size = sizeof rings, .size = 1 << 20, .policy = PF_POLICY_WHOLE};
    struct pf_arena_opts data = {.struct_size = sizeof data, .size = 4 << 20};
    struct pf_pool_opts blocks = {.struct_size = sizeof blocks, .size = 32, .align = 32};
    struct pf_requests_opts loop = {
        .struct_size = sizeof loop, .depth = DEPTH, .protect = PF_PROTECT_BATCH};
    struct controller nvme = {0};
    pf_domain_t *domain;
    pf_arena_t *own, *arena;
    pf_pool_t *pool;
    pf_cache_t *lists;
    pf_requests_t *requests;
    int count = argc > 2 ? atoi(argv[2]) : READS;

    check(pf_domain_create(NULL, &domain));
    check(pf_arena_create(domain, &rings, &own));
    check(pf_arena_create(domain, &data, &arena));
    check(pf_pool_create(own, &blocks, &pool));
    check(pf_pool_cache(pool, &lists));
    check(pf_requests_create(domain, &loop, &requests));
    check(pf_device_open(domain, argc > 1 ? argv[1] : FIRST, &nvme.device));
    char *memory = pf_alloc(own, 5 * PAGE, &nvme.memory_iova);
    char *buffers = pf_alloc(arena, 2 * DEPTH * BYTES, NULL);
    check(memory != NULL && buffers != NULL ? 0 : -1);

    start(&nvme, memory);
    struct timespec since, now;
    clock_gettime(CLOCK_MONOTONIC, &since);
    read_all(&nvme, requests, lists, buffers, count);
    clock_gettime(CLOCK_MONOTONIC, &now);
    double seconds = (double)(now.tv_sec - since.tv_sec) + (double)(now.tv_nsec - since.tv_nsec) / 1e9;
    printf("%d reads of %u bytes in %.2f s\n", count, nvme.read_bytes, seconds);
    stop(&nvme);

    check(pf_device_destroy(nvme.device));
    check(pf_requests_destroy(requests));
    check(pf_cache_destroy(lists));
    check(pf_pool_destroy(pool));
    check(pf_free(own, memory));
    check(pf_free(arena, buffers));
    check(pf_arena_destroy(arena));
    check(pf_arena_destroy(own));
    check(pf_domain_destroy(domain));
    return 0;
}
