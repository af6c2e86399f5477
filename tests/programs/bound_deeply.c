/* A library for RTLD_DEEPBIND: its malloc(3) and free(3) are the C library's own, unless jumbo
 * removes the flag. */
#include "check.h"

#include <dlfcn.h>

void free_theirs(void *block)
{
    free(block);
}

void *resize_theirs(void *block, size_t size)
{
    return realloc(block, size);
}

void *give(size_t size)
{
    return malloc(size);
}

/* Calls dlopen(3) from this library, whose $ORIGIN and RUNPATH apply. */
void *open_from_here(const char *name, int flags)
{
    return dlopen(name, flags);
}
