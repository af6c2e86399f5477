/* mimalloc, compiled for life inside a wrapped program.
 *
 * One translation unit with mimalloc's own sources, which the crate libmimalloc-sys brings along, so that
 * what is here can reach what is static there:
 * - nothing runs unless it is asked for: no constructor, no destructor;
 * - its mappings are made by jumbo, never by the mmap(2) that the program sees;
 * - what it notes in errno stays here: the program's changes only where a function fails;
 * - its locks can be held over a fork(2), so that the child of a program with threads can allocate.
 */
#define MI_PRIM_HAS_PROCESS_ATTACH 1
/* The environment's options are for a mimalloc of the program's own. */
#define MI_NO_GETENV 1

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <linux/prctl.h>
#include <time.h>
#include <unistd.h>

/* arm64 has no such system calls: of these numbers mimalloc makes them all the same, and jumbo_syscall answers. */
#ifndef SYS_open
#define SYS_open (-1)
#define SYS_access (-2)
#endif

/* In mod.rs, and no business of the program's. A negative errno where they fail. */
#pragma GCC visibility push(hidden)
intptr_t jumbo_mimalloc_map(void *addr, size_t len, int prot, int flags);
int jumbo_mimalloc_unmap(void *addr, size_t len);
int jumbo_mimalloc_advise(void *addr, size_t len, int advice);
int jumbo_mimalloc_protect(void *addr, size_t len, int prot);
bool jumbo_mimalloc_commit(bool commit, void *start, size_t size, bool *is_zero, void *argument);
void jumbo_mimalloc_asked(void);
size_t jumbo_mimalloc_taken(void);
size_t jumbo_mimalloc_threads(void);
void *jumbo_mimalloc_beside(size_t size, bool zeroed);
void jumbo_mimalloc_sparse(bool now);
bool jumbo_mimalloc_admits(void);
size_t jumbo_mimalloc_allowance(void);
bool jumbo_mimalloc_thin(void *addr, size_t len);
_Noreturn void jumbo_mimalloc_corrupted(void);
int jumbo_mimalloc_lock(uint32_t *lock);
int jumbo_mimalloc_try_lock(uint32_t *lock);
int jumbo_mimalloc_unlock(uint32_t *lock);
bool jumbo_mimalloc_holds(const uint32_t *lock);
int jumbo_mimalloc_at_end(void *value, void (*done)(void *));
#pragma GCC visibility pop

/* mimalloc's locks are jumbo's: C libraries differ in what they have in one, and in which library they are. */
#define pthread_mutex_t uint32_t
#undef PTHREAD_MUTEX_INITIALIZER
#define PTHREAD_MUTEX_INITIALIZER 0
#define pthread_mutex_lock(lock) jumbo_mimalloc_lock(lock)
#define pthread_mutex_trylock(lock) jumbo_mimalloc_try_lock(lock)
#define pthread_mutex_unlock(lock) jumbo_mimalloc_unlock(lock)
#define pthread_mutex_destroy(lock) (void)(lock)
/* The key that has it hear of a thread's end is made for the second thread: there may be no libpthread before. */
#define pthread_key_create(key, done) (void)(*(key) = 0)
#define pthread_setspecific(key, value) jumbo_mimalloc_at_end(value, &mi_pthread_done)

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
/* How a thread waits for another that is about to be done: without a system call, which a seccomp filter may not let pass. */
#define sleep(seconds) jumbo_wait()

static inline void jumbo_wait(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield" ::: "memory");
#endif
}

/* A thread's heap begins with random bits, which no promise rests on here. Behind a seccomp filter they are made of some that
 * were asked for before. */
static _Atomic(int) confined;
static uint64_t seed;
static _Atomic(uint64_t) drawn;

static long jumbo_syscall(long number, ...) {
  long arguments[6];
  va_list list;
  va_start(list, number);
  for (int at = 0; at < 6; at++) arguments[at] = va_arg(list, long);
  va_end(list);
  if (number == SYS_open || number == SYS_access) {
    /* Whether memory is overcommitted, THPs are on and there are several nodes: all of that is ours to know. */
    errno = ENOENT;
    return -1;
  }
  if (number != SYS_getrandom || !atomic_load_explicit(&confined, memory_order_acquire)) {
    const int programs = *__errno_location();
    const long answer = syscall(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], arguments[5]);
    errno = *__errno_location();
    *__errno_location() = programs;
    return answer;
  }
  unsigned char *to = (unsigned char *)arguments[0];
  for (long at = 0; at < arguments[1]; at++) {
    uint64_t bits = seed + atomic_fetch_add_explicit(&drawn, 1, memory_order_relaxed) * 0x9e3779b97f4a7c15;
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111eb;
    to[at] = (unsigned char)(bits >> 56);
  }
  return arguments[1];
}
#define syscall jumbo_syscall

