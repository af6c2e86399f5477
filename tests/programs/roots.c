/* Fills memory with a word and looks for it in the data of libraries, where a conservative garbage
 * collector looks for pointers. Prints how often it is there. */
#include "check.h"

#include <link.h>
#include <pthread.h>
#include <stdint.h>

#define WORD 0x6a756d626f5f7764u

static size_t found;

/* The word itself is in no register or variable of a library. */
static int look(struct dl_phdr_info *library, size_t size, void *unused)
{
    (void)size, (void)unused;
    if (!strstr(library->dlpi_name, "/"))
        return 0;
    for (int at = 0; at < library->dlpi_phnum; at++) {
        const ElfW(Phdr) *part = &library->dlpi_phdr[at];
        if (part->p_type != PT_LOAD || !(part->p_flags & PF_W))
            continue;
        const volatile uint64_t *words = (uint64_t *)((library->dlpi_addr + part->p_vaddr + 7) & ~(uintptr_t)7);
        for (size_t word = 0; word + 1 < part->p_memsz / sizeof *words; word++)
            found += words[word] == WORD;
    }
    return 0;
}

static void *sleep_on(void *unused)
{
    for (;;)
        pause();
    return unused;
}

int main(void)
{
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, sleep_on, NULL) == 0);
    for (int round = 0; round < 20; round++) {
        for (int at = 0; at < 4 * 1024; at++) {
            uint64_t *block = malloc(1000);
            CHECK(block != NULL);
            for (int word = 0; word < 125; word++)
                block[word] = WORD;
        }
        usleep(50000);
    }
    dl_iterate_phdr(look, NULL);
    printf("%zu\n", found);
    return 0;
}
