/* The bound on what mimalloc keeps: gives base pages back in which no block is live. Part of shim.c.
 *
 * A page of mimalloc (64 KiB) holds blocks of one size, and its memory stays while one of them is live. A program that frees
 * most of its objects and goes on with others of another size would have both. So where the live blocks of a thread's pages
 * are few, a sweep drops the base pages (4 KiB) between them.
 *
 * Invariant: a block that overlaps a dropped base page is swept: in no free list, and counted in `used`. To mimalloc it is a
 * block that is in use, like one that the program holds and never frees. So all that mimalloc relies on stays true: `used` and
 * the free lists make up `capacity`; a page of which `used` is `reserved` is full, and abandoned as such; a page of which
 * `used` is not 0 is neither retired nor freed; no free list leads into memory that reads as zero, and `free_is_zero` is false
 * since the lists were collected. Which blocks are swept follows from `bases` of the note of the page's slice.
 *
 * Only the owner of a page reads and changes its blocks: the thread whose theap has it, or who claimed it while it was abandoned.
 * It alone writes the note. A page with swept blocks has the flag for interior pointers: so free(3) of one comes to free_swept.
 * Wherever mimalloc asks its owner whether a page is free, it asks jumbo_is_left too (build.rs), and frees the page as a whole. The
 * page's next user finds slices that are marked dirty as ever, and no note.
 *
 * Behind a seccomp filter, and where the memory is locked, nothing is dropped, and the lists stay as they are. */

/* Blocks of up to this size are swept: others come from mimalloc only on a pool, whose pages cannot be dropped in part. */
#define SWEPT_MAX 128
#define BASE ((size_t)4096)
#define BASES (MI_ARENA_SLICE_SIZE / BASE)
#define MOST_BLOCKS (MI_ARENA_SLICE_SIZE / LEAST)

#if MI_ARENA_SLICE_SIZE != 65536 || MI_SMALL_PAGE_SIZE != MI_ARENA_SLICE_SIZE
#error "a note has a bit for each base page of a slice, and a page of small blocks is one slice"
#endif

/* Of each slice of an arena: in the lower half a bit for each base page that is dropped, in the upper the number of swept blocks. */
typedef _Atomic(uint32_t) note_t;
static _Atomic(uintptr_t) notes[MI_MAX_ARENAS];
/* The bytes of all dropped base pages. */
static _Atomic(size_t) dropped_bytes;

/* What a table with `size` bytes for each slice of an arena has for the slice of a page; NULL where there is none. */
static void *entry_of(_Atomic(uintptr_t) *tables, const mi_page_t *page, size_t size, bool make) {
  if (page->memid.memkind != MI_MEM_ARENA) return NULL;
  const mi_arena_t *arena = page->memid.mem.arena.arena;
  _Atomic(uintptr_t) *place = &tables[arena->arena_idx];
  uintptr_t table = atomic_load_explicit(place, memory_order_acquire);
  if (table == 0) {
    if (!make) return NULL;
    const size_t all = arena->slice_count * size;
    void *made = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) return NULL;
    if (atomic_compare_exchange_strong(place, &table, (uintptr_t)made)) table = (uintptr_t)made;
    else munmap(made, all);
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
  atomic_fetch_add_explicit(&dropped_bytes, (more - less) * BASE, memory_order_relaxed);
}

/* The bytes of a page that are no live block's. The blocks that other threads have freed count as live until they are collected. */
static size_t waste_in(const mi_page_t *page) {
  const uint32_t note = noted(page);
  const size_t there = MI_ARENA_SLICE_SIZE - __builtin_popcount(bases_of(note)) * BASE;
  const size_t live = (page->used - blocks_of(note)) * page->block_size;
  return live < there ? there - live : 0;
}

/* The swept blocks of a page that the caller owns. */
static size_t jumbo_swept(const mi_page_t *page) {
  return mi_page_has_interior_pointers(page) ? blocks_of(noted(page)) : 0;
}

