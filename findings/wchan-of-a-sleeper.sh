#!/usr/bin/env bash
# Kernel: /proc/PID/wchan is 0 for a process that sleeps, while its CPU is busy.
#
# Versions: Debian's kernels 6.1.176 and 7.3.4 under qemu, one CPU (6.18 does as 7.3).
# Expected: proc_pid_wchan(5): the location in the kernel where a process sleeps, and 0 for one that runs. So a process
#   in state S has one.
# Happens: since the scheduler delays the dequeue of tasks that have used more than their share (Linux 6.12), a
#   sleeping task stays in its queue until the others have caught up. Its state is S, and its wchan 0, for
#   milliseconds. A read of /proc/PID/syscall takes it out of the queue: then wchan is there.
# Matters: who looks for what a process waits for (an init that fetches signals, a worker in a futex or in a page
#   fault) finds nothing on a busy host; the same read works on an idle one, and before 6.12.
# Source: seen; proc_pid_wchan(5) of man-pages 6.9; get_wchan in kernel/sched/core.c.
set -euo pipefail

# shellcheck source=findings/common
. "$(dirname "${BASH_SOURCE[0]}")/common"

need apt-get cpio dpkg-deb gcc qemu-system-x86_64

cat >"$folder/init.c" <<'C'
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

static void text(pid_t pid, const char *name, char *buffer, size_t length) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/%s", pid, name);
    int file = open(path, O_RDONLY);
    ssize_t got = read(file, buffer, length - 1);
    buffer[got > 0 ? got : 0] = 0;
    close(file);
}

static void work(long steps) {
    for (volatile long step = 0; step < steps; step++)
        ;
}

/* Sleeps in sigtimedwait, and works a little after each signal. */
static pid_t sleeper(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigprocmask(SIG_BLOCK, &set, NULL);
    pid_t child = fork();
    if (child == 0)
        for (;;) {
            int signal;
            sigwait(&set, &signal);
            work(300000);
        }
    return child;
}

int main(void) {
    struct utsname name;
    mkdir("/proc", 0700);
    mount("proc", "/proc", "proc", 0, NULL);
    uname(&name);
    const pid_t sleeping = sleeper();
    /* The observer waits for no CPU; its children are ordinary. */
    sched_setscheduler(0, SCHED_FIFO | SCHED_RESET_ON_FORK, &(struct sched_param){.sched_priority = 1});
    for (int busy = 0; busy < 2; busy++) {
        pid_t others[4];
        for (int other = 0; other < 4; other++)
            if ((others[other] = fork()) == 0) {
                while (busy)
                    ;
                pause();
            }
        int asleep = 0, zero = 0, after = 0;
        for (int sample = 0; sample < 3000; sample++) {
            char stat[2048], wchan[100], call[200];
            if (sample % 10 == 0)
                kill(sleeping, SIGUSR1);
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
            text(sleeping, "stat", stat, sizeof stat);
            text(sleeping, "wchan", wchan, sizeof wchan);
            if (!strstr(stat, ") S "))
                continue;
            asleep++;
            if (strcmp(wchan, "0") != 0)
                continue;
            zero++;
            text(sleeping, "syscall", call, sizeof call);
            text(sleeping, "wchan", wchan, sizeof wchan);
            after += strncmp(call, "128 ", 4) == 0 && strcmp(wchan, "0") != 0;
        }
        const char *found = zero >= 10 ? "ten and more" : "fewer than ten";
        printf("@%s, %s CPU: %s in state S; wchan 0 in %s of them; there after a read of syscall: %s\n", name.release,
               busy ? "busy" : "idle", asleep > 100 ? "often" : "seldom", found,
               zero < 10 ? "-" : after == zero ? "always" : "not always");
        for (int other = 0; other < 4; other++)
            kill(others[other], SIGKILL);
    }
    reboot(RB_AUTOBOOT);
}
C
gcc -O1 -static -o "$folder/init" "$folder/init.c" || skip "gcc builds no static program"
{
    boot bookworm linux-image-6.1.0-50-cloud-amd64=6.1.176-1
    boot trixie-backports linux-binary-7.3.4+deb13-cloud-amd64=7.3.4-1~bpo13+1
} | tee "$folder/seen"
diff - "$folder/seen" <<SEEN
6.1.0-50-cloud-amd64, idle CPU: often in state S; wchan 0 in fewer than ten of them; there after a read of syscall: -
6.1.0-50-cloud-amd64, busy CPU: often in state S; wchan 0 in fewer than ten of them; there after a read of syscall: -
7.3.4+deb13-cloud-amd64, idle CPU: often in state S; wchan 0 in fewer than ten of them; there after a read of syscall: -
7.3.4+deb13-cloud-amd64, busy CPU: often in state S; wchan 0 in ten and more of them; there after a read of syscall: always
SEEN
