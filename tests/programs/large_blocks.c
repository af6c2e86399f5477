/* Threads allocate, fill and free large blocks with any malloc; jemalloc is told to purge. */
#include "check.h"
#include <dlfcn.h>
#include <pthread.h>
#include <sys/prctl.h>

enum { THREADS = 2, ROUNDS = 5 };

/* MALLCTL_ARENAS_ALL */
static const char PURGE[] = "arena.4096.purge";

static void *work(void *unused)
{
    int (*control)(const char *, void *, size_t *, void *, size_t) = dlsym(RTLD_DEFAULT, "mallctl");
    for (int round = 0; round < ROUNDS; round++) {
        size_t size = 144 * MIB;
        char *block = malloc(size);
        CHECK(block != NULL);
        for (size_t at = 0; at < size; at += 64 * KIB)
            block[at] = 1;
        free(block);
        CHECK(control == NULL || control(PURGE, NULL, NULL, NULL, 0) == 0);
    }
    return unused;
}

int main(void)
{
    CHECK(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, work, NULL) == 0);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    puts("freed");
    return 0;
}
