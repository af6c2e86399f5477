/* Twenty rounds of a block of 100 MiB, touched and freed, after one round that does not count.
 * Prints their page faults, the resident memory afterwards, and that after at most 10 s: with an
 * argument it waits until that is small. */
#include "check.h"
#include <sys/resource.h>
#include <time.h>

static long faults(void)
{
    struct rusage usage;
    CHECK(getrusage(RUSAGE_SELF, &usage) == 0);
    return usage.ru_minflt;
}

int main(int argc, char **argv)
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
    long after = faults() - before;
    size_t kept = resident(), rested = kept;
    for (int wait = 0; argc > 1 && rested > 20 * MIB && wait < 1000; wait++) {
        nanosleep(&(struct timespec){.tv_nsec = 10 * 1000 * 1000}, NULL);
        rested = resident();
    }
    (void)argv;
    printf("faults=%ld kept=%zu rested=%zu\n", after, kept, rested);
    return 0;
}
