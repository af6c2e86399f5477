/*
 * The word that the kernel clears at the main thread's end is elsewhere, or read-only.
 *
 *   moved address|page
 */
#include "check.h"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

static int elsewhere;

int main(int argc, char **argv)
{
    CHECK(argc > 1);
    int *word = NULL;
    CHECK(prctl(PR_GET_TID_ADDRESS, &word) == 0 && word);
    if (!strcmp(argv[1], "address")) {
        syscall(SYS_set_tid_address, &elsewhere);
        return 0;
    }
    uintptr_t page = (uintptr_t)word & ~(uintptr_t)(sysconf(_SC_PAGESIZE) - 1);
    /* From here on nothing of this thread can be written. */
    mprotect((void *)page, 1, PROT_READ);
#ifdef __x86_64__
    __asm__ volatile("syscall" : : "a"(SYS_exit_group), "D"(0) : "rcx", "r11");
#endif
    _exit(0);
}
