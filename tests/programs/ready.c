/* Prints the number of threads after a large allocation, and in both processes after a fork. */
#include "check.h"
#include <sys/prctl.h>
#include <sys/wait.h>

static size_t threads(void)
{
    return status_bytes("Threads:") / KIB;
}

int main(void)
{
    CHECK(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
    char *block = malloc(200 * MIB);
    CHECK(block != NULL);
    size_t allocated = threads();
    memset(block, 1, 200 * MIB);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(threads() == 1 && block[150 * MIB] == 1);
        free(block);
        _exit(0);
    }
    size_t forked = threads();
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    free(block);
    printf("%zu allocated, %zu forked\n", allocated, forked);
    return 0;
}
