/* Sparse processes that share the room of a memory cgroup. `crowd N`: N processes map memory, and touch
 * one page of each huge page once all have mapped theirs. `crowd filtered`: one process, behind a
 * seccomp filter that allows all. Fails if a process is killed. */
#include "check.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

enum { MAPPINGS = 4 };
#define LENGTH (16 * MIB)

static char *parts[MAPPINGS];

static void map(void)
{
    for (int i = 0; i < MAPPINGS; i++) {
        parts[i] = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(parts[i] != MAP_FAILED);
    }
}

static void touch(void)
{
    for (int i = 0; i < MAPPINGS; i++)
        for (size_t at = 0; at < LENGTH; at += 2 * MIB)
            parts[i][at] = 1;
}

int main(int count, char **words)
{
    CHECK(count == 2);
    if (strcmp(words[1], "filtered") == 0) {
        struct sock_filter all = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
        struct sock_fprog filter = {1, &all};
        CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
        CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0);
        map();
        touch();
        return 0;
    }
    int mapped[2], all_mapped[2], touched[2], done[2], number = atoi(words[1]);
    CHECK(!pipe(mapped) && !pipe(all_mapped) && !pipe(touched) && !pipe(done));
    for (int i = 0; i < number; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child > 0)
            continue;
        char byte;
        close(all_mapped[1]);
        close(done[1]);
        map();
        CHECK(write(mapped[1], "", 1) == 1);
        CHECK(read(all_mapped[0], &byte, 1) == 0);
        touch();
        CHECK(write(touched[1], "", 1) == 1);
        CHECK(read(done[0], &byte, 1) == 0);
        _exit(0);
    }
    char byte;
    close(mapped[1]);
    close(touched[1]);
    for (int i = 0; i < number; i++)
        CHECK(read(mapped[0], &byte, 1) == 1);
    close(all_mapped[1]);
    /* The end of the file: a process was killed. */
    for (int i = 0; i < number; i++)
        CHECK(read(touched[0], &byte, 1) == 1);
    close(done[1]);
    for (int status; wait(&status) > 0;)
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    return 0;
}
