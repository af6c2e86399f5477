/* Starts `PROGRAM ARG...` in every way there is, with a large heap of its own, and passes on its
 * output. */
#include "check.h"
#include <spawn.h>
#include <sys/wait.h>

extern char **environ;

static void wait_for(pid_t pid)
{
    int status = -1;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(int argc, char **argv)
{
    CHECK(argc > 1);
    char *heap = malloc(64 * MIB);
    CHECK(heap != NULL);
    paint(heap, 64 * MIB, 6);
    pid_t pid;

    CHECK(posix_spawn(&pid, argv[1], NULL, NULL, argv + 1, environ) == 0);
    wait_for(pid);

    pid = vfork();
    CHECK(pid >= 0);
    if (pid == 0) {
        execv(argv[1], argv + 1);
        _exit(127);
    }
    wait_for(pid);

    pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        check_paint(heap, 64 * MIB, 6);
        free(heap);
        execv(argv[1], argv + 1);
        _exit(127);
    }
    wait_for(pid);

    check_paint(heap, 64 * MIB, 6);
    CHECK(system("exit 3") == 3 << 8);
    FILE *pipe = popen("echo through a pipe", "r");
    char line[64] = "";
    CHECK(pipe != NULL && fgets(line, sizeof line, pipe) != NULL);
    CHECK(pclose(pipe) == 0);
    fputs(line, stdout);
    fflush(stdout);
    /* Finally this process becomes the program. */
    execv(argv[1], argv + 1);
    return 127;
}
