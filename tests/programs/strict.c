/*
 * A program that installs an allow-list of its own allocator's calls; any other call kills it.
 *
 *   strict HOW [WHAT...]
 *
 * HOW: prctl, syscall, or listener (whose result is a descriptor). WHAT: `advice` also permits
 * madvise(2), and `all` everything but ptrace(2); `twice` installs a second filter; `small`
 * disables huge pages; `exec` PROGRAM becomes another program.
 */
#include "check.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

static const int needed[] = {
    SYS_brk, SYS_mmap, SYS_munmap, SYS_mremap, SYS_mprotect, SYS_futex, SYS_read, SYS_write, SYS_exit, SYS_exit_group,
    SYS_rt_sigreturn, SYS_rt_sigaction, SYS_rt_sigprocmask, SYS_clone, SYS_clone3, SYS_wait4, SYS_set_robust_list,
    SYS_rseq,
};
/* Calls that a second filter needs; and those of a program start, where a debug build of the
 * library checks a descriptor before it closes it. */
static const int further[] = {SYS_prctl, SYS_seccomp};
static const int starting[] = {
    SYS_execve, SYS_openat, SYS_close, SYS_newfstatat, SYS_pread64, SYS_access, SYS_arch_prctl, SYS_set_tid_address,
    SYS_prlimit64, SYS_getrandom, SYS_readlink, SYS_readlinkat, SYS_fcntl,
};

static unsigned short allow(struct sock_filter *steps, unsigned short count, const int *calls, size_t length)
{
    for (size_t at = 0; at < length; at++) {
        steps[count++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)calls[at], 0, 1);
        steps[count++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    }
    return count;
}

static void install(const char *how, int more, int advice, int all, int exec)
{
    static const int madvise_too[] = {SYS_madvise}, never[] = {SYS_ptrace};
    struct sock_filter steps[128];
    unsigned short count = 0;
    steps[count++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    count = allow(steps, count, needed, COUNT(needed));
    if (more)
        count = allow(steps, count, further, COUNT(further));
    if (advice)
        count = allow(steps, count, madvise_too, 1);
    if (exec)
        count = allow(steps, count, starting, COUNT(starting));
    unsigned otherwise = SECCOMP_RET_KILL_PROCESS;
    if (all) {
        count = allow(steps, 1, never, 1);
        steps[count - 1].k = otherwise;
        otherwise = SECCOMP_RET_ALLOW;
    }
    steps[count++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, otherwise);
    struct sock_fprog filter = {count, steps};
    if (!strcmp(how, "prctl"))
        CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0) == 0);
    else if (!strcmp(how, "syscall"))
        CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter) == 0);
    else
        CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &filter) > 0);
}

static void small_blocks(void)
{
    static char *blocks[8000];
    for (size_t at = 0; at < COUNT(blocks); at++) {
        CHECK((blocks[at] = malloc(1000)));
        paint(blocks[at], 1000, (uint8_t)at);
    }
    for (size_t at = 0; at < COUNT(blocks); at++) {
        check_paint(blocks[at], 1000, (uint8_t)at);
        free(blocks[at]);
    }
}

static void large_blocks(void)
{
    for (int round = 0; round < 3; round++) {
        size_t size = round ? 20 * MIB : 160 * MIB;
        char *block = malloc(size);
        CHECK(block);
        memset(block, 1, size);
        free(block);
        CHECK((block = calloc(34, MIB)));
        check_zero(block, 34 * MIB);
        memset(block, 1, 34 * MIB);
        free(block);
        CHECK((block = aligned_alloc(2 * MIB, 8 * MIB)));
        memset(block, 1, 8 * MIB);
        free(block);
    }
    /* Holes smaller than a huge page. */
    static char *blocks[200];
    for (int round = 0; round < 3; round++) {
        for (size_t at = 0; at < COUNT(blocks); at++) {
            size_t size = 130 * KIB + at * 301;
            CHECK((blocks[at] = round ? calloc(1, size) : malloc(size)));
            if (round)
                check_zero(blocks[at], size);
            paint(blocks[at], size, (uint8_t)at);
        }
        for (size_t first = 0; first < 2; first++)
            for (size_t at = first; at < COUNT(blocks); at += 2) {
                check_paint(blocks[at], 130 * KIB + at * 301, (uint8_t)at);
                free(blocks[at]);
            }
    }
}

