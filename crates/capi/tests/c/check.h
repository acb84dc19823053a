/* What the tests in C share: checks that end the program, with the place and the library's message. */
#ifndef CHECK_H
#define CHECK_H

#include <errno.h>
#include <pinfold.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The call succeeds and returns 0. */
#define OK(call) check_ok((call), #call, __FILE__, __LINE__)
/* The call succeeds; its value, of one that returns a number. */
#define VALUE(call) check_value((call), #call, __FILE__, __LINE__)
/* The call is refused with this errno value, and a message that contains `part`. */
#define REFUSED(error, part, call) check_refused((call), (error), (part), #call, __FILE__, __LINE__)
/* The condition holds. */
#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);              \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static inline long check_value(long value, const char *call, const char *file, int line) {
    if (value < 0) {
        fprintf(stderr, "%s:%d: %s: %s: %s\n", file, line, call, strerror((int)-value),
                pf_strerror_last());
        exit(1);
    }
    return value;
}

static inline void check_ok(long value, const char *call, const char *file, int line) {
    if (check_value(value, call, file, line) != 0) {
        fprintf(stderr, "%s:%d: %s: %ld, not 0\n", file, line, call, value);
        exit(1);
    }
}

static inline void check_refused(long value, int error, const char *part, const char *call,
                                 const char *file, int line) {
    if (value != -error || strstr(pf_strerror_last(), part) == NULL) {
        fprintf(stderr, "%s:%d: %s: %ld, not -%d with \"%s\": %s\n", file, line, call, value,
                error, part, value < 0 ? pf_strerror_last() : "success");
        exit(1);
    }
}

#endif
