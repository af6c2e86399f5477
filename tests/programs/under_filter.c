// Puts a seccomp filter on itself and becomes another program: under_filter allow|CALL PROGRAM ARG...
// `allow` lets everything through; `mremap`, `memfd_create`, `ioctl` and `ptrace` end a process that makes that call.
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    static const struct { const char *name; unsigned number; } calls[] = {
        {"mremap", SYS_mremap}, {"memfd_create", SYS_memfd_create}, {"ioctl", SYS_ioctl}, {"ptrace", SYS_ptrace}};
    unsigned number = SYS_mremap, refused = SECCOMP_RET_ALLOW;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        if (strcmp(argv[1], calls[i].name) == 0) {
            number = calls[i].number;
            refused = SECCOMP_RET_KILL_PROCESS;
        }
    struct sock_filter steps[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, refused),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof steps / sizeof *steps, steps};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter)) {
        perror("seccomp");
        return 3;
    }
    execvp(argv[2], argv + 2);
    perror(argv[2]);
    return 127;
}
