/*
 * Starts COUNT short programs in turn, and waits for each.
 *
 *   short COUNT
 */
#include "check.h"

#include <sys/wait.h>

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    for (long left = atol(argv[1]); left > 0; left--) {
        pid_t child = vfork();
        CHECK(child >= 0);
        if (child == 0) {
            execl(argv[0], argv[0], "0", (char *)0);
            _exit(127);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    return 0;
}
