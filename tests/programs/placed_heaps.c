/*
 * Heaps that a program maps in a way of its own.
 *
 *   placed_heaps pieces|code|allocated|grown
 *
 * `pieces`: 256 KiB at random hints, with access at once. `code`: executable. `allocated`: a memfd
 * whose memory is allocated before it is mapped. `grown`: the same in pieces of 2 MiB, of which one is
 * unmapped for a while.
 */
#define _GNU_SOURCE
#include "check.h"

#include <sys/mman.h>

#define PIECE (256 * KIB)

int main(int argc, char **argv)
{
    CHECK(argc > 1);
    int prot = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
    size_t size = 128 * MIB;
    if (!strcmp(argv[1], "pieces")) {
        for (uintptr_t at = 0; at < size; at += PIECE) {
            uintptr_t hint = 0x100000000000 + at * 1021 % 0x10000000000 / PIECE * PIECE;
            size_t length = 2 * PIECE - 4096;
            uintptr_t start = (uintptr_t)mmap((void *)hint, length, prot, flags, -1, 0);
            CHECK(start != (uintptr_t)MAP_FAILED);
            uintptr_t piece = (start + PIECE - 1) & ~(uintptr_t)(PIECE - 1);
            if (piece > start)
                CHECK(munmap((void *)start, piece - start) == 0);
            if (start + length > piece + PIECE)
                CHECK(munmap((void *)(piece + PIECE), start + length - piece - PIECE) == 0);
            memset((void *)piece, 1, PIECE);
        }
    } else if (!strcmp(argv[1], "code")) {
        char *heap = mmap(NULL, 4 * size, prot | PROT_EXEC, flags | MAP_NORESERVE, -1, 0);
        CHECK(heap != MAP_FAILED);
        memset(heap, 1, size);
    } else if (!strcmp(argv[1], "grown")) {
        int file = memfd_create("heap", MFD_CLOEXEC), flags = MAP_SHARED | MAP_FIXED;
        CHECK(file >= 0 && ftruncate(file, (off_t)size) == 0);
        uintptr_t heap = 0x40000000000;
        for (size_t at = 0; at < size; at += 2 * MIB) {
            CHECK(fallocate(file, 0, (off_t)at, 2 * MIB) == 0);
            CHECK(mmap((void *)(heap + at), 2 * MIB, prot, flags, file, (off_t)at) == (void *)(heap + at));
            memset((void *)(heap + at), 1, 2 * MIB);
        }
        void *middle = (void *)(heap + size / 2);
        CHECK(munmap(middle, 2 * MIB) == 0);
        CHECK(mmap(middle, 2 * MIB, prot, flags, file, (off_t)size / 2) == middle);
        memset(middle, 1, 2 * MIB);
    } else {
        int file = memfd_create("heap", MFD_CLOEXEC);
        CHECK(file >= 0 && ftruncate(file, (off_t)size) == 0 && fallocate(file, 0, 0, (off_t)size) == 0);
        char *heap = mmap(NULL, size, prot, MAP_SHARED, file, 0);
        CHECK(heap != MAP_FAILED);
        memset(heap, 1, size);
    }
    char line[256];
    unsigned long huge = 0, more;
    for (int tries = 0; tries < 100 && huge < size / 1024 / 10 * 8; tries++) {
        usleep(100000);
        huge = 0;
        FILE *maps = fopen("/proc/self/smaps_rollup", "r");
        CHECK(maps);
        while (fgets(line, sizeof line, maps))
            if (sscanf(line, "AnonHugePages: %lu", &more) == 1 || sscanf(line, "ShmemPmdMapped: %lu", &more) == 1)
                huge += more;
        fclose(maps);
    }
    printf("percent=%lu\n", huge * 1024 * 100 / size);
    return 0;
}
