/* Common code of the test programs: checks with their location, patterns, random numbers, RSS. */
#ifndef CHECK_H
#define CHECK_H

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)

/* dprintf and _exit: they work with a corrupt heap, too. */
#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            dprintf(2, "%s:%d: not so: %s (errno %d)\n", __FILE__, __LINE__, #condition,  \
                    errno);                                                               \
            _exit(99);                                                                    \
        }                                                                                 \
    } while (0)

/* Hides the memory from the compiler, so that it keeps all writes. */
static inline void observe(void *memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

/* Returns the time of a clock that all processes share. */
static inline long microseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000L + now.tv_nsec / 1000;
}

/* xorshift64: the same numbers in every run. */
static inline uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* Returns a size between 16 bytes and 2^(max_shift + 1), each order of magnitude equally likely. */
static inline size_t random_size(uint64_t *state, unsigned max_shift)
{
    unsigned shift = 4 + next_random(state) % (max_shift - 3);
    return ((size_t)1 << shift) + next_random(state) % ((size_t)1 << shift);
}

/* Writes a pattern that depends on address and tag at the start, at the end and in every page. */
static inline void paint(void *memory, size_t size, uint8_t tag)
{
    uint8_t *bytes = memory;
    for (size_t at = 0; at < size; at += 1021)
        bytes[at] = (uint8_t)(tag + at);
    bytes[size - 1] = tag ^ 0x5a;
}

static inline void check_paint(const void *memory, size_t size, uint8_t tag)
{
    const uint8_t *bytes = memory;
    CHECK(bytes[size - 1] == (uint8_t)(tag ^ 0x5a));
    for (size_t at = 0; at + 1 < size; at += 1021)
        CHECK(bytes[at] == (uint8_t)(tag + at));
}

static inline void check_zero(const void *memory, size_t size)
{
    static const uint8_t zeroes[4096];
    const uint8_t *bytes = memory;
    size_t at = 0;
    for (; at + sizeof zeroes <= size; at += sizeof zeroes)
        CHECK(memcmp(bytes + at, zeroes, sizeof zeroes) == 0);
    CHECK(memcmp(bytes + at, zeroes, size - at) == 0);
}

/* Returns a field of /proc/self/status in bytes, read without allocation. */
static inline size_t status_bytes(const char *field)
{
    char text[8192];
    int fd = open("/proc/self/status", O_RDONLY);
    CHECK(fd >= 0);
    ssize_t length = read(fd, text, sizeof text - 1);
    CHECK(length > 0);
    close(fd);
    text[length] = 0;
    const char *at = strstr(text, field);
    CHECK(at != NULL);
    return strtoull(at + strlen(field), NULL, 10) * KIB;
}

static inline size_t resident(void)
{
    return status_bytes("VmRSS:");
}

#endif
