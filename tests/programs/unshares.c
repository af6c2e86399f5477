/*
 * Calls that the kernel refuses to a process whose memory another process shares, by name and by
 * number, with their results.
 *
 *   unshares CALL
 *
 * And calls that the reaper would undermine: `chroot HOW FOLDER` and `pivot HOW FOLDER`, after
 * which no process's root may lead out of FOLDER; and `thread`, where only one thread has its
 * children in another namespace.
 */
#include "check.h"

#include <dirent.h>
#include <linux/capability.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static void say(const char *what, long answer)
{
    printf("%s: %ld %s\n", what, answer, answer == 0 ? "" : strerror(errno));
}

/* Counts the processes of this program by whose root this one can leave its own. */
static int ways_out(DIR *proc, const char *program)
{
    int found = 0, seen = 0;
    struct dirent *entry;
    rewinddir(proc);
    while ((entry = readdir(proc))) {
        char path[300], command[4096] = "";
        struct stat outside;
        snprintf(path, sizeof path, "%s/cmdline", entry->d_name);
        int file = openat(dirfd(proc), path, O_RDONLY);
        if (file < 0)
            continue;
        ssize_t length = read(file, command, sizeof command - 1);
        close(file);
        if (length <= 0 || strcmp(command, program))
            continue;
        seen++;
        snprintf(path, sizeof path, "%s/root" "/etc/passwd", entry->d_name);
        found += fstatat(dirfd(proc), path, &outside, AT_SYMLINK_NOFOLLOW) == 0;
    }
    CHECK(seen > 0);
    return found;
}

extern int pivot_root(const char *root, const char *old);

static void leave_root(const char *program, const char *call, const char *how, const char *folder)
{
    DIR *proc = opendir("/proc");
    CHECK(proc && ways_out(proc, program) > 0);
    int by_name = !strcmp(how, "name");
    if (!strcmp(call, "pivot")) {
        CHECK(mount(folder, folder, NULL, MS_BIND | MS_REC, NULL) == 0 && chdir(folder) == 0);
        CHECK((by_name ? pivot_root(".", ".") : syscall(SYS_pivot_root, ".", ".")) == 0);
        CHECK(umount2(".", MNT_DETACH) == 0);
    } else {
        CHECK((by_name ? chroot(folder) : syscall(SYS_chroot, folder)) == 0);
    }
    CHECK(chdir("/") == 0 && chroot("/nowhere") == -1 && errno == ENOENT);
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct none[2] = {{0}};
    CHECK(syscall(SYS_capset, &header, none) == 0);
    errno = 0;
    say("ways out", ways_out(proc, program));
    closedir(proc);
}

static void *in_a_thread(void *unused)
{
    (void)unused;
    CHECK(unshare(CLONE_NEWPID) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0)
        _exit(getpid() == 1 ? 0 : 1);
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    errno = 0;
    say("the first child is PID 1", status);
    return NULL;
}

int main(int argc, char **argv)
{
    CHECK(argc > 1);
    errno = 0;
    if (!strcmp(argv[1], "memory")) {
        say("unshare memory", unshare(CLONE_VM));
        say("unshare signal handlers", unshare(CLONE_SIGHAND));
        say("by number", syscall(SYS_unshare, CLONE_VM));
        say("nonsense", unshare(1));
        CHECK(errno == EINVAL);
    } else if (!strcmp(argv[1], "time")) {
        say("unshare time", unshare(CLONE_NEWTIME));
        int time = open("/proc/self/ns/time_for_children", O_RDONLY);
        CHECK(time >= 0);
        say("join time", setns(time, CLONE_NEWTIME));
        say("by number", syscall(SYS_setns, time, CLONE_NEWTIME));
        say("a bad descriptor", setns(-1, 0));
    } else if (!strcmp(argv[1], "user")) {
        say("unshare user", unshare(CLONE_NEWUSER | CLONE_NEWNS));
    } else if (!strcmp(argv[1], "pid")) {
        say("unshare pid", unshare(CLONE_NEWPID));
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0)
            _exit(getpid() == 1 ? 0 : 1);
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        say("the first child is PID 1", status);
    }
    if (!strcmp(argv[1], "chroot") || !strcmp(argv[1], "pivot")) {
        CHECK(argc > 3);
        leave_root(argv[0], argv[1], argv[2], argv[3]);
    } else if (!strcmp(argv[1], "thread")) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, in_a_thread, NULL) == 0 && pthread_join(thread, NULL) == 0);
    }
    printf("ready\n");
    fflush(stdout);
    getchar();
    return 0;
}
