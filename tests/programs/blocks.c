/* Allocates NUMBER blocks of 128 MiB, touches each base page, and frees them one by one: blocks
 * NUMBER. With a second argument prints the time of the frees in microseconds to stderr. */
#include "check.h"

enum { MOST = 64 };

int main(int argc, char **argv)
{
    CHECK(argc >= 2);
    int number = atoi(argv[1]);
    CHECK(number > 0 && number <= MOST);
    char *blocks[MOST];
    size_t size = 128 * MIB;
    for (int i = 0; i < number; i++) {
        blocks[i] = malloc(size);
        CHECK(blocks[i] != NULL);
        for (size_t at = 0; at < size; at += 4 * KIB)
            blocks[i][at] = 1;
    }
    struct timespec before, after;
    clock_gettime(CLOCK_MONOTONIC, &before);
    for (int i = 0; i < number; i++)
        free(blocks[i]);
    clock_gettime(CLOCK_MONOTONIC, &after);
    if (argc > 2)
        fprintf(stderr, "%ld\n", (after.tv_sec - before.tv_sec) * 1000000 + (after.tv_nsec - before.tv_nsec) / 1000);
    puts("freed");
    return 0;
}
