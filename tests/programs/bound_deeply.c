/* A library that is loaded with RTLD_DEEPBIND: its calls of malloc(3) and free(3) find the C library's own functions, unless
 * the flag is taken away. */
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

/* dlopen(3) from here: $ORIGIN and RUNPATH are this library's. */
void *open_from_here(const char *name, int flags)
{
    return dlopen(name, flags);
}
