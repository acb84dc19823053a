/* What a program may do at any moment: signals, children, exits, cancellation, jumps, descriptors.
 * Each case is a process of its own, as a child of one that has used the library is refused. */
#include "check.h"
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static pf_domain_t *domain;
static pf_arena_t *arena;
static pf_owner_t *owner;
static pf_pool_t *pool;
static pf_cache_t *cache;
static pf_frames_t *frames;
static pf_pages_t *pages;
static pf_nvme_t *nvme;
static pf_queue_t *queue;
static pf_reg_t *reg;
static void *memory, *own;
static const struct pf_pool_opts blocks = {
    .struct_size = sizeof blocks, .name = "blocks", .size = 64};
static int valgrind;

/* One object of each kind, and with them every thread that the library has. */
static void create(void) {
    struct pf_arena_opts opts = {.struct_size = sizeof opts, .size = 8 << 20};
    struct pf_nvme_opts model = {.struct_size = sizeof model, .size = 1 << 20};
    struct pf_queue_opts depth = {.struct_size = sizeof depth, .depth = 4};
    OK(pf_domain_soft(&domain));
    OK(pf_arena_create(domain, &opts, &arena));
    OK(pf_owner_create(domain, &owner));
    OK(pf_pool_create(arena, &blocks, &pool));
    OK(pf_pool_cache(pool, &cache));
    OK(pf_frames_create(arena, &frames));
    OK(pf_pages_create(arena, 4096, 16, &pages));
    OK(pf_nvme_open(domain, arena, &model, &nvme));
    OK(pf_queue_create(nvme, &depth, &queue));
    CHECK((memory = pf_alloc(arena, 8192, NULL)) != NULL);
    own = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(own != MAP_FAILED);
    OK(pf_register(domain, own, 8192, &reg));
    pf_map_t map;
    pf_ticket_t ticket;
    uint64_t iova;
    int fd = (int)VALUE(pf_quiesce_fd(owner));
    (void)fd;
    for (int at = 0; at < 20; at++) {
        OK(pf_map(owner, memory, 4096, PF_BIDIR, &map, &iova));
        OK(pf_revoke_many(owner, &map, 1, &ticket));
        OK(pf_wait(owner, ticket, UINT64_MAX));
    }
}

/* Uses each of them. */
static void use(void) {
    pf_map_t map;
    pf_block_t block = {.va = NULL};
    uint64_t iova;
    void *slot = NULL;
    OK(pf_map(owner, memory, 4096, PF_BIDIR, &map, &iova));
    OK(pf_unmap(owner, map));
    OK(pf_get(cache, &block));
    OK(pf_put(cache, &block));
    CHECK(VALUE(pf_frames_fill(frames, &slot, 1)) == 1);
    OK(pf_frames_free(frames, &slot, 1));
    struct iovec part = {memory, 512};
    struct pf_request read = {.op = PF_READ, .nsid = 1, .iov = &part, .iovcnt = 1};
    struct pf_completion done;
    CHECK(VALUE(pf_submit(queue, &read, 1)) == 1);
    CHECK(VALUE(pf_queue_wait(queue, UINT64_MAX)) == 1);
    CHECK(VALUE(pf_complete(queue, &done, 1)) == 1 && done.result == 0);
}

/* Ends each of them. */
static void destroy(void) {
    OK(pf_free(arena, memory));
    OK(pf_reg_destroy(reg));
    OK(pf_queue_destroy(queue));
    OK(pf_nvme_destroy(nvme));
    OK(pf_pages_destroy(pages));
    OK(pf_frames_destroy(frames));
    OK(pf_cache_destroy(cache));
    OK(pf_pool_destroy(pool));
    OK(pf_owner_destroy(owner));
    OK(pf_arena_destroy(arena));
    OK(pf_domain_destroy(domain));
}

/* Signals that the program takes by a descriptor do not arrive in the library's threads, whose
 * default action would end the process. */
