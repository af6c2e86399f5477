/* mimalloc, adapted to run inside a wrapped program.
 *
 * One translation unit with mimalloc's sources (of the crate libmimalloc-sys), to use their static
 * functions and variables:
 * - no constructor and no destructor;
 * - jumbo makes its mappings, not the mmap(2) of the program;
 * - errno is its own: the program's errno changes only if a function fails;
 * - a fork(2) can hold its locks, so that the child of a program with threads can allocate.
 */
#define MI_PRIM_HAS_PROCESS_ATTACH 1
/* Options in the environment are for the program's own mimalloc. */
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

/* arm64 has no such system calls; jumbo_syscall handles mimalloc's calls by these numbers. */
#ifndef SYS_open
#define SYS_open (-1)
#define SYS_access (-2)
#endif

/* Functions in mod.rs, hidden from the program. Those that can fail return a negative errno. */
#pragma GCC visibility push(hidden)
intptr_t jumbo_mimalloc_map(void *addr, size_t len, int prot, int flags);
int jumbo_mimalloc_unmap(void *addr, size_t len);
int jumbo_mimalloc_advise(void *addr, size_t len, int advice);
int jumbo_mimalloc_protect(void *addr, size_t len, int prot);
bool jumbo_mimalloc_commit(bool commit, void *start, size_t size, bool *is_zero, void *argument);
void jumbo_mimalloc_allocated(void);
void jumbo_mimalloc_grows(size_t size);
size_t jumbo_mimalloc_taken(void);
size_t jumbo_mimalloc_threads(void);
void *jumbo_mimalloc_reuse(size_t size, bool zeroed);
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
/* Functions in alloc.rs: malloc(3) and free(3) of blocks that are not mimalloc's; a block of glibc,
 * and whether glibc has more free memory of its size in a heap of more than `max` bytes. */
void *jumbo_malloc_other(size_t size);
void jumbo_free_other(void *block);
/* Functions in own_stack.rs: whether the present stack has room; work on a stack of the library. */
bool jumbo_mimalloc_has_room(void);
void jumbo_mimalloc_aside(void *job, void (*perform)(void *));
void *jumbo_malloc_asked(size_t size, bool zeroed, size_t max, bool *has_more);
#pragma GCC visibility pop

/* mimalloc uses jumbo's locks: the size and the library of mutexes differ between C libraries. */
#define pthread_mutex_t uint32_t
#undef PTHREAD_MUTEX_INITIALIZER
#define PTHREAD_MUTEX_INITIALIZER 0
#define pthread_mutex_lock(lock) jumbo_mimalloc_lock(lock)
#define pthread_mutex_trylock(lock) jumbo_mimalloc_try_lock(lock)
#define pthread_mutex_unlock(lock) jumbo_mimalloc_unlock(lock)
#define pthread_mutex_destroy(lock) (void)(lock)
/* The key for the end of a thread is created with the second thread: libpthread may not be loaded
 * before. */
#define pthread_key_create(key, done) (void)(*(key) = 0)
#define pthread_setspecific(key, value) jumbo_mimalloc_at_end(value, &mi_pthread_done)

#undef errno
static __thread int own_errno;
#define errno own_errno

static inline int status_of(int result) {
  if (result >= 0) return 0;
  errno = -result;
  return -1;
}

static inline void *mapping_of(intptr_t result) {
  if (result > 0 || result < -4095) return (void *)result;
  errno = (int)-result;
  return MAP_FAILED;
}

#define mmap(addr, len, prot, flags, fd, off) mapping_of(jumbo_mimalloc_map(addr, len, prot, flags))
#define munmap(addr, len) status_of(jumbo_mimalloc_unmap(addr, len))
#define madvise(addr, len, advice) status_of(jumbo_mimalloc_advise(addr, len, advice))
#define mprotect(addr, len, prot) status_of(jumbo_mimalloc_protect(addr, len, prot))
/* mimalloc would name its mappings, and switch THP off for the process by an option. */
#define prctl(...) 0
/* Spins for another thread that is almost done: a seccomp filter may not allow a system call. */
#define sleep(seconds) jumbo_wait()

static inline void jumbo_wait(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield" ::: "memory");
#endif
}

