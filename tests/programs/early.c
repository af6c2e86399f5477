/* A library whose constructor runs before that of any preloaded library: it allocates, resizes
 * and frees there, leaves a block for the program, and frees another one in its destructor. */
#include "check.h"

char *early_block;
static char *late_block;
static char *small_block;

__attribute__((constructor(101))) static void early(void)
{
    char *temporary = malloc(3 * MIB);
    CHECK(temporary != NULL);
    paint(temporary, 3 * MIB, 1);
    temporary = realloc(temporary, 7 * MIB);
    CHECK(temporary != NULL);
    paint(temporary, 7 * MIB, 2);
    check_paint(temporary, 7 * MIB, 2);
    free(temporary);
    early_block = calloc(1, 4 * MIB);
    CHECK(early_block != NULL);
    check_zero(early_block, 4 * MIB);
    paint(early_block, 4 * MIB, 7);
    late_block = malloc(2 * MIB + 12345);
    CHECK(late_block != NULL);
    paint(late_block, 2 * MIB + 12345, 8);
    small_block = malloc(100);
    CHECK(small_block != NULL);
    paint(small_block, 100, 9);
}

__attribute__((destructor(101))) static void late(void)
{
    check_paint(late_block, 2 * MIB + 12345, 8);
    free(late_block);
    check_paint(small_block, 100, 9);
    free(small_block);
    char *last = malloc(5 * MIB);
    CHECK(last != NULL);
    paint(last, 5 * MIB, 1);
    free(last);
}
