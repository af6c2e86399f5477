/* Functions of liburing's names and results, which make system calls in machine code as it does. `ring`
 * points to the descriptor. */
#include <errno.h>
#include <linux/io_uring.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <sys/uio.h>

static int call(long ring, long operation, long argument, long count)
{
    long answer;
#ifdef __x86_64__
    register long r10 __asm__("r10") = count;
    __asm__ volatile("syscall"
                     : "=a"(answer)
                     : "a"((long)SYS_io_uring_register), "D"(ring), "S"(operation), "d"(argument), "r"(r10)
                     : "rcx", "r11", "memory");
#else
    register long x8 __asm__("x8") = SYS_io_uring_register, x0 __asm__("x0") = ring, x1 __asm__("x1") = operation,
                     x2 __asm__("x2") = argument, x3 __asm__("x3") = count;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3) : "memory");
    answer = x0;
#endif
    return (int)answer;
}

int io_uring_register_buffers(int *ring, const struct iovec *buffers, unsigned count)
{
    return call(*ring, IORING_REGISTER_BUFFERS, (long)buffers, count);
}

int io_uring_register_buffers_tags(int *ring, const struct iovec *buffers, const uint64_t *tags, unsigned count)
{
    struct io_uring_rsrc_register both = {.nr = count, .data = (uintptr_t)buffers, .tags = (uintptr_t)tags};
    return call(*ring, IORING_REGISTER_BUFFERS2, (long)&both, sizeof both);
}
