/* Maps at fixed addresses (MAP_FIXED, mremap) while freed memory may still be pending there:
 * written data stays. */
#include "check.h"

#include <sys/mman.h>
#include <sys/prctl.h>

#define SIZE (400 * MIB)

static const int prot = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;

/* Returns the middle of a mapping from 52 to 64 TiB, if any: an address that the kernel never
 * chooses. */
static char *place(void)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps);
    char line[512];
    char *found = (char *)0x350000200000;
    while (fgets(line, sizeof line, maps)) {
        unsigned long start, end;
        CHECK(sscanf(line, "%lx-%lx", &start, &end) == 2);
        if (start >= 0x340000000000 && end <= 0x400000000000 && end - start > SIZE / 2)
            found = (char *)((start + (end - start) / 4 * 3) & ~(2 * MIB - 1));
    }
    fclose(maps);
    return found;
}

static void freed(void)
{
    volatile char *block = mmap(NULL, SIZE, prot, flags, -1, 0);
    CHECK(block != MAP_FAILED);
    for (size_t at = 0; at < SIZE; at += 4 * KIB)
        block[at] = 1;
    CHECK(munmap((char *)block, SIZE) == 0);
}

int main(void)
{
    CHECK(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
    for (int round = 0; round < 6; round++) {
        char *other = mmap(NULL, MIB, prot, flags, -1, 0);
        CHECK(other != MAP_FAILED);
        paint(other, MIB, (uint8_t)round);
        /* Opens the file and allocates the C library's buffers first. */
        place();
        freed();
        char *at = place(), *mine;
        if (round % 3 == 2) {
            mine = mremap(other, MIB, MIB, MREMAP_MAYMOVE | MREMAP_FIXED, at);
        } else {
            mine = mmap(at, MIB, prot, flags | (round % 3 ? MAP_FIXED_NOREPLACE : MAP_FIXED), -1, 0);
            CHECK(munmap(other, MIB) == 0);
        }
        CHECK(mine == at);
        paint(mine, MIB, (uint8_t)round);
        for (int tries = 0; tries < 40; tries++) {
            usleep(10000);
            check_paint(mine, MIB, (uint8_t)round);
        }
        CHECK(munmap(mine, MIB) == 0);
    }
    puts("all there");
    return 0;
}
