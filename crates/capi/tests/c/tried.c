/* Memory of the program is tried before it is accepted: what cannot be read and written is an
   error with its address, and no signal later. Every call that takes an address. */
#include "check.h"
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static pf_domain_t *domain;
static const size_t page = 4096, size = 16 * 4096;

static char *map(size_t bytes, int protection, int flags, int fd) {
    char *va = mmap(NULL, bytes, protection, flags, fd, 0);
    CHECK(va != MAP_FAILED);
    return va;
}

static char *plain(void) {
    return map(size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
}

/* Each call refuses `len` bytes from `va`, and names the page that failed. */
static void refused(char *va, size_t len, char *failed) {
    char name[32];
    snprintf(name, sizeof name, "%p", (void *)failed);
    struct pf_arena_opts opts = {.struct_size = sizeof opts, .size = len, .va = va};
    struct pf_pool_opts pool_opts = {.struct_size = sizeof pool_opts, .size = 64};
    pf_arena_t *arena;
    pf_reg_t *reg;
    pf_pool_t *pool;
    OK(pf_pool_create(NULL, &pool_opts, &pool));
    for (int i = 0; i < 2; i++) {
        REFUSED(EFAULT, name, pf_arena_create(domain, &opts, &arena));
        REFUSED(EFAULT, name, pf_register(domain, va, len, &reg));
        REFUSED(EFAULT, name, pf_pool_add(pool, va, len, 0));
    }
    OK(pf_pool_destroy(pool));
}

/* Each call accepts it, and the memory can be used. */
static void accepted(char *va, size_t len) {
    struct pf_arena_opts opts = {.struct_size = sizeof opts, .size = len, .va = va};
    struct pf_pool_opts pool_opts = {.struct_size = sizeof pool_opts, .size = page};
    pf_arena_t *arena;
    pf_reg_t *reg;
    pf_pool_t *pool;
    pf_cache_t *cache;
    pf_block_t block;
    OK(pf_arena_create(domain, &opts, &arena));
    void *memory;
    int count = 0;
    void *all[16];
    while (count < 16 && (memory = pf_alloc(arena, page, NULL)) != NULL)
        all[count++] = memory;
    CHECK((size_t)count == len / page);
    while (count > 0)
        OK(pf_free(arena, all[--count]));
    OK(pf_arena_destroy(arena));
    OK(pf_register(domain, va, len, &reg));
    OK(pf_reg_destroy(reg));
    OK(pf_pool_create(NULL, &pool_opts, &pool));
    CHECK(VALUE(pf_pool_add(pool, va, len, 0)) == (long)(len / page));
    OK(pf_pool_cache(pool, &cache));
    OK(pf_get(cache, &block));
    memset(block.va, 1, block.len);
    OK(pf_put(cache, &block));
    OK(pf_cache_destroy(cache));
    OK(pf_pool_destroy(pool));
}

static void protected(void) {
    char *va = plain();
    CHECK(mprotect(va + 5 * page, page, PROT_NONE) == 0);
    refused(va, size, va + 5 * page);
    CHECK(mprotect(va + 5 * page, page, PROT_READ) == 0);
    refused(va, size, va + 5 * page);
    /* Contents and rights are as before. */
    CHECK(va[5 * page] == 0);
    CHECK(mprotect(va + 5 * page, page, PROT_READ | PROT_WRITE) == 0);
    CHECK(mprotect(va + size - page, page, PROT_WRITE) == 0);
    CHECK(mprotect(va + size - page, page, PROT_READ | PROT_WRITE) == 0);
    accepted(va, size);
    CHECK(munmap(va + 7 * page, page) == 0);
    refused(va, size, va + 7 * page);
    CHECK(munmap(va, page) == 0);
    refused(va, 2 * page, va);
    CHECK(munmap(va, size) == 0);
    refused(va, size, va);
    /* No address of the program. */
    refused((char *)page, page, (char *)page);
    refused((char *)((uintptr_t)1 << 60), page, (char *)((uintptr_t)1 << 60));
}

static void of_files(void) {
    int fd = memfd_create("tried", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(fd >= 0 && ftruncate(fd, 3 * page - 100) == 0);
    /* Beyond the end of the file. */
    int kinds[] = {MAP_SHARED, MAP_PRIVATE};
    for (int i = 0; i < 2; i++) {
        char *va = map(size, PROT_READ | PROT_WRITE, kinds[i], fd);
        refused(va, size, va + 3 * page);
        accepted(va, 3 * page);
        CHECK(munmap(va, size) == 0);
    }
    CHECK(ftruncate(fd, size) == 0);
    /* It cannot be written any more: only a private mapping can. */
    CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK) == 0);
    char *va = map(size, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd);
    accepted(va, size);
    CHECK(munmap(va, size) == 0);
    va = map(size, PROT_READ, MAP_SHARED, fd);
    refused(va, size, va);
    CHECK(munmap(va, size) == 0 && close(fd) == 0);
}

static void of_the_kernel(void) {
    /* Hugepages that the pool lacks. */
    size_t huge = 2 << 20;
    char *va = mmap(NULL, huge, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_NORESERVE, -1, 0);
    FILE *file = fopen("/proc/sys/vm/nr_hugepages", "r");
    int pages = -1;
    if (file != NULL && fscanf(file, "%d", &pages) == 1 && pages == 0 && va != MAP_FAILED)
        refused(va, huge, va);
    else
        puts("tried: hugepages are there, or none can be: skipped");
    if (va != MAP_FAILED)
        CHECK(munmap(va, huge) == 0);
    if (file != NULL)
        fclose(file);
    /* Guards (Linux 6.13). */
    va = plain();
    if (madvise(va + 9 * page, page, 102) == 0)
        refused(va, size, va + 9 * page);
    CHECK(munmap(va, size) == 0);
    /* The kernel's own pages, which no device may reach. */
    file = fopen("/proc/self/maps", "r");
    char line[512];
    unsigned long start = 0;
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        if (strstr(line, "[vvar]") != NULL)
            CHECK(sscanf(line, "%lx-", &start) == 1);
    if (start != 0)
        refused((char *)start, page, (char *)start);
    if (file != NULL)
        fclose(file);
}

/* Has madvise refuse MADV_POPULATE_WRITE, as before Linux 5.14. */
static void as_before(void) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 23, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
    char *va = plain();
    CHECK(madvise(va, page, 23) != 0 && errno == EINVAL && munmap(va, size) == 0);
}

int main(void) {
    OK(pf_domain_soft(&domain));
    protected();
    of_files();
    of_the_kernel();
    as_before();
    protected();
    of_files();
    of_the_kernel();
    OK(pf_domain_destroy(domain));
    puts("tried: ok");
    return 0;
}