/* No block but swept ones is left in a page that the caller owns: to mimalloc it is free from now on, and it frees it then. */
static bool jumbo_is_left(mi_page_t *page) {
  const size_t swept = jumbo_swept(page);
  if (swept == 0 || page->used != swept) return false;
  set_note(note_of(page, false), 0, 0);
  page->used = 0;
  return true;
}

/* Whether a block overlaps one of some base pages of its slice. */
static inline bool overlaps(uint32_t bases, size_t offset, size_t size) {
  return (bases >> offset / BASE & 1) != 0 || (bases >> (offset + size - 1) / BASE & 1) != 0;
}

static inline bool has_bit(const uint64_t *bits, size_t at) { return (bits[at / 64] >> at % 64 & 1) != 0; }

/* Drops runs of base pages, and gives those that are. */
static uint32_t drop(uint8_t *slice, uint32_t bases) {
  uint32_t gone = 0;
  for (size_t first = 0; first < BASES; first++) {
    size_t end = first;
    while (end < BASES && (bases >> end & 1) != 0) end++;
    if (end > first && jumbo_mimalloc_thin(slice + first * BASE, (end - first) * BASE)) {
      gone |= (1u << end) - (1u << first);
    } else {
      /* A run may cross mappings, some of them locked: a part of it is gone. A base page is in one. */
      for (size_t at = first; at < end; at++) {
        if (jumbo_mimalloc_thin(slice + at * BASE, BASE)) gone |= 1u << at;
      }
    }
    if (end > first) first = end;
  }
  return gone;
}

/* The free blocks of a page of the thread's own, as bits; false where the program has broken its list: it stays as it is then. */
static bool collect_free(mi_page_t *page, uint64_t *is_free) {
  const size_t size = page->block_size;
  size_t count = 0, shift;
  uint64_t magic;
  mi_get_fast_divisor(size, &magic, &shift);
  for (mi_block_t *block = page->free; block != NULL; block = mi_block_next(page, block)) {
    const size_t at = mi_fast_divide((uint8_t *)block - page->page_start, magic, shift);
    /* The program has freed a block twice, or an address within one. */
    if (at >= page->capacity || (uint8_t *)block != page->page_start + at * size || has_bit(is_free, at)) return false;
    is_free[at / 64] |= (uint64_t)1 << at % 64;
    count++;
  }
  return count + page->used == page->capacity;
}

/* Links the free blocks that overlap none of some base pages, in the order of their addresses. Gives the number of the others. */
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

/* Sweeps a page of the thread's own. Gives the number of base pages that it dropped; all of them where the page is free. */
static size_t sweep_page(mi_page_t *page, mi_page_queue_t *queue) {
  _mi_page_free_collect(page, true);
  if (mi_page_all_free(page)) {
    _mi_page_free(page, queue);
    return BASES;
  }
  uint64_t is_free[MOST_BLOCKS / 64] = {0};
  note_t *note = note_of(page, true);
  if (note == NULL || !collect_free(page, is_free)) return 0;
  uint8_t *slice = mi_page_slice_start(page);
  const size_t size = page->block_size, start = page->page_start - slice;
  const uint32_t before = bases_of(atomic_load_explicit(note, memory_order_relaxed));

  /* Base pages with a live block; and with one that mimalloc has not put into the free list yet, which it will. */
  uint32_t live = 0;
  for (size_t at = 0; at < page->reserved; at++) {
    const size_t offset = start + at * size;
    if (at < page->capacity && (has_bit(is_free, at) || overlaps(before, offset, size))) continue;
    live |= 1u << offset / BASE | 1u << (offset + size - 1) / BASE;
  }
  const uint32_t gone = drop(slice, ~(live | before) & 0xffff);
  if (gone == 0) return 0;
  const size_t swept = link_free(page, is_free, before | gone);
  /* Else mimalloc would keep the page for a while when it is empty. */
  page->retire_expire = 0;
  set_note(note, before | gone, swept);
  mi_page_set_has_interior_pointers(page, true);
  return __builtin_popcount(gone);
}

