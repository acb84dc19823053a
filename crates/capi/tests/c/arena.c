/* Domains and arenas: every function, and every misuse. */
#include "traced.h"
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static pf_domain_t *domain;
static pf_arena_t *arena;

/* What is refused before the descriptor of an address space is looked at. */
static void window(void) {
    const uint64_t wrong[][2] = {{4096, 0},    {4097, 4096},        {4096, 4097},
                                 {8192, 4095}, {UINT64_MAX - 4095, 8192}};
    struct pf_domain_opts of = {.struct_size = sizeof of, .iova_len = 4096, .iommufd = -1};
    REFUSED(EINVAL, "without `ioas`", pf_domain_create(&of, &domain));
    of.iova = 4096, of.iova_len = 0;
    REFUSED(EINVAL, "without `ioas`", pf_domain_create(&of, &domain));
    of.ioas = 1;
    for (unsigned i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        of.iova = wrong[i][0], of.iova_len = wrong[i][1];
        REFUSED(EINVAL, "at least one page", pf_domain_create(&of, &domain));
    }
    of.iova = of.iova_len = 4096;
    REFUSED(EBADF, "iommufd -1", pf_domain_create(&of, &domain));
    of.iommu = PF_IOMMU_TYPE1;
    REFUSED(EINVAL, "PF_IOMMU_TYPE1", pf_domain_create(&of, &domain));
    /* The lowest descriptor is asked, whatever it is. */
    of.iommu = PF_IOMMU_BEST, of.iommufd = 0;
    CHECK(pf_domain_create(&of, &domain) < 0);
    CHECK(strstr(pf_strerror_last(), "is no descriptor") == NULL);
}

static void create(void) {
    struct pf_arena_opts opts = {.struct_size = sizeof opts, .size = 4 << 20};
    CHECK(PF_POLICY_PER_USE == 1 && PF_POLICY_WHOLE == 2);
    REFUSED(EFAULT, "`out` is NULL", pf_domain_soft(NULL));
    OK(pf_domain_soft(&domain));
    REFUSED(EFAULT, "`out` is NULL", pf_arena_create(domain, &opts, NULL));
    REFUSED(EFAULT, "`opts` is NULL", pf_arena_create(domain, NULL, &arena));
    REFUSED(EBADF, "no handle of a domain", pf_arena_create(NULL, &opts, &arena));
    REFUSED(EBADF, "no handle of a domain", pf_arena_create((pf_domain_t *)&opts, &opts, &arena));
    opts.struct_size = 3;
    REFUSED(EINVAL, "3 bytes", pf_arena_create(domain, &opts, &arena));
    opts.struct_size = sizeof opts;
    opts.policy = 7;
    REFUSED(EINVAL, "policy 7", pf_arena_create(domain, &opts, &arena));
    opts.policy = PF_POLICY_WHOLE;
    opts.sources = 1u << 30;
    REFUSED(EINVAL, "0x40000000", pf_arena_create(domain, &opts, &arena));
    opts.sources = 0;
    opts.size = 0;
    REFUSED(EINVAL, "0 bytes", pf_arena_create(domain, &opts, &arena));
    opts.size = UINT64_MAX;
    REFUSED(EOVERFLOW, "18446744073709551615", pf_arena_create(domain, &opts, &arena));
    opts.size = 4 << 20;
    OK(pf_arena_create(domain, &opts, &arena));
}

