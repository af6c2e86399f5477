/*
 * vforks_on ROUNDS: a thread allocates and frees large blocks all the time, another one calls vfork(2),
 * and the child kills both. The child goes on with their memory, and allocates. Prints the number of
 * children that did not end.
 */
#include "check.h"

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

static void *churn(void *unused)
{
    for (size_t round = 0;; round++) {
        char *volatile block = malloc(300 * KIB + round % 64 * 16 * KIB);
        free(block);
    }
    return unused;
}

static void leave_child(int end)
{
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, churn, NULL) == 0);
    usleep(3000);
    pid_t parent = getpid();
    if (vfork() == 0) {
        kill(parent, SIGKILL);
        while (getppid() == parent)
            usleep(100);
        for (int round = 0; round < 10; round++) {
            char *volatile block = malloc(400 * KIB);
            CHECK(block);
            block[0] = 1;
            free(block);
        }
        CHECK(write(end, "", 1) == 1);
        _exit(0);
    }
    _exit(1);
}

int main(int count, char **arguments)
{
    CHECK(count == 2 && prctl(PR_SET_CHILD_SUBREAPER, 1) == 0);
    int lost = 0;
    for (int round = 0; round < atoi(arguments[1]); round++) {
        int ends[2];
        char byte;
        CHECK(pipe(ends) == 0);
        pid_t child = fork();
        CHECK(child >= 0);
        if (!child)
            leave_child(ends[1]);
        close(ends[1]);
        fd_set set;
        FD_ZERO(&set);
        FD_SET(ends[0], &set);
        struct timeval patience = {8, 0};
        lost += select(ends[0] + 1, &set, NULL, NULL, &patience) != 1 || read(ends[0], &byte, 1) != 1;
        close(ends[0]);
        char list[64], text[256] = "";
        snprintf(list, sizeof list, "/proc/self/task/%d/children", getpid());
        FILE *left = fopen(list, "r");
        if (left && fgets(text, sizeof text, left))
            for (char *at = text; *at; at += strcspn(at, " "), at += strspn(at, " "))
                kill(atoi(at), SIGKILL);
        if (left)
            fclose(left);
        while (waitpid(-1, NULL, WNOHANG) > 0)
            ;
    }
    printf("lost %d\n", lost);
    return 0;
}
