/*
 * A program of one thread, whose memory jumbo scans: what it can see of that.
 *
 *   alone count        entries of its task directory and threads in its status, while it fills memory
 *   alone namespace    unshare(2) of a user namespace, by a bare system call
 *   alone pipe         the end of a pipe whose only writer it closes
 *   alone wait         children to wait for
 *   alone any NUMBER   the NUMBERth kind of wait for any child, also for one without exit signal
 *   alone held HOW     leaves or changes its user while a debugger holds the process that scans it
 *   alone drop         drops its capabilities by a bare system call, and waits for the end of the process
 *   alone core         the limit of the core dump of the process that scans it
 *   alone free         threads after it frees much memory
 *   alone thread       the scan of memory before and after it makes a thread
 *   alone root         chroot(2) to a file system, and the processes that remain in the old root
 *   alone leave HOW    leaves by exit, return, _exit, exec, abort, kill or raw
 */
#include "check.h"

#include <dirent.h>
#include <linux/capability.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define BYTES (64 * MIB)

static long bare(long number, long first, long second, long third)
{
    long answer;
#if defined(__x86_64__)
    __asm__ volatile("syscall"
                     : "=a"(answer)
                     : "a"(number), "D"(first), "S"(second), "d"(third)
                     : "rcx", "r11", "memory");
#else
    register long x8 __asm__("x8") = number, x0 __asm__("x0") = first, x1 __asm__("x1") = second,
                     x2 __asm__("x2") = third;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2) : "memory");
    answer = x0;
#endif
    return answer;
}

static int entries(void)
{
    int count = 0;
    DIR *folder = opendir("/proc/self/task");
    CHECK(folder != NULL);
    for (struct dirent *entry; (entry = readdir(folder));)
        count += entry->d_name[0] != '.';
    closedir(folder);
    return count;
}

/* Threads of this process, by the directory, its links and the status; they must agree. */
static int threads(void)
{
    struct stat folder;
    CHECK(stat("/proc/self/task", &folder) == 0);
    int count = (int)(status_bytes("\nThreads:") / KIB);
    CHECK(count == entries() && count == (int)folder.st_nlink - 2);
    return count;
}

/* Returns the first child of this process, with or without exit signal; 0: none. */
static pid_t child(void)
{
    char path[64], text[64] = "";
    snprintf(path, sizeof path, "/proc/self/task/%d/children", getpid());
    int file = open(path, O_RDONLY);
    CHECK(file >= 0);
    CHECK(read(file, text, sizeof text - 1) >= 0);
    close(file);
    return atoi(text);
}

/* Returns the state of a process in /proc; 0: there is none. */
static char state_of(pid_t process)
{
    char path[64], text[256] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", process);
    int file = open(path, O_RDONLY);
    if (file < 0)
        return 0;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    char *end = strrchr(text, ')');
    return length > 0 && end ? end[2] : 0;
}

static char *memory;

static void fill(void)
{
    memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    for (size_t at = 0; at < BYTES; at += 4 * KIB)
        memory[at] = 1;
}

static void *idle(void *unused)
{
    usleep(300000);
    return unused;
}

/* Waits until memory is scanned by a process of jumbo, or of a plain run a moment. */
static pid_t scanned(void)
{
    fill();
    pid_t found = 0;
    for (int round = 0; round < 100 && !found; round++) {
        usleep(2000);
        found = child();
    }
    return found;
}

static size_t huge(void)
{
    char line[256];
    FILE *file = fopen("/proc/self/smaps_rollup", "r");
    size_t kib = 0;
    CHECK(file != NULL);
    while (fgets(line, sizeof line, file))
        if (!strncmp(line, "AnonHugePages:", 14))
            kib = strtoul(line + 14, NULL, 10);
    fclose(file);
    return kib * KIB;
}

