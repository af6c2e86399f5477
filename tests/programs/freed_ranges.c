/* munmap and MADV_DONTNEED of special large ranges, as a whole and in part: results and state
 * afterwards.
 *
 * freed_ranges munmap|discard: a line for each kind of range. */
#include "check.h"
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>

/* Around the range, so that it is a part of its mapping. */
static const size_t EDGE = 16 * MIB;
static const size_t SIZE = 144 * MIB;
/* Distance in bytes between filled and checked pages. */
static const size_t STEP = 64 * KIB;
static const size_t PAGE = 4 * KIB;
static const uint64_t MARK = 0x6d61726b;

/* Offset of the special page. */
static const size_t AT = 100 * MIB;

static char *range(int kind)
{
    return (char *)0x500000000000 + (size_t)kind * GIB + EDGE;
}

static void fill(char *from, size_t size)
{
    for (size_t at = 0; at < size; at += STEP)
        *(uint64_t *)(from + at) = MARK;
}

/* State of a page: unmapped `.`, without access `x`, unchanged `m`, empty `e`, anything else
 * `?`. */
static char state(char *page)
{
    unsigned char there;
    uint64_t word;
    if (mincore(page, PAGE, &there) != 0)
        return '.';
    struct iovec to = {&word, sizeof word}, from = {page, sizeof word};
    if (process_vm_readv(getpid(), &to, 1, &from, 1, 0) != sizeof word)
        return 'x';
    return word == MARK ? 'm' : word == 0 ? 'e' : '?';
}

/* Prints runs of pages with the same state. */
static void describe(char *from, size_t size)
{
    for (size_t at = 0; at < size;) {
        char first = state(from + at);
        size_t run = 0;
        for (; at < size && state(from + at) == first; at += STEP)
            run++;
        printf(" %zu%c", run, first);
    }
    puts("");
}

static void *fixed(char *at, size_t size, int prot, int flags, int fd)
{
    void *mapped = mmap(at, size, prot, flags | MAP_FIXED, fd, 0);
    CHECK(mapped == at);
    return mapped;
}

enum { RW = PROT_READ | PROT_WRITE, ANON = MAP_PRIVATE | MAP_ANONYMOUS };

static void plain(char *start) { (void)start; }

static void two_mappings(char *start) { CHECK(mprotect(start + AT, SIZE - AT + EDGE, PROT_READ) == 0); }

static void without_access(char *start) { CHECK(mprotect(start + AT, MIB, PROT_NONE) == 0); }

static void other_file(char *start)
{
    int zero = open("/dev/zero", O_RDWR);
    fixed(start + AT, MIB, RW, MAP_PRIVATE, zero);
    close(zero);
    fill(start + AT, MIB);
}

static void memory_file(char *start)
{
    int file = memfd_create("a file", 0);
    CHECK(file >= 0 && ftruncate(file, MIB) == 0);
    fixed(start + AT, MIB, RW, MAP_SHARED, file);
    close(file);
    fill(start + AT, MIB);
}

static void shared(char *start)
{
    fixed(start + AT, MIB, RW, MAP_SHARED | MAP_ANONYMOUS, -1);
    fill(start + AT, MIB);
}

static void locked_page(char *start) { CHECK(mlock(start + AT, PAGE) == 0); }

static void locked_whole(char *start) { CHECK(mlock(start, SIZE) == 0); }

static void locked_on_fault(char *start)
{
    enum { MLOCK_ON_FAULT = 1 };
    CHECK(mlock2(start + AT, MIB, MLOCK_ON_FAULT) == 0);
}

/* Unmaps in pieces too small for several threads or a background free. A sealed piece stays. */
static void take_away(char *start, size_t size)
{
    for (size_t at = 0; at < size; at += MIB)
        CHECK(munmap(start + at, size - at < MIB ? size - at : MIB) == 0 || errno == EPERM);
}

/* mseal(2), Linux 6.10: older kernels seal nothing, in both runs. */
static void sealed_page(char *start) { (void)!syscall(462, start + AT, PAGE, 0); }

static void sealed_read_only_page(char *start)
{
    CHECK(mprotect(start + AT, PAGE, PROT_READ) == 0);
    sealed_page(start);
}

static void hole(char *start) { take_away(start + AT, MIB); }

static void hole_at_start(char *start) { take_away(start, MIB); }

static void nothing_there(char *start) { take_away(start, SIZE); }

static void kept_from_children(char *start) { CHECK(madvise(start + AT, MIB, MADV_DONTFORK) == 0); }

static void wiped_in_children(char *start) { CHECK(madvise(start, SIZE, MADV_WIPEONFORK) == 0); }

static void no_access_at_all(char *start) { CHECK(mprotect(start, SIZE, PROT_NONE) == 0); }

static const struct kind {
    const char *name;
    void (*make)(char *start);
    /* Added to start and length of the call. */
    ptrdiff_t from, longer;
} KINDS[] = {
    {"a part of one mapping", plain, 0, 0},
    {"the first part", plain, -(ptrdiff_t)(16 * MIB), 0},
    {"the last part", plain, 16 * MIB, 0},
    {"two mappings", two_mappings, 0, 0},
    {"a page range without access", without_access, 0, 0},
    {"no access at all", no_access_at_all, 0, 0},
    {"a private file inside", other_file, 0, 0},
    {"a shared file inside", memory_file, 0, 0},
    {"shared memory inside", shared, 0, 0},
    {"a locked page inside", locked_page, 0, 0},
    {"locked", locked_whole, 0, 0},
    {"locked on fault in part", locked_on_fault, 0, 0},
    {"a sealed page inside", sealed_page, 0, 0},
    {"a sealed read-only page inside", sealed_read_only_page, 0, 0},
    {"a hole", hole, 0, 0},
    {"a hole at the start", hole_at_start, 0, 0},
    {"nothing there", nothing_there, 0, 0},
    {"kept from children in part", kept_from_children, 0, 0},
    {"wiped in children", wiped_in_children, 0, 0},
    {"beyond the mapping's end", plain, 0, 32 * MIB},
    {"a length that is no multiple of the page size", plain, 0, 100},
    {"an address that is no multiple of the page size", plain, 8, 0},
    {"a length that wraps around", plain, 0, -(ptrdiff_t)(145 * MIB)},
};

int main(int count, char **arguments)
{
    CHECK(count == 2);
    int unmaps = strcmp(arguments[1], "munmap") == 0;
    CHECK(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
    for (int kind = 0; kind < (int)(sizeof KINDS / sizeof *KINDS); kind++) {
        char *start = range(kind);
        fixed(start - EDGE, SIZE + 2 * EDGE, RW, ANON, -1);
        fill(start - EDGE, SIZE + 2 * EDGE);
        KINDS[kind].make(start);
        char *from = start + KINDS[kind].from;
        size_t length = SIZE + (size_t)KINDS[kind].longer;
        errno = 0;
        int answer = unmaps ? munmap(from, length) : madvise(from, length, MADV_DONTNEED);
        printf("%s: %d, errno %d,", KINDS[kind].name, answer, errno);
        describe(start - EDGE, SIZE + 2 * EDGE);
        take_away(start - EDGE, SIZE + 2 * EDGE);
    }
    return 0;
}
