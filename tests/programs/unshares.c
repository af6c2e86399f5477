/*
 * Calls that the kernel refuses to a process whose memory another process shares, by name and by number,
 * and what they answer.
 *
 *   unshares CALL
 */
#include "check.h"

#include <sched.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static void say(const char *what, long answer)
{
    printf("%s: %ld %s\n", what, answer, answer == 0 ? "" : strerror(errno));
}

int main(int argc, char **argv)
{
    CHECK(argc > 1);
    errno = 0;
    if (!strcmp(argv[1], "memory")) {
        say("unshare memory", unshare(CLONE_VM));
        say("unshare signal handlers", unshare(CLONE_SIGHAND));
        say("by number", syscall(SYS_unshare, CLONE_VM));
        say("nonsense", unshare(1));
        CHECK(errno == EINVAL);
    } else if (!strcmp(argv[1], "time")) {
        say("unshare time", unshare(CLONE_NEWTIME));
        int time = open("/proc/self/ns/time_for_children", O_RDONLY);
        CHECK(time >= 0);
        say("join time", setns(time, CLONE_NEWTIME));
        say("by number", syscall(SYS_setns, time, CLONE_NEWTIME));
        say("a bad descriptor", setns(-1, 0));
    } else if (!strcmp(argv[1], "user")) {
        say("unshare user", unshare(CLONE_NEWUSER | CLONE_NEWNS));
    } else if (!strcmp(argv[1], "pid")) {
        say("unshare pid", unshare(CLONE_NEWPID));
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0)
            _exit(getpid() == 1 ? 0 : 1);
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        say("the first child is PID 1", status);
    }
    printf("ready\n");
    fflush(stdout);
    getchar();
    return 0;
}
