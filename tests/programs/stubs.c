/* Linked to fixed addresses, with addresses of the functions taken, so that the program has a
 * stub for each. */
#include "check.h"

static void *(*const volatile allocate)(size_t) = malloc;
static void *(*const volatile allocate_zeroed)(size_t, size_t) = calloc;
static void *(*const volatile resize)(void *, size_t) = realloc;
static void (*const volatile release)(void *) = free;

int main(void)
{
    char *block = allocate(3 * MIB), *zeroed = allocate_zeroed(3, MIB);
    CHECK(block != NULL && zeroed != NULL && zeroed[MIB] == 0);
    memset(block, 1, 3 * MIB);
    CHECK((block = resize(block, 9 * MIB)) != NULL && block[MIB] == 1);
    release(block);
    free(zeroed);
    puts("done");
    return 0;
}