struct mi_page_s;
static bool jumbo_is_left(struct mi_page_s *page);
static size_t jumbo_swept(const struct mi_page_s *page);
#include "mimalloc.h"
#include "mimalloc/internal.h"

/* What is here relies on what is static there. Before another version is built with it, read all of it again: sweep.h first. */
_Static_assert(MI_MALLOC_VERSION == 30302, "the shim was written for mimalloc 3.3.2");

/* The thread that has memory given back, one at a time, by the address of a variable of its own: the child of a fork beside it
 * does not have that thread, and would never have its turn. */
static _Atomic(uintptr_t) purging;
#undef mi_atomic_guard
#define mi_atomic_guard(guard)                                                             \
  (void)(guard);                                                                           \
  for (uintptr_t nobody = 0, self = (uintptr_t)&own_errno;                                 \
       self != 0 && mi_atomic_cas_strong_acq_rel(&purging, &nobody, self);                 \
       mi_atomic_store_release(&purging, (uintptr_t)0), self = 0)

#include "mimalloc/prim.h"
/* A thread that has no theap, and frees a block of an abandoned page, leaves the page for others to find all the same. All that is
 * asked of it is where to count, and whether it takes pages over: no. */
static mi_theap_t no_theap;
static inline mi_theap_t *associated(mi_page_t *page) {
  mi_theap_t *theap = _mi_page_associated_theap_peek(page);
  return theap == NULL ? &no_theap : theap;
}
#define _mi_page_associated_theap_peek(page) associated(page)
#include "static.c"

/* What glibc aligns every block to (MALLOC_ALIGNMENT); mimalloc aligns blocks of up to 8 bytes to 8. */
#define LEAST 16

static inline size_t at_least(size_t size) { return size < LEAST ? LEAST : size; }

/* From this size on a block is large: what is done for one does not show beside its own cost. */
#define LARGE (64 * 1024)
/* From this size on a freed block goes back at once, as it does with glibc, whose highest threshold it is. */
#define AT_ONCE (32 * 1024 * 1024)

/* Behind a seccomp filter nothing goes back: that takes system calls, and reads the clock. */
static inline bool is_confined(void) { return atomic_load_explicit(&confined, memory_order_relaxed) != 0; }

/* How often what is due is looked for, in milliseconds. */
#define PAUSE 100
static _Atomic(int64_t) next_look;

/* What has been free for as long as mimalloc keeps it goes back. By itself mimalloc looks at the end of a thread, when
 * memory is short, and at every ten thousandth malloc(3) that finds nothing at hand. The clock costs next to nothing
 * here; mimalloc's own is a system call where the kernel trusts no fast one. */
static inline void give_due(void) {
  const int64_t due = mi_atomic_loadi64_relaxed(&subproc_main.purge_expire);
  if (due == 0 || is_confined()) return;
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
  const int64_t now = time.tv_sec * 1000 + time.tv_nsec / 1000000;
  if (now < due || now < mi_atomic_loadi64_relaxed(&next_look)) return;
  mi_atomic_storei64_relaxed(&next_look, now + PAUSE);
  mi_arenas_try_purge(false, false, &subproc_main, 0);
}

/* How many slices wait to go back. */
static size_t waiting(void) {
  size_t sum = 0;
  for (size_t at = 0; at < mi_arenas_get_count(&subproc_main); at++) {
    mi_arena_t *arena = mi_arena_from_index(&subproc_main, at);
    if (arena != NULL) sum += mi_bitmap_popcount(arena->slices_purge);
  }
  return sum;
}

/* At each so many frees of small blocks of a thread, a MiB of them at the most, what waits is counted; and no more than this
 * waits. Else a program that frees all it has, and rests, would keep it: nothing comes due where nobody calls. */
#define EACH 4096
#define MOST_WAITING (16 * 1024 * 1024 / MI_ARENA_SLICE_SIZE)
static __thread unsigned small_frees;
/* Some cannot go: they share a huge page with what is in use. */
static _Atomic(size_t) stuck;

static mi_decl_noinline void give_beyond(void) {
  if (mi_atomic_loadi64_relaxed(&subproc_main.purge_expire) == 0 || is_confined()) return;
  size_t before = atomic_load_explicit(&stuck, memory_order_relaxed), now = waiting();
  if (now >= before + MOST_WAITING) {
    mi_arenas_try_purge(true, true, &subproc_main, 0);
    now = before = waiting();
  }
  if (now <= before) atomic_store_explicit(&stuck, now, memory_order_relaxed);
}

