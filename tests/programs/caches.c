/* Allocates and frees in ways in which a thread's free blocks could become another's, and checks all bytes:
 *
 *   caches fork|vfork|handler
 *
 * fork: a child of fork(2) starts threads. vfork: a thread whose first block its vfork(2) child allocated,
 * and threads that start later. handler: a handler that frees interrupts allocations and frees. */
#include "check.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>

#define BLOCKS 64
#define ROUNDS 3000000
#define THREADS 3

static volatile int is_ready;

static void *churn(void *argument)
{
    uint8_t tag = (uint8_t)(uintptr_t)argument;
    uint64_t random = tag + 1;
    uint8_t *blocks[BLOCKS] = {0};
    size_t sizes[BLOCKS];
    for (int round = 0; round < ROUNDS; round++) {
        size_t at = next_random(&random) % BLOCKS;
        if (blocks[at] == NULL) {
            sizes[at] = 16 + next_random(&random) % 64;
            blocks[at] = malloc(sizes[at]);
            CHECK(blocks[at] != NULL);
            memset(blocks[at], tag, sizes[at]);
        } else {
            CHECK(blocks[at][0] == tag && blocks[at][sizes[at] - 1] == tag);
            free(blocks[at]);
            blocks[at] = NULL;
        }
    }
    return NULL;
}

static void *churn_after_vfork(void *argument)
{
    pid_t child = vfork();
    if (child == 0) {
        free(malloc(100));
        _exit(0);
    }
    CHECK(child > 0 && waitpid(child, NULL, 0) == child);
    is_ready = 1;
    return churn(argument);
}

static void churn_in_threads(void *(*first)(void *))
{
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, i == 0 ? first : churn, (void *)(i + 2)) == 0);
        while (first == churn_after_vfork && !is_ready)
            sched_yield();
    }
    churn((void *)1);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
}

static void *volatile given[BLOCKS];
static volatile unsigned long freed;

static void free_one(int signal)
{
    (void)signal;
    for (int i = 0; i < BLOCKS; i++)
        if (given[i] != NULL) {
            free(given[i]);
            given[i] = NULL;
            freed++;
            return;
        }
}

static void interrupt(void)
{
    static uint8_t *blocks[5000];
    CHECK(signal(SIGALRM, free_one) != SIG_ERR);
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGALRM};
    struct itimerspec often = {{0, 30000}, {0, 30000}};
    timer_t timer;
    CHECK(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0 && timer_settime(timer, 0, &often, NULL) == 0);
    sigset_t alarm, before;
    sigemptyset(&alarm);
    sigaddset(&alarm, SIGALRM);
    uint64_t random = 1;
    for (long end = microseconds() + 2000000; microseconds() < end;) {
        size_t count = next_random(&random) % 5000;
        for (size_t i = 0; i < count; i++) {
            blocks[i] = malloc(48);
            CHECK(blocks[i] != NULL);
            memset(blocks[i], (int)(i % 251), 48);
        }
        for (size_t i = 0; i < count; i++) {
            CHECK(blocks[i][0] == i % 251 && blocks[i][47] == i % 251);
            free(blocks[i]);
        }
        CHECK(sigprocmask(SIG_BLOCK, &alarm, &before) == 0);
        for (int i = 0; i < BLOCKS; i++)
            if (given[i] == NULL)
                given[i] = malloc(48);
        CHECK(sigprocmask(SIG_SETMASK, &before, NULL) == 0);
    }
    CHECK(freed > 0);
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    if (strcmp(argv[1], "handler") == 0)
        interrupt();
    if (strcmp(argv[1], "vfork") == 0)
        churn_in_threads(churn_after_vfork);
    if (strcmp(argv[1], "fork") == 0) {
        free(malloc(48));
        pid_t child = fork();
        if (child == 0) {
            churn_in_threads(churn);
            _exit(0);
        }
        int status;
        CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    }
    puts("right");
    return 0;
}
