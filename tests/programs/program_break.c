/* Prints the program break before the first allocation: the kernel's choice, without
 * randomisation at the end of the data. Then the result of the program's first move of it.
 * `program_break` re-executes itself without randomisation. */
#include "check.h"

#include <sys/personality.h>

extern char end[];
static char *at_start;

__attribute__((constructor)) static void start(void)
{
    at_start = sbrk(0);
}

int main(int count, char **arguments)
{
    int persona = personality(0xffffffff);
    CHECK(persona >= 0);
    if ((persona & ADDR_NO_RANDOMIZE) == 0) {
        if (count > 1 || personality((unsigned)persona | ADDR_NO_RANDOMIZE) < 0)
            return 0;
        execl("/proc/self/exe", arguments[0], "again", NULL);
        CHECK(!"execl");
    }
    char *in_main = sbrk(0);
    char *mine = sbrk(3 * 4096);
    CHECK(mine == in_main);
    memset(mine, 1, 3 * 4096);
    char *block = malloc(1000);
    CHECK(block != NULL);
    memset(block, 2, 1000);
    CHECK(mine[0] == 1 && mine[3 * 4096 - 1] == 1);
    dprintf(1, "at start %ld, in main %ld\n", (long)(at_start - end), (long)(in_main - at_start));
    return 0;
}
