/* NVM commands of the program's own in a queue: their data, their order with other requests, and every
 * misuse. */
#include "check.h"

enum { FLUSH = 0, WRITE = 1, READ = 2, COMPARE = 5, ZEROES = 8, DSM = 9, CANCEL = 0x18 };

static pf_nvme_t *nvme;
static pf_arena_t *whole, *per_use;

static struct pf_nvme_command blocks(uint32_t opcode, uint32_t first, uint32_t count) {
    return (struct pf_nvme_command){.struct_size = sizeof(struct pf_nvme_command), .opcode = opcode,
                                    .cdw10 = first, .cdw12 = count - 1};
}

static struct pf_request request(const struct pf_nvme_command *command, struct iovec *part) {
    return (struct pf_request){.op = PF_COMMAND, .nsid = 1, .iov = part, .command = command,
                               .iovcnt = part != NULL && part->iov_len > 0, .user_data = 7};
}

static struct pf_completion completed(pf_queue_t *queue) {
    struct pf_completion done;
    CHECK(VALUE(pf_queue_wait(queue, 60000000000u)) >= 1);
    CHECK(VALUE(pf_complete(queue, &done, 1)) == 1 && done.user_data == 7 && done.reserved == 0);
    return done;
}

static struct pf_completion run(pf_queue_t *queue, struct pf_nvme_command command, void *memory,
                                size_t len) {
    struct iovec part = {memory, len};
    struct pf_request one = request(&command, &part);
    CHECK(VALUE(pf_submit(queue, &one, 1)) == 1);
    return completed(queue);
}

/* What one writes, another reads: commands of the program's own, and the library's. */
static void moves(uint32_t protect) {
    struct pf_queue_opts opts = {.struct_size = sizeof opts, .depth = 8, .protect = protect};
    pf_arena_t *arena = protect == PF_PROTECT_STATIC ? whole : per_use;
    pf_queue_t *queue;
    OK(pf_queue_create(nvme, &opts, &queue));
    char *memory = pf_alloc(arena, 16384, NULL);
    for (int i = 0; i < 8192; i++)
        memory[i] = (char)(i * 7 + 1);
    CHECK(run(queue, blocks(WRITE, 8, 16), memory, 8192).result == 0);
    struct iovec part = {memory + 8192, 8192};
    struct pf_request read = {
        .op = PF_READ, .nsid = 1, .offset = 4096, .iov = &part, .iovcnt = 1, .user_data = 7};
    CHECK(VALUE(pf_submit(queue, &read, 1)) == 1 && completed(queue).result == 0);
    CHECK(memcmp(memory, memory + 8192, 8192) == 0);
    CHECK(run(queue, blocks(ZEROES, 8, 8), NULL, 0).result == 0);
    CHECK(run(queue, blocks(READ, 8, 16), memory + 8192, 8192).result == 0);
    for (int i = 0; i < 4096; i++)
        CHECK(memory[8192 + i] == 0 && memory[12288 + i] == memory[4096 + i]);
    /* Dataset management: a range of 16 bytes. */
    struct pf_nvme_command discard = blocks(DSM, 0, 1);
    const uint32_t range[4] = {0, 8, 16, 0};
    memcpy(memory, range, sizeof range);
    discard.cdw11 = 4, discard.nsid = 1;
    CHECK(run(queue, discard, memory, 16).result == 0);
    CHECK(run(queue, blocks(READ, 16, 8), memory + 8192, 4096).result == 0 && memory[8192] == 0);
    CHECK(run(queue, blocks(FLUSH, 0, 1), NULL, 0).result == 0);
    /* One that the controller does not know: its status, and the memory is the program's again. */
    struct pf_completion done = run(queue, blocks(COMPARE, 0, 8), memory, 4096);
    CHECK(done.result == -EIO && (done.status & 0x7ff) == 1);
    OK(pf_free(arena, memory));
    OK(pf_queue_destroy(queue));
}

