/*
 * Fills blocks of BYTES bytes at multiples of ALIGN, MIB in all, frees all but the last, and fills as
 * much in ordinary blocks. Prints the peak of the resident memory in KiB.
 *
 *   over_aligned MIB BYTES ALIGN
 */
#include "check.h"

#include <sys/resource.h>

int main(int argc, char **argv)
{
    enum { ORDINARY = 1000 };
    CHECK(argc == 4);
    size_t all = (size_t)atol(argv[1]) * MIB, bytes = (size_t)atol(argv[2]), align = (size_t)atol(argv[3]);
    size_t count = all / bytes, others = all / ORDINARY;
    void **blocks = malloc(count * sizeof *blocks);
    CHECK(blocks != NULL);
    for (size_t i = 0; i < count; i++) {
        CHECK(posix_memalign(&blocks[i], align, bytes) == 0 && (uintptr_t)blocks[i] % align == 0);
        memset(blocks[i], (int)i, bytes);
    }
    for (size_t i = 0; i < count; i++) {
        for (size_t at = 0; at < bytes; at++)
            CHECK(((char *)blocks[i])[at] == (char)i);
        if (i + 1 < count)
            free(blocks[i]);
    }
    for (size_t i = 0; i < others; i++) {
        char *block = malloc(ORDINARY);
        CHECK(block != NULL);
        memset(block, 1, ORDINARY);
    }
    struct rusage usage;
    CHECK(getrusage(RUSAGE_SELF, &usage) == 0);
    printf("peak=%ld\n", usage.ru_maxrss);
    return 0;
}
