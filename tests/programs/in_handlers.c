/* Large ranges are unmapped in signal handlers.
 *
 * in_handlers malloc N: in a handler that interrupted malloc(), in N children in turn, each with
 * a second thread, so that malloc takes its locks.
 * in_handlers jump N: the handler leaves with siglongjmp(), N times, at any moment of an munmap;
 * nothing may be left.
 * in_handlers stop N: N times, like a garbage collector: a thread that unmaps is stopped in a
 * handler until another thread has unmapped a range, too. */
#include "check.h"
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>

static const size_t SIZE = 144 * MIB;
/* Distance in bytes between filled pages. */
static const size_t STEP = 64 * KIB;

static void on_signal(int signal, void (*handler)(int), int flags)
{
    struct sigaction action = {.sa_handler = handler, .sa_flags = flags};
    CHECK(sigaction(signal, &action, NULL) == 0);
}

static void alarm_after(long us)
{
    struct itimerval once = {{0, 0}, {us / 1000000, us % 1000000}};
    CHECK(setitimer(ITIMER_REAL, &once, NULL) == 0);
}

/* Maps and fills by bare system calls, for handlers. */
static char *filled(size_t step)
{
    char *start = (char *)syscall(SYS_mmap, NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0L);
    CHECK(start != MAP_FAILED);
    for (size_t at = 0; at < SIZE; at += step)
        start[at] = 1;
    return start;
}

static volatile sig_atomic_t handled;

static void unmaps(int signal)
{
    (void)signal;
    CHECK(munmap(filled(STEP), SIZE) == 0);
    handled = 1;
}

static void *idle(void *unused)
{
    pause();
    return unused;
}

static void malloc_until_interrupted(unsigned number)
{
    /* Ends a child that waits for itself. */
    alarm(0);
    on_signal(SIGALRM, unmaps, SA_RESTART);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, idle, NULL) == 0);
    void *blocks[64] = {0};
    uint64_t random = number + 1;
    alarm_after(500 + 37 * number);
    while (!handled) {
        size_t at = next_random(&random) % 64;
        free(blocks[at]);
        /* Larger than the blocks that threads cache. */
        blocks[at] = malloc(1100 + next_random(&random) % 60000);
        CHECK(blocks[at] != NULL);
    }
    _exit(0);
}

static void in_malloc(unsigned times)
{
    for (unsigned number = 0; number < times; number++) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0)
            malloc_until_interrupted(number);
        int status;
        CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    }
}

static sigjmp_buf back;

static void jumps(int signal)
{
    (void)signal;
    siglongjmp(back, 1);
}

static size_t mappings(void)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps != NULL);
    size_t lines = 0;
    for (int byte; (byte = getc(maps)) != EOF;)
        lines += byte == '\n';
    fclose(maps);
    return lines;
}

/* Waits for pending frees, and for the threads that do them. */
static void settle(size_t rss, size_t lines)
{
    for (int tries = 0; tries < 1000 && (resident() > rss || mappings() > lines); tries++) {
        struct timespec moment = {0, 10000000};
        nanosleep(&moment, NULL);
    }
    if (resident() > rss || mappings() > lines)
        dprintf(2, "%zu MiB, %zu mappings; at most %zu, %zu\n", resident() / MIB, mappings(), rss / MIB, lines);
    CHECK(resident() <= rss && mappings() <= lines);
}

static void with_jumps(unsigned times)
{
    on_signal(SIGALRM, jumps, SA_NODEFER);
    /* Stacks of ended threads and malloc's arenas are kept. */
    size_t rss = resident() + 32 * MIB, lines = mappings() + 20;
    static volatile unsigned number;
    for (number = 0; number < times; number++) {
        /* An address at which no other thread maps. */
        char *start = (char *)0x500000000000;
        int prot = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
        CHECK(mmap(start, SIZE, prot, flags, -1, 0) == start);
        for (size_t at = 0; at < SIZE; at += 8 * KIB)
            start[at] = 1;
        if (sigsetjmp(back, 1) == 0) {
            alarm_after(100 + number % 16 * 400);
            munmap(start, SIZE);
            pause();
        }
    }
    /* The handler may have run before the last munmap. */
    CHECK(syscall(SYS_munmap, 0x500000000000, SIZE) == 0);
    settle(rss, lines);
    pid_t pid = fork();
    if (pid == 0)
        _exit(munmap(filled(STEP), SIZE) != 0);
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

static atomic_int stopped, go_on, done;

static void stops(int signal)
{
    (void)signal;
    atomic_store(&stopped, 1);
    while (!atomic_load(&go_on))
        ;
    atomic_store(&stopped, 0);
}

static void *unmaps_always(void *unused)
{
    while (!atomic_load(&done))
        CHECK(munmap(filled(STEP), SIZE) == 0);
    return unused;
}

static void in_stopped_world(unsigned times)
{
    on_signal(SIGUSR1, stops, SA_RESTART);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, unmaps_always, NULL) == 0);
    for (unsigned number = 0; number < times; number++) {
        char *start = filled(STEP);
        atomic_store(&go_on, 0);
        CHECK(pthread_kill(thread, SIGUSR1) == 0);
        while (!atomic_load(&stopped))
            sched_yield();
        CHECK(munmap(start, SIZE) == 0);
        atomic_store(&go_on, 1);
        while (atomic_load(&stopped))
            sched_yield();
    }
    atomic_store(&done, 1);
    CHECK(pthread_join(thread, NULL) == 0);
}

int main(int count, char **arguments)
{
    CHECK(count == 3);
    unsigned times = (unsigned)atoi(arguments[2]);
    CHECK(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
    if (strcmp(arguments[1], "malloc") == 0)
        in_malloc(times);
    else if (strcmp(arguments[1], "jump") == 0)
        with_jumps(times);
    else
        in_stopped_world(times);
    printf("%u times\n", times);
    return 0;
}