static void alloc_and_free(void) {
    uint64_t iova = 0, same = 0;
    char *memory = pf_alloc(arena, 10000, &iova);
    CHECK(memory != NULL && iova != 0 && (uintptr_t)memory % 4096 == 0);
    for (int at = 0; at < 12288; at++)
        CHECK(memory[at] == 0);
    memset(memory, 0xee, 12288);
    OK(pf_iova(domain, memory + 5000, 5000, &same));
    CHECK(same == iova + 5000);
    REFUSED(EINVAL, "not all allocated", pf_iova(domain, memory + 5000, 12288, &same));
    REFUSED(ENXIO, "no memory of this domain", pf_iova(domain, &same, 1, &same));
    REFUSED(EFAULT, "`iova` is NULL", pf_iova(domain, memory, 1, NULL));
    char at[64];
    snprintf(at, sizeof at, "inside the allocation at %p: pass that address", (void *)memory);
    REFUSED(EINVAL, at, pf_free(arena, memory + 8192));
    REFUSED(EINVAL, "not where its allocation begins", pf_free(arena, memory + 1));
    REFUSED(EINVAL, "not in this arena", pf_free(arena, &iova));
    REFUSED(EBUSY, "12288 bytes of the arena are in use", pf_arena_destroy(arena));
    OK(pf_free(arena, memory));
    REFUSED(EINVAL, "freed before", pf_free(arena, memory));
    REFUSED(EINVAL, "freed before", pf_iova(domain, memory, 1, &same));
    OK(pf_free(arena, NULL));
    errno = 0;
    CHECK(pf_alloc(arena, 0, NULL) == NULL && errno == EINVAL);
    errno = 0;
    CHECK(pf_alloc(arena, (size_t)1 << 60, NULL) == NULL && errno == ENOMEM);
    errno = 0;
    CHECK(pf_alloc(NULL, 1, NULL) == NULL && errno == EBADF);
    /* All of it, and then no more. */
    unsigned count = 0;
    static void *all[4096];
    while ((all[count] = pf_alloc(arena, 4096, NULL)) != NULL)
        count++;
    CHECK(count == 1024 && errno == ENOMEM);
    while (count > 0)
        OK(pf_free(arena, all[--count]));
}

static pf_trace_fn former;
static void *former_arg;
static unsigned counted;

/* A hook that was set over another one, and calls it. */
static void count_and_pass_on(void *arg, const struct pf_event *event) {
    ++*(unsigned *)arg;
    CHECK(event->struct_size >= sizeof *event);
    former(former_arg, event);
}

static void trace_is_chained(void) {
    void *arg = &counted;
    CHECK(pf_trace_set(note, &events, &arg) == NULL && arg == NULL);
    former = pf_trace_set(count_and_pass_on, &counted, &former_arg);
    CHECK(former == note && former_arg == &events);
    OK(pf_free(arena, pf_alloc(arena, 4096, NULL)));
    CHECK(counted == 2 && events == 2);
    CHECK(pf_trace_set(former, former_arg, &arg) == count_and_pass_on && arg == &counted);
    CHECK(pf_trace_set(NULL, NULL, NULL) == note);
    events = 0;
}

static void traced(void) {
    CHECK(pf_trace_set(note, &events, NULL) == NULL);
    uint64_t iova = 0;
    uintptr_t first = here();
    void *memory = pf_alloc(arena, 4096, &iova);
    uintptr_t between = here();
    OK(pf_free(arena, memory));
    uintptr_t last = here();
    pf_trace_set(NULL, NULL, NULL);
    OK(pf_free(arena, pf_alloc(arena, 4096, NULL)));
    CHECK(events == 2 && seen[0].kind == PF_EVENT_ALLOC && seen[1].kind == PF_EVENT_FREE);
    CHECK(seen[0].va == memory && seen[0].iova == iova && seen[0].len == 4096);
    CHECK(seen[1].va == memory && seen[1].handle == (uint64_t)(uintptr_t)arena);
    /* The callers are the two calls above. */
    uintptr_t alloc = (uintptr_t)seen[0].caller, free = (uintptr_t)seen[1].caller;
    CHECK(first < alloc && alloc < between && between < free && free < last);
}

