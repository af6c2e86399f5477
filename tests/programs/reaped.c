/*
 * Touches MIB of base pages, and ends in the way HOW.
 *
 *   reaped MIB HOW
 *
 * HOW: exit, _exit, return, abort, segv, kill, exec, exec-thread, exec-fails, last-thread,
 * join-main, daemon, orphan, spawn, system, stay.
 */
#include "check.h"

#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>

extern char **environ;

static char *memory;
static size_t length;
static pthread_t first;

static void touch(void)
{
    for (size_t at = 0; at < length; at += 4096)
        memory[at] = (char)(at >> 12);
}

static void check(void)
{
    for (size_t at = 0; at < length; at += 4096)
        CHECK(memory[at] == (char)(at >> 12));
}

/* Tells `waiter` that the end begins. */
static void now(void)
{
    long time = microseconds();
    ssize_t told = write(3, &time, sizeof time);
    (void)told;
}

static void *exec_from_thread(void *unused)
{
    (void)unused;
    now();
    execl("/bin/sh", "sh", "-c", "exit 5", (char *)0);
    return NULL;
}

/* The main thread is gone; this thread still uses the memory. */
static void *last(void *unused)
{
    (void)unused;
    char state = 0;
    while (state != 'Z') {
        FILE *stat = fopen("/proc/self/stat", "r");
        CHECK(stat && fscanf(stat, "%*d (%*[^)]) %c", &state) == 1);
        fclose(stat);
    }
    /* Longer than the reaper's poll interval. */
    for (int round = 0; round < 20; round++) {
        usleep(20000);
        check();
    }
    printf("checked\n");
    fflush(stdout);
    now();
    _exit(4);
}

static void *joins(void *unused)
{
    CHECK(pthread_join(first, NULL) == 0);
    return last(unused);
}

/* Runs in a child that outlives its parent. */
static void linger(pid_t parent)
{
    while (getppid() == parent)
        usleep(1000);
    check();
    printf("checked\n");
    fflush(stdout);
    _exit(0);
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    const char *how = argv[2];
    length = (size_t)atol(argv[1]) * MIB;
    memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED && madvise(memory, length, MADV_NOHUGEPAGE) == 0);
    touch();
    first = pthread_self();
    pthread_t thread;
    if (!strcmp(how, "exec-thread")) {
        CHECK(pthread_create(&thread, NULL, exec_from_thread, NULL) == 0);
        pthread_join(thread, NULL);
    } else if (!strcmp(how, "last-thread")) {
        CHECK(pthread_create(&thread, NULL, last, NULL) == 0);
        pthread_exit(NULL);
    } else if (!strcmp(how, "join-main")) {
        CHECK(pthread_create(&thread, NULL, joins, NULL) == 0);
        usleep(100000);
        pthread_exit(NULL);
    } else if (!strcmp(how, "exec-fails")) {
        execl("/nonexistent", "nonexistent", (char *)0);
        check();
    } else if (!strcmp(how, "daemon")) {
        /* Forks twice; each parent ends before its child. */
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            setsid();
            if (fork() == 0) {
                usleep(50000);
                check();
                printf("checked\n");
                fflush(stdout);
            }
            _exit(0);
        }
    } else if (!strcmp(how, "spawn")) {
        for (int round = 0; round < 20; round++) {
            char *const arguments[] = {"true", NULL};
            pid_t child;
            CHECK(posix_spawn(&child, "/bin/true", NULL, NULL, arguments, environ) == 0);
            CHECK(waitpid(child, NULL, 0) == child);
        }
        check();
    } else if (!strcmp(how, "system")) {
        CHECK(system("exit 3") == 3 << 8);
        check();
    } else if (!strcmp(how, "stay")) {
        printf("ready\n");
        fflush(stdout);
        int byte = getchar();
        check();
        printf("checked\n");
        fflush(stdout);
        return byte == 'q' ? 6 : 0;
    }
    now();
    if (!strcmp(how, "exit"))
        exit(3);
    if (!strcmp(how, "_exit"))
        _exit(3);
    if (!strcmp(how, "abort"))
        abort();
    if (!strcmp(how, "segv"))
        *(volatile int *)8 = 1;
    if (!strcmp(how, "kill"))
        kill(getpid(), SIGKILL);
    if (!strcmp(how, "exec"))
        execl("/bin/sh", "sh", "-c", "exit 5", (char *)0);
    pid_t parent = getpid();
    if (!strcmp(how, "orphan") && fork() == 0)
        linger(parent);
    return 3;
}
