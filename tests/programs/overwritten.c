/* Writes an address into a freed object (use after free), then allocates. */
#include "check.h"

#define COUNT 100000
static char target[4096] __attribute__((aligned(64)));
static void *objects[COUNT];

int main(void)
{
    for (size_t at = 0; at < COUNT; at++)
        CHECK((objects[at] = malloc(40)) != NULL);
    void *volatile freed = objects[COUNT / 2];
    free(objects[COUNT / 2]);
    *(void **)freed = target + 64;
    for (size_t at = 0; at < COUNT; at++) {
        char *object = malloc(40);
        if (target <= object && object < target + sizeof target) {
            puts("malloc returned an address of the program's choice");
            return 1;
        }
    }
    puts("no such address");
}
