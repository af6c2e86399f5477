// jumbo: huge pages for C and C++ programs. Generated from crates/jumbo-capi/src; see jumbo(3).
//
// Each function returns 0 or a value on success. On failure it returns -1 or a null pointer, sets
// errno, and leaves a message in jumbo_error() of the calling thread. Functions may be called from
// any thread, but not from a signal handler. An unknown or closed handle is EBADF.
//
// After fork(2) the child shares regions. It has copies of pools of THPs; pages of hugetlb pools
// stay with the parent: EOWNERDEAD. fork(2) waits for the calls of other threads, so a child can make
// calls, too.

#ifndef JUMBO_H
#define JUMBO_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>
#ifdef __cplusplus
#define JUMBO_NOEXCEPT noexcept
#else
#define JUMBO_NOEXCEPT
#endif

// Pages of the kernel's hugetlb pool if it has enough, else THPs, and `jumbo_error` has the reason.
// A pool that opens with 0 pages has THPs.
#define JUMBO_ANY 0

// Transparent huge pages, without privilege (Linux 6.1).
#define JUMBO_THP 1

// Pages of the kernel's hugetlb pool, or an error.
#define JUMBO_HUGETLB 2

// Read all of the file when it is mapped, not at the first touch of each part.
#define JUMBO_FILE_WHOLE 1

// Method: mapped, mostly by base pages.
#define JUMBO_FILE_BASE_PAGES 1

// Method: mapped, with at least half by huge pages of the page cache.
#define JUMBO_FILE_PAGE_CACHE 2

// Method: copied into anonymous memory that is advised to be huge.
#define JUMBO_FILE_COPY 3

// Free and unmap private anonymous memory: munmap(2).
#define JUMBO_FREE_UNMAP 1

// Return at once: the memory is freed in the background, and errors are lost.
#define JUMBO_FREE_BACKGROUND 2

// Populate with the pages that a read finds: of a file, of shared memory, or the zero page.
#define JUMBO_POPULATE_READ 1

// A file in memory, read-only. Zero is no file.
typedef struct jumbo_file {
  // Private to the library.
  uint64_t handle;
} jumbo_file;

// Configuration of a pool. All fields but `size` may be zero.
typedef struct jumbo_pool_options {
  // `sizeof(struct jumbo_pool_options)`.
  size_t size;
  // `JUMBO_ANY`, `JUMBO_THP` or `JUMBO_HUGETLB`.
  uint64_t source;
  // Bytes of a page; 0: the size that one PMD maps (2 MiB on x86-64). THPs have no other.
  uint64_t page_size;
  // Persistent pages: the pool makes them when it opens, and keeps them.
  uint64_t pages;
  // Maximum number of surplus pages, made on demand and released when they are given back.
  uint64_t overcommit;
  // Maximum number of pages on each node, for which addresses are reserved; 0: twice the host's
  // memory.
  uint64_t capacity;
} jumbo_pool_options;

// A pool of huge pages of one size, a quota of one, or a reservation in one. Zero is no pool.
typedef struct jumbo_pool {
  // Private to the library.
  uint64_t handle;
} jumbo_pool;

// Counters of a pool, by the kernel's names for its own pools.
typedef struct jumbo_pool_stats {
  // Bytes of a page.
  uint64_t page_size;
  // `JUMBO_THP` or `JUMBO_HUGETLB`.
  uint64_t source;
  // All pages of the pool.
  uint64_t total;
  // Pages that are not taken.
  uint64_t free;
  // Free pages that are promised to reservations.
  uint64_t reserved;
  // Pages that are released when they are given back.
  uint64_t surplus;
  // Maximum number of surplus pages.
  uint64_t overcommit;
  // Maximum number of pages taken by this handle: of a quota its limit, of a reservation the
  // promised pages that are left. UINT64_MAX for a pool.
  uint64_t limit;
  // Pages taken by this quota; 0 for other handles.
  uint64_t charged;
  // Highest value of `charged` so far.
  uint64_t peak;
} jumbo_pool_stats;

// Configuration of a region. All fields but `size` and `length` may be zero.
typedef struct jumbo_region_options {
  // `sizeof(struct jumbo_region_options)`.
  size_t size;
  // `JUMBO_ANY`, `JUMBO_THP` or `JUMBO_HUGETLB`. `JUMBO_THP` has base pages until
  // `jumbo_region_collapse`, unless the kernel's controls permit more.
  uint64_t source;
  // Bytes of the region; whole pages with `JUMBO_HUGETLB`.
  uint64_t length;
  // Maximum length, for which addresses are reserved; 0: `length`.
  uint64_t capacity;
  // Bytes of a hugetlb page; 0: the size that one PMD maps.
  uint64_t page_size;
} jumbo_region_options;

