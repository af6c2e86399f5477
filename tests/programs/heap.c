/* A heap of ARG MiB: half of it objects of 16 bytes to 4 KiB, half of 128 KiB to 16 MiB. With
 * `stay` it prints a line and waits for one before it ends, so that others can inspect it. */
#include "check.h"

int main(int argc, char **argv)
{
    size_t whole = (argc > 1 ? strtoull(argv[1], NULL, 10) : 256) * MIB;
    uint64_t random = 42, sum = 0;
    struct link {
        struct link *next;
        size_t size;
    } *links = NULL;
    for (size_t large = 0; large < 2; large++)
        for (size_t got = 0; got < whole / 2;) {
            size_t size = large ? random_size(&random, 23) | 128 * KIB : random_size(&random, 11);
            struct link *link = malloc(size);
            CHECK(link != NULL);
            memset(link + 1, (int)(size & 0xff), size - sizeof *link);
            link->next = links;
            link->size = size;
            links = link;
            got += size;
        }
    if (argc > 2 && strcmp(argv[2], "stay") == 0) {
        puts("ready");
        fflush(stdout);
        getchar();
    }
    /* Several times, so that a sampled process is seen with all of its heap. */
    for (int round = 0; round < 8; round++)
        for (struct link *link = links; link != NULL; link = link->next) {
            uint8_t *bytes = (uint8_t *)(link + 1);
            for (size_t at = 0; at + sizeof *link < link->size; at++)
                sum += bytes[at] ^ link->size;
        }
    printf("sum=%lu\n", sum);
    return argc > 3 ? atoi(argv[3]) : 0;
}
