/*
 * What a process that ends leaves to the next: one touches 300 MiB of huge pages and ends, and after GAP
 * seconds another one touches as much. Prints how many of its first touches took longer than 1 ms.
 *
 *   hand_over ROUNDS GAP...
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGES = 150 };
static const size_t SIZE = 2 << 20;
static double times[PAGES];

static double used(void)
{
    struct timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return time.tv_sec * 1e6 + time.tv_nsec / 1e3;
}

static void touch(void)
{
    char *all = mmap(NULL, (PAGES + 1) * SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED)
        exit(1);
    char *first = (char *)(((uintptr_t)all + SIZE - 1) & ~(SIZE - 1));
    madvise(first, PAGES * SIZE, MADV_HUGEPAGE);
    for (int page = 0; page < PAGES; page++) {
        double begin = used();
        first[page * SIZE] = 1;
        times[page] = used() - begin;
    }
}

/* Runs touch() in a child, and reads the times that it writes. */
static void run(double *to)
{
    int pipes[2];
    if (pipe(pipes) != 0)
        exit(1);
    pid_t child = fork();
    if (child == 0) {
        touch();
        _exit(write(pipes[1], times, sizeof times) != sizeof times);
    }
    int status;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0 || read(pipes[0], to, sizeof times) < 0)
        exit(1);
    close(pipes[0]);
    close(pipes[1]);
}

static int compare(const void *a, const void *b)
{
    double difference = *(const double *)a - *(const double *)b;
    return (difference > 0) - (difference < 0);
}

int main(int argc, char **argv)
{
    int rounds = argc > 2 ? atoi(argv[1]) : 0, count = rounds * PAGES;
    double *all = malloc((count + 1) * sizeof *all);
    for (int argument = 2; all && argument < argc; argument++) {
        for (int round = 0; round < rounds; round++) {
            double ignored[PAGES];
            run(ignored);
            usleep(atof(argv[argument]) * 1e6);
            run(all + round * PAGES);
            /* At any moment of the kernel's period. */
            usleep(round % 7 * 100000);
        }
        int slow = 0;
        for (int i = 0; i < count; i++)
            slow += all[i] > 1000;
        qsort(all, count, sizeof *all, compare);
        printf("gap %s s: %d %% above 1 ms, median %.0f us\n", argv[argument], 100 * slow / count, all[count / 2]);
    }
    return argc < 3;
}
