/* Owners, mappings and tickets: every function, and every misuse. */
#include "traced.h"
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/uio.h>
#include <unistd.h>

enum { MANY = 100000 };

static pf_domain_t *domain;
static pf_arena_t *arena; /* mapped per use */
static pf_owner_t *owner;

static void create(void) {
    struct pf_arena_opts opts = {
        .struct_size = sizeof opts, .size = 4 << 20, .policy = PF_POLICY_PER_USE};
    OK(pf_domain_soft(&domain));
    OK(pf_arena_create(domain, &opts, &arena));
    REFUSED(EFAULT, "`out` is NULL", pf_owner_create(domain, NULL));
    REFUSED(EBADF, "no handle of a domain", pf_owner_create(NULL, &owner));
    REFUSED(EBADF, "not of a domain", pf_owner_create((pf_domain_t *)arena, &owner));
    OK(pf_owner_create(domain, &owner));
    REFUSED(EBADF, "not of an owner", pf_owner_destroy((pf_owner_t *)domain));
    OK(pf_owner_destroy(NULL));
}

static void one(void) {
    pf_map_t map, none = {0, 0};
    pf_ticket_t ticket;
    uint64_t iova, other;
    char *memory = pf_alloc(arena, 20000, NULL);
    REFUSED(ENXIO, "mapped per use", pf_iova(domain, memory, 1, &iova));
    REFUSED(EFAULT, "`map` is NULL", pf_map(owner, memory, 1, PF_BIDIR, NULL, &iova));
    REFUSED(EFAULT, "`iova` is NULL", pf_map(owner, memory, 1, PF_BIDIR, &map, NULL));
    REFUSED(EBADF, "no handle of an owner", pf_map(NULL, memory, 1, PF_BIDIR, &map, &iova));
    REFUSED(EINVAL, "direction 0", pf_map(owner, memory, 1, 0, &map, &iova));
    REFUSED(EINVAL, "direction 4", pf_map(owner, memory, 1, 4, &map, &iova));
    REFUSED(EINVAL, "at least 1", pf_map(owner, memory, 0, PF_BIDIR, &map, &iova));
    REFUSED(EINVAL, "not all allocated", pf_map(owner, memory, 20481, PF_BIDIR, &map, &iova));
    REFUSED(EINVAL, "not inside", pf_map(owner, memory, SIZE_MAX, PF_BIDIR, &map, &iova));
    REFUSED(ENXIO, "no memory of this domain", pf_map(owner, NULL, 1, PF_BIDIR, &map, &iova));
    REFUSED(ENXIO, "pf_register", pf_map(owner, &iova, 8, PF_BIDIR, &map, &iova));

    /* Any bytes, in any direction. */
    OK(pf_map(owner, memory + 5000, 10000, PF_FROM_DEVICE, &map, &iova));
    CHECK(iova % 4096 == 5000 % 4096);
    REFUSED(EBUSY, "in use by 1 mapping", pf_free(arena, memory));
    REFUSED(EBUSY, "1 live mapping", pf_owner_destroy(owner));
    REFUSED(ESTALE, "mapping 0", pf_unmap(owner, none));
    REFUSED(ESTALE, "ended before", pf_unmap(owner, (pf_map_t){map.id, map.gen + 1}));
    REFUSED(ESTALE, "ended before", pf_unmap(owner, (pf_map_t){map.id + 1, map.gen}));
    REFUSED(ESTALE, "ended before", pf_unmap(owner, (pf_map_t){UINT64_MAX, map.gen}));
    OK(pf_unmap(owner, map));
    REFUSED(ESTALE, "ended before", pf_unmap(owner, map));
    REFUSED(ESTALE, "ended before", pf_revoke_many(owner, &map, 1, &ticket));
    for (unsigned dir = PF_TO_DEVICE; dir <= PF_BIDIR; dir++) {
        pf_map_t again;
        OK(pf_map(owner, memory, 20480, dir, &again, &other));
        REFUSED(ESTALE, "ended before", pf_unmap(owner, map));
        OK(pf_unmap(owner, again));
        map = again;
    }
    OK(pf_free(arena, memory));
    REFUSED(EINVAL, "freed before", pf_map(owner, memory, 1, PF_BIDIR, &map, &iova));
}

