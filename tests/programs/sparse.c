/* 256 MiB of shared memory with one touched byte in each 64 KiB. */
#include "check.h"
#include <sys/mman.h>

int main(void)
{
    size_t size = 256 * MIB;
    char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    for (size_t at = 0; at < size; at += 64 * KIB)
        memory[at] = 1;
    puts("done");
}
