/* Threads map, fill, check and free ranges, at their own addresses and at those that another
 * thread has just unmapped, with munmap, MADV_DONTNEED and free(), while another thread forks.
 * Each must only see its own pattern. Once a second all stop for a census: the growth of smaps
 * since the start must be the ranges that the threads hold, with their patterns. At the end they
 * hold nothing.
 *
 * gather_storm LEAST MORE SECONDS: ranges of LEAST MiB and up to MORE on top, for this time. */
#include "check.h"
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>

enum { THREADS = 3 };

static atomic_int stop, census;
static atomic_ulong operations, children, neighbours;
static size_t least, most;
/* Address of a range that a thread has unmapped. */
static _Atomic(char *) given_up;
/* Barriers on both sides of a census. */
static pthread_barrier_t assembled, counted;

/* Ranges that a thread holds from one census to the next. */
static struct held {
    char *start;
    size_t size;
    uint64_t owner;
} held[THREADS];

/* Marks each page with one word of its owner. */
static void mark(char *from, size_t size, uint64_t owner)
{
    for (size_t at = 0; at < size; at += 4096)
        *(uint64_t *)(from + at) = owner + at;
}

static void check_marks(const char *from, size_t size, uint64_t owner)
{
    for (size_t at = 0; at < size; at += 4096)
        CHECK(*(const uint64_t *)(from + at) == owner + at);
}

static void check_marks_zero(const char *from, size_t size)
{
    for (size_t at = 0; at < size; at += 4096)
        CHECK(*(const uint64_t *)(from + at) == 0);
}

/* Returns a marked range: at times of another size, where another thread's was a moment ago. */
static char *filled(uint64_t *random, size_t size, uint64_t owner)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    char *start = MAP_FAILED, *wanted = next_random(random) % 4 ? NULL : atomic_load(&given_up);
    if (wanted != NULL) {
        start = mmap(wanted, size, PROT_READ | PROT_WRITE, flags | MAP_FIXED_NOREPLACE, -1, 0);
        CHECK(start == wanted || errno == EEXIST);
        if (start == wanted)
            atomic_fetch_add(&neighbours, 1);
    }
    if (start == MAP_FAILED)
        start = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, -1, 0);
    CHECK(start != MAP_FAILED);
    check_marks_zero(start, size);
    mark(start, size, owner);
    check_marks(start, size, owner);
    return start;
}

static size_t some_size(uint64_t *random)
{
    return (least + next_random(random) % most) & ~(size_t)4095;
}

static void mapped(uint64_t *random, uint64_t owner)
{
    size_t size = some_size(random);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    char *start = filled(random, size, owner);
    switch (next_random(random) % 4) {
    case 0: {
        /* The middle of it: the ends stay. */
        size_t edge = 3 * 4096;
        CHECK(munmap(start + edge, size - 2 * edge) == 0);
        /* Free to be mapped again, unless another thread was faster. */
        char *again = mmap(start + edge, size - 2 * edge, PROT_READ | PROT_WRITE,
                           flags | MAP_FIXED_NOREPLACE, -1, 0);
        CHECK(again == start + edge || errno == EEXIST);
        if (again == start + edge) {
            check_marks_zero(again, size - 2 * edge);
            mark(again, size - 2 * edge, owner + 1);
            check_marks(again, size - 2 * edge, owner + 1);
            CHECK(munmap(again, size - 2 * edge) == 0);
        }
        check_marks(start, edge, owner);
        check_marks(start + size - edge, edge, owner + size - edge);
        CHECK(munmap(start, edge) == 0 && munmap(start + size - edge, edge) == 0);
        return;
    }
    case 1:
        CHECK(madvise(start, size, MADV_DONTNEED) == 0);
        check_marks_zero(start, size);
        mark(start, size, owner + 2);
        check_marks(start, size, owner + 2);
        break;
    }
    CHECK(munmap(start, size) == 0);
    atomic_store(&given_up, start);
}

static void allocated(uint64_t *random, uint64_t owner)
{
    /* The ends of a block are kept if they are smaller than a huge page. */
    size_t size = least + 4 * MIB + next_random(random) % most;
    char *block = malloc(size);
    CHECK(block != NULL);
    mark(block, size - 4096, owner);
    if (next_random(random) % 3 == 0) {
        block = realloc(block, 1 * MIB);
        CHECK(block != NULL);
        check_marks(block, 1 * MIB, owner);
    } else {
        check_marks(block, size - 4096, owner);
    }
    free(block);
}

static void let_go(struct held *range)
{
    if (range->start != NULL) {
        check_marks(range->start, range->size, range->owner);
        CHECK(munmap(range->start, range->size) == 0);
    }
    *range = (struct held){0};
}

