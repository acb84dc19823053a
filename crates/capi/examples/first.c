#include <pinfold.h>
#include <stdio.h>

int main(void) {
    struct pf_arena_opts opts = {.struct_size = sizeof opts, .size = 4 << 20};
    pf_domain_t *domain;
    pf_arena_t *arena;
    pf_owner_t *owner;
    pf_map_t map;
    uint64_t iova;
    char *buffer;

    if (pf_domain_soft(&domain) < 0 || pf_arena_create(domain, &opts, &arena) < 0 ||
        pf_owner_create(domain, &owner) < 0 || (buffer = pf_alloc(arena, 8192, NULL)) == NULL ||
        pf_map(owner, buffer, 8192, PF_FROM_DEVICE, &map, &iova) < 0)
        return fprintf(stderr, "%s\n", pf_strerror_last()), 1;
    printf("a device may write 8192 bytes at 0x%llx\n", (unsigned long long)iova);
    if (pf_unmap(owner, map) != 0) /* from here on it cannot */
        return fprintf(stderr, "%s\n", pf_strerror_last()), 1;
    return pf_free(arena, buffer) || pf_owner_destroy(owner) || pf_arena_destroy(arena) ||
           pf_domain_destroy(domain);
}
