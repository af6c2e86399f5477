/*
 * A seccomp filter that kills a program which creates a process, calls getpid, or opens a file.
 *
 *   filtered exec PROGRAM [ARGUMENT...]   inherited by a program, which may open files
 *   filtered prctl MIB                    installed by prctl(2), before an allocation of MIB
 *   filtered syscall MIB                  installed by syscall(2)
 *   filtered refused MIB                  refused by the kernel
 *   filtered shared MIB                   the same with shared memory, by a child, too
 */
#include "check.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static const int forbidden[] = {SYS_clone, SYS_clone3, SYS_unshare, SYS_getpid, SYS_wait4,
                                SYS_setsid, SYS_capset, SYS_openat};

static void install(const char *how)
{
    int files = !strcmp(how, "exec");
    struct sock_filter steps[64];
    unsigned short count = 0;
    steps[count++] =
        (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (unsigned at = 0; at < sizeof forbidden / sizeof *forbidden; at++) {
        if (files && (forbidden[at] == SYS_openat || forbidden[at] == SYS_getpid))
            continue;
        steps[count++] =
            (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)forbidden[at], 0, 1);
        steps[count++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    }
    steps[count++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog filter = {count, steps};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    if (!strcmp(how, "syscall"))
        CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter) == 0);
    else if (!strcmp(how, "refused"))
        CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, NULL, 0, 0) == -1 && errno == EFAULT);
    else
        CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0) == 0);
}

static char *map_shared(size_t length)
{
    char *memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    memory[0] = memory[length - 1] = 1;
    return memory;
}

static void shared(size_t length)
{
    char *before = map_shared(length), *kept = map_shared(length);
    pid_t child = fork();
    CHECK(child >= 0);
    int status;
    if (child != 0)
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    install("prctl");
    CHECK(munmap(before, length) == 0);
    char *after = map_shared(length);
    CHECK(mlock(after, 4 * MIB) == 0);
    CHECK(munmap(after, length) == 0);
    CHECK(kept[0] == 1 && kept[length - 1] == 1);
    if (child == 0)
        _exit(0);
}

int main(int argc, char **argv)
{
    CHECK(argc > 2);
    if (!strcmp(argv[1], "shared")) {
        shared((size_t)atol(argv[2]) * MIB);
        return 0;
    }
    install(argv[1]);
    if (!strcmp(argv[1], "exec")) {
        execv(argv[2], argv + 2);
        CHECK(!"exec");
    }
    size_t length = (size_t)atol(argv[2]) * MIB;
    char *memory = malloc(length);
    CHECK(memory);
    memory[length - 1] = 1;
    free(memory);
    CHECK(write(1, "went on\n", 8) == 8);
    return 0;
}
