/* Allocates small objects, limits its address space to 300 MiB, and allocates nearly all of it.
 * Then it shrinks a block, for which no further memory is available or needed. */
#include "check.h"
#include <sys/resource.h>

int main(void)
{
    for (int at = 0; at < 40000; at++)
        CHECK(malloc(64) != NULL);
    char *block = malloc(MIB);
    CHECK(block != NULL);
    memset(block, 7, MIB);
    struct rlimit limit = {300 * MIB, 300 * MIB};
    CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
    int blocks = 0;
    while (malloc(MIB) != NULL)
        blocks++;
    CHECK(blocks >= 270);
    for (size_t size = MIB / 2; size >= 16; size /= 2)
        while (malloc(size) != NULL)
            ;
    errno = 0;
    block = realloc(block, 1000);
    CHECK(block != NULL && errno == 0 && block[0] == 7 && block[999] == 7);
    puts("all there");
    return 0;
}
