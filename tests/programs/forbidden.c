/* A mapping for which the program forbids huge pages after it was filled grows, moves, keeps its bytes and
 * shrinks, as one mapping does; also after that advice is taken back. */
#include "check.h"

#include <sys/mman.h>

#define BYTES (64 * MIB)

static void check_content(const unsigned char *memory, size_t length)
{
    for (size_t at = 0; at < length; at += 4096)
        CHECK(memory[at] == (unsigned char)(at >> 12));
}

int main(void)
{
    unsigned char *memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    for (size_t at = 0; at < BYTES; at += 4096)
        memory[at] = (unsigned char)(at >> 12);
    CHECK(madvise(memory, BYTES, MADV_NOHUGEPAGE) == 0);
    for (int round = 0; round < 3; round++) {
        memory = mremap(memory, BYTES, 2 * BYTES, MREMAP_MAYMOVE);
        CHECK(memory != MAP_FAILED);
        check_content(memory, BYTES);
        memset(memory + BYTES, 1, BYTES);
        memory = mremap(memory, 2 * BYTES, BYTES, 0);
        CHECK(memory != MAP_FAILED);
        void *target = mmap(NULL, BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        CHECK(target != MAP_FAILED);
        memory = mremap(memory, BYTES, BYTES, MREMAP_MAYMOVE | MREMAP_FIXED, target);
        CHECK(memory == target);
        check_content(memory, BYTES);
        CHECK(madvise(memory, BYTES, MADV_NORMAL) == 0);
    }
    /* What is left is smaller than a huge page. */
    memory = mremap(memory, BYTES, 3 * MIB, 0);
    CHECK(memory != MAP_FAILED && munmap(memory, MIB) == 0);
    memory = mremap(memory + MIB, 2 * MIB, 4 * MIB, MREMAP_MAYMOVE);
    CHECK(memory != MAP_FAILED);
    for (size_t at = 0; at < 2 * MIB; at += 4096)
        CHECK(memory[at] == (unsigned char)((at + MIB) >> 12));
    puts("ok");
    return 0;
}