static void signals(void) {
    sigset_t none, set;
    sigemptyset(&none);
    CHECK(sigprocmask(SIG_SETMASK, &none, NULL) == 0);
    create();
    /* The starter's own mask is as before. */
    CHECK(sigprocmask(SIG_BLOCK, NULL, &set) == 0);
    for (int number = 1; number <= SIGRTMAX; number++)
        CHECK(sigismember(&set, number) != 1);
    const int used[] = {SIGHUP, SIGINT, SIGUSR1, SIGTERM, SIGALRM, SIGPROF, SIGRTMIN};
    sigemptyset(&set);
    for (size_t at = 0; at < sizeof used / sizeof *used; at++)
        sigaddset(&set, used[at]);
    CHECK(sigprocmask(SIG_BLOCK, &set, NULL) == 0);
    int fd = signalfd(-1, &set, 0);
    CHECK(fd >= 0);
    for (int round = 0; round < 50; round++)
        for (size_t at = 0; at < sizeof used / sizeof *used; at++) {
            struct signalfd_siginfo info;
            CHECK(kill(getpid(), used[at]) == 0);
            if (at % 3 == 0)
                use();
            CHECK(read(fd, &info, sizeof info) == sizeof info);
            CHECK(info.ssi_signo == (uint32_t)used[at]);
        }
    close(fd);
    destroy();
}

/* The library changes nothing of the process that it shares: handlers, alternate stacks, masks. */
static void nothing_is_changed(void) {
    struct sigaction before[65], after;
    stack_t stack;
    for (int number = 1; number < 65; number++)
        if (sigaction(number, NULL, &before[number]) != 0)
            memset(&before[number], 0, sizeof before[number]);
    create();
    use();
    for (int number = 1; number < 65; number++)
        if (sigaction(number, NULL, &after) == 0)
            CHECK(after.sa_handler == before[number].sa_handler);
    CHECK(sigaltstack(NULL, &stack) == 0);
#ifndef __SANITIZE_ADDRESS__
    CHECK(stack.ss_flags == SS_DISABLE);
#endif
    /* The program's own, in the middle. */
    static char room[1 << 16];
    stack_t mine = {.ss_sp = room, .ss_size = sizeof room};
    CHECK(sigaltstack(&mine, NULL) == 0);
    use();
    CHECK(sigaltstack(NULL, &stack) == 0 && stack.ss_sp == room);
    destroy();
}

static void in_child(void *arg, const struct pf_event *event) {
    (void)arg, (void)event;
}

static void refused(void) {
    pf_block_t block = {.va = NULL};
    pf_domain_t *new;
    uint64_t iova;
    CHECK(pf_get(cache, &block) == -EPERM && block.va == NULL);
    CHECK(strstr(pf_strerror_last(), "forked") != NULL);
    CHECK(pf_iova(domain, memory, 1, &iova) == -EPERM && pf_free(arena, memory) == -EPERM);
    CHECK(pf_trace_set(in_child, NULL, NULL) == NULL && pf_trace_set(NULL, NULL, NULL) == NULL);
    CHECK(pf_domain_soft(&new) == -EPERM && pf_queue_wait(queue, 0) == -EPERM);
    errno = 0;
    CHECK(pf_alloc(arena, 1, NULL) == NULL && errno == EPERM);
    CHECK(pf_arena_destroy(arena) == -EPERM && pf_nvme_destroy(nvme) == -EPERM);
}

/* A case, or a child, has succeeded. Valgrind would look for leaks where threads are missing. */
__attribute__((noreturn)) static void leave(void) {
    if (valgrind)
        kill(getpid(), SIGKILL);
    _exit(7);
}

static int succeeded(int status) {
    return valgrind && WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL
                                           : WIFEXITED(status) && WEXITSTATUS(status) == 7;
}

static void ended(pid_t child) {
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(succeeded(status));
}

/* Children, made by any function, are refused; those of children, too. */
static void children(void) {
    pid_t child = fork();
    if (child == 0) {
        /* Before the first object, a child is as good as its parent. */
        create(), use(), destroy();
        leave();
    }
    ended(child);
    /* One that shares the memory makes no object, also not the first. Valgrind forks instead. */
    if (!valgrind) {
        if ((child = vfork()) == 0)
            _exit(pf_domain_soft(&domain) == -EPERM && domain == NULL ? 7 : 1);
        ended(child);
    }
    create();
    if ((child = fork()) == 0) {
        refused();
        if ((child = fork()) == 0) {
            refused();
            leave();
        }
        ended(child);
        leave();
    }
    ended(child);
    if ((child = (pid_t)syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL)) == 0) {
        refused();
        leave();
    }
    ended(child);
