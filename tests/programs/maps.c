/* Edge cases of mmap and related calls: guarantees of POSIX and Linux. */
#include "check.h"
#include <sys/mman.h>
#include <sys/syscall.h>

enum { RW = PROT_READ | PROT_WRITE, PRIVATE = MAP_PRIVATE | MAP_ANONYMOUS };

static const size_t sizes[] = {
    1, 4096, 64 * KIB, 256 * KIB - 4096, 256 * KIB, 300 * KIB, 1 * MIB, 2 * MIB - 4096, 2 * MIB,
    2 * MIB + 4096, 3 * MIB, 4 * MIB + 1, 9 * MIB, 64 * MIB,
};
#define SIZES (sizeof sizes / sizeof *sizes)

static char *map(size_t size)
{
    char *memory = mmap(NULL, size, RW, PRIVATE, -1, 0);
    CHECK(memory != MAP_FAILED && (uintptr_t)memory % 4096 == 0);
    return memory;
}

/* Reports whether nothing is mapped at the page. */
static int unmapped(void *page)
{
    return msync(page, 4096, MS_ASYNC) == -1 && errno == ENOMEM;
}

static void made_and_unmade(void)
{
    for (int round = 0; round < 3; round++)
        for (size_t i = 0; i < SIZES; i++) {
            errno = 77;
            char *memory = map(sizes[i]);
            CHECK(errno == 77);
            check_zero(memory, sizes[i]);
            memset(memory, 0xee, sizes[i]);
            CHECK(munmap(memory, sizes[i]) == 0 && errno == 77);
            CHECK(unmapped(memory));
        }
    errno = 0;
    CHECK(mmap(NULL, 0, RW, PRIVATE, -1, 0) == MAP_FAILED && errno == EINVAL);
    errno = 0;
    CHECK(mmap(NULL, (size_t)1 << 60, RW, PRIVATE, -1, 0) == MAP_FAILED && errno == ENOMEM);
    errno = 0;
    CHECK(mmap(NULL, 3 * MIB, RW, MAP_PRIVATE, -1, 0) == MAP_FAILED && errno == EBADF);
    errno = 0;
    CHECK(munmap((void *)1, 4096) == -1 && errno == EINVAL);
    puts("made and unmade");
}

/* Holes leave the rest unchanged, and are zero when mapped again. */
static void unmapped_in_part(void)
{
    for (size_t i = 4; i < SIZES; i++) {
        size_t size = sizes[i] & ~(size_t)4095, third = size / 3 & ~(size_t)4095;
        char *memory = map(size);
        memset(memory, 0x77, size);
        CHECK(munmap(memory + third, third) == 0);
        CHECK(unmapped(memory + third) && unmapped(memory + 2 * third - 4096));
        CHECK(memory[third - 1] == 0x77 && memory[2 * third] == 0x77);
        char *again = mmap(memory + third, third, RW, PRIVATE | MAP_FIXED, -1, 0);
        CHECK(again == memory + third);
        check_zero(again, third);
        memset(again, 0x66, third);
        CHECK(munmap(memory, third) == 0 && unmapped(memory));
        CHECK(again[0] == 0x66 && memory[size - 1] == 0x77);
        CHECK(munmap(memory + third, size - third) == 0);
        CHECK(unmapped(memory + size - 4096));
        /* Unmapped ranges may be unmapped. */
        CHECK(munmap(memory, size) == 0);
    }
    /* One call over several neighbours. */
    char *whole = map(12 * MIB);
    CHECK(mmap(whole + 4 * MIB, 4 * MIB, PROT_READ, PRIVATE | MAP_FIXED, -1, 0) == whole + 4 * MIB);
    CHECK(munmap(whole, 12 * MIB) == 0 && unmapped(whole + 6 * MIB));
    puts("unmapped in part");
}

static void placed(void)
{
    char *area = mmap(NULL, 32 * MIB, PROT_NONE, PRIVATE | MAP_NORESERVE, -1, 0);
    CHECK(area != MAP_FAILED);
    char *odd = area + 3 * MIB + 4096;
    CHECK(mmap(odd, 5 * MIB, RW, PRIVATE | MAP_FIXED, -1, 0) == odd);
    memset(odd, 1, 5 * MIB);
    errno = 0;
    CHECK(mmap(odd, 4096, RW, PRIVATE | MAP_FIXED_NOREPLACE, -1, 0) == MAP_FAILED && errno == EEXIST);
    CHECK(mmap(odd + MIB, MIB, RW, PRIVATE | MAP_FIXED, -1, 0) == odd + MIB);
    check_zero(odd + MIB, MIB);
    CHECK(odd[MIB - 1] == 1 && odd[2 * MIB] == 1);
    CHECK(munmap(area, 32 * MIB) == 0);
    /* A hint is used if the place is free; otherwise the kernel chooses. */
    char *hinted = mmap(area, 4 * MIB, RW, PRIVATE, -1, 0);
    CHECK(hinted == area);
    char *other = mmap(area, 4 * MIB, RW, PRIVATE, -1, 0);
    CHECK(other != MAP_FAILED && other != area);
    memset(hinted, 1, 4 * MIB);
    memset(other, 2, 4 * MIB);
    CHECK(hinted[4 * MIB - 1] == 1);
    CHECK(munmap(hinted, 4 * MIB) == 0 && munmap(other, 4 * MIB) == 0);
#ifdef MAP_32BIT
    for (size_t i = 0; i < SIZES; i++) {
        char *low = mmap(NULL, sizes[i], RW, PRIVATE | MAP_32BIT, -1, 0);
        CHECK(low != MAP_FAILED && (uintptr_t)low + sizes[i] <= (uintptr_t)1 << 31);
        memset(low, 3, sizes[i]);
        CHECK(munmap(low, sizes[i]) == 0);
    }
#endif
    puts("placed");
}

