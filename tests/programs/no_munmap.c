/* Frees blocks of a size in MiB (the argument), forbids munmap(2) by a seccomp filter that kills, and
 * allocates and resizes large blocks of which none is freed. */
#include "check.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#define MAX_BLOCKS 100
#define SIZE (150 * MIB)
#define RESIZED 20

static void fill(char **blocks, size_t count, size_t size)
{
    for (size_t i = 0; i < count; i++) {
        CHECK((blocks[i] = malloc(size)) != NULL);
        memset(blocks[i], 1, size);
    }
}

int main(int count, char **arguments)
{
    CHECK(count == 2);
    char *blocks[MAX_BLOCKS];
    size_t size = strtoul(arguments[1], NULL, 10) * MIB, freed = SIZE / size;
    CHECK(freed <= MAX_BLOCKS);
    fill(blocks, freed, size);
    for (size_t i = 0; i < freed; i++)
        free(blocks[i]);
    char *resized[RESIZED];
    fill(resized, RESIZED, 1100 * KIB);
    struct sock_filter steps[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_munmap, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof steps / sizeof *steps, steps};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0);
    fill(blocks, 5, 29 * MIB);
    for (int i = 0; i < 5; i++)
        CHECK((blocks[i] = realloc(blocks[i], (i % 2 == 0 ? 8 : 33) * MIB)) != NULL);
    for (size_t size = 1500 * KIB; size < 4 * MIB; size += 400 * KIB)
        for (int i = 0; i < RESIZED; i++) {
            CHECK((resized[i] = realloc(resized[i], size)) != NULL);
            memset(resized[i], 1, size);
        }
    puts("allocated");
    fflush(stdout);
    _exit(0);
}
