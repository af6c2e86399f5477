/* Fills jumbo's ledger with the byte of its first argument (or with random bytes), and exits
 * with 7. */
#include "check.h"
#include <sys/mman.h>

int main(int count, char **arguments)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[4096];
    uintptr_t start = 0, end = 0;
    CHECK(maps != NULL && count == 2);
    while (fgets(line, sizeof line, maps))
        if (strstr(line, "jumbo-ledger"))
            CHECK(sscanf(line, "%lx-%lx", &start, &end) == 2);
    fclose(maps);
    int is_random = strcmp(arguments[1], "random") == 0;
    int fill = (int)strtol(arguments[1], NULL, 0);
    uint64_t state = 42;
    for (uint8_t *at = (uint8_t *)start; at < (uint8_t *)end; at++)
        *at = (uint8_t)(is_random ? next_random(&state) : (unsigned)fill);
    printf("filled %d\n", start != 0);
    fflush(stdout);
    _exit(7);
}
