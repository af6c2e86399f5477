/*
 * A program that attacks its reaper, or the process that scans its memory, to exceed its own rights:
 * both share its memory.
 *
 *   escalate dumpable         prints whether it is dumpable, at its start and after it has dropped root
 *   escalate handler          installs signal handlers, and prints how often they ran
 *   escalate attack CALL      drops root by bare calls, installs a filter, rewrites and wakes the reaper
 *   escalate watch CALL       drops root by bare calls, and rewrites the scanner
 *   escalate change CALL MIB  uses MIB, changes its user by CALL, and requests 256 MiB more
 */
#include "check.h"

#include <linux/filter.h>
#include <linux/futex.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#define NOBODY 65534

static void drop_root(void)
{
    if (geteuid() == 0)
        CHECK(setresgid(NOBODY, NOBODY, NOBODY) == 0 && setresuid(NOBODY, NOBODY, NOBODY) == 0);
}

static int dumpable(void)
{
    printf("dumpable=%d", prctl(PR_GET_DUMPABLE));
    CHECK(prctl(PR_SET_DUMPABLE, 0) == 0);
    printf(" unset=%d", prctl(PR_GET_DUMPABLE));
    CHECK(prctl(PR_SET_DUMPABLE, 1) == 0);
    printf(" set=%d", prctl(PR_GET_DUMPABLE));
    drop_root();
    printf(" dropped=%d\n", prctl(PR_GET_DUMPABLE));
    return 0;
}

/* Installs a filter that answers one call with `answer`. */
static void install_filter(unsigned call, unsigned answer)
{
    struct sock_filter steps[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, answer),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof steps / sizeof *steps, steps};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0) == 0);
}

static void wait_at(const char *place)
{
    printf("%s\n", place);
    fflush(stdout);
    CHECK(getchar() == '\n');
}

static int change(const char *call, size_t mib)
{
    char *memory = malloc(mib << 20);
    CHECK(memory);
    memory[0] = 1;
    wait_at("large");
    if (!strcmp(call, "setuid"))
        CHECK(setuid(NOBODY) == 0);
    else if (!strcmp(call, "seteuid"))
        CHECK(seteuid(NOBODY) == 0);
    else if (!strcmp(call, "setreuid"))
        CHECK(setreuid(NOBODY, NOBODY) == 0);
    else if (!strcmp(call, "setresuid"))
        CHECK(setresuid(NOBODY, NOBODY, NOBODY) == 0);
    else if (!strcmp(call, "setgid"))
        CHECK(setgid(NOBODY) == 0);
    else if (!strcmp(call, "setegid"))
        CHECK(setegid(NOBODY) == 0);
    else if (!strcmp(call, "setregid"))
        CHECK(setregid(NOBODY, NOBODY) == 0);
    else if (!strcmp(call, "setresgid"))
        CHECK(setresgid(NOBODY, NOBODY, NOBODY) == 0);
    else if (!strcmp(call, "number"))
        CHECK(syscall(SYS_setresuid, NOBODY, NOBODY, NOBODY) == 0);
    else if (!strcmp(call, "nothing"))
        CHECK(setuid(getuid()) == 0 && setresgid(-1, getegid(), -1) == 0 && seteuid(geteuid()) == 0);
    else if (!strcmp(call, "filtered")) {
        install_filter(SYS_getpid, SECCOMP_RET_KILL_PROCESS);
        install_filter(SYS_futex, SECCOMP_RET_KILL_PROCESS);
        CHECK(setresuid(NOBODY, NOBODY, NOBODY) == 0);
    } else {
        return 2;
    }
    wait_at("changed");
    char *more = malloc(257 << 20);
    CHECK(more);
    more[0] = 1;
    wait_at("larger");
    return 0;
}

static _Atomic int handled;

static void count(int signal)
{
    (void)signal;
    handled++;
}