static void moved(void)
{
    for (size_t i = 0; i < SIZES; i++)
        for (size_t j = 0; j < SIZES; j++) {
            size_t from = (sizes[i] + 4095) & ~(size_t)4095, to = (sizes[j] + 4095) & ~(size_t)4095;
            size_t kept = from < to ? from : to;
            uint8_t *memory = (uint8_t *)map(from);
            paint(memory, from, 0x21);
            uint8_t first = memory[0], last = memory[kept - 1];
            uint8_t *resized = mremap(memory, from, to, MREMAP_MAYMOVE);
            CHECK(resized != MAP_FAILED && resized[0] == first && resized[kept - 1] == last);
            if (to > from)
                check_zero(resized + from, to - from);
            if (resized != memory)
                CHECK(unmapped(memory));
            memset(resized, 5, to);
            CHECK(munmap(resized, to) == 0 && unmapped(resized) && unmapped(resized + to - 4096));
        }
    /* To a fixed address; and a move that splits. */
    char *memory = map(8 * MIB), *place = map(16 * MIB);
    memset(memory, 9, 8 * MIB);
    CHECK(munmap(place, 16 * MIB) == 0);
    char *split = mremap(memory + 2 * MIB, 4 * MIB, 4 * MIB, MREMAP_MAYMOVE | MREMAP_FIXED, place + 4096);
    CHECK(split == place + 4096 && split[0] == 9 && split[4 * MIB - 1] == 9);
    CHECK(unmapped(memory + 2 * MIB) && unmapped(memory + 6 * MIB - 4096));
    CHECK(memory[0] == 9 && memory[8 * MIB - 1] == 9);
    CHECK(munmap(split, 4 * MIB) == 0 && munmap(memory, 8 * MIB) == 0);
    /* In place, or not at all. */
    memory = map(8 * MIB);
    CHECK(mmap(memory + 4 * MIB, 4096, PROT_READ, PRIVATE | MAP_FIXED, -1, 0) == memory + 4 * MIB);
    errno = 0;
    CHECK(mremap(memory, 4 * MIB, 6 * MIB, 0) == MAP_FAILED && errno == ENOMEM);
    CHECK(mremap(memory, 4 * MIB, 3 * MIB, 0) == memory && unmapped(memory + 3 * MIB));
    CHECK(munmap(memory, 8 * MIB) == 0);
    /* MREMAP_DONTUNMAP leaves an empty mapping. */
    memory = map(4 * MIB);
    memset(memory, 8, 4 * MIB);
    char *taken = mremap(memory, 4 * MIB, 4 * MIB, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);
    CHECK(taken != MAP_FAILED && taken != memory && taken[MIB] == 8);
    check_zero(memory, 4 * MIB);
    CHECK(munmap(taken, 4 * MIB) == 0 && munmap(memory, 4 * MIB) == 0);
    /* What the kernel refuses leaves both mappings as they are. */
    static const size_t refused[] = {SIZE_MAX - 99, SIZE_MAX, (size_t)1 << 62, (size_t)1 << 47};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        memory = map(8 * MIB);
        place = map(8 * MIB);
        memset(memory, 3, 8 * MIB);
        memset(place, 4, 8 * MIB);
        for (int swapped = 0; swapped < 2; swapped++) {
            char *from = swapped ? place : memory, *to = swapped ? memory : place;
            errno = 0;
            CHECK(mremap(from, 8 * MIB, refused[i], MREMAP_MAYMOVE | MREMAP_FIXED, to) == MAP_FAILED);
            CHECK(errno == EINVAL);
        }
        for (size_t at = 0; at < 8 * MIB; at += 4096)
            CHECK(memory[at] == 3 && place[at] == 4);
        CHECK(munmap(memory, 8 * MIB) == 0 && munmap(place, 8 * MIB) == 0);
    }
    puts("moved");
}

