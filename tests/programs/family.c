/* The whole malloc family in one thread: the guarantees of each call, at sizes on both sides of
 * every threshold of an allocator. Prints nothing that may differ between allocators. */
#include "check.h"

static const size_t sizes[] = {
    1,       16,        4096,          100 * KIB,       128 * KIB - 1, 128 * KIB, 128 * KIB + 1,
    256 * KIB, 1 * MIB, 2 * MIB - 4096, 2 * MIB - 16,    2 * MIB,       2 * MIB + 1, 3 * MIB + 7,
    4 * MIB, 8 * MIB,   33 * MIB + 5,
};
#define SIZES (sizeof sizes / sizeof *sizes)

static void plain_malloc(void)
{
    for (size_t i = 0; i < SIZES; i++) {
        errno = 77;
        char *memory = malloc(sizes[i]);
        CHECK(memory != NULL && (uintptr_t)memory % 16 == 0);
        CHECK(errno == 77);
        CHECK(malloc_usable_size(memory) >= sizes[i]);
        /* All of the usable size may be written. */
        memset(memory, 0xa5, malloc_usable_size(memory));
        paint(memory, sizes[i], (uint8_t)i);
        check_paint(memory, sizes[i], (uint8_t)i);
        free(memory);
        CHECK(errno == 77);
    }
    free(NULL);
    void *empty = malloc(0);
    CHECK(empty != NULL);
    free(empty);
    CHECK(malloc_usable_size(NULL) == 0);
    puts("malloc");
}

static void zeroed(void)
{
    for (int round = 0; round < 3; round++)
        for (size_t i = 0; i < SIZES; i++) {
            char *memory = calloc(sizes[i], 1);
            CHECK(memory != NULL);
            check_zero(memory, sizes[i]);
            memset(memory, 0xff, sizes[i]);
            free(memory);
            memory = calloc(1 + sizes[i] / 24, 24);
            CHECK(memory != NULL);
            check_zero(memory, (1 + sizes[i] / 24) * 24);
            memset(memory, 0xff, sizes[i]);
            free(memory);
        }
    errno = 0;
    CHECK(calloc(SIZE_MAX / 2, 3) == NULL && errno == ENOMEM);
    void *empty = calloc(0, 8);
    CHECK(empty != NULL);
    free(empty);
    puts("calloc");
}

static void resized(void)
{
    for (size_t i = 0; i < SIZES; i++)
        for (size_t j = 0; j < SIZES; j++) {
            size_t kept = sizes[i] < sizes[j] ? sizes[i] : sizes[j];
            uint8_t *memory = malloc(sizes[i]);
            CHECK(memory != NULL);
            for (size_t at = 0; at < sizes[i]; at += 509)
                memory[at] = (uint8_t)(at / 509 + j);
            errno = 77;
            memory = realloc(memory, sizes[j]);
            CHECK(memory != NULL && errno == 77);
            CHECK(malloc_usable_size(memory) >= sizes[j]);
            for (size_t at = 0; at < kept; at += 509)
                CHECK(memory[at] == (uint8_t)(at / 509 + j));
            memset(memory, 1, sizes[j]);
            free(memory);
        }
    /* Step by step, up and down again. */
    uint8_t *memory = NULL;
    for (size_t size = 1; size <= 64 * MIB; size *= 2) {
        memory = realloc(memory, size);
        CHECK(memory != NULL);
        memory[size - 1] = (uint8_t)__builtin_ctzl(size);
        for (size_t below = 1; below <= size; below *= 2)
            CHECK(memory[below - 1] == (uint8_t)__builtin_ctzl(below));
    }
    for (size_t size = 64 * MIB; size >= 1; size /= 2) {
        memory = realloc(memory, size);
        CHECK(memory != NULL && memory[size - 1] == (uint8_t)__builtin_ctzl(size));
    }
    /* An impossible resize changes nothing. */
    memory = realloc(memory, 5 * MIB);
    paint(memory, 5 * MIB, 3);
    errno = 0;
    CHECK(realloc(memory, SIZE_MAX - 5 * MIB) == NULL && errno == ENOMEM);
    errno = 0;
    CHECK(reallocarray(memory, SIZE_MAX / 4, 8) == NULL && errno == ENOMEM);
    check_paint(memory, 5 * MIB, 3);
    memory = reallocarray(memory, 3, 3 * MIB);
    CHECK(memory != NULL);
    check_paint(memory, 5 * MIB, 3);
    /* glibc frees a block resized to 0. */
    CHECK(realloc(memory, 0) == NULL);
    memory = realloc(NULL, 3 * MIB);
    CHECK(memory != NULL);
    free(memory);
    puts("realloc");
}

