/*
 * filters_all ROUNDS: in each round one thread maps, fills and frees memory, and another one installs
 * a filter on both (SECCOMP_FILTER_FLAG_TSYNC), which lets pass the calls that the first one makes.
 */
#include "check.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static const int permitted[] = {
    SYS_mmap,   SYS_munmap,       SYS_mremap,         SYS_mprotect, SYS_madvise,         SYS_brk,
    SYS_mlock,  SYS_munlock, SYS_futex,        SYS_exit,           SYS_write,    SYS_rt_sigreturn,    SYS_exit_group,
    SYS_getpid, SYS_gettid,       SYS_tgkill,         SYS_sched_yield, SYS_restart_syscall,
    /* The exit of a thread. */
    SYS_rt_sigprocmask, SYS_set_robust_list,
};
enum { CALLS = sizeof permitted / sizeof *permitted };

static volatile int step;
static int file;

static void tell(int number, siginfo_t *info, void *context)
{
    (void)number, (void)context;
    char text[] = "refused 000\n";
    for (int at = 10, call = info->si_syscall; at >= 8; at--, call /= 10)
        text[at] = (char)('0' + call % 10);
    (void)!write(1, text, sizeof text - 1);
    _exit(77);
}

static void *use_memory(void *unused)
{
    (void)unused;
    const int all = PROT_READ | PROT_WRITE;
    /* The first calls of the thread settle what the C library does once. */
    for (int round = 0, last = -1; step < 3 && round != last; round++) {
        if (step == 0)
            step = 1;
        if (step == 2 && last < 0)
            last = round + 3;
        size_t bytes = (size_t)(4 + round % 3 * 4) * MIB;
        char *own = mmap(NULL, bytes, all, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        char *shared = mmap(NULL, 4 * MIB, all, MAP_SHARED, file, 0);
        CHECK(own != MAP_FAILED && shared != MAP_FAILED);
        for (size_t at = 0; at < bytes; at += 64 * KIB)
            own[at] = 1;
        char *block = malloc(bytes + (size_t)round * KIB);
        CHECK(block);
        block[0] = 1;
        CHECK(mlock(own, MIB) == 0 && munlock(own, MIB) == 0);
        CHECK(madvise(own, bytes, MADV_DONTNEED) == 0 || errno == EINVAL);
        own = mremap(own, bytes, 2 * bytes, MREMAP_MAYMOVE);
        CHECK(own != MAP_FAILED);
        free(block);
        CHECK(munmap(own, 2 * bytes) == 0 && munmap(shared, 4 * MIB) == 0);
    }
    return NULL;
}

static void install(void)
{
    struct sock_filter steps[2 * CALLS + 2];
    unsigned short count = 0;
    steps[count++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (unsigned at = 0; at < CALLS; at++) {
        steps[count++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)permitted[at], 0, 1);
        steps[count++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    }
    steps[count++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP);
    struct sock_fprog filter = {count, steps};
    CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &filter) == 0);
}

static void round_of(int delay)
{
    struct sigaction action = {.sa_sigaction = tell, .sa_flags = SA_SIGINFO};
    CHECK(sigaction(SIGSYS, &action, NULL) == 0);
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, use_memory, NULL) == 0);
    while (!step)
        ;
    for (volatile int wait = 0; wait < delay; wait++)
        ;
    install();
    step = 2;
    CHECK(pthread_join(thread, NULL) == 0);
    _exit(0);
}

int main(int count, char **arguments)
{
    CHECK(count == 2);
    file = (int)syscall(SYS_memfd_create, "some", 0);
    CHECK(file >= 0 && ftruncate(file, 4 * MIB) == 0);
    int bad = 0;
    for (int round = 0; round < atoi(arguments[1]); round++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (!child)
            round_of(round % 300 * 5000);
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        bad += status != 0;
    }
    printf("bad %d\n", bad);
    return 0;
}
