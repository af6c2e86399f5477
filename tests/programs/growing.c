/* Four tables in turn, each doubled from 1 to 64 MiB, each time in a new block with the old one
 * freed. With "objects": one table of 32 MiB, and then 64 MiB of objects. Prints the peak of resident
 * memory. */
#include "check.h"
#include <sys/resource.h>

static char *grow(size_t end)
{
    size_t size = MIB;
    char *table = malloc(size);
    CHECK(table != NULL);
    memset(table, 1, size);
    for (; size < end; size *= 2) {
        char *larger = malloc(2 * size);
        CHECK(larger != NULL);
        memset(larger, 1, 2 * size);
        free(table);
        table = larger;
    }
    return table;
}

int main(int argc, char **argv)
{
    (void)argv;
    char *tables[4];
    for (int i = 0; i < (argc > 1 ? 1 : 4); i++)
        tables[i] = grow(argc > 1 ? 32 * MIB : 64 * MIB);
    for (size_t i = 0; argc > 1 && i < 64 * MIB / 64; i++) {
        char *object = malloc(40);
        CHECK(object != NULL);
        memset(object, tables[0][0], 40);
    }
    struct rusage usage;
    CHECK(getrusage(RUSAGE_SELF, &usage) == 0);
    printf("peak=%zu\n", (size_t)usage.ru_maxrss * KIB);
    return 0;
}