/* Random bits for a new heap; security does not depend on them. Under a seccomp filter a generator
 * with an earlier seed makes them. */
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
    /* mimalloc would read the state of overcommit, THP and NUMA; jumbo sets these options. */
    errno = ENOENT;
    return -1;
  }
  if (number != SYS_getrandom || !atomic_load_explicit(&confined, memory_order_acquire)) {
    const int program_errno = *__errno_location();
    const long result = syscall(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], arguments[5]);
    errno = *__errno_location();
    *__errno_location() = program_errno;
    return result;
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
static bool jumbo_is_only_swept(struct mi_page_s *page);
static size_t jumbo_swept(const struct mi_page_s *page);
#include "mimalloc.h"
#include "mimalloc/internal.h"

/* The shim relies on internals. Before an update of mimalloc, review all of it: sweep.h first. */
_Static_assert(MI_MALLOC_VERSION == 30302, "the shim was written for mimalloc 3.3.2");

/* A larger one would take a slice for each thread. */
_Static_assert(sizeof(mi_theap_t) <= 8192, "META_MAX_SIZE");

/* The thread that purges, one at a time, identified by the address of its errno: the child of a
 * fork in another thread detects that it does not have that thread. */
static _Atomic(uintptr_t) purging;
#undef mi_atomic_guard
#define mi_atomic_guard(guard)                                                             \
  (void)(guard);                                                                           \
  for (uintptr_t none = 0, self = (uintptr_t)&own_errno;                                   \
       self != 0 && mi_atomic_cas_strong_acq_rel(&purging, &none, self);                   \
       mi_atomic_store_release(&purging, (uintptr_t)0), self = 0)

#include "mimalloc/prim.h"
/* Theap of threads without one that free a block of an abandoned page: mimalloc reads its counters,
 * and whether the thread reclaims pages, which it does not. */
static mi_theap_t no_theap;
static inline mi_theap_t *associated(mi_page_t *page) {
  mi_theap_t *theap = _mi_page_associated_theap_peek(page);
  return theap == NULL ? &no_theap : theap;
}
#define _mi_page_associated_theap_peek(page) associated(page)
#include "static.c"

/* _mi_malloc_generic, a malloc(3) without a free block, on a stack with room. */
struct generic {
  mi_theap_t *theap;
  size_t size, zero_huge_alignment, *usable;
  void *block;
};

static void allocate_aside(void *job) {
  struct generic *generic = job;
  generic->block = malloc_generic(generic->theap, generic->size, generic->zero_huge_alignment, generic->usable);
}

void *_mi_malloc_generic(mi_theap_t *theap, size_t size, size_t zero_huge_alignment, size_t *usable) {
  if (mi_likely(jumbo_mimalloc_has_room())) return malloc_generic(theap, size, zero_huge_alignment, usable);
  struct generic generic = {theap, size, zero_huge_alignment, usable, NULL};
  jumbo_mimalloc_aside(&generic, &allocate_aside);
  return generic.block;
}

/* glibc's MALLOC_ALIGNMENT; mimalloc aligns blocks of up to 8 bytes to 8. */
#define MIN_BLOCK_BYTES 16

static inline size_t at_least(size_t size) { return size < MIN_BLOCK_BYTES ? MIN_BLOCK_BYTES : size; }

/* Minimum size of a large block: the extra checks are cheap beside its own cost. */
#define LARGE_BYTES (64 * 1024)
/* Minimum size of a block that is purged when it is freed: the maximum of glibc's mmap
 * threshold. */
#define PURGE_NOW_BYTES (32 * 1024 * 1024)

/* Under a seccomp filter there is no purge: it makes system calls and reads the clock. */
static inline bool is_confined(void) { return atomic_load_explicit(&confined, memory_order_relaxed) != 0; }

#define PURGE_INTERVAL_MS 100
static _Atomic(int64_t) next_purge;

/* Purges memory whose delay is over. mimalloc itself checks at the end of a thread, when memory is
 * short, and at every ten thousandth malloc(3) without a free block. The coarse clock is cheap;
 * mimalloc's is a system call without a vDSO clock. */
static inline void purge_due(void) {
  const int64_t due = mi_atomic_loadi64_relaxed(&subproc_main.purge_expire);
  if (due == 0 || is_confined()) return;
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
  const int64_t now = time.tv_sec * 1000 + time.tv_nsec / 1000000;
  if (now < due || now < mi_atomic_loadi64_relaxed(&next_purge)) return;
  mi_atomic_storei64_relaxed(&next_purge, now + PURGE_INTERVAL_MS);
  mi_arenas_try_purge(false, false, &subproc_main, 0);
}