static int handler(void)
{
    signal(SIGTERM, count);
    signal(SIGHUP, count);
    signal(SIGUSR1, count);
    printf("ready\n");
    fflush(stdout);
    while (getchar() == EOF && errno == EINTR)
        clearerr(stdin);
    printf("handled=%d\n", handled);
    return 0;
}

#ifdef __x86_64__

static struct {
    long number, arguments[6];
} chosen;
static _Atomic long ran, returned, refused, reaper;

static inline long by_hand(long number, long a, long b, long c, long d, long e, long f)
{
    long answer;
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(answer)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return answer;
}

#ifndef CLONE_PIDFD
#define CLONE_PIDFD 0x1000
#endif
/* Like the library's own threads, and such that the kernel returns a descriptor for each. */
#define THREAD                                                                            \
    (CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM |    \
     CLONE_CHILD_CLEARTID)

static int asleep;
static char stack[1024];
static int pidfd;

/* Creates a thread that sleeps from its first instruction. */
static long make_thread(long flags)
{
    long answer;
    register long r10 __asm__("r10") = 0, r8 __asm__("r8") = 0;
    __asm__ volatile("syscall\n\t"
                     "test %%rax, %%rax\n\t"
                     "jnz 2f\n\t"
                     "1: mov %[futex], %%eax\n\t"
                     "lea %[asleep], %%rdi\n\t"
                     "xor %%esi, %%esi\n\t"
                     "xor %%edx, %%edx\n\t"
                     "xor %%r10d, %%r10d\n\t"
                     "syscall\n\t"
                     "jmp 1b\n\t"
                     "2:"
                     : "=a"(answer)
                     : "a"(SYS_clone), "D"(flags), "S"(stack + sizeof stack), "d"(&pidfd), "r"(r10),
                       "r"(r8), [futex] "i"(SYS_futex), [asleep] "m"(asleep)
                     : "rcx", "r11", "memory");
    return answer;
}

/* Code for the reaper to run, on whatever stack it has. */
__attribute__((noreturn, force_align_arg_pointer)) static void attack(void)
{
    ran = reaper;
    const long *a = chosen.arguments;
    if (chosen.number == SYS_clone && a[0] & CLONE_THREAD) {
        long made = 0;
        for (int round = 0; round < 1000; round++)
            made += make_thread(a[0]) > 0;
        returned = made < 9 ? made : 9;
        for (;;)
            by_hand(SYS_exit_group, 0, 0, 0, 0, 0, 0);
    }
    long answer = by_hand(chosen.number, a[0], a[1], a[2], a[3], a[4], a[5]);
    refused = answer == -EPERM;
    returned = 1;
    for (;;)
        by_hand(SYS_exit_group, 0, 0, 0, 0, 0, 0);
}

static char path[] = "/etc/shadow", text[64];
static struct iovec here = {text, sizeof text}, there = {text, sizeof text};

