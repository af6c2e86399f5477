/* Blocks of many sizes, replaced, resized and touched at random: `sizes SEED`. Prints the peak
 * of its resident memory in MiB and its CPU time in milliseconds. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>

#define PAGE 4096
#define MIB ((size_t)1 << 20)
enum { SLOTS = 200, KINDS = 5 };

static uint64_t state;

static uint64_t random_number(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

/* Returns a number below `below`. */
static size_t under(size_t below) { return random_number() % below; }

/* Each doubling from `lowest` on is equally likely. */
static size_t any_size(size_t lowest, size_t doublings)
{
    size_t power = lowest << under(doublings);
    return power + under(power);
}

/* Touches all of it, an eighth, the first byte, a random prefix, or one page in 32. */
static void touch(char *memory, size_t size, size_t kind)
{
    size_t ends[KINDS] = {size, size / 8, 1, under(size), size};
    for (size_t at = 0; at < ends[kind]; at += kind == 4 ? 32 * PAGE : PAGE)
        memory[at] = 1;
}

int main(int argc, char **argv)
{
    static struct { char *memory; size_t size; } blocks[SLOTS];
    state = (argc > 1 ? strtoul(argv[1], NULL, 10) : 1) * 2654435761 + 88172645463325252;
    for (int i = 0; i < 20; i++)
        random_number();
    const size_t budget = (64 + under(500)) * MIB, slots = 4 + under(SLOTS - 4);
    const size_t kind = under(2 * KINDS), resized = under(30), phases = 1 + under(4);
    size_t live = 0;
    for (size_t phase = 0; phase < phases; phase++) {
        const size_t lowest = (size_t)128 * 1024 << under(4), doublings = 1 + under(6);
        for (int i = 0; i < 3000; i++) {
            size_t which = under(slots), size = any_size(lowest, doublings);
            char *memory = blocks[which].memory;
            if (memory && under(100) < resized) {
                if (live - blocks[which].size + size > budget)
                    continue;
                memory = realloc(memory, size);
            } else {
                free(memory);
                live -= blocks[which].size;
                blocks[which].memory = NULL;
                blocks[which].size = 0;
                if (live + size > budget || under(10) == 0)
                    continue;
                memory = malloc(size);
            }
            if (!memory)
                return 1;
            live += size - blocks[which].size;
            blocks[which].memory = memory;
            blocks[which].size = size;
            touch(memory, size, kind < KINDS ? kind : under(KINDS));
        }
        for (size_t which = 0; phase % 2 && which < slots; which++) {
            free(blocks[which].memory);
            live -= blocks[which].size;
            blocks[which].memory = NULL;
            blocks[which].size = 0;
        }
    }
    struct rusage used;
    if (getrusage(RUSAGE_SELF, &used) != 0)
        return 1;
    const struct timeval user = used.ru_utime, system = used.ru_stime;
    printf("%ld %ld\n", used.ru_maxrss / 1024,
           (user.tv_sec + system.tv_sec) * 1000 + (user.tv_usec + system.tv_usec) / 1000);
    return 0;
}