/* Number of free slices that are not purged. */
static size_t waiting(void) {
  size_t sum = 0;
  for (size_t at = 0; at < mi_arenas_get_count(&subproc_main); at++) {
    mi_arena_t *arena = mi_arena_from_index(&subproc_main, at);
    if (arena != NULL) sum += mi_bitmap_popcount(arena->slices_purge);
  }
  return sum;
}

/* Frees of small blocks in a thread, at most a MiB of them, between two checks of the bound on
 * waiting slices. Without the bound an idle program would keep what it freed: a due purge takes a
 * later call. */
#define CHECK_FREES 4096
#define MAX_WAITING_SLICES (16 * 1024 * 1024 / MI_ARENA_SLICE_SIZE)
static __thread unsigned small_frees;
/* Waiting slices that share a huge page with slices in use, and stay. */
static _Atomic(size_t) stuck;

static mi_decl_noinline void purge_excess(void) {
  if (mi_atomic_loadi64_relaxed(&subproc_main.purge_expire) == 0 || is_confined()) return;
  size_t before = atomic_load_explicit(&stuck, memory_order_relaxed), now = waiting();
  if (now >= before + MAX_WAITING_SLICES) {
    mi_arenas_try_purge(true, true, &subproc_main, 0);
    now = before = waiting();
  }
  if (now <= before) atomic_store_explicit(&stuck, now, memory_order_relaxed);
}

/* Each thread that mimalloc serves has a slice of 64 KiB per size class in use, on huge pages. So
 * it serves only threads that allocate much, and a limited number (jumbo_mimalloc_admits); glibc
 * serves the others. */
#define MIN_THREAD_BYTES (1024 * 1024)
#define ADMITTED SIZE_MAX
/* The thread gets no fresh pages (check_waste). */
#define REFUSED (SIZE_MAX - 1)
/* Bytes that the thread requested, or ADMITTED, or REFUSED. */
static __thread size_t thread_bytes;
static bool admits_all;
/* Before a fresh page glibc is asked for a block (needs_glibc). */
static bool has_glibc;

#include "sweep.h"

static mi_decl_noinline bool admit(size_t size) {
  if (thread_bytes == REFUSED) {
    mi_theap_t *theap = _mi_theap_default();
    return mi_theap_is_initialized(theap) && has_room(theap, at_least(size));
  }
  thread_bytes += size;
  if (!admits_all) {
    if (thread_bytes < MIN_THREAD_BYTES) return false;
    thread_bytes = 0;
    if (!jumbo_mimalloc_admits()) return false;
  }
  thread_bytes = ADMITTED;
  return true;
}

static inline bool is_admitted(size_t size) { return mi_likely(thread_bytes == ADMITTED) || admit(size); }

/* mi_deferred_free_fun: every thousandth malloc(3) without a free block, and with `force` at the
 * end of a thread. */
static void at_thousandth(bool force, unsigned long long heartbeat, void *argument) {
  (void)heartbeat, (void)argument;
  purge_due();
  if (force) {
    set_sparse(false);
    free_held();
  } else {
    /* Reused memory counts nowhere else: at most a base page for each of these calls. */
    if (is_sparse) other_bytes += 1000 * BASE_BYTES;
    check_waste_if_due();
  }
  jumbo_mimalloc_allocated();
}

/* Purges slices of an arena that the caller has claimed, and makes them available again. */
static void purge_claimed(mi_arena_t *arena, size_t first, size_t end) {
  if (first == end) return;
  mi_arena_purge(arena, first, end - first);
  mi_bitmap_clearN(arena->slices_purge, first, end - first);
  mi_bbitmap_setN(arena->slices_free, first, end - first);
}

/* Purges the slices of a freed block, except those that another block uses again: in whole huge
 * pages, and in one call if possible, so that several threads can free the range. */
