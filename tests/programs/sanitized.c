/* Leaks a block of each function that allocates. AddressSanitizer says so, with the stack of each. */
#include "check.h"

#include <malloc.h>

int main(void)
{
    void *aligned = NULL;
    void *volatile leaked = malloc(11);
    leaked = calloc(3, 4);
    leaked = realloc(NULL, 13);
    CHECK(posix_memalign(&aligned, 64, 14) == 0);
    leaked = aligned;
    aligned = NULL;
    leaked = memalign(64, 15);
    leaked = aligned_alloc(64, 64);
    leaked = valloc(17);
    leaked = NULL;
    puts("leaked");
    fflush(stdout);
    return 0;
}
