/* Unmaps or moves its vDSO and the data of it, as a checkpoint's restore does, and goes on:
 *
 *   without_vdso unmapped|moved */
#include "check.h"

#include <pthread.h>
#include <sys/mman.h>

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
    CHECK(argc == 2);
    work();
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
    work();
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, work_in_thread, NULL) == 0 && pthread_join(thread, NULL) == 0);
    puts("right");
    return 0;
}