/* Every thread that mimalloc serves has a slice of 64 KiB for each size class that it asks for, on huge pages. So only those are
 * served that ask for much, and only so many at a time (jumbo_mimalloc_admits): the others are glibc's. */
#define MUCH (1024 * 1024)
#define ADMITTED SIZE_MAX
/* No fresh pages for it (look). */
#define REFUSED (SIZE_MAX - 1)
static __thread size_t thread_asked;
static bool admits_all;

#include "sweep.h"

static mi_decl_noinline bool admit(size_t size) {
  if (thread_asked == REFUSED) {
    mi_theap_t *theap = _mi_theap_default();
    return mi_theap_is_initialized(theap) && has_room(theap, at_least(size));
  }
  thread_asked += size;
  if (!admits_all) {
    if (thread_asked < MUCH) return false;
    thread_asked = 0;
    if (!jumbo_mimalloc_admits()) return false;
  }
  thread_asked = ADMITTED;
  return true;
}

static inline bool is_admitted(size_t size) { return mi_likely(thread_asked == ADMITTED) || admit(size); }

/* Every thousandth malloc(3) that finds nothing at hand. */
static void at_thousandth(bool force, unsigned long long heartbeat, void *argument) {
  (void)heartbeat, (void)argument;
  give_due();
  /* Else it may be the thread's end. */
  if (force) {
    set_sparse(false);
    free_held();
  } else {
    /* Memory that was taken before, and came back, counts nowhere else: a base page for each of them, at the most. */
    if (is_sparse) beside_bytes += 1000 * BASE;
    look_if_due();
  }
  jumbo_mimalloc_asked();
}

/* Has slices of an arena given back that were claimed before, and makes them available again. */
static void give_claimed(mi_arena_t *arena, size_t first, size_t end) {
  if (first == end) return;
  mi_arena_purge(arena, first, end - first);
  mi_bitmap_clearN(arena->slices_purge, first, end - first);
  mi_bbitmap_setN(arena->slices_free, first, end - first);
}

/* Has the slices of a block that was freed given back, but for those that another block has again: in whole huge pages, and
 * in one call where none has, so that several threads can do it. */
static void give_back(mi_memid_t memid) {
  if (memid.memkind != MI_MEM_ARENA) return;
  size_t at, count;
  mi_arena_t *arena = mi_arena_from_memid(memid, &at, &count);
  if (arena->memid.is_pinned || is_confined()) return;
  const size_t least = mi_slice_count_of_size(_mi_os_minimal_purge_size());
  const size_t end = _mi_align_down(at + count, least);
  at = _mi_align_up(at, least);
  size_t first = at;
  while (at < end) {
    /* As many as can be claimed at a time. */
    size_t next = (at / MI_BCHUNK_BITS + 1) * MI_BCHUNK_BITS;
    if (next > end) next = end;
    if (!mi_bbitmap_try_clearNC(arena->slices_free, at, next - at)) {
      give_claimed(arena, first, at);
      first = next;
    }
    at = next;
  }
  if (first < end) give_claimed(arena, first, end);
}

/* A block of `size` bytes and more, which had `memid`, is free. */
static void freed(size_t size, mi_memid_t memid) {
  if (size >= AT_ONCE) give_back(memid);
  give_due();
}

/* What mimalloc finds broken. Any other error is an answer of the function that was called. */
static void on_error(int error, void *argument) {
  (void)argument;
  if (error == EFAULT) jumbo_mimalloc_corrupted();
}

void jumbo_mimalloc_start(void *pool, size_t size) {
  mi_register_error(&on_error, NULL);
  admits_all = size > 0;
  /* Where a thread runs is the kernel's to know: memory is where it is touched first. */
  mi_atomic_store_release(&mi_numa_node_count, 1);
  /* Memory goes back in whole huge pages. */
  mi_option_set_default(mi_option_allow_thp, 2);
  /* Arenas are addresses at first, and become memory in whole huge pages (jumbo_mimalloc_protect): so they count as little as
   * glibc's do towards limits, and in a core dump. */
  mi_option_set_default(mi_option_arena_eager_commit, 0);
  mi_option_set(mi_option_arena_reserve, 256 * 1024);
  /* As large an object as an arena has room for. */
  mi_option_set_default(mi_option_arena_max_object_size, 16 * 1024 * 1024);
  _mi_auto_process_init();
  mi_register_deferred_free(&at_thousandth, NULL);
  if (size > 0) {
    mi_manage_memory(pool, size, false, false, false, -1, false, &jumbo_mimalloc_commit, NULL, NULL);
  }
}

