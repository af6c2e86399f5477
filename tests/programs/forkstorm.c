/* Forks while other threads allocate continuously; each child allocates and frees blocks of its
 * own and of its parent's threads. */
#include "check.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>

enum { THREADS = 4, KEPT = 8, CHILDREN = 150 };

static atomic_int stop;
static char *kept[KEPT];

static void allocate(uint64_t *random, int times)
{
    for (int i = 0; i < times; i++) {
        size_t size = random_size(random, 21);
        char *block = malloc(size);
        CHECK(block != NULL);
        paint(block, size, 0x11);
        block = realloc(block, size + 200 * KIB);
        CHECK(block != NULL && block[0] == 0x11);
        free(block);
    }
}

static void *storm(void *number)
{
    uint64_t random = (uint64_t)(uintptr_t)number * 7919 + 1;
    while (!atomic_load(&stop))
        allocate(&random, 10);
    return NULL;
}

int main(void)
{
    pthread_t ids[THREADS];
    for (int i = 0; i < KEPT; i++) {
        kept[i] = malloc((size_t)(i + 1) * 300 * KIB);
        paint(kept[i], (size_t)(i + 1) * 300 * KIB, (uint8_t)i);
    }
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&ids[i], NULL, storm, (void *)(uintptr_t)(i + 1)) == 0);
    for (int child = 0; child < CHILDREN; child++) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            uint64_t random = (uint64_t)child + 1;
            /* Ends a child that waits for a lock whose owner exists only in the parent. */
            alarm(60);
            for (int i = 0; i < KEPT; i++) {
                check_paint(kept[i], (size_t)(i + 1) * 300 * KIB, (uint8_t)i);
                free(kept[i]);
            }
            allocate(&random, 20);
            if (child % 2)
                _exit(0);
            exit(0);
        }
        int status = -1;
        CHECK(waitpid(pid, &status, 0) == pid);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    atomic_store(&stop, 1);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(ids[i], NULL) == 0);
    for (int i = 0; i < KEPT; i++)
        check_paint(kept[i], (size_t)(i + 1) * 300 * KIB, (uint8_t)i);
    printf("%d children\n", CHILDREN);
    return 0;
}
