/* Bound on the memory that mimalloc keeps: drops base pages without live blocks. Part of shim.c.
 *
 * A page of mimalloc (64 KiB) holds blocks of one size, and stays resident while one of them is
 * live. A program that frees most of its objects and allocates others of another size would need
 * memory for both. So a sweep drops the base pages (4 KiB) between sparse live blocks.
 *
 * Invariant: a block that overlaps a dropped base page is swept: in no free list, and counted in
 * `used`. To mimalloc it is a block that the program never frees. So mimalloc's invariants hold:
 * `used` and the free lists add up to `capacity`; a page whose `used` is `reserved` is full, and
 * abandoned as such; a page whose `used` is not 0 is neither retired nor freed; no free list points
 * into memory that reads as zero, and `free_is_zero` is false since the lists were collected. The
 * dropped base pages in the note of the page's slice determine the swept blocks.
 *
 * Only the owner of a page reads and changes its blocks and writes its note: the thread whose theap
 * has it, or that claimed it while it was abandoned. A page with swept blocks has the flag for
 * interior pointers, so free(3) of its blocks reaches free_swept. Where mimalloc's owner tests
 * whether a page is free, it also calls jumbo_is_only_swept (build.rs), and frees the page as a
 * whole. The slices are marked dirty, and have no note, for the next user.
 *
 * Under a seccomp filter, and in locked memory, nothing is dropped, and the lists stay
 * unchanged. */

/* Maximum size of a swept block: larger ones come from mimalloc only on a pool, whose pages cannot
 * be dropped in part. */
#define MAX_SWEPT_BYTES 1024
#define BASE_BYTES ((size_t)4096)
#define BASES (MI_ARENA_SLICE_SIZE / BASE_BYTES)
#define MAX_BLOCKS (MI_ARENA_SLICE_SIZE / MIN_BLOCK_BYTES)

#if MI_ARENA_SLICE_SIZE != 65536 || MI_SMALL_PAGE_SIZE != MI_ARENA_SLICE_SIZE
#error "a note has a bit for each base page of a slice, and a page of small blocks is one slice"
#endif

/* Note of a slice: a bit for each dropped base page in the lower half, the number of swept blocks
 * in the upper. */
typedef _Atomic(uint32_t) note_t;
static _Atomic(uintptr_t) notes[MI_MAX_ARENAS];
/* Total size of the dropped base pages. */
static _Atomic(size_t) dropped_bytes;

/* Entry of a page's slice in the arena's table, which has `size` bytes per slice; NULL without a
 * table. */
static void *entry_of(_Atomic(uintptr_t) *tables, const mi_page_t *page, size_t size, bool make) {
  if (page->memid.memkind != MI_MEM_ARENA) return NULL;
  const mi_arena_t *arena = page->memid.mem.arena.arena;
  _Atomic(uintptr_t) *place = &tables[arena->arena_idx];
  uintptr_t table = atomic_load_explicit(place, memory_order_acquire);
  if (table == 0) {
    if (!make) return NULL;
    const size_t length = arena->slice_count * size;
    void *made = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) return NULL;
    if (atomic_compare_exchange_strong(place, &table, (uintptr_t)made)) table = (uintptr_t)made;
    else munmap(made, length);
  }
  return (void *)(table + page->memid.mem.arena.slice_index * size);
}

static note_t *note_of(const mi_page_t *page, bool make) { return entry_of(notes, page, sizeof(note_t), make); }

static inline uint32_t noted(const mi_page_t *page) {
  const note_t *note = note_of(page, false);
  return note == NULL ? 0 : atomic_load_explicit(note, memory_order_relaxed);
}

static inline uint32_t bases_of(uint32_t note) { return note & 0xffff; }
static inline size_t blocks_of(uint32_t note) { return note >> 16; }

/* Changes the note of a page that the caller owns. */
static void set_note(note_t *note, uint32_t bases, size_t blocks) {
  const uint32_t before = atomic_exchange_explicit(note, bases | (uint32_t)blocks << 16, memory_order_relaxed);
  const size_t more = __builtin_popcount(bases), less = __builtin_popcount(bases_of(before));
  atomic_fetch_add_explicit(&dropped_bytes, (more - less) * BASE_BYTES, memory_order_relaxed);
}

/* Bytes of a page outside of live blocks. Blocks that other threads freed count as live until they
 * are collected. */
