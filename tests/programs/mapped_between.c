/* One thread unmaps a large range of several mappings, with a page that Linux moves only by
 * itself. Another one maps a page at the range's start as soon as it can, and must not lose it.
 *
 * mapped_between ROUNDS */
#include "check.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>

static const size_t SIZE = 144 * MIB;
static const size_t PAGE = 4 * KIB;
static const uint64_t MARK = 0x6d61726b;

static char *const START = (char *)0x500000000000;
static pthread_barrier_t filled, unmapped, checked;

static void *other(void *rounds)
{
    for (int round = 0; round < *(int *)rounds; round++) {
        pthread_barrier_wait(&filled);
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
        char *mine;
        while ((mine = mmap(START, PAGE, PROT_READ | PROT_WRITE, flags, -1, 0)) == MAP_FAILED)
            CHECK(errno == EEXIST);
        CHECK(mine == START);
        /* By a system call: the page may be gone. */
        uint64_t word = MARK + (uint64_t)round;
        struct iovec from = {&word, sizeof word}, to = {mine, sizeof word};
        CHECK(process_vm_writev(getpid(), &from, 1, &to, 1, 0) == sizeof word);
        pthread_barrier_wait(&unmapped);
        from.iov_base = &word;
        CHECK(process_vm_readv(getpid(), &from, 1, &to, 1, 0) == sizeof word);
        CHECK(word == MARK + (uint64_t)round);
        CHECK(munmap(mine, PAGE) == 0);
        pthread_barrier_wait(&checked);
    }
    return NULL;
}

int main(int count, char **arguments)
{
    CHECK(count == 2);
    int rounds = atoi(arguments[1]);
    CHECK(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
    int zero = open("/dev/zero", O_RDWR);
    CHECK(zero >= 0);
    pthread_barrier_t *barriers[] = {&filled, &unmapped, &checked};
    for (int i = 0; i < 3; i++)
        CHECK(pthread_barrier_init(barriers[i], NULL, 2) == 0);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, other, &rounds) == 0);
    for (int round = 0; round < rounds; round++) {
        int prot = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_FIXED;
        CHECK(mmap(START, SIZE, prot, flags | MAP_ANONYMOUS, -1, 0) == START);
        for (size_t at = 0; at < SIZE; at += PAGE)
            START[at] = 1;
        char *last = START + SIZE - 8 * MIB;
        CHECK(mmap(last, PAGE, prot, flags, zero, 0) == last);
        pthread_barrier_wait(&filled);
        CHECK(munmap(START, SIZE) == 0);
        pthread_barrier_wait(&unmapped);
        pthread_barrier_wait(&checked);
    }
    CHECK(pthread_join(thread, NULL) == 0);
    printf("%d rounds\n", rounds);
    return 0;
}
