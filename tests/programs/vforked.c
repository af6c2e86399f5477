/*
 * A vfork(2) child that outlives its parent: it kills the waiting parent, and continues in the
 * parent's memory.
 */
#include "check.h"

#include <signal.h>
#include <sys/mman.h>

static char *memory;
static const size_t length = 300 * MIB;

int main(void)
{
    memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED && madvise(memory, length, MADV_NOHUGEPAGE) == 0);
    for (size_t at = 0; at < length; at += 4096)
        memory[at] = (char)(at >> 12);
    pid_t parent = getpid();
    if (vfork() == 0) {
        kill(parent, SIGKILL);
        while (getppid() == parent)
            usleep(1000);
        /* Longer than the reaper's poll interval. */
        for (int round = 0; round < 20; round++) {
            usleep(20000);
            for (size_t at = 0; at < length; at += 4096)
                CHECK(memory[at] == (char)(at >> 12));
        }
        dprintf(1, "checked\n");
        _exit(0);
    }
    return 1;
}
