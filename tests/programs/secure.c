/* Linked with the preload library, as /etc/ld.so.preload would load it: says whether it follows the orders. */
#include "check.h"
#include <sys/auxv.h>

int main(void)
{
    uintptr_t block = (uintptr_t)malloc(4 * MIB);
    CHECK(block != 0);
    /* The window of blocks: docs/design/heap.md. */
    int ours = block >= 0x200000000000 && block < 0x280000000000;
    printf("secure=%d ours=%d\n", getauxval(AT_SECURE) != 0, ours);
    return 0;
}