/* free(3) of a block of a page with swept ones. */
static void free_swept(mi_page_t *page, void *p) {
  const bool is_own = mi_page_thread_id(page) == _mi_prim_thread_id();
  mi_free_ex(p, NULL, page);
  if (is_own && mi_page_all_free(page)) _mi_page_free(page, mi_page_queue_of(page));
}

#define FIRST_BIN (_mi_bin(LEAST))
#define LAST_BIN (_mi_bin(SWEPT_MAX))

/* How many pages the last look visited. */
static __thread size_t walked;
/* The bytes that are no live block's in all pages of a thread. */
static size_t waste_of(mi_theap_t *theap) {
  size_t sum = 0;
  walked = 0;
  for (size_t bin = FIRST_BIN; bin <= LAST_BIN; bin++) {
    for (mi_page_t *page = theap->pages[bin].first; page != NULL; page = page->next, walked++) {
      if (mi_page_thread_free(page) != NULL) _mi_page_free_collect(page, false);
      sum += waste_in(page);
    }
  }
  return sum;
}

/* A page with less is not worth a sweep. */
#define LEAST_WASTE (2 * BASE)
/* So many pages of a size are swept to see whether it is worth it: a base page of each, at least. */
#define SAMPLE 16
struct yield { size_t pages, bases; };

static inline bool is_futile(const struct yield *yield) { return yield->pages >= SAMPLE && yield->bases < yield->pages; }

static void sweep_counted(mi_page_t *page, mi_page_queue_t *queue, struct yield *yield) {
  yield->bases += sweep_page(page, queue);
  yield->pages++;
}

/* Sweeps each so manieth of the sparse pages of a queue. */
static void sweep_each(mi_page_queue_t *queue, size_t each, struct yield *yield) {
  size_t number = 0;
  for (mi_page_t *page = queue->first, *next; page != NULL; page = next) {
    next = page->next;
    if (waste_in(page) >= LEAST_WASTE && number++ % each == 0) sweep_counted(page, queue, yield);
  }
}

/* Sweeps a thread's own pages, as far as it helps. True where it did. */
static bool sweep_own(mi_theap_t *theap) {
  bool helps = false;
  for (size_t bin = FIRST_BIN; bin <= LAST_BIN; bin++) {
    mi_page_queue_t *queue = &theap->pages[bin];
    struct yield yield = {0};
    sweep_each(queue, queue->count / SAMPLE + 1, &yield);
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

/* As sweep_each, of the pages behind the first `own` ones. */
static void sweep_last(mi_page_queue_t *queue, size_t own, size_t each, struct yield *yield) {
  size_t number = 0, left = queue->count - own;
  for (mi_page_t *page = queue->last, *before; left > 0; page = before, left--) {
    before = page->prev;
    if (waste_in(page) >= LEAST_WASTE && number++ % each == 0) sweep_counted(page, queue, yield);
  }
}

/* Sweeps pages that no thread owns, and leaves them for all again: in the meantime they are at the end of the thread's queue. */
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
    sweep_last(queue, own, (queue->count - own) / SAMPLE + 1, &yield);
    if (!is_futile(&yield)) sweep_last(queue, own, 1, &yield);
    while (queue->count > own) _mi_page_abandon(queue->last, queue);
    helps = helps || yield.bases > 0;
  }
  return helps;
}

/* Gives free slices back that share a huge page with what is in use. */
static void give_stuck(void) {
  mi_option_set(mi_option_minimal_purge_size, MI_ARENA_SLICE_SIZE / 1024);
  mi_arenas_try_purge(true, true, &subproc_main, 0);
  mi_option_set(mi_option_minimal_purge_size, 0);
}

/* Joined blocks: what is left between live blocks serves objects of other sizes. An object takes as many free blocks side by side
 * as it needs. To mimalloc each is in use; a bit for each but the last says that the next one is the same object's. */
