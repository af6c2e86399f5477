/* Passes untouched shared memory to every system call that takes a buffer; memory that a child
 * touched must stay; threads, signals, descriptors and mappings of the program must be
 * unaffected. */
#include "check.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>

#define SIZE (96 * MIB)

static unsigned char *memory, *next;
static int cleaned;

/* Returns untouched memory, in the middle of a page. */
static void *fresh(void)
{
    next += MIB;
    CHECK(next < memory + SIZE);
    return next + 100;
}

static void *shared(void)
{
    void *at = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    return at;
}

static void clean(void *unused)
{
    (void)unused;
    cleaned = 1;
}

static void *wait_for_nothing(void *buffer)
{
    int ends[2];
    CHECK(pipe(ends) == 0);
    pthread_cleanup_push(clean, NULL);
    read(ends[0], buffer, 8000);
    pthread_cleanup_pop(0);
    return NULL;
}

static void calls(void)
{
    int pair[2], file = fileno(tmpfile());
    char text[9] = "abcdefgh", *at = fresh();
    CHECK(socketpair(AF_UNIX, SOCK_DGRAM, 0, pair) == 0);

    errno = 77;
    CHECK(write(file, fresh(), 10000) == 10000 && pwrite(file, fresh(), 4096, 4096) == 4096);
    CHECK(lseek(file, 0, SEEK_SET) == 0 && pwrite(file, text, 8, 5000) == 8);
    CHECK(read(file, at, 10000) == 10000 && memcmp(at + 5000, text, 8) == 0);
    at = fresh();
    CHECK(pread(file, at, 8, 5000) == 8 && memcmp(at, text, 8) == 0);
    struct iovec vectors[2] = {{fresh(), 5000}, {fresh(), 5000}};
    CHECK(preadv(file, vectors, 2, 0) == 10000 && memcmp(vectors[1].iov_base, text, 8) == 0);
    CHECK(lseek(file, 5000, SEEK_SET) == 5000);
    struct iovec *own = fresh();
    CHECK(writev(file, vectors + 1, 1) == 5000 && readv(file, own, 0) == 0);

    CHECK(send(pair[0], fresh(), 100, 0) == 100 && recv(pair[1], fresh(), 100, 0) == 100);
    CHECK(sendto(pair[0], text, 8, 0, NULL, 0) == 8);
    at = fresh();
    CHECK(recvfrom(pair[1], at, 8, 0, NULL, NULL) == 8 && memcmp(at, text, 8) == 0);
    vectors[0] = (struct iovec){fresh(), 300};
    struct mmsghdr message = {.msg_hdr = {.msg_iov = vectors, .msg_iovlen = 1}};
    CHECK(sendmsg(pair[0], &message.msg_hdr, 0) == 300);
    vectors[0].iov_base = fresh();
    CHECK(recvmsg(pair[1], &message.msg_hdr, 0) == 300);
    vectors[0].iov_base = fresh();
    CHECK(sendmmsg(pair[0], &message, 1, 0) == 1);
    vectors[0].iov_base = fresh();
    CHECK(recvmmsg(pair[1], &message, 1, 0, NULL) == 1 && message.msg_len == 300);
    vectors[0].iov_base = text;
    vectors[0].iov_len = 8;
    struct mmsghdr *fresh_message = fresh();
    CHECK(send(pair[0], text, 8, 0) == 8 && send(pair[0], text, 8, 0) == 8);
    CHECK(recvmmsg(pair[1], fresh_message, 1, 0, NULL) == 1 && fresh_message->msg_len == 0);
    CHECK(recv(pair[1], text, 8, 0) == 8);
    CHECK(errno == 77);

    /* The kernel writes the peer's address. */
    struct sockaddr_in *name = fresh();
    socklen_t *length = fresh(), size = sizeof *name;
    int listener = socket(AF_INET, SOCK_DGRAM, 0), other = socket(AF_INET, SOCK_DGRAM, 0);
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    CHECK(bind(listener, (void *)&here, size) == 0);
    CHECK(getsockname(listener, (void *)&here, &size) == 0);
    CHECK(sendto(other, text, 8, 0, (void *)&here, size) == 8);
    CHECK(sendto(other, text, 8, 0, fresh(), size) == -1 && errno != EFAULT);
    CHECK(recvfrom(listener, text, 8, 0, (void *)name, &size) == 8 && name->sin_port != 0);
    /* Bare calls, with the sixth argument on the stack. */
    CHECK(sendto(other, text, 8, 0, (void *)&here, size) == 8);
    name = fresh(), length = fresh();
    *length = size;
    CHECK(syscall(SYS_recvfrom, listener, fresh(), 8, 0, name, length) == 8 && name->sin_port != 0);
    errno = 77;
    at = fresh();
    CHECK(syscall(SYS_pread64, file, at, 8, 5000L) == 8 && memcmp(at, text, 8) == 0 && errno == 77);
    CHECK(close(listener) == 0 && close(other) == 0);
    listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(listen(listener, 5) == 0 && getsockname(listener, (void *)&here, &size) == 0);
    for (int turn = 0; turn < 3; turn++) {
        other = socket(AF_INET, SOCK_STREAM, 0);
        here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        CHECK(connect(other, (void *)&here, size) == 0);
        name = fresh();
        int taken = turn == 0   ? accept(listener, (void *)name, &size)
                    : turn == 1 ? accept4(listener, (void *)name, &size, 0)
                                : accept(listener, fresh(), length);
        /* The last call has a length of 0. */
        CHECK(taken >= 0 && (turn == 2 || name->sin_family == AF_INET));
        CHECK(close(taken) == 0 && close(other) == 0);
    }
    CHECK(close(listener) == 0);

    FILE *stream = fdopen(dup(file), "r+");
    rewind(stream);
    CHECK(fwrite(fresh(), 1, 100000, stream) == 100000 && fflush(stream) == 0);
    rewind(stream);
    CHECK(fread(fresh(), 1000, 100, stream) == 100);
    CHECK(mlock(fresh(), 8192) == 0 && munlock(next, MIB) == 0);

    /* Invalid buffers are refused. */
    void *volatile nowhere = (void *)8;
    CHECK(munmap(memory + SIZE - MIB, MIB) == 0);
    CHECK(write(file, memory + SIZE - MIB, 4096) == -1 && errno == EFAULT);
    CHECK(write(file, nowhere, 4096) == -1 && errno == EFAULT);
    CHECK(readv(file, nowhere, 2) == -1 && errno == EFAULT);
    CHECK(recvmsg(pair[1], nowhere, MSG_DONTWAIT) == -1 && errno == EFAULT);
}

