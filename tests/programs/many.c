/* Many threads at the same time, with a few small objects of many sizes each. Prints the
 * resident memory. */
#include "check.h"
#include <pthread.h>

enum { THREADS = 300, SIZES = 8 };
static pthread_barrier_t all;

static void *few(void *argument)
{
    char *objects[SIZES];
    for (int i = 0; i < SIZES; i++) {
        objects[i] = malloc((size_t)(i + 1) * 16);
        CHECK(objects[i] != NULL);
        memset(objects[i], i, (size_t)(i + 1) * 16);
    }
    pthread_barrier_wait(&all);
    pthread_barrier_wait(&all);
    for (int i = 0; i < SIZES; i++) {
        CHECK(objects[i][i * 16] == i);
        free(objects[i]);
    }
    return argument;
}

int main(void)
{
    pthread_t threads[THREADS];
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 64 * KIB);
    pthread_barrier_init(&all, NULL, THREADS + 1);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], &attributes, few, NULL) == 0);
    pthread_barrier_wait(&all);
    printf("resident=%zu\n", resident());
    pthread_barrier_wait(&all);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    return 0;
}
