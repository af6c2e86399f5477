/* Fills 256 MiB with blocks of ARG KiB and frees them, three times, then once more and waits for
 * the end of its input. */
#include "check.h"

int main(int argc, char **argv)
{
    size_t size = (argc > 1 ? strtoull(argv[1], NULL, 10) : 300) * KIB;
    size_t count = 256 * MIB / size;
    char **blocks = calloc(count, sizeof *blocks);
    for (int round = 0; round < 4; round++) {
        for (size_t i = 0; i < count; i++) {
            blocks[i] = malloc(size);
            CHECK(blocks[i] != NULL);
            memset(blocks[i], round + 1, size);
        }
        if (round == 3)
            break;
        for (size_t i = 0; i < count; i++)
            free(blocks[i]);
    }
    puts("ready");
    fflush(stdout);
    getchar();
    return 0;
}
