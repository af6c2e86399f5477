/*
 * Init of a PID namespace: runs a command, and prints the number of dead orphans that were not
 * reaped.
 *
 *   init HOW COMMAND...
 *
 * HOW: application (waits only for its child), or its disposition of SIGCHLD: catches, ignores,
 * blocks.
 */
#include "check.h"

#include <dirent.h>
#include <signal.h>
#include <sys/wait.h>

static pid_t command;
static volatile int ended;
static volatile int result;

static void reap(int signal)
{
    (void)signal;
    int status;
    for (pid_t child; (child = waitpid(-1, &status, WNOHANG)) > 0;) {
        if (child == command)
            ended = 1, result = status;
    }
}

/* Counts the other processes: dead ones, or living ones. */
static int count(int dead)
{
    int found = 0;
    DIR *processes = opendir("/proc");
    CHECK(processes);
    for (struct dirent *entry; (entry = readdir(processes));) {
        char path[300], state;
        snprintf(path, sizeof path, "/proc/%s/stat", entry->d_name);
        FILE *stat = atoi(entry->d_name) > 1 ? fopen(path, "r") : NULL;
        if (!stat)
            continue;
        found += fscanf(stat, "%*d (%*[^)]) %c", &state) == 1 && (state == 'Z') == dead;
        fclose(stat);
    }
    closedir(processes);
    return found;
}

int main(int argc, char **argv)
{
    CHECK(argc > 2 && getpid() == 1);
    sigset_t chld, before;
    sigemptyset(&chld);
    sigaddset(&chld, SIGCHLD);
    /* Not for the others: the command would see how its init begins. */
    const int takes = !strcmp(argv[1], "blocks") || !strcmp(argv[1], "catches");
    CHECK(sigprocmask(SIG_BLOCK, takes ? &chld : NULL, &before) == 0);
    if (!strcmp(argv[1], "ignores"))
        signal(SIGCHLD, SIG_IGN);
    command = fork();
    CHECK(command >= 0);
    if (command == 0) {
        sigprocmask(SIG_SETMASK, &before, NULL);
        signal(SIGCHLD, SIG_DFL);
        execv(argv[2], argv + 2);
        CHECK(0);
    }
    int status = 0;
    if (!strcmp(argv[1], "blocks")) {
        while (!ended) {
            int signal;
            CHECK(sigwait(&chld, &signal) == 0);
            reap(signal);
        }
        status = result;
    } else if (!strcmp(argv[1], "catches")) {
        signal(SIGCHLD, reap);
        while (!ended)
            sigsuspend(&before);
        CHECK(sigprocmask(SIG_SETMASK, &before, NULL) == 0);
        status = result;
    } else {
        /* A process that ignores SIGCHLD gets no status. */
        CHECK(waitpid(command, &status, 0) == (strcmp(argv[1], "ignores") ? command : -1));
    }
    while (count(0) > 0) {
        usleep(1000);
        if (!strcmp(argv[1], "blocks"))
            reap(0);
    }
    if (!strcmp(argv[1], "blocks"))
        reap(0);
    printf("zombies=%d\n", count(1));
    return WEXITSTATUS(status);
}