static void of_another_owner(void) {
    pf_owner_t *second;
    pf_map_t map, its;
    uint64_t iova;
    pf_ticket_t ticket;
    char *memory = pf_alloc(arena, 4096, NULL);
    OK(pf_owner_create(domain, &second));
    OK(pf_map(owner, memory, 1, PF_BIDIR, &map, &iova));
    OK(pf_map(second, memory, 1, PF_BIDIR, &its, &iova));
    REFUSED(ESTALE, "never made it", pf_unmap(second, map));
    REFUSED(ESTALE, "never made it", pf_unmap(owner, its));
    REFUSED(EBUSY, "in use by 2 mappings", pf_free(arena, memory));
    OK(pf_revoke_many(second, &its, 1, &ticket));
    REFUSED(ESTALE, "none of this owner", pf_wait(owner, (pf_ticket_t){1000}, 0));
    OK(pf_wait(second, ticket, UINT64_MAX));
    OK(pf_owner_destroy(second));
    REFUSED(EBADF, "destroyed", pf_wait(second, ticket, 0));
    REFUSED(EBADF, "destroyed", pf_owner_destroy(second));
    OK(pf_unmap(owner, map));
    OK(pf_free(arena, memory));
}

static void many(void) {
    struct iovec iov[9];
    pf_map_t maps[9], kept[9];
    uint64_t iovas[9];
    char *memory = pf_alloc(arena, 9 * 4096, NULL);
    for (int i = 0; i < 9; i++)
        iov[i] = (struct iovec){memory + i * 4096 + i, 4096 - i};
    OK(pf_map_many(owner, NULL, 0, PF_BIDIR, NULL, NULL));
    REFUSED(EINVAL, "direction 9", pf_map_many(owner, iov, 9, 9, maps, iovas));
    REFUSED(EFAULT, "`iov` is NULL", pf_map_many(owner, NULL, 9, PF_BIDIR, maps, iovas));
    REFUSED(EFAULT, "`maps` is NULL", pf_map_many(owner, iov, 9, PF_BIDIR, NULL, iovas));
    REFUSED(EFAULT, "`iovas` is NULL", pf_map_many(owner, iov, 9, PF_BIDIR, maps, NULL));
    /* None, if one is refused. */
    memset(maps, 0x77, sizeof maps);
    memcpy(kept, maps, sizeof maps);
    iov[6].iov_base = &iov;
    REFUSED(ENXIO, "piece 6", pf_map_many(owner, iov, 9, PF_BIDIR, maps, iovas));
    iov[6] = (struct iovec){memory + 6 * 4096, 4 * 4096};
    REFUSED(EINVAL, "piece 6", pf_map_many(owner, iov, 9, PF_BIDIR, maps, iovas));
    CHECK(memcmp(maps, kept, sizeof maps) == 0);
    OK(pf_free(arena, memory));
    CHECK(pf_alloc(arena, 9 * 4096, NULL) == memory);
    iov[6] = (struct iovec){memory + 6 * 4096 + 6, 4096 - 6};
    OK(pf_map_many(owner, iov, 9, PF_FROM_DEVICE, maps, iovas));
    for (int i = 0; i < 9; i++)
        CHECK(iovas[i] == iovas[0] + i * 4097); /* one range */
    REFUSED(EBUSY, "in use by 9 mappings", pf_free(arena, memory));

    pf_ticket_t ticket, next;
    REFUSED(EFAULT, "`ticket` is NULL", pf_revoke_many(owner, maps, 9, NULL));
    REFUSED(EFAULT, "`maps` is NULL", pf_revoke_many(owner, NULL, 9, &ticket));
    /* The same one twice: nothing is revoked. */
    memcpy(kept, maps, sizeof maps);
    maps[8] = maps[2];
    REFUSED(ESTALE, "mapping 8", pf_revoke_many(owner, maps, 9, &ticket));
    CHECK(strstr(pf_strerror_last(), "there twice") != NULL);
    memcpy(maps, kept, sizeof maps);
    maps[4].gen++;
    REFUSED(ESTALE, "mapping 4", pf_revoke_many(owner, maps, 9, &ticket));
    CHECK(strstr(pf_strerror_last(), "ended before") != NULL);
    REFUSED(EBUSY, "9 live mappings", pf_owner_destroy(owner));
    OK(pf_revoke_many(owner, kept, 4, &ticket));
    OK(pf_revoke_many(owner, kept + 4, 5, &next));
    REFUSED(ESTALE, "mapping 0", pf_revoke_many(owner, kept, 9, &ticket));
    REFUSED(ESTALE, "ticket 0", pf_quiesced(owner, (pf_ticket_t){0}));
    REFUSED(ESTALE, "none of this owner", pf_quiesced(owner, (pf_ticket_t){next.seq + 1}));
    REFUSED(ESTALE, "none of this owner", pf_wait(owner, (pf_ticket_t){UINT64_MAX}, 0));
    pf_owner_t *other;
    pf_ticket_t own;
    OK(pf_owner_create(domain, &other));
    OK(pf_revoke_many(other, NULL, 0, &own));
    REFUSED(ESTALE, "none of this owner", pf_quiesced(other, ticket));
    REFUSED(ESTALE, "none of this owner", pf_wait(owner, own, 0));
    OK(pf_owner_destroy(other));
    REFUSED(EBADF, "no handle", pf_wait(NULL, ticket, 0));
    REFUSED(EBADF, "no handle", pf_quiesced((pf_owner_t *)&ticket, ticket));
    /* In any order, and again. */
    OK(pf_wait(owner, next, UINT64_MAX));
    REFUSED(EBUSY, "in use by 4 mappings", pf_free(arena, memory));
    while (VALUE(pf_quiesced(owner, ticket)) == 0) {
    }
    CHECK(pf_quiesced(owner, ticket) == 1 && pf_quiesced(owner, next) == 1);
    OK(pf_wait(owner, ticket, 0));
    OK(pf_free(arena, memory));
    /* None. */
    OK(pf_revoke_many(owner, NULL, 0, &ticket));
    CHECK(pf_quiesced(owner, ticket) == 1);
}

