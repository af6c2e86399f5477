/* Freed memory neither counts against RLIMIT_MEMLOCK nor can be locked. */
#include "check.h"
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>

static const size_t SIZE = 144 * MIB;
/* A common default of RLIMIT_MEMLOCK: less than the freed memory. */
static const size_t LIMIT = 8 * MIB;

static char *filled(char *at)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | (at ? MAP_FIXED_NOREPLACE : 0);
    char *start = mmap(at, SIZE, PROT_READ | PROT_WRITE, flags, -1, 0);
    CHECK(start != MAP_FAILED);
    for (size_t at = 0; at < SIZE; at += 4 * KIB)
        start[at] = 1;
    return start;
}

static void report(const char *what, int answer)
{
    int error = answer == 0 ? 0 : errno;
    printf("%s: %d, errno %d, %zu KiB locked\n", what, answer, error, status_bytes("VmLck:") / KIB);
}

/* The value depends on other mappings. */
static void report_all(const char *what, int answer)
{
    printf("%s: %d, errno %d\n", what, answer, answer == 0 ? 0 : errno);
}

int main(void)
{
    CHECK(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
    struct rlimit limit = {LIMIT, LIMIT};
    CHECK(setrlimit(RLIMIT_MEMLOCK, &limit) == 0);

    char *first = filled(NULL);
    CHECK(munmap(first, SIZE) == 0);
    report_all("all, after a large munmap", mlockall(MCL_CURRENT));
    report("nothing", munlockall());
    report_all("all, and the future", mlockall(MCL_CURRENT | MCL_FUTURE));
    report("nothing", munlockall());

    first = filled(NULL);
    CHECK(munmap(first, SIZE) == 0);
    report("what was freed", mlock(first, 4 * KIB));
    report("what was freed, unlocked", munlock(first, 4 * KIB));
    first = filled(first);
    report("what is there again", mlock(first, 6 * MIB));
    report("a part freed", munmap(first + 3 * MIB, SIZE - 3 * MIB));
    report("the other part unlocked in part", munlock(first, 1 * MIB));
    report_all("all of it freed", munmap(first, 3 * MIB));

    char *second = filled(NULL);
    first = filled(NULL);
    CHECK(munmap(first, SIZE) == 0);
    report("another range", mlock(second, 6 * MIB));
    report("more than the limit", mlock(second + 6 * MIB, 6 * MIB));
    report("freed with its lock", munmap(second, SIZE));
    return 0;
}
