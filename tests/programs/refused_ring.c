/* Registers buffers with io_uring in calls that the kernel refuses, and prints the errors, and which
 * memory is resident after each. Exit code 77 without io_uring. */
#include "check.h"

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#define SIZE (96 * MIB)

static unsigned char pages[SIZE / (4 * KIB)];

static char *fresh(void)
{
    char *memory = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

static void refuse(const char *what, int file, const struct iovec *buffers, unsigned count, char *memory)
{
    size_t resident = 0;
    errno = 0;
    long answer = syscall(SYS_io_uring_register, file, IORING_REGISTER_BUFFERS, buffers, count);
    int why = errno;
    CHECK(mincore(memory, SIZE, pages) == 0);
    for (size_t at = 0; at < sizeof pages; at++)
        resident += pages[at] & 1;
    printf("%s: %ld errno %d, resident MiB %zu\n", what, answer, why, resident * 4 * KIB / MIB);
    CHECK(munmap(memory, SIZE) == 0);
}

int main(void)
{
    struct io_uring_params params = {0};
    int ring = (int)syscall(SYS_io_uring_setup, 4, &params);
    if (ring < 0)
        return 77;
    char *memory = fresh();
    struct iovec buffer = {memory, SIZE};
    refuse("no file", -1, &buffer, 1, memory);
    buffer.iov_base = memory = fresh();
    refuse("no ring", open("/dev/null", O_RDONLY), &buffer, 1, memory);
    memory = fresh();
    struct iovec parts[] = {{memory, 0}, {memory, SIZE}};
    refuse("an empty buffer first", ring, parts, 2, memory);
    static char small[4 * KIB];
    struct iovec first = {small, sizeof small};
    CHECK(syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, &first, 1) == 0);
    buffer.iov_base = memory = fresh();
    refuse("a ring with buffers", ring, &buffer, 1, memory);
    return 0;
}
