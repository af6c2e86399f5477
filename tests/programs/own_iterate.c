/* With WRAPPED: a library that wraps the program's start, as tracers do. Else: defines dl_iterate_phdr(3), and is ready for a call only once its own constructor has run. With
 * PLAIN: does not define it. */
#include "check.h"

#include <dlfcn.h>
#include <link.h>

#ifdef WRAPPED
typedef int start(int (*)(int, char **, char **), int, char **, void (*)(void), void (*)(void), void (*)(void), void *);

int __libc_start_main(int (*program)(int, char **, char **), int count, char **words, void (*before)(void), void (*after)(void),
                      void (*end)(void), void *stack)
{
    return ((start *)dlsym(RTLD_NEXT, "__libc_start_main"))(program, count, words, before, after, end, stack);
}
#else
#ifndef PLAIN
static int is_ready;

__attribute__((constructor)) static void start(void) { is_ready = 1; }

int dl_iterate_phdr(int (*visit)(struct dl_phdr_info *, size_t, void *), void *data)
{
    (void)visit;
    (void)data;
    CHECK(is_ready);
    return 0;
}
#endif

int main(void)
{
    char *block = malloc(64 * MIB);
    CHECK(block != NULL);
    memset(block, 1, 64 * MIB);
    observe(block);
    puts("started");
    return 0;
}
#endif
