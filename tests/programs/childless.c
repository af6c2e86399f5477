/*
 * Checks that no wait of any kind finds a child.
 *
 *   childless [subreaper | exec]
 *
 * This process adopts orphans: from some point after its start, or from before.
 */
#include "check.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static int sent;

static void none(int all)
{
    int status;
    CHECK(waitpid(-1, &status, 0) == -1 && errno == ECHILD);
    CHECK(waitpid(0, &status, WNOHANG) == -1 && errno == ECHILD);
    siginfo_t info;
    CHECK(waitid(P_ALL, 0, &info, WEXITED | WNOHANG) == -1 && errno == ECHILD);
    if (all)
        CHECK(waitpid(-1, &status, __WALL | WNOHANG) == -1 && errno == ECHILD);
}

static void count(int signal)
{
    (void)signal;
    sent++;
}

int main(int argc, char **argv)
{
    int subreaper = argc > 1 && !strcmp(argv[1], "subreaper");
    if (argc > 1 && !strcmp(argv[1], "exec")) {
        CHECK(prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0);
        execl(argv[0], argv[0], "inherited", NULL);
        CHECK(0);
    }
    signal(SIGCHLD, count);
    none(1);
    if (subreaper) {
        CHECK(prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0);
        /* The reaper of this image already exists; a child has none, since this process would
         * inherit it. */
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            none(0);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        none(1);
    } else {
        CHECK(sent == 0);
    }
    return 0;
}
