/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * exchange: memory of libpinfold in libblkio, and memory of libblkio in libpinfold.
 *
 *     exchange FILE          FILE has at least 2 MiB; its second MiB is overwritten
 *
 * The first MiB of the file goes to an NVMe controller and back into the file, behind itself:
 *
 *     file --libblkio--> arena of libpinfold --NVMe--> controller
 *     file <--libblkio-- region of libblkio  <--NVMe-- controller
 *
 * The arena is a memfd. Another process maps its descriptor and has libblkio read the file into it.
 * The region is libblkio's; this process maps its descriptor a second time, and registers that with
 * the domain. No byte is copied by the program, or between the two libraries: each finds the data
 * that the other has written at its own address of the same page. The controller is libpinfold's
 * model behind its software IOMMU, so the program needs no device and no privileges. */
#include <blkio.h>
#include <fcntl.h>
#include <pinfold.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BYTES = 1 << 20 };

static void fail(const char *what, const char *why) {
    fprintf(stderr, "exchange: %s: %s\n", what, why);
    exit(1);
}

/* Ends the program if a call of libpinfold failed; its value otherwise. */
static long pf(long value, const char *what) {
    if (value < 0)
        fail(what, pf_strerror_last());
    return value;
}

/* Ends the program if a call of libblkio failed. */
static void blk(int value, const char *what) {
    if (value < 0)
        fail(what, blkio_get_error_msg());
}

/* Opens the file with libblkio's io_uring driver, with one queue. */
static struct blkioq *blkio_open(const char *path, struct blkio **b) {
    blk(blkio_create("io_uring", b), "blkio_create");
    blk(blkio_set_str(*b, "path", path), "path");
    blk(blkio_connect(*b), "blkio_connect");
    blk(blkio_set_int(*b, "num-queues", 1), "num-queues");
    blk(blkio_start(*b), "blkio_start");
    return blkio_get_queue(*b, 0);
}

static void blkio_finish(struct blkioq *queue, const char *what) {
    struct blkio_completion done;
    if (blkioq_do_io(queue, &done, 1, 1, NULL) != 1)
        fail(what, blkio_get_error_msg());
    if (done.ret != 0)
        fail(what, done.error_msg != NULL ? done.error_msg : strerror(-done.ret));
}

/* Another process: maps the arena's descriptor, and reads the file into the arena. */
static void read_into(const char *path, const struct pf_region *arena, size_t offset) {
    char *mapped = mmap(NULL, arena->len, PROT_READ | PROT_WRITE, MAP_SHARED, arena->fd,
                        arena->fd_offset);
    if (mapped == MAP_FAILED)
        fail("mmap", "of the arena's descriptor");
    struct blkio *b;
    struct blkioq *queue = blkio_open(path, &b);
    struct blkio_mem_region region = {.addr = mapped, .len = arena->len, .fd = arena->fd,
                                      .fd_offset = arena->fd_offset};
    blk(blkio_map_mem_region(b, &region), "blkio_map_mem_region");
    blkioq_read(queue, 0, mapped + offset, BYTES, NULL, 0);
    blkio_finish(queue, "reading the file");
    blkio_unmap_mem_region(b, &region);
    blkio_destroy(&b);
    munmap(mapped, arena->len);
}

/* Transfers BYTES from or to the start of the controller's first namespace. */
static void nvme(pf_queue_t *queue, uint32_t op, void *memory, const char *what) {
    struct iovec part = {.iov_base = memory, .iov_len = BYTES};
    struct pf_request request = {.op = op, .nsid = 1, .iov = &part, .iovcnt = 1};
    struct pf_completion done;
    if (pf(pf_submit(queue, &request, 1), what) != 1)
        fail(what, "it was not accepted");
    while (pf(pf_complete(queue, &done, 1), what) == 0)
        pf(pf_queue_wait(queue, 1000000000), what);
    if (done.result != 0)
        fail(what, strerror(-done.result));
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: exchange FILE\n");
        return 2;
    }
    const char *path = argv[1];

    /* libpinfold: a domain, an arena that is a memfd, and a controller. */
    pf_domain_t *domain;
    pf_arena_t *arena, *rings;
    pf_nvme_t *controller;
    pf_queue_t *queue;
    struct pf_arena_opts opts = {.struct_size = sizeof opts, .size = 4 * BYTES,
                                 .sources = PF_SOURCE_MEMFD, .policy = PF_POLICY_WHOLE};
    pf(pf_domain_soft(&domain), "pf_domain_soft");
    pf(pf_arena_create(domain, &opts, &arena), "pf_arena_create");
    opts.sources = 0;
    pf(pf_arena_create(domain, &opts, &rings), "pf_arena_create");
    struct pf_nvme_opts model = {.struct_size = sizeof model, .size = 8 * BYTES};
    pf(pf_nvme_open(domain, rings, &model, &controller), "pf_nvme_open");
    /* Memory that libblkio allocates is registered, so it stays mapped, and the arena may as well. */
    struct pf_queue_opts depth = {
        .struct_size = sizeof depth, .depth = 4, .protect = PF_PROTECT_STATIC};
    pf(pf_queue_create(controller, &depth, &queue), "pf_queue_create");

    /* Export: another process reads the file into the arena; the controller takes it from there. */
    char *ours = pf_alloc(arena, BYTES, NULL);
    if (ours == NULL)
        fail("pf_alloc", pf_strerror_last());
    struct pf_region exported = {.struct_size = sizeof exported};
    pf(pf_arena_region(arena, &exported), "pf_arena_region");
    pid_t child = fork();
    if (child == 0) {
        read_into(path, &exported, (size_t)(ours - (char *)exported.addr));
        _exit(0);
    }
    int status = 1;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0)
        fail("the other process", "it failed");
    nvme(queue, PF_WRITE, ours, "writing to the controller");

    /* Import: the controller writes into libblkio's region, which goes to the file. */
    struct blkio *b;
    struct blkioq *file = blkio_open(path, &b);
    struct blkio_mem_region theirs;
    blk(blkio_alloc_mem_region(b, &theirs, BYTES), "blkio_alloc_mem_region");
    blk(blkio_map_mem_region(b, &theirs), "blkio_map_mem_region");
    char *imported =
        mmap(NULL, theirs.len, PROT_READ | PROT_WRITE, MAP_SHARED, theirs.fd, theirs.fd_offset);
    if (imported == MAP_FAILED)
        fail("mmap", "of the region's descriptor");
    pf_reg_t *registered;
    pf(pf_register(domain, imported, theirs.len, &registered), "pf_register");
    nvme(queue, PF_READ, imported, "reading from the controller");
    blkioq_write(file, BYTES, theirs.addr, BYTES, NULL, 0);
    blkio_finish(file, "writing the file");
    blkioq_flush(file, NULL, 0);
    blkio_finish(file, "flushing the file");

    pf(pf_reg_destroy(registered), "pf_reg_destroy");
    munmap(imported, theirs.len);
    blkio_unmap_mem_region(b, &theirs);
    blkio_free_mem_region(b, &theirs);
    blkio_destroy(&b);
    pf(pf_queue_destroy(queue), "pf_queue_destroy");
    pf(pf_nvme_destroy(controller), "pf_nvme_destroy");
    pf(pf_free(arena, ours), "pf_free");
    pf(pf_arena_destroy(arena), "pf_arena_destroy");
    pf(pf_arena_destroy(rings), "pf_arena_destroy");
    pf(pf_domain_destroy(domain), "pf_domain_destroy");
    printf("%d bytes: file, arena of libpinfold, controller, region of libblkio, file\n", BYTES);
    return 0;
}
