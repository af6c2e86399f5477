/* Four tables in turn, each doubled from 1 to 64 MiB, each time in a new block with the old one
 * freed: prints the peak of resident memory. */
#include "check.h"
#include <sys/resource.h>

int main(void)
{
    char *tables[4];
    for (int i = 0; i < 4; i++) {
        size_t size = MIB;
        CHECK((tables[i] = malloc(size)) != NULL);
        memset(tables[i], 1, size);
        for (; size < 64 * MIB; size *= 2) {
            char *larger = malloc(2 * size);
            CHECK(larger != NULL);
            memset(larger, 1, 2 * size);
            free(tables[i]);
            tables[i] = larger;
        }
    }
    struct rusage usage;
    CHECK(getrusage(RUSAGE_SELF, &usage) == 0);
    printf("peak=%zu\n", (size_t)usage.ru_maxrss * KIB);
    return 0;
}
