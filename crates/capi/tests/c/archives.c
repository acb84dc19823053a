/* The static library beside another archive made by Rust, and beside the shared one. */
#include "check.h"
#include <dlfcn.h>

uint32_t other_sum(uint32_t count);

int main(int argc, char **argv) {
    pf_domain_t *ours, *theirs;
    int (*soft)(pf_domain_t **), (*put)(pf_domain_t *);
    const char *(*last)(void);
    OK(pf_domain_soft(&ours));
    CHECK(other_sum(5) == 10);
    CHECK(argc == 2);
    void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL);
    *(void **)&soft = dlsym(library, "pf_domain_soft");
    *(void **)&put = dlsym(library, "pf_domain_destroy");
    *(void **)&last = dlsym(library, "pf_strerror_last");
    CHECK(soft != NULL && put != NULL && last != NULL && soft != pf_domain_soft);
    CHECK(soft(&theirs) == 0 && theirs != ours);
    REFUSED(EBADF, "copy of libpinfold", pf_domain_destroy(theirs));
    CHECK(put(ours) == -EBADF && strstr(last(), "copy of libpinfold") != NULL);
    CHECK(put(theirs) == 0);
    OK(pf_domain_destroy(ours));
    puts("archives: ok");
    return 0;
}