/* Requests to populate are obeyed. */
static void populated(void)
{
    static unsigned char there[SIZE / 4096];
    int flags = MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE;
    void *at = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, flags, -1, 0);
    CHECK(at != MAP_FAILED && mincore(at, SIZE, there) == 0);
    for (size_t page = 0; page < SIZE / 4096; page++)
        CHECK(there[page] & 1);
    at = mremap(at, SIZE, 2 * SIZE, MREMAP_MAYMOVE);
    CHECK(at != MAP_FAILED && munmap(at, 2 * SIZE) == 0);
    at = shared();
    CHECK(madvise(at, SIZE, MADV_POPULATE_WRITE) == 0 && munmap(at, SIZE) == 0);
}

/* The end of a child is reported once. */
static void ends(void)
{
    for (int turn = 0; turn < 5; turn++) {
        int *status = fresh(), child = fork();
        if (child == 0)
            _exit(7);
        siginfo_t *information = fresh();
        int answer = turn == 0   ? wait(status)
                     : turn == 1 ? waitpid(child, status, 0)
                     : turn == 2 ? wait3(status, 0, fresh())
                     : turn == 3 ? wait4(child, status, 0, fresh())
                                 : waitid(P_PID, child, information, WEXITED);
        CHECK(answer == (turn == 4 ? 0 : child));
        CHECK(turn == 4 ? information->si_status == 7 : WEXITSTATUS(*status) == 7);
    }
}

/* Calls into several mappings, and into ranges that failed to be unmapped. */
static void changed(void)
{
    int file = fileno(tmpfile());
    char *at = shared();
    CHECK(madvise(at + MIB, MIB, MADV_DONTDUMP) == 0);
    CHECK(write(file, at + MIB / 2, MIB) == (ssize_t)MIB);
    CHECK(madvise(at + 8 * MIB, MIB, MADV_SEQUENTIAL) == 0);
    CHECK(write(file, at + 7 * MIB, 16 * MIB) == 16 * (ssize_t)MIB);
    CHECK(munmap(at, SIZE) == 0);

    at = shared();
    void *volatile crooked = at + SIZE - 2 * MIB + 100;
    CHECK(munmap(crooked, MIB) == -1 && write(file, crooked, 4096) == 4096);
    void *there = mmap(at + 32 * MIB, MIB, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    CHECK(there == MAP_FAILED && write(file, at + 32 * MIB, 4096) == 4096);
    CHECK(mremap(at, SIZE, SIZE / 2, 0) == at && write(file, at, 4096) == 4096);
    CHECK(syscall(SYS_munmap, crooked, MIB) == -1 && syscall(SYS_munmap, at, SIZE / 2) == 0);
}

static void *touch_all(void *tag)
{
    for (size_t at = 0; at < SIZE / 2; at += 4096)
        __atomic_add_fetch(&memory[at + *(char *)tag], 1, __ATOMIC_RELAXED);
    return NULL;
}

int main(void)
{
    memory = next = shared();
    calls();
    ends();
    populated();
    changed();

    pthread_t threads[4];
    CHECK(pthread_create(threads, NULL, wait_for_nothing, fresh()) == 0);
    usleep(10000);
    void *result;
    CHECK(pthread_cancel(threads[0]) == 0 && pthread_join(threads[0], &result) == 0);
    CHECK(result == PTHREAD_CANCELED && cleaned);

    /* A child's pages, in blocks that others touch later; and all signals blocked. */
    munmap(memory, SIZE - MIB);
    memory = shared();
    if (fork() == 0) {
        for (size_t at = 0; at < SIZE; at += 5 * 4096)
            memory[at + 8] = 42;
        _exit(0);
    }
    CHECK(wait(NULL) > 0);
    sigset_t all;
    sigfillset(&all);
    CHECK(sigprocmask(SIG_BLOCK, &all, NULL) == 0);
    char tags[4] = {0, 1, 2, 3};
    for (int at = 0; at < 4; at++)
        CHECK(pthread_create(&threads[at], NULL, touch_all, &tags[at]) == 0);
    /* Descriptors, and then threads other than the program's, end while the program touches. */
    CHECK(syscall(SYS_close_range, 3, ~0u, 0) == 0);
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    for (int at = 0; at < 4; at++)
        CHECK(pthread_join(threads[at], NULL) == 0);
    for (size_t at = 0; at < SIZE; at += 4096) {
        for (int tag = 0; tag < 4; tag++)
            CHECK(memory[at + tag] == (at < SIZE / 2));
        CHECK(memory[at + 8] == (at / 4096 % 5 == 0 ? 42 : 0));
    }
    memory = shared();
    CHECK(pipe((int[2]){0}) == 0 && write(4, memory, 100) == 100);
    puts("done");
}
