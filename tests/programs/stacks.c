/*
 * Allocates on stacks of a few KiB, which a library may leave meanwhile.
 *
 *   stacks fault     in a handler on the alternate stack: memory that the handler of a fault mends there
 *   stacks filter    in a handler on the alternate stack, behind a seccomp filter, with a timer
 *   stacks refuse    the same, where the filter refuses to block signals
 *   stacks many      in 100 threads at a time
 *   stacks local     on a stack that is an array of main(), and checks what is below it
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
#include <sys/time.h>
#include <ucontext.h>

enum { THREADS = 100, ROUNDS = 50, SMALL = 4 * KIB, WORDS = 256 };

static volatile long faults, ticks;

static void tick(int signal)
{
    volatile char frame[2048];
    memset((char *)frame, signal, sizeof frame);
    ticks++;
}

static void mend(int signal, siginfo_t *fault, void *context)
{
    volatile char frame[2048];
    memset((char *)frame, signal, sizeof frame);
    (void)context;
    faults++;
    char *page = (char *)((uintptr_t)fault->si_addr & ~(4 * KIB - 1));
    CHECK(mprotect(page, 4 * KIB, PROT_READ | PROT_WRITE) == 0);
}

static void allocate(size_t protected)
{
    char *block = malloc(40 * MIB);
    CHECK(block != NULL);
    memset(block, 7, 64 * KIB);
    char *page = (char *)(((uintptr_t)block + 4 * KIB - 1) & ~(4 * KIB - 1));
    CHECK(protected == 0 || mprotect(page, protected, PROT_NONE) == 0);
    block = realloc(block, 60 * KIB);
    CHECK(block != NULL && block[50 * KIB] == 7);
    page = (char *)(((uintptr_t)block + 4 * KIB - 1) & ~(4 * KIB - 1));
    CHECK(protected == 0 || mprotect(page, 48 * KIB, PROT_READ | PROT_WRITE) == 0);
    free(block);
}

static size_t protects;

static void work(int signal)
{
    volatile uint64_t frame[WORDS];
    (void)signal;
    for (int at = 0; at < WORDS; at++)
        frame[at] = at;
    long start = microseconds();
    for (int round = 0; round < ROUNDS || (!protects && microseconds() < start + 500000); round++)
        allocate(protects);
    for (int at = 0; at < WORDS; at++)
        CHECK(frame[at] == (uint64_t)at);
}

static void handle(int signal, int flags, void (*handler)())
{
    struct sigaction action = {.sa_flags = SA_ONSTACK | flags};
    action.sa_handler = handler;
    CHECK(sigaction(signal, &action, NULL) == 0);
}

static __thread ucontext_t thread, routine;

static void rounds(void)
{
    for (int round = 0; round < ROUNDS; round++) {
        allocate(0);
        char *memory = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(memory != MAP_FAILED);
        memory[0] = 1;
        CHECK(munmap(memory, 4 * MIB) == 0);
    }
}

static void *run(void *unused)
{
    char *stack = mmap(NULL, SMALL + 4 * KIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(stack != MAP_FAILED && mprotect(stack + 4 * KIB, SMALL, PROT_READ | PROT_WRITE) == 0);
    CHECK(getcontext(&routine) == 0);
    routine.uc_stack = (stack_t){.ss_sp = stack + 4 * KIB, .ss_size = SMALL};
    routine.uc_link = &thread;
    makecontext(&routine, rounds, 0);
    CHECK(swapcontext(&thread, &routine) == 0);
    return unused;
}

int main(int count, char **words)
{
    CHECK(count == 2);
    alarm(60);
    if (strcmp(words[1], "many") == 0) {
        pthread_t threads[THREADS];
        for (int i = 0; i < THREADS; i++)
            CHECK(pthread_create(&threads[i], NULL, run, NULL) == 0);
        for (int i = 0; i < THREADS; i++)
            CHECK(pthread_join(threads[i], NULL) == 0);
        puts("many");
        return 0;
    }
    if (strcmp(words[1], "local") == 0) {
        char local[8 * SMALL];
        memset(local, 7, sizeof local);
        CHECK(getcontext(&routine) == 0);
        routine.uc_stack = (stack_t){.ss_sp = local + sizeof local - SMALL, .ss_size = SMALL};
        routine.uc_link = &thread;
        makecontext(&routine, rounds, 0);
        CHECK(swapcontext(&thread, &routine) == 0);
        for (size_t at = 0; at < sizeof local - SMALL; at++)
            CHECK(local[at] == 7);
        puts("local");
        return 0;
    }
    stack_t stack = {.ss_size = 256 * KIB};
    stack.ss_sp = mmap(NULL, stack.ss_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(stack.ss_sp != MAP_FAILED && sigaltstack(&stack, NULL) == 0);
    handle(SIGUSR1, 0, work);
    if (strcmp(words[1], "fault") == 0) {
        protects = 64 * KIB;
        handle(SIGSEGV, SA_SIGINFO, mend);
        raise(SIGUSR1);
        CHECK(faults > 0);
    } else {
        struct sock_filter steps[] = {
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_rt_sigprocmask, 0, 1),
            BPF_STMT(BPF_RET | BPF_K, words[1][0] == 'r' ? SECCOMP_RET_ERRNO | EPERM : SECCOMP_RET_ALLOW),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
        struct sock_fprog filter = {4, steps};
        CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
        CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0);
        handle(SIGVTALRM, SA_RESTART, tick);
        struct itimerval often = {{0, 200}, {0, 200}}, never = {{0, 0}, {0, 0}};
        CHECK(setitimer(ITIMER_VIRTUAL, &often, NULL) == 0);
        /* On a busy host the kernel may not look at the timer before the work is done. */
        for (int round = 0; round < 100 && (round == 0 || ticks == 0); round++)
            raise(SIGUSR1);
        CHECK(setitimer(ITIMER_VIRTUAL, &never, NULL) == 0 && ticks > 0);
    }
    /* The whole stack is the program's again. */
    stack_t now;
    CHECK(sigaltstack(NULL, &now) == 0 && now.ss_sp == stack.ss_sp && now.ss_size == stack.ss_size);
    puts(words[1]);
    return 0;
}
