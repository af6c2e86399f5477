/*
 * A large program with a resource that depends on its address space.
 *
 *   leftovers WHAT WHEN FILE
 *
 * WHAT: aio, sysv, flock, ofd, lease, flock-then-map, device, none; sysv-number, flock-number: by
 * syscall(2); flock-child: by a child that has ended. written, written-private: a script, through a
 * mapping of each kind; memfd: a shared mapping of one. WHEN: before it is large, after, or never
 * (acquired before, and released). Large: 1.2 GiB requested.
 */
#include "check.h"

#include <linux/aio_abi.h>
#include <linux/perf_event.h>
#include <sys/file.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static int segment = -1;
static void *held;
static int locked = -1;
static aio_context_t context;

static int open_file(const char *path)
{
    int file = open(path, O_RDWR | O_CREAT, 0600);
    CHECK(file >= 0 && ftruncate(file, 4096) == 0 && close(file) == 0);
    file = open(path, O_RDONLY);
    CHECK(file >= 0);
    return file;
}

static void lock(int file, int how)
{
    if (how == 'n') {
        CHECK(syscall(SYS_flock, file, LOCK_EX | LOCK_NB) == 0);
        return;
    }
    if (how == 'l') {
        CHECK(fcntl(file, F_SETLEASE, F_WRLCK) == 0);
        return;
    }
    if (how == 'f') {
        CHECK(flock(file, LOCK_EX | LOCK_NB) == 0);
        return;
    }
    struct flock all = {.l_type = F_RDLCK, .l_whence = SEEK_SET};
    CHECK(fcntl(file, F_OFD_SETLK, &all) == 0);
}

static void acquire(const char *what, const char *path)
{
    const int prot = PROT_READ | PROT_WRITE;
    if (!strcmp(what, "aio")) {
        CHECK(syscall(SYS_io_setup, 16, &context) == 0);
    } else if (!strcmp(what, "sysv")) {
        segment = shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600);
        CHECK(segment >= 0);
        held = shmat(segment, NULL, 0);
        CHECK(held != (void *)-1);
        /* For the test, which checks it after the end. */
        printf("segment=%d\n", segment);
    } else if (!strcmp(what, "sysv-number")) {
        segment = shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600);
        CHECK(segment >= 0);
        held = (void *)syscall(SYS_shmat, segment, NULL, 0);
        CHECK(held != (void *)-1);
        printf("segment=%d\n", segment);
    } else if (!strcmp(what, "flock-number") || !strcmp(what, "lease")) {
        locked = open_file(path);
        held = mmap(NULL, 4096, PROT_READ, MAP_SHARED, locked, 0);
        CHECK(held != MAP_FAILED);
        lock(locked, what[0] == 'f' ? 'n' : 'l');
    } else if (!strcmp(what, "flock") || !strcmp(what, "ofd")) {
        locked = open_file(path);
        held = mmap(NULL, 4096, PROT_READ, MAP_SHARED, locked, 0);
        CHECK(held != MAP_FAILED);
        lock(locked, what[0]);
    } else if (!strcmp(what, "flock-then-map") || !strcmp(what, "flock-child")) {
        locked = open_file(path);
        pid_t child = what[6] == 'c' ? fork() : -1;
        if (child <= 0)
            lock(locked, 'f');
        if (child == 0)
            _exit(0);
        CHECK(child < 0 || waitpid(child, NULL, 0) == child);
        held = mmap(NULL, 4096, PROT_READ, MAP_SHARED, locked, 0);
        CHECK(held != MAP_FAILED);
    } else if (!strncmp(what, "written", 7)) {
        /* Like a linker, which soon closes the descriptor. */
        int private = what[7] == '-';
        int file = open(path, O_RDWR | O_CREAT, 0700);
        CHECK(file >= 0 && write(file, "#!/bin/sh\n#", 11) == 11);
        held = mmap(NULL, 4096, private ? PROT_READ : prot, private ? MAP_PRIVATE : MAP_SHARED, file, 0);
        CHECK(held != MAP_FAILED && close(file) == 0);
        if (!private)
            memcpy(held, "#!/bin/sh\n#", 11);
    } else if (!strcmp(what, "memfd")) {
        int file = memfd_create("shared", MFD_ALLOW_SEALING);
        CHECK(file >= 0 && ftruncate(file, 4096) == 0);
        held = mmap(NULL, 4096, prot, MAP_SHARED, file, 0);
        CHECK(held != MAP_FAILED);
    } else if (!strcmp(what, "shared-anonymous")) {
        held = mmap(NULL, 4096, prot, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        CHECK(held != MAP_FAILED);
    } else if (!strcmp(what, "device")) {
        /* Memory of the kernel: the ring of a counter that counts nothing. */
        struct perf_event_attr counter = {.type = PERF_TYPE_SOFTWARE,
                                          .size = sizeof counter,
                                          .config = PERF_COUNT_SW_DUMMY};
        int device = (int)syscall(SYS_perf_event_open, &counter, 0, -1, -1, 0);
        held = mmap(NULL, 8192, prot, MAP_SHARED, device, 0);
        if (held == MAP_FAILED) {
            printf("no device\n");
            fflush(stdout);
            _exit(42);
        }
    } else {
        CHECK(!strcmp(what, "none"));
    }
}

static void give_up(const char *what)
{
    if (!strcmp(what, "aio"))
        CHECK(syscall(SYS_io_destroy, context) == 0);
    else if (!strcmp(what, "sysv"))
        CHECK(shmdt(held) == 0 && shmctl(segment, IPC_RMID, NULL) == 0);
    else if (held)
        CHECK(munmap(held, 4096) == 0);
}

int main(int argc, char **argv)
{
    CHECK(argc == 4);
    int before = strcmp(argv[2], "after") != 0;
    if (before)
        acquire(argv[1], argv[3]);
    if (!strcmp(argv[2], "never"))
        give_up(argv[1]);
    char *large = malloc(1200 * MIB);
    CHECK(large);
    for (size_t at = 0; at < 64 * MIB; at += 4096)
        large[at] = 1;
    if (!before)
        acquire(argv[1], argv[3]);
    printf("ready\n");
    fflush(stdout);
    getchar();
    return 7;
}