static void own_memory_and_files(void) {
    const size_t size = 1 << 20;
    char *own = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(own != MAP_FAILED);
    struct pf_arena_opts opts = {.struct_size = sizeof opts, .size = size, .va = own + 1};
    pf_arena_t *other;
    REFUSED(EINVAL, "multiples of 4096", pf_arena_create(domain, &opts, &other));
    opts.va = own;
    OK(pf_arena_create(domain, &opts, &other));
    char *memory = pf_alloc(other, 1, NULL);
    CHECK(memory >= own && memory < own + size);
    REFUSED(EINVAL, "not in this arena", pf_free(arena, memory));
    OK(pf_free(other, memory));
    struct pf_region region = {.struct_size = sizeof region};
    OK(pf_arena_region(other, &region));
    CHECK(region.addr == own && region.len == size && region.fd == -1);
    OK(pf_arena_destroy(other));
    CHECK(munmap(own, size) == 0);

    opts = (struct pf_arena_opts){.struct_size = sizeof opts,
                                  .size = size,
                                  .sources = PF_SOURCE_MEMFD,
                                  .policy = PF_POLICY_WHOLE};
    OK(pf_arena_create(domain, &opts, &other));
    OK(pf_arena_region(other, &region));
    memory = pf_alloc(other, 4096, NULL);
    strcpy(memory, "through the file");
    char *again = mmap(NULL, size, PROT_READ, MAP_SHARED, region.fd, region.fd_offset);
    CHECK(again != MAP_FAILED);
    CHECK(strcmp(again + (memory - (char *)region.addr), "through the file") == 0);
    /* In a second domain, at an address of its own. */
    pf_domain_t *second;
    uint64_t iova;
    OK(pf_domain_soft(&second));
    OK(pf_arena_map_into(other, second, &iova));
    uint64_t start = iova;
    OK(pf_iova(second, memory, 1, &iova));
    CHECK(iova == start + (uint64_t)(memory - (char *)region.addr));
    /* One that is mapped per use has none. */
    struct pf_arena_opts per_use = {
        .struct_size = sizeof per_use, .size = 1 << 20, .policy = PF_POLICY_PER_USE};
    pf_arena_t *third;
    OK(pf_arena_create(domain, &per_use, &third));
    OK(pf_arena_map_into(third, second, &iova));
    CHECK(iova == 0);
    char *of_third = pf_alloc(third, 4096, NULL);
    REFUSED(ENXIO, "mapped per use", pf_iova(second, of_third, 1, &iova));
    OK(pf_free(third, of_third));
    OK(pf_arena_destroy(third));
    OK(pf_domain_destroy(second));
    OK(pf_free(other, memory));
    OK(pf_arena_destroy(other));
    REFUSED(EBADF, "destroyed", pf_arena_region(other, &region));
}

static void *use(void *stop) {
    while (!__atomic_load_n((int *)stop, __ATOMIC_RELAXED)) {
        /* Not refused while the other thread tries to end the arena. */
        void *memory = pf_alloc(arena, 4096, NULL);
        CHECK(memory != NULL);
        OK(pf_free(arena, memory));
    }
    return NULL;
}

/* As above, until the arena has ended. */
static void *use_to_the_end(void *ending) {
    pf_arena_t *arena = ending;
    for (;;) {
        void *memory = pf_alloc(arena, 4096, NULL);
        if (memory == NULL) {
            CHECK(errno == EBADF);
            return NULL;
        }
        OK(pf_free(arena, memory));
        usleep(200);
    }
}

/* Threads use the arena while others try to end it: it ends only when nobody has anything of it. */
static void ended_by_threads(void) {
    pthread_t threads[8];
    int stop = 0;
    for (int i = 0; i < 8; i++)
        CHECK(pthread_create(&threads[i], NULL, use, &stop) == 0);
    void *kept = pf_alloc(arena, 4096, NULL);
    for (int i = 0; i < 20000; i++)
        CHECK(pf_arena_destroy(arena) == -EBUSY);
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < 8; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    OK(pf_free(arena, kept));
    /* Now and then nothing of it is in use: then it ends. */
    pf_arena_t *ending;
    struct pf_arena_opts opts = {.struct_size = sizeof opts, .size = 1 << 20};
    OK(pf_arena_create(domain, &opts, &ending));
    for (int i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, use_to_the_end, ending) == 0);
    int result;
    while ((result = pf_arena_destroy(ending)) != 0)
        CHECK(result == -EBUSY);
    for (int i = 0; i < 4; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
}

