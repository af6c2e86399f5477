/* Makes the program's first allocation in a signal handler on an alternate stack of 8 KiB, and
 * checks the data below that stack. */
#include "check.h"

#include <signal.h>

#define STACK_BYTES 8192

static struct {
    char data[64 << 10];
    char stack[STACK_BYTES];
} memory __attribute__((aligned(4096)));

static void handle(int signal)
{
    (void)signal;
    /* Not async-signal-safe, but the handler interrupts nothing. */
    void *block = malloc(100);
    observe(block);
    free(block);
}

int main(void)
{
    stack_t stack = {.ss_sp = memory.stack, .ss_size = STACK_BYTES};
    struct sigaction action = {.sa_handler = handle, .sa_flags = SA_ONSTACK};
    memset(memory.data, 'x', sizeof memory.data);
    CHECK(sigaltstack(&stack, NULL) == 0);
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    CHECK(raise(SIGUSR1) == 0);
    for (size_t at = 0; at < sizeof memory.data; at++)
        CHECK(memory.data[at] == 'x');
    dprintf(1, "kept\n");
    return 0;
}