/* The multiple that mi_manage_memory rounds down to. */
size_t jumbo_mimalloc_unit(void) { return MI_ARENA_SLICE_SIZE * MI_BCHUNK_BITS; }

bool jumbo_mimalloc_owns(const void *block) { return mi_is_in_heap_region(block); }

/* What mimalloc has taken from its arenas and the system, touched at least once. */
size_t jumbo_mimalloc_taken(void) {
  const int64_t taken = mi_atomic_loadi64_relaxed((_Atomic(int64_t) *)&subproc_main.stats.committed.current);
  const int64_t dropped = (int64_t)atomic_load_explicit(&dropped_bytes, memory_order_relaxed);
  return taken > dropped ? (size_t)(taken - dropped) : 0;
}

/* Takes note of a large block that mimalloc gave. */
static inline void *given(void *block, size_t size) {
  if (mi_unlikely(size >= LARGE)) jumbo_mimalloc_asked();
  return block;
}

static mi_decl_noinline void *allocate(size_t size, bool zeroed) {
  size = at_least(size);
  if (!is_admitted(size)) return thread_asked == REFUSED ? jumbo_mimalloc_beside(size, zeroed) : NULL;
  return given(zeroed ? mi_zalloc(size) : mi_malloc(size), size);
}

void *jumbo_mimalloc_malloc(size_t size) {
  if (mi_unlikely(thread_asked != ADMITTED || size > MI_SMALL_SIZE_MAX)) return allocate(size, false);
  /* mi_malloc_small, with nothing left to call. */
  return mi_theap_malloc_small_zero(_mi_theap_default(), at_least(size), false, NULL);
}

void *jumbo_mimalloc_zalloc(size_t size) { return allocate(size, true); }

void *jumbo_mimalloc_aligned(size_t align, size_t size) {
  if (!is_admitted(size)) return NULL;
  return given(mi_malloc_aligned(at_least(size), align < LEAST ? LEAST : align), size);
}

static mi_decl_noinline void free_large(void *block, const mi_page_t *page) {
  const size_t size = mi_page_block_size(page);
  const mi_memid_t memid = page->memid;
  mi_free(block);
  freed(size, memid);
}

/* The page of an address; NULL where it is not mimalloc's. _mi_safe_ptr_page, without a call. */
static inline mi_page_t *page_of(const void *block) {
  size_t at;
  const size_t first = _mi_page_map_index(block, &at);
  if (mi_unlikely(block >= mi_page_map_max_address || !mi_page_map_is_committed(first, NULL))) return NULL;
  const mi_submap_t pages = _mi_page_map_at(first);
  return mi_unlikely(pages == NULL) ? NULL : pages[at];
}

static mi_decl_noinline bool free_otherwise(void *block, mi_page_t *page) {
  if (page == NULL) return false;
  if (mi_page_block_size(page) >= LARGE) {
    free_large(block, page);
    return true;
  }
  if (++small_frees % EACH == 0) {
    give_beyond();
    look_at_freed(EACH, mi_page_block_size(page));
  }
  if (mi_page_has_interior_pointers(page) && free_special(page, block)) return true;
  /* mi_free, without another look for the page. */
  mi_free_ex(block, NULL, page);
  return true;
}

/* False where the block is not mimalloc's. */
bool jumbo_mimalloc_free(void *block) {
  mi_page_t *page = page_of(block);
  /* The thread's own page, without flags: mi_free_block_local. */
  const bool is_plain = mi_likely(page != NULL) && mi_page_xthread_id(page) == _mi_prim_thread_id();
  if (mi_unlikely(!is_plain || page->used <= 1 || mi_page_block_size(page) >= LARGE || (small_frees + 1) % EACH == 0))
    return free_otherwise(block, page);
  small_frees++;
  mi_block_set_next(page, block, page->local_free);
  page->local_free = block;
  page->used--;
  return true;
}

size_t jumbo_mimalloc_room(const void *block) {
  const mi_page_t *page = _mi_safe_ptr_page(block);
  const size_t count = mi_page_has_interior_pointers(page) ? joined(page, block) : 1;
  return count > 1 ? count * mi_page_block_size(page) : mi_usable_size(block);
}