static size_t waste_in(const mi_page_t *page) {
  const uint32_t note = noted(page);
  const size_t there = MI_ARENA_SLICE_SIZE - __builtin_popcount(bases_of(note)) * BASE_BYTES;
  const size_t live = (page->used - blocks_of(note)) * page->block_size;
  return live < there ? there - live : 0;
}

/* Number of swept blocks of a page that the caller owns. */
static size_t jumbo_swept(const mi_page_t *page) {
  return mi_page_has_interior_pointers(page) ? blocks_of(noted(page)) : 0;
}

/* Reports whether a page that the caller owns has only swept blocks, and marks it as free, so that
 * mimalloc frees it. */
static bool jumbo_is_only_swept(mi_page_t *page) {
  const size_t swept = jumbo_swept(page);
  if (swept == 0 || page->used != swept) return false;
  set_note(note_of(page, false), 0, 0);
  page->used = 0;
  return true;
}

/* Reports whether a block overlaps one of the base pages `bases` of its slice. */
static inline bool overlaps(uint32_t bases, size_t offset, size_t size) {
  return (bases >> offset / BASE_BYTES & 1) != 0 || (bases >> (offset + size - 1) / BASE_BYTES & 1) != 0;
}

static inline bool has_bit(const uint64_t *bits, size_t at) { return (bits[at / 64] >> at % 64 & 1) != 0; }

/* Drops base pages run by run. Returns the dropped ones. */
static uint32_t drop(uint8_t *slice, uint32_t bases) {
  uint32_t dropped = 0;
  for (size_t first = 0; first < BASES; first++) {
    size_t end = first;
    while (end < BASES && (bases >> end & 1) != 0) end++;
    if (end > first && jumbo_mimalloc_thin(slice + first * BASE_BYTES, (end - first) * BASE_BYTES)) {
      dropped |= (1u << end) - (1u << first);
    } else {
      /* A run may cross mappings, some of them locked, and be dropped in part. A base page is in
       * one mapping. */
      for (size_t at = first; at < end; at++) {
        if (jumbo_mimalloc_thin(slice + at * BASE_BYTES, BASE_BYTES)) dropped |= 1u << at;
      }
    }
    if (end > first) first = end;
  }
  return dropped;
}

/* Sets a bit for each free block of an own page; false if the program has corrupted the free list,
 * which stays unchanged. */
static bool collect_free(mi_page_t *page, uint64_t *is_free) {
  const size_t size = page->block_size;
  size_t count = 0, shift;
  uint64_t magic;
  mi_get_fast_divisor(size, &magic, &shift);
  for (mi_block_t *block = page->free; block != NULL; block = mi_block_next(page, block)) {
    const size_t at = mi_fast_divide((uint8_t *)block - page->page_start, magic, shift);
    /* The program freed a block twice, or an address inside of a block. */
    if (at >= page->capacity || (uint8_t *)block != page->page_start + at * size || has_bit(is_free, at)) return false;
    is_free[at / 64] |= (uint64_t)1 << at % 64;
    count++;
  }
  return count + page->used == page->capacity;
}

/* Links the free blocks outside of the base pages `bases`, in address order. Returns the number of
 * blocks in those base pages. */
static size_t link_free(mi_page_t *page, const uint64_t *is_free, uint32_t bases) {
  const size_t size = page->block_size, start = page->page_start - mi_page_slice_start(page);
  mi_block_t *head = NULL;
  size_t swept = 0, linked = 0;
  for (size_t at = page->capacity; at-- > 0;) {
    if (overlaps(bases, start + at * size, size)) swept++;
    else if (has_bit(is_free, at)) {
      mi_block_t *block = (mi_block_t *)(page->page_start + at * size);
      mi_block_set_next(page, block, head);
      head = block;
      linked++;
    }
  }
  page->free = head;
  page->used = (uint16_t)(page->capacity - linked);
  return swept;
}

