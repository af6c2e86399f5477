/*
 * A program that installs an allow-list that judges madvise(2) by its advice, and then changes the
 * mappings that it filled before.
 *
 *   judged FILTER WHAT
 *
 * FILTER: the advice that is allowed, as numbers with commas, `all`, or `none`. WHAT: `grow`,
 * `fixed` and `keep` (mremap(2)), `drop` and `free` (the program's own advice; not with `none`).
 */
#define _GNU_SOURCE
#include "check.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#define SIZE (64 * MIB)

static const int needed[] = {SYS_mmap, SYS_munmap, SYS_mremap, SYS_mprotect, SYS_brk, SYS_futex, SYS_write,
                             SYS_exit_group, SYS_rt_sigprocmask, SYS_rt_sigreturn};

static void install(char *advice)
{
    struct sock_filter steps[128];
    unsigned short count = 0;
#define STEP(...) steps[count++] = (struct sock_filter)__VA_ARGS__
#define ALLOW(value) \
    do { \
        STEP(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)(value), 0, 1)); \
        STEP(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)); \
    } while (0)
    STEP(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)));
    for (size_t at = 0; at < sizeof needed / sizeof *needed; at++)
        ALLOW(needed[at]);
    if (!strcmp(advice, "all")) {
        ALLOW(SYS_madvise);
    } else if (strcmp(advice, "none")) {
        unsigned short jump = count++;
        STEP(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])));
        for (char *next = strtok(advice, ","); next; next = strtok(NULL, ","))
            ALLOW(atoi(next));
        steps[jump] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 0,
                                                   (unsigned char)(count - jump - 1));
    }
    STEP(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS));
    struct sock_fprog filter = {count, steps};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0) == 0);
}

int main(int argc, char **argv)
{
    CHECK(argc > 2);
    int prot = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
    char *full = mmap(NULL, SIZE, prot, flags, -1, 0), *part = mmap(NULL, SIZE, prot, flags, -1, 0);
    char *place = mmap(NULL, SIZE, PROT_NONE, flags, -1, 0);
    CHECK(full != MAP_FAILED && part != MAP_FAILED && place != MAP_FAILED);
    memset(full, 1, SIZE);
    for (size_t at = 0; at < SIZE; at += 2 * 4096)
        part[at] = 1;
    usleep(200000);
    install(argv[1]);
    const char *what = argv[2];
    for (int round = 0; round < 2; round++) {
        char *memory = round ? part : full;
        size_t step = round ? 2 * 4096 : 4096;
        if (!strcmp(what, "drop") || !strcmp(what, "free")) {
            int drops = what[0] == 'd';
            CHECK(madvise(memory, SIZE, drops ? MADV_DONTNEED : MADV_FREE) == 0);
            for (size_t at = 0; at < SIZE; at += step)
                CHECK(memory[at] == 0 || !drops);
            memset(memory, 2, SIZE);
            continue;
        }
        char *moved = MAP_FAILED;
        size_t size = SIZE;
        if (!strcmp(what, "grow"))
            moved = mremap(memory, SIZE, size = 2 * SIZE, MREMAP_MAYMOVE);
        else if (!strcmp(what, "fixed"))
            moved = mremap(memory, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_FIXED, place);
        else if (!strcmp(what, "keep"))
            moved = mremap(memory, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, 0);
        CHECK(moved != MAP_FAILED);
        for (size_t at = 0; at < SIZE; at += step)
            CHECK(moved[at] == 1);
        memset(moved, 3, size);
        for (size_t at = 0; what[0] == 'k' && at < SIZE; at += 4096)
            CHECK(memory[at] == 0);
    }
    CHECK(write(1, "went on\n", 8) == 8);
    _exit(0);
}
