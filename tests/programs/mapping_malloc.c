/* A malloc with one lock: large blocks are mappings of their own, unmapped under the lock. */
#include "check.h"
#include <pthread.h>
#include <sys/mman.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char heap[16 << 20] __attribute__((aligned(16)));
static size_t used;

/* Header of each block: its size with the header, and whether it is a mapping. */
struct header {
    size_t size, mapped;
};

void *malloc(size_t size)
{
    struct header *header;
    size = (size + sizeof *header + 15) / 16 * 16;
    pthread_mutex_lock(&lock);
    int mapped = size >= MIB;
    if (mapped) {
        header = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    } else {
        CHECK(size <= sizeof heap - used);
        header = (struct header *)(heap + used);
        used += size;
    }
    pthread_mutex_unlock(&lock);
    if (header == MAP_FAILED)
        return NULL;
    *header = (struct header){size, (size_t)mapped};
    return header + 1;
}

void free(void *block)
{
    struct header *header = (struct header *)block - 1;
    if (block == NULL || !header->mapped)
        return;
    pthread_mutex_lock(&lock);
    CHECK(munmap(header, header->size) == 0);
    pthread_mutex_unlock(&lock);
}

/* Heap memory is used only once, so it is zero. */
void *calloc(size_t count, size_t size)
{
    return malloc(count * size);
}

void *realloc(void *block, size_t size)
{
    char *moved = malloc(size);
    if (block != NULL && moved != NULL) {
        size_t kept = ((struct header *)block - 1)->size - sizeof(struct header);
        memcpy(moved, block, kept < size ? kept : size);
        free(block);
    }
    return moved;
}