/* Sweeps an own page. Returns the number of dropped base pages; all of them if the page is free. */
static size_t sweep_page(mi_page_t *page, mi_page_queue_t *queue) {
  _mi_page_free_collect(page, true);
  if (mi_page_all_free(page)) {
    _mi_page_free(page, queue);
    return BASES;
  }
  uint64_t is_free[MAX_BLOCKS / 64] = {0};
  note_t *note = note_of(page, true);
  if (note == NULL || !collect_free(page, is_free)) return 0;
  uint8_t *slice = mi_page_slice_start(page);
  const size_t size = page->block_size, start = page->page_start - slice;
  const uint32_t before = bases_of(atomic_load_explicit(note, memory_order_relaxed));

  /* Base pages with live blocks, or with blocks that mimalloc will add to the free list later. */
  uint32_t live = 0;
  for (size_t at = 0; at < page->reserved; at++) {
    const size_t offset = start + at * size;
    if (at < page->capacity && (has_bit(is_free, at) || overlaps(before, offset, size))) continue;
    live |= 1u << offset / BASE_BYTES | 1u << (offset + size - 1) / BASE_BYTES;
  }
  const uint32_t dropped = drop(slice, ~(live | before) & 0xffff);
  if (dropped == 0) return 0;
  const size_t swept = link_free(page, is_free, before | dropped);
  /* mimalloc must not retain the page once it is empty. */
  page->retire_expire = 0;
  set_note(note, before | dropped, swept);
  mi_page_set_has_interior_pointers(page, true);
  return __builtin_popcount(dropped);
}

/* free(3) of a block of a page with swept blocks. */
static void free_swept(mi_page_t *page, void *p) {
  const bool is_own = mi_page_thread_id(page) == _mi_prim_thread_id();
  mi_free_ex(p, NULL, page);
  if (is_own && mi_page_all_free(page)) _mi_page_free(page, mi_page_queue_of(page));
}

#define FIRST_BIN (_mi_bin(MIN_BLOCK_BYTES))
#define LAST_BIN (_mi_bin(MAX_SWEPT_BYTES))

/* Number of pages that the last waste_of visited. */
static __thread size_t visited_pages;
/* Bytes outside of live blocks in all pages of the thread. */
static size_t waste_of(mi_theap_t *theap) {
  size_t sum = 0;
  visited_pages = 0;
  for (size_t bin = FIRST_BIN; bin <= LAST_BIN; bin++) {
    for (mi_page_t *page = theap->pages[bin].first; page != NULL; page = page->next, visited_pages++) {
      if (mi_page_thread_free(page) != NULL) _mi_page_free_collect(page, false);
      sum += waste_in(page);
    }
  }
  return sum;
}

/* Minimum waste of a page to sweep. */
#define MIN_WASTE_BYTES (2 * BASE_BYTES)
/* Number of pages per size class in a sample: the rest is swept if the sample yields a base page
 * per page. */
#define SAMPLE_PAGES 16
struct yield { size_t pages, bases; };

static inline bool is_futile(const struct yield *yield) { return yield->pages >= SAMPLE_PAGES && yield->bases < yield->pages; }

static void sweep_counted(mi_page_t *page, mi_page_queue_t *queue, struct yield *yield) {
  yield->bases += sweep_page(page, queue);
  yield->pages++;
}

/* Sweeps one of `each` sparse pages of a queue. */
static void sweep_each(mi_page_queue_t *queue, size_t each, struct yield *yield) {
  size_t number = 0;
  for (mi_page_t *page = queue->first, *next; page != NULL; page = next) {
    next = page->next;
    if (waste_in(page) >= MIN_WASTE_BYTES && number++ % each == 0) sweep_counted(page, queue, yield);
  }
}

/* Sweeps a thread's own pages, if a sample yields enough. True if it dropped base pages. */
static bool sweep_own(mi_theap_t *theap) {
  bool helps = false;
  for (size_t bin = FIRST_BIN; bin <= LAST_BIN; bin++) {
    mi_page_queue_t *queue = &theap->pages[bin];
    struct yield yield = {0};
    sweep_each(queue, queue->count / SAMPLE_PAGES + 1, &yield);
    if (is_futile(&yield)) continue;
    sweep_each(queue, 1, &yield);
    helps = helps || yield.bases > 0;
  }
  return helps;
}

static size_t abandoned_pages(const mi_theap_t *theap) {
  size_t sum = 0;
  for (size_t bin = FIRST_BIN; bin <= LAST_BIN; bin++) sum += mi_atomic_load_relaxed(&_mi_theap_heap(theap)->abandoned_count[bin]);
  return sum;
}

/* sweep_each for the pages after the first `own` ones. */
static void sweep_last(mi_page_queue_t *queue, size_t own, size_t each, struct yield *yield) {
  size_t number = 0, left = queue->count - own;
  for (mi_page_t *page = queue->last, *before; left > 0; page = before, left--) {
    before = page->prev;
    if (waste_in(page) >= MIN_WASTE_BYTES && number++ % each == 0) sweep_counted(page, queue, yield);
  }
}

