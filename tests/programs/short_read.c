/* 200 MiB of shared memory with one touched byte; 150 MiB of other memory; and a read with the
 * whole shared memory as its buffer, of 3 available bytes. */
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