static void purge_block(mi_memid_t memid) {
  if (memid.memkind != MI_MEM_ARENA) return;
  size_t at, count;
  mi_arena_t *arena = mi_arena_from_memid(memid, &at, &count);
  if (arena->memid.is_pinned || is_confined()) return;
  const size_t min_count = mi_slice_count_of_size(_mi_os_minimal_purge_size());
  const size_t end = _mi_align_down(at + count, min_count);
  at = _mi_align_up(at, min_count);
  size_t first = at;
  while (at < end) {
    /* The maximum number to claim at a time. */
    size_t next = (at / MI_BCHUNK_BITS + 1) * MI_BCHUNK_BITS;
    if (next > end) next = end;
    if (!mi_bbitmap_try_clearNC(arena->slices_free, at, next - at)) {
      purge_claimed(arena, first, at);
      first = next;
    }
    at = next;
  }
  if (first < end) purge_claimed(arena, first, end);
}

/* Detects a corrupted free list. Other errors are results of the function that was called. */
static void on_error(int error, void *argument) {
  (void)argument;
  if (error == EFAULT) jumbo_mimalloc_corrupted();
}

void jumbo_mimalloc_start(void *pool, size_t size, bool is_glibc) {
  has_glibc = is_glibc && size == 0;
  mi_register_error(&on_error, NULL);
  admits_all = size > 0;
  /* The kernel places memory on the node of the first touch. */
  mi_atomic_store_release(&mi_numa_node_count, 1);
  /* Purges whole huge pages. */
  mi_option_set_default(mi_option_allow_thp, 2);
  /* Arenas are reserved, and committed in whole huge pages (jumbo_mimalloc_protect): so they count
   * as little as glibc's towards limits, and in a core dump. */
  mi_option_set_default(mi_option_arena_eager_commit, 0);
  mi_option_set(mi_option_arena_reserve, 256 * 1024);
  /* The largest object that fits in an arena. */
  mi_option_set_default(mi_option_arena_max_object_size, 16 * 1024 * 1024);
  _mi_auto_process_init();
  mi_register_deferred_free(&at_thousandth, NULL);
  if (size > 0) {
    mi_manage_memory(pool, size, false, false, false, -1, false, &jumbo_mimalloc_commit, NULL, NULL);
  }
}

/* Unit to which mi_manage_memory rounds down. */
size_t jumbo_mimalloc_unit(void) { return MI_ARENA_SLICE_SIZE * MI_BCHUNK_BITS; }

bool jumbo_mimalloc_owns(const void *block) { return mi_is_in_heap_region(block); }

/* Bytes that mimalloc has taken from its arenas and the system, touched at least once. */
size_t jumbo_mimalloc_taken(void) {
  const int64_t taken = mi_atomic_loadi64_relaxed((_Atomic(int64_t) *)&subproc_main.stats.committed.current);
  const int64_t dropped = (int64_t)atomic_load_explicit(&dropped_bytes, memory_order_relaxed);
  return taken > dropped ? (size_t)(taken - dropped) : 0;
}

/* Reports a large block. */
static inline void *reported(void *block, size_t size) {
  if (mi_unlikely(size >= LARGE_BYTES)) jumbo_mimalloc_allocated();
  return block;
}

/* Memory of mimalloc, in slices, at which glibc was last known to have no free memory for a size
 * class. Where glibc has some, plain takes that. So once mimalloc has taken a quarter of the
 * allowance since, the class asks glibc before it takes a fresh page. */
static __thread uint32_t asked_at[MI_BIN_COUNT];

/* Number of blocks of a size, in words, that glibc serves without being asked: it had free memory
 * for one. */
#define SERVED_BLOCKS 31
static __thread uint8_t left_to_serve[MI_PAGES_DIRECT];

static inline bool is_served(size_t size) {
  uint8_t *left = &left_to_serve[_mi_wsize_from_size(size)];
  if (*left == 0) return false;
  (*left)--;
  return true;
}

static uint32_t taken_slices(void) { return (uint32_t)(jumbo_mimalloc_taken() / MI_ARENA_SLICE_SIZE); }

/* Memory of mimalloc, in slices, up to which the heap has been told to make room. */
static _Atomic(uint32_t) announced;
#define ANNOUNCED_SLICES (4 * 1024 * 1024 / MI_ARENA_SLICE_SIZE)

/* Announces growth ahead of the threads, which may fill memory faster than the heap's scans see it.
 * The caller holds no lock of mimalloc. */
static void announce(size_t taken) {
  uint32_t before = atomic_load_explicit(&announced, memory_order_relaxed);
  const bool is_ahead = before >= taken + ANNOUNCED_SLICES / 2 && before <= taken + 2 * ANNOUNCED_SLICES;
  if (mi_likely(is_ahead)) return;
  const uint32_t now = (uint32_t)(taken + ANNOUNCED_SLICES);
  if (atomic_compare_exchange_strong(&announced, &before, now) && now > before)
    jumbo_mimalloc_grows((now - before) * MI_ARENA_SLICE_SIZE);
}

