/* The main thread exits after a large munmap; the process ends with its other thread, which runs
 * the exit handlers. */
#include "check.h"
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>

static pthread_t first;

static void map_and_unmap(void)
{
    size_t size = 200 * MIB;
    char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    memset(memory, 1, size);
    CHECK(munmap(memory, size) == 0);
}

static void say_where(void)
{
    char name[17] = "";
    CHECK(prctl(PR_GET_NAME, name) == 0);
    printf("the exit handlers run in %s\n", name);
}

static void *last(void *unused)
{
    CHECK(prctl(PR_SET_NAME, "the last thread") == 0);
    CHECK(pthread_join(first, NULL) == 0);
    map_and_unmap();
    return unused;
}

static void cleaned_up(void *text)
{
    puts(text);
}

int main(void)
{
    CHECK(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
    CHECK(atexit(say_where) == 0);
    first = pthread_self();
    map_and_unmap();
    pthread_t id;
    CHECK(pthread_create(&id, NULL, last, NULL) == 0);
    CHECK(pthread_detach(id) == 0);
    pthread_cleanup_push(cleaned_up, "the stack is unwound");
    pthread_exit(NULL);
    pthread_cleanup_pop(0);
}
