/* THREADS threads allocate, resize, check and free blocks of 16 bytes to 8 MiB, also those of
 * other threads: each block carries its creator's pattern. */
#include "check.h"
#include <pthread.h>
#include <stdatomic.h>

enum { SHARED = 256 };

struct block {
    void *memory;
    size_t size;
    uint8_t tag;
};

static _Atomic(struct block *) shared[SHARED];
static int rounds;

static struct block *make(uint64_t *random)
{
    struct block *block = malloc(sizeof *block);
    CHECK(block != NULL);
    block->size = random_size(random, 22);
    block->tag = (uint8_t)next_random(random);
    size_t alignment = (size_t)16 << next_random(random) % 10;
    switch (next_random(random) % 6) {
    case 0:
        block->memory = calloc(block->size, 1);
        CHECK(block->memory != NULL);
        check_zero(block->memory, block->size);
        break;
    case 1:
        CHECK(posix_memalign(&block->memory, alignment, block->size) == 0);
        CHECK((uintptr_t)block->memory % alignment == 0);
        break;
    case 2:
        block->memory = aligned_alloc(alignment, block->size);
        CHECK((uintptr_t)block->memory % alignment == 0);
        break;
    default:
        block->memory = malloc(block->size);
    }
    CHECK(block->memory != NULL);
    paint(block->memory, block->size, block->tag);
    return block;
}

static void resize(struct block *block, uint64_t *random)
{
    size_t size = random_size(random, 22);
    size_t kept = size < block->size ? size : block->size;
    uint8_t *memory = realloc(block->memory, size);
    CHECK(memory != NULL);
    for (size_t at = 0; at + 1 < kept; at += 1021)
        CHECK(memory[at] == (uint8_t)(block->tag + at));
    block->memory = memory;
    block->size = size;
    paint(memory, size, block->tag);
}

static void destroy(struct block *block)
{
    check_paint(block->memory, block->size, block->tag);
    CHECK(malloc_usable_size(block->memory) >= block->size);
    free(block->memory);
    free(block);
}

static void *work(void *number)
{
    uint64_t random = 0x9e3779b97f4a7c15u * (uint64_t)(uintptr_t)number + 1;
    for (int round = 0; round < rounds; round++) {
        struct block *block = make(&random);
        if (next_random(&random) % 4 == 0)
            resize(block, &random);
        block = atomic_exchange(&shared[next_random(&random) % SHARED], block);
        if (block != NULL)
            destroy(block);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    int threads = argc > 1 ? atoi(argv[1]) : 64;
    rounds = argc > 2 ? atoi(argv[2]) : 300;
    pthread_t *ids = calloc((size_t)threads, sizeof *ids);
    for (int i = 0; i < threads; i++)
        CHECK(pthread_create(&ids[i], NULL, work, (void *)(uintptr_t)(i + 1)) == 0);
    for (int i = 0; i < threads; i++)
        CHECK(pthread_join(ids[i], NULL) == 0);
    for (int i = 0; i < SHARED; i++)
        if (shared[i] != NULL)
            destroy(shared[i]);
    free(ids);
    printf("%d threads, %d rounds: every block as its maker left it\n", threads, rounds);
    return 0;
}
