/* What the tests of pf_trace_set() share: the events seen, and the place of a call. */
#ifndef TRACED_H
#define TRACED_H

#include "check.h"
#include <stdint.h>

#define SEEN 64
static struct pf_event seen[SEEN];
static unsigned events;

static void note(void *arg, const struct pf_event *event) {
    CHECK(arg == &events);
    if (events < SEEN)
        seen[events] = *event;
    events++;
}

__attribute__((noinline)) static uintptr_t here(void) {
    __asm__ volatile(""); /* Each call is made. */
    return (uintptr_t)__builtin_return_address(0);
}

#endif
