/* Threads allocate before and behind a filter that kills for all but what an allocator needs. */
#include "check.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

static void *churn(void *unused)
{
    void *blocks[40];
    for (int round = 0; round < 200; round++) {
        for (size_t i = 0; i < 40; i++) {
            blocks[i] = malloc(i * 4000 + 1);
            CHECK(blocks[i] != NULL);
            memset(blocks[i], 1, i * 4000 + 1);
        }
        for (size_t i = 0; i < 40; i++)
            free(blocks[i]);
        usleep(500);
    }
    return unused;
}

int main(void)
{
    static const int allowed[] = {
        SYS_read, SYS_write, SYS_mmap, SYS_munmap, SYS_mremap, SYS_mprotect, SYS_brk, SYS_futex, SYS_exit,
        SYS_exit_group, SYS_clock_nanosleep, SYS_rt_sigprocmask, SYS_madvise, SYS_rt_sigreturn,
        SYS_set_robust_list, SYS_rseq, SYS_getrandom, SYS_clone3, SYS_clone, SYS_gettid, SYS_sched_yield,
    };
    enum { COUNT = sizeof allowed / sizeof *allowed };
    struct sock_filter filter[2 * COUNT + 2] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
    };
    for (int i = 0; i < COUNT; i++) {
        filter[1 + 2 * i] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, allowed[i], 0, 1);
        filter[2 + 2 * i] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    }
    filter[2 * COUNT + 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    struct sock_fprog program = {2 * COUNT + 2, filter};
    pthread_t threads[3];
    memset(malloc(50 * MIB), 1, 50 * MIB);
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&threads[i], NULL, churn, NULL) == 0);
    usleep(20000);
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0);
    CHECK(pthread_create(&threads[2], NULL, churn, NULL) == 0);
    churn(NULL);
    for (int i = 0; i < 3; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(write(1, "right\n", 6) == 6);
    _exit(0);
}
