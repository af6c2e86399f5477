/*
 * Two threads that make calls which end and restart the reaper, at the same time: one changes the
 * root to and fro, the other one leaves its namespace. After each round the reaper must have the
 * root of the program.
 *
 *   rooted FOLDER ROUNDS
 *
 * FOLDER has a /proc of its own.
 */
#include "check.h"

#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/stat.h>

static pthread_barrier_t barrier;
static int roots[2];
static long rounds;

static void *leaves(void *unused)
{
    (void)unused;
    for (long round = 0; round < rounds; round++) {
        pthread_barrier_wait(&barrier);
        CHECK(unshare(CLONE_NEWUTS) == 0);
        pthread_barrier_wait(&barrier);
        /* The other thread checks. */
        pthread_barrier_wait(&barrier);
    }
    return NULL;
}

static int read_at(DIR *proc, const char *pid, const char *name, char *text, size_t size)
{
    char path[300];
    snprintf(path, sizeof path, "%s/%s", pid, name);
    int file = openat(dirfd(proc), path, O_RDONLY);
    ssize_t length = file < 0 ? -1 : read(file, text, size - 1);
    if (file >= 0)
        close(file);
    text[length < 0 ? 0 : length] = 0;
    return length > 0;
}

/* Reports whether this process is a reaper of the program. A reaper that has freed the memory
 * has no command line. */
static int is_reaper(DIR *proc, const char *pid, const char *program)
{
    char text[4096];
    return read_at(proc, pid, "comm", text, sizeof text) && !strcmp(text, "jumbo-reaper\n") &&
           read_at(proc, pid, "cmdline", text, sizeof text) && !strcmp(text, program);
}

/*
 * Reports whether the reaper ends within ten seconds. The kernel reports the end of a task
 * (CLONE_CHILD_CLEARTID) before the task drops its memory, so an ended one stays visible for a
 * moment.
 */
static int ends(DIR *proc, const char *pid, const char *program)
{
    for (int look = 0; look < 10000; look++) {
        if (!is_reaper(proc, pid, program))
            return 1;
        usleep(1000);
    }
    return 0;
}

/* Counts the living reapers of this program; all must have the root `expected`. */
static int reapers(DIR *proc, const char *program, const struct stat *expected)
{
    int found = 0;
    struct dirent *entry;
    rewinddir(proc);
    while ((entry = readdir(proc))) {
        char path[300];
        struct stat root;
        if (!is_reaper(proc, entry->d_name, program))
            continue;
        snprintf(path, sizeof path, "%s/root", entry->d_name);
        int has_root = fstatat(dirfd(proc), path, &root, 0) == 0;
        if (has_root && root.st_dev == expected->st_dev && root.st_ino == expected->st_ino)
            found++;
        else
            CHECK(ends(proc, entry->d_name, program));
    }
    return found;
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    rounds = atol(argv[2]);
    DIR *proc = opendir("/proc");
    roots[0] = open("/", O_RDONLY | O_DIRECTORY);
    roots[1] = open(argv[1], O_RDONLY | O_DIRECTORY);
    CHECK(proc && roots[0] >= 0 && roots[1] >= 0);
    pthread_t other;
    CHECK(pthread_barrier_init(&barrier, NULL, 2) == 0);
    CHECK(pthread_create(&other, NULL, leaves, NULL) == 0);
    long seen = 0;
    for (long round = 0; round < rounds; round++) {
        int root = roots[(round + 1) % 2];
        pthread_barrier_wait(&barrier);
        CHECK(fchdir(root) == 0 && chroot(".") == 0);
        pthread_barrier_wait(&barrier);
        struct stat expected;
        CHECK(fstat(root, &expected) == 0);
        int found = reapers(proc, argv[0], &expected);
        /* An ended one may still be visible. */
        for (int look = 0; found > 1 && look < 10000; look++) {
            usleep(1000);
            found = reapers(proc, argv[0], &expected);
        }
        seen += found;
        pthread_barrier_wait(&barrier);
    }
    CHECK(pthread_join(other, NULL) == 0);
    printf("rounds=%ld seen=%ld\n", rounds, seen);
    return 0;
}
