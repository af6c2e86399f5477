/*
 * For four seconds, closes descriptor 0 and opens a file, which gets the lowest free one, beside a
 * thread that allocates and frees memory, and forks now and then. Prints the descriptor that was another
 * one, or 0.
 */
#include "check.h"

#include <pthread.h>
#include <sys/wait.h>

static volatile int has_ended;

static void *allocate(void *unused)
{
    while (!has_ended) {
        char *block = malloc(64 * MIB);
        CHECK(block != NULL);
        for (size_t at = 0; at < 64 * MIB && !has_ended; at += 4096)
            block[at] = 1;
        free(block);
    }
    return unused;
}

int main(void)
{
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, allocate, NULL) == 0);
    long end = microseconds() + 4000000;
    int descriptor = 0;
    for (long round = 0; descriptor == 0 && microseconds() < end; round++) {
        close(0);
        descriptor = open("/dev/null", O_RDONLY);
        CHECK(descriptor >= 0);
        if (round % 200 == 199) {
            pid_t child = fork();
            CHECK(child >= 0);
            if (child == 0)
                _exit(0);
            CHECK(waitpid(child, NULL, 0) == child);
        }
    }
    has_ended = 1;
    CHECK(pthread_join(thread, NULL) == 0);
    printf("descriptor=%d\n", descriptor);
    return 0;
}
