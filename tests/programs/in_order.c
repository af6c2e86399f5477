/* Starts as an interpreter does, with a few blocks of each of many sizes. Then fills ARG MiB in blocks
 * of ARG bytes, in the order in which they are allocated. Prints the page faults of the fill. */
#include "check.h"

#include <sys/resource.h>

static long faults(void)
{
    struct rusage usage;
    CHECK(getrusage(RUSAGE_SELF, &usage) == 0);
    return usage.ru_minflt;
}

static void fill(size_t size)
{
    void *block = malloc(size);
    CHECK(block != NULL);
    memset(block, 1, size);
    observe(block);
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    size_t whole = strtoull(argv[1], NULL, 10) * MIB, size = strtoull(argv[2], NULL, 10);
    for (size_t each = 16; each <= 96 * KIB; each += each / 17 + 16)
        for (int count = 0; count < 3; count++)
            fill(each);
    long before = faults();
    for (size_t filled = 0; filled < whole; filled += size)
        fill(size);
    printf("faults=%ld\n", faults() - before);
    return 0;
}
