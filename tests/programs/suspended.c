/* Stops its threads at any point, in a signal handler, and maps memory meanwhile, like garbage
 * collectors: mmap(2) is a system call and must not wait for any of them. With an argument they map
 * alone, and the program forks meanwhile, too. */
#include "check.h"
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>

enum { THREADS = 2 };
static sem_t said;
static volatile int is_over, may_go_on, forks;

static void stop(int signal)
{
    (void)signal;
    sem_post(&said);
    while (!may_go_on)
        usleep(50);
    sem_post(&said);
}

static void map(int flags)
{
    char *memory = mmap(NULL, 512 * KIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    CHECK(memory != MAP_FAILED && madvise(memory, 8 * KIB, MADV_DONTNEED) == 0);
    CHECK(mprotect(memory, 4 * KIB, PROT_READ) == 0);
    CHECK(munmap(memory, 512 * KIB) == 0);
}

static void *work(void *argument)
{
    unsigned count = 0;
    while (!is_over) {
        map(0);
        if (forks)
            continue;
        void *block = malloc((300 + 512 * count++ % 3000) * KIB);
        CHECK(block != NULL);
        free(block);
    }
    return argument;
}

int main(int count, char **words)
{
    (void)words;
    forks = count > 1;
    pthread_t threads[THREADS];
    int slow = 0;
    CHECK(sem_init(&said, 0, 0) == 0);
    CHECK(signal(SIGUSR1, stop) != SIG_ERR);
    for (int at = 0; at < 64; at++)
        map(0);
    for (int at = 0; at < THREADS; at++)
        CHECK(pthread_create(&threads[at], NULL, work, NULL) == 0);
    for (int round = 0; round < 2000; round++) {
        alarm(60);
        may_go_on = 0;
        for (int at = 0; at < THREADS; at++)
            CHECK(pthread_kill(threads[at], SIGUSR1) == 0);
        for (int at = 0; at < THREADS; at++)
            while (sem_wait(&said) != 0)
                ;
        long start = microseconds();
        for (int at = 0; at < 8; at++)
            map(at == 7 ? MAP_POPULATE : 0);
        pid_t child = forks ? fork() : 0;
        if (forks && child == 0)
            _exit(0);
        CHECK(!forks || (child > 0 && waitpid(child, NULL, 0) == child));
        slow += microseconds() - start > 500000;
        /* A busy host stops the program for so long now and then. */
        CHECK(slow < 6);
        may_go_on = 1;
        for (int at = 0; at < THREADS; at++)
            while (sem_wait(&said) != 0)
                ;
    }
    is_over = 1;
    for (int at = 0; at < THREADS; at++)
        CHECK(pthread_join(threads[at], NULL) == 0);
    puts("mapped");
    return 0;
}