// A region of shared memory. Zero is no region.
typedef struct jumbo_region {
  // Private to the library.
  uint64_t handle;
} jumbo_region;

// Memory in bytes.
typedef struct jumbo_memory {
  // Mapped, resident or not.
  uint64_t mapped;
  // Resident, hugetlb included.
  uint64_t resident;
  // Resident in huge pages that a PMD or more maps.
  uint64_t huge;
  // Resident, and perhaps in huge pages that base pages map: only root can read that. 0 for a
  // range.
  uint64_t unknown;
} jumbo_memory;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Returns the version of the library, as "0.1.0".
const char *jumbo_version(void) JUMBO_NOEXCEPT;

// Returns the message of the last failure in this thread, or of the last `JUMBO_ANY` without
// hugetlb pages; empty before the first. The text is valid until the next one in this thread.
const char *jumbo_error(void) JUMBO_NOEXCEPT;

// Maps the file of a descriptor that can be read, advised to be huge before its first touch. It
// costs no memory beyond the page cache. `flags` is 0 or `JUMBO_FILE_WHOLE`. The descriptor stays
// the caller's, and may be closed.
//
// While the map lives, no process writes to the file or shortens it: a read behind the end causes
// SIGBUS. Huge pages: xfs since Linux 5.18, ext4 since 6.16.
//
// Errors: EBADF; EINVAL for flags, or no regular file; EACCES without read access; ENODEV for a
// file system without mappings; ENOMEM; with `JUMBO_FILE_WHOLE` also EFAULT, a disk that fails.
int jumbo_file_open(int fd, uint32_t flags, struct jumbo_file *file) JUMBO_NOEXCEPT;

// Copies the file of a descriptor into anonymous memory on huge pages, by at most `threads`
// threads; 0: the CPUs of this thread, at most 4. It takes as much memory as the file has bytes,
// beside the page cache.
//
// Errors: EBADF; EINVAL for more than 64 threads, or no regular file; EIO for a file that is
// shortened meanwhile; ENOMEM; those of read(2).
int jumbo_file_copy(int fd, uint32_t threads, struct jumbo_file *file) JUMBO_NOEXCEPT;

// Returns the address of the bytes of a file, which stays the same until it is closed. That of an
// empty file is not null, and has no byte.
//
// Errors: EBADF.
const void *jumbo_file_address(struct jumbo_file file) JUMBO_NOEXCEPT;

// Returns the length of a file in bytes when it was opened, or -1.
//
// Errors: EBADF.
int64_t jumbo_file_size(struct jumbo_file file) JUMBO_NOEXCEPT;

// Returns the bytes of a file that this process maps by huge pages now, or -1. It reads
// /proc/self/smaps, which takes milliseconds; 0 if it cannot.
//
// Errors: EBADF.
int64_t jumbo_file_huge(struct jumbo_file file) JUMBO_NOEXCEPT;

// Returns how a file came onto its pages when it was opened, or -1: `JUMBO_FILE_BASE_PAGES`,
// `JUMBO_FILE_PAGE_CACHE` or `JUMBO_FILE_COPY`.
//
// Errors: EBADF.
int jumbo_file_method(struct jumbo_file file) JUMBO_NOEXCEPT;

// Unmaps a file.
//
// Errors: EBADF.
int jumbo_file_close(struct jumbo_file file) JUMBO_NOEXCEPT;

// Opens a pool. The caller's cpuset and memory policy have its nodes.
//
// Errors: EINVAL, E2BIG for the options; ENOMEM if the kernel does not provide all of `pages`, or
// no addresses; ENODEV for hugetlb pages of a size that the kernel lacks, or for nodes outside of
// the policy; EOPNOTSUPP without THP.
int jumbo_pool_open(const struct jumbo_pool_options *options,
                    struct jumbo_pool *pool)
JUMBO_NOEXCEPT;

