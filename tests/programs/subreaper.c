/*
 * Adopts orphans, runs a command, and prints how often its waits found a child, and whether the
 * last one was the command.
 *
 *   subreaper HOW COMMAND...
 *
 * HOW to run the command: fork, spawn.
 */
#include "check.h"

#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>

extern char **environ;

int main(int argc, char **argv)
{
    CHECK(argc > 2 && prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0);
    pid_t command;
    if (!strcmp(argv[1], "spawn")) {
        CHECK(posix_spawnp(&command, argv[2], NULL, NULL, argv + 2, environ) == 0);
    } else if ((command = fork()) == 0) {
        execvp(argv[2], argv + 2);
        CHECK(0);
    }
    int waits = 0, status;
    pid_t last = 0;
    for (pid_t child; (child = waitpid(-1, &status, 0)) > 0; waits++)
        last = child;
    CHECK(errno == ECHILD);
    printf("waits=%d last=%d\n", waits, last == command);
    return 0;
}