bool jumbo_mimalloc_trim(void) {
  if (is_confined()) return false;
  mi_collect(true);
  const size_t before = waiting();
  mi_arenas_try_purge(true, true, &subproc_main, 0);
  return waiting() < before;
}

/* Threads that have pages of their own. The first one is not counted when it comes, and is when it goes. */
size_t jumbo_mimalloc_threads(void) {
  const intptr_t count = (intptr_t)mi_atomic_load_relaxed(&subproc_main.thread_count);
  return count > 0 ? (size_t)count : 0;
}

static long purge_delay;

void jumbo_mimalloc_confine(void) {
  if (atomic_load_explicit(&confined, memory_order_relaxed)) return;
  jumbo_syscall(SYS_getrandom, &seed, sizeof seed, 1 /* GRND_NONBLOCK */);
  atomic_store_explicit(&confined, 1, memory_order_release);
  purge_delay = mi_option_get(mi_option_purge_delay);
  mi_option_set(mi_option_purge_delay, -1);
}

/* There is no filter after all. */
void jumbo_mimalloc_unconfine(void) {
  if (!is_confined()) return;
  mi_option_set(mi_option_purge_delay, purge_delay);
  atomic_store_explicit(&confined, 0, memory_order_release);
}

/* What is held over a fork, in the order in which mimalloc nests them. */
static mi_lock_t *const fork_locks[] = {
  &subprocs_lock, &subproc_main.heaps_lock, &heap_main.theaps_lock, &heap_main.os_abandoned_pages_lock,
  &heap_main.arena_pages_lock, &subproc_main.arena_reserve_lock, &mi_page_map_lock,
};
#define FORK_LOCKS (sizeof fork_locks / sizeof fork_locks[0])
/* Which of them the fork under way has taken, and whether other threads may have been amid something. */
static unsigned taken_locks;
static bool was_alone;

/* This thread may be in a signal handler that interrupted mimalloc, with some of them held: it waits for
 * none then, least of all for itself. Where it is the only one it takes none: what is locked is its own. True where it took any.
 * What stays as it is is not written: that would copy its page, in both processes. */
bool jumbo_mimalloc_before_fork(bool is_alone) {
  if (was_alone != is_alone) was_alone = is_alone;
  if (is_alone) return false;
  bool waits = true;
  for (size_t at = 0; at < FORK_LOCKS; at++) waits = waits && !jumbo_mimalloc_holds(&fork_locks[at]->mutex);
  unsigned taken = 0;
  for (size_t at = 0; at < FORK_LOCKS; at++) {
    if (waits) mi_lock_acquire(fork_locks[at]);
    else if (!mi_lock_try_acquire(fork_locks[at])) continue;
    taken |= 1u << at;
  }
  taken_locks = taken;
  return true;
}

void jumbo_mimalloc_after_fork(void) {
  const unsigned taken = taken_locks;
  for (size_t at = FORK_LOCKS; at-- > 0;) {
    if (taken & 1u << at) mi_lock_release(fork_locks[at]);
  }
}

/* A thread that is gone may have been about to claim a page: then the page is not on the map for a moment, and who frees its blocks
 * waits until it is. */
static bool map_again(size_t slice, size_t count, mi_arena_t *arena, void *pages) {
  (void)count;
  mi_page_t *page = mi_arena_page_at_slice(arena, slice);
  if (!mi_page_is_abandoned_mapped(page) || mi_page_is_owned(page)) return true;
  mi_bitmap_set(((mi_arena_pages_t *)pages)->pages_abandoned[_mi_bin(page->block_size)], slice);
  return true;
}

/* In the child: it has this thread alone. Whether it is sparse. */
bool jumbo_mimalloc_forked(void) {
  if (jumbo_mimalloc_threads() != 0) mi_atomic_store_relaxed(&subproc_main.thread_count, (size_t)0);
  for (size_t at = 0; at < mi_arenas_get_count(&subproc_main) && !was_alone; at++) {
    mi_arena_t *arena = mi_arena_from_index(&subproc_main, at);
    mi_arena_pages_t *pages = arena == NULL ? NULL : mi_heap_arena_pages(&heap_main, arena);
    if (pages != NULL) _mi_bitmap_forall_set(pages->pages, &map_again, arena, pages);
  }
  if (mi_option_get(mi_option_minimal_purge_size) != 0) mi_option_set(mi_option_minimal_purge_size, 0);
  const uintptr_t purger = mi_atomic_load_relaxed(&purging);
  if (purger != 0 && purger != (uintptr_t)&own_errno) mi_atomic_store_release(&purging, (uintptr_t)0);
  return is_sparse;
}
