/*
 * Makes each call by its name and by its number, and prints the events that jumbo's mechanisms saw.
 *
 *   doors
 *
 * One line per call: its name, and "same" with the counts, or the difference. Needs a debug build
 * of the library.
 */
#include "check.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <sys/wait.h>

enum { EVENTS = 13, SIZE = 4 << 20 };

static long (*heard)(unsigned long event);
static char *area;
static int file, segment;
static struct rlimit limit;

static char *fresh(void)
{
    char *at = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    return at;
}

#define PAGES SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0

static void map(int by_number)
{
    void *at = by_number ? (void *)syscall(SYS_mmap, area, PAGES) : mmap(area, PAGES);
    CHECK(at == area);
}

static void unmap(int by_number)
{
    CHECK((by_number ? syscall(SYS_munmap, area, SIZE) : munmap(area, SIZE)) == 0);
    CHECK(mmap(area, PAGES) == area);
}

static void move(int by_number)
{
    char *to = fresh();
    const int flags = MREMAP_MAYMOVE | MREMAP_FIXED;
    void *at = by_number ? (void *)syscall(SYS_mremap, area, SIZE, SIZE, flags, to) : mremap(area, SIZE, SIZE, flags, to);
    CHECK(at == to);
    area = to;
}

#define EITHER(name, ...) CHECK((by_number ? syscall(SYS_##name, __VA_ARGS__) : name(__VA_ARGS__)) == 0)

static void protect(int by_number) { EITHER(mprotect, area, SIZE, PROT_READ | PROT_WRITE); }
static void advise(int by_number) { EITHER(madvise, area, SIZE, MADV_NOHUGEPAGE); }
static void drop(int by_number) { EITHER(madvise, area, SIZE, MADV_DONTNEED); }
static void lock(int by_number) { EITHER(mlock, area, 4096); }
static void lock_with(int by_number) { EITHER(mlock2, area, 4096, 0); }
static void lock_all(int by_number) { EITHER(mlockall, MCL_CURRENT); }
static void unlock_all(int by_number)
{
    CHECK((by_number ? syscall(SYS_munlockall) : munlockall()) == 0);
}
static void attach(int by_number)
{
    char *at = by_number ? (char *)syscall(SYS_shmat, segment, NULL, 0) : shmat(segment, NULL, 0);
    CHECK(at != (void *)-1);
    CHECK((by_number ? syscall(SYS_shmdt, at) : shmdt(at)) == 0);
}
static void punch(int by_number)
{
    EITHER(fallocate, file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096);
}
static void unshared(int by_number) { EITHER(unshare, CLONE_NEWUTS); }
static void join(int by_number)
{
    int own = open("/proc/self/ns/uts", O_RDONLY);
    CHECK(own >= 0);
    EITHER(setns, own, CLONE_NEWUTS);
    close(own);
}
static void root(int by_number) { EITHER(chroot, "/"); }
static void user(int by_number) { EITHER(setuid, 0); }
static void users(int by_number) { EITHER(setreuid, 0, 0); }
static void all_users(int by_number) { EITHER(setresuid, 0, 0, 0); }
static void group(int by_number) { EITHER(setgid, 0); }
static void groups(int by_number) { EITHER(setregid, 0, 0); }
static void all_groups(int by_number) { EITHER(setresgid, 0, 0, 0); }
static void supplementary(int by_number) { EITHER(setgroups, 0, NULL); }
static void narrow(int by_number) { EITHER(prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); }

static const struct {
    const char *name;
    void (*call)(int by_number);
} calls[] = {
    { "mmap", map },          { "munmap", unmap },
    { "mremap", move },       { "mprotect", protect },
    { "madvise", advise },    { "madvise-drop", drop },
    { "mlock", lock },        { "mlock2", lock_with },
    { "mlockall", lock_all }, { "munlockall", unlock_all },
    { "shmat", attach },      { "fallocate", punch },
    { "unshare", unshared },  { "setns", join },
    { "chroot", root },       { "setuid", user },
    { "setreuid", users },    { "setresuid", all_users },
    { "setgid", group },      { "setregid", groups },
    { "setresgid", all_groups }, { "setgroups", supplementary },
    { "prctl", narrow },
};

/* Counts the events of one call. */
static void count(void (*call)(int), int by_number, long counts[EVENTS])
{
    for (int event = 0; event < EVENTS; event++)
        counts[event] = -heard(event);
    call(by_number);
    for (int event = 0; event < EVENTS; event++)
        counts[event] += heard(event);
}

int main(void)
{
    heard = (long (*)(unsigned long))dlsym(RTLD_DEFAULT, "jumbo_events_heard");
    CHECK(heard && heard(EVENTS - 1) >= 0 && heard(EVENTS) == -1);
    area = fresh();
    file = memfd_create("doors", 0);
    CHECK(file >= 0 && ftruncate(file, SIZE) == 0);
    segment = shmget(IPC_PRIVATE, SIZE, IPC_CREAT | 0600);
    CHECK(segment >= 0 && getrlimit(RLIMIT_AS, &limit) == 0);
    for (size_t at = 0; at < sizeof calls / sizeof *calls; at++) {
        long by_name[EVENTS], by_number[EVENTS], all = 0;
        count(calls[at].call, 0, by_name);
        count(calls[at].call, 1, by_number);
        int same = memcmp(by_name, by_number, sizeof by_name) == 0;
        printf("%s %s", calls[at].name, same ? "same" : "differ");
        for (int event = 0; event < EVENTS; event++) {
            printf(" %ld/%ld", by_name[event], by_number[event]);
            all += by_name[event];
        }
        printf(" %s\n", all ? "heard" : "unheard");
    }
    CHECK(shmctl(segment, IPC_RMID, NULL) == 0);
    return 0;
}
