/* As PID 1 of its namespace it frees a large block, and so does a child of a bare clone(2),
 * which is PID 1 of its own namespace. Prints the rest of the block in each: threads that exist
 * only in the parent must not be left to free it. */
#include "check.h"

#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define SIZE (300 * MIB)

static void freed(const char *whose)
{
    volatile char *block = malloc(SIZE);
    CHECK(block);
    for (size_t at = 0; at < SIZE; at += 4 * KIB)
        block[at] = 1;
    size_t before = resident();
    free((char *)block);
    /* A pending free completes soon. */
    for (int tries = 0; tries < 100 && resident() + SIZE / 2 > before; tries++)
        usleep(20000);
    dprintf(1, "%s: %s\n", whose, resident() + SIZE / 2 > before ? "kept" : "freed");
}

int main(void)
{
    CHECK(getpid() == 1);
    CHECK(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
    freed("parent");
    long child = syscall(SYS_clone, CLONE_NEWPID | SIGCHLD, 0, 0, 0, 0);
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(syscall(SYS_getpid) == 1);
        freed("child");
        _exit(0);
    }
    int status;
    CHECK(waitpid((pid_t)child, &status, 0) == child && status == 0);
    return 0;
}
