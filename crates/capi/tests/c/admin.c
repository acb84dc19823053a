/* Admin commands to a controller of the library: what they read and change, and every misuse. */
#include "check.h"

enum { GET_LOG_PAGE = 2, IDENTIFY = 6, SET_FEATURES = 9, GET_FEATURES = 10, FORMAT = 0x80 };
enum { WRITE_CACHE = 6 };

static pf_nvme_t *nvme;

static struct pf_nvme_command command(uint32_t opcode, uint32_t nsid, uint32_t cdw10, uint32_t cdw11) {
    return (struct pf_nvme_command){.struct_size = sizeof(struct pf_nvme_command), .opcode = opcode,
                                    .nsid = nsid, .cdw10 = cdw10, .cdw11 = cdw11,
                                    .result = 7, .status = 7};
}

static void reads(void) {
    struct pf_nvme_info info = {.struct_size = sizeof info};
    unsigned char data[4097], part[16];
    OK(pf_nvme_info(nvme, 0, &info));
    struct pf_nvme_command one = command(IDENTIFY, 0, 1, 0);
    memset(data, 0x55, sizeof data);
    OK(pf_nvme_admin(nvme, &one, data, 4096));
    CHECK(one.struct_size == sizeof one && one.opcode == IDENTIFY && one.cdw10 == 1);
    CHECK(one.result == 0 && one.status == 0);
    CHECK((data[512] & 15) == 6 && (data[513] & 15) == 4 && data[4096] == 0x55);
    /* A part of the data, or none. */
    memset(part, 0x55, sizeof part);
    OK(pf_nvme_admin(nvme, &one, part, 15));
    CHECK(memcmp(part, data, 15) == 0 && part[15] == 0x55);
    OK(pf_nvme_admin(nvme, &one, NULL, 0));
    /* The namespace, whose blocks are the capacity. */
    one = command(IDENTIFY, 1, 0, 0);
    OK(pf_nvme_admin(nvme, &one, data, 4096));
    uint64_t blocks;
    memcpy(&blocks, data, 8);
    CHECK(blocks * info.block_bytes == info.capacity);
    /* The log of its health, in words less 1: the rest is zeroes. */
    one = command(GET_LOG_PAGE, UINT32_MAX, 2 | 127 << 16, 0);
    memset(data, 0x55, sizeof data);
    OK(pf_nvme_admin(nvme, &one, data, 4096));
    CHECK(data[512] == 0 && data[4095] == 0 && (data[1] | data[2]) != 0); /* its temperature */
    one = command(GET_FEATURES, 0, 7, 0); /* the number of queues, less 1 */
    OK(pf_nvme_admin(nvme, &one, NULL, 0));
    CHECK((one.result & 0xffff) > 0 && one.status == 0);
}

/* What a command has changed, the next one finds. */
static void changes(void) {
    for (int i = 0; i < 3; i++) {
        uint32_t enabled = i % 2;
        struct pf_nvme_command one = command(SET_FEATURES, 0, WRITE_CACHE, enabled);
        OK(pf_nvme_admin(nvme, &one, NULL, 0));
        CHECK(one.status == 0);
        one = command(GET_FEATURES, 0, WRITE_CACHE, 0);
        OK(pf_nvme_admin(nvme, &one, NULL, 0));
        CHECK(one.result == enabled);
    }
}

/* Whether the library keeps the command for itself. */
static int is_owned(uint32_t opcode) {
    static const uint32_t owned[] = {0, 1, 4, 5, 8, 0x0c, 0x18, 0x1c, 0x7c};
    for (unsigned i = 0; i < sizeof owned / sizeof *owned; i++)
        if (opcode == owned[i])
            return 1;
    return 0;
}

/* Whether the library sends the command. */
static int is_sent(uint32_t opcode) {
    static const uint32_t sent[] = {2,    6,    9,    0x0a, 0x0d, 0x10, 0x11, 0x14,
                                    0x15, 0x19, 0x1a, 0x80, 0x81, 0x82, 0x84, 0x86};
    for (unsigned i = 0; i < sizeof sent / sizeof *sent; i++)
        if (opcode == sent[i])
            return 1;
    return opcode >= 0xc0 && (opcode & 3) != 3;
}

