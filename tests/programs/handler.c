/* Allocation inside a signal handler. `between`: the handler runs between the program's own
 * calls, which any allocator must support. `within`: it also interrupts calls for large blocks,
 * which glibc does not survive. jumbo's heap, which serves threads other than the first, does. */
#include "check.h"
#include <pthread.h>
#include <signal.h>
#include <sys/time.h>
#include <time.h>

static volatile sig_atomic_t handled;
static int within;

static void handler(int signal)
{
    (void)signal;
    int before = errno;
    static uint64_t random = 88172645463325252u;
    size_t size = 256 * KIB + next_random(&random) % (3 * MIB);
    char *block = malloc(size);
    CHECK(block != NULL);
    paint(block, size, 0x33);
    check_paint(block, size, 0x33);
    free(block);
    handled++;
    errno = before;
}

static sigset_t alarm_only;

static void *work(void *unused)
{
    sigset_t before;
    CHECK(pthread_sigmask(SIG_UNBLOCK, &alarm_only, NULL) == 0);
    uint64_t random = 2463534242u;
    char *blocks[16] = {0};
    size_t sizes[16] = {0};
    time_t end = time(NULL) + 60;
    /* Until enough handlers have run, however slow the machine is. */
    for (int round = 0; handled < 2000; round++) {
        CHECK(time(NULL) < end);
        int at = (int)(next_random(&random) % 16);
        if (!within)
            pthread_sigmask(SIG_BLOCK, &alarm_only, &before);
        if (blocks[at] != NULL) {
            check_paint(blocks[at], sizes[at], (uint8_t)at);
            free(blocks[at]);
        }
        sizes[at] = 256 * KIB + next_random(&random) % (4 * MIB);
        blocks[at] = malloc(sizes[at]);
        CHECK(blocks[at] != NULL);
        if (!within)
            pthread_sigmask(SIG_SETMASK, &before, NULL);
        paint(blocks[at], sizes[at], (uint8_t)at);
    }
    return unused;
}

int main(int argc, char **argv)
{
    within = argc > 1 && strcmp(argv[1], "within") == 0;
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART};
    sigemptyset(&alarm_only);
    sigaddset(&alarm_only, SIGALRM);
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    CHECK(pthread_sigmask(SIG_BLOCK, &alarm_only, NULL) == 0);
    struct itimerval often = {{0, 200}, {0, 200}};
    CHECK(setitimer(ITIMER_REAL, &often, NULL) == 0);
    pthread_t thread;
    if (within)
        CHECK(pthread_create(&thread, NULL, work, NULL) == 0 && pthread_join(thread, NULL) == 0);
    else
        work(NULL);
    struct itimerval never = {{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &never, NULL);
    puts("2000 handlers");
    return 0;
}
