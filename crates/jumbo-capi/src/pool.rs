//! Pools of huge pages: `jumbo_pool_*`, over [`jumbo::pool`].
//!
//! A pool, a quota of it and a reservation in it are handles of one kind, [`jumbo_pool`]: take, give
//! and close work alike. `Books` has the taken pages by their address, so that a wrong address is
//! an error.
//!
//! Invariant: a pool lives as long as a page of it is out. Its own handle cannot be closed before;
//! handles of quotas and reservations end without their pages.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use jumbo::Root;
use jumbo::pool::{Hugetlb, Page, Placement, Pool, Populate, Quota, Region, Reservation, Thp};
use jumbo::units::{PageSize, Pages};
use jumbo_sys::thp::pmd_size;
use rustix::io::Errno;

use crate::failure::{Failure, Outcome, call, note, status};
use crate::sized::{self, Plain};
use crate::table::Table;
use crate::{JUMBO_ANY, JUMBO_HUGETLB, JUMBO_THP};

/// A pool of huge pages of one size, a quota of one, or a reservation in one. Zero is no pool.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct jumbo_pool {
    /// Private to the library.
    pub handle: u64,
}

/// Configuration of a pool. All fields but `size` may be zero.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct jumbo_pool_options {
    /// `sizeof(struct jumbo_pool_options)`.
    pub size: usize,
    /// `JUMBO_ANY`, `JUMBO_THP` or `JUMBO_HUGETLB`.
    pub source: u64,
    /// Bytes of a page; 0: the size that one PMD maps (2 MiB on x86-64). THPs have no other.
    pub page_size: u64,
    /// Persistent pages: the pool makes them when it opens, and keeps them.
    pub pages: u64,
    /// Maximum number of surplus pages, made on demand and released when they are given back.
    pub overcommit: u64,
    /// Maximum number of pages on each node, for which addresses are reserved; 0: twice the host's
    /// memory.
    pub capacity: u64,
}

/// Counters of a pool, by the kernel's names for its own pools.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct jumbo_pool_stats {
    /// Bytes of a page.
    pub page_size: u64,
    /// `JUMBO_THP` or `JUMBO_HUGETLB`.
    pub source: u64,
    /// All pages of the pool.
    pub total: u64,
    /// Pages that are not taken.
    pub free: u64,
    /// Free pages that are promised to reservations.
    pub reserved: u64,
    /// Pages that are released when they are given back.
    pub surplus: u64,
    /// Maximum number of surplus pages.
    pub overcommit: u64,
    /// Maximum number of pages taken by this handle: of a quota its limit, of a reservation the
    /// promised pages that are left. UINT64_MAX for a pool.
    pub limit: u64,
    /// Pages taken by this quota; 0 for other handles.
    pub charged: u64,
    /// Highest value of `charged` so far.
    pub peak: u64,
}

// SAFETY: integers of 8 bytes, on the 64-bit targets of jumbo.
unsafe impl Plain for jumbo_pool_options {}
// SAFETY: as above.
unsafe impl Plain for jumbo_pool_stats {}

static POOLS: Table<Handle> = Table::new("pool");

/// A handle's share of a pool. The fields are dropped in this order: a reservation borrows the pool.
struct Handle {
    view: View,
    shared: Arc<Shared>,
}

