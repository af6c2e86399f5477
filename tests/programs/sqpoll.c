/*
 * Holds memory, and has a running kernel thread of io_uring; its own thread waits in a call that
 * must not be interrupted. SIGUSR1 ends it with success. Prints "none" without io_uring.
 *
 *   sqpoll MIB
 */
#include "check.h"

#include <linux/io_uring.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>

static void end(int signal)
{
    (void)signal;
    _exit(0);
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    memset(malloc(atoi(argv[1]) * MIB), 1, atoi(argv[1]) * MIB);
    signal(SIGUSR1, end);
    struct io_uring_params params = {.flags = IORING_SETUP_SQPOLL, .sq_thread_idle = 4000};
    long ring = syscall(SYS_io_uring_setup, 4, &params);
    puts(ring < 0 ? "none" : "ready");
    fflush(stdout);
    int pair[2];
    char byte;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    return recv(pair[0], &byte, 1, 0) != -1;
}