/* A refused end looks at no state of pages, of which this arena has 8 bytes and a bit for each of
   67 million: memory that is zeroed by the kernel, so that a look at any of it is a page fault. */
static void refused_end_of_a_large_one(void) {
    struct pf_arena_opts opts = {
        .struct_size = sizeof opts, .size = 256ULL << 30, .sources = PF_SOURCE_PLAIN};
    pf_arena_t *large;
    struct rusage before, after;
    /* Else one fault may be 2 MiB. */
    CHECK(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
    /* valgrind has no room for as much, and this is still 80 times what is allowed below. */
    if (pf_arena_create(domain, &opts, &large) == -ENOMEM) {
        opts.size = 32ULL << 30;
        OK(pf_arena_create(domain, &opts, &large));
    }
    void *kept = pf_alloc(large, 4096, NULL);
    CHECK(kept != NULL);
    CHECK(getrusage(RUSAGE_THREAD, &before) == 0);
    for (int i = 0; i < 10; i++)
        REFUSED(EBUSY, "4096 bytes of the arena are in use", pf_arena_destroy(large));
    CHECK(getrusage(RUSAGE_THREAD, &after) == 0);
    CHECK(after.ru_minflt - before.ru_minflt < 200);
    OK(pf_free(large, kept));
    OK(pf_arena_destroy(large));
    CHECK(prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0) == 0);
}

static void in_a_child(void) {
    pid_t child = fork();
    if (child == 0) {
        CHECK(pf_free(arena, NULL) == -EPERM);
        CHECK(strstr(pf_strerror_last(), "forked") != NULL);
        _exit(7);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 7);
}

static void *end_both(void *arenas) {
    for (int i = 0; i < 2; i++)
        OK(pf_arena_destroy(((pf_arena_t **)arenas)[i]));
    return NULL;
}

/* The end of an arena takes no more of the stack for more domains. */
static void of_many_domains(void) {
    pf_arena_t *arenas[2];
    for (unsigned i = 0; i < 2; i++) {
        struct pf_arena_opts opts = {.struct_size = sizeof opts,
                                     .size = 4096,
                                     .policy = i == 0 ? PF_POLICY_PER_USE : PF_POLICY_WHOLE};
        OK(pf_arena_create(domain, &opts, &arenas[i]));
    }
    for (int i = 0; i < 2000; i++) {
        pf_domain_t *other;
        OK(pf_domain_soft(&other));
        for (int k = 0; k < 2; k++)
            OK(pf_arena_map_into(arenas[k], other, NULL));
        OK(pf_domain_destroy(other));
    }
    pthread_t thread;
    pthread_attr_t small;
    CHECK(pthread_attr_init(&small) == 0 && pthread_attr_setstacksize(&small, 128 << 10) == 0);
    CHECK(pthread_create(&thread, &small, end_both, arenas) == 0);
    CHECK(pthread_join(thread, NULL) == 0 && pthread_attr_destroy(&small) == 0);
}

int main(void) {
    CHECK(strcmp(pf_strerror_last(), "") == 0);
    CHECK(pf_version() == PF_VERSION);
    window();
    create();
    alloc_and_free();
    trace_is_chained();
    traced();
    own_memory_and_files();
    REFUSED(EBADF, "not of a domain", pf_domain_destroy((pf_domain_t *)arena));
    REFUSED(EBADF, "not of an arena", pf_arena_destroy((pf_arena_t *)domain));
    ended_by_threads();
    of_many_domains();
    refused_end_of_a_large_one();
    in_a_child();
    /* The domain's handle first: the arena keeps the domain. */
    OK(pf_domain_destroy(domain));
    REFUSED(EBADF, "destroyed", pf_domain_destroy(domain));
    void *memory = pf_alloc(arena, 4096, NULL);
    CHECK(memory != NULL);
    OK(pf_free(arena, memory));
    OK(pf_arena_destroy(arena));
    REFUSED(EBADF, "destroyed", pf_arena_destroy(arena));
    OK(pf_arena_destroy(NULL));
    OK(pf_domain_destroy(NULL));
    puts("arena: ok");
    return 0;
}