#if defined __GLIBC__ && (__GLIBC__ > 2 || __GLIBC_MINOR__ >= 34)
    if ((child = _Fork()) == 0) {
        refused();
        leave();
    }
    ended(child);
#endif
    /* The parent goes on, and one that shares its memory makes no objects. Valgrind forks instead. */
    use();
    if (!valgrind) {
        pf_domain_t *made = NULL;
        if ((child = vfork()) == 0)
            _exit(pf_domain_soft(&made) == -EPERM && made == NULL ? 7 : 1);
        ended(child);
        OK(pf_domain_soft(&made));
        OK(pf_domain_destroy(made));
    }
    use();
    destroy();
}

static void *use_for_ever(void *arg) {
    pf_cache_t *mine;
    pf_owner_t *its;
    (void)arg;
    OK(pf_pool_cache(pool, &mine));
    OK(pf_owner_create(domain, &its));
    void *piece = pf_alloc(arena, 4096, NULL);
    for (;;) {
        pf_block_t block = {.va = NULL};
        pf_map_t map;
        uint64_t iova;
        OK(pf_get(mine, &block));
        OK(pf_map(its, piece, 4096, PF_BIDIR, &map, &iova));
        OK(pf_unmap(its, map));
        OK(pf_put(mine, &block));
    }
    return NULL;
}

static void use_at_exit(void) {
    use();
    REFUSED(EBADF, "no handle", pf_domain_destroy((pf_domain_t *)1));
}

/* exit() in one thread, while others are in calls; its handlers call the library. */
static void exits(void) {
    create();
    CHECK(atexit(use_at_exit) == 0);
    for (int at = 0; at < 3; at++) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, use_for_ever, NULL) == 0);
    }
    usleep(20000);
    exit(7);
}

static void exits_quickly(void) {
    create();
    CHECK(at_quick_exit(use_at_exit) == 0);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, use_for_ever, NULL) == 0);
    usleep(20000);
    quick_exit(7);
}

/* The main thread ends, and the others go on. */
static void *exit_later(void *main_thread) {
    CHECK(pthread_join(*(pthread_t *)main_thread, NULL) == 0);
    use();
    destroy();
    leave();
}

static void main_thread_ends(void) {
    static pthread_t self;
    pthread_t thread;
    create();
    self = pthread_self();
    CHECK(pthread_create(&thread, NULL, exit_later, &self) == 0);
    pthread_exit(NULL);
}

static pthread_key_t key;

static void at_thread_end(void *value) {
    static int rounds;
    REFUSED(EBADF, "no handle", pf_pool_destroy((pf_pool_t *)1));
    use();
    if (++rounds < 3)
        CHECK(pthread_setspecific(key, value) == 0);
}

static void *end_with_destructors(void *arg) {
    CHECK(pthread_setspecific(key, arg) == 0);
    pthread_exit(arg);
}

