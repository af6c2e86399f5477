/*
 * A program that attacks a command that inspects it.
 *
 *   hostile NAME [mapped|locked FOLDER]
 *
 * It has a child that looks like a reaper: by its name NAME, its command line, and its confinement.
 *
 * mapped: it maps a file named like the preload library, from a file system in user space that
 * never answers a read(2). An access to the mapping, also through /proc/PID/mem, blocks until the
 * server of the file system ends.
 *
 * locked: in addition one thread blocks so with the memory map locked, and another changes the map:
 * no file of /proc that takes the lock can be read.
 *
 * Prints the process IDs of the child and of the server, whose end unblocks all.
 */
#include "check.h"

#include <linux/filter.h>
#include <linux/fuse.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>

enum { LENGTH = 1 << 20 };

static void answer(int device, const struct fuse_in_header *request, int error, const void *body,
                   size_t length)
{
    char reply[4096];
    struct fuse_out_header *header = (struct fuse_out_header *)reply;
    header->len = (unsigned)(sizeof *header + length);
    header->error = -error;
    header->unique = request->unique;
    memcpy(reply + sizeof *header, body, length);
    ssize_t written = write(device, reply, header->len);
    (void)written;
}

static struct fuse_attr attributes(unsigned long node)
{
    struct fuse_attr attr = {.ino = node, .nlink = 1, .size = LENGTH, .blksize = 4096};
    attr.mode = node == FUSE_ROOT_ID ? S_IFDIR | 0755 : S_IFREG | 0755;
    return attr;
}

static void serve(int device)
{
    static char buffer[1 << 20];
    const struct fuse_in_header *request = (const void *)buffer;
    while (read(device, buffer, sizeof buffer) > 0) {
        struct fuse_init_out init = {.major = FUSE_KERNEL_VERSION, .minor = FUSE_KERNEL_MINOR_VERSION};
        struct fuse_entry_out entry = {.nodeid = 2, .attr_valid = 3600, .entry_valid = 3600};
        struct fuse_attr_out attr = {.attr_valid = 3600};
        struct fuse_open_out opened = {.fh = 1};
        switch (request->opcode) {
        case FUSE_INIT:
            init.max_write = 4096;
            init.max_pages = 1;
            answer(device, request, 0, &init, sizeof init);
            break;
        case FUSE_LOOKUP:
            entry.attr = attributes(2);
            answer(device, request, 0, &entry, sizeof entry);
            break;
        case FUSE_GETATTR:
            attr.attr = attributes(request->nodeid);
            answer(device, request, 0, &attr, sizeof attr);
            break;
        case FUSE_OPEN:
            answer(device, request, 0, &opened, sizeof opened);
            break;
        case FUSE_READ:
        case FUSE_FORGET:
        case FUSE_BATCH_FORGET:
            break;
        default:
            answer(device, request, ENOSYS, "", 0);
        }
    }
}

static char *mapped;
static volatile int go;

static void *reads(void *unused)
{
    int memory = open("/proc/self/mem", O_RDONLY);
    char byte;
    while (!go)
        usleep(1000);
    ssize_t got = pread(memory, &byte, 1, (off_t)(uintptr_t)mapped);
    (void)got;
    return unused;
}

static void *maps(void *unused)
{
    while (!go)
        usleep(1000);
    usleep(100000);
    mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return unused;
}

/* Forks a child that dies with this process. */
static pid_t child(void)
{
    pid_t parent = getpid(), made = fork();
    CHECK(made >= 0);
    if (made == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(0);
    }
    return made;
}

static pid_t impostor(const char *name)
{
    int ready[2];
    char byte;
    CHECK(pipe(ready) == 0);
    pid_t made = child();
    if (made == 0) {
        struct sock_filter allow = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
        struct sock_fprog filter = {.len = 1, .filter = &allow};
        CHECK(prctl(PR_SET_NAME, name) == 0 && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
        CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0);
        CHECK(write(ready[1], "", 1) == 1);
        for (;;)
            pause();
    }
    CHECK(read(ready[0], &byte, 1) == 1);
    close(ready[0]);
    close(ready[1]);
    return made;
}

static pid_t map(const char *folder)
{
    CHECK(unshare(CLONE_NEWNS) == 0 && mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0);
    int device = open("/dev/fuse", O_RDWR);
    CHECK(device >= 0);
    char options[128];
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other", device);
    CHECK(mount("fuse", folder, "fuse", 0, options) == 0);
    pid_t server = child();
    if (server == 0) {
        serve(device);
        _exit(0);
    }
    close(device);
    CHECK(chdir(folder) == 0);
    int file = open("libjumbo_preload.so", O_RDONLY);
    CHECK(file >= 0);
    mapped = mmap(NULL, LENGTH, PROT_READ, MAP_PRIVATE, file, 0);
    CHECK(mapped != MAP_FAILED);
    return server;
}

int main(int argc, char **argv)
{
    CHECK(argc == 2 || argc == 4);
    pid_t reaper = impostor(argv[1]), server = 0;
    if (argc > 2)
        server = map(argv[3]);
    char ready[64];
    size_t length = (size_t)snprintf(ready, sizeof ready, "ready %d %d\n", reaper, server);
    if (argc > 2 && !strcmp(argv[2], "locked")) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, reads, NULL) == 0);
        CHECK(pthread_create(&thread, NULL, maps, NULL) == 0);
        /* From here on no call that maps or touches new memory returns. */
        go = 1;
        usleep(300000);
    }
    CHECK(write(1, ready, length) == (ssize_t)length);
    for (;;)
        pause();
}
