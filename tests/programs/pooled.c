/* Allocates ARG blocks of 20 MiB, fills them, and prints their placement in MiB, as the kernel
 * counts it. Then runs the case of the second argument, and checks all contents:
 * stay: waits for a line. fork: a child writes to every page, and the parent meanwhile, too.
 * filter-fork, root-fork, crowded-fork: the same, under a seccomp filter that allows all, in a
 * root without /proc, and at the limit of mappings. pages: protects and drops pages of aligned
 * blocks.
 * serve: a child fills blocks of its own, and reads its parent's. thread, c11: a second thread
 * reads them.
 * workers-fork, workers-thread: the same, after a large free. free: frees all and prints the
 * rest.
 * drop: drops a part of each block.
 * With a third argument a mapping of the program is where blocks might be placed. */
#include "check.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <threads.h>

enum { MOST = 1000 };
static const size_t SIZE = 20 * MIB;
static unsigned char *blocks[MOST];
static int count;

static size_t mapped(const char *field)
{
    char line[512];
    size_t sum = 0, kib, length = strlen(field);
    FILE *smaps = fopen("/proc/self/smaps", "r");
    CHECK(smaps != NULL);
    while (fgets(line, sizeof line, smaps) != NULL)
        if (strncmp(line, field, length) == 0 && sscanf(line + length, "%zu", &kib) == 1)
            sum += kib;
    fclose(smaps);
    return sum / 1024;
}

static void say(const char *when)
{
    printf("%s_hugetlb=%zu %s_thp=%zu\n", when, mapped("Private_Hugetlb:"), when, mapped("AnonHugePages:"));
    fflush(stdout);
}

static void check_all(void)
{
    for (int i = 0; i < count; i++)
        for (size_t at = 0; at < SIZE; at += 4096)
            CHECK(blocks[i][at] == (unsigned char)(i + at / 4096));
}

static void write_all(int add)
{
    for (int i = 0; i < count; i++)
        for (size_t at = 0; at < SIZE; at += 4096)
            blocks[i][at] = (unsigned char)(i + at / 4096 + add);
}

static void *look(void *nothing)
{
    check_all();
    return nothing;
}

static int look_c11(void *nothing)
{
    return look(nothing) != NULL;
}

/* Frees that jumbo does with several threads, which linger. */
static void free_much(void)
{
    size_t size = 2100 * MIB;
    char *much = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(much != MAP_FAILED && madvise(much, size, MADV_NOHUGEPAGE) == 0);
    memset(much, 1, size);
    CHECK(munmap(much, size) == 0);
}

static void filter(void)
{
    struct sock_filter allow[] = {BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    struct sock_fprog program = {1, allow};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) == 0);
}

static void crowd(void)
{
    enum { PAGES = 400000 };
    char *many = mmap(NULL, PAGES * 4096ul, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(many != MAP_FAILED);
    int at = 1;
    while (at < PAGES && mprotect(many + at * 4096ul, 4096, PROT_READ) == 0)
        at += 2;
    CHECK(at < PAGES);
}

/* The example of mprotect(2), and a guard page. */
static void pages(char *block, size_t size)
{
    CHECK(block != NULL && (uintptr_t)block % 4096 == 0);
    memset(block, 1, size);
    CHECK(mprotect(block, 4096, PROT_NONE) == 0 && mprotect(block, 4096, PROT_READ | PROT_WRITE) == 0);
    CHECK(madvise(block + 4096, 4096, MADV_DONTNEED) == 0 && block[4096] == 0 && block[0] == 1);
    CHECK((block = realloc(block, 2 * size)) != NULL && block[0] == 1);
    free(block);
}

int main(int argc, char **argv)
{
    CHECK(argc > 2);
    count = atoi(argv[1]);
    CHECK(count <= MOST);
    if (argc > 3 && strchr(argv[2], '-') == NULL) {
        /* A mapping at an address that the program chose at random, within jumbo's heap. */
        char *stray = mmap((void *)0x27f000000000, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(stray == (char *)0x27f000000000 && madvise(stray, MIB, MADV_DONTFORK) == 0);
    }
    for (int i = 0; i < count; i++)
        CHECK((blocks[i] = malloc(SIZE)) != NULL);
    write_all(0);
    say("full");
    const char *what = argv[2];
    if (strncmp(what, "workers-", 8) == 0) {
        free_much();
        what += 8;
    }
    if (strcmp(what, "filter-fork") == 0)
        filter();
    if (strcmp(what, "root-fork") == 0) {
        CHECK(argc > 3 && chroot(argv[3]) == 0 && chdir("/") == 0);
    }
    if (strcmp(what, "crowded-fork") == 0)
        crowd();
    if (strstr(what, "-fork") != NULL) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            write_all(1);
            _exit(blocks[0][0] == 1 ? 7 : 8);
        }
        write_all(0);
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
    } else if (strcmp(what, "pages") == 0) {
        for (size_t size = 8192; size < 16 * MIB; size *= 3) {
            size_t whole = (size + 4095) & ~(size_t)4095;
            void *block;
            CHECK(posix_memalign(&block, 4096, whole) == 0);
            pages(block, whole);
            pages(memalign(8192, whole), whole);
            pages(aligned_alloc(4096, whole), whole);
            pages(valloc(whole), whole);
            pages(pvalloc(size), whole);
        }
    } else if (strcmp(what, "stay") == 0) {
        getchar();
    } else if (strcmp(what, "fork") == 0) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            write_all(1);
            _exit(blocks[0][0] == 1 ? 7 : 8);
        }
        write_all(0);
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
        say("then");
    } else if (strcmp(what, "serve") == 0) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            for (int i = 0; i < 5; i++) {
                char *block = malloc(SIZE);
                CHECK(block != NULL);
                memset(block, i, SIZE);
            }
            say("child");
            check_all();
            _exit(7);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
        say("then");
    } else if (strcmp(what, "c11") == 0) {
        thrd_t thread;
        CHECK(thrd_create(&thread, look_c11, NULL) == thrd_success);
        CHECK(thrd_join(thread, NULL) == thrd_success);
        say("then");
    } else if (strcmp(what, "thread") == 0) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, look, NULL) == 0);
        CHECK(pthread_join(thread, NULL) == 0);
        say("then");
    } else if (strcmp(what, "drop") == 0) {
        size_t large = 5 * MIB;
        for (int i = 0; i < count; i++) {
            unsigned char *at = (unsigned char *)(((uintptr_t)blocks[i] + MIB) & ~(uintptr_t)4095);
            CHECK(madvise(at, large, MADV_DONTNEED) == 0);
            for (size_t byte = 0; byte < large; byte += 512)
                CHECK(at[byte] == 0);
            CHECK(madvise(at, large, MADV_FREE) == 0);
        }
        write_all(0);
        say("then");
    } else if (strcmp(what, "free") == 0) {
        for (int i = 0; i < count; i++)
            free(blocks[i]);
        say("then");
        count = 0;
    }
    check_all();
    puts("all there");
    return 0;
}