// Takes pages at consecutive addresses: free ones, else surplus ones. Their content is
// unspecified. Returns the address of the first, aligned to the page size.
//
// A touch of them cannot fail. A quota is charged; a reservation supplies its own pages alone.
//
// Errors: EBADF; EINVAL for 0 pages; ENOMEM if the pool, its reservation, the host or the memory
// cgroup has too few; EDQUOT beyond a quota; EOWNERDEAD.
void *jumbo_pool_take(struct jumbo_pool pool, size_t pages) JUMBO_NOEXCEPT;

// Gives back the pages of one `jumbo_pool_take`, by any handle of their pool. No thread uses them
// any more.
//
// Errors: EBADF; EINVAL for an address that is not taken.
int jumbo_pool_give(struct jumbo_pool pool, void *pages) JUMBO_NOEXCEPT;

// Promises pages, all or none: `jumbo_pool_take` of the new handle cannot fail for so many.
// `jumbo_pool_close` releases those that are left; taken ones stay taken.
//
// Errors: those of `jumbo_pool_take`; EINVAL for a quota or reservation.
int jumbo_pool_reserve(struct jumbo_pool pool,
                       size_t pages,
                       struct jumbo_pool *reservation)
JUMBO_NOEXCEPT;

// Makes a handle that takes at most `limit` pages of a pool at a time. It promises none.
//
// Errors: EBADF; EINVAL for a quota or reservation.
int jumbo_pool_quota(struct jumbo_pool pool,
                     uint64_t limit,
                     struct jumbo_pool *quota)
JUMBO_NOEXCEPT;

// Sets the number of persistent pages. A shrink releases free pages; taken ones beyond it become
// surplus.
//
// Errors: EBADF; EINVAL for a quota or reservation; ENOMEM if the kernel provides fewer: the pool
// keeps those.
int jumbo_pool_resize(struct jumbo_pool pool, uint64_t pages) JUMBO_NOEXCEPT;

// Sets the maximum number of surplus pages of a pool, or the limit of a quota. What is taken
// beyond a lowered limit stays.
//
// Errors: EBADF; EINVAL for a reservation.
int jumbo_pool_limit(struct jumbo_pool pool, uint64_t pages) JUMBO_NOEXCEPT;

// Reads the counters. `size` is `sizeof(struct jumbo_pool_stats)`.
//
// Errors: EBADF; EINVAL.
int jumbo_pool_status(struct jumbo_pool pool,
                      struct jumbo_pool_stats *stats,
                      size_t size)
JUMBO_NOEXCEPT;

// Closes a handle. A pool returns its pages to the kernel; a reservation releases its promise.
//
// Errors: EBADF; EBUSY for a pool of which pages are taken, or a quota or reservation is open: it
// stays open.
int jumbo_pool_close(struct jumbo_pool pool) JUMBO_NOEXCEPT;

// Makes a range of addresses resident, by at most `threads` threads, the caller included; 0: its
// CPUs, at most 4. Returns the number of threads, or -1. No byte changes that a thread could read.
// Linux 5.14.
//
// Huge pages come where the range is advised (MADV_HUGEPAGE). A range below 64 MiB is populated by
// the caller alone. Other threads may use the range meanwhile.
//
// Errors: EINVAL for flags, a range that does not begin and end at a page, memory without that
// access or of a driver, or an older kernel; ENOMEM without memory, or for a hole in the range;
// EFAULT without a hugetlb page, or behind the end of a file; EHWPOISON; EAGAIN in a seccomp
// filter, or after vfork(2). A part of the range may be resident then.
int jumbo_populate(void *start, size_t length, uint32_t flags, uint32_t threads) JUMBO_NOEXCEPT;

// Frees ranges of private anonymous memory by several threads, where that is faster. Without
// `JUMBO_FREE_UNMAP` they stay mapped, and read as zeroes: MADV_DONTNEED.
//
// No thread uses the ranges until the call returns; in the background, never again. The worker
// threads stay for later calls, and are unknown to the C library: see `jumbo_end_workers`.
//
// Errors: EINVAL for unknown flags, or a range that is empty or does not begin and end at a page,
// and no range is freed; else the error of the first range that the kernel refused, and the
// others are free.
int jumbo_free_ranges(const struct iovec *ranges, size_t count, uint32_t flags) JUMBO_NOEXCEPT;

// Waits for frees in the background, and ends the worker threads. Call it before setuid(2),
// setns(2) and the like: a worker would keep the old user.
//
// Errors: EBUSY if a worker still runs after ten seconds.
int jumbo_end_workers(void) JUMBO_NOEXCEPT;