static void *storm(void *number)
{
    uint64_t id = (uint64_t)(uintptr_t)number, random = id * 7919 + 1;
    struct held *range = &held[id - 1];
    while (!atomic_load(&stop)) {
        uint64_t owner = (id << 56) + (atomic_fetch_add(&operations, 1) << 36);
        if (atomic_load(&census)) {
            pthread_barrier_wait(&assembled);
            pthread_barrier_wait(&counted);
            let_go(range);
            size_t size = some_size(&random);
            *range = (struct held){filled(&random, size, owner), size, owner};
        } else if (next_random(&random) % 3) {
            mapped(&random, owner);
        } else {
            allocated(&random, owner);
        }
    }
    let_go(range);
    return NULL;
}

/* Returns the kernel's count of anonymous memory, in bytes. */
static size_t anonymous_memory(void)
{
    char line[512];
    size_t sum = 0, kib;
    FILE *smaps = fopen("/proc/self/smaps", "r");
    CHECK(smaps != NULL);
    while (fgets(line, sizeof line, smaps))
        if (sscanf(line, "Anonymous: %zu kB", &kib) == 1)
            sum += kib * KIB;
    fclose(smaps);
    return sum;
}

/* Pending frees complete soon; lost ranges never do. Stacks, arenas and the heap's records of
 * used addresses may grow, by less than a page per operation; a lost range has hundreds. */
static void check_memory(size_t before)
{
    size_t known = before, now = 0, slack = least + MIB + atomic_load(&operations) * KIB;
    for (int i = 0; i < THREADS; i++)
        known += held[i].size;
    for (int tries = 0; tries < 1000; tries++) {
        malloc_trim(0);
        now = anonymous_memory();
        if (now < known + slack)
            break;
        struct timespec moment = {0, 10000000};
        nanosleep(&moment, NULL);
    }
    if (now + 64 * KIB < known || now >= known + slack)
        dprintf(2, "%zu KiB are known, smaps has %zu\n", known / KIB, now / KIB);
    CHECK(now + 64 * KIB >= known && now < known + slack);
}

static void count_all(size_t before)
{
    atomic_store(&census, 1);
    pthread_barrier_wait(&assembled);
    atomic_store(&census, 0);
    check_memory(before);
    for (int i = 0; i < THREADS; i++)
        check_marks(held[i].start, held[i].size, held[i].owner);
    pthread_barrier_wait(&counted);
}

static void in_child(uint64_t seed)
{
    uint64_t random = seed + 1;
    if (seed % 3 == 0)
        mapped(&random, seed << 40);
    else if (seed % 3 == 1)
        allocated(&random, seed << 40);
    _exit(0);
}

static void fork_one(void)
{
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0)
        in_child(atomic_load(&children));
    int status = -1, ended = 0;
    /* A child that waits for a lock of a parent's thread never ends. Counted in tries, so that
     * suspended time does not count. */
    for (int tries = 0; tries < 60000 && (ended = waitpid(pid, &status, WNOHANG)) == 0; tries++) {
        struct timespec moment = {0, 1000000};
        nanosleep(&moment, NULL);
    }
    if (ended != pid || status != 0)
        dprintf(2, "child %d, status %#x\n", ended, (unsigned)status);
    CHECK(ended == pid && status == 0);
    atomic_fetch_add(&children, 1);
}

int main(int count, char **arguments)
{
    CHECK(count == 4);
    least = strtoul(arguments[1], NULL, 10) * MIB;
    most = strtoul(arguments[2], NULL, 10) * MIB;
    time_t end = time(NULL) + strtol(arguments[3], NULL, 10);
    /* Only base pages are freed by threads. */
    CHECK(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
    CHECK(pthread_barrier_init(&assembled, NULL, THREADS + 1) == 0);
    CHECK(pthread_barrier_init(&counted, NULL, THREADS + 1) == 0);
    /* In plain, glibc would keep freed blocks. */
    CHECK(mallopt(M_MMAP_THRESHOLD, 128 * KIB) == 1);
    size_t before = anonymous_memory();
    pthread_t ids[THREADS];
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&ids[i], NULL, storm, (void *)(uintptr_t)(i + 1)) == 0);
    unsigned counts = 0;
    time_t now, last = 0;
    do {
        fork_one();
        now = time(NULL);
        if (now != last) {
            count_all(before);
            counts++;
        }
        last = now;
    } while (now < end);
    atomic_store(&stop, 1);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(ids[i], NULL) == 0);
    check_memory(before);
    fprintf(stderr, "%lu operations, %lu at a neighbour's addresses, %lu children, %u counts\n",
            atomic_load(&operations), atomic_load(&neighbours), atomic_load(&children), counts);
    puts("nothing foreign, nothing lost");
    return 0;
}
