/* mremap(2) of a range of several mappings: the kernel refuses to grow it, and changes nothing.
 * Mappings of 1 MiB, too small for huge pages, and of 4 MiB. */
#include "check.h"
#include <sys/mman.h>

enum { RESERVED, HOLE, READ_ONLY, GUARD, NOT_IN_CHILDREN, LOCKED, NOT_IN_DUMPS, KINDS };

static void change(char *half, size_t rest, int kind)
{
    size_t page = 4 * KIB;
    switch (kind) {
    case RESERVED: CHECK(mprotect(half, rest, PROT_NONE) == 0); break;
    case HOLE: CHECK(munmap(half, page) == 0); break;
    case READ_ONLY: CHECK(mprotect(half, page, PROT_READ) == 0); break;
    case GUARD: CHECK(mprotect(half, page, PROT_NONE) == 0); break;
    case NOT_IN_CHILDREN: CHECK(madvise(half, rest, MADV_DONTFORK) == 0); break;
    case LOCKED: CHECK(mlock(half, page) == 0); break;
    case NOT_IN_DUMPS: CHECK(madvise(half, page, MADV_DONTDUMP) == 0); break;
    }
}

int main(void)
{
    size_t sizes[] = {MIB, 4 * MIB};
    for (int round = 0; round < 64; round++)
        CHECK(mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED);
    for (int at = 0; at < 2; at++) {
        for (int kind = 0; kind < KINDS; kind++) {
            size_t size = sizes[at];
            char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            CHECK(memory != MAP_FAILED);
            memset(memory, 7, size);
            change(memory + size / 2, size / 2, kind);
            errno = 0;
            char *grown = mremap(memory, size, 2 * size, MREMAP_MAYMOVE);
            printf("%zu MiB, kind %d: %d\n", size / MIB, kind, grown == MAP_FAILED ? errno : 0);
            if (grown == MAP_FAILED)
                CHECK(memory[0] == 7 && memory[size / 2 - 1] == 7);
        }
    }
    return 0;
}
