/* Has pages merged (KSM), so that jumbo leaves its frees to the kernel without a scan; without
 * `merged` it does not. */
#include "check.h"

#include <sys/mman.h>
#include <sys/prctl.h>

#define SIZE (200 * MIB)

int main(int argc, char **argv)
{
    (void)argv;
    CHECK(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
    int prot = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
    volatile char *memory = mmap(NULL, SIZE, prot, flags, -1, 0);
    CHECK(memory != MAP_FAILED);
    /* Refused if the kernel cannot merge. */
    if (argc > 1)
        madvise((char *)memory, 4 * KIB, MADV_MERGEABLE);
    /* One page, so that threads gain nothing. */
    memory[0] = 1;
    CHECK(munmap((char *)memory, SIZE) == 0);
    return 0;
}
