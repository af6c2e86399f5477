/* A thread on a MAP_GROWSDOWN stack, with unmapped room below it: no other mapping may land
 * there while the thread starts. `aligned`: the heap begins with a whole huge page. */
#include "check.h"

#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Growth of the stack: less than a huge page with the gap of 256 pages that the kernel keeps
 * below. */
#define ROOM ((size_t)512 * KIB)
#define GAP ((size_t)256 * 4096)
#define MAPPED ((size_t)16 * KIB)
#define FRAMES ((size_t)80)

static size_t depth(size_t left)
{
    volatile char frame[4096];
    frame[0] = (char)left;
    return left == 0 ? 0 : depth(left - 1) + (frame[0] == (char)left);
}

static void *recurse(void *unused)
{
    (void)unused;
    return (void *)depth(FRAMES);
}

/* Fills what is free above: the kernel's choice is then below the stack. */
static void fill_above(const char *top)
{
    char *page;
    do {
        page = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(page != MAP_FAILED);
    } while (page > top);
    CHECK(munmap(page, 4096) == 0);
}

static void grow(void)
{
    char *start = mmap(NULL, GAP + ROOM, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(start != MAP_FAILED);
    char *stack = start + GAP;
    CHECK(munmap(start, GAP + ROOM) == 0);
    char *top = mmap(stack + ROOM - MAPPED, MAPPED, PROT_READ | PROT_WRITE,
                     MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_GROWSDOWN, -1, 0);
    CHECK(top == stack + ROOM - MAPPED);
    fill_above(top);
    pthread_attr_t attributes;
    CHECK(pthread_attr_init(&attributes) == 0);
    CHECK(pthread_attr_setstack(&attributes, stack, ROOM) == 0);
    pthread_t thread;
    void *answer;
    CHECK(pthread_create(&thread, &attributes, &recurse, NULL) == 0);
    CHECK(pthread_join(thread, &answer) == 0);
    CHECK((size_t)answer == FRAMES);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "aligned") == 0) {
        const size_t beyond = (size_t)sbrk(0) % (2 * MIB);
        CHECK(sbrk((intptr_t)(2 * MIB - beyond)) != (void *)-1);
    }
    grow();
    puts("grown");
    return 0;
}