// Makes a region of zeroes, mapped shared, on a file of its own.
//
// A hugetlb region is populated. A touch of another region allocates its page, and without memory
// it kills the program, as everywhere.
//
// Errors: EINVAL, E2BIG for the options; ENOMEM without pages of `JUMBO_HUGETLB`, or addresses.
int jumbo_region_make(const struct jumbo_region_options *options,
                      struct jumbo_region *region)
JUMBO_NOEXCEPT;

// Maps the region of a descriptor from `jumbo_region_fd`, of this process or another, with its
// present length; a file of memfd_create(2), shm_open(3) or on hugetlbfs too. The descriptor stays
// the caller's.
//
// No process truncates the file meanwhile, or punches holes into one of hugetlb: a touch would
// cause SIGBUS. `jumbo_region_seal` forbids the first to all.
//
// Errors: EBADF; EINVAL for another kind of file, or an empty one; EACCES without write access;
// ENOMEM.
int jumbo_region_attach(int fd, struct jumbo_region *region) JUMBO_NOEXCEPT;

// Returns the address of a region, which stays the same until it is closed.
//
// Errors: EBADF.
void *jumbo_region_address(struct jumbo_region region) JUMBO_NOEXCEPT;

// Returns the length of a region in bytes, or -1.
//
// Errors: EBADF.
int64_t jumbo_region_size(struct jumbo_region region) JUMBO_NOEXCEPT;

// Returns the bytes of a region that this process maps by huge pages, or -1. Linux 6.7.
//
// Errors: EBADF; ENOSYS.
int64_t jumbo_region_huge(struct jumbo_region region) JUMBO_NOEXCEPT;

// Returns the descriptor of a region's file, or -1. It is the library's: do not close it. Pass it
// by fork(2) or SCM_RIGHTS.
//
// No holder truncates the file, or punches holes into one of hugetlb: see `jumbo_region_attach`.
//
// Errors: EBADF.
int jumbo_region_fd(struct jumbo_region region) JUMBO_NOEXCEPT;

// Grows a region by zeroes; its address stays. A smaller size changes nothing.
//
// Errors: EBADF; EINVAL beyond the capacity; EPERM for a sealed region; ENOMEM.
int jumbo_region_grow(struct jumbo_region region, uint64_t size) JUMBO_NOEXCEPT;

// Frees the pages of a range, which reads as zeroes afterwards, in all processes.
//
// A touch of a hole in a hugetlb region can cause SIGBUS: call `jumbo_region_fill` first.
//
// Errors: EBADF; EINVAL beyond the region.
int jumbo_region_punch(struct jumbo_region region, size_t offset, size_t size) JUMBO_NOEXCEPT;

// Fills the holes of a range of a hugetlb region that this process punched. Other regions need no
// call.
//
// Errors: EBADF; EINVAL beyond the region; ENOMEM.
int jumbo_region_fill(struct jumbo_region region, size_t offset, size_t size) JUMBO_NOEXCEPT;

// Collapses the touched blocks of a region onto huge pages (MADV_COLLAPSE, Linux 6.1). No byte
// changes; other threads may write meanwhile. Blocks for which no huge page is free stay.
//
// Errors: EBADF; EINVAL if the kernel refuses shared memory.
int jumbo_region_collapse(struct jumbo_region region) JUMBO_NOEXCEPT;

// Seals the size of a region for all processes.
//
// Errors: EBADF; those of fcntl(2).
int jumbo_region_seal(struct jumbo_region region) JUMBO_NOEXCEPT;

// Unmaps a region, and closes its descriptor. Other processes keep the memory.
//
// Errors: EBADF.
int jumbo_region_close(struct jumbo_region region) JUMBO_NOEXCEPT;

// Reads the memory of this process, from /proc/self/smaps. `size` is
// `sizeof(struct jumbo_memory)`.
//
// Errors: EINVAL; those of open(2) without /proc.
int jumbo_status(struct jumbo_memory *memory, size_t size) JUMBO_NOEXCEPT;

// Reads the memory of a range of whole base pages, mapped or not; `mapped` is its length. Linux
// 6.7. `size` is `sizeof(struct jumbo_memory)`.
//
// Errors: EINVAL for a range that does not begin and end at a page; EFAULT beyond the address
// space; ENOSYS for an older kernel.
int jumbo_status_range(const void *start,
                       size_t length,
                       struct jumbo_memory *memory,
                       size_t size)
JUMBO_NOEXCEPT;

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* JUMBO_H */
