/* Changes its user (or its CPUs) by a bare system call, unseen by libraries, while a thread of
 * jumbo scans its memory, or a process of jumbo that shares it. Then no task of the process, and no
 * child, may have the old credentials. `idle`: it scans nothing more by then. */
#include "check.h"
#include <dirent.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>

static long bare(long number, long a, long b, long c)
{
    long answer;
#if defined(__x86_64__)
    __asm__ volatile("syscall" : "=a"(answer) : "a"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
#else
    register long x8 __asm__("x8") = number, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2) : "memory");
    answer = x0;
#endif
    return answer;
}

/* Counts a task, unless it has ended, by the value of a status field. */
static void count_task(const char *path, const char *key, const char *value, int *count, int *others)
{
    char line[512];
    int has_ended = 0;
    FILE *status = fopen(path, "r");
    while (status && fgets(line, sizeof line, status)) {
        has_ended |= !strncmp(line, "State:\tZ", 8);
        if (!has_ended && !strncmp(line, key, strlen(key))) {
            char *rest = line + strlen(key);
            rest += strspn(rest, " \t");
            ++*(strncmp(rest, value, strlen(value)) ? others : count);
        }
    }
    if (status)
        fclose(status);
}

/* Counts the tasks and children with this value of a status field; `others` counts those with
 * another value. */
static int tasks_with(const char *key, const char *value, int *others)
{
    int count = 0, child;
    char path[300];
    *others = 0;
    DIR *folder = opendir("/proc/self/task");
    CHECK(folder != NULL);
    for (struct dirent *entry; (entry = readdir(folder));) {
        snprintf(path, sizeof path, "/proc/self/task/%s/status", entry->d_name);
        if (entry->d_name[0] != '.')
            count_task(path, key, value, &count, others);
    }
    closedir(folder);
    snprintf(path, sizeof path, "/proc/self/task/%d/children", getpid());
    FILE *children = fopen(path, "r");
    while (children && fscanf(children, "%d", &child) == 1) {
        snprintf(path, sizeof path, "/proc/%d/status", child);
        count_task(path, key, value, &count, others);
    }
    if (children)
        fclose(children);
    return count;
}

static char *memory;
static size_t touched;

/* Gives the thread memory to scan. */
static void touch_some(void)
{
    for (size_t at = 0; at < MIB; at += 4 * KIB)
        memory[touched + at] = 1;
    touched = (touched + MIB) % (256 * MIB);
    usleep(10000);
}

int main(int count, char **arguments)
{
    CHECK(count == 2);
    memory = mmap(NULL, 256 * MIB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    int others, watched = 0;
    for (int round = 0; round < 1000 && !watched; round++) {
        touch_some();
        watched = tasks_with("Name:", "jumbo-watch", &others);
    }
    printf("watched %d\n", watched);
    /* At most the first thread has effective capabilities. */
    int without = tasks_with("CapEff:", "0000000000000000", &others);
    printf("without capabilities %d\n", without);
    int is_idle = !strcmp(arguments[1], "idle"), is_user = is_idle || !strcmp(arguments[1], "user");
    if (is_idle)
        sleep(7);
    if (is_user) {
        CHECK(bare(SYS_setresuid, 65534, 65534, 65534) == 0);
    } else {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(0, &one);
        /* 0 is the calling thread. */
        CHECK(bare(SYS_sched_setaffinity, 0, sizeof one, (long)&one) == 0);
    }
    others = 1;
    for (int round = 0; round < (is_idle ? 250 : 6000) && others; round++) {
        if (is_idle)
            usleep(10000);
        else
            touch_some();
        if (is_user)
            tasks_with("Uid:", "65534", &others);
        else
            tasks_with("Cpus_allowed_list:", "0\n", &others);
    }
    printf("left behind %d\n", others);
}
