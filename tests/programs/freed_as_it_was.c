/* Blocks are freed with write-protected pages, or with pages of a fault handler; later blocks
 * are normal memory nevertheless. A handler on a small stack allocates the first large block of
 * the process. */
#include "check.h"
#include <linux/userfaultfd.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>

static void *aligned(size_t align, size_t size)
{
    void *block;
    CHECK(posix_memalign(&block, align, size) == 0);
    return block;
}

static void filled_and_freed(size_t size)
{
    char *block = malloc(size);
    CHECK(block != NULL);
    memset(block, 1, size);
    observe(block);
    free(block);
}

static void guarded(void)
{
    filled_and_freed(32 * MIB - 8192);
    for (int i = 0; i < 3; i++) {
        char *block = aligned(4096, 40 * MIB);
        CHECK(mprotect(block, 4096, PROT_NONE) == 0);
        memset(block + 4096, 1, 40 * MIB - 4096);
        observe(block);
        free(block);
        filled_and_freed(48 * MIB);
    }
}

static void served(void)
{
    int faults = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);
    struct uffdio_api api = {.api = UFFD_API};
    /* Without the right there is nothing to test. */
    if (faults < 0 || ioctl(faults, UFFDIO_API, &api) != 0)
        return;
    char *block = aligned(2 * MIB, 12 * MIB);
    memset(block, 1, 12 * MIB);
    observe(block);
    struct uffdio_register part = {.range = {(uintptr_t)block + 3 * MIB, MIB},
                                   .mode = UFFDIO_REGISTER_MODE_WP | UFFDIO_REGISTER_MODE_MISSING};
    CHECK(ioctl(faults, UFFDIO_REGISTER, &part) == 0);
    filled_and_freed(300 * MIB);
    free(block);
    filled_and_freed(48 * MIB);
    filled_and_freed(12 * MIB);
    close(faults);
}

static void *first_block;

static void allocate(int signal)
{
    (void)signal;
    first_block = malloc(5 * MIB);
}

static void on_a_small_stack(void)
{
    stack_t stack = {.ss_sp = calloc(1, 8192), .ss_size = 8192};
    struct sigaction action = {.sa_handler = allocate, .sa_flags = SA_ONSTACK};
    CHECK(sigaltstack(&stack, NULL) == 0 && sigaction(SIGUSR1, &action, NULL) == 0);
    CHECK(raise(SIGUSR1) == 0 && first_block != NULL);
    memset(first_block, 1, 5 * MIB);
    free(first_block);
}

int main(void)
{
    on_a_small_stack();
    guarded();
    served();
    puts("ok");
    return 0;
}