static void protected(void)
{
    /* Like V8 and JVMs: a large reservation, made accessible piece by piece. */
    size_t whole = 256 * MIB;
    char *area = mmap(NULL, whole, PROT_NONE, PRIVATE | MAP_NORESERVE, -1, 0);
    CHECK(area != MAP_FAILED);
    for (size_t at = 0; at < whole; at += 16 * MIB) {
        CHECK(mprotect(area + at, 3 * MIB, RW) == 0);
        memset(area + at, (int)(at >> 24), 3 * MIB);
    }
    for (size_t at = 0; at < whole; at += 16 * MIB)
        CHECK(area[at + 3 * MIB - 1] == (char)(at >> 24));
    CHECK(madvise(area, 3 * MIB, MADV_DONTNEED) == 0);
    check_zero(area, 3 * MIB);
    CHECK(munmap(area, whole) == 0);
    /* A read of an inaccessible page in a system call fails without a signal. */
    int pipes[2];
    CHECK(pipe(pipes) == 0);
    for (size_t i = 4; i < SIZES; i++) {
        char *memory = map(sizes[i]);
        memset(memory, 4, sizes[i]);
        CHECK(mprotect(memory, 4096, PROT_NONE) == 0);
        errno = 0;
        CHECK(write(pipes[1], memory, 1) == -1 && errno == EFAULT);
        CHECK(write(pipes[1], memory + 4096, 1) == 1);
        char byte;
        CHECK(read(pipes[0], &byte, 1) == 1 && byte == 4);
        CHECK(mprotect(memory, 4096, PROT_READ) == 0 && memory[7] == 4);
        CHECK(munmap(memory, sizes[i]) == 0);
    }
    close(pipes[0]);
    close(pipes[1]);
    puts("protected");
}

static void shared_and_files(void)
{
    for (size_t i = 0; i < SIZES; i++) {
        char *shared = mmap(NULL, sizes[i], RW, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        CHECK(shared != MAP_FAILED);
        check_zero(shared, sizes[i]);
        memset(shared, 2, sizes[i]);
        CHECK(munmap(shared, sizes[i]) == 0);
    }
    FILE *file = tmpfile();
    CHECK(file != NULL && ftruncate(fileno(file), 6 * MIB) == 0);
    char *written = mmap(NULL, 6 * MIB, RW, MAP_SHARED, fileno(file), 0);
    char *private = mmap(NULL, 4 * MIB, RW, MAP_PRIVATE, fileno(file), 2 * MIB);
    CHECK(written != MAP_FAILED && private != MAP_FAILED);
    written[3 * MIB] = 'x';
    CHECK(private[1 * MIB] == 'x');
    private[1 * MIB] = 'y';
    CHECK(written[3 * MIB] == 'x');
    CHECK(munmap(written, 6 * MIB) == 0 && munmap(private, 4 * MIB) == 0);
    fclose(file);
    /* A bare system call on memory that the library knows. */
    char *memory = map(6 * MIB);
    memset(memory, 1, 6 * MIB);
    CHECK(syscall(SYS_munmap, memory, 6 * MIB) == 0);
    char *next = map(6 * MIB);
    check_zero(next, 6 * MIB);
    memset(next, 1, 6 * MIB);
    CHECK(munmap(next, 6 * MIB) == 0);
    puts("shared and files");
}

static void brk_heap(void)
{
    char *start = sbrk(0);
    CHECK(sbrk(10 * MIB + 100) == start);
    check_zero(start, 10 * MIB + 100);
    memset(start, 7, 10 * MIB + 100);
    CHECK((char *)sbrk(0) == start + 10 * MIB + 100);
    CHECK(sbrk(-(intptr_t)(10 * MIB + 100)) == start + 10 * MIB + 100);
    CHECK(brk(start + 5 * MIB) == 0 && sbrk(0) == start + 5 * MIB);
    check_zero(start, 5 * MIB);
    CHECK(brk(start) == 0);
    errno = 0;
    CHECK(sbrk((intptr_t)1 << 46) == (void *)-1 && errno == ENOMEM);
    puts("brk");
}

/* Thousands at once, freed in another order than created. */
static void many(void)
{
    enum { COUNT = 2000 };
    static char *maps[COUNT];
    static size_t lengths[COUNT];
    uint64_t random = 99;
    for (int round = 0; round < 20000; round++) {
        int at = (int)(next_random(&random) % COUNT);
        if (maps[at] != NULL) {
            check_paint(maps[at], 4096, (uint8_t)at);
            check_paint(maps[at] + lengths[at] - 4096, 4096, (uint8_t)~at);
            CHECK(munmap(maps[at], lengths[at]) == 0);
        }
        lengths[at] = 256 * KIB + (next_random(&random) % (2 * MIB) & ~(size_t)4095);
        maps[at] = map(lengths[at]);
        check_zero(maps[at], 4096);
        check_zero(maps[at] + lengths[at] - 4096, 4096);
        paint(maps[at], 4096, (uint8_t)at);
        paint(maps[at] + lengths[at] - 4096, 4096, (uint8_t)~at);
    }
    puts("many");
}

int main(void)
{
    made_and_unmade();
    unmapped_in_part();
    placed();
    moved();
    protected();
    shared_and_files();
    brk_heap();
    many();
    return 0;
}