static void announced(void) {
    int fd = (int)VALUE(pf_quiesce_fd(owner));
    CHECK(pf_quiesce_fd(owner) == fd);
    REFUSED(EBADF, "no handle", pf_quiesce_fd(NULL));
    char *memory = pf_alloc(arena, 4096, NULL);
    pf_ticket_t tickets[16];
    uint64_t iova, count;
    for (int round = 0; round < 100; round++) {
        for (int i = 0; i < 16; i++) {
            pf_map_t map;
            OK(pf_map(owner, memory, 4096, PF_BIDIR, &map, &iova));
            OK(pf_revoke_many(owner, &map, 1, &tickets[i]));
        }
        int done = 0;
        while (done < 16) {
            struct pollfd ready = {.fd = fd, .events = POLLIN};
            CHECK(poll(&ready, 1, 60000) == 1);
            CHECK(read(fd, &count, 8) == 8 && count > 0);
            while (done < 16 && VALUE(pf_quiesced(owner, tickets[done])) == 1)
                done++;
        }
    }
    OK(pf_free(arena, memory));
    while (read(fd, &count, 8) == 8) {
    }
    CHECK(errno == EAGAIN);
}

static void live_by_the_hundred_thousand(void) {
    struct pf_arena_opts opts = {
        .struct_size = sizeof opts, .size = 16 << 20, .policy = PF_POLICY_PER_USE};
    pf_arena_t *pages;
    pf_map_t *maps = calloc(MANY, sizeof *maps);
    uint64_t iova, last = 0;
    pf_ticket_t ticket;
    OK(pf_arena_create(domain, &opts, &pages));
    char *memory = pf_alloc(pages, 8 << 20, NULL);
    for (size_t i = 0; i < MANY; i++) {
        OK(pf_map(owner, memory + i % 2048 * 4096, 4096, PF_TO_DEVICE, &maps[i], &iova));
        CHECK(iova != last);
        last = iova;
    }
    REFUSED(EBUSY, "100000 mappings", pf_free(pages, memory));
    REFUSED(EBUSY, "100000 live mappings", pf_owner_destroy(owner));
    /* Each name once: those of one half by one call, the others one by one in another order. */
    OK(pf_revoke_many(owner, maps, MANY / 2, &ticket));
    REFUSED(ESTALE, "mapping 0", pf_revoke_many(owner, maps + MANY / 2 - 1, 2, &ticket));
    for (size_t i = MANY; i-- > MANY / 2;)
        OK(pf_unmap(owner, maps[i]));
    for (size_t i = 0; i < MANY; i++)
        CHECK(pf_unmap(owner, maps[i]) == -ESTALE);
    OK(pf_wait(owner, ticket, UINT64_MAX));
    OK(pf_free(pages, memory));
    OK(pf_arena_destroy(pages));
    free(maps);
}

