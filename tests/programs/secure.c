/* Linked with the preload library, as if loaded by /etc/ld.so.preload: prints whether the
 * library follows its orders. */
#include "check.h"
#include <sys/auxv.h>

int main(void)
{
    uintptr_t block = (uintptr_t)malloc(4 * MIB);
    CHECK(block != 0);
    /* Address window of blocks: docs/design/heap.md. */
    int ours = block >= 0x200000000000 && block < 0x280000000000;
    printf("secure=%d ours=%d\n", getauxval(AT_SECURE) != 0, ours);
    return 0;
}