static void leave(const char *how, char *self)
{
    pid_t beside = scanned();
    printf("beside=%d\n", beside);
    fflush(stdout);
    if (!strcmp(how, "_exit"))
        _exit(0);
    if (!strcmp(how, "exec")) {
        CHECK(execl("/nowhere", "nowhere", NULL) == -1 && errno == ENOENT);
        char number[16];
        snprintf(number, sizeof number, "%d", beside);
        execl(self, self, "gone", number, NULL);
        CHECK(0);
    }
    if (!strcmp(how, "raw")) {
        char *arguments[] = {self, "counted", NULL};
        bare(SYS_execve, (long)self, (long)arguments, (long)environ);
        CHECK(0);
    }
    if (!strcmp(how, "abort")) {
        struct rlimit none = {0, 0};
        CHECK(setrlimit(RLIMIT_CORE, &none) == 0);
        abort();
    }
    if (!strcmp(how, "kill"))
        raise(SIGKILL);
    if (!strcmp(how, "exit"))
        exit(0);
}

/* Returns the last child of this process; 0: none. */
static pid_t last_child(void)
{
    char path[64], text[64] = "";
    pid_t last = 0;
    snprintf(path, sizeof path, "/proc/self/task/%d/children", getpid());
    FILE *file = fopen(path, "r");
    CHECK(file != NULL);
    while (fscanf(file, "%63s", text) == 1)
        last = atoi(text);
    fclose(file);
    return last;
}

