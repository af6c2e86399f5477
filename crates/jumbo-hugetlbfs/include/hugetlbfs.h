// The interface of libhugetlbfs 2.24, as jumbo has it. See docs/libhugetlbfs.md.

#ifndef _HUGETLBFS_H
#define _HUGETLBFS_H

#include <stddef.h>

#define HUGETLBFS_MAGIC 0x958458f6
#define PF_LINUX_HUGETLB 0x100000

#ifdef __cplusplus
extern "C" {
#endif

long gethugepagesize(void);
int gethugepagesizes(long pagesizes[], int n_elem);
int getpagesizes(long pagesizes[], int n_elem);
int hugetlbfs_test_path(const char *mount);
const char *hugetlbfs_find_path(void);
const char *hugetlbfs_find_path_for_size(long page_size);
int hugetlbfs_unlinked_fd(void);
int hugetlbfs_unlinked_fd_for_size(long page_size);

typedef unsigned long ghp_t;
#define GHP_DEFAULT ((ghp_t)0x01UL)
#define GHP_MASK (GHP_DEFAULT)

void *get_huge_pages(size_t len, ghp_t flags);
void free_huge_pages(void *ptr);

// FALLBACK: THPs or base pages without pages of the pool. STRICT: NULL then. COLOR: an address
// offset by cache lines, within the pages.
typedef unsigned long ghr_t;
#define GHR_STRICT ((ghr_t)0x10000000U)
#define GHR_FALLBACK ((ghr_t)0x20000000U)
#define GHR_COLOR ((ghr_t)0x40000000U)
#define GHR_DEFAULT (GHR_FALLBACK | GHR_COLOR)
#define GHR_MASK (GHR_FALLBACK | GHR_STRICT | GHR_COLOR)

void *get_hugepage_region(size_t len, ghr_t flags);
void free_hugepage_region(void *ptr);

#ifdef __cplusplus
}
#endif

#endif
