// Waits in calls that a stop of a thread could end early, and counts such ends. Usage: waits MIB
// SECONDS: one process makes all calls in turn. Prints "ready" once the memory is touched; at the
// end the number of each call, of EINTR results, and of calls that took much more or less time than
// requested.
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/sem.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { EPOLL, EPOLL_FOREVER, FUTEX, NANOSLEEP, PIPE, POLL, SELECT, SIGNAL, SEMAPHORE, CALLS };
static const char *const names[CALLS] = {"epoll", "epoll_forever", "futex", "nanosleep", "pipe",
                                         "poll",  "select",        "signal", "semaphore"};
static unsigned made[CALLS], interrupted[CALLS], early[CALLS], late[CALLS], wrong[CALLS];
static double longest;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

// Another process writes a byte to each of these pipes every 50 ms.
static int ticks[2], events[2];

static void *wait_for(void *argument) {
    int only = *(int *)argument;
    double end = now() + *((int *)argument + 1);
    const double asked = 0.05;
    int epoll = epoll_create1(0), empty[2], word = 0;
    if (pipe(empty)) exit(2);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = empty[0]};
    epoll_ctl(epoll, EPOLL_CTL_ADD, empty[0], &event);
    int other = epoll_create1(0);
    event.data.fd = events[0];
    epoll_ctl(other, EPOLL_CTL_ADD, events[0], &event);
    int semaphore = semget(IPC_PRIVATE, 1, 0600);
    sigset_t none;
    sigemptyset(&none);
    sigaddset(&none, SIGUSR2);
    sigprocmask(SIG_BLOCK, &none, NULL);
    for (unsigned i = 0; now() < end; i++) {
        int call = only >= 0 ? only : (int)(i % CALLS);
        struct timespec time = {0, 50 * 1000 * 1000};
        struct timeval val = {0, 50 * 1000};
        struct pollfd ready = {.fd = empty[0], .events = POLLIN};
        struct sembuf down = {0, -1, 0};
        fd_set set;
        char byte;
        long got = -2, expected = 0;
        int timed = 1;
        double start = now();
        errno = 0;
        switch (call) {
        case EPOLL: got = epoll_wait(epoll, &event, 1, 50); break;
        case EPOLL_FOREVER:
            got = epoll_wait(other, &event, 1, -1), expected = 1, timed = 0;
            if (got == 1 && read(events[0], &byte, 1) != 1) wrong[call]++;
            break;
        case FUTEX:
            got = syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 0, &time, NULL, 0);
            expected = -1;
            break;
        case NANOSLEEP: got = nanosleep(&time, NULL); break;
        case PIPE: got = read(ticks[0], &byte, 1), expected = 1, timed = 0; break;
        case POLL: got = poll(&ready, 1, 50); break;
        case SELECT:
            FD_ZERO(&set);
            FD_SET(empty[0], &set);
            got = select(empty[0] + 1, &set, NULL, NULL, &val);
            break;
        case SIGNAL: got = sigtimedwait(&none, NULL, &time), expected = -1; break;
        case SEMAPHORE: got = semtimedop(semaphore, &down, 1, &time), expected = -1; break;
        }
        int code = errno;
        double took = now() - start;
        made[call]++;
        if (got == -1 && code == EINTR) interrupted[call]++;
        else if (got != expected) wrong[call]++;
        if (timed && took < asked - 0.001) early[call]++;
        if (timed && took > 2 * asked + 0.05) late[call]++;
        if (took > longest) longest = took;
    }
    semctl(semaphore, 0, IPC_RMID);
    return NULL;
}

int main(int count, char **arguments) {
    if (count < 3) return 2;
    size_t size = (size_t)atoi(arguments[1]) << 20;
    // Aligned, so that it consists of whole blocks.
    char *memory = aligned_alloc(2 << 20, size);
    for (size_t at = 0; at < size; at += 4096) memory[at] = (char)(at >> 12);
    int only = -1;
    for (int call = 0; count > 3 && call < CALLS; call++)
        if (!strcmp(arguments[3], names[call])) only = call;
    if (pipe(ticks) || pipe(events)) return 2;
    pid_t ticker = fork();
    if (ticker == 0) {
        // The writer ends when no process reads.
        close(ticks[0]), close(events[0]);
        munmap(memory, size);
        for (;;) {
            usleep(50 * 1000);
            if (getppid() == 1) _exit(0);
            if (write(ticks[1], "x", 1) < 0 || write(events[1], "x", 1) < 0) _exit(0);
        }
    }
    close(ticks[1]), close(events[1]);
    printf("ready\n");
    fflush(stdout);
    int what[2] = {only, atoi(arguments[2])};
    wait_for(what);
    unsigned changed = 0;
    for (size_t at = 0; at < size; at += 4096) changed += memory[at] != (char)(at >> 12);
    for (int call = 0; call < CALLS; call++)
        printf("%s made=%u eintr=%u early=%u late=%u wrong=%u\n", names[call], made[call],
               interrupted[call], early[call], late[call], wrong[call]);
    unsigned sum = 0, all = 0;
    for (int call = 0; call < CALLS; call++)
        sum += interrupted[call] + early[call] + wrong[call], all += made[call];
    printf("all=%u bad=%u changed=%u longest=%.3f\n", all, sum, changed, longest);
    return sum || changed;
}
