/*
 * Runs a program and waits for it, then for the orphans it left: this process takes them all, so what
 * comes back is what outlived the program. Prints both, and ends as the program did.
 *
 *   waiter PROGRAM [ARGUMENT...]
 */
#include "check.h"

#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>

extern char **environ;

int main(int argc, char **argv)
{
    CHECK(argc > 1 && prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0);
    /* The program says what time it is, into descriptor 3, when it is about to end. */
    int pipes[2];
    CHECK(pipe2(pipes, O_CLOEXEC) == 0);
    int told_at = fcntl(pipes[1], F_DUPFD_CLOEXEC, 10);
    close(pipes[1]);
    posix_spawn_file_actions_t actions;
    CHECK(told_at >= 10 && posix_spawn_file_actions_init(&actions) == 0 &&
          posix_spawn_file_actions_adddup2(&actions, told_at, 3) == 0);
    /* Not fork(2): its child would have a sibling of its own, until it execs. */
    pid_t child;
    CHECK(posix_spawnp(&child, argv[1], &actions, NULL, argv + 1, environ) == 0);
    close(told_at);
    long start = 0;
    ssize_t told = read(pipes[0], &start, sizeof start);
    int status, other, orphans = 0, bad = 0;
    CHECK(waitpid(child, &status, 0) == child);
    long waited = microseconds() - start;
    /* What it held open is closed when it has ended, whatever outlives it. */
    CHECK(fcntl(pipes[0], F_SETFL, O_NONBLOCK) == 0);
    int closed = read(pipes[0], &start, 1) == 0;
    while (waitpid(-1, &other, 0) > 0) {
        orphans++;
        bad += !(WIFEXITED(other) && WEXITSTATUS(other) == 0);
    }
    printf("told=%d waited=%ld closed=%d orphans=%d bad=%d back=%ld\n", told == sizeof start, waited, closed, orphans,
           bad, microseconds() - start);
    fflush(stdout);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
