/* 200 MiB of shared memory, of which one byte is touched; 150 MiB of other memory; and a read of all that there is to read,
   3 bytes, into the shared memory. */
#include "check.h"
#include <sys/mman.h>

int main(void)
{
    size_t size = 200 * MIB, other = 150 * MIB;
    int ends[2];
    char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED && pipe(ends) == 0 && write(ends[1], "abc", 3) == 3);
    memory[0] = 1;
    volatile char *block = malloc(other);
    for (size_t at = 0; at < other; at += 4096)
        block[at] = 1;
    CHECK(read(ends[0], memory + 4096, size - 4096) == 3 && memory[4096 + 2] == 'c');
    printf("shared=%zu\n", status_bytes("RssShmem:"));
}
