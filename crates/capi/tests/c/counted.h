/* What scripts/capi makes each call of the library in a test into: a call that is counted. */
#ifndef COUNTED_H
#define COUNTED_H

/* How often this thread has allocated. */
extern _Thread_local unsigned long counted_allocations;

/* Notes in the file $COUNTED whether a call that succeeded has allocated since `before`. */
void counted_call(unsigned number, const char *name, int succeeded, unsigned long before);

#endif