/* A command is in the order of the requests that have blocks in common with it. */
static void ordered(void) {
    struct pf_queue_opts opts = {.struct_size = sizeof opts, .depth = 64};
    pf_queue_t *queue;
    OK(pf_queue_create(nvme, &opts, &queue));
    char *memory = pf_alloc(per_use, 33 * 4096, NULL);
    struct pf_request all[33];
    struct pf_nvme_command commands[33];
    struct iovec parts[33];
    for (int i = 0; i < 32; i++) {
        memset(memory + i * 4096, i + 1, 4096);
        commands[i] = blocks(WRITE, 64, 8);
        parts[i] = (struct iovec){memory + i * 4096, 4096};
        all[i] = request(&commands[i], &parts[i]);
        if (i % 2 == 1)
            all[i].op = PF_WRITE, all[i].offset = 64 * 512, all[i].command = NULL;
    }
    commands[32] = blocks(READ, 64, 8);
    parts[32] = (struct iovec){memory + 32 * 4096, 4096};
    all[32] = request(&commands[32], &parts[32]);
    CHECK(VALUE(pf_submit(queue, all, 33)) == 33);
    for (int i = 0; i < 33; i++)
        CHECK(completed(queue).result == 0);
    for (int i = 0; i < 4096; i++)
        CHECK(memory[32 * 4096 + i] == 32);
    OK(pf_free(per_use, memory));
    OK(pf_queue_destroy(queue));
}

static void refusals(void) {
    struct pf_queue_opts opts = {.struct_size = sizeof opts, .depth = 2};
    pf_queue_t *queue;
    OK(pf_queue_create(nvme, &opts, &queue));
    char *memory = pf_alloc(per_use, 8192, NULL);
    struct iovec part = {memory, 4096}, none = {memory, 0};
    struct pf_nvme_command command = blocks(READ, 0, 8);
    struct pf_request one = request(&command, &part);
    one.command = NULL;
    REFUSED(EINVAL, "PF_COMMAND has one", pf_submit(queue, &one, 1));
    one = request(&command, &part), one.op = PF_READ;
    REFUSED(EINVAL, "PF_COMMAND has one", pf_submit(queue, &one, 1));
    one = request(&command, &part), one.offset = 4096;
    REFUSED(EINVAL, "its own words", pf_submit(queue, &one, 1));
    one = request(&command, &none), one.len = 4096;
    REFUSED(EINVAL, "its own words", pf_submit(queue, &one, 1));
    one = request(&command, &part), one.len = 512;
    REFUSED(EINVAL, "set `len` to 0", pf_submit(queue, &one, 1));
    one = request(&command, &part), command.struct_size = 8;
    REFUSED(EINVAL, "first field to sizeof", pf_submit(queue, &one, 1));
    command = blocks(READ, 0, 8), command.nsid = 2;
    REFUSED(EINVAL, "set it to 0", pf_submit(queue, &one, 1));
    command = blocks(0x102, 0, 8);
    REFUSED(EINVAL, "8 bits", pf_submit(queue, &one, 1));
    command = blocks(READ, 0, 16);
    REFUSED(EINVAL, "8192 bytes, with a payload of 4096", pf_submit(queue, &one, 1));
    command = blocks(READ, 0, 8), one.nsid = 9;
    REFUSED(ENODEV, "no namespace 9", pf_submit(queue, &one, 1));
    one.nsid = 1;
    command = blocks(0x83, 0, 8);
    REFUSED(EINVAL, "both ways", pf_submit(queue, &one, 1));
    command = blocks(ZEROES, 0, 8);
    REFUSED(EINVAL, "which way", pf_submit(queue, &one, 1));
    command = blocks(READ, UINT32_MAX, 8);
    REFUSED(EINVAL, "blocks", pf_submit(queue, &one, 1));
    one = request(&command, &none), command = blocks(CANCEL, 0, 1);
    REFUSED(EACCES, "the driver's own", pf_submit(queue, &one, 1));
    command = blocks(WRITE, 0, 8);
    REFUSED(EINVAL, "which way", pf_submit(queue, &one, 1));
    /* None of them has anything in use. */
    OK(pf_free(per_use, memory));
    OK(pf_queue_destroy(queue));
}

int main(void) {
    struct pf_arena_opts of = {.struct_size = sizeof of, .size = 4 << 20, .policy = PF_POLICY_WHOLE};
    struct pf_nvme_opts model = {.struct_size = sizeof model, .size = 16 << 20};
    pf_domain_t *domain;
    OK(pf_domain_soft(&domain));
    OK(pf_arena_create(domain, &of, &whole));
    of.policy = PF_POLICY_PER_USE;
    OK(pf_arena_create(domain, &of, &per_use));
    OK(pf_nvme_open(domain, whole, &model, &nvme));
    for (uint32_t protect = PF_PROTECT_STRICT; protect <= PF_PROTECT_STATIC; protect++)
        moves(protect);
    ordered();
    refusals();
    OK(pf_nvme_destroy(nvme));
    OK(pf_arena_destroy(per_use));
    OK(pf_arena_destroy(whole));
    OK(pf_domain_destroy(domain));
    puts("command: ok");
    return 0;
}
