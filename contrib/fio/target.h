/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Targets: controllers with the domain that they are in. The jobs of a process share them. */
#ifndef PINFOLD_FIO_TARGET_H
#define PINFOLD_FIO_TARGET_H

#include <pinfold.h>
#include <stddef.h>
#include <stdint.h>

/* A target that is open. */
struct target {
    struct target *next;
    /* As the user named it. */
    char *name;
    /* Jobs that have it open. */
    unsigned jobs;
    pf_domain_t *domain;
    /* Rings and PRP lists. */
    pf_arena_t *arena;
    pf_nvme_t *nvme;
    /* Of the namespace. */
    struct pf_nvme_info info;
};

/*
 * Opens a target, or returns the one that another job of this process has open under this name.
 *
 * @name: soft:SIZE, soft:IMAGE (each with ",block=512" or ",block=4096") or vfio:BDF[/NSID], as
 * the program `pinfold` takes them.
 * @out: where the target is stored.
 * @why: where the reason of a failure is written: a sentence.
 *
 * Return: 0, or -errno.
 * Thread: any. Ends with target_close().
 */
int target_open(const char *name, struct target **out, char *why, size_t why_len);

/*
 * Closes a target for one job; the last one resets its controller.
 *
 * Return: 0, or -errno: EBUSY (a request timed out, so its memory is quarantined); pf_strerror_last()
 * has the reason. Memory that could not be released stays until the process ends.
 */
int target_close(struct target *target);

#endif
