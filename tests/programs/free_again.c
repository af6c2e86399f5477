/* Maps, fills and unmaps MIB, ROUNDS times, and the same with malloc and free. Freed memory must
 * be available in the next round, however little there is beside it. `alone`: no thread can be
 * created. */
#include "check.h"
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>

static void fill(char *memory, size_t size, int zero)
{
    for (size_t at = 0; at < size; at += 4096) {
        CHECK(!zero || memory[at] == 0);
        memory[at] = 1;
    }
}

int main(int count, char **arguments)
{
    CHECK(count == 3 || count == 4);
    size_t size = strtoul(arguments[1], NULL, 10) * MIB;
    int rounds = atoi(arguments[2]);
    CHECK(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
    if (count == 4) {
        struct rlimit none = {1, 1};
        CHECK(setrlimit(RLIMIT_NPROC, &none) == 0);
    }
    for (int round = 0; round < rounds; round++) {
        char *mapped = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(mapped != MAP_FAILED);
        fill(mapped, size, 1);
        CHECK(munmap(mapped, size) == 0);
        char *block = malloc(size);
        CHECK(block != NULL);
        fill(block, size, 0);
        free(block);
    }
    printf("%d rounds\n", rounds);
    return 0;
}
