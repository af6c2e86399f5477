/* A program of one thread whose signal handler forks while malloc(3) maps memory. Its tracing
 * parent sends the signal at each return of a large mmap(2), and of brk(2). */
#include "check.h"
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>

static void fork_here(int number)
{
    (void)number;
    pid_t child = fork();
    if (child == 0)
        _exit(0);
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void allocate(void)
{
    CHECK(ptrace(PTRACE_TRACEME, 0, 0, 0) == 0);
    CHECK(signal(SIGUSR1, fork_here) != SIG_ERR);
    raise(SIGSTOP);
    for (int at = 0; at < 500000; at++)
        memset(malloc(100), 1, 100);
    _exit(0);
}

int main(void)
{
    alarm(120);
    pid_t child = fork();
    if (child == 0)
        allocate();
    int status, inside = 0, sent = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFSTOPPED(status));
    CHECK(ptrace(PTRACE_SETOPTIONS, child, 0, PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL) == 0);
    for (long number = 0;;) {
        CHECK(ptrace(PTRACE_SYSCALL, child, 0, number) == 0);
        number = 0;
        CHECK(waitpid(child, &status, 0) == child);
        if (!WIFSTOPPED(status))
            break;
        if (WSTOPSIG(status) != (SIGTRAP | 0x80)) {
            number = WSTOPSIG(status) == SIGTRAP ? 0 : WSTOPSIG(status);
            continue;
        }
        inside = !inside;
#ifdef __x86_64__
        struct user_regs_struct at;
        CHECK(ptrace(PTRACE_GETREGS, child, 0, &at) == 0);
        int grows = at.orig_rax == SYS_brk || (at.orig_rax == SYS_mmap && at.rsi >= 32 * MIB);
        if (!inside && grows && sent < 20) {
            sent++;
            number = SIGUSR1;
        }
#endif
    }
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    puts("forked");
    return 0;
}
