/* Frees a block that libearly.so allocated before any constructor of a preloaded library ran. */
#include "check.h"

extern char *early_block __attribute__((weak));

int main(void)
{
    if (&early_block != NULL) {
        check_paint(early_block, 4 * MIB, 7);
        early_block = realloc(early_block, 9 * MIB);
        CHECK(early_block != NULL && early_block[0] == 7);
        free(early_block);
    }
    char *block = malloc(6 * MIB);
    CHECK(block != NULL);
    paint(block, 6 * MIB, 5);
    free(block);
    puts("early");
    return 0;
}
