/* Forks beside threads that end and leave objects, and threads that adopt them. Each child frees
 * all objects that it finds, possibly in memory that a parent's thread was adopting. A child
 * that waits for that thread is killed. */
#include "check.h"
#include <pthread.h>
#include <sys/wait.h>

#define OBJECTS (1023 * 48)
#define SIZE 64
#define FORKS 600

static void *objects[OBJECTS];
static volatile int ends;

/* A thread's small objects come from another allocator once it has requested much. */
static void request_much(void)
{
    static const int count = 40000;
    void **some = malloc(count * sizeof *some);
    for (int i = 0; i < count; i++)
        CHECK((some[i] = malloc(SIZE)) != NULL);
    for (int i = 0; i < count; i++)
        free(some[i]);
    free(some);
}

static void *leave(void *unused)
{
    request_much();
    for (int i = 0; i < OBJECTS; i++)
        CHECK((objects[i] = malloc(SIZE)) != NULL);
    for (int i = 0; i < OBJECTS; i++)
        if (i % 4 != 0) {
            free(objects[i]);
            objects[i] = NULL;
        }
    return unused;
}

static void *take_over(void *unused)
{
    static void *taken[OBJECTS / 2];
    request_much();
    for (int i = 0; i < OBJECTS / 2; i++)
        CHECK((taken[i] = malloc(SIZE)) != NULL);
    for (int i = 0; i < OBJECTS / 2; i++)
        free(taken[i]);
    return unused;
}

static void in_a_thread(void *(*work)(void *))
{
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, work, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
}

static void *take_over_again(void *unused)
{
    while (!ends)
        in_a_thread(take_over);
    return unused;
}

int main(void)
{
    pthread_t thread;
    in_a_thread(leave);
    CHECK(pthread_create(&thread, NULL, take_over_again, NULL) == 0);
    for (int i = 0; i < FORKS; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            alarm(20);
            for (int at = 0; at < OBJECTS; at++)
                free(objects[at]);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    ends = 1;
    CHECK(pthread_join(thread, NULL) == 0);
    puts("ok");
    return 0;
}