/* Destructors of a thread's values call the library. */
static void thread_ends(void) {
    pthread_t thread;
    create();
    CHECK(pthread_key_create(&key, at_thread_end) == 0);
    CHECK(pthread_create(&thread, NULL, end_with_destructors, &key) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    /* A thread that ends keeps nothing: its objects are the next one's. */
    use();
    destroy();
}

enum { CALLS = 39 };

/* One call of each function, and refusals that look for a reason. What fails in a thread that is to
 * be cancelled ends it before it has printed why: `interrupted` prints it. */
static void one_call(int which) {
    static pf_domain_t *new_domain;
    static pf_arena_t *new_arena;
    static pf_owner_t *new_owner;
    static pf_pool_t *new_pool;
    static pf_cache_t *new_cache;
    static pf_frames_t *new_frames;
    static pf_pages_t *new_pages;
    static pf_nvme_t *new_nvme;
    static pf_queue_t *new_queue;
    static pf_block_t block, page;
    static pf_map_t map;
    static pf_ticket_t ticket;
    static void *slot, *head, *piece;
    static uint64_t iova;
    static char text[4096];
    struct pf_arena_opts opts = {.struct_size = sizeof opts, .size = 1 << 20},
                         large = {
                             .struct_size = sizeof large,
                             .size = 1ull << 39,
                             .sources = PF_SOURCE_HUGETLB_1G,
                         };
    struct pf_nvme_opts model = {.struct_size = sizeof model, .size = 1 << 20};
    struct pf_queue_opts depth = {.struct_size = sizeof depth, .depth = 2};
    struct pf_region region = {.struct_size = sizeof region};
    struct iovec part = {memory, 512};
    struct pf_request read = {.op = PF_READ, .nsid = 1, .iov = &part, .iovcnt = 1};
    struct pf_completion done;
    pf_arena_t *none;
    switch (which) {
        case 0: OK(pf_domain_soft(&new_domain)); break;
        case 1: OK(pf_arena_create(new_domain, &opts, &new_arena)); break;
        case 2: CHECK(pf_arena_create(new_domain, &large, &none) < 0); break;
        case 3: OK(pf_owner_create(new_domain, &new_owner)); break;
        case 4: OK(pf_pool_create(new_arena, &blocks, &new_pool)); break;
        case 5: OK(pf_pool_cache(new_pool, &new_cache)); break;
        case 6: OK(pf_frames_create(arena, &new_frames)); break;
        case 7: OK(pf_pages_create(arena, 4096, 16, &new_pages)); break;
        case 8: OK(pf_nvme_open(domain, arena, &model, &new_nvme)); break;
        case 9: OK(pf_queue_create(new_nvme, &depth, &new_queue)); break;
        case 10: OK(pf_get(new_cache, &block)); break;
        case 11: OK(pf_put(new_cache, &block)); break;
        case 12: VALUE(pf_frames_fill(frames, &slot, 1)); break;
        case 13: OK(pf_frames_free(frames, &slot, 1)); break;
        case 14: VALUE(pf_frames_list(frames, 1, &head)); break;
        case 15: OK(pf_free(arena, head)); break;
        case 16: CHECK((piece = pf_alloc(new_arena, 4096, NULL)) != NULL); break;
        case 17: OK(pf_map(new_owner, piece, 4096, PF_BIDIR, &map, &iova)); break;
        case 18: OK(pf_unmap(new_owner, map)); break;
        case 19: OK(pf_map(new_owner, piece, 4096, PF_BIDIR, &map, &iova)); break;
        case 20: OK(pf_revoke_many(new_owner, &map, 1, &ticket)); break;
        case 21: OK(pf_wait(new_owner, ticket, UINT64_MAX)); break;
        case 22: OK(pf_free(new_arena, piece)); break;
        case 23: VALUE(pf_pages_fill(pages, &page, 1)); break;
        case 24: OK(pf_pages_recycle(pages, &page, 1, NULL)), page.va = NULL; break;
        case 25: VALUE(pf_submit(queue, &read, 1)); break;
        case 26: VALUE(pf_queue_wait(queue, UINT64_MAX)); break;
        case 27: CHECK(VALUE(pf_complete(queue, &done, 1)) == 1); break;
        case 28: CHECK(pf_queue_wait(queue, 2000000) == 0); break;
        case 29: OK(pf_reg_destroy(reg)); break;
        case 30: OK(pf_register(domain, own, 8192, &reg)); break;
        case 31: VALUE(pf_stats_json(arena, text, sizeof text)); break;
        case 32: OK(pf_arena_region(arena, &region)); break;
        case 33: OK(pf_queue_destroy(new_queue)); break;
        case 34: OK(pf_nvme_destroy(new_nvme)); break;
        case 35: OK(pf_pages_destroy(new_pages)), OK(pf_frames_destroy(new_frames)); break;
        case 36: OK(pf_cache_destroy(new_cache)), OK(pf_pool_destroy(new_pool)); break;
        case 37: OK(pf_owner_destroy(new_owner)), OK(pf_arena_destroy(new_arena)); break;
        default: OK(pf_domain_destroy(new_domain)); break;
    }
}

static int returned, hooked;

static void cancellable_hook(void *arg, const struct pf_event *event) {
    (void)arg, (void)event;
    pthread_testcancel();
    hooked++;
}

static void *cancelled_before(void *which) {
    int state;
    CHECK(pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL) == 0);
    CHECK(pthread_cancel(pthread_self()) == 0);
    CHECK(pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL) == 0);
    one_call(*(int *)which);
    returned = 1;
    CHECK(pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &state) == 0);
    CHECK(state == PTHREAD_CANCEL_ENABLE);
    pthread_testcancel();
    CHECK(!"cancelled");
    return NULL;
}

