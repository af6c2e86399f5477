/*
 * Fills memory committed from a reservation, and excludes it from huge pages (MADV_NOHUGEPAGE) at a
 * random moment.
 *
 *   unadvised TRIES
 *
 * Prints how often the kernel had been advised before, and how often it was advised afterwards,
 * which overrules the program.
 */
#include "check.h"

#include <sys/mman.h>

/* Reports whether the mapping at that address is advised: `hg` among its VmFlags
 * (proc_pid_smaps(5)). */
static int is_advised(const char *at)
{
    char line[512];
    int is_here = 0, answer = 0;
    FILE *smaps = fopen("/proc/self/smaps", "r");
    CHECK(smaps);
    while (fgets(line, sizeof line, smaps)) {
        unsigned long start, end;
        if (sscanf(line, "%lx-%lx ", &start, &end) == 2)
            is_here = (unsigned long)at >= start && (unsigned long)at < end;
        else if (is_here && !strncmp(line, "VmFlags", 7))
            answer = strstr(line, " hg") != NULL;
    }
    fclose(smaps);
    return answer;
}

int main(int count, char **arguments)
{
    enum { LENGTH = 32 << 20 };
    CHECK(count == 2);
    int before = 0, after = 0;
    for (int try = 0; try < atoi(arguments[1]); try++) {
        char *reserved = mmap(NULL, 2 * LENGTH, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        CHECK(reserved != MAP_FAILED);
        char *memory = mmap(reserved, LENGTH, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(memory == reserved);
        memset(memory, 1, LENGTH);
        usleep(rand() % 40000);
        int was = is_advised(memory + LENGTH / 2);
        before += was;
        CHECK(was || madvise(memory, LENGTH, MADV_NOHUGEPAGE) == 0);
        usleep(was ? 0 : 50000);
        after += !was && is_advised(memory + LENGTH / 2);
        CHECK(munmap(reserved, 2 * LENGTH) == 0);
    }
    printf("before=%d after=%d\n", before, after);
    return 0;
}
