/*
 * Bare system calls whose results or arguments are wider or narrower than those of the C functions.
 *
 *   by_number slack   PR_GET_TIMERSLACK, whose result has 64 bits
 *   by_number filter  a filter that kills madvise(2), with upper bits set; then large memory
 *   by_number exit    the only thread frees much memory and exits with 7
 */
#include "check.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

static void *filled(size_t size)
{
    char *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    for (size_t page = 0; page < size; page += 4096)
        at[page] = 1;
    return at;
}

static void slack(void)
{
    const long some[] = {5000000000, 3000000000, 4294967295};
    for (size_t at = 0; at < sizeof some / sizeof *some; at++) {
        CHECK(prctl(PR_SET_TIMERSLACK, some[at], 0, 0, 0) == 0);
        printf("%ld\n", syscall(SYS_prctl, PR_GET_TIMERSLACK, 0, 0, 0, 0));
    }
}

static void filter(void)
{
    struct sock_filter steps[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof steps / sizeof *steps, steps};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(syscall(SYS_seccomp, 1L << 32 | SECCOMP_SET_MODE_FILTER, 0, &program) == 0);
    filled(64 * MIB);
    puts("lives");
}

int main(int count, char **arguments)
{
    CHECK(count == 2);
    if (!strcmp(arguments[1], "slack"))
        slack();
    else if (!strcmp(arguments[1], "filter"))
        filter();
    else {
        CHECK(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
        CHECK(munmap(filled(320 * MIB), 320 * MIB) == 0);
        syscall(SYS_exit, 7);
    }
    return 0;
}
