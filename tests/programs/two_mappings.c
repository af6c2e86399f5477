/* Memory that is filled, and of which two mappings share each block: the kernel makes no huge page of it. The program then
 * sleeps, and says how much CPU time it has taken meanwhile, of all its threads. */
#include "check.h"
#include <sys/mman.h>

enum { BLOCKS = 32 };

static long cpu_milliseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

int main(void)
{
    size_t size = BLOCKS * 2 * MIB;
    char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    for (size_t block = 0; block < BLOCKS; block++)
        CHECK(madvise(memory + block * 2 * MIB, MIB, MADV_DONTDUMP) == 0);
    memset(memory, 7, size);
    observe(memory);
    /* What is still to be done is done. */
    usleep(500000);
    long before = cpu_milliseconds();
    usleep(1000000);
    printf("idle=%ld\n", cpu_milliseconds() - before);
    return 0;
}
