/* Unmaps a large range, then lowers RLIMIT_AS to the remaining size and a little more, which
 * must be available at once. That is less than a glibc arena, which threads of jumbo must not
 * take. */
#include "check.h"
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>

static char *map(size_t size)
{
    return mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

int main(void)
{
    const size_t size = 512 * MIB;
    CHECK(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
    for (int round = 0; round < 3; round++) {
        struct rlimit before, less;
        CHECK(getrlimit(RLIMIT_AS, &before) == 0);
        size_t addresses = status_bytes("VmSize:");
        char *first = map(size);
        CHECK(first != MAP_FAILED);
        for (size_t at = 0; at < size; at += 4 * KIB)
            first[at] = 1;
        less = (struct rlimit){addresses + 332 * MIB, before.rlim_max};
        CHECK(munmap(first, size) == 0);
        CHECK(setrlimit(RLIMIT_AS, &less) == 0);
        char *second = map(300 * MIB);
        CHECK(second != MAP_FAILED);
        CHECK(munmap(second, 300 * MIB) == 0);
        CHECK(setrlimit(RLIMIT_AS, &before) == 0);
    }
    puts("as much as before");
    return 0;
}
