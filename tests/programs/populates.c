/*
 * Makes 128 MiB resident in one of several ways, and prints what a program can see of it.
 *
 *   populates HOW [WHAT]
 *
 * HOW: populate, shared, locked, hugetlb (mmap), mlock, mlock2, mlockall, write (madvise), uring;
 * disk registers a sparse file instead, and prints whether it is sparse still.
 * WHAT: "huge" also prints the MiB of it in huge pages; "touched" writes some pages beforehand;
 * "hole" unmaps a page; "closed" forbids access to an eighth; "limit" has RLIMIT_MEMLOCK of 1 MiB
 * and no privilege; "wrap" also locks to the end of the address space; "timer" has a signal every
 * millisecond, whose handler jumps out once; "fork" and "user" have another thread that forks or
 * changes its user meanwhile.
 */
#include "check.h"

#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <dirent.h>
#include <linux/io_uring.h>

enum { ALL = 128 * MIB };

static const char *how;
static char *volatile at;
static volatile sig_atomic_t signals;
static sigjmp_buf before;

static int is(const char *word) { return strcmp(how, word) == 0; }

static void count(int signal)
{
    (void)signal;
    if (++signals == 3)
        siglongjmp(before, 1);
}

static int registered(void)
{
    struct io_uring_params params = { 0 };
    int ring = syscall(SYS_io_uring_setup, 4, &params);
    CHECK(ring >= 0);
    struct iovec parts[4];
    for (int i = 0; i < 4; i++)
        parts[i] = (struct iovec){ at + i * (ALL / 4), ALL / 4 };
    int answer = syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, parts, 4);
    close(ring);
    return answer;
}

