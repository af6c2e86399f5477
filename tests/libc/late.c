/* A program that loads libpthread later, like a plug-in: before glibc 2.34 that is a separate
 * library. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static void *work(void *unused)
{
    for (int round = 0; round < 200000; round++) {
        char *volatile block = malloc(100);
        block[0] = 1;
        if (round % 2)
            free(block);
    }
    free(malloc(1 << 20));
    return unused;
}

int main(void)
{
    void *library = dlopen("libpthread.so.0", RTLD_NOW);
    int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) = NULL;
    int (*join)(pthread_t, void **) = NULL;
    if (library != NULL) {
        *(void **)&create = dlsym(RTLD_DEFAULT, "pthread_create");
        if (create == NULL)
            *(void **)&create = dlsym(library, "pthread_create");
        *(void **)&join = dlsym(library, "pthread_join");
    }
    if (create == NULL || join == NULL)
        return 2;
    for (int round = 0; round < 20; round++) {
        pthread_t threads[4];
        for (int at = 0; at < 4; at++)
            if (create(&threads[at], NULL, &work, NULL) != 0)
                return 3;
        for (int at = 0; at < 4; at++)
            join(threads[at], NULL);
    }
    puts("done");
    return 0;
}
