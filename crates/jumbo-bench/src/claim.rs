//! Whether a sample is of what the name of its side says: a comparison of anything else would prove nothing.
//!
//! Each check returns [`Error::Claim`], with what to do, where it is not.

use jumbo::units::Bytes;

use crate::Error;
use crate::child::Launch;
use crate::memory::Memory;

/// Where huge pages are missing.
const DOCTOR: &str = "`jumbo doctor` shows what keeps memory off huge pages on this host";

/// Where jumbo did not do what was asked of it.
pub(crate) const DRY_RUN: &str = "`jumbo run --dry-run -- true` shows what `jumbo run` does";

/// Where a side that was to have base pages has others.
const BASE_PAGES: &str =
    "compare with base pages: set /sys/kernel/mm/transparent_hugepage/enabled to `madvise`";

/// So much of what a worker was to have it must have, in percent. Beside it there are a few MiB of its own.
pub(crate) const MOST: u64 = 95;

/// The process was started the way it should have been.
pub(crate) fn launched(launch: &Launch, memory: &Memory) -> Result<(), Error> {
    let (found, hint) = match (launch, memory.preloaded) {
        (Launch::Jumbo(_), false) => ("the preload library is not in it", DRY_RUN),
        (Launch::Plain | Launch::Tunable, true) => {
            ("jumbo's preload library is in it", "see /etc/ld.so.preload")
        }
        _ => return Ok(()),
    };
    Err(Error::claim(found.to_owned(), hint))
}

/// Nothing of it is in huge pages.
pub(crate) fn no_huge_pages(memory: &Memory) -> Result<(), Error> {
    let found = format!("{} of it are in huge pages", memory.huge);
    refused(memory.huge > Bytes(0), found, BASE_PAGES)
}

/// It was started as it should have been, and has `size` bytes, all in base pages.
pub(crate) fn base_pages(launch: &Launch, memory: &Memory, size: Bytes) -> Result<(), Error> {
    launched(launch, memory)?;
    no_huge_pages(memory)?;
    let found = format!("{} of {size} are resident", memory.resident);
    let less = memory.resident < percent(MOST, size);
    refused(less, found, "measure less, with --size")
}

/// At least so many percent of `size` bytes are in huge pages.
pub(crate) fn huge_pages(memory: &Memory, least: u64, size: Bytes) -> Result<(), Error> {
    let found = format!("{} of {size} are in huge pages", memory.huge);
    refused(memory.huge < percent(least, size), found, DOCTOR)
}

/// So much of `size`.
pub(crate) fn percent(part: u64, size: Bytes) -> Bytes {
    Bytes(size.0 / 100 * part)
}

/// [`Error::Claim`] where that is so.
pub(crate) fn refused(is_wrong: bool, found: String, hint: &'static str) -> Result<(), Error> {
    if is_wrong {
        return Err(Error::claim(found, hint));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_pages_are_all_of_it_and_nothing_else() {
        let size = Bytes(1000);
        for (launch, resident, huge, preloaded, fine) in [
            (Launch::Plain, 1010, 0, false, true),
            (Launch::Plain, 900, 0, false, false),
            (Launch::Plain, 1010, 1, false, false),
            (Launch::Plain, 1010, 0, true, false),
            (Launch::JUMBO, 1010, 0, true, true),
            (Launch::JUMBO, 1010, 0, false, false),
            (Launch::JUMBO, 1010, 2, true, false),
        ] {
            let memory = Memory {
                resident: Bytes(resident),
                huge: Bytes(huge),
                hugetlb: Bytes(0),
                preloaded,
            };
            let checked = base_pages(&launch, &memory, size);
            assert_eq!(checked.is_ok(), fine, "{launch:?} {memory:?}");
        }
    }
}
