/* Filled memory that the kernel cannot collapse, by ARG: `mappings`, each block spans two;
 * `pinned`, a pipe pins a page of each. The program then sleeps and prints its CPU time
 * meanwhile, of all threads. Finally the obstacle and the memory are freed, and one byte of each
 * block is touched: prints the resident memory. */
#define _GNU_SOURCE
#include "check.h"
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/uio.h>

enum { BLOCKS = 32 };

static long cpu_milliseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    int pinned = strcmp(argv[1], "pinned") == 0, ends[2];
    size_t size = BLOCKS * 2 * MIB;
    char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED && pipe(ends) == 0 && fcntl(ends[1], F_SETPIPE_SZ, 2 * BLOCKS * 4096) > 0);
    for (size_t at = 0; at < size; at += 2 * MIB) {
        struct iovec page = {memory + at, 4096};
        memset(memory + at, 7, 4096);
        CHECK(pinned ? vmsplice(ends[1], &page, 1, 0) == 4096 : madvise(memory + at, MIB, MADV_DONTDUMP) == 0);
    }
    memset(memory, 7, size);
    observe(memory);
    /* Time for pending work. */
    usleep(500000);
    long before = cpu_milliseconds();
    usleep(1000000);
    long idle = cpu_milliseconds() - before;
    close(ends[0]);
    close(ends[1]);
    CHECK(madvise(memory, size, MADV_DODUMP) == 0 && madvise(memory, size, MADV_DONTNEED) == 0);
    for (size_t at = 0; at < size; at += 2 * MIB)
        memory[at] = 1;
    printf("idle=%ld resident=%zu\n", idle, resident());
    return 0;
}