/* Sweeps abandoned pages: claims them at the end of the thread's queue, and abandons them again. */
static bool sweep_abandoned(mi_theap_t *theap) {
  bool helps = false;
  for (size_t bin = FIRST_BIN; bin <= LAST_BIN; bin++) {
    struct yield yield = {0};
    mi_page_queue_t *queue = &theap->pages[bin];
    const size_t own = queue->count;
    for (size_t left = mi_atomic_load_relaxed(&_mi_theap_heap(theap)->abandoned_count[bin]); left > 0; left--) {
      mi_page_t *page = mi_arenas_page_try_find_abandoned(theap, 1, queue->block_size);
      if (page == NULL) break;
      _mi_theap_page_reclaim(theap, page);
    }
    sweep_last(queue, own, (queue->count - own) / SAMPLE_PAGES + 1, &yield);
    if (!is_futile(&yield)) sweep_last(queue, own, 1, &yield);
    while (queue->count > own) _mi_page_abandon(queue->last, queue);
    helps = helps || yield.bases > 0;
  }
  return helps;
}

/* Purges free slices that share a huge page with slices in use. */
static void purge_stuck(void) {
  mi_option_set(mi_option_minimal_purge_size, MI_ARENA_SLICE_SIZE / 1024);
  mi_arenas_try_purge(true, true, &subproc_main, 0);
  mi_option_set(mi_option_minimal_purge_size, 0);
}

/* Joined blocks: an object of another size takes adjacent free blocks between live ones. To
 * mimalloc each is in use; a bit of each but the last marks that the next one belongs to the same
 * object. */
#define MAX_JOINED_BYTES 8192
#define JOIN_WORDS (MAX_BLOCKS / 64)
static _Atomic(uintptr_t) joins[MI_MAX_ARENAS];

static _Atomic(uint64_t) *joins_of(const mi_page_t *page, bool make) {
  return entry_of(joins, page, JOIN_WORDS * sizeof(uint64_t), make);
}

/* Number of blocks of the object at an address. */
static size_t joined(const mi_page_t *page, const void *p) {
  const _Atomic(uint64_t) *bits = joins_of(page, false);
  size_t at = ((uint8_t *)p - page->page_start) / page->block_size, count = 1;
  if (bits == NULL || page->block_size > MAX_SWEPT_BYTES) return 1;
  for (; (atomic_load_explicit(&bits[at / 64], memory_order_relaxed) >> at % 64 & 1) != 0; at++) count++;
  return count;
}

static void set_joined(_Atomic(uint64_t) *bits, const mi_page_t *page, const void *p, size_t count) {
  const size_t at = ((uint8_t *)p - page->page_start) / page->block_size;
  for (size_t i = at; i + 1 < at + count; i++) atomic_fetch_xor_explicit(&bits[i / 64], (uint64_t)1 << i % 64, memory_order_relaxed);
}

static void free_block(mi_page_t *page, void *p) {
  if (noted(page) != 0) free_swept(page, p);
  else mi_free_ex(p, NULL, page);
}

/* free(3) of a block of a page with swept or joined blocks; false for a plain block. */
static mi_decl_noinline bool free_special(mi_page_t *page, void *p) {
  size_t count = joined(page, p);
  if (count == 1 && noted(page) == 0) return false;
  /* Clears the bits before another object can get the blocks. The first block keeps the page until
   * then. */
  if (count > 1) set_joined(joins_of(page, false), page, p, count);
  while (count-- > 0) free_block(page, (uint8_t *)p + count * page->block_size);
  return true;
}

/* Page whose free blocks the thread joins, and these blocks; to mimalloc they are in use. */
static __thread mi_page_t *held_page;
static __thread mi_block_t *held;
/* Number of requests to skip after a failed one. */
static __thread unsigned join_pause;
#define JOIN_PAUSE_REQUESTS 1000
/* Number of objects that pay for holding a page; and the number still owed. */
#define OBJECTS_PER_PAGE 8
static __thread unsigned join_debt;
/* Minimum free memory of a page to hold. */
#define MIN_HELD_BYTES (BASE_BYTES / 2)
#define MAX_VISITS 256
/* Maximum number of pages to hold for one object. */
#define MAX_HELD_PAGES 16