enum View {
    Whole,
    Quota(Arc<Quota>),
    /// `'static` stands for the life of [`Shared`].
    Reservation(Mutex<Reservation<'static>>),
}

/// A pool and its taken pages. The fields are dropped in this order: pages borrow the pool.
struct Shared {
    books: Mutex<Books>,
    source: u32,
    pool: Pool,
}

#[derive(Default)]
struct Books {
    is_closed: bool,
    /// Handles of quotas and reservations.
    views: usize,
    taken: HashMap<usize, Taken>,
}

/// Pages at consecutive addresses. `'static` stands for the life of [`Shared`].
struct Taken {
    _pages: Held,
    count: u64,
    quota: Option<Arc<Quota>>,
}

#[expect(dead_code, reason = "held for their drop, which returns them")]
enum Held {
    One(Page<'static>),
    Several(Region<'static>),
}

impl Drop for Taken {
    fn drop(&mut self) {
        if let Some(quota) = &self.quota {
            quota.uncharge(self.count);
        }
    }
}

impl Shared {
    fn open(options: &jumbo_pool_options) -> Outcome<Self> {
        let root = Root::host();
        let pmd = pmd_size(&root)?;
        let size = match options.page_size {
            0 => pmd,
            bytes => PageSize::new(bytes).map_err(Failure::invalid)?,
        };
        let thp = || {
            if size != pmd {
                return Err(Failure::invalid(format!("THPs have {pmd}, not {size}")));
            }
            let source = match options.capacity {
                0 => Thp::new()?,
                capacity => Thp::with_capacity(&root, Pages(capacity))?,
            };
            Self::filled(
                JUMBO_THP,
                Pool::without_folios(source, placement()?),
                options,
            )
        };
        let hugetlb = || {
            let source = match options.capacity {
                0 => Hugetlb::new(size)?,
                capacity => Hugetlb::with_capacity(&root, size, Pages(capacity))?,
            };
            let pool = Pool::without_folios(source, placement()?);
            Self::filled(JUMBO_HUGETLB, pool, options)
        };
        match u32::try_from(options.source) {
            // Without persistent pages nothing shows that the kernel's pool has any.
            Ok(JUMBO_ANY) if options.pages == 0 => thp(),
            Ok(JUMBO_ANY) => hugetlb().or_else(|failure| {
                let pool = thp()?;
                note(&format!("THPs: {}", failure.message));
                Ok(pool)
            }),
            Ok(JUMBO_THP) => thp(),
            Ok(JUMBO_HUGETLB) => hugetlb(),
            _ => Err(Failure::invalid(format!("no source {}", options.source))),
        }
    }

    /// Makes the persistent pages, all or none.
    fn filled(source: u32, pool: Pool, options: &jumbo_pool_options) -> Outcome<Self> {
        let room = pool.capacity();
        if options.pages > room.0 {
            let message = format!("{} pages, of addresses for {room}", options.pages);
            return Err(Failure::new(Errno::NOMEM, message));
        }
        if let Some(error) = pool.resize(Pages(options.pages)).stopped {
            let mut failure = Failure::from(error);
            if source == JUMBO_HUGETLB {
                let size = pool.page_size();
                let hint = format!("; hint: `jumbo pool set {size} --overcommit SIZE`");
                failure.message.push_str(&hint);
            }
            return Err(failure);
        }
        pool.set_overcommit(Pages(options.overcommit));
        Ok(Self {
            books: Mutex::default(),
            source,
            pool,
        })
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the pool for values that `self` outlives.
    ///
    /// # Safety
    /// What borrows the pool is dropped before `self`.
    unsafe fn pool(&self) -> &'static Pool {
        // SAFETY: the caller's promise; `Shared` lies in an `Arc`, and does not move.
        unsafe { &*ptr::from_ref(&self.pool) }
    }
}

fn placement() -> Outcome<Placement> {
    Ok(Placement::of_thread()?)
}

/// Adds a handle of a quota or a reservation to an open pool.
fn view(shared: &Arc<Shared>, view: View) -> Outcome<jumbo_pool> {
    // Not locked during the insertion: a removal locks the table first.
    {
        let mut books = shared.books();
        if books.is_closed {
            return Err(Failure::new(Errno::BADF, "the pool was closed meanwhile"));
        }
        books.views += 1;
    }
    let shared = Arc::clone(shared);
    let handle = POOLS.insert(Handle { view, shared });
    handle.map(|handle| jumbo_pool { handle })
}

/// Returns the pool of a handle that is neither a quota nor a reservation.
fn whole(pool: jumbo_pool) -> Outcome<Arc<Shared>> {
    let handle = POOLS.get(pool.handle)?;
    match handle.view {
        View::Whole => Ok(Arc::clone(&handle.shared)),
        _ => Err(Failure::invalid(
            "the handle of a quota or reservation, not of a pool",
        )),
    }
}

/// Opens a pool. The caller's cpuset and memory policy have its nodes.
///
/// Errors: EINVAL, E2BIG for the options; ENOMEM if the kernel does not provide all of `pages`, or
/// no addresses; ENODEV for hugetlb pages of a size that the kernel lacks, or for nodes outside of
/// the policy; EOPNOTSUPP without THP.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn jumbo_pool_open(
    options: *const jumbo_pool_options,
    pool: *mut jumbo_pool,
) -> c_int {
    // SAFETY: the promise of the caller: valid pointers.
    status(|| unsafe {
        sized::put(pool, || {
            let shared = Arc::new(Shared::open(&sized::read(options)?)?);
            let view = View::Whole;
            let handle = POOLS.insert(Handle { view, shared })?;
            Ok(jumbo_pool { handle })
        })
    })
}

/// Takes pages at consecutive addresses: free ones, else surplus ones. Their content is
/// unspecified. Returns the address of the first, aligned to the page size.
///
/// A touch of them cannot fail. A quota is charged; a reservation supplies its own pages alone.
///
/// Errors: EBADF; EINVAL for 0 pages; ENOMEM if the pool, its reservation, the host or the memory
/// cgroup has too few; EDQUOT beyond a quota; EOWNERDEAD.
#[unsafe(no_mangle)]
pub extern "C" fn jumbo_pool_take(pool: jumbo_pool, pages: usize) -> *mut c_void {
    call(ptr::null_mut(), || {
        take(&*POOLS.get(pool.handle)?, pages as u64)
    })
}

fn take(handle: &Handle, count: u64) -> Outcome<*mut c_void> {
    if count == 0 {
        return Err(Failure::invalid("0 pages"));
    }
    let quota = match &handle.view {
        View::Quota(quota) => Some(Arc::clone(quota)),
        _ => None,
    };
    if let Some(quota) = quota.as_ref().filter(|quota| !quota.charge(count)) {
        let (limit, charged) = (quota.limit(), quota.charged());
        let message = format!("quota of {limit} pages: {charged} taken, {count} wanted");
        return Err(Failure::new(Errno::DQUOT, message));
    }
    let held = take_held(handle, count).inspect_err(|_| {
        if let Some(quota) = &quota {
            quota.revert(count);
        }
    });
    let (pages, address) = held?;
    let taken = Taken {
        _pages: pages,
        count,
        quota,
    };
    let mut books = handle.shared.books();
    if books.is_closed {
        // After the lock: the drop returns the pages to the pool.
        drop(books);
        drop(taken);
        return Err(Failure::new(Errno::BADF, "the pool was closed meanwhile"));
    }
    books.taken.insert(address.addr(), taken);
    Ok(address)
}

fn take_held(handle: &Handle, count: u64) -> Outcome<(Held, *mut c_void)> {
    // SAFETY: the pages go to `Books` of the same `Shared`, or are dropped by the caller, who has a
    // reference to it.
    let pool = unsafe { handle.shared.pool() };
    let one = |mut page: Page<'static>| {
        let address = page.as_ptr().as_ptr().cast();
        (Held::One(page), address)
    };
    let several = |mut region: Region<'static>| {
        let all = usize::try_from(region.pages().0).unwrap_or(usize::MAX);
        let address = region.bytes_mut(0..all)?.as_mut_ptr();
        Ok((Held::Several(region), address.cast()))
    };
    match &handle.view {
        View::Reservation(reservation) => {
            let mut all = reservation.lock().unwrap_or_else(PoisonError::into_inner);
            let left = all.left();
            let lack = || {
                let message = format!("reservation: {left} pages left, {count} wanted");
                Failure::new(Errno::NOMEM, message)
            };
            match count {
                _ if count > left.0 => Err(lack()),
                1 => all.take().map(one).ok_or_else(lack),
                _ => several(all.take_region(Pages(count), Populate::UpFront)?),
            }
        }
        _ if count == 1 => Ok(one(pool.take()?)),
        _ => several(pool.region(Pages(count), Populate::UpFront)?),
    }
}

