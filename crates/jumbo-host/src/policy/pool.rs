//! The pool of `jumbo run --pool`: [`PoolRequest`].

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use jumbo_inside::orders::{MAX_POOL, PoolOrder};

use crate::units::{Bytes, PageSize, SizeError};

/// `SIZE[:PAGESIZE][,each][,nofork]` of an option or a profile, and other options about the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolRequest {
    /// Size of the pool, at least one byte.
    pub size: Bytes,
    /// Page size; `None`: the PMD size.
    pub page: Option<PageSize>,
    /// The size is for each process, instead of all processes of the run together.
    pub each: bool,
    /// The program promises not to fork while it has several threads.
    pub nofork: bool,
    /// Maximum memory beyond the pool (`--overcommit`).
    pub overcommit: Bytes,
    /// The pool is resident before the program starts (`--warm`).
    pub warm: bool,
}

/// Reasons to reject a pool.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// Malformed size.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// Page smaller than the PMD size.
    #[error(
        "a pool's pages are of {pmd} at least, which is what a PMD maps here, not {page}; hint: {pmd}"
    )]
    Small {
        /// Requested page size.
        page: PageSize,
        /// Minimum page size.
        pmd: PageSize,
    },
    /// Pool or overcommit of less than one page.
    #[error(
        "{size} is less than one page of a pool in pages of {page}; hint: {page}, or smaller pages"
    )]
    Part {
        /// Requested size.
        size: Bytes,
        /// Page size.
        page: PageSize,
    },
    /// Empty pool, or pool and overcommit beyond [`MAX_POOL`].
    #[error("a pool is larger than nothing and at most {MAX_POOL}, its overcommit included")]
    Bounds,
    /// Page larger than the alignment of the heap's ranges.
    #[error("a pool's pages are of 1 GiB at most, not {0}; hint: 2M, or 1G")]
    Page(PageSize),
    /// Unknown property after a comma.
    #[error("`{0}` is no property of a pool: there are `each` and `nofork`")]
    Property(String),
}

impl PoolRequest {
    /// Checks the size of pool and overcommit.
    ///
    /// # Errors
    /// [`PoolError::Bounds`].
    pub fn check(&self) -> Result<(), PoolError> {
        let whole = self.size.0.saturating_add(self.overcommit.0);
        match self.size.0 > 0 && whole <= MAX_POOL.0 {
            true => Ok(()),
            false => Err(PoolError::Bounds),
        }
    }

    /// Checks that a host with PMD size `pmd` can have these page and pool sizes.
    ///
    /// # Errors
    /// [`PoolError::Small`], [`PoolError::Part`].
    pub fn check_pages(&self, pmd: PageSize) -> Result<(), PoolError> {
        let page = self.page.unwrap_or(pmd);
        if page < pmd {
            return Err(PoolError::Small { page, pmd });
        }
        let mut sizes = [self.size, self.overcommit].into_iter();
        let part = sizes.find(|size| (1..page.bytes()).contains(&size.0));
        part.map_or(Ok(()), |size| Err(PoolError::Part { size, page }))
    }

    /// Returns the order for the library, with sizes rounded up to pages.
    pub fn order(self, pmd: usize) -> PoolOrder {
        let bytes = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX / 2);
        let page = self.page.map_or(pmd, |page| bytes(page.bytes()).max(pmd));
        PoolOrder {
            size: bytes(self.size.0).next_multiple_of(page),
            page,
            overcommit: bytes(self.overcommit.0).next_multiple_of(page),
            warm: self.warm.then_some(0),
            nofork: self.nofork,
            each: self.each,
        }
    }

    /// Returns the request with the sizes of `order`, in whole pages.
    #[must_use]
    pub fn rounded(self, order: PoolOrder) -> Self {
        let page = PageSize::new(order.page as u64).ok();
        Self {
            size: Bytes(order.size as u64),
            page: self.page.and(page),
            ..self
        }
    }
}

impl FromStr for PoolRequest {
    type Err = PoolError;

