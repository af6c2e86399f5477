/* Dies of SIGSEGV with a heap that a debugger can find in the core dump. */
#include "check.h"
#include <signal.h>

char *evidence;

int main(int argc, char **argv)
{
    evidence = malloc(48 * MIB);
    CHECK(evidence != NULL);
    memset(evidence, 0x2a, 48 * MIB);
    strcpy(evidence + 40 * MIB, "the heap is in the core");
    puts("about to crash");
    fflush(stdout);
    if (argc > 1 && strcmp(argv[1], "abort") == 0)
        abort();
    if (argc > 1 && strcmp(argv[1], "stay") == 0)
        getchar();
    *(volatile int *)8 = 1;
    return 0;
}
