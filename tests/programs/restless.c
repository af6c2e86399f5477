// Maps, unmaps, forks and executes itself all the time, and checks its memory. Usage: restless
// SECONDS|rounds N. Prints "ready" once, and its result at the end.
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define BLOCKS 6
#define BLOCK ((size_t)4 << 20)

static uint64_t seed = 88172645463325252ull;

static uint64_t next(void) {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static void fill(unsigned char *block, unsigned value) {
    for (size_t at = 0; at < BLOCK; at += 4096) memset(block + at, (int)(value + at / 4096), 64);
}

static int holds(const unsigned char *block, unsigned value) {
    for (size_t at = 0; at < BLOCK; at += 4096)
        if (block[at] != (unsigned char)(value + at / 4096) || block[at + 63] != block[at]) return 0;
    return 1;
}

int main(int count, char **arguments) {
    if (count < 4) return 2;
    // SECONDS END EXECS BAD: state that it passes on across execs: time, end and results.
    double end = atof(arguments[2]);
    unsigned execs = (unsigned)atoi(arguments[3]), bad = count > 4 ? (unsigned)atoi(arguments[4]) : 0;
    if (end == 0) {
        end = now() + atof(arguments[1]);
        printf("ready\n");
        fflush(stdout);
    }
    unsigned char *blocks[BLOCKS] = {0};
    unsigned values[BLOCKS] = {0};
    seed += execs * 7919;
    for (unsigned round = 0; now() < end; round++) {
        unsigned at = next() % BLOCKS;
        if (blocks[at]) {
            bad += !holds(blocks[at], values[at]);
            if (munmap(blocks[at], BLOCK)) bad++;
        }
        blocks[at] = mmap(NULL, BLOCK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (blocks[at] == MAP_FAILED) return 3;
        values[at] = (unsigned)next();
        fill(blocks[at], values[at]);
        if (round % 8 == 3) {
            pid_t child = fork();
            if (child == 0) {
                unsigned wrong = 0;
                for (int i = 0; i < BLOCKS; i++) wrong += blocks[i] && !holds(blocks[i], values[i]);
                fill(blocks[at], 1);
                _exit(wrong != 0);
            }
            int status;
            if (child < 0 || waitpid(child, &status, 0) != child || status != 0) bad++;
        }
        struct timespec moment = {0, 200000};
        if (nanosleep(&moment, NULL)) bad++;
        if (round == 40) {
            char number[32], wrong[32], until[64];
            for (int i = 0; i < BLOCKS; i++) bad += blocks[i] && !holds(blocks[i], values[i]);
            snprintf(number, sizeof number, "%u", execs + 1);
            snprintf(wrong, sizeof wrong, "%u", bad);
            snprintf(until, sizeof until, "%.6f", end);
            execl("/proc/self/exe", arguments[0], arguments[1], until, number, wrong, NULL);
            return 4;
        }
    }
    printf("bad=%u executed=%d\n", bad, execs > 0);
    return bad != 0;
}