static void resized(void)
{
    char *block = NULL;
    for (size_t size = 100; size < 60 * MIB; size *= 3) {
        CHECK((block = realloc(block, size)));
        memset(block + size / 3, 1, size - size / 3);
    }
    /* A block behind it forces a move. */
    char *behind = malloc(3 * MIB);
    CHECK((block = realloc(block, 80 * MIB)));
    block[80 * MIB - 1] = 1;
    for (size_t size = 50 * MIB; size > 50; size /= 3)
        CHECK((block = realloc(block, size)));
    free(block);
    free(behind);
}

static void mapped(void)
{
    int prot = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
    for (int round = 0; round < 2; round++) {
        size_t size = round ? 10 * MIB : 140 * MIB;
        char *memory = mmap(NULL, size, prot, flags, -1, 0);
        CHECK(memory != MAP_FAILED);
        memset(memory, 1, size);
        CHECK((memory = mremap(memory, size, 2 * size, MREMAP_MAYMOVE)) != MAP_FAILED);
        memory[2 * size - 1] = 1;
        CHECK((memory = mremap(memory, 2 * size, size - MIB, MREMAP_MAYMOVE)) != MAP_FAILED);
        CHECK(munmap(memory, size - MIB) == 0);
        /* As long as several threads would populate, and beyond the credit. */
        CHECK((memory = mmap(NULL, 80 * MIB, prot, flags | MAP_POPULATE, -1, 0)) != MAP_FAILED);
        check_zero(memory, 80 * MIB);
        CHECK(munmap(memory, 80 * MIB) == 0);
        for (int at = 0; at < 64; at++) {
            CHECK((memory = mmap(NULL, 512 * KIB, prot, flags, -1, 0)) != MAP_FAILED);
            memset(memory, 1, 512 * KIB);
        }
    }
    char *end = sbrk(4 * MIB);
    CHECK(end != (char *)-1);
    memset(end, 1, 4 * MIB);
}

static void all(void)
{
    small_blocks();
    large_blocks();
    resized();
    mapped();
    /* Not malloc_trim(3): glibc's own releases memory by madvise(2). */
}

static pthread_barrier_t ended;

static void *threads_own(void *unused)
{
    /* Each above glibc's highest threshold: to shrink the arena of a thread it opens a file. */
    char *block = malloc(100 * MIB);
    CHECK(block);
    memset(block, 1, 100 * MIB);
    CHECK((block = realloc(block, 180 * MIB)));
    memset(block, 1, 180 * MIB);
    free(block);
    CHECK((block = calloc(40, MIB)));
    check_zero(block, 40 * MIB);
    free(block);
    CHECK((block = malloc(1000)));
    pthread_barrier_wait(&ended);
    /* To end a thread the C library releases its stack by madvise(2). */
    for (;;)
        pthread_barrier_wait(&ended);
    return unused;
}

int main(int argc, char **argv)
{
    CHECK(argc > 1);
    int more = 0, advice = 0, any = 0, twice = 0, exec = 0;
    for (int at = 2; at < argc && !exec; at++) {
        more |= !strcmp(argv[at], "twice");
        twice |= !strcmp(argv[at], "twice");
        advice |= !strcmp(argv[at], "advice");
        any |= !strcmp(argv[at], "all");
        if (!strcmp(argv[at], "small"))
            CHECK(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
        if (!strcmp(argv[at], "exec"))
            exec = at + 1;
    }
    CHECK(strcmp(argv[1], "none") == 0 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    /* Allocated before the filter and used after it. */
    char *early = malloc(200 * MIB), *other = malloc(150 * MIB);
    CHECK(early && other);
    memset(early, 1, 200 * MIB);
    memset(other, 1, 150 * MIB);
    if (strcmp(argv[1], "none"))
        install(argv[1], more, advice, any, exec);
    if (twice)
        install(argv[1], 1, advice, any, exec);
    if (exec) {
        execv(argv[exec], argv + exec);
        CHECK(!"exec");
    }
    free(early);
    CHECK((other = realloc(other, 300 * KIB)));
    free(other);
    all();
    for (int round = 0; round < 2; round++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            all();
            _exit(7);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 7);
    }
    pthread_t thread;
    CHECK(pthread_barrier_init(&ended, NULL, 2) == 0);
    CHECK(pthread_create(&thread, NULL, threads_own, NULL) == 0);
    pthread_barrier_wait(&ended);
    small_blocks();
    CHECK(write(1, "went on\n", 8) == 8);
    return 0;
}
