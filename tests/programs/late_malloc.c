/*
 * Allocates the first block that only the C library has room for, in each of CHILDREN processes by
 * eight threads at once, and in one more by a thread that is to be cancelled. Prints the number of
 * processes that ended otherwise than they should, and whether that thread was cancelled meanwhile.
 *
 *   late_malloc CHILDREN
 */
#include "check.h"

#include <malloc.h>
#include <pthread.h>
#include <sys/wait.h>

enum { THREADS = 8 };
static pthread_barrier_t together;
static volatile int is_done;

static void *allocate(void *unused)
{
    void *block = NULL;
    pthread_barrier_wait(&together);
    CHECK(posix_memalign(&block, 8192, 500) == 0);
    memset(block, 1, 500);
    free(block);
    return unused;
}

static void *cancelled(void *unused)
{
    pthread_cancel(pthread_self());
    free(aligned_alloc(8192, 8192));
    malloc_trim(0);
    is_done = 1;
    pthread_testcancel();
    return unused;
}

static int run(int is_cancelled)
{
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        pthread_t threads[THREADS];
        int count = is_cancelled ? 1 : THREADS;
        for (int i = 0; i < count; i++)
            CHECK(pthread_create(&threads[i], NULL, is_cancelled ? cancelled : allocate, NULL) == 0);
        for (int i = 0; i < count; i++)
            CHECK(pthread_join(threads[i], NULL) == 0);
        _exit(is_cancelled && !is_done);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    return status != 0;
}

int main(int argc, char **argv)
{
    CHECK(argc == 2 && pthread_barrier_init(&together, NULL, THREADS) == 0);
    printf("cancelled=%d\n", run(1));
    int bad = 0;
    for (int i = 0; i < atoi(argv[1]); i++)
        bad += run(0);
    printf("bad=%d\n", bad);
    return 0;
}