static bool hold(mi_page_t *page, mi_page_queue_t *queue) {
  uint64_t is_free[MAX_BLOCKS / 64] = {0};
  _mi_page_free_collect(page, true);
  if (page->free == NULL || joins_of(page, true) == NULL || !collect_free(page, is_free)) return false;
  link_free(page, is_free, bases_of(noted(page)));
  mi_page_set_has_interior_pointers(page, true);
  held_page = page;
  held = page->free;
  page->free = NULL;
  page->used = page->capacity;
  page->retire_expire = 0;
  if (mi_page_is_full(page)) _mi_page_abandon(page, queue);
  return true;
}

/* Queue of the next visit, and the number of its pages left to visit. */
static __thread size_t visited_bin, left_in_bin;

/* Holds the next page with enough free memory, from all queues in turn. Visited pages move to the
 * end of their queue. */
static bool hold_next(mi_theap_t *theap) {
  size_t bins = 0;
  for (int visits = 0; visits < MAX_VISITS;) {
    if (left_in_bin == 0) {
      if (bins++ > LAST_BIN - FIRST_BIN) return false;
      visited_bin = visited_bin < FIRST_BIN || visited_bin >= LAST_BIN ? FIRST_BIN : visited_bin + 1;
      left_in_bin = theap->pages[visited_bin].count;
      continue;
    }
    mi_page_queue_t *queue = &theap->pages[visited_bin];
    mi_page_t *page = queue->first;
    left_in_bin = page == NULL ? 0 : left_in_bin - 1;
    if (page == NULL) continue;
    visits++;
    mi_page_queue_remove(queue, page);
    mi_page_queue_push_at_end(theap, queue, page);
    if (waste_in(page) >= MIN_HELD_BYTES && hold(page, queue)) return true;
  }
  return false;
}

/* Allocates an object of joined blocks; NULL if there are none. */
static void *join(mi_theap_t *theap, size_t size, bool zeroed) {
  if (join_pause > 0) {
    join_pause--;
    return NULL;
  }
  for (int pages = 0; pages < MAX_HELD_PAGES;) {
    if (held == NULL) {
      if (!hold_next(theap)) break;
      pages++;
      join_debt += OBJECTS_PER_PAGE;
    }
    mi_page_t *page = held_page;
    const size_t needed = (size + page->block_size - 1) / page->block_size;
    mi_block_t *first = held, *last = held;
    size_t count = 1;
    held = mi_block_next(page, last);
    while (count < needed && (uint8_t *)held == (uint8_t *)last + page->block_size) {
      last = held;
      held = mi_block_next(page, last);
      count++;
    }
    if (count == needed) {
      set_joined(joins_of(page, false), page, first, count);
      if (zeroed) memset(first, 0, size);
      if (join_debt > 0 && --join_debt > MAX_HELD_PAGES * OBJECTS_PER_PAGE) join_pause = JOIN_PAUSE_REQUESTS, join_debt = 0;
      return first;
    }
    while (count-- > 0) free_block(page, (uint8_t *)first + count * page->block_size);
  }
  join_pause = JOIN_PAUSE_REQUESTS;
  join_debt = 0;
  return NULL;
}

static void free_held(void) {
  while (held != NULL) {
    mi_block_t *block = held;
    held = mi_block_next(held_page, block);
    free_block(held_page, block);
  }
}

/* Minimum memory that a thread allocates, from mimalloc or elsewhere, between two checks: a quarter
 * of the allowance of a small program. */
#define MIN_STEP_BYTES (4 * 1024 * 1024)
/* Maximum number of checks without a sweep after a futile one, unless the waste grows by
 * the maximum. */
#define MAX_SKIPPED_SWEEPS 64
/* jumbo_mimalloc_taken at the last check; bytes allocated elsewhere, and bytes freed, since. */
static __thread size_t checked_taken, other_bytes, freed_bytes;
/* Minimum waste since the last sweep. */
static __thread size_t min_waste;
static __thread unsigned backoff, skips;
/* The thread has more waste than it may: its allocations elsewhere count. */
static __thread bool is_sparse;

static void set_sparse(bool now) {
  if (is_sparse != now) jumbo_mimalloc_sparse(now);
  is_sparse = now;
}

static size_t step(void) {
  const size_t share = jumbo_mimalloc_allowance() / 4, pages = visited_pages * (BASE_BYTES / 4), max = share > pages ? share : pages;
  return max > MIN_STEP_BYTES ? max : MIN_STEP_BYTES;
}