static int between(uintptr_t first, const void *caller, uintptr_t last) {
    return first < (uintptr_t)caller && (uintptr_t)caller < last;
}

static void traced(void) {
    char *memory = pf_alloc(arena, 3 * 4096, NULL);
    struct iovec iov[2] = {{memory + 1, 2}, {memory + 4096, 8192}};
    pf_map_t map, maps[2];
    pf_ticket_t ticket;
    uint64_t iova, iovas[2];
    pf_trace_set(note, &events, NULL);
    uintptr_t start = here();
    int mapped = pf_map(owner, memory + 100, 5000, PF_BIDIR, &map, &iova);
    uintptr_t second = here();
    int many = pf_map_many(owner, iov, 2, PF_BIDIR, maps, iovas);
    uintptr_t third = here();
    int unmapped = pf_unmap(owner, map);
    uintptr_t fourth = here();
    int revoked = pf_revoke_many(owner, maps, 2, &ticket);
    uintptr_t end = here();
    OK(mapped), OK(many), OK(unmapped), OK(revoked);
    CHECK(pf_unmap(owner, map) == -ESTALE);
    pf_trace_set(NULL, NULL, NULL);
    OK(pf_wait(owner, ticket, UINT64_MAX));
    CHECK(events == 6);
    for (int i = 0; i < 6; i++) {
        CHECK(seen[i].kind == (i < 3 ? PF_EVENT_MAP : PF_EVENT_REVOKE));
        CHECK(seen[i].handle == (uint64_t)(uintptr_t)owner);
    }
    CHECK(seen[0].va == memory + 100 && seen[0].iova == iova && seen[0].len == 5000);
    CHECK(seen[3].va == memory + 100 && seen[3].iova == iova && seen[3].len == 5000);
    for (int i = 0; i < 2; i++) {
        CHECK(seen[1 + i].va == iov[i].iov_base && seen[1 + i].iova == iovas[i]);
        CHECK(seen[1 + i].len == iov[i].iov_len);
        CHECK(seen[4 + i].va == iov[i].iov_base && seen[4 + i].iova == iovas[i]);
        CHECK(seen[4 + i].len == iov[i].iov_len);
        CHECK(between(second, seen[1 + i].caller, third));
        CHECK(between(fourth, seen[4 + i].caller, end));
    }
    CHECK(between(start, seen[0].caller, second) && between(third, seen[3].caller, fourth));
    OK(pf_free(arena, memory));
}

static void *disturb(void *busy) {
    pf_ticket_t ticket;
    for (int i = 0; i < 200000; i++) {
        int result = pf_revoke_many(owner, NULL, 0, &ticket);
        CHECK(result == 0 || result == -EBUSY);
        if (result == 0)
            CHECK(pf_wait(owner, ticket, 0) != -ESTALE);
        else
            (*(int *)busy)++;
    }
    return NULL;
}

/* Two threads with one owner: each call is refused, or alone. */
static void by_two_threads(void) {
    pthread_t thread;
    int busy = 0, mine = 0, done = 0;
    pf_map_t map;
    uint64_t iova;
    char *memory = pf_alloc(arena, 4096, NULL);
    CHECK(pthread_create(&thread, NULL, disturb, &busy) == 0);
    while (done < 20000) {
        int result = pf_map(owner, memory, 4096, PF_BIDIR, &map, &iova);
        CHECK(result == 0 || result == -EBUSY);
        mine += result == -EBUSY;
        if (result == 0) {
            while ((result = pf_unmap(owner, map)) == -EBUSY)
                mine++;
            OK(result);
            done++;
        }
    }
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(busy + mine > 0);
    OK(pf_free(arena, memory));
}