static void refusals(void) {
    unsigned char data[4097];
    memset(data, 0x55, sizeof data);
    struct pf_nvme_command one = command(IDENTIFY, 0, 1, 0);
    REFUSED(EFAULT, "`command` is NULL", pf_nvme_admin(nvme, NULL, data, 1));
    REFUSED(EFAULT, "`data` is NULL", pf_nvme_admin(nvme, &one, NULL, 1));
    REFUSED(EINVAL, "at most 4096", pf_nvme_admin(nvme, &one, data, 4097));
    REFUSED(EBADF, "no handle", pf_nvme_admin(NULL, &one, data, 1));
    one.struct_size = 8;
    REFUSED(EINVAL, "8 bytes", pf_nvme_admin(nvme, &one, data, 1));
    for (uint32_t opcode = 0; opcode < 256; opcode++) {
        one = command(opcode, 0, 0x1ff, 0);
        size_t len = (opcode & 3) == 0 ? 0 : 4096;
        if (len == 0)
            REFUSED(EINVAL, "has none", pf_nvme_admin(nvme, &one, data, 1));
        if (is_owned(opcode))
            REFUSED(EACCES, "the driver's own", pf_nvme_admin(nvme, &one, data, len));
        else if (!is_sent(opcode))
            REFUSED(EINVAL, "is not sent", pf_nvme_admin(nvme, &one, data, len));
        else /* by the controller, which has no such command, log page or feature */
            CHECK(pf_nvme_admin(nvme, &one, data, len) == -EIO && one.status != 0);
    }
    static const uint32_t features[] = {0x07, 0x0b, 0x0d, 0x0f, 0x16, 0x19};
    for (unsigned i = 0; i < sizeof features / sizeof *features; i++) {
        one = command(SET_FEATURES, 0, features[i] | 1u << 31, 0);
        REFUSED(EACCES, "the driver's own", pf_nvme_admin(nvme, &one, data, 1));
    }
    one = command(0x106, 0, 1, 0);
    REFUSED(EINVAL, "8 bits", pf_nvme_admin(nvme, &one, data, 4096));
    one = command(GET_LOG_PAGE, UINT32_MAX, 2 | 1024 << 16, 0);
    REFUSED(EINVAL, "4100 bytes", pf_nvme_admin(nvme, &one, data, 4096));
    one = command(GET_LOG_PAGE, UINT32_MAX, 2, 1);
    REFUSED(EINVAL, "262148 bytes", pf_nvme_admin(nvme, &one, data, 4096));
    /* By the controller: invalid field in command. */
    one = command(IDENTIFY, 0, 0xee, 0);
    REFUSED(EIO, "identify", pf_nvme_admin(nvme, &one, data, 4096));
    CHECK((one.status & 0x7ff) == 2 && one.result == 0);
    for (size_t i = 0; i < sizeof data; i++)
        CHECK(data[i] == 0x55);
}

int main(void) {
    struct pf_arena_opts rings = {
        .struct_size = sizeof rings, .size = 2 << 20, .policy = PF_POLICY_WHOLE};
    struct pf_nvme_opts model = {.struct_size = sizeof model, .size = 16 << 20};
    struct pf_nvme_command one = command(IDENTIFY, 0, 1, 0);
    pf_domain_t *domain;
    pf_arena_t *arena;
    OK(pf_domain_soft(&domain));
    OK(pf_arena_create(domain, &rings, &arena));
    OK(pf_nvme_open(domain, arena, &model, &nvme));
    refusals();
    reads();
    changes();
    OK(pf_nvme_destroy(nvme));
    REFUSED(EBADF, "destroyed", pf_nvme_admin(nvme, &one, NULL, 0));
    OK(pf_arena_destroy(arena));
    OK(pf_domain_destroy(domain));
    puts("admin: ok");
    return 0;
}
