/*
 * Touches blocks of 64 MiB in an order that nothing can foresee, and reads them, for SECONDS of CPU
 * time, while OTHERS processes want a CPU as well (one for each, by default). Prints its own CPU time,
 * the time that this took, and the CPU time of the process that scans its memory, in microseconds.
 *
 *   paced SECONDS [OTHERS]
 */
#include "check.h"

#include <signal.h>
#include <sys/prctl.h>

enum { MAX_OTHERS = 256 };
static pid_t others[MAX_OTHERS];

static long used(void)
{
    struct timespec time;
    CHECK(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time) == 0);
    return time.tv_sec * 1000000L + time.tv_nsec / 1000;
}

/* Returns the CPU time of a process of that name, 0 if it has another. */
static long used_by_scanner(int pid)
{
    char path[64], name[64] = "";
    long long nanoseconds = 0;
    snprintf(path, sizeof path, "/proc/%d/comm", pid);
    FILE *file = fopen(path, "r");
    if (!file)
        return 0;
    int is_scanner = fscanf(file, "%63s", name) == 1 && !strcmp(name, "jumbo-watch");
    fclose(file);
    snprintf(path, sizeof path, "/proc/%d/schedstat", pid);
    file = fopen(path, "r");
    if (file && is_scanner)
        CHECK(fscanf(file, "%lld", &nanoseconds) == 1);
    if (file)
        fclose(file);
    return nanoseconds / 1000;
}

int main(int argc, char **argv)
{
    CHECK(argc == 2 || argc == 3);
    long count = argc == 3 ? atol(argv[2]) : sysconf(_SC_NPROCESSORS_ONLN), seconds = atol(argv[1]);
    CHECK(count >= 0 && count <= MAX_OTHERS);
    for (long i = 0; i < count; i++) {
        others[i] = fork();
        CHECK(others[i] >= 0);
        while (others[i] == 0)
            prctl(PR_SET_PDEATHSIG, SIGKILL);
    }
    long began = microseconds();
    size_t size = 64 * MIB, pages = size / 4096, sum = 0, round = 0;
    while (used() < seconds * 1000000) {
        char *block = malloc(size);
        CHECK(block != NULL);
        for (size_t page = 0; page < pages; page++)
            block[(page * 7919 + round) % pages * 4096 + 8] = 1;
        for (size_t at = 0; at < size; at += 64)
            sum += block[at];
        free(block);
        round++;
    }
    long scanner = 0;
    int pid;
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%d/children", getpid());
    FILE *file = fopen(path, "r");
    CHECK(file != NULL);
    while (fscanf(file, "%d", &pid) == 1)
        scanner += used_by_scanner(pid);
    fclose(file);
    for (long i = 0; i < count; i++)
        kill(others[i], SIGKILL);
    printf("used=%ld\nelapsed=%ld\nscanner=%ld\nsum=%zu\n", used(), microseconds() - began, scanner, sum);
    return 0;
}