static void quarantined(void) {
    struct pf_held held = {.struct_size = sizeof held, .deferred = 7};
    char why[200];
    long len = VALUE(pf_quarantine(domain, &held, why, sizeof why));
    CHECK(held.struct_size == sizeof held && held.deferred == 0 && held.quarantined_bytes == 0);
    CHECK((size_t)len == strlen(why) && strstr(why, "no memory is held") != NULL);
    CHECK(pf_quarantine(domain, NULL, why, 3) == len && strcmp(why, "no") == 0);
    CHECK(pf_quarantine(domain, NULL, NULL, 0) == len);
    held.struct_size = 8;
    REFUSED(EINVAL, "8 bytes", pf_quarantine(domain, &held, NULL, 0));
    REFUSED(EBADF, "no handle", pf_quarantine(NULL, &held, NULL, 0));
}

static void full(void) {
    static pf_owner_t *owners[65536];
    unsigned count = 0;
    int result;
    while (count < 65536 && (result = pf_owner_create(domain, &owners[count])) == 0)
        count++;
    CHECK(count == 65535); /* and the one of the other tests */
    REFUSED(ENFILE, "65536 handles", pf_owner_create(domain, &owners[0]));
    while (count > 0)
        OK(pf_owner_destroy(owners[--count]));
}

int main(void) {
    create();
    one();
    of_another_owner();
    many();
    live_by_the_hundred_thousand();
    traced();
    by_two_threads();
    announced();
    quarantined();
    full();
    /* A whole arena: it is where pf_iova() says, and stays there. */
    struct pf_arena_opts opts = {
        .struct_size = sizeof opts, .size = 1 << 20, .policy = PF_POLICY_WHOLE};
    pf_arena_t *whole;
    pf_map_t map, live;
    uint64_t iova, fixed;
    pf_ticket_t ticket;
    OK(pf_arena_create(domain, &opts, &whole));
    char *memory = pf_alloc(whole, 4096, &fixed);
    OK(pf_map(owner, memory + 7, 9, PF_BIDIR, &map, &iova));
    CHECK(iova == fixed + 7);
    REFUSED(EBUSY, "4096 bytes of the arena are in use", pf_arena_destroy(whole));
    CHECK(pf_revoke_many(owner, &map, 1, &ticket) == PF_STAYS_MAPPED);
    CHECK(pf_quiesced(owner, ticket) == 1);
    OK(pf_map(owner, memory, 9, PF_BIDIR, &map, &iova));
    CHECK(pf_unmap(owner, map) == PF_STAYS_MAPPED);
    /* Their ticket completes at once. An end that is refused for a live mapping hands nothing back. */
    pf_owner_t *other;
    OK(pf_owner_create(domain, &other));
    OK(pf_map(other, memory, 9, PF_BIDIR, &map, &iova));
    OK(pf_map(other, memory, 9, PF_BIDIR, &live, &iova));
    CHECK(pf_revoke_many(other, &map, 1, &ticket) == PF_STAYS_MAPPED);
    REFUSED(EBUSY, "1 live mapping, and 1 ticket with 1 mapping", pf_owner_destroy(other));
    CHECK(pf_unmap(other, live) == PF_STAYS_MAPPED);
    OK(pf_owner_destroy(other));
    OK(pf_free(whole, memory));
    OK(pf_arena_destroy(whole));
    /* The domain's handle first: the owner keeps the domain. */
    OK(pf_domain_destroy(domain));
    memory = pf_alloc(arena, 4096, NULL);
    OK(pf_map(owner, memory, 1, PF_BIDIR, &map, &iova));
    OK(pf_revoke_many(owner, &map, 1, &ticket));
    OK(pf_wait(owner, ticket, UINT64_MAX));
    int fd = (int)VALUE(pf_quiesce_fd(owner));
    OK(pf_owner_destroy(owner));
    CHECK(write(fd, "12345678", 8) == -1 && errno == EBADF);
    REFUSED(EBADF, "destroyed", pf_map(owner, memory, 1, PF_BIDIR, &map, &iova));
    OK(pf_free(arena, memory));
    OK(pf_arena_destroy(arena));
    puts("map: ok");
    return 0;
}