static int sparse_file(void)
{
    char name[] = "/var/tmp/populates-XXXXXX";
    int file = mkstemp(name);
    CHECK(file >= 0 && unlink(name) == 0 && ftruncate(file, ALL) == 0);
    at = mmap(NULL, ALL, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    CHECK(at != MAP_FAILED);
    int answer = registered(), error = errno;
    struct stat now;
    CHECK(fsync(file) == 0 && fstat(file, &now) == 0);
    printf("answer %d %d sparse %d\n", answer, error, now.st_blocks < 8);
    return 0;
}

static int make_resident(void)
{
    if (is("mlock"))
        return mlock(at, ALL);
    if (is("mlock2"))
        return mlock2(at, ALL, 0);
    if (is("mlockall"))
        return mlockall(MCL_CURRENT);
    if (is("write"))
        return madvise(at, ALL, MADV_POPULATE_WRITE);
    return is("uring") ? registered() : 0;
}

/* Returns a sum of the field of the mappings in the range, in KiB. */
static unsigned long sum_of(const char *field)
{
    unsigned long start, end, value, sum = 0;
    char line[512], format[64];
    int within = 0;
    snprintf(format, sizeof format, "%s: %%lu kB", field);
    FILE *smaps = fopen("/proc/self/smaps", "r");
    CHECK(smaps != NULL);
    while (fgets(line, sizeof line, smaps)) {
        if (sscanf(line, "%lx-%lx ", &start, &end) == 2)
            within = start < (unsigned long)at + ALL && end > (unsigned long)at;
        else if (within && sscanf(line, format, &value) == 1)
            sum += value;
    }
    fclose(smaps);
    return sum;
}

/* Returns the number of threads without the one that watches memory, which may start at any time, and
 * has no name of its own at first. */
static int count_tasks(void)
{
    int count = 0;
    char path[300], name[32];
    struct dirent *task;
    DIR *folder = opendir("/proc/self/task");
    CHECK(folder != NULL);
    while ((task = readdir(folder))) {
        if (task->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
        FILE *comm = fopen(path, "r");
        count += comm && fgets(name, sizeof name, comm) && strcmp(name, "jumbo-watch\n") != 0;
        if (comm)
            fclose(comm);
    }
    closedir(folder);
    return count;
}

/* A thread that was joined is in the list for a moment. */
static int tasks(void)
{
    int count = count_tasks();
    for (int i = 0; i < 1000 && count > 1; i++) {
        usleep(1000);
        count = count_tasks();
    }
    return count;
}

static void *other(void *what)
{
    for (int i = 0; i < 20; i++) {
        if (strcmp(what, "fork") == 0) {
            pid_t child = fork();
            if (child == 0)
                _exit(tasks() == 1 ? 0 : 1);
            int status;
            CHECK(waitpid(child, &status, 0) == child && status == 0);
        } else {
            CHECK(setuid(getuid()) == 0);
        }
        usleep(500);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    CHECK(argc >= 2);
    how = argv[1];
    if (is("disk"))
        return sparse_file();
    const char *what = argc > 2 ? argv[2] : "";
    int flags = MAP_ANONYMOUS | (is("shared") ? MAP_SHARED : MAP_PRIVATE);
    flags |= is("populate") || is("shared") || is("hugetlb") ? MAP_POPULATE : 0;
    flags |= is("locked") ? MAP_LOCKED : 0;
    flags |= is("hugetlb") ? MAP_HUGETLB : 0;
    int is_late = strcmp(what, "touched") == 0 || strcmp(what, "hole") == 0 || strcmp(what, "closed") == 0;
    CHECK(!(is_late && flags & (MAP_POPULATE | MAP_LOCKED)));
    pthread_t thread;
    int has_thread = strcmp(what, "fork") == 0 || strcmp(what, "user") == 0;
    if (strcmp(what, "limit") == 0) {
        struct rlimit limit = { MIB, MIB };
        CHECK(setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    }
    if (strcmp(what, "timer") == 0) {
        struct itimerval often = { { 0, 1000 }, { 0, 1000 } };
        CHECK(signal(SIGALRM, count) != SIG_ERR && setitimer(ITIMER_REAL, &often, NULL) == 0);
        if (sigsetjmp(before, 1) != 0 && at != NULL)
            CHECK(munmap(at, ALL) == 0);
        at = NULL;
    }
    if (has_thread)
        CHECK(pthread_create(&thread, NULL, other, (void *)what) == 0);
    errno = 0;
    at = mmap(NULL, ALL, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (at == MAP_FAILED) {
        printf("mmap %d\n", errno);
        return 0;
    }
    if (strcmp(what, "touched") == 0)
        for (size_t i = 0; i < ALL; i += 5 * MIB + 4096)
            at[i] = 7;
    if (strcmp(what, "hole") == 0)
        CHECK(munmap(at + ALL / 2, 4096) == 0);
    if (strcmp(what, "closed") == 0)
        CHECK(mprotect(at + ALL / 8, ALL / 8, PROT_NONE) == 0);
    if (strcmp(what, "wrap") == 0) {
        int answer = mlock(at, SIZE_MAX);
        printf("wrap %d %d\n", answer, answer ? errno : 0);
    }
    errno = 0;
    int answer = make_resident();
    int error = errno;
    if (strcmp(what, "timer") == 0) {
        struct itimerval never = { 0 };
        while (signals < 3)
            pause();
        CHECK(setitimer(ITIMER_REAL, &never, NULL) == 0);
    }
    printf("answer %d %d\n", answer, error);
    if (has_thread)
        CHECK(pthread_join(thread, NULL) == 0);
    unsigned long sum = 0;
    if (strcmp(what, "hole") != 0 && strcmp(what, "closed") != 0)
        for (size_t i = 0; i < ALL; i += 4096)
            sum = sum * 31 + at[i];
    printf("sum %lx tasks %d locked %lu\n", sum, tasks(), sum_of("Locked") / 1024);
    /* Within a tenth: the kernel stops where a limit or a hole is. */
    unsigned long resident = 0;
    for (size_t i = 0; i < ALL; i += 4096) {
        unsigned char page = 0;
        mincore(at + i, 4096, &page);
        resident += page & 1;
    }
    printf("resident %lu\n", resident * 10 * 4096 / ALL);
    if (strcmp(what, "huge") == 0)
        printf("huge=%lu\n", sum_of("AnonHugePages") / 1024);
    return 0;
}
