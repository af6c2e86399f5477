/*
 * A program that touches one page in 1 MiB of a mapping, and then serves its page faults itself.
 *
 *   registered private|shared
 *
 * Prints the number of pages that came from its handler, and of those it had touched.
 */
#define _GNU_SOURCE
#include "check.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#define SIZE (32 * MIB)

static int fault_fd;
static char *served;

static void *serve(void *unused)
{
    for (;;) {
        struct pollfd ready = {fault_fd, POLLIN, 0};
        struct uffd_msg message;
        poll(&ready, 1, -1);
        if (read(fault_fd, &message, sizeof message) != sizeof message)
            continue;
        struct uffdio_copy copy = {
            .dst = message.arg.pagefault.address & ~4095ull, .src = (uintptr_t)served, .len = 4096};
        CHECK(ioctl(fault_fd, UFFDIO_COPY, &copy) == 0 || errno == EEXIST);
    }
    return unused;
}

int main(int argc, char **argv)
{
    CHECK(argc > 1);
    int flags = MAP_ANONYMOUS | (strcmp(argv[1], "shared") ? MAP_PRIVATE : MAP_SHARED);
    served = aligned_alloc(4096, 4096);
    memset(served, 'S', 4096);
    char *memory = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, flags, -1, 0);
    CHECK(memory != MAP_FAILED);
    for (size_t at = 0; at < SIZE; at += MIB)
        memory[at] = 'P';
    fault_fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);
    CHECK(fault_fd >= 0);
    struct uffdio_api api = {.api = UFFD_API};
    CHECK(ioctl(fault_fd, UFFDIO_API, &api) == 0);
    struct uffdio_register all = {.range = {(uintptr_t)memory, SIZE}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    CHECK(ioctl(fault_fd, UFFDIO_REGISTER, &all) == 0);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, serve, NULL) == 0);
    int from_handler = 0, own = 0;
    for (size_t at = 0; at < SIZE; at += 4096) {
        from_handler += memory[at] == 'S';
        own += memory[at] == 'P';
    }
    printf("%d %d\n", from_handler, own);
    return 0;
}
