/* Threads on stacks of many sizes allocate and map, also near the end of the stack, and in handlers on an
 * alternate stack within their own. What lies beside their frames stays, and they start, return, exit and
 * end by cancellation as they do without the library. */
#include "check.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

#define BESIDE (64 * KIB)
#define PAINT 0x5a

/* The library's opinion of the stack; it says so in a debug build. */
static int (*has_room)(void);
#define CHECK_ROOM(expected) CHECK(has_room == NULL || (has_room() & 1) == (expected))

static void use(void)
{
    char *block = malloc(300 * KIB);
    CHECK(block != NULL);
    block[0] = 1;
    block = realloc(block, 3 * MIB);
    CHECK(block != NULL && block[0] == 1);
    free(block);
    char *memory = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED && mprotect(memory, 4096, PROT_READ) == 0);
    CHECK(mprotect(memory, 4096, PROT_READ | PROT_WRITE) == 0);
    CHECK(madvise(memory, 4 * MIB, MADV_DONTNEED) == 0);
    memory = mremap(memory, 4 * MIB, 9 * MIB, MREMAP_MAYMOVE);
    CHECK(memory != MAP_FAILED && munmap(memory, 9 * MIB) == 0);
    free(memset(malloc(40 * MIB), 1, 4096));
}

static void handle(int signal)
{
    (void)signal;
    CHECK_ROOM(0);
    use();
}

/* Goes down to where about `left` bytes of the stack are left, and allocates there. */
static __attribute__((noinline)) void descend(char *end, size_t left)
{
    volatile char frame[1024];
    frame[0] = frame[1023] = PAINT;
    if ((size_t)((char *)frame - end) > left + sizeof frame + 256)
        descend(end, left);
    else {
        CHECK_ROOM(0);
        use();
    }
    CHECK(frame[0] == PAINT && frame[1023] == PAINT);
}

/* A handler runs in the midst of an array of the thread's function. */
static void handle_within(size_t bytes)
{
    char array[bytes];
    memset(array, PAINT, bytes);
    size_t at = bytes / 2, own = ((size_t)sysconf(_SC_MINSIGSTKSZ) + 1600) & ~(size_t)15;
    stack_t stack = {.ss_sp = array + at, .ss_size = own}, none = {.ss_flags = SS_DISABLE};
    CHECK(sigaltstack(&stack, NULL) == 0 && raise(SIGUSR1) == 0 && sigaltstack(&none, NULL) == 0);
    for (size_t byte = 0; byte < bytes; byte++)
        CHECK((byte >= at && byte < at + own) || array[byte] == PAINT);
}

struct stack {
    char *end;
    size_t bytes;
};

static void *work(void *argument)
{
    struct stack *stack = argument;
    if (stack->bytes != 96 * KIB)
        CHECK_ROOM(stack->bytes >= 128 * KIB);
    use();
    descend(stack->end, 1600);
    if (stack->bytes >= 128 * KIB) {
        descend(stack->end, 60 * KIB);
        CHECK_ROOM(1);
    }
    if (stack->bytes >= 256 * KIB)
        handle_within(128 * KIB);
    void *frames[16];
    printf("%zu KiB: %d frames\n", stack->bytes / KIB, backtrace(frames, 16));
    return argument;
}

static void *leave(void *argument) { pthread_exit(argument); }

static void cleaned(void *count) { ++*(int *)count; }

static void *wait_for_ever(void *argument)
{
    pthread_cleanup_push(cleaned, argument);
    for (;;)
        pause();
    pthread_cleanup_pop(0);
    return NULL;
}

int main(void)
{
    alarm(120);
    *(void **)&has_room = dlsym(RTLD_DEFAULT, "jumbo_has_room");
    struct sigaction action = {.sa_handler = handle, .sa_flags = SA_ONSTACK};
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    void *warm[1];
    backtrace(warm, 1);
    size_t sizes[] = {32, 64, 80, 96, 128, 256, 1024, 8192};
    for (size_t at = 0; at < sizeof sizes / sizeof *sizes; at++) {
        struct stack stack = {.bytes = sizes[at] * KIB};
        char *memory = malloc(stack.bytes + BESIDE);
        CHECK(memory != NULL);
        memset(memory, PAINT, BESIDE);
        stack.end = memory + BESIDE;
        pthread_attr_t attributes;
        CHECK(pthread_attr_init(&attributes) == 0);
        CHECK(pthread_attr_setstack(&attributes, stack.end, stack.bytes) == 0);
        pthread_t thread;
        void *answer;
        CHECK(pthread_create(&thread, &attributes, work, &stack) == 0 && pthread_join(thread, &answer) == 0);
        CHECK(answer == &stack && pthread_attr_destroy(&attributes) == 0);
        for (size_t byte = 0; byte < BESIDE; byte++)
            CHECK(memory[byte] == PAINT);
        free(memory);
    }
    pthread_t threads[100];
    int count = 0;
    void *answer;
    for (int at = 0; at < 100; at++)
        CHECK(pthread_create(&threads[at], NULL, at % 2 ? leave : wait_for_ever, &count) == 0);
    for (int at = 0; at < 100; at++) {
        CHECK(at % 2 || pthread_cancel(threads[at]) == 0);
        CHECK(pthread_join(threads[at], &answer) == 0);
        CHECK(answer == (at % 2 ? &count : PTHREAD_CANCELED));
    }
    CHECK(count == 50);
    puts("done");
    return 0;
}
