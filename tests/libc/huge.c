/* Fills 1 GiB in one of three ways, and prints the process's share on huge pages, as the kernel
 * counts it. With a share as second argument it waits for up to 10 s: memory that was filled
 * before its advice becomes huge in the background. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define SIZE (1UL << 30)

static void fill(const char *how)
{
    if (strcmp(how, "mapped") == 0) {
        char *block = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (block != MAP_FAILED)
            memset(block, 1, SIZE);
        return;
    }
    size_t block = strcmp(how, "large") == 0 ? 4 << 20 : 1000;
    for (size_t have = 0; have < SIZE; have += block) {
        char *at = malloc(block);
        if (at != NULL)
            memset(at, 1, block);
    }
}

/* Percent of the process on huge pages; 101 on an error. */
static unsigned long huge_share(void)
{
    FILE *file = fopen("/proc/self/smaps_rollup", "r");
    unsigned long resident = 0, huge = 0;
    char line[200];
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        sscanf(line, "Rss: %lu", &resident);
        sscanf(line, "AnonHugePages: %lu", &huge);
    }
    if (file != NULL)
        fclose(file);
    return resident < SIZE >> 10 ? 101 : huge * 100 / resident;
}

int main(int count, char **arguments)
{
    if (count != 2 && count != 3)
        return 2;
    fill(arguments[1]);
    unsigned long share = huge_share();
    for (int looks = 0; count == 3 && share < strtoul(arguments[2], NULL, 10) && looks < 600; looks++) {
        nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
        share = huge_share();
    }
    if (share > 100)
        return 1;
    printf("%lu\n", share);
    return 0;
}