/* Share of one thread in what all may have. */
static size_t share(size_t max) {
  const size_t threads = jumbo_mimalloc_threads();
  return threads > 1 ? max / threads : max;
}

/* Share of one thread in the waste that all may have: half of it at most, which is enough for two
 * pages of each class that are not full. */
static size_t share_of_waste(size_t max) {
  const size_t each = share(max);
  return each < max / 2 ? each : max / 2;
}

/* Sweeps the thread's own pages and abandoned ones. Returns the waste that is left of `waste`
 * bytes. */
static size_t sweep(mi_theap_t *theap, size_t waste, bool own, bool others, size_t max) {
  if (waste < min_waste) min_waste = waste;
  if (skips > 0 && waste < min_waste + max) {
    skips--;
    return waste;
  }
  const bool own_helps = own && sweep_own(theap), helps = (others && sweep_abandoned(theap)) || own_helps;
  backoff = helps ? 0 : backoff < MAX_SKIPPED_SWEEPS ? backoff * 2 + 1 : MAX_SKIPPED_SWEEPS;
  skips = backoff;
  if (waiting() * MI_ARENA_SLICE_SIZE > max) purge_stuck();
  min_waste = waste_of(theap);
  return min_waste;
}

/* Sweeps if there is too much waste. If too much is left, the thread gets no fresh pages. */
static mi_decl_noinline void check_waste(mi_theap_t *theap) {
  const size_t max = jumbo_mimalloc_allowance() / 2;
  const bool others = abandoned_pages(theap) * MI_ARENA_SLICE_SIZE > max / 2;
  const size_t waste = waste_of(theap);
  bool own = waste > share_of_waste(max);
  if (own || others) own = sweep(theap, waste, own, others, max) > share_of_waste(max);
  checked_taken = jumbo_mimalloc_taken();
  other_bytes = 0;
  set_sparse(own || others);
  thread_bytes = own ? REFUSED : ADMITTED;
  if (!own) free_held();
  else if (backoff == 0) join_pause = 0;
}

static void check_waste_if_due(void) {
  mi_theap_t *theap = _mi_theap_default();
  if (thread_bytes < REFUSED || admits_all || is_confined() || !mi_theap_is_initialized(theap)) return;
  const size_t taken = jumbo_mimalloc_taken();
  if (taken < checked_taken) checked_taken = taken;
  if (taken - checked_taken + other_bytes >= step()) check_waste(theap);
}

/* Allocates a block above the size limit, or one that would need a fresh page, of joined blocks;
 * else NULL. */
void *jumbo_mimalloc_reuse(size_t size, bool zeroed) {
  other_bytes += size < MIN_STEP_BYTES / 16 ? size : MIN_STEP_BYTES / 16;
  if (other_bytes >= MIN_STEP_BYTES) check_waste_if_due();
  if (thread_bytes != REFUSED || size > MAX_JOINED_BYTES) return NULL;
  mi_theap_t *theap = _mi_theap_default();
  return mi_theap_is_initialized(theap) ? join(theap, size, zeroed) : NULL;
}

/* Checks the waste after a thread has freed `count` blocks, the last of them of `size` bytes. */
static void check_freed(size_t count, size_t size) {
  mi_theap_t *theap = _mi_theap_default();
  freed_bytes += count * size;
  if (freed_bytes < 2 * MIN_STEP_BYTES || is_sparse || !mi_theap_is_initialized(theap)) return;
  if (freed_bytes < 2 * step()) return;
  freed_bytes = 0;
  const size_t max = jumbo_mimalloc_allowance() / 2;
  set_sparse(waste_of(theap) > share_of_waste(max) || abandoned_pages(theap) * MI_ARENA_SLICE_SIZE > max / 2);
}

/* Reports whether a block fits without a fresh page. True as well after SAMPLE_PAGES full pages: a
 * search of all would cost too much. */
static bool has_room(mi_theap_t *theap, size_t size) {
  const mi_page_queue_t *queue = mi_page_queue(theap, size);
  int visits = 0;
  for (mi_page_t *page = queue->first; page != NULL; page = page->next) {
    const bool has = page->free != NULL || page->local_free != NULL || mi_page_thread_free(page) != NULL;
    if (has || mi_page_is_expandable(page) || ++visits == SAMPLE_PAGES) return true;
  }
  return mi_atomic_load_relaxed(&_mi_theap_heap(theap)->abandoned_count[_mi_bin(size)]) > 0;
}
