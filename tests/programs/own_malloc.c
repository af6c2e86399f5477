/* A program with an exported malloc of its own: every block must be its own, and it must never
 * get a block of another allocator. */
#include "check.h"
#include <pthread.h>
#include <sys/mman.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *arena, *next;
static const size_t arena_size = 512 * MIB;
static size_t blocks;

struct header {
    size_t size;
    size_t magic;
};

void *malloc(size_t size)
{
    pthread_mutex_lock(&lock);
    if (arena == NULL) {
        arena = next = mmap(NULL, arena_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(arena != MAP_FAILED);
    }
    struct header *header = (struct header *)next;
    size_t whole = (sizeof *header + size + 15) / 16 * 16;
    CHECK(whole <= (size_t)(arena + arena_size - next));
    next += whole;
    blocks++;
    pthread_mutex_unlock(&lock);
    header->size = size;
    header->magic = 0x6f776e;
    return header + 1;
}

static struct header *header_of(void *memory)
{
    struct header *header = (struct header *)memory - 1;
    CHECK((char *)memory > arena && (char *)memory <= next && header->magic == 0x6f776e);
    return header;
}

void free(void *memory)
{
    if (memory != NULL)
        header_of(memory)->magic = 0x6f776e;
}

void *calloc(size_t count, size_t size)
{
    return malloc(count * size);
}

void *realloc(void *memory, size_t size)
{
    void *moved = malloc(size);
    if (memory != NULL) {
        size_t kept = header_of(memory)->size;
        memcpy(moved, memory, kept < size ? kept : size);
        free(memory);
    }
    return moved;
}

int main(void)
{
    for (int i = 0; i < 100; i++) {
        char *block = malloc(2 * MIB);
        paint(block, 2 * MIB, (uint8_t)i);
        check_paint(block, 2 * MIB, (uint8_t)i);
        free(block);
    }
    char *copy = strdup("a block that libc asked for");
    header_of(copy);
    FILE *file = fopen("/proc/self/comm", "r");
    CHECK(file != NULL);
    char *line = NULL;
    size_t capacity = 0;
    CHECK(getline(&line, &capacity, file) > 0);
    header_of(line);
    fclose(file);
    CHECK(blocks >= 100);
    puts("a malloc of its own");
    return 0;
}
