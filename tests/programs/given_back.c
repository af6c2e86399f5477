/* Touches a GiB in blocks of ARG KiB, frees it all, and says what was resident before, then and after. */
#include "check.h"

int main(int argc, char **argv)
{
    size_t size = (argc > 1 ? strtoull(argv[1], NULL, 10) : 1024) * KIB;
    size_t count = GIB / size;
    char **blocks = calloc(count, sizeof *blocks);
    size_t before = resident();
    for (size_t i = 0; i < count; i++) {
        blocks[i] = malloc(size);
        CHECK(blocks[i] != NULL);
        memset(blocks[i], 1, size);
    }
    size_t full = resident();
    for (size_t i = 0; i < count; i++)
        free(blocks[i]);
    printf("before=%zu full=%zu after=%zu\n", before, full, resident());
    return 0;
}
