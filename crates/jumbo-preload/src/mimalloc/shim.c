/* mimalloc, compiled for life inside somebody else's process.
 *
 * One translation unit with mimalloc's own sources, which the crate libmimalloc-sys brings along, so that
 * what is here can reach what is static there:
 * - nothing runs unless it is asked for: no constructor, no destructor;
 * - its mappings are made by jumbo, never by the mmap(2) that the program sees;
 * - what it notes in errno stays here: the program's changes only where a function fails;
 * - its locks can be held over a fork(2), so that the child of a program with threads can allocate;
 * - its functions answer as glibc's do where the C standard leaves a choice.
 */
#define MI_PRIM_HAS_PROCESS_ATTACH 1

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <linux/prctl.h>
#include <unistd.h>

/* In mod.rs, and no business of the program's. A negative errno where they fail. */
#pragma GCC visibility push(hidden)
intptr_t jumbo_mimalloc_map(void *addr, size_t len, int prot, int flags);
int jumbo_mimalloc_unmap(void *addr, size_t len);
int jumbo_mimalloc_advise(void *addr, size_t len, int advice);
int jumbo_mimalloc_protect(void *addr, size_t len, int prot);
bool jumbo_mimalloc_commit(bool commit, void *start, size_t size, bool *is_zero, void *argument);
#pragma GCC visibility pop

#undef errno
static __thread int own_errno;
#define errno own_errno

static inline int answered(int answer) {
  if (answer >= 0) return 0;
  errno = -answer;
  return -1;
}

static inline void *mapped(intptr_t answer) {
  if (answer > 0 || answer < -4095) return (void *)answer;
  errno = (int)-answer;
  return MAP_FAILED;
}

#define mmap(addr, len, prot, flags, fd, off) mapped(jumbo_mimalloc_map(addr, len, prot, flags))
#define munmap(addr, len) answered(jumbo_mimalloc_unmap(addr, len))
#define madvise(addr, len, advice) answered(jumbo_mimalloc_advise(addr, len, advice))
#define mprotect(addr, len, prot) answered(jumbo_mimalloc_protect(addr, len, prot))
/* It names its mappings, and switches THP off for the whole process where it is told to in its environment. */
#define prctl(...) 0

#include "static.c"

#define EXPORTED __attribute__((visibility("hidden")))

/* What glibc aligns every block to (MALLOC_ALIGNMENT); mimalloc aligns blocks of up to 8 bytes to 8. */
#define LEAST 16

static inline size_t at_least(size_t size) { return size < LEAST ? LEAST : size; }

static inline void *checked(void *block) {
  if (mi_unlikely(block == NULL)) *__errno_location() = ENOMEM;
  return block;
}

EXPORTED void jumbo_mimalloc_start(void *pool, size_t size) {
  /* Memory goes back in whole huge pages. */
  mi_option_set_default(mi_option_allow_thp, 2);
  /* As large an object as an arena has room for. */
  mi_option_set_default(mi_option_arena_max_object_size, 16 * 1024 * 1024);
  _mi_auto_process_init();
  if (size > 0) {
    /* What is mapped beyond the pool comes in smaller steps (KiB): it is counted. */
    mi_option_set(mi_option_arena_reserve, 64 * 1024);
    mi_manage_memory(pool, size, false, false, false, -1, false, &jumbo_mimalloc_commit, NULL, NULL);
  }
}

/* The multiple that mi_manage_memory rounds down to. */
EXPORTED size_t jumbo_mimalloc_unit(void) { return MI_ARENA_SLICE_SIZE * MI_BCHUNK_BITS; }

EXPORTED bool jumbo_mimalloc_owns(const void *block) { return mi_is_in_heap_region(block); }

EXPORTED void *jumbo_mimalloc_malloc(size_t size) { return checked(mi_malloc(at_least(size))); }

EXPORTED void *jumbo_mimalloc_calloc(size_t count, size_t size) {
  size_t total;
  if (__builtin_mul_overflow(count, size, &total)) {
    return checked(NULL);
  }
  return checked(mi_zalloc(at_least(total)));
}

EXPORTED void *jumbo_mimalloc_realloc(void *block, size_t size) {
  return checked(mi_realloc(block, at_least(size)));
}

EXPORTED void *jumbo_mimalloc_aligned(size_t align, size_t size) {
  return checked(mi_malloc_aligned(at_least(size), align < LEAST ? LEAST : align));
}

EXPORTED void jumbo_mimalloc_free(void *block) { mi_free(block); }

EXPORTED size_t jumbo_mimalloc_room(const void *block) { return mi_usable_size(block); }

EXPORTED void jumbo_mimalloc_trim(void) { mi_collect(true); }

/* In the order in which mimalloc nests them. */
EXPORTED void jumbo_mimalloc_before_fork(void) {
  mi_lock_acquire(&subprocs_lock);
  mi_lock_acquire(&subproc_main.heaps_lock);
  mi_lock_acquire(&heap_main.theaps_lock);
  mi_lock_acquire(&heap_main.os_abandoned_pages_lock);
  mi_lock_acquire(&heap_main.arena_pages_lock);
  mi_lock_acquire(&subproc_main.arena_reserve_lock);
}

EXPORTED void jumbo_mimalloc_after_fork(void) {
  mi_lock_release(&subproc_main.arena_reserve_lock);
  mi_lock_release(&heap_main.arena_pages_lock);
  mi_lock_release(&heap_main.os_abandoned_pages_lock);
  mi_lock_release(&heap_main.theaps_lock);
  mi_lock_release(&subproc_main.heaps_lock);
  mi_lock_release(&subprocs_lock);
}
