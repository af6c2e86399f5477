/* Collapses shared memory with one present page, like a program that manages huge pages itself. */
#include "check.h"
#include <sys/mman.h>

int main(void)
{
    size_t size = 8 * MIB;
    char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    char *first = (char *)(((uintptr_t)memory + 2 * MIB - 1) & -(2 * MIB));
    first[5 * 4 * KIB] = 7;
    /* MADV_COLLAPSE, Linux 6.1. */
    errno = 0;
    int answer = madvise(first, 2 * MIB, 25);
    printf("collapsed %d errno %d\n", answer, answer ? errno : 0);
    CHECK(first[5 * 4 * KIB] == 7 && first[0] == 0);
    first[2 * MIB] = 1;
    puts("done");
}
