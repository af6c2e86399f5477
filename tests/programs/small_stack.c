/* Makes the program's first allocation in a signal handler on an alternate stack of 8 KiB, and
 * checks the data below that stack. With an argument: `thread`, in a thread on a stack of 16 KiB;
 * `local`, on an alternate stack that is an array of main(). */
#include "check.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

#define STACK_BYTES 8192
#define THREAD_STACK_BYTES (16 << 10)
#define ROUNDS 50

struct memory {
    char data[64 << 10];
    char stack[THREAD_STACK_BYTES];
};
static struct memory fixed __attribute__((aligned(4096)));
static struct memory *memory = &fixed;

static void allocate(void)
{
    void *block = malloc(100);
    observe(block);
    block = realloc(block, 9 * MIB);
    memset(block, 1, 9 * MIB);
    free(block);
    block = mmap(NULL, 9 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(block != MAP_FAILED);
    memset(block, 1, 9 * MIB);
    CHECK(munmap(block, 9 * MIB) == 0);
}

static void handle(int signal)
{
    (void)signal;
    /* Not async-signal-safe, but the handler interrupts nothing. */
    allocate();
}

static void *run(void *argument)
{
    volatile char frame[6000];
    frame[0] = frame[sizeof frame - 1] = 1;
    allocate();
    return argument;
}

static void run_thread(void)
{
    pthread_attr_t attributes;
    pthread_t thread;
    CHECK(pthread_attr_init(&attributes) == 0);
    CHECK(pthread_attr_setstack(&attributes, memory->stack, THREAD_STACK_BYTES) == 0);
    CHECK(pthread_create(&thread, &attributes, run, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
}

int main(int argc, char **argv)
{
    struct memory local;
    const int is_thread = argc > 1 && strcmp(argv[1], "thread") == 0;
    if (argc > 1 && !is_thread)
        memory = &local;
    stack_t stack = {.ss_sp = memory->stack, .ss_size = STACK_BYTES};
    struct sigaction action = {.sa_handler = handle, .sa_flags = SA_ONSTACK};
    memset(memory->data, 'x', sizeof memory->data);
    CHECK(sigaltstack(&stack, NULL) == 0);
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    for (int round = 0; round < ROUNDS; round++) {
        if (!is_thread)
            CHECK(raise(SIGUSR1) == 0);
        else
            run_thread();
    }
    for (size_t at = 0; at < sizeof memory->data; at++)
        CHECK(memory->data[at] == 'x');
    dprintf(1, "kept\n");
    return 0;
}
