/*
 * Fills memory in pieces of 256 KiB, and waits until nine tenths of it are on huge pages, for at
 * most SECONDS. Prints whether they are, whether it ever had a child, its parent, its process ID
 * and its tracer.
 *
 *   fills MIB SECONDS [COMMAND...]
 *
 * Finally becomes COMMAND.
 */
#include "check.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>

static long field(const char *path, const char *name)
{
    char line[256];
    long value = -1;
    FILE *file = fopen(path, "r");
    CHECK(file);
    while (value < 0 && fgets(line, sizeof line, file))
        if (!strncmp(line, name, strlen(name)) && line[strlen(name)] == ':')
            value = atol(line + strlen(name) + 1);
    fclose(file);
    return value;
}

int main(int argc, char **argv)
{
    CHECK(argc > 2);
    size_t piece = 256 << 10, count = (size_t)atol(argv[1]) * 4;
    for (size_t at = 0; at < count; at++) {
        char *memory = malloc(piece);
        CHECK(memory);
        memset(memory, (int)(at % 251) + 1, piece);
    }
    printf("filled pid=%d\n", getpid());
    fflush(stdout);
    int has_child = 0, is_huge = 0;
    for (time_t end = time(NULL) + atol(argv[2]); !is_huge && time(NULL) < end; usleep(10000)) {
        has_child |= waitpid(-1, NULL, WNOHANG) != -1 || errno != ECHILD;
        long all = field("/proc/self/smaps_rollup", "Anonymous");
        is_huge = field("/proc/self/smaps_rollup", "AnonHugePages") >= all / 10 * 9;
    }
    printf("huge=%d\nchild=%d\nresident=%ld\n", is_huge, has_child, field("/proc/self/status", "VmRSS"));
    fflush(stdout);
    if (argc > 3)
        execvp(argv[3], argv + 3);
    return 5;
}
