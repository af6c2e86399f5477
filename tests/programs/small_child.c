/* A child of fork(2) allocates little, and prints whether it has a child of its own then. */
#include "check.h"

#include <sys/wait.h>

static int has_children(void)
{
    char path[64], text[64];
    snprintf(path, sizeof path, "/proc/self/task/%d/children", getpid());
    int file = open(path, O_RDONLY);
    CHECK(file >= 0);
    ssize_t length = read(file, text, sizeof text);
    CHECK(length >= 0 && close(file) == 0);
    return length > 0;
}

int main(void)
{
    for (int i = 0; i < 20000; i++) {
        char *block = malloc(500);
        CHECK(block != NULL);
        memset(block, 1, 500);
    }
    pid_t child = fork();
    if (child == 0) {
        memset(malloc(100), 1, 100);
        memset(malloc(MIB), 1, MIB);
        printf("children=%d\n", has_children());
        fflush(stdout);
        _exit(0);
    }
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    return 0;
}