/// Gives back the pages of one `jumbo_pool_take`, by any handle of their pool. No thread uses them
/// any more.
///
/// Errors: EBADF; EINVAL for an address that is not taken.
#[unsafe(no_mangle)]
pub extern "C" fn jumbo_pool_give(pool: jumbo_pool, pages: *mut c_void) -> c_int {
    status(|| {
        let handle = POOLS.get(pool.handle)?;
        // The lock ends with this statement: the drop of the pages below may call the kernel.
        let taken = handle.shared.books().taken.remove(&pages.addr());
        let unknown = || Failure::invalid(format!("no pages at {pages:?} are taken from the pool"));
        taken.map(drop).ok_or_else(unknown)
    })
}

/// Promises pages, all or none: `jumbo_pool_take` of the new handle cannot fail for so many.
/// `jumbo_pool_close` releases those that are left; taken ones stay taken.
///
/// Errors: those of `jumbo_pool_take`; EINVAL for a quota or reservation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn jumbo_pool_reserve(
    pool: jumbo_pool,
    pages: usize,
    reservation: *mut jumbo_pool,
) -> c_int {
    // SAFETY: the promise of the caller: a valid pointer. A `Handle` drops its reservation before
    // its reference to the pool.
    status(|| unsafe {
        sized::put(reservation, || {
            let shared = whole(pool)?;
            let promised = shared.pool().reserve(Pages(pages as u64))?;
            view(&shared, View::Reservation(Mutex::new(promised)))
        })
    })
}

