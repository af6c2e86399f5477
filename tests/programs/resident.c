/* COUNT blocks of SIZE bytes, all touched; then every second one is freed; then half of those is
 * allocated again. Prints the resident memory each time. `map` maps instead of allocating,
 * `aligned` allocates at a multiple of a huge page, `narrow` at a multiple of 512; `sparse`
 * touches only one page in 64. */
#include "check.h"
#include <sys/mman.h>

int main(int argc, char **argv)
{
    CHECK(argc > 3);
    size_t size = strtoull(argv[1], NULL, 10), count = strtoull(argv[2], NULL, 10);
    int map = strcmp(argv[3], "map") == 0, aligned = strcmp(argv[3], "aligned") == 0, narrow = strcmp(argv[3], "narrow") == 0, sparse = strcmp(argv[3], "sparse") == 0;
    size_t step = sparse ? 64 * 4096 : 4096;
    char **blocks = calloc(count, sizeof *blocks);
    for (int round = 0; round < 3; round++) {
        for (size_t i = 0; i < count; i++) {
            if (round == 1 && i % 2 == 0) {
                if (map)
                    munmap(blocks[i], size);
                else
                    free(blocks[i]);
                blocks[i] = NULL;
            } else if (round == 0 || (round == 2 && i % 4 == 0)) {
                blocks[i] = map ? mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
                           : aligned || narrow ? aligned_alloc(aligned ? 2 * MIB : 512, size)
                                     : malloc(size);
                CHECK(blocks[i] != NULL && blocks[i] != MAP_FAILED);
                for (size_t at = 0; at < size; at += step)
                    blocks[i][at] = (char)i;
            }
        }
        printf("rss%d=%zu\n", round, resident());
    }
    for (size_t i = 0; i < count; i++)
        if (blocks[i] != NULL)
            CHECK(blocks[i][0] == (char)i);
    return 0;
}