/* Returns the process that scans sparse memory, as long as that is there. */
static pid_t scanned_for_long(void)
{
    pid_t before = last_child(), beside = before;
    memory = mmap(NULL, 8 * BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    for (size_t at = 0; at < 8 * BYTES; at += 4 * MIB)
        memory[at] = 1;
    for (int round = 0; round < 500 && beside == before; round++) {
        usleep(2000);
        beside = last_child();
    }
    CHECK(beside != before && state_of(beside) != 'Z');
    return beside;
}

/* Waits for any child; -1 and ECHILD without one. */
static long any(int number)
{
    siginfo_t found;
    switch (number) {
    case 0: return waitpid(-1, NULL, __WALL);
    case 1: return wait3(NULL, __WALL, NULL);
    case 2: return wait4(-1, NULL, __WCLONE, NULL);
    case 3: return waitid(P_ALL, 0, &found, WEXITED | WNOHANG | __WALL);
    case 4: return syscall(SYS_wait4, -1, NULL, __WALL, NULL);
    default: return syscall(SYS_waitid, P_ALL, 0, &found, WEXITED | __WALL, NULL);
    }
}

/* Holds the process that scans this one, and returns it. The debugger ends with its process. */
static pid_t held(void)
{
    int orders[2], answers[2];
    pid_t beside;
    CHECK(pipe(orders) == 0 && pipe(answers) == 0);
    pid_t debugger = fork();
    CHECK(debugger >= 0);
    if (debugger == 0) {
        close(orders[1]);
        if (read(orders[0], &beside, sizeof beside) != sizeof beside)
            _exit(0);
        CHECK(ptrace(PTRACE_SEIZE, beside, 0, 0) == 0);
        CHECK(ptrace(PTRACE_INTERRUPT, beside, 0, 0) == 0);
        CHECK(waitpid(beside, NULL, __WALL) == beside);
        CHECK(write(answers[1], "", 1) == 1);
        waitpid(beside, NULL, __WALL);
        _exit(0);
    }
    beside = scanned_for_long();
    char byte;
    CHECK(write(orders[1], &beside, sizeof beside) == sizeof beside);
    CHECK(read(answers[0], &byte, 1) == 1);
    return beside;
}

int main(int count, char **arguments)
{
    CHECK(count >= 2);
    const char *what = arguments[1];
    if (!strcmp(what, "count")) {
        int most = 0, scans = 0;
        for (int round = 0; round < 4; round++) {
            scans += scanned() != 0;
            for (int moment = 0; moment < 50; moment++) {
                int now = threads();
                most = now > most ? now : most;
                usleep(1000);
            }
            munmap(memory, BYTES);
        }
        printf("threads %d\n", most);
        fprintf(stderr, "scanned %d of 4\n", scans);
    } else if (!strcmp(what, "namespace")) {
        scanned();
        printf("unshare %ld\n", bare(SYS_unshare, CLONE_NEWUSER, 0, 0));
    } else if (!strcmp(what, "pipe")) {
        int ends[2];
        char byte;
        CHECK(pipe(ends) == 0);
        scanned();
        alarm(20);
        close(ends[1]);
        printf("read %zd\n", read(ends[0], &byte, 1));
    } else if (!strcmp(what, "wait")) {
        scanned();
        CHECK(wait(NULL) == -1 && errno == ECHILD);
        CHECK(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD);
        siginfo_t found;
        CHECK(waitid(P_ALL, 0, &found, WEXITED | WNOHANG) == -1 && errno == ECHILD);
        CHECK(kill(0, 0) == 0);
        puts("none");
    } else if (!strcmp(what, "any")) {
        CHECK(count == 3);
        scanned();
        alarm(20);
        CHECK(any(atoi(arguments[2])) == -1 && errno == ECHILD);
        puts("none");
    } else if (!strcmp(what, "held")) {
        CHECK(count == 3);
        alarm(30);
        pid_t beside = held();
        if (!strcmp(arguments[2], "user")) {
            CHECK(setuid(getuid()) == 0);
            printf("left=%d\n", state_of(beside) != 0);
        } else {
            char number[16];
            snprintf(number, sizeof number, "%d", beside);
            execl(arguments[0], arguments[0], "gone", number, NULL);
            CHECK(0);
        }
    } else if (!strcmp(what, "drop")) {
        struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
        struct __user_cap_data_struct none[2] = {{0}};
        pid_t beside = scanned_for_long();
        CHECK(bare(SYS_capset, (long)&header, (long)none, 0) == 0);
        for (int round = 0; round < 500 && state_of(beside) != 'Z'; round++)
            usleep(10000);
        printf("state=%c\n", state_of(beside));
    } else if (!strcmp(what, "core")) {
        struct rlimit limit, all = {RLIM_INFINITY, RLIM_INFINITY};
        (void)setrlimit(RLIMIT_CORE, &all);
        pid_t beside = scanned();
        CHECK(beside != 0);
        for (int round = 0; round < 100; round++) {
            CHECK(prlimit(beside, RLIMIT_CORE, NULL, &limit) == 0);
            if (limit.rlim_cur == 1)
                break;
            usleep(2000);
        }
        printf("limit %lu\n", (unsigned long)limit.rlim_cur);
    } else if (!strcmp(what, "free")) {
        for (int round = 0; round < 20; round++) {
            size_t length = 256 * MIB;
            char *much = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            CHECK(much != MAP_FAILED && madvise(much, length, MADV_NOHUGEPAGE) == 0);
            for (size_t at = 0; at < length; at += 4 * KIB)
                much[at] = 1;
            CHECK(munmap(much, length) == 0);
            CHECK(threads() == 1);
        }
        puts("one thread");
    } else if (!strcmp(what, "thread")) {
        pid_t beside = scanned();
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, idle, NULL) == 0);
        printf("left=%d\n", beside ? state_of(beside) != 0 : 0);
        /* Memory that is filled from now on is scanned, too. */
        size_t before = huge();
        fill();
        for (int round = 0; round < 200 && huge() < before + BYTES / 2; round++)
            usleep(20000);
        printf("huge=%d\n", huge() >= before + BYTES / 2);
        CHECK(pthread_join(thread, NULL) == 0);
    } else if (!strcmp(what, "root")) {
        CHECK(count == 3);
        DIR *proc = opendir("/proc");
        CHECK(proc != NULL);
        pid_t beside = scanned();
        CHECK(chroot(arguments[2]) == 0);
        char path[32];
        snprintf(path, sizeof path, "%d", beside);
        printf("left=%d\n", beside ? faccessat(dirfd(proc), path, F_OK, 0) == 0 : 0);
    } else if (!strcmp(what, "leave")) {
        CHECK(count == 3);
        leave(arguments[2], arguments[0]);
    } else if (!strcmp(what, "gone")) {
        CHECK(count == 3);
        printf("left=%d\n", atoi(arguments[2]) ? state_of(atoi(arguments[2])) != 0 : 0);
    } else if (!strcmp(what, "counted")) {
        /* A process that the kernel told of the exec ends soon. */
        pid_t left = child();
        for (int round = 0; round < 500 && left && state_of(left) != 'Z'; round++)
            usleep(10000);
        printf("left=%d\n", left && state_of(left) != 'Z');
        CHECK(wait(NULL) == -1 && errno == ECHILD);
    } else {
        CHECK(0);
    }
}
