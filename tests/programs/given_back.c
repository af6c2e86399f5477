/* Touches a GiB in blocks of ARG KiB (such as 0.2), frees it all, and prints the resident memory
 * before, in between and afterwards. `later`: then allocates and frees a little, until most is
 * released or for ten seconds. */
#include "check.h"

int main(int argc, char **argv)
{
    size_t size = (argc > 1 ? strtod(argv[1], NULL) : 1024) * KIB;
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
    if (argc > 2) {
        const long begin = microseconds();
        while (resident() > full / 20 && microseconds() - begin < 10000000) {
            void *volatile block = malloc(100 * KIB);
            free(block);
            usleep(20000);
        }
    }
    printf("before=%zu full=%zu after=%zu\n", before, full, resident());
    return 0;
}
