// Installs a seccomp filter and becomes another program: under_filter allow|container|CALL PROGRAM
// ARG... `allow` permits everything; `mremap`, `memfd_create`, `ioctl`, `ptrace` and `madvise` kill
// on that call. `container` refuses calls like the default profiles of container engines, and kills
// no process.
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
        {"mremap", SYS_mremap}, {"memfd_create", SYS_memfd_create}, {"ioctl", SYS_ioctl}, {"ptrace", SYS_ptrace}, {"madvise", SYS_madvise}};
    static const unsigned refused[] = {SYS_userfaultfd, SYS_setns, SYS_unshare, SYS_mount, SYS_bpf, SYS_keyctl,
        SYS_add_key, SYS_request_key, SYS_perf_event_open, SYS_process_vm_readv, SYS_process_vm_writev, SYS_kcmp,
        SYS_move_pages, SYS_mbind, SYS_set_mempolicy, SYS_get_mempolicy, SYS_pivot_root, SYS_open_by_handle_at,
        SYS_process_madvise, SYS_io_uring_setup};
    enum { REFUSED = sizeof refused / sizeof *refused };
    struct sock_filter steps[2 * REFUSED + 8] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))};
    size_t count = 1;
    void add(unsigned number, unsigned answer) {
        steps[count++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1);
        steps[count++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, answer);
    }
    if (strcmp(argv[1], "container") == 0) {
        for (size_t i = 0; i < REFUSED; i++) add(refused[i], SECCOMP_RET_ERRNO | EPERM);
        add(SYS_clone3, SECCOMP_RET_ERRNO | ENOSYS);
    }
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        if (strcmp(argv[1], calls[i].name) == 0) add(calls[i].number, SECCOMP_RET_KILL_PROCESS);
    steps[count++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog filter = {count, steps};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter)) {
        perror("seccomp");
        return 3;
    }
    execvp(argv[2], argv + 2);
    perror(argv[2]);
    return 127;
}
