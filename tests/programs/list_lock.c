/* One thread reads long lines with getline(3), which holds its FILE while the buffer grows. Two
 * threads flush all streams, which holds glibc's list of streams while it waits for that FILE,
 * and fork, which takes that list inside fork(2). Any other order of locks deadlocks. */
#include "check.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LINE = 600 * KIB, FORKS = 150 };

static atomic_int stop;
static int ends[2];

static void *write_lines(void *unused)
{
    (void)unused;
    char *line = malloc(LINE);
    CHECK(line != NULL);
    memset(line, 'x', LINE);
    line[LINE - 1] = '\n';
    while (!atomic_load(&stop)) {
        for (size_t at = 0; at < LINE;) {
            ssize_t written = write(ends[1], line + at, LINE - at);
            CHECK(written > 0);
            at += (size_t)written;
        }
    }
    close(ends[1]);
    free(line);
    return NULL;
}

static void *read_lines(void *unused)
{
    (void)unused;
    FILE *lines = fdopen(ends[0], "r");
    CHECK(lines != NULL);
    for (;;) {
        /* A new buffer for each line: it grows past the small sizes of allocators. */
        char *line = NULL;
        size_t size = 0;
        ssize_t length = getline(&line, &size, lines);
        CHECK(length == LINE || length == -1);
        free(line);
        if (length == -1)
            break;
    }
    fclose(lines);
    return NULL;
}

static void *flush_and_fork(void *unused)
{
    (void)unused;
    for (int i = 0; i < FORKS; i++) {
        fflush(NULL);
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            /* The list of streams must be unlocked in the child. */
            fflush(NULL);
            free(malloc(300 * KIB));
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    return NULL;
}

int main(void)
{
    pthread_t writer, reader, forkers[2];
    CHECK(pipe(ends) == 0);
    CHECK(pthread_create(&writer, NULL, write_lines, NULL) == 0);
    CHECK(pthread_create(&reader, NULL, read_lines, NULL) == 0);
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&forkers[i], NULL, flush_and_fork, NULL) == 0);
    for (int i = 0; i < 2; i++)
        CHECK(pthread_join(forkers[i], NULL) == 0);
    atomic_store(&stop, 1);
    CHECK(pthread_join(writer, NULL) == 0);
    CHECK(pthread_join(reader, NULL) == 0);
    printf("%d forks\n", 2 * FORKS);
    return 0;
}
