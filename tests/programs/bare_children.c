/* Children not created by fork() unmap large ranges: their memory is freed, and so is that which
 * the parent frees afterwards.
 *
 * bare_children copy|clone|vfork: a bare clone(2) that copies the memory, one that shares it, or
 * vfork(). Workers run, or have just run, before each.
 * bare_children busy: bare copies, while a thread frees all the time. */
#include "check.h"
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static const size_t SIZE = 144 * MIB;
/* Distance in bytes between filled pages. */
static const size_t STEP = 8 * KIB;
static const size_t FILLED = 72 * MIB;

static char *filled(size_t step)
{
    char *start = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(start != MAP_FAILED);
    for (size_t at = 0; at < SIZE; at += step)
        start[at] = 1;
    return start;
}

/* Waits until an unmapped range is free. */
static int is_free_soon(size_t before)
{
    for (int tries = 0; tries < 6000; tries++) {
        if (resident() + FILLED - 8 * MIB < before)
            return 0;
        struct timespec moment = {0, 5000000};
        nanosleep(&moment, NULL);
    }
    dprintf(2, "%zu MiB before, %zu after\n", before / MIB, resident() / MIB);
    return 1;
}

static int unmap(void *range)
{
    size_t before = resident();
    CHECK(munmap(range, SIZE) == 0);
    return is_free_soon(before);
}

/* Leaves the wait to the parent. */
static int only_unmap(void *range)
{
    return munmap(range, SIZE);
}

static pid_t bare_copy(void)
{
    return (pid_t)syscall(SYS_clone, SIGCHLD, 0L, 0L, 0L, 0L);
}

static void expect(pid_t child)
{
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(status == 0);
}

static void copied(void *range)
{
    pid_t child = bare_copy();
    if (child == 0)
        _exit(unmap(range));
    expect(child);
}

static void cloned(void *range)
{
    static char stack[256 << 10] __attribute__((aligned(16)));
    size_t before = resident();
    expect(clone(only_unmap, stack + sizeof stack, CLONE_VM | CLONE_VFORK | SIGCHLD, range));
    CHECK(is_free_soon(before) == 0);
}

static void vforked(void *range)
{
    size_t before = resident();
    pid_t child = vfork();
    if (child == 0)
        _exit(only_unmap(range));
    expect(child);
    CHECK(is_free_soon(before) == 0);
}

static void one_by_one(void (*make)(void *range))
{
    for (int round = 0; round < 3; round++) {
        char *of_child = filled(STEP), *after = filled(STEP);
        CHECK(unmap(filled(STEP)) == 0);
        make(of_child);
        CHECK(unmap(after) == 0);
        /* Already gone if the child shared it. */
        CHECK(syscall(SYS_munmap, of_child, SIZE) == 0);
    }
}

static atomic_int done;

static void *unmaps_always(void *unused)
{
    while (!atomic_load(&done))
        CHECK(munmap(filled(64 * KIB), SIZE) == 0);
    return unused;
}

static void amid_frees(void)
{
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, unmaps_always, NULL) == 0);
    for (int round = 0; round < 60; round++) {
        char *range = filled(64 * KIB);
        pid_t child = bare_copy();
        if (child == 0) {
            /* Ends a child that waits for a thread that does not exist. */
            alarm(60);
            _exit(munmap(range, SIZE) != 0);
        }
        expect(child);
        CHECK(munmap(range, SIZE) == 0);
    }
    atomic_store(&done, 1);
    CHECK(pthread_join(thread, NULL) == 0);
}

int main(int count, char **arguments)
{
    CHECK(count == 2);
    CHECK(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
    if (strcmp(arguments[1], "copy") == 0)
        one_by_one(copied);
    else if (strcmp(arguments[1], "clone") == 0)
        one_by_one(cloned);
    else if (strcmp(arguments[1], "vfork") == 0)
        one_by_one(vforked);
    else
        amid_frees();
    puts("freed");
    return 0;
}
