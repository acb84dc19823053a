/* SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "target.h"
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The rings and PRP lists of all queues. */
#define ARENA_BYTES (16u << 20)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct target *targets;

/* The fields of a name. */
struct spec {
    enum { SOFT_MEMORY, SOFT_IMAGE, VFIO } kind;
    uint64_t size;
    uint32_t block_bytes;
    /* 0: the first. */
    uint32_t nsid;
    /* The image, or the device's address. */
    char text[4096];
};

/* Reads "4G" as `pinfold` does. Returns whether the whole word is a size. */
static bool is_size(const char *word, uint64_t *size) {
    static const struct {
        const char *name;
        unsigned shift;
    } units[] = {{"", 0},     {"b", 0},   {"k", 10}, {"kb", 10},  {"kib", 10}, {"m", 20}, {"mb", 20},
                 {"mib", 20}, {"g", 30},  {"gb", 30}, {"gib", 30}, {"t", 40},   {"tb", 40}, {"tib", 40}};
    if (*word < '0' || *word > '9')
        return false;
    char *unit;
    errno = 0;
    unsigned long long number = strtoull(word, &unit, 10);
    if (errno)
        return false;
    for (size_t at = 0; at < sizeof units / sizeof *units; at++)
        if (strcasecmp(unit, units[at].name) == 0) {
            *size = number << units[at].shift;
            return *size >> units[at].shift == number;
        }
    return false;
}

/* Splits "64M,block=4k" at its option. */
static int parse_soft(const char *rest, struct spec *spec, char *why, size_t why_len) {
    snprintf(spec->text, sizeof spec->text, "%s", rest);
    spec->block_bytes = 512;
    char *comma = strrchr(spec->text, ',');
    if (comma && strncmp(comma, ",block=", 7) == 0) {
        uint64_t bytes = 0;
        if (!is_size(comma + 7, &bytes) || (bytes != 512 && bytes != 4096)) {
            snprintf(why, why_len, "%s: blocks have 512 or 4096 bytes", comma + 1);
            return -EINVAL;
        }
        spec->block_bytes = (uint32_t)bytes;
        *comma = 0;
    } else if (comma && strncmp(comma, ",not-ready=", 11) == 0) {
        snprintf(why, why_len, "%s is an option of the program pinfold alone", comma + 1);
        return -EINVAL;
    }
    spec->kind = is_size(spec->text, &spec->size) ? SOFT_MEMORY : SOFT_IMAGE;
    return 0;
}

static int parse_vfio(const char *rest, struct spec *spec, char *why, size_t why_len) {
    snprintf(spec->text, sizeof spec->text, "%s", rest);
    spec->kind = VFIO;
    char *slash = strchr(spec->text, '/');
    if (slash) {
        char *end;
        errno = 0;
        unsigned long nsid = strtoul(slash + 1, &end, 10);
        if (errno || slash[1] < '0' || slash[1] > '9' || *end || nsid == 0 || nsid >= UINT32_MAX) {
            snprintf(why, why_len, "%s is not the number of a namespace: write vfio:BDF/NSID",
                     slash + 1);
            return -EINVAL;
        }
        spec->nsid = (uint32_t)nsid;
        *slash = 0;
    }
    return 0;
}

static int parse(const char *name, struct spec *spec, char *why, size_t why_len) {
    memset(spec, 0, sizeof *spec);
    const char *colon = strchr(name, ':');
    if (!colon || !colon[1] || strlen(name) >= sizeof spec->text) {
        snprintf(why, why_len, "\"%.64s\" names no target: write soft:SIZE, soft:IMAGE or "
                 "vfio:BDF[/NSID]", name);
        return -EINVAL;
    }
    if (strncmp(name, "soft:", 5) == 0)
        return parse_soft(colon + 1, spec, why, why_len);
    if (strncmp(name, "vfio:", 5) == 0)
        return parse_vfio(colon + 1, spec, why, why_len);
    snprintf(why, why_len, "\"%.64s\" is not a kind of target: write soft:SIZE, soft:IMAGE or "
             "vfio:BDF[/NSID] (files: fio's io_uring)", name);
    return -EINVAL;
}

/* Releases what is open of a target, last first. Stops where something is still in use. */
static int release(struct target *target) {
    int failed = 0;
    if (target->nvme)
        failed = pf_nvme_destroy(target->nvme);
    if (!failed && target->arena)
        failed = pf_arena_destroy(target->arena);
    if (!failed && target->domain)
        failed = pf_domain_destroy(target->domain);
    free(target->name);
    free(target);
    return failed;
}

/* Opens the parts. The caller releases them if one fails. */
static int open_parts(struct target *target, const struct spec *spec) {
    struct pf_nvme_opts nvme = {.struct_size = sizeof nvme};
    /* The rings, which the controller reaches all the time. */
    struct pf_arena_opts arena = {
        .struct_size = sizeof arena, .size = ARENA_BYTES, .policy = PF_POLICY_WHOLE};
    int failed;
    if (spec->kind == VFIO) {
        nvme.bdf = spec->text;
        failed = pf_domain_vfio(spec->text, PF_IOMMU_BEST, &target->domain);
    } else {
        nvme.size = spec->size;
        nvme.block_bytes = spec->block_bytes;
        if (spec->kind == SOFT_IMAGE)
            nvme.path = spec->text;
        failed = pf_domain_soft(&target->domain);
    }
    if (!failed)
        failed = pf_arena_create(target->domain, &arena, &target->arena);
    if (!failed)
        failed = pf_nvme_open(target->domain, target->arena, &nvme, &target->nvme);
    target->info.struct_size = sizeof target->info;
    if (!failed)
        failed = pf_nvme_info(target->nvme, spec->nsid, &target->info);
    return failed;
}

int target_open(const char *name, struct target **out, char *why, size_t why_len) {
    struct spec spec;
    int failed = parse(name, &spec, why, why_len);
    if (failed)
        return failed;
    pthread_mutex_lock(&lock);
    struct target *target = targets;
    while (target && strcmp(target->name, name) != 0)
        target = target->next;
    if (!target) {
        target = calloc(1, sizeof *target);
        if (target)
            target->name = strdup(name);
        if (!target || !target->name) {
            snprintf(why, why_len, "out of memory");
            failed = -ENOMEM;
        } else {
            failed = open_parts(target, &spec);
            if (failed)
                snprintf(why, why_len, "%s", pf_strerror_last());
        }
        if (failed) {
            if (target)
                release(target);
            target = NULL;
        } else {
            target->next = targets;
            targets = target;
        }
    }
    if (target)
        target->jobs++;
    pthread_mutex_unlock(&lock);
    *out = target;
    return failed;
}

int target_close(struct target *target) {
    int failed = 0;
    pthread_mutex_lock(&lock);
    if (--target->jobs == 0) {
        struct target **at = &targets;
        while (*at != target)
            at = &(*at)->next;
        *at = target->next;
        failed = release(target);
    }
    pthread_mutex_unlock(&lock);
    return failed;
}
