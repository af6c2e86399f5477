/* Forks beside a thread that frees all the time. Each child frees its memory, which must return
 * to the kernel. */
#include "check.h"
#include <pthread.h>
#include <sys/wait.h>

enum { OBJECTS = 400000, CHILDREN = 60 };
static void *mine[OBJECTS];

static void fill(void **objects)
{
    for (int at = 0; at < OBJECTS; at++) {
        objects[at] = malloc(100);
        CHECK(objects[at] != NULL);
        memset(objects[at], 1, 100);
    }
}

static void *churn(void *argument)
{
    void **objects = malloc(OBJECTS * sizeof *objects);
    for (;;) {
        fill(objects);
        for (int at = 0; at < OBJECTS; at++)
            free(objects[at]);
    }
    return argument;
}

int main(void)
{
    pthread_t thread;
    fill(mine);
    CHECK(pthread_create(&thread, NULL, churn, NULL) == 0);
    usleep(300000);
    for (int at = 0; at < CHILDREN; at++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(60);
            size_t before = resident();
            for (int object = 0; object < OBJECTS; object++)
                free(mine[object]);
            malloc_trim(0);
            CHECK(resident() + 20 * MIB < before);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        usleep(1000 + 97 * (at % 37));
    }
    puts("given back");
    fflush(stdout);
    _exit(0);
}
