/* Moves the pages of a mapping one by one into another, in reverse order, as compacting allocators do. */
#include "check.h"

#include <sys/mman.h>

enum { PAGES = 1024, PAGE = 4096 };

int main(void)
{
    char *from = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *to = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(from != MAP_FAILED && to != MAP_FAILED);
    for (int page = 0; page < PAGES; page++)
        *(int *)(from + page * PAGE) = page;
    for (int page = 0; page < PAGES; page++) {
        char *target = to + (PAGES - 1 - page) * PAGE;
        CHECK(mremap(from + page * PAGE, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, target) == target);
    }
    for (int page = 0; page < PAGES; page++)
        CHECK(*(int *)(to + (PAGES - 1 - page) * PAGE) == page);
    puts("moved");
    return 0;
}
