/* Threads allocate, free most of it across threads in random order, and go on with other sizes.
 * The pattern of each object is checked before its free. Prints `damaged=N`. */
#include "check.h"
#include <pthread.h>
#include <stdatomic.h>

enum { THREADS = 4, ROUNDS = 6, COUNT = 400000, SLOTS = 16384 };

static _Atomic(void *) slots[SLOTS];
static _Atomic long damaged;

/* The first bytes of an object hold its size; the rest is a function of size and address. */
static unsigned char byte_of(const void *object, size_t at)
{
    return (unsigned char)(((size_t)object >> 4) * 31 + at * 7);
}

static void *made(size_t size)
{
    unsigned char *object = malloc(size);
    CHECK(object != NULL && malloc_usable_size(object) >= size && (size_t)object % 16 == 0);
    *(unsigned short *)object = (unsigned short)size;
    for (size_t at = 2; at < size; at++)
        object[at] = byte_of(object, at);
    return object;
}

static void gone(void *object)
{
    const unsigned char *bytes = object;
    size_t size = *(unsigned short *)object;
    for (size_t at = 2; at < size; at++)
        if (bytes[at] != byte_of(object, at)) {
            damaged++;
            return;
        }
    free(object);
}

static void *work(void *number)
{
    uint64_t random = 5 + (uint64_t)number;
    static void *all[THREADS][COUNT];
    void **mine = all[(size_t)number];
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < COUNT; i++)
            mine[i] = made(16 + 16 * (size_t)round + next_random(&random) % 16);
        /* Runs of objects are freed, some by another thread; a few stay, until another round. */
        for (int i = 0; i < COUNT; i++) {
            void *object = mine[i];
            if (next_random(&random) % 300 == 0 || next_random(&random) % 8 == 0)
                object = atomic_exchange(&slots[next_random(&random) % SLOTS], object);
            if (object != NULL)
                gone(object);
        }
        /* Larger objects, possibly placed in the room between small ones. */
        for (int i = 0; i < COUNT / 16; i++)
            mine[i] = made(129 + next_random(&random) % 900);
        for (int i = 0; i < COUNT / 16; i++)
            gone(mine[i]);
    }
    return NULL;
}

int main(void)
{
    /* Threads that end leave their pages to later ones. */
    for (int pass = 0; pass < 2; pass++) {
        pthread_t threads[THREADS];
        for (long i = 0; i < THREADS; i++)
            CHECK(pthread_create(&threads[i], NULL, work, (void *)i) == 0);
        for (int i = 0; i < THREADS; i++)
            CHECK(pthread_join(threads[i], NULL) == 0);
    }
    for (int i = 0; i < SLOTS; i++)
        if (slots[i] != NULL)
            gone(slots[i]);
    printf("damaged=%ld\n", damaged);
    return 0;
}
