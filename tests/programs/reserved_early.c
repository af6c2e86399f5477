/* Maps 8 MiB early, and then 50 times 16 MiB that it fills; fills the first at last. With "advised" it
 * advises the first itself. Prints what of it is huge: at its first touch, and within ten seconds. */
#include "check.h"
#include <sys/mman.h>

#define BYTES (8 * MIB)

static char *map(size_t size)
{
    char *made = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(made != MAP_FAILED);
    return made;
}

/* Returns the huge bytes of the mappings that overlap the range. */
static size_t huge(const char *memory)
{
    char line[512];
    size_t start = 0, end = 0, kib, sum = 0;
    FILE *file = fopen("/proc/self/smaps", "r");
    CHECK(file != NULL);
    while (fgets(line, sizeof line, file)) {
        size_t first, last;
        char mode;
        if (sscanf(line, "%zx-%zx %c", &first, &last, &mode) == 3)
            start = first, end = last;
        else if (sscanf(line, "AnonHugePages: %zu", &kib) == 1 && start < (size_t)memory + BYTES && end > (size_t)memory)
            sum += kib * KIB;
    }
    fclose(file);
    return sum;
}

int main(int argc, char **argv)
{
    (void)argv;
    char *early = map(BYTES);
    if (argc > 1)
        CHECK(madvise(early, BYTES, MADV_HUGEPAGE) == 0);
    for (int i = 0; i < 50; i++)
        memset(map(16 * MIB), 1, 16 * MIB);
    size_t before = huge(early);
    memset(early, 1, BYTES);
    printf("first=%zu\n", huge(early) - before);
    long end = microseconds() + 10000000;
    while (huge(early) < before + 6 * MIB && microseconds() < end)
        usleep(10000);
    printf("later=%zu\n", huge(early) - before);
    return 0;
}