static const struct {
    const char *name;
    long number, arguments[6];
} calls[] = {
    {"futex", SYS_futex, {(long)text, FUTEX_WAKE, 1}},
    {"openat", SYS_openat, {AT_FDCWD, (long)path, O_RDONLY}},
    {"open", SYS_open, {(long)path, O_RDONLY}},
    {"kill", SYS_kill, {1, 0}},
    {"tgkill", SYS_tgkill, {1, 1, 0}},
    {"ptrace", SYS_ptrace, {16, 1}},
    {"socket", SYS_socket, {1, 1, 0}},
    {"execve", SYS_execve, {(long)path, 0, 0}},
    {"fork", SYS_fork, {0}},
    {"clone", SYS_clone, {SIGCHLD, 0, 0}},
    {"threads", SYS_clone, {THREAD}},
    {"counted-threads", SYS_clone, {THREAD | CLONE_PIDFD}},
    {"clone3", SYS_clone3, {(long)text, 64}},
    {"setuid", SYS_setuid, {0}},
    {"mmap", SYS_mmap, {0, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0}},
    {"mprotect", SYS_mprotect, {0, 0, 0}},
    {"mremap", SYS_mremap, {0, 4096, 4096, 0}},
    {"process_vm_readv", SYS_process_vm_readv, {1, (long)&here, 1, (long)&there, 1, 0}},
    {"read", SYS_read, {2, (long)text, 1}},
    {"write", SYS_write, {1, (long)text, 0}},
    {"prctl", SYS_prctl, {PR_SET_PDEATHSIG, 0}},
    {"dumpable", SYS_prctl, {PR_SET_DUMPABLE, 0}},
    {"unshare-user", SYS_unshare, {CLONE_NEWUSER}},
    {"setns", SYS_setns, {0, 0}},
    {"bpf", SYS_bpf, {0, 0, 0}},
    {"madvise-other", SYS_madvise, {0, 0, MADV_HUGEPAGE}},
    {"getpid", SYS_getpid, {0}},
    {"pidfd_open", 434, {1, 0}},
    {"io_uring_setup", 425, {1, 0}},
    {"unlink", SYS_unlink, {(long)text}},
    {"mount", SYS_mount, {0, 0, 0, 0}},
    {"keyctl", SYS_keyctl, {0}},
    {"rt_sigaction", SYS_rt_sigaction, {SIGTERM, 0, 0, 8}},
    {"x32", 0x40000000 + SYS_getpid, {0}},
};

/* Fills a page range of the library with jumps to `attack` from any entry point. */
static void rewrite(unsigned char *start, unsigned char *end)
{
    for (unsigned char *at = start; at < end; at++)
        *at = 0x90;
    /* mov rax, attack; jmp rax */
    unsigned char jump[12] = {0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xe0};
    void (*to)(void) = attack;
    for (unsigned at = 0; at < 8; at++)
        jump[2 + at] = (unsigned char)((unsigned long)to >> (8 * at));
    for (unsigned at = 0; at < 12; at++)
        end[(long)at - 12] = jump[at];
}

static void choose(const char *name)
{
    unsigned at = 0;
    while (strcmp(calls[at].name, name) != 0)
        CHECK(++at < sizeof calls / sizeof *calls);
    chosen.number = calls[at].number;
    memcpy(chosen.arguments, calls[at].arguments, sizeof chosen.arguments);
}

/* Drops root by bare calls, as in other runtimes: the C library's functions would end the reaper. */
static void drop_root_barely(void)
{
    if (geteuid() == 0)
        CHECK(by_hand(SYS_setresgid, NOBODY, NOBODY, NOBODY, 0, 0, 0) == 0 &&
              by_hand(SYS_setresuid, NOBODY, NOBODY, NOBODY, 0, 0, 0) == 0);
}

/* The library's text. */
static unsigned char *start[8], *end[8];
static unsigned parts;

static void find_library(void)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    while (maps && fgets(line, sizeof line, maps)) {
        unsigned long from, to;
        char rights[5];
        if (strstr(line, "libjumbo_preload.so") &&
            sscanf(line, "%lx-%lx %4s", &from, &to, rights) == 3 && rights[2] == 'x' && parts < 8) {
            start[parts] = (unsigned char *)from;
            end[parts++] = (unsigned char *)to;
        }
    }
    CHECK(maps && parts > 0);
    fclose(maps);
}

/* Replaces the library by jumps to `attack`, wakes the waiters of a word, and prints what came of it.
 * From here on nothing may call interposed functions. */