#define JOINED_MAX 1024
#define JOIN_WORDS (MOST_BLOCKS / 64)
static _Atomic(uintptr_t) joins[MI_MAX_ARENAS];

static _Atomic(uint64_t) *joins_of(const mi_page_t *page, bool make) {
  return entry_of(joins, page, JOIN_WORDS * sizeof(uint64_t), make);
}

/* The number of blocks of the object at an address. */
static size_t joined(const mi_page_t *page, const void *p) {
  const _Atomic(uint64_t) *bits = joins_of(page, false);
  size_t at = ((uint8_t *)p - page->page_start) / page->block_size, count = 1;
  if (bits == NULL || page->block_size > SWEPT_MAX) return 1;
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

/* free(3) of a block of a page with swept or joined ones; false where it is one like any other. */
static mi_decl_noinline bool free_special(mi_page_t *page, void *p) {
  size_t count = joined(page, p);
  if (count == 1 && noted(page) == 0) return false;
  /* Before the blocks are another object's. The first one keeps the page until then. */
  if (count > 1) set_joined(joins_of(page, false), page, p, count);
  while (count-- > 0) free_block(page, (uint8_t *)p + count * page->block_size);
  return true;
}

/* The free blocks of one page, in use to mimalloc, of which the thread makes joined ones. */
static __thread mi_page_t *held_page;
static __thread mi_block_t *held;
/* A request failed: so many are not tried. */
static __thread unsigned join_pause;
#define JOIN_PAUSE 1000
/* So many objects are worth the holding of a page; what is owed. */
#define WORTH 8
static __thread unsigned join_debt;
/* A page with less free is not worth while. */
#define LEAST_HELD (BASE / 2)
#define MOST_VISITS 256
/* So many pages are held for one object, at most. */
#define MOST_HELD 16

static bool hold(mi_page_t *page, mi_page_queue_t *queue) {
  uint64_t is_free[MOST_BLOCKS / 64] = {0};
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

/* The queue that is visited, and how many of its pages are left to visit. */
static __thread size_t visited_bin, left_in_bin;

/* Holds another page's, of all queues in turn. A page that it visits goes to the end of its queue. */
static bool hold_next(mi_theap_t *theap) {
  size_t bins = 0;
  for (int visits = 0; visits < MOST_VISITS;) {
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
    if (waste_in(page) >= LEAST_HELD && hold(page, queue)) return true;
  }
  return false;
}

/* Makes an object of joined blocks; NULL where there are none. */
static void *join(mi_theap_t *theap, size_t size, bool zeroed) {
  if (join_pause > 0) {
    join_pause--;
    return NULL;
  }
  for (int pages = 0; pages < MOST_HELD;) {
    if (held == NULL) {
      if (!hold_next(theap)) break;
      pages++;
      join_debt += WORTH;
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
      if (join_debt > 0 && --join_debt > MOST_HELD * WORTH) join_pause = JOIN_PAUSE, join_debt = 0;
      return first;
    }
    while (count-- > 0) free_block(page, (uint8_t *)first + count * page->block_size);
  }
  join_pause = JOIN_PAUSE;
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

/* The memory that a thread takes, from mimalloc and beside, between two looks: this at least, which is a quarter of what the heap
 * of a small program may hold beyond what is live. */
#define STEP (4 * 1024 * 1024)
/* After a sweep that was futile so many looks at the most have none, unless twice as much is wasted. */
#define MOST_FUTILE 64
static __thread size_t looked_taken, beside_bytes, freed_bytes;
/* The waste that the last sweep left, or less if there was less since. */
static __thread size_t left_waste;
static __thread unsigned futile, passes;
/* The thread has more waste than it may: what it allocates beside mimalloc counts. */
static __thread bool is_sparse;

static void set_sparse(bool now) {
  if (is_sparse != now) jumbo_mimalloc_sparse(now);
  is_sparse = now;
}

static size_t step(void) {
  const size_t share = jumbo_mimalloc_allowance() / 4, pages = walked * (BASE / 4), most = share > pages ? share : pages;
  return most > STEP ? most : STEP;
}

/* What a thread may waste, of what all may. */
static size_t share(size_t most) {
  const size_t threads = jumbo_mimalloc_threads();
  return threads > 1 ? most / threads : most;
}

/* Sweeps the thread's own pages and those of no thread, as far as it helps. Gives the waste that is left of `waste` bytes. */
static size_t sweep(mi_theap_t *theap, size_t waste, bool own, bool others, size_t most) {
  if (waste < left_waste) left_waste = waste;
  if (passes > 0 && waste < 2 * left_waste + most) {
    passes--;
    return waste;
  }
  const bool own_helps = own && sweep_own(theap), helps = (others && sweep_abandoned(theap)) || own_helps;
  futile = helps ? 0 : futile < MOST_FUTILE ? futile * 2 + 1 : MOST_FUTILE;
  passes = futile;
  if (waiting() * MI_ARENA_SLICE_SIZE > most) give_stuck();
  left_waste = waste_of(theap);
  return left_waste;
}

/* More memory was taken: sweeps where too much is wasted. Where that is not enough, there are no fresh pages for the thread. */
static mi_decl_noinline void look(mi_theap_t *theap) {
  const size_t most = jumbo_mimalloc_allowance() / 2;
  const bool others = abandoned_pages(theap) * MI_ARENA_SLICE_SIZE > most / 2;
  const size_t waste = waste_of(theap);
  bool own = waste > share(most);
  if (own || others) own = sweep(theap, waste, own, others, most) > share(most);
  looked_taken = jumbo_mimalloc_taken();
  beside_bytes = 0;
  set_sparse(own || others);
  thread_asked = own ? REFUSED : ADMITTED;
  if (!own) free_held();
  else if (futile == 0) join_pause = 0;
}

static void look_if_due(void) {
  mi_theap_t *theap = _mi_theap_default();
  if (thread_asked < REFUSED || admits_all || is_confined() || !mi_theap_is_initialized(theap)) return;
  const size_t taken = jumbo_mimalloc_taken();
  if (taken < looked_taken) looked_taken = taken;
  if (taken - looked_taken + beside_bytes >= step()) look(theap);
}

/* The program asks for a block that is not mimalloc's to give by its size, or for which it would take a fresh page. */
void *jumbo_mimalloc_beside(size_t size, bool zeroed) {
  beside_bytes += size < STEP / 16 ? size : STEP / 16;
  if (beside_bytes >= STEP) look_if_due();
  if (thread_asked != REFUSED || size > JOINED_MAX) return NULL;
  mi_theap_t *theap = _mi_theap_default();
  return mi_theap_is_initialized(theap) ? join(theap, size, zeroed) : NULL;
}

/* A thread has freed `count` blocks, the last of them of `size` bytes. */
static void look_at_freed(size_t count, size_t size) {
  mi_theap_t *theap = _mi_theap_default();
  freed_bytes += count * size;
  if (freed_bytes < 2 * STEP || is_sparse || !mi_theap_is_initialized(theap)) return;
  if (freed_bytes < 2 * step()) return;
  freed_bytes = 0;
  const size_t most = jumbo_mimalloc_allowance() / 2;
  set_sparse(waste_of(theap) > share(most) || abandoned_pages(theap) * MI_ARENA_SLICE_SIZE > most / 2);
}

/* Whether a block can be had without a fresh page, or a page more to look at. */
static bool has_room(mi_theap_t *theap, size_t size) {
  const mi_page_queue_t *queue = mi_page_queue(theap, size);
  int looks = 0;
  for (mi_page_t *page = queue->first; page != NULL; page = page->next) {
    const bool has = page->free != NULL || page->local_free != NULL || mi_page_thread_free(page) != NULL;
    if (has || mi_page_is_expandable(page) || ++looks == SAMPLE) return true;
  }
  return mi_atomic_load_relaxed(&_mi_theap_heap(theap)->abandoned_count[_mi_bin(size)]) > 0;
}
