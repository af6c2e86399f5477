/* A static array of 512 MiB that is touched sparsely. */
#include "check.h"

static volatile char array[512 * MIB];

int main(void)
{
    uint64_t random = 5;
    for (int i = 0; i < 1500; i++)
        array[next_random(&random) % sizeof array] = 1;
    return 0;
}
