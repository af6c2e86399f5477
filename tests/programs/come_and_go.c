/* Replaces untouched blocks of 128 KiB to 4 MiB, one at a time. Prints the resident memory after
 * one pass over all sizes, and after ten. */
#include "check.h"

enum { BLOCKS = 200, ROUNDS = 2000 };

static void *blocks[BLOCKS];
static uint64_t seed = 42;

static void replace(int rounds)
{
    while (rounds-- > 0) {
        void **block = &blocks[next_random(&seed) % BLOCKS];
        free(*block);
        *block = malloc(128 * KIB + next_random(&seed) % (4 * MIB - 128 * KIB));
        CHECK(*block != NULL);
    }
}

int main(void)
{
    replace(ROUNDS);
    size_t first = resident() / KIB;
    replace(9 * ROUNDS);
    printf("first=%zu then=%zu\n", first, resident() / KIB);
    return 0;
}
