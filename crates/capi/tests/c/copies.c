/* Copies of the library in one process: a handle of one is no handle of another, and a copy that
 * was closed is not gone. */
#include "check.h"
#include <dlfcn.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

static int (*soft)(pf_domain_t **), (*put)(pf_domain_t *);
static const char *(*last)(void);

static void *opened(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    *(void **)&soft = dlsym(library, "pf_domain_soft");
    *(void **)&put = dlsym(library, "pf_domain_destroy");
    *(void **)&last = dlsym(library, "pf_strerror_last");
    CHECK(soft != NULL && put != NULL && last != NULL);
    return library;
}

static void copy(const char *from, const char *to) {
    static char bytes[1 << 16];
    FILE *source = fopen(from, "rb"), *target = fopen(to, "wb");
    CHECK(source != NULL && target != NULL);
    size_t count;
    while ((count = fread(bytes, 1, sizeof bytes, source)) > 0)
        CHECK(fwrite(bytes, 1, count, target) == count);
    CHECK(fclose(source) == 0 && fclose(target) == 0);
}

int main(void) {
    Dl_info info;
    pf_domain_t *ours, *theirs, *first;
    char other[] = "/tmp/pinfold-copy-XXXXXX", path[PATH_MAX];
    int fd = mkstemp(other);
    CHECK(fd >= 0 && close(fd) == 0);
    CHECK(dladdr((void *)(uintptr_t)pf_domain_soft, &info) != 0);
    CHECK(realpath(info.dli_fname, path) != NULL);
    copy(path, other);

    /* Beside the one that the program is linked with: the first handle of each. */
    void *library = opened(other);
    CHECK(soft != pf_domain_soft);
    OK(pf_domain_soft(&ours));
    CHECK(soft(&theirs) == 0 && ours != theirs);
    REFUSED(EBADF, "copy of libpinfold", pf_domain_destroy(theirs));
    CHECK(put(ours) == -EBADF && strstr(last(), "copy of libpinfold") != NULL);

    /* The symbols have a version, so that a program of another soname is told so when it begins. */
    CHECK(dlvsym(library, "pf_domain_soft", "PINFOLD_0.2") == (void *)(uintptr_t)soft);
    CHECK(dlvsym(library, "pf_domain_soft", "PINFOLD_0.1") == NULL);
    CHECK(dlsym(library, "pf_domain_put") == NULL);

    /* Closed and opened again: it never went, and its objects are what they were. */
    int (*before)(pf_domain_t **) = soft;
    first = theirs;
    CHECK(dlclose(library) == 0);
    library = opened(other);
    CHECK(soft == before);
    CHECK(soft(&theirs) == 0 && theirs != first);
    CHECK(put(first) == 0 && put(first) == -EBADF && put(theirs) == 0);
    CHECK(dlclose(library) == 0);
    CHECK(unlink(other) == 0);
    OK(pf_domain_destroy(ours));
    REFUSED(EBADF, "destroyed", pf_domain_destroy(ours));
    puts("copies: ok");
    return 0;
}
