/*
 * mremap(2) after advice to another mapping, and mmap(2) at addresses that /proc/self/maps shows as
 * free.
 *
 *   found_free ADVICE|holes
 */
#define _GNU_SOURCE
#include "check.h"

#include <sys/mman.h>

static void grow(int advice)
{
    int prot = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
    size_t size = 64 * MIB;
    char *other = mmap(NULL, 8 * MIB, prot, flags, -1, 0);
    CHECK(other != MAP_FAILED && madvise(other, 8 * MIB, advice) == 0);
    /* Dense at its start, sparse at its end. */
    char *memory = mmap(NULL, size, prot, flags, -1, 0);
    CHECK(memory != MAP_FAILED);
    for (size_t at = 0; at < size; at += at < 40 * MIB ? 4096 : 7 * 4096)
        memory[at] = 1;
    usleep(300000);
    CHECK((memory = mremap(memory, size, 2 * size, MREMAP_MAYMOVE)) != MAP_FAILED);
    for (size_t at = 0; at < size; at += at < 40 * MIB ? 4096 : 7 * 4096)
        CHECK(memory[at] == 1);
    /* The advice of the program for a part of a mapping still splits it. */
    CHECK(madvise(other + 2 * MIB, 2 * MIB, MADV_DONTFORK) == 0);
    printf("%s\n", mremap(other, 8 * MIB, 16 * MIB, MREMAP_MAYMOVE) == MAP_FAILED ? "refused" : "moved");
}

static void fill_holes(void)
{
    static struct {
        uintptr_t start, end;
    } maps[4096];
    static char text[1 << 20];
    size_t count = 0, length = 0;
    int file = open("/proc/self/maps", O_RDONLY);
    for (ssize_t more; (more = read(file, text + length, sizeof text - 1 - length)) > 0;)
        length += (size_t)more;
    close(file);
    for (char *line = text; line && *line && count < 4096; line = strchr(line, '\n') + 1)
        CHECK(sscanf(line, "%lx-%lx", &maps[count].start, &maps[count].end) == 2 && ++count);
    /* Not the hole below the stack. */
    for (size_t at = 0; at + 3 < count; at++) {
        uintptr_t start = maps[at].end, end = maps[at + 1].start;
        if (start == end || end > (uintptr_t)&count)
            continue;
        void *filled = mmap((void *)start, end - start, PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
        CHECK(filled == (void *)start);
    }
}

int main(int argc, char **argv)
{
    CHECK(argc > 1);
    if (!strcmp(argv[1], "holes"))
        fill_holes();
    else
        grow(atoi(argv[1]));
    return 0;
}