/* pthread_cancel() acts after the call, whichever it is, and what a hook does. */
static void cancels(void) {
    create();
    for (int hooks = 0; hooks < 2; hooks++) {
        if (hooks)
            pf_trace_set(cancellable_hook, NULL, NULL);
        for (int which = 0; which < CALLS; which++) {
            pthread_t thread;
            void *result;
            returned = 0;
            CHECK(pthread_create(&thread, NULL, cancelled_before, &which) == 0);
            CHECK(pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
            if (!returned) {
                fprintf(stderr, "call %d was cancelled\n", which);
                exit(1);
            }
        }
    }
    pf_trace_set(NULL, NULL, NULL);
    CHECK(hooked > 8);
    /* One that has cancellation disabled has it so afterwards. */
    int state;
    CHECK(pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL) == 0);
    use();
    CHECK(pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &state) == 0);
    CHECK(state == PTHREAD_CANCEL_DISABLE);
    use();
    destroy();
}

static void exit_in_hook(void *arg, const struct pf_event *event) {
    (void)arg, (void)event;
    pthread_exit(NULL);
}

/* pthread_exit() in a hook ends the process, and not half of a call. */
static void thread_exits_in_a_call(void) {
    struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    create();
    pf_trace_set(exit_in_hook, NULL, NULL);
    int null = open("/dev/null", O_WRONLY);
    dup2(null, 2);
    pf_block_t block;
    exit(pf_get(cache, &block) == 0 ? 1 : 2);
}

static jmp_buf outside;

static void jump(void *arg, const struct pf_event *event) {
    (void)arg, (void)event;
    longjmp(outside, 1);
}

/* longjmp() out of a hook: the object stays in use for good, and others do not mind. */
static void jumps(void) {
    pf_cache_t *other;
    create();
    OK(pf_pool_cache(pool, &other));
    pf_trace_set(jump, NULL, NULL);
    static pf_block_t block;
    if (setjmp(outside) == 0) {
        int result = pf_get(other, &block);
        fprintf(stderr, "not jumped: %d\n", result);
        exit(1);
    }
    int state;
    CHECK(pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &state) == 0);
    CHECK(state == PTHREAD_CANCEL_DISABLE);
    pf_trace_set(NULL, NULL, NULL);
    REFUSED(EBUSY, "has not ended", pf_get(other, &block));
    REFUSED(EBUSY, "has not ended", pf_cache_destroy(other));
    use();
}

/* Descriptors that the program closes, against the rule: memory and mappings do not need them. */
static void closes_descriptors(void) {
    create();
    for (int fd = 3; fd < 256; fd++)
        close(fd);
    struct rusage before, after;
    CHECK(getrusage(RUSAGE_SELF, &before) == 0);
    usleep(100000);
    CHECK(getrusage(RUSAGE_SELF, &after) == 0);
    /* No thread of the library polls a closed one in a loop. */
    CHECK(after.ru_utime.tv_sec - before.ru_utime.tv_sec < 2);
    use();
    /* Not destroy(), which closes those that the library had: the program's, by now. */
}

/* Another user, another root, another directory: what exists goes on. */
static void other_user(void) {
    create();
    CHECK(chdir("/") == 0);
    umask(0777);
    if (geteuid() == 0 && !valgrind) {
        CHECK(chroot("/proc/self/fdinfo") == 0 || chroot("/sys") == 0);
        CHECK(setgid(65534) == 0 && setuid(65534) == 0);
    }
    use();
    pf_domain_t *other;
    OK(pf_domain_soft(&other));
    OK(pf_domain_destroy(other));
    use();
    destroy();
}

