/* Defines dl_iterate_phdr(3), and is ready for a call only once its own constructor has run. With
 * PLAIN: does not define it. */
#include "check.h"

#include <link.h>

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