static void aligned(void)
{
    for (size_t alignment = 8; alignment <= 16 * MIB; alignment *= 2)
        for (size_t i = 0; i < SIZES; i++) {
            void *memory = NULL;
            errno = 77;
            CHECK(posix_memalign(&memory, alignment, sizes[i]) == 0 && errno == 77);
            CHECK((uintptr_t)memory % alignment == 0 && malloc_usable_size(memory) >= sizes[i]);
            paint(memory, sizes[i], 9);
            memory = realloc(memory, sizes[i] + 3 * MIB);
            CHECK(memory != NULL);
            if (sizes[i] > 1)
                CHECK(((uint8_t *)memory)[0] == 9);
            free(memory);
            memory = memalign(alignment, sizes[i]);
            CHECK(memory != NULL && (uintptr_t)memory % alignment == 0);
            paint(memory, sizes[i], 9);
            free(memory);
            memory = aligned_alloc(alignment, sizes[i]);
            CHECK(memory != NULL && (uintptr_t)memory % alignment == 0);
            paint(memory, sizes[i], 9);
            free(memory);
        }
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (size_t i = 0; i < SIZES; i++) {
        void *memory = valloc(sizes[i]);
        CHECK(memory != NULL && (uintptr_t)memory % page == 0);
        paint(memory, sizes[i], 4);
        free(memory);
        memory = pvalloc(sizes[i]);
        CHECK(memory != NULL && (uintptr_t)memory % page == 0);
        CHECK(malloc_usable_size(memory) >= (sizes[i] + page - 1) / page * page);
        memset(memory, 4, (sizes[i] + page - 1) / page * page);
        free(memory);
    }
    void *untouched = (void *)0x1234;
    CHECK(posix_memalign(&untouched, 3, 8) == EINVAL && untouched == (void *)0x1234);
    CHECK(posix_memalign(&untouched, 24, 3 * MIB) == EINVAL && untouched == (void *)0x1234);
    CHECK(posix_memalign(&untouched, 4, 3 * MIB) == EINVAL && untouched == (void *)0x1234);
    CHECK(posix_memalign(&untouched, 64, SIZE_MAX - 8) == ENOMEM);
    errno = 0;
    CHECK(memalign(4096, SIZE_MAX - 8192) == NULL && errno == ENOMEM);
    errno = 0;
    CHECK(memalign(SIZE_MAX / 2 + 2, 1 * MIB) == NULL && errno == EINVAL);
    errno = 0;
    CHECK(pvalloc(SIZE_MAX - 100) == NULL && errno == ENOMEM);
    puts("aligned");
}

static void refused(void)
{
    /* Volatile: the compiler knows that these sizes are impossible. */
    volatile size_t sizes_refused[] = {SIZE_MAX,           SIZE_MAX - 4096,      PTRDIFF_MAX,
                                       (size_t)PTRDIFF_MAX + 1, (size_t)1 << 47, (size_t)1 << 56};
    for (size_t i = 0; i < sizeof sizes_refused / sizeof *sizes_refused; i++) {
        errno = 0;
        CHECK(malloc(sizes_refused[i]) == NULL && errno == ENOMEM);
    }
    puts("refused");
}

static void tuned(void)
{
    void *memory = malloc(9 * MIB);
    malloc_trim(0);
    CHECK(mallopt(M_MMAP_THRESHOLD, 64 * KIB) == 1);
    void *other = malloc(80 * KIB);
    static void *small[1000];
    struct mallinfo2 before = mallinfo2();
    for (int at = 0; at < 1000; at++)
        CHECK((small[at] = malloc(1000)) != NULL);
    void *volatile large = malloc(5 * MIB);
    struct mallinfo2 info = mallinfo2();
    struct mallinfo wrapped = mallinfo();
    CHECK(info.arena > 0 && (unsigned)wrapped.arena == (unsigned)info.arena);
    CHECK(info.uordblks + info.fordblks <= info.arena);
    CHECK(info.uordblks + info.hblkhd >= before.uordblks + before.hblkhd + 5 * MIB + 900 * 1000);
    free(large);
    for (int at = 0; at < 1000; at++)
        free(small[at]);
    malloc_trim(0);
    CHECK(mallinfo2().uordblks < info.uordblks - 900 * 1000);
    free(other);
    free(memory);
    FILE *null = fopen("/dev/null", "w");
    CHECK(null != NULL && malloc_info(0, null) == 0);
    fclose(null);
    puts("tuned");
}

int main(int count, char **words)
{
    if (count > 1 && strcmp(words[1], "stats") == 0) {
        malloc_stats();
        return 0;
    }
    plain_malloc();
    zeroed();
    resized();
    aligned();
    refused();
    tuned();
    return 0;
}
