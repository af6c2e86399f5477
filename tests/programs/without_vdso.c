/* Unmaps or moves its vDSO and the data of it, as a checkpoint's restore does, and goes on:
 *
 *   without_vdso unmapped|moved [first|then]
 *
 * A filter that kills for clock_gettime(2) is installed before that, or after it. */
#include "check.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

static void forbid_the_clock(void)
{
    struct sock_filter steps[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clock_gettime, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof steps / sizeof *steps, steps};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0) == 0);
}

static void work(void)
{
    for (int i = 0; i < 4; i++) {
        char *large = malloc(32 * MIB), *mapped = mmap(NULL, 32 * MIB, PROT_READ | PROT_WRITE,
                                                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(large != NULL && mapped != MAP_FAILED);
        memset(large, 1, 32 * MIB);
        memset(mapped, 1, 32 * MIB);
        free(large);
        CHECK(munmap(mapped, 32 * MIB) == 0);
    }
}

static void *work_in_thread(void *unused)
{
    work();
    return unused;
}

int main(int argc, char **argv)
{
    CHECK(argc == 2 || argc == 3);
    work();
    if (argc == 3 && strcmp(argv[2], "first") == 0)
        forbid_the_clock();
    uintptr_t ranges[8][2];
    char line[256];
    int count = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps != NULL);
    while (fgets(line, sizeof line, maps))
        if (strstr(line, "[vvar") || strstr(line, "[vdso]"))
            CHECK(sscanf(line, "%lx-%lx", &ranges[count][0], &ranges[count][1]) == 2 && ++count < 8);
    fclose(maps);
    CHECK(count > 0);
    for (int i = 0; i < count; i++) {
        void *from = (void *)ranges[i][0];
        size_t length = ranges[i][1] - ranges[i][0];
        if (strcmp(argv[1], "unmapped") == 0) {
            CHECK(munmap(from, length) == 0);
        } else {
            void *to = mmap(NULL, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            CHECK(mremap(from, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to);
        }
    }
    if (argc == 3 && strcmp(argv[2], "then") == 0)
        forbid_the_clock();
    work();
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, work_in_thread, NULL) == 0 && pthread_join(thread, NULL) == 0);
    puts("right");
    return 0;
}
