/*
 * Runs a program, waits for it, prints the time of the wait and whether the program's descriptors
 * are closed then, and ends like the program, once no reaper of its memory is left.
 *
 *   waiter PROGRAM [ARGUMENT...]
 */
#include "check.h"

#include <dirent.h>
#include <spawn.h>
#include <sys/wait.h>

extern char **environ;

/* Reports whether a reaper runs on the memory of that executable. */
static int reaper_of(const char *executable)
{
    int found = 0;
    DIR *processes = opendir("/proc");
    CHECK(processes);
    for (struct dirent *entry; !found && (entry = readdir(processes));) {
        char path[300], name[32] = "", link[4096];
        snprintf(path, sizeof path, "/proc/%s/comm", entry->d_name);
        FILE *comm = atoi(entry->d_name) ? fopen(path, "r") : NULL;
        if (!comm)
            continue;
        found = fgets(name, sizeof name, comm) && !strcmp(name, "jumbo-reaper\n");
        fclose(comm);
        snprintf(path, sizeof path, "/proc/%s/exe", entry->d_name);
        ssize_t length = found ? readlink(path, link, sizeof link) : -1;
        found = length == (ssize_t)strlen(executable) && !memcmp(link, executable, (size_t)length);
    }
    closedir(processes);
    return found;
}

int main(int argc, char **argv)
{
    CHECK(argc > 1);
    /* The program writes the time to descriptor 3 when it is about to end. */
    int pipes[2];
    CHECK(pipe2(pipes, O_CLOEXEC) == 0);
    int told_at = fcntl(pipes[1], F_DUPFD_CLOEXEC, 10);
    close(pipes[1]);
    posix_spawn_file_actions_t actions;
    CHECK(told_at >= 10 && posix_spawn_file_actions_init(&actions) == 0 &&
          posix_spawn_file_actions_adddup2(&actions, told_at, 3) == 0);
    /* Not fork(2): its child would have a reaper of its own, until it execs. */
    pid_t child;
    CHECK(posix_spawnp(&child, argv[1], &actions, NULL, argv + 1, environ) == 0);
    close(told_at);
    long start = 0;
    ssize_t told = read(pipes[0], &start, sizeof start);
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    long waited = microseconds() - start;
    /* Its descriptors are closed when it has ended, whatever outlives it. */
    CHECK(fcntl(pipes[0], F_SETFL, O_NONBLOCK) == 0);
    int closed = read(pipes[0], &start, 1) == 0;
    printf("told=%d waited=%ld closed=%d\n", told == sizeof start, waited, closed);
    fflush(stdout);
    while (reaper_of(argv[1]))
        usleep(1000);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
