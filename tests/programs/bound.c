/* Programs that touch little of their memory, or free most of it: `bound MODE`; without a mode,
 * their names. Those that free print `now=BYTES`, as the kernel counts it in the file named by
 * BOUND_USAGE. */
#include "check.h"
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define PAGE ((size_t)4096)

static void touch_each(char *memory, size_t size, size_t step)
{
    for (size_t at = 0; at < size; at += step)
        memory[at] = 1;
}

static void *taken(void *memory)
{
    CHECK(memory != NULL && memory != MAP_FAILED);
    return memory;
}

static char *map(size_t size, int protection)
{
    return taken(mmap(NULL, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
}

static char *map_usual(size_t size)
{
    return taken(mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
}

/* Without stdio, whose buffer would come from the heap. */
static void say_usage(void)
{
    const char *path = getenv("BOUND_USAGE");
    if (path == NULL)
        return;
    char text[32] = "";
    int fd = open(path, O_RDONLY);
    CHECK(fd >= 0 && read(fd, text, sizeof text - 1) > 0);
    close(fd);
    dprintf(1, "now=%s", text);
}

/* Time for a background scan to change the resident memory. */
static void settle(void)
{
    long end = microseconds() + 2000000;
    while (microseconds() < end)
        usleep(10000);
    say_usage();
}

/* Blocks of one size, one byte in each `step` touched, up to `most` bytes of each. */
static void blocks(size_t count, size_t size, size_t most, size_t step)
{
    for (size_t i = 0; i < count; i++)
        touch_each(taken(malloc(size)), most, step);
}

static void malloc_4m(void) { blocks(100, 4 * MIB, 4 * MIB, 32 * PAGE); }
static void malloc_1m(void) { blocks(100, MIB, MIB / 4, PAGE); }
static void malloc_256k(void) { blocks(2000, 256 * KIB, 1, 1); }
static void malloc_100k(void) { blocks(2000, 100 * 1000, 1, 1); }
static void malloc_64k(void) { blocks(4000, 64 * KIB, PAGE, PAGE); }
static void malloc_16k(void) { blocks(10000, 16 * KIB, 100, PAGE); }
static void malloc_2m_ends(void) { blocks(200, 2 * MIB + 5000, 2 * MIB + 5000, 2 * MIB + 4999); }

static void calloc_1g(void)
{
    uint64_t random = 7;
    char *memory = taken(calloc(1, GIB));
    for (int i = 0; i < 2000; i++)
        memory[next_random(&random) % GIB] = 1;
}

static void mmap_8m(void)
{
    for (int i = 0; i < 64; i++)
        touch_each(map_usual(8 * MIB), 8 * MIB, 128 * PAGE);
}

static void mmap_8m_idle(void)
{
    mmap_8m();
    settle();
}

static void realloc_steps(void)
{
    char *memory = NULL;
    for (size_t size = 4 * MIB; size <= 240 * MIB; size += 4 * MIB) {
        memory = taken(realloc(memory, size));
        memory[size - 1] = 1;
    }
}

static void freed_1m(void)
{
    static char *all[300];
    for (int i = 0; i < 300; i++)
        memset(all[i] = taken(malloc(MIB)), 1, MIB);
    for (int i = 0; i < 300; i++)
        if (i % 8 != 0)
            free(all[i]);
    settle();
}

/* Allocates `bytes` in objects of one size, and frees all but one in `stays`. */
static void phase(size_t bytes, size_t size, size_t stays)
{
    void **list = NULL;
    for (size_t i = 0; i < bytes / size; i++) {
        void **object = taken(malloc(size));
        memset(object, 1, size);
        *object = list;
        list = object;
    }
    for (size_t i = 0; list != NULL; i++) {
        void **object = list;
        list = *object;
        if (i % stays != 0)
            free(object);
    }
}

static void small_phases(void)
{
    for (size_t size = 24; size <= 120; size += 16)
        phase(300 * MIB, size, 500);
    settle();
}

static void strings(void)
{
    for (size_t size = 20; size < 1800; size += 1 + size / 16)
        phase(20 * MIB, size, 100);
    settle();
}

/* Strings of a cache that are each replaced by a longer one; one in 100 keeps its length. */
static void cache(void)
{
    enum { COUNT = 40000 };
    static char *held[COUNT];
    for (size_t size = 24; size < 1200; size += 40)
        for (int i = 0; i < COUNT; i++) {
            if (size > 24 && (i + size / 40) % 100 != 0)
                free(held[i]);
            memset(held[i] = taken(malloc(size)), 1, size);
        }
    settle();
}

/* Blocks of 2000 bytes, of which all but the last are freed, then as much in objects of 64. */
static void small_after_freed(void)
{
    enum { SIZE = 2000, COUNT = 200 * MIB / SIZE };
    static char *blocks[COUNT];
    for (int i = 0; i < COUNT; i++)
        memset(blocks[i] = taken(malloc(SIZE)), 1, SIZE);
    for (int i = 0; i + 1 < COUNT; i++)
        free(blocks[i]);
    for (size_t filled = 0; filled < 200 * MIB; filled += 64)
        memset(taken(malloc(64)), 1, 64);
    settle();
}

static void vectors(void)
{
    for (int i = 0; i < 200; i++) {
        size_t used = 300 * KIB, room = 4 * KIB;
        char *memory = taken(malloc(room));
        for (size_t at = 0; at < used; at++) {
            if (at == room)
                memory = taken(realloc(memory, room *= 2));
            memory[at] = 1;
        }
    }
}

/* All threads exist at the same time. */
static pthread_barrier_t all_there;

static void together(int count, void *(*work)(void *))
{
    static pthread_t threads[1000];
    CHECK(pthread_barrier_init(&all_there, NULL, count) == 0);
    for (long i = 0; i < count; i++)
        CHECK(pthread_create(&threads[i], NULL, work, (void *)i) == 0);
    for (int i = 0; i < count; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
}

static void *on_its_stack(void *none)
{
    volatile char some[20 * KIB];
    for (size_t at = 0; at < sizeof some; at += PAGE)
        some[at] = 1;
    pthread_barrier_wait(&all_there);
    return none;
}

static void stacks(void) { together(1000, on_its_stack); }

static void *with_an_arena(void *number)
{
    char *arena = taken(malloc(32 * MIB));
    touch_each(arena, MIB, PAGE);
    touch_each(arena, 32 * MIB, (256 + (size_t)number) * KIB);
    pthread_barrier_wait(&all_there);
    return NULL;
}

static void arenas(void) { together(24, with_an_arena); }

static void *with_a_mapped_arena(void *number)
{
    char *arena = map(64 * MIB, PROT_READ | PROT_WRITE);
    touch_each(arena, 64 * MIB, (300 + (size_t)number) * KIB);
    pthread_barrier_wait(&all_there);
    return NULL;
}

static void mapped_arenas(void) { together(24, with_a_mapped_arena); }

/* Allocates and touches `bytes` in objects of one size; the caller frees the array of them. */
static char **objects(size_t bytes, size_t size)
{
    char **all = (char **)map_usual(bytes / size * sizeof *all);
    for (size_t i = 0; i < bytes / size; i++)
        memset(all[i] = taken(malloc(size)), 1, size);
    return all;
}

struct freed {
    char **all;
    size_t count, stays;
};

/* Frees all objects of a list but one in `stays`. */
static void *free_most(void *list)
{
    struct freed *freed = list;
    for (size_t i = 0; i < freed->count; i++)
        if (freed->all[i] != NULL && i % freed->stays != 0)
            free(freed->all[i]);
    return NULL;
}

static void in_a_thread(void *(*work)(void *), void *argument)
{
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, work, argument) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
}

/* A thread that allocates nothing frees the objects of another, but for one in a thousand. */
static void freed_by_another(void)
{
    size_t count = 100 * MIB / 64;
    struct freed freed = {objects(100 * MIB, 64), count, 1000};
    in_a_thread(free_most, &freed);
    objects(70 * MIB, 64);
}

/* The owner frees a few objects, another thread the rest; then objects of another size follow. */
static void freed_in_turn(void)
{
    size_t count = 120 * MIB / 64;
    char **all = objects(120 * MIB, 64);
    for (size_t i = 3; i < count; i += 20) {
        free(all[i]);
        all[i] = NULL;
    }
    struct freed freed = {all, count, 1000000};
    in_a_thread(free_most, &freed);
    objects(80 * MIB, 96);
}

/* After a peak the memory is already resident; its waste counts nevertheless. */
static void after_a_peak(void)
{
    struct freed peak = {objects(200 * MIB, 112), 200 * MIB / 112, 1000000};
    free_most(&peak);
    size_t count = 120 * MIB / 48;
    char **all = objects(120 * MIB, 48);
    for (size_t i = 0; i < count; i++)
        if (i % 1365 >= 80)
            free(all[i]);
    objects(110 * MIB, 96);
}

static void *make_sparse(void *unused)
{
    (void)unused;
    size_t count = 100 * MIB / 64, in_a_page = 1023;
    char **all = objects(100 * MIB, 64);
    for (size_t i = 0; i < count; i++)
        if (i / in_a_page < 40 ? i % 32 != 0 : i % in_a_page != 7)
            free(all[i]);
    return NULL;
}

/* The pages of an ended thread have no owner: its first page cannot be swept, the rest can. */
static void left_by_a_thread(void)
{
    in_a_thread(make_sparse, NULL);
    objects(80 * MIB, 96);
}

/* Blocks are filled and freed; each next one is a little larger, and only its first byte is
 * touched. */
static void larger_and_sparse(void)
{
    for (int i = 0; i < 30; i++) {
        char *dense = taken(malloc(16 * MIB));
        memset(dense, 1, 16 * MIB);
        observe(dense);
        free(dense);
        *(volatile char *)taken(malloc(17 * MIB)) = 1;
    }
}

/* Mappings that are touched once, and lose their last page. */
static void cut_mappings(int by_mremap)
{
    for (int i = 0; i < 300; i++) {
        char *memory = map_usual(2 * MIB);
        memory[0] = 1;
        if (by_mremap)
            CHECK(mremap(memory, 2 * MIB, 2 * MIB - PAGE, 0) == memory);
        else
            CHECK(munmap(memory + 2 * MIB - PAGE, PAGE) == 0);
    }
    settle();
}

static void unmapped_ends(void) { cut_mappings(0); }
static void shrunk_ends(void) { cut_mappings(1); }

/* Dense mappings are unmapped in halves of a huge page, and leave no credit. */
static void unmapped_in_halves(void)
{
    for (int i = 0; i < 60; i++) {
        char *memory = map_usual(32 * MIB);
        memset(memory, 1, 32 * MIB);
        usleep(20000);
        for (size_t at = 0; at < 32 * MIB; at += MIB)
            CHECK(munmap(memory + at, MIB) == 0);
    }
    malloc_4m();
}

/* Three quarters of all pages are touched, at random. */
static void three_quarters(void)
{
    uint64_t random = 7;
    char *memory = map_usual(128 * MIB);
    for (size_t at = 0; at < 128 * MIB; at += PAGE) {
        if (next_random(&random) % 4 != 0)
            memory[at] = 1;
        if (at % (2 * MIB) == 0)
            usleep(1000);
    }
    settle();
}

/* Full except for a dropped part; later everything is dropped, and touched sparsely. */
static void dropped_twice(void)
{
    char *memory = map_usual(256 * MIB);
    for (size_t at = 0; at < 256 * MIB; at += 2 * MIB) {
        memset(memory + at, 1, 2 * MIB - 128 * KIB);
        CHECK(madvise(memory + at + 2 * MIB - 128 * KIB, 128 * KIB, MADV_DONTNEED) == 0);
        usleep(3000);
    }
    usleep(300000);
    CHECK(madvise(memory, 256 * MIB, MADV_DONTNEED) == 0);
    touch_each(memory, 256 * MIB, 2 * MIB);
    settle();
}

static void *stressed(void *number)
{
    uint64_t random = 99 + (uint64_t)number;
    long *held[20] = {NULL};
    for (int i = 0; i < 400; i++) {
        long **slot = &held[next_random(&random) % 20];
        free(*slot);
        *slot = malloc(random_size(&random, 29));
        if (*slot != NULL)
            **slot = i;
    }
    pthread_barrier_wait(&all_there);
    return NULL;
}

static void stress(void) { together(60, stressed); }

/* Like Go's heap: reserved, committed in parts, released, and touched again. */
static void arena_of(int fixed)
{
    for (int i = 0; i < 8; i++) {
        char *arena = map(64 * MIB, PROT_NONE);
        for (size_t part = 0; part < 64 * MIB; part += 4 * MIB) {
            if (fixed)
                CHECK(mmap(arena + part, 4 * MIB, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == arena + part);
            else
                CHECK(mprotect(arena + part, 4 * MIB, PROT_READ | PROT_WRITE) == 0);
            touch_each(arena + part, 4 * MIB, 32 * PAGE);
        }
        CHECK(madvise(arena, 64 * MIB, MADV_DONTNEED) == 0);
        touch_each(arena + 7 * PAGE, 64 * MIB - 7 * PAGE, 64 * PAGE);
    }
}

static void go_protected(void) { arena_of(0); }
static void go_fixed(void) { arena_of(1); }

/* Like Go's heap after a large garbage collection: full, released, touched sparsely. */
static void go_scavenged(void)
{
    char *arena = map(256 * MIB, PROT_NONE);
    for (size_t part = 0; part < 256 * MIB; part += 4 * MIB) {
        CHECK(mprotect(arena + part, 4 * MIB, PROT_READ | PROT_WRITE) == 0);
        touch_each(arena + part, 4 * MIB, PAGE);
    }
    for (size_t part = 0; part < 256 * MIB; part += 64 * KIB)
        CHECK(madvise(arena + part, 64 * KIB, MADV_DONTNEED) == 0);
    touch_each(arena, 256 * MIB, 64 * PAGE);
    settle();
}

/* Like jemalloc's extents: full, purged, and touched again sparsely. */
static void purged(int advice)
{
    static char *extents[40];
    for (int round = 0; round < 2; round++)
        for (size_t i = 0; i < 40; i++) {
            size_t size = (2 + 2 * (i % 4)) * MIB;
            if (round == 0) {
                extents[i] = map_usual(size);
                touch_each(extents[i], size, PAGE);
            } else {
                CHECK(madvise(extents[i], size, advice) == 0);
                touch_each(extents[i], size, 32 * PAGE);
            }
        }
    settle();
}

static void purge_dontneed(void) { purged(MADV_DONTNEED); }
static void purge_free(void) { purged(MADV_FREE); }

static void table(void)
{
    uint64_t random = 3;
    size_t buckets = 128 * KIB, size = 2 * KIB;
    char *memory = taken(calloc(buckets, size));
    for (size_t i = 0; i < buckets / 10; i++)
        memory[next_random(&random) % buckets * size] = 1;
}

static void grow_break(void)
{
    for (size_t grown = 0; grown < 200 * MIB; grown += 512 * KIB) {
        char *part = sbrk(512 * KIB);
        CHECK(part != (void *)-1);
        touch_each(part, 512 * KIB, 16 * PAGE);
    }
}

static void grow_mapping(void)
{
    char *memory = map_usual(4 * MIB);
    for (size_t size = 4 * MIB; size < 256 * MIB; size += 4 * MIB) {
        memory = taken(mremap(memory, size, size + 4 * MIB, MREMAP_MAYMOVE));
        touch_each(memory + size, 4 * MIB, 64 * PAGE);
    }
}

static void holes_in_heap(void)
{
    static char *all[4000];
    for (int i = 0; i < 4000; i++)
        memset(all[i] = taken(malloc(64 * KIB)), 1, 64 * KIB);
    for (int i = 0; i < 4000; i++)
        if (i % 16 != 0)
            free(all[i]);
    settle();
}

static void holes_in_mapping(void)
{
    char *memory = map_usual(256 * MIB);
    touch_each(memory, 256 * MIB, PAGE);
    for (size_t at = 0; at < 256 * MIB; at += 128 * KIB)
        CHECK(madvise(memory + at + 8 * KIB, 120 * KIB, MADV_DONTNEED) == 0);
    settle();
}

static void unmapped_parts(void)
{
    char *memory = map_usual(256 * MIB);
    touch_each(memory, 256 * MIB, PAGE);
    for (size_t at = 0; at < 256 * MIB; at += MIB)
        CHECK(munmap(memory + at + 64 * KIB, MIB - 64 * KIB) == 0);
    settle();
}

static void aligned(void)
{
    for (int i = 0; i < 100; i++) {
        void *memory;
        CHECK(posix_memalign(&memory, 2 * MIB, 2 * MIB) == 0);
        *(char *)memory = 1;
    }
}

static void again(void)
{
    for (int i = 0; i < 40; i++) {
        char *memory = taken(malloc(64 * MIB));
        touch_each(memory + i * PAGE, 64 * MIB - i * PAGE, MIB);
        free(memory);
    }
}

static void shared(void)
{
    char *memory = taken(mmap(NULL, 256 * MIB, PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    touch_each(memory, 256 * MIB, 24 * PAGE);
}

static void forked(void)
{
    static char *all[60];
    for (int i = 0; i < 60; i++)
        touch_each(all[i] = taken(malloc(4 * MIB)), 4 * MIB, 32 * PAGE);
    pid_t child = fork();
    CHECK(child >= 0);
    for (int i = 0; i < 60; i++)
        touch_each(all[i] + (child == 0 ? 0 : PAGE), 4 * MIB - PAGE, 64 * PAGE);
    usleep(200000);
    if (child == 0)
        _exit(0);
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

/* Full memory that both sides of a fork copy in part: each copy of a base page stays one. */
static void copied_in_part(void)
{
    char *dense = taken(malloc(100 * MIB));
    touch_each(dense, 100 * MIB, PAGE);
    settle();
    pid_t child = fork();
    CHECK(child >= 0);
    touch_each(dense + (child == 0 ? 0 : PAGE), 99 * MIB, 4 * PAGE);
    settle();
    if (child == 0)
        _exit(0);
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

/* Dense at first, which permits much waste, then sparse. */
static void dense_then_sparse(void)
{
    char *dense = taken(malloc(400 * MIB));
    touch_each(dense, 400 * MIB, PAGE);
    blocks(100, 4 * MIB, 4 * MIB, 32 * PAGE);
}

/* Blocks of 128 KiB to 40 MiB, replaced at random and touched in part: glibc keeps fragments. */
static void sizes_replaced(void)
{
    static struct {
        char *memory;
        size_t size;
    } all[40];
    uint64_t random = 11;
    size_t live = 0;
    for (int i = 0; i < 1500; i++) {
        size_t which = next_random(&random) % 40;
        size_t size = (128 * KIB << next_random(&random) % 8) * (100 + next_random(&random) % 150) / 100;
        free(all[which].memory);
        live -= all[which].size;
        all[which].memory = NULL;
        all[which].size = 0;
        if (live + size > 150 * MIB)
            continue;
        all[which].memory = taken(malloc(size));
        all[which].size = size;
        live += size;
        touch_each(all[which].memory, i % 3 == 0 ? size : size / (1 + next_random(&random) % 8), PAGE);
    }
}

/* Of blocks of one size one in twenty stays; then as much memory in smaller ones. */
static void then_smaller(size_t first, size_t second)
{
    size_t count = 100 * MIB / first, freed = 0;
    char **all = taken(malloc(count * sizeof *all));
    uint64_t random = 5;
    for (size_t i = 0; i < count; i++)
        memset(all[i] = taken(malloc(first)), 1, first);
    for (size_t i = 0; i < count; i++)
        if (next_random(&random) % 20 != 0) {
            free(all[i]);
            freed++;
        }
    for (size_t filled = 0; filled < freed * first / 10 * 9; filled += second)
        memset(taken(malloc(second)), 1, second);
}

/* Filled blocks that grow, of which nothing more is touched. */
static void grown_unfilled(void)
{
    static char *all[400];
    for (int i = 0; i < 400; i++)
        memset(all[i] = taken(malloc(300000)), 1, 300000);
    for (int i = 0; i < 400; i++)
        *(char *)taken(realloc(all[i], 1200000)) = 1;
}

static void small_then_smaller(void) { then_smaller(56, 40); }
static void small_then_smallest(void) { then_smaller(200, 24); }

/* Each filled and freed block is followed by a larger one that is not filled. */
static void filled_then_sparse(void)
{
    for (int i = 0; i < 30; i++) {
        char *filled = taken(malloc(16 * MIB));
        touch_each(filled, 16 * MIB, PAGE);
        free(filled);
        *(char *)taken(malloc(17 * MIB)) = 1;
    }
}

/* Rounds of large blocks, then as much memory in small ones, in 8 threads at once. */
static void *fills_after_rounds(void *unused)
{
    char *blocks[25];
    for (int round = 0; round < 12; round++) {
        for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) {
            blocks[i] = taken(malloc(800 * KIB));
            touch_each(blocks[i], 800 * KIB, PAGE);
        }
        pthread_barrier_wait(&all_there);
        for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++)
            free(blocks[i]);
        pthread_barrier_wait(&all_there);
    }
    for (size_t filled = 0; filled < 20 * MIB; filled += 1000)
        memset(taken(malloc(1000)), 1, 1000);
    pthread_barrier_wait(&all_there);
    return unused;
}

static void filled_after_rounds(void) { together(8, fills_after_rounds); }

/* Rounds of a few large blocks: the first one frees before glibc serves blocks of that size. */
static void large_in_rounds(void)
{
    char *blocks[5];
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 5; i++) {
            blocks[i] = taken(malloc(30 * MIB));
            touch_each(blocks[i], 30 * MIB, PAGE);
        }
        for (int i = 0; i < 5; i++)
            free(blocks[i]);
    }
}

/* Rounds of large blocks of which another part is touched each time. */
static void parts_in_rounds(int zeroed)
{
    enum { ROUNDS = 10, BLOCKS = 3 };
    const size_t size = 100 * MIB, part = 10 * MIB;
    char *blocks[BLOCKS];
    for (size_t round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < BLOCKS; i++) {
            blocks[i] = taken(zeroed ? calloc(1, size) : malloc(size));
            touch_each(blocks[i] + round * (size - part) / ROUNDS, part, PAGE);
        }
        for (int i = 0; i < BLOCKS; i++)
            free(blocks[i]);
    }
}

static void touched_in_rounds(void) { parts_in_rounds(0); }

static void zeroed_in_rounds(void) { parts_in_rounds(1); }

static void *large_rounds(void *unused)
{
    (void)unused;
    enum { ROUNDS = 10, BLOCKS = 25 };
    char *blocks[BLOCKS];
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < BLOCKS; i++) {
            blocks[i] = taken(malloc(1600 * KIB));
            touch_each(blocks[i], 1600 * KIB, PAGE);
        }
        pthread_barrier_wait(&all_there);
        for (int i = 0; i < BLOCKS; i++)
            free(blocks[i]);
        pthread_barrier_wait(&all_there);
    }
    return NULL;
}

static void mapped_after_rounds(void)
{
    together(4, large_rounds);
    for (size_t sum = 0; sum < 150 * MIB; sum += 900 * KIB)
        touch_each(map(900 * KIB, PROT_READ | PROT_WRITE), 900 * KIB, PAGE);
}

static void *fills_stack(void *unused)
{
    (void)unused;
    volatile char room[4 * MIB];
    for (size_t at = 0; at < sizeof room; at += PAGE)
        room[at] = 1;
    pthread_barrier_wait(&all_there);
    return NULL;
}

static void stacks_after_rounds(void)
{
    together(4, large_rounds);
    together(36, fills_stack);
}

static void nothing(void)
{
}

static const struct {
    const char *name;
    void (*run)(void);
} modes[] = {
    {"malloc-4m", malloc_4m},
    {"malloc-1m", malloc_1m},
    {"malloc-256k", malloc_256k},
    {"malloc-100k", malloc_100k},
    {"malloc-64k", malloc_64k},
    {"malloc-16k", malloc_16k},
    {"malloc-2m-ends", malloc_2m_ends},
    {"calloc-1g", calloc_1g},
    {"mmap-8m", mmap_8m},
    {"mmap-8m-idle", mmap_8m_idle},
    {"realloc-steps", realloc_steps},
    {"freed-1m", freed_1m},
    {"small-phases", small_phases},
    {"strings", strings},
    {"cache", cache},
    {"small-after-freed", small_after_freed},
    {"vectors", vectors},
    {"stacks", stacks},
    {"arenas", arenas},
    {"mapped-arenas", mapped_arenas},
    {"stress", stress},
    {"larger-and-sparse", larger_and_sparse},
    {"unmapped-ends", unmapped_ends},
    {"shrunk-ends", shrunk_ends},
    {"unmapped-in-halves", unmapped_in_halves},
    {"three-quarters", three_quarters},
    {"dropped-twice", dropped_twice},
    {"freed-by-another", freed_by_another},
    {"freed-in-turn", freed_in_turn},
    {"after-a-peak", after_a_peak},
    {"left-by-a-thread", left_by_a_thread},
    {"go-protected", go_protected},
    {"go-fixed", go_fixed},
    {"go-scavenged", go_scavenged},
    {"purge-dontneed", purge_dontneed},
    {"purge-free", purge_free},
    {"table", table},
    {"grow-break", grow_break},
    {"grow-mapping", grow_mapping},
    {"holes-in-heap", holes_in_heap},
    {"holes-in-mapping", holes_in_mapping},
    {"unmapped-parts", unmapped_parts},
    {"aligned", aligned},
    {"again", again},
    {"shared", shared},
    {"forked", forked},
    {"copied-in-part", copied_in_part},
    {"dense-then-sparse", dense_then_sparse},
    {"sizes-replaced", sizes_replaced},
    {"grown-unfilled", grown_unfilled},
    {"small-then-smaller", small_then_smaller},
    {"small-then-smallest", small_then_smallest},
    {"filled-then-sparse", filled_then_sparse},
    {"large-in-rounds", large_in_rounds},
    {"filled-after-rounds", filled_after_rounds},
    {"touched-in-rounds", touched_in_rounds},
    {"zeroed-in-rounds", zeroed_in_rounds},
    {"mapped-after-rounds", mapped_after_rounds},
    {"stacks-after-rounds", stacks_after_rounds},
    {"nothing", nothing},
};

int main(int argc, char **argv)
{
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
        if (argc < 2)
            puts(modes[i].name);
        else if (strcmp(argv[1], modes[i].name) == 0) {
            modes[i].run();
            return 0;
        }
    return argc < 2 ? 0 : 2;
}