static bool may_take_page(size_t bin) {
  const size_t now = taken_slices(), budget = jumbo_mimalloc_allowance() / 4 / MI_ARENA_SLICE_SIZE;
  announce(now);
  if (now < asked_at[bin]) asked_at[bin] = (uint32_t)now;
  return now - asked_at[bin] < budget;
}

/* Reports whether a block would need a fresh page, and glibc has to be asked first. */
static inline bool needs_glibc(size_t size) {
  if (!has_glibc || size > MAX_SWEPT_BYTES) return false;
  mi_theap_t *theap = _mi_theap_default();
  if (mi_likely(_mi_theap_get_free_small_page(theap, size)->free != NULL) || is_confined()) return false;
  return (!mi_theap_is_initialized(theap) || !has_room(theap, size)) && !may_take_page(_mi_bin(size));
}

/* A block of glibc in place of one on a fresh page. */
static mi_decl_noinline void *ask_glibc(size_t size, bool zeroed) {
  bool has_more = true;
  void *block = jumbo_malloc_asked(size, zeroed, share(jumbo_mimalloc_allowance() / 4), &has_more);
  if (has_more) left_to_serve[_mi_wsize_from_size(size)] = SERVED_BLOCKS;
  else asked_at[_mi_bin(size)] = taken_slices();
  return block;
}

static inline void *allocate(size_t size, bool zeroed) {
  if (!is_admitted(size)) return thread_bytes == REFUSED ? jumbo_mimalloc_reuse(size, zeroed) : NULL;
  if (needs_glibc(size)) return ask_glibc(size, zeroed);
  return reported(zeroed ? mi_zalloc(size) : mi_malloc(size), size);
}

/* The same on a stack with room: a thread that may have no fresh page sweeps and joins its pages. */
struct wanted {
  size_t size;
  bool zeroed;
  void *block;
};

static void perform_wanted(void *job) {
  struct wanted *wanted = job;
  wanted->block = allocate(wanted->size, wanted->zeroed);
}

/* A block of mimalloc, or one that glibc had for it; NULL if there is none. */
void *jumbo_mimalloc_allocate(size_t size, bool zeroed) {
  size = at_least(size);
  if (mi_likely(jumbo_mimalloc_has_room())) return allocate(size, zeroed);
  struct wanted wanted = {size, zeroed, NULL};
  jumbo_mimalloc_aside(&wanted, &perform_wanted);
  return wanted.block;
}

static mi_decl_noinline void *malloc_slow(size_t size) {
  if (size <= MAX_SWEPT_BYTES && is_served(size)) return jumbo_malloc_other(size);
  void *block = jumbo_mimalloc_allocate(size, false);
  return block != NULL ? block : jumbo_malloc_other(size);
}

/* malloc(3): a block of mimalloc if there is one. */
void *jumbo_mimalloc_malloc(size_t size) {
  if (mi_unlikely(thread_bytes != ADMITTED || size > MI_SMALL_SIZE_MAX)) return malloc_slow(size);
  /* mi_malloc_small for a page with a free block whose successor is near, without calls. */
  mi_page_t *page = _mi_theap_get_free_small_page(_mi_theap_default(), at_least(size));
  mi_block_t *block = page->free;
  if (mi_unlikely(block == NULL)) return malloc_slow(size);
  mi_block_t *next = mi_block_nextx(page, block, page->keys);
  if (mi_unlikely(next != NULL && ((uintptr_t)block ^ (uintptr_t)next) >= MI_ARENA_SLICE_SIZE)) return malloc_slow(size);
  page->free = next;
  page->used++;
  block->next = 0;
  return block;
}

void *jumbo_mimalloc_aligned(size_t align, size_t size) {
  if (!is_admitted(size)) return NULL;
  if (needs_glibc(at_least(size))) {
    jumbo_free_other(ask_glibc(at_least(size), false));
    return NULL;
  }
  return reported(mi_malloc_aligned(at_least(size), align < MIN_BLOCK_BYTES ? MIN_BLOCK_BYTES : align), size);
}

