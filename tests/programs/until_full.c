/* Allocates and touches blocks of ARG KiB until allocation fails, and prints their number; then
 * frees all and repeats. */
#include "check.h"
#include <sys/mman.h>

enum { MOST = 100000 };
static char *blocks[MOST];

int main(int argc, char **argv)
{
    size_t size = (argc > 1 ? strtoull(argv[1], NULL, 10) : 1024) * KIB;
    if (argc > 2 && strcmp(argv[2], "locked") == 0)
        CHECK(mlockall(MCL_CURRENT | MCL_FUTURE) == 0);
    printf("locked=%zu\n", status_bytes("VmLck:"));
    for (int round = 0; round < 2; round++) {
        int count = 0;
        errno = 0;
        while (count < MOST && (blocks[count] = malloc(size)) != NULL) {
            paint(blocks[count], size, (uint8_t)count);
            count++;
        }
        CHECK(count < MOST);
        CHECK(errno == ENOMEM);
        printf("round%d=%d\n", round, count);
        for (int i = 0; i < count; i++) {
            check_paint(blocks[i], size, (uint8_t)i);
            free(blocks[i]);
        }
    }
    puts("no more, and said so");
    return 0;
}
