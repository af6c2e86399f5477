/* What a version of the C library once broke, in two ways:
 *
 *   bound sparse MIB   8000 blocks of 64 KiB, of which each first byte is touched, in at most MIB
 *   bound filter       a seccomp filter of the program ends who calls madvise(2)
 */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

static void allocate(size_t count, size_t size, size_t touched)
{
    for (size_t at = 0; at < count; at++) {
        char *block = malloc(size);
        if (block != NULL)
            memset(block, 1, touched);
    }
}

static long resident(void)
{
    char line[256];
    long kib = -1;
    FILE *status = fopen("/proc/self/status", "r");
    if (status == NULL)
        return -1;
    while (kib < 0 && fgets(line, sizeof line, status) != NULL)
        if (strncmp(line, "VmHWM:", 6) == 0)
            kib = strtol(line + 6, NULL, 10);
    fclose(status);
    return kib / 1024;
}

int main(int count, char **words)
{
    if (count == 3 && strcmp(words[1], "sparse") == 0) {
        allocate(8000, 64 << 10, 1);
        long mib = resident();
        if (mib > 0 && mib <= atol(words[2]))
            puts("within");
        else
            printf("%ld MiB\n", mib);
        return 0;
    }
    struct sock_filter steps[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    struct sock_fprog filter = {sizeof steps / sizeof *steps, steps};
    allocate(1000, 1000, 1000);
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0)
        return 1;
    allocate(300000, 1000, 1000);
    allocate(100, 1 << 20, 1 << 20);
    puts("lives");
    return 0;
}
