/* 256 MiB of anonymous shared memory, written by a process and its forked children. */
#include <stdio.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

int main(void)
{
    size_t size = 256 << 20, sum = 0;
    unsigned char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (size_t at = 0; at < size; at += 4096)
        memory[at] = 1;
    for (int child = 1; child <= 4; child++)
        if (fork() == 0) {
            for (size_t at = 0; at < size; at += 4096)
                memory[at + child] = memory[at] + child;
            _exit(0);
        }
    while (wait(NULL) > 0)
        ;
    for (size_t at = 0; at < size; at++)
        sum += memory[at];
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    printf("sum=%zu faults=%ld\n", sum, usage.ru_minflt);
}