static mi_decl_noinline void free_large(void *block, const mi_page_t *page) {
  const size_t size = mi_page_block_size(page);
  const mi_memid_t memid = page->memid;
  mi_free(block);
  if (size >= PURGE_NOW_BYTES) purge_block(memid);
  purge_due();
}

/* _mi_safe_ptr_page, inlined: returns the page of an address; NULL if it is not mimalloc's. */
static inline mi_page_t *page_of(const void *block) {
  size_t at;
  const size_t first = _mi_page_map_index(block, &at);
  if (mi_unlikely(block >= mi_page_map_max_address || !mi_page_map_is_committed(first, NULL))) return NULL;
  const mi_submap_t pages = _mi_page_map_at(first);
  return mi_unlikely(pages == NULL) ? NULL : pages[at];
}

static mi_decl_noinline void free_deep(void *block, mi_page_t *page) {
  if (mi_page_block_size(page) >= LARGE_BYTES) return free_large(block, page);
  if (++small_frees % CHECK_FREES == 0) {
    purge_excess();
    check_freed(CHECK_FREES, mi_page_block_size(page));
  }
  if (mi_page_has_interior_pointers(page) && free_special(page, block)) return;
  /* mi_free, without a second lookup of the page. */
  mi_free_ex(block, NULL, page);
}

struct freed {
  void *block;
  mi_page_t *page;
};

static void free_aside(void *job) {
  struct freed *freed = job;
  free_deep(freed->block, freed->page);
}

static mi_decl_noinline void free_slow(void *block, mi_page_t *page) {
  if (page == NULL) return jumbo_free_other(block);
  if (mi_likely(jumbo_mimalloc_has_room())) return free_deep(block, page);
  struct freed freed = {block, page};
  jumbo_mimalloc_aside(&freed, &free_aside);
}

/* free(3) of any block. */
void jumbo_mimalloc_free(void *block) {
  mi_page_t *page = page_of(block);
  /* The thread's own page, without flags: mi_free_block_local. */
  const bool is_plain = mi_likely(page != NULL) && mi_page_xthread_id(page) == _mi_prim_thread_id();
  /* The last block retires the page (_mi_page_retire), unless it is retired already. */
  if (mi_unlikely(!is_plain || page->used <= (page->retire_expire == 0) || mi_page_block_size(page) >= LARGE_BYTES ||
                  (small_frees + 1) % CHECK_FREES == 0))
    return free_slow(block, page);
  small_frees++;
  mi_block_set_next(page, block, page->local_free);
  page->local_free = block;
  page->used--;
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

/* Number of threads with their own pages. mimalloc counts the first thread only at its end. */
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

/* Reverts jumbo_mimalloc_confine. */
void jumbo_mimalloc_unconfine(void) {
  if (!is_confined()) return;
  mi_option_set(mi_option_purge_delay, purge_delay);
  atomic_store_explicit(&confined, 0, memory_order_release);
}

/* Locks held over a fork, in mimalloc's lock order. */
static mi_lock_t *const fork_locks[] = {
  &subprocs_lock, &subproc_main.heaps_lock, &heap_main.theaps_lock, &heap_main.os_abandoned_pages_lock,
  &heap_main.arena_pages_lock, &subproc_main.arena_reserve_lock, &mi_page_map_lock,
};
#define FORK_LOCKS (sizeof fork_locks / sizeof fork_locks[0])
/* Bits of the locks that the present fork holds; and whether it had no other threads. */
static unsigned taken_locks;
static bool was_alone;

/* Takes the locks, unless this is the only thread; true if it took any. A signal handler may have
 * interrupted mimalloc in this thread, with locks held: then no lock is waited for. Variables are
 * written only if they change: a write copies the page in both processes. */
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

/* Restores the abandoned-page bit of a page that a vanished thread was about to claim: threads that
 * free its blocks would wait for the bit. */
static bool map_again(size_t slice, size_t count, mi_arena_t *arena, void *pages) {
  (void)count;
  mi_page_t *page = mi_arena_page_at_slice(arena, slice);
  if (!mi_page_is_abandoned_mapped(page) || mi_page_is_owned(page)) return true;
  mi_bitmap_set(((mi_arena_pages_t *)pages)->pages_abandoned[_mi_bin(page->block_size)], slice);
  return true;
}

/* Forgets other threads in the child of a fork. Returns whether this thread is sparse. */
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