__attribute__((noreturn)) static void take_over(int *word, int max_rounds)
{
    for (unsigned part = 0; part < parts; part++) {
        unsigned long length = (unsigned long)(end[part] - start[part]);
        long answer = by_hand(SYS_mprotect, (long)start[part], (long)length,
                              PROT_READ | PROT_WRITE | PROT_EXEC, 0, 0, 0);
        if (answer != 0)
            by_hand(SYS_exit_group, 98, 0, 0, 0, 0, 0);
        rewrite(start[part], end[part]);
    }
    by_hand(SYS_futex, (long)word, FUTEX_WAKE, 0x7fffffff, 0, 0, 0);
    /* Until the code has run; it never returns to valid code. */
    struct timespec moment = {0, 1000000};
    for (int round = 0; round < 10000 && !ran; round++)
        by_hand(SYS_nanosleep, (long)&moment, 0, 0, 0, 0, 0);
    for (int round = 0; round < max_rounds && !returned; round++)
        by_hand(SYS_nanosleep, (long)&moment, 0, 0, 0, 0, 0);
    char out[] = "ran=0000000000 returned=0 refused=0\n";
    long digits = ran;
    for (char *digit = out + 13; digit >= out + 4; digit--, digits /= 10)
        *digit = (char)('0' + digits % 10);
    out[24] = (char)('0' + returned);
    out[34] = (char)('0' + refused);
    by_hand(SYS_write, 1, (long)out, sizeof out - 1, 0, 0, 0);
    for (;;)
        by_hand(SYS_exit_group, 0, 0, 0, 0, 0, 0);
}

static int attacking(const char *name)
{
    choose(name);
    int *word;
    CHECK(prctl(40 /* PR_GET_TID_ADDRESS */, &word) == 0);
    drop_root_barely();
    CHECK(prctl(PR_SET_DUMPABLE, 1) == 0);
    install_filter(SYS_kill, SECCOMP_RET_ERRNO | EPERM);
    CHECK(kill(getppid(), 0) == -1 && open(path, O_RDONLY) == -1);

    /* The reaper is the process of that name that maps the library. */
    find_library();
    printf("ready\n");
    fflush(stdout);
    char number[32] = "";
    CHECK(fgets(number, sizeof number, stdin));
    reaper = atol(number);

    /* An expected result comes, however busy the host is. */
    take_over(word, !strcmp(name, "futex") || !strcmp(name, "counted-threads") ? 10000 : 50);
}

/* Touches memory, which is scanned, and returns the process that does. */
static long scanner(void)
{
    const size_t bytes = 256 * MIB;
    char path[64], name[32] = "", *memory =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    int child = 0, scans = 0;
    /* Some scans come first: then it has settled. */
    for (size_t round = 0; round < 3000 && scans < 30; round++) {
        for (size_t at = 0; at < MIB; at += 4 * KIB)
            memory[(round * MIB + at) % bytes] = 1;
        usleep(10000);
        snprintf(path, sizeof path, "/proc/self/task/%d/children", getpid());
        FILE *children = fopen(path, "r");
        int found = children ? fscanf(children, "%d", &child) : 0;
        if (children)
            fclose(children);
        snprintf(path, sizeof path, "/proc/%d/comm", child);
        FILE *comm = found == 1 ? fopen(path, "r") : NULL;
        scans += comm && fgets(name, sizeof name, comm) && !strcmp(name, "jumbo-watch\n");
        if (comm)
            fclose(comm);
    }
    return scans ? child : 0;
}

static int attacking_scanner(const char *name)
{
    static int word;
    choose(name);
    find_library();
    reaper = scanner();
    CHECK(reaper != 0);
    drop_root_barely();
    take_over(&word, 10000);
}

#else
static int attacking(const char *name)
{
    (void)name;
    return 77;
}

static int attacking_scanner(const char *name)
{
    return attacking(name);
}
#endif

int main(int argc, char **argv)
{
    CHECK(argc > 1);
    if (!strcmp(argv[1], "dumpable"))
        return dumpable();
    if (!strcmp(argv[1], "handler"))
        return handler();
    if (!strcmp(argv[1], "change"))
        return change(argv[2], (size_t)atol(argv[3]));
    return strcmp(argv[1], "watch") ? attacking(argv[2]) : attacking_scanner(argv[2]);
}
