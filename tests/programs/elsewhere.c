/* A program of another C library (musl): malloc family, threads, children, mappings and files. */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <threads.h>
#include <unistd.h>

#define CHECK(condition)                                          \
    do {                                                          \
        if (!(condition)) {                                       \
            dprintf(2, "%d: not so: %s\n", __LINE__, #condition); \
            _exit(99);                                            \
        }                                                         \
    } while (0)

static int errno_at_start = -1;

__attribute__((constructor)) static void start(void)
{
    errno_at_start = errno;
}

static void *allocate(void *unused)
{
    (void)unused;
    static const size_t sizes[] = {1, 100, 5000, 200000, 3 << 20};
    for (int round = 0; round < 20; round++) {
        for (size_t at = 0; at < sizeof sizes / sizeof *sizes; at++) {
            char *block = malloc(sizes[at]);
            CHECK(block != NULL);
            memset(block, 1, sizes[at]);
            block = realloc(block, 2 * sizes[at]);
            CHECK(block != NULL && block[0] == 1);
            free(block);
            block = calloc(3, sizes[at]);
            CHECK(block != NULL && block[0] == 0 && block[3 * sizes[at] - 1] == 0);
            free(block);
            CHECK(posix_memalign((void **)&block, 4096, sizes[at]) == 0);
            CHECK((size_t)block % 4096 == 0);
            free(block);
        }
    }
    return NULL;
}

static int leave(void *unused)
{
    (void)unused;
    thrd_exit(7);
}

int main(void)
{
    CHECK(errno_at_start == 0);
    CHECK(dlerror() == NULL);
    CHECK(dlopen(NULL, RTLD_NOW) != NULL && dlsym(RTLD_DEFAULT, "getpid") != NULL);
    pthread_t threads[4];
    for (int at = 0; at < 4; at++)
        CHECK(pthread_create(&threads[at], NULL, &allocate, NULL) == 0);
    for (int child = 0; child < 20; child++) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            free(malloc(100));
            free(malloc(1 << 20));
            _exit(3);
        }
        int status;
        CHECK(waitpid(pid, &status, 0) == pid && WEXITSTATUS(status) == 3);
    }
    for (int at = 0; at < 4; at++)
        CHECK(pthread_join(threads[at], NULL) == 0);
    thrd_t other;
    int answer;
    CHECK(thrd_create(&other, &leave, NULL) == thrd_success);
    CHECK(thrd_join(other, &answer) == thrd_success && answer == 7);

    size_t size = 8 << 20;
    char *mapped = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(mapped != MAP_FAILED);
    memset(mapped, 5, size);
    CHECK(mprotect(mapped, size, PROT_READ) == 0 && mapped[size - 1] == 5);
    CHECK(munmap(mapped, size) == 0);
    CHECK(prctl(PR_GET_DUMPABLE) >= 0);
    CHECK(syscall(-1) == -1 && errno == ENOSYS);

    FILE *file = tmpfile();
    CHECK(file != NULL && fwrite("abc", 1, 3, file) == 3);
    rewind(file);
    char text[4] = "";
    CHECK(fread(text, 1, 3, file) == 3 && strcmp(text, "abc") == 0);
    FILE *child = popen("echo from a child", "r");
    CHECK(child != NULL);
    char line[100];
    CHECK(fgets(line, sizeof line, child) != NULL);
    CHECK(pclose(child) == 0);
    printf("%s", line);
    return 0;
}