    fn from_str(text: &str) -> Result<Self, PoolError> {
        let mut parts = text.split(',');
        let sizes = parts.next().unwrap_or_default();
        let pair = sizes.split_once(':');
        let (size, page) = pair.map_or((sizes, None), |(size, page)| (size, Some(page)));
        let mut request = Self {
            size: size.parse()?,
            page: page.map(str::parse).transpose()?,
            nofork: false,
            each: false,
            overcommit: Bytes(0),
            warm: false,
        };
        for property in parts {
            match property {
                "nofork" => request.nofork = true,
                "each" => request.each = true,
                other => return Err(PoolError::Property(other.to_owned())),
            }
        }
        if let Some(page) = request.page.filter(|page| *page > PageSize::SIZE_1G) {
            return Err(PoolError::Page(page));
        }
        request.check()?;
        Ok(request)
    }
}

impl fmt::Display for PoolRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.size)?;
        if let Some(page) = self.page {
            write!(f, ":{page}")?;
        }
        f.write_str(if self.each { ",each" } else { "" })?;
        f.write_str(if self.nofork { ",nofork" } else { "" })
    }
}

impl Serialize for PoolRequest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_is_parsed_and_printed() {
        let request: PoolRequest = "4G:1G,nofork,each".parse().unwrap();
        assert_eq!(request.size, Bytes(4 << 30));
        assert_eq!(request.page, Some(PageSize::SIZE_1G));
        assert!(request.nofork && request.each);
        assert_eq!(request.to_string(), "4 GiB:1G,each,nofork");
        let request: PoolRequest = "300M".parse().unwrap();
        assert_eq!((request.page, request.nofork), (None, false));
        assert!(!request.each);
        for bad in [
            "", "0", "1T", "4G:3M", "4G:2G", "4G,", "4G,fork", "x", "4G:",
        ] {
            assert!(bad.parse::<PoolRequest>().is_err(), "{bad}");
        }
        let overcommit = MAX_POOL;
        assert!(
            PoolRequest {
                overcommit,
                ..request
            }
            .check()
            .is_err()
        );
    }

    #[test]
    fn pool_has_at_least_one_page() {
        let check = |text: &str, overcommit: u64| {
            let request: PoolRequest = text.parse().unwrap();
            let overcommit = Bytes(overcommit);
            PoolRequest {
                overcommit,
                ..request
            }
            .check_pages(PageSize::SIZE_2M)
        };
        for (good, overcommit) in [("2M", 0), ("3M", 3 << 20), ("1G:1G", 1 << 30), ("2M:2M", 0)] {
            assert_eq!(check(good, overcommit), Ok(()), "{good}");
        }
        let page = PageSize::SIZE_2M;
        for (bad, size) in [("1K", 1 << 10), ("1M:2M", 1 << 20)] {
            let size = Bytes(size);
            assert_eq!(check(bad, 0), Err(PoolError::Part { size, page }), "{bad}");
        }
        assert!(matches!(check("64M:1G", 0), Err(PoolError::Part { .. })));
        assert!(matches!(check("4M", 1), Err(PoolError::Part { .. })));
        assert!(matches!(check("1G:4K", 0), Err(PoolError::Small { .. })));
    }

    #[test]
    fn order_is_in_whole_pages_and_survives_the_environment() {
        let mut request: PoolRequest = "5M:2M,nofork".parse().unwrap();
        (request.overcommit, request.warm) = (Bytes(1), true);
        let order = request.order(2 << 20);
        assert_eq!(order.size, 6 << 20);
        assert_eq!(order.overcommit, 2 << 20);
        assert_eq!(PoolOrder::decode(&order.to_string()), Some(order));
        assert_eq!(request.rounded(order).size, Bytes(6 << 20));
        // The PMD size is the minimum.
        let small: PoolRequest = "1M:64k".parse().unwrap();
        let small = small.order(2 << 20);
        assert_eq!((small.page, small.size), (2 << 20, 2 << 20));
        let orders = format!("a=1,pool={order},b=2");
        let digits = PoolOrder::warm_digits(&orders).unwrap();
        assert_eq!(&orders[digits], "0000000000");
        let cold = PoolOrder {
            warm: None,
            ..order
        };
        assert_eq!(PoolOrder::decode(&cold.to_string()), Some(cold));
        assert_eq!(PoolOrder::warm_digits(&format!("pool={cold}")), None);
        for bad in [
            "",
            "1:2:3:0:0:0",
            "2097152:2097152:0:0:0",
            "0:2097152:0:0:0:0",
            "a:b:c:d:e:f",
        ] {
            assert_eq!(PoolOrder::decode(bad), None, "{bad}");
        }
    }
}