/// Makes a handle that takes at most `limit` pages of a pool at a time. It promises none.
///
/// Errors: EBADF; EINVAL for a quota or reservation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn jumbo_pool_quota(
    pool: jumbo_pool,
    limit: u64,
    quota: *mut jumbo_pool,
) -> c_int {
    // SAFETY: the promise of the caller: a valid pointer.
    status(|| unsafe {
        sized::put(quota, || {
            view(&whole(pool)?, View::Quota(Arc::new(Quota::new(limit))))
        })
    })
}

/// Sets the number of persistent pages. A shrink releases free pages; taken ones beyond it become
/// surplus.
///
/// Errors: EBADF; EINVAL for a quota or reservation; ENOMEM if the kernel provides fewer: the pool
/// keeps those.
#[unsafe(no_mangle)]
pub extern "C" fn jumbo_pool_resize(pool: jumbo_pool, pages: u64) -> c_int {
    status(|| {
        let shared = whole(pool)?;
        let room = shared.pool.capacity();
        if pages > room.0 {
            let message = format!("{pages} pages, of addresses for {room}");
            return Err(Failure::new(Errno::NOMEM, message));
        }
        let resized = shared.pool.resize(Pages(pages));
        resized.stopped.map_or(Ok(()), |error| Err(error.into()))
    })
}

/// Sets the maximum number of surplus pages of a pool, or the limit of a quota. What is taken
/// beyond a lowered limit stays.
///
/// Errors: EBADF; EINVAL for a reservation.
#[unsafe(no_mangle)]
pub extern "C" fn jumbo_pool_limit(pool: jumbo_pool, pages: u64) -> c_int {
    status(|| {
        let handle = POOLS.get(pool.handle)?;
        match &handle.view {
            View::Whole => handle.shared.pool.set_overcommit(Pages(pages)),
            View::Quota(quota) => quota.set(pages),
            View::Reservation(_) => return Err(Failure::invalid("a reservation has no limit")),
        }
        Ok(())
    })
}

/// Reads the counters. `size` is `sizeof(struct jumbo_pool_stats)`.
///
/// Errors: EBADF; EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn jumbo_pool_status(
    pool: jumbo_pool,
    stats: *mut jumbo_pool_stats,
    size: usize,
) -> c_int {
    status(|| {
        let handle = POOLS.get(pool.handle)?;
        let shared = &handle.shared;
        let counters = shared.pool.counters();
        let (limit, charged, peak) = match &handle.view {
            View::Whole => (u64::MAX, 0, 0),
            View::Quota(quota) => (quota.limit(), quota.charged(), quota.peak()),
            View::Reservation(all) => {
                let all = all.lock().unwrap_or_else(PoisonError::into_inner);
                (all.left().0, 0, 0)
            }
        };
        let found = jumbo_pool_stats {
            page_size: shared.pool.page_size().bytes(),
            source: shared.source.into(),
            total: counters.total.0,
            free: counters.free.0,
            reserved: counters.reserved.0,
            surplus: counters.surplus.0,
            overcommit: counters.overcommit.0,
            limit,
            charged,
            peak,
        };
        // SAFETY: the promise of the caller: a valid pointer.
        unsafe { sized::write(stats, size, found) }
    })
}

/// Closes a handle. A pool returns its pages to the kernel; a reservation releases its promise.
///
/// Errors: EBADF; EBUSY for a pool of which pages are taken, or a quota or reservation is open: it
/// stays open.
#[unsafe(no_mangle)]
pub extern "C" fn jumbo_pool_close(pool: jumbo_pool) -> c_int {
    status(|| POOLS.remove(pool.handle, Handle::may_close))
}

impl Handle {
    fn may_close(&self) -> Outcome<()> {
        let mut books = self.shared.books();
        if !matches!(self.view, View::Whole) {
            books.views -= 1;
            return Ok(());
        }
        let pages: u64 = books.taken.values().map(|taken| taken.count).sum();
        if pages > 0 || books.views > 0 {
            let message = format!(
                "the pool is in use: {pages} pages taken, {} quotas and reservations open",
                books.views
            );
            return Err(Failure::new(Errno::BUSY, message));
        }
        books.is_closed = true;
        Ok(())
    }
}
