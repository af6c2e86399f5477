// A program with much text: COUNT functions of 64 bytes each. Its first argument selects their use.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef COUNT
#define COUNT 131072
#endif
#define STRING(x) #x
#define EXPAND(x) STRING(x)

#if defined(__x86_64__)
__asm__(".text\n.balign 64\nfunctions:\n.set number, 0\n.rept " EXPAND(COUNT)
        "\n.balign 64\nmovl $number, %eax\n.set number, number + 1\nret\n.endr\n.balign 64\n");
#else
__asm__(".text\n.balign 64\nfunctions:\n.set number, 0\n.rept " EXPAND(COUNT)
        "\n.balign 64\nmovz w0, #(number & 0xffff)\nmovk w0, #(number >> 16), lsl #16\n.set number, number + 1\nret\n.endr\n.balign 64\n");
#endif
extern char functions[];

static unsigned call(size_t number) { return ((unsigned (*)(void))(functions + 64 * number))(); }

static uint64_t all(void) {
    uint64_t sum = 0;
    for (size_t number = 0; number < COUNT; number++) sum += call(number);
    return sum;
}

// Returns the PMD-mapped KiB of the mapping at an address, and its line in maps.
static long huge(const void *address, char *line) {
    FILE *smaps = fopen("/proc/self/smaps", "r");
    char text[8192];
    uintptr_t start, end;
    long sum = 0, value;
    int here = 0;
    while (fgets(text, sizeof text, smaps)) {
        if (sscanf(text, "%lx-%lx ", &start, &end) == 2) {
            here = start <= (uintptr_t)address && (uintptr_t)address < end;
            if (here && line) strcpy(line, text);
        } else if (here && (sscanf(text, "AnonHugePages: %ld", &value) == 1 || sscanf(text, "ShmemPmdMapped: %ld", &value) == 1 ||
                            sscanf(text, "FilePmdMapped: %ld", &value) == 1)) {
            sum += value;
        }
    }
    fclose(smaps);
    return sum;
}

static void tell(void) {
    char line[8192] = "";
    long kib = huge(functions + 32 * COUNT, line);
    printf("huge %ld %s", kib, line);
    fflush(stdout);
}

static double used(void) {
    struct timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static int threads(void) {
    return (int)({
        FILE *status = fopen("/proc/self/status", "r");
        char text[256];
        int count = -1;
        while (fgets(text, sizeof text, status)) sscanf(text, "Threads: %d", &count);
        fclose(status);
        count;
    });
}

#ifdef LIBRARY
unsigned library(size_t number) { return call(number); }
#else
unsigned library(size_t number) __attribute__((weak));

static double data[1 << 20] = {1, 2, 3};
static double zeroes[4 << 20];

static void *last(void *nothing) {
    all();
    return nothing;
}

int main(int count, char **arguments) {
    const char *what = count > 1 ? arguments[1] : "sum";
    if (!strcmp(what, "sum")) {
        printf("%llu\n", (unsigned long long)all());
    } else if (!strcmp(what, "tell")) {
        printf("%llu\n", (unsigned long long)all());
        tell();
    } else if (!strcmp(what, "stay")) {
        printf("%llu\n", (unsigned long long)all());
        tell();
        puts("ready");
        fflush(stdout);
        getchar();
    } else if (!strcmp(what, "burn")) {
        // Until the text is huge and its mover has finished, or for this CPU time in seconds.
        double most = atof(arguments[2]);
        while (used() < most && (!huge(functions + 32 * COUNT, NULL) || threads() > 1)) {
            all();
            if (count > 3) munmap(mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), 4096);
        }
        tell();
        printf("threads %d\n", threads());
    } else if (!strcmp(what, "lowest")) {
        // Each descriptor is the lowest free one, whatever else the process does.
        double most = atof(arguments[2]);
        long others = 0, opened = 0;
        char line[8192] = "";
        while (used() < most && !strstr(line, "memfd")) {
            for (int times = 0; times < 20000; times++, opened++) {
                close(0);
                others += open("/dev/null", O_RDONLY) != 0;
            }
            all();
            huge(functions + 32 * COUNT, line);
        }
        printf("others %ld\n%s", others, line);
    } else if (!strcmp(what, "exit")) {
        // The first thread exits; the process ends with the other one.
        pthread_t thread;
        pthread_create(&thread, NULL, last, NULL);
        syscall(SYS_exit, 0);
    } else if (!strcmp(what, "fork")) {
        // Some children meanwhile, which must see no thread of jumbo.
        double most = atof(arguments[2]);
        int seen = 0;
        for (int times = 0; used() < most && !huge(functions + 32 * COUNT, NULL); times++) {
            all();
            if (times >= 4) continue;
            pid_t child = fork();
            if (!child) _exit(threads() == 1 && all() ? 0 : 1);
            int status;
            waitpid(child, &status, 0);
            seen |= status;
            free(malloc(1 << 20)), munmap(mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), 4096);
        }
        printf("children %d\n", seen);
        tell();
    } else if (!strcmp(what, "user")) {
        // Another user from now on; no thread may keep the old one.
        all();
        if (setuid(65534)) return 1;
        printf("threads %d\n", threads());
    } else if (!strcmp(what, "patch")) {
        // The program changes its own text after the move.
        uintptr_t page = (uintptr_t)(functions + 32 * COUNT) & -4096;
        all();
        char before[64], *there = functions + 64 * (COUNT / 2);
        memcpy(before, there, 64);
        if (mprotect((void *)page, 8192, PROT_READ | PROT_WRITE)) return 1;
        memcpy(there, functions, 64);
        if (mprotect((void *)page, 8192, PROT_READ | PROT_EXEC)) return 1;
        printf("%u\n", call(COUNT / 2));
    } else if (!strcmp(what, "library")) {
        // A library whose text is written to in between.
        printf("now %u\n", library(COUNT / 2));
        char line[8192] = "";
        long kib = huge((char *)library - 32 * COUNT, line);
        printf("huge %ld %s", kib, line);
        fflush(stdout);
        getchar();
        printf("then %u\n", library(COUNT / 2));
    } else if (!strcmp(what, "data")) {
        for (size_t at = 0; at < sizeof zeroes / sizeof *zeroes; at += 512) zeroes[at] += at;
        data[1 << 19] += 1;
        printf("%g %g %g\n", data[0] + data[1] + data[2], data[1 << 19], zeroes[512]);
        fprintf(stderr, "data %ld zeroes %ld\n", huge(data + (1 << 19), NULL), huge(zeroes + (2 << 20), NULL));
    } else {
        return 2;
    }
    return 0;
}
#endif
