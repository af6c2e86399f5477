/*
 * Grows, and makes calls that return a partial result after a stop of the thread: write(2) to a
 * slow pipe, getrandom(2), and a read of /dev/zero. Prints the number of partial results.
 *
 *   long_calls COUNT
 */
#include "check.h"

#include <sys/random.h>
#include <sys/wait.h>

static void read_slowly(int from)
{
    static char piece[64 * KIB];
    while (read(from, piece, sizeof piece) > 0)
        usleep(300);
    _exit(0);
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    static char block[MIB];
    int pipes[2], zero = open("/dev/zero", O_RDONLY);
    char *zeroes = malloc(8 * MIB);
    CHECK(zero >= 0 && zeroes && pipe(pipes) == 0);
    pid_t reader = fork();
    CHECK(reader >= 0);
    if (!reader) {
        close(pipes[1]);
        read_slowly(pipes[0]);
    }
    close(pipes[0]);
    int partial = 0;
    for (int at = 0; at < atoi(argv[1]); at++) {
        char *memory = malloc(2 * MIB);
        CHECK(memory);
        memset(memory, at + 1, 2 * MIB);
        partial += write(pipes[1], block, sizeof block) != sizeof block;
        partial += getrandom(block, sizeof block, 0) != sizeof block;
        partial += read(zero, zeroes, 8 * MIB) != 8 * MIB;
    }
    close(pipes[1]);
    CHECK(waitpid(reader, NULL, 0) == reader);
    printf("partial=%d\n", partial);
    return 0;
}
