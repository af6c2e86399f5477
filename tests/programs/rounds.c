/* Twenty rounds of a block of 100 MiB, touched and freed, after one that does not count: how many page faults these took, and
 * what is resident in the end. */
#include "check.h"
#include <sys/resource.h>

static long faults(void)
{
    struct rusage usage;
    CHECK(getrusage(RUSAGE_SELF, &usage) == 0);
    return usage.ru_minflt;
}

int main(void)
{
    long before = 0;
    for (int round = 0; round < 21; round++) {
        if (round == 1)
            before = faults();
        char *volatile block = malloc(100 * MIB);
        CHECK(block != NULL);
        memset(block, round, 100 * MIB);
        free(block);
    }
    printf("faults=%ld kept=%zu\n", faults() - before, resident());
    return 0;
}