/* A file that may not be as long is an error, where the kernel would end the process (SIGXFSZ). */
static void long_files(void) {
    char path[] = "/tmp/pinfold-long-XXXXXX";
    struct rlimit most;
    struct pf_arena_opts opts = {.struct_size = sizeof opts, .size = 8 << 20};
    struct pf_nvme_opts model = {.struct_size = sizeof model, .size = 2 << 20, .path = path};
    pf_nvme_t *of_file;
    pf_arena_t *shared;
    create();
    int fd = mkstemp(path);
    CHECK(fd >= 0 && ftruncate(fd, 2 << 20) == 0);
    CHECK(getrlimit(RLIMIT_FSIZE, &most) == 0);
    most.rlim_cur = 1 << 20;
    CHECK(setrlimit(RLIMIT_FSIZE, &most) == 0);
    opts.sources = PF_SOURCE_MEMFD;
    REFUSED(ENOMEM, "ulimit -f 8192", pf_arena_create(domain, &opts, &shared));
    opts.size = 1 << 20;
    OK(pf_arena_create(domain, &opts, &shared));
    OK(pf_arena_destroy(shared));
    /* As long as it is. */
    OK(pf_nvme_open(domain, arena, &model, &of_file));
    OK(pf_nvme_destroy(of_file));
    model.size += 512;
    REFUSED(EFBIG, "RLIMIT_FSIZE", pf_nvme_open(domain, arena, &model, &of_file));
    CHECK(unlink(path) == 0 && close(fd) == 0);
    REFUSED(EFBIG, "RLIMIT_FSIZE", pf_nvme_open(domain, arena, &model, &of_file));
    CHECK(access(path, F_OK) != 0);
    use();
    destroy();
}

static void nothing(int number) {
    (void)number;
}

static void *interrupt(void *thread) {
    const struct timespec pause = {.tv_nsec = 200000};
    while (!__atomic_load_n(&returned, __ATOMIC_RELAXED)) {
        pthread_kill(*(pthread_t *)thread, SIGUSR1);
        nanosleep(&pause, NULL);
    }
    return NULL;
}

/* Handlers without SA_RESTART: no call ends early, or with EINTR. */
static void interrupted(void) {
    struct sigaction action = {.sa_handler = nothing};
    pthread_t self = pthread_self(), thread;
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    create();
    returned = 0;
    CHECK(pthread_create(&thread, NULL, interrupt, &self) == 0);
    for (int round = 0; round < (valgrind ? 3 : 30); round++)
        for (int which = 0; which < CALLS; which++)
            one_call(which);
    __atomic_store_n(&returned, 1, __ATOMIC_RELAXED);
    CHECK(pthread_join(thread, NULL) == 0);
    destroy();
}

/* Runs a case in a process of its own. It ends by returning, with 7, or by `number`. */
static void run(const char *name, void (*body)(void), int number) {
    int status;
    pid_t child = fork();
    if (child == 0) {
        body();
        fflush(stdout);
        leave();
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    if (number ? !WIFSIGNALED(status) || WTERMSIG(status) != number
               : !succeeded(status)) {
        fprintf(stderr, "%s: status %#x\n", name, status);
        exit(1);
    }
}

#define RUN(body) run(#body, body, 0)

int main(void) {
    const char *checker = getenv("CHECKER");
    valgrind = checker != NULL && strcmp(checker, "valgrind") == 0;
    RUN(signals);
    RUN(nothing_is_changed);
    RUN(children);
    RUN(exits);
    RUN(exits_quickly);
    RUN(main_thread_ends);
    RUN(thread_ends);
    RUN(cancels);
    run("thread_exits_in_a_call", thread_exits_in_a_call, SIGABRT);
    RUN(jumps);
    RUN(closes_descriptors);
    RUN(other_user);
    RUN(long_files);
    RUN(interrupted);
    puts("process: ok");
    return 0;
}
