/* Four tables in turn, each doubled from 1 to 64 MiB, each time in a new block with the old one
 * freed. With "objects" or "mappings": one table of 32 MiB, and then 64 MiB of those. Prints the peak
 * of resident memory. */
#include "check.h"
#include <sys/mman.h>
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
    char *tables[4];
    for (int i = 0; i < (argc > 1 ? 1 : 4); i++)
        tables[i] = grow(argc > 1 ? 32 * MIB : 64 * MIB);
    int is_mapped = argc > 1 && !strcmp(argv[1], "mappings");
    size_t each = is_mapped ? MIB : 40;
    for (size_t filled = 0; argc > 1 && filled < 64 * MIB; filled += each) {
        char *more = is_mapped ? mmap(NULL, each, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
                               : malloc(each);
        CHECK(more != NULL && more != MAP_FAILED);
        memset(more, tables[0][0], each);
    }
    struct rusage usage;
    CHECK(getrusage(RUSAGE_SELF, &usage) == 0);
    printf("peak=%zu\n", (size_t)usage.ru_maxrss * KIB);
    return 0;
}
