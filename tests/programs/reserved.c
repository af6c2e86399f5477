/* Reserves 1 GiB of addresses, commits 256 MiB of it, and touches the first 144 KiB in each 8
 * MiB, like the buffer pool of a database. Prints the resident memory. Then fills it, a MiB each
 * 2 ms, and waits until three quarters of it are huge, or for a minute. Then commits and fills
 * as much again behind it, and waits alike. Prints the huge part of each. ARG `forks`: the child of a fork touches
 * it, too. `headers`: ends after the first step. */
#include "check.h"
#include <sys/mman.h>
#include <sys/wait.h>

static char *commit(char *at, size_t size)
{
    char *memory = mmap(at, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    CHECK(memory == at);
    return memory;
}

/* Returns the huge bytes between `from` and `to`. */
static size_t huge(const char *from, const char *to)
{
    FILE *file = fopen("/proc/self/smaps", "r");
    CHECK(file != NULL);
    char line[512];
    size_t start = 0, first, end, sum = 0, kib;
    while (fgets(line, sizeof line, file) != NULL) {
        if (sscanf(line, "%zx-%zx ", &first, &end) == 2)
            start = first;
        else if (sscanf(line, "AnonHugePages: %zu kB", &kib) == 1 && start >= (size_t)from && start < (size_t)to)
            sum += kib * KIB;
    }
    fclose(file);
    return sum;
}

int main(int argc, char **argv)
{
    size_t size = 256 * MIB;
    char *all = mmap(NULL, GIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(all != MAP_FAILED);
    char *pool = commit((char *)(((size_t)all + 2 * MIB) & ~(2 * MIB - 1)), size);
    for (size_t at = 0; at < size; at += 8 * MIB)
        memset(pool + at, 1, 144 * KIB);
    usleep(300000);
    size_t headers = resident();
    if (argc > 1 && strcmp(argv[1], "headers") == 0) {
        printf("headers=%zu\n", headers);
        return 0;
    }
    if (argc > 1) {
        pid_t child = fork();
        if (child == 0) {
            paint(pool, size, 3);
            check_paint(pool, size, 3);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        /* Programs go on mapping after a fork. */
        CHECK(mmap(NULL, MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED);
    }
    for (size_t at = 0; at < size; at += MIB) {
        paint(pool + at, MIB, 7);
        usleep(2000);
    }
    const long begin = microseconds();
    size_t first;
    while (first = huge(pool, pool + size), first < size / 4 * 3 && microseconds() - begin < 60000000)
        usleep(20000);
    char *more = commit(pool + size, size);
    for (size_t at = 0; at < size; at += MIB)
        paint(more + at, MIB, 9);
    /* At once, unless the scanner has little CPU time. */
    const long filled = microseconds();
    size_t second;
    while (second = huge(pool, more + size) - first, second < size / 5 * 4 && microseconds() - filled < 60000000)
        usleep(20000);
    for (size_t at = 0; at < size; at += MIB) {
        check_paint(pool + at, MIB, 7);
        check_paint(more + at, MIB, 9);
    }
    printf("headers=%zu first=%zu second=%zu\n", headers, first, second);
    return 0;
}
