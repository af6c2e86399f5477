/* Registers 64 KiB in each 2 MiB of a populated mapping with io_uring, under RLIMIT_MEMLOCK of 8 MiB:
 *
 *   registers WAY [huge]
 *
 * WAY: buffers or buffers2 (operations of the system call), library or tags (functions of liburing's
 * names). "huge" prints the MiB in huge pages before and after. Exit code 77 without io_uring. */
#include "check.h"

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#define BLOCKS 32

int io_uring_register_buffers(int *ring, const struct iovec *buffers, unsigned count);
int io_uring_register_buffers_tags(int *ring, const struct iovec *buffers, const uint64_t *tags, unsigned count);

static int register_by(const char *way, int ring, const struct iovec *buffers)
{
    static const uint64_t tags[BLOCKS];
    if (strcmp(way, "library") == 0)
        return io_uring_register_buffers(&ring, buffers, BLOCKS);
    if (strcmp(way, "tags") == 0)
        return io_uring_register_buffers_tags(&ring, buffers, tags, BLOCKS);
    struct io_uring_rsrc_register both = {.nr = BLOCKS, .data = (uintptr_t)buffers, .tags = (uintptr_t)tags};
    if (strcmp(way, "buffers2") == 0)
        return (int)syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS2, &both, sizeof both);
    return (int)syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, buffers, BLOCKS);
}

static size_t huge_mib(void)
{
    static char text[1 << 16];
    int file = open("/proc/self/smaps_rollup", O_RDONLY);
    CHECK(file >= 0 && read(file, text, sizeof text - 1) > 0 && close(file) == 0);
    return strtoul(strstr(text, "AnonHugePages:") + 14, NULL, 10) / 1024;
}

int main(int argc, char **argv)
{
    CHECK(argc > 1);
    struct rlimit limit = {8 * MIB, 8 * MIB};
    CHECK(setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    struct io_uring_params params = {0};
    int ring = (int)syscall(SYS_io_uring_setup, 4, &params);
    if (ring < 0)
        return 77;
    char *memory = mmap(NULL, (BLOCKS + 1) * 2 * MIB, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    CHECK(memory != MAP_FAILED);
    struct iovec buffers[BLOCKS];
    for (size_t i = 0; i < BLOCKS; i++) {
        buffers[i] = (struct iovec){memory + i * 2 * MIB + 128 * KIB + 100, 64 * KIB};
        memset(buffers[i].iov_base, (int)i, 64 * KIB);
    }
    size_t before = huge_mib();
    errno = ERANGE;
    printf("%s: %d\n", argv[1], register_by(argv[1], ring, buffers));
    printf("errno %d\n", errno);
    if (argc > 2)
        printf("before=%zu after=%zu\n", before, huge_mib());
    for (size_t i = 0; i < BLOCKS; i++)
        for (size_t k = 0; k < 64 * KIB; k++)
            CHECK(((unsigned char *)buffers[i].iov_base)[k] == i);
    return 0;
}
