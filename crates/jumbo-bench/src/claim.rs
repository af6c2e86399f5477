//! What a sample must show, so that it is of what the name of its side says: [`Expected`]. A comparison of anything else
//! would prove nothing. Each check returns [`Error::Claim`], with what to do, where a sample does not.

use jumbo::status::Freeing;
use jumbo::units::{Bytes, Pages, counted};

use crate::Error;
use crate::child::Launch;
use crate::memory::Memory;
use crate::worker::Sample;

/// What a sample must show; what has its default is not looked at.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Expected {
    pub(crate) memory: On,
    /// Pages taken from a pool of the program's, and surplus ones among them.
    pub(crate) pool: Option<[Pages; 2]>,
    /// The least and the most surplus pages of the kernel's pool.
    pub(crate) kernel_surplus: Option<[Pages; 2]>,
    /// At least so many pages promised by the kernel's pool.
    pub(crate) kernel_reserved: Pages,
    pub(crate) freed: Freed,
}

/// On which pages its memory must be.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum On {
    /// Any.
    #[default]
    Any,
    /// None of it on huge pages.
    NoHuge,
    /// So much of it, and none of it on huge pages.
    Base(Bytes),
    /// Half of it on huge pages: alignment and small remainders cost a few percent; with half on base pages it is
    /// another program.
    Half,
    /// So much of it on huge pages.
    Huge(Bytes),
    /// So much of it on pages of the kernel's pool.
    Hugetlb(Bytes),
}

/// How a block must have been freed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum Freed {
    #[default]
    Anyhow,
    /// In any way, until its memory was back.
    Back,
    /// With up to so many threads.
    By(u32, Bytes),
    /// In the background, until its memory was back.
    Later(Bytes),
}

const DOCTOR: &str = "`jumbo doctor` shows what keeps memory off huge pages on this host";
const BASE_PAGES: &str =
    "compare with base pages: set /sys/kernel/mm/transparent_hugepage/enabled to `madvise`";
const ALONE: &str = "measure while no other program uses the kernel's pool of 2 MiB pages: \
                     `jumbo pool show` says which do";

/// Where jumbo did not do what was asked of it.
pub(crate) const DRY_RUN: &str = "`jumbo run --dry-run -- true` shows what `jumbo run` does";

/// So much of what a worker was to have it must have, in percent. Beside it there are a few MiB of its own.
pub(crate) const MOST: u64 = 95;

/// So much of a block must have been freed the way the side's name says: its ends are the caller's.
const MOST_FREED: u64 = 90;

impl Expected {
    pub(crate) fn on(memory: On) -> Self {
        Self {
            memory,
            ..Self::default()
        }
    }

    /// Whether a sample of a program that was started so shows it.
    pub(crate) fn check(&self, launch: &Launch, sample: &Sample) -> Result<(), Error> {
        self.memory.check(launch, &sample.memory)?;
        let counted = &sample.counted;
        if let Some([used, surplus]) = self.pool {
            let found = format!(
                "{} pages taken and {} of them surplus, and not {used} and {surplus}",
                counted.used, counted.surplus
            );
            let other = counted.used != used || counted.surplus != surplus;
            refused(other, found, ALONE)?;
        }
        if let Some([least, most]) = self.kernel_surplus {
            let made = counted.kernel_surplus;
            let found = format!("surplus pages of the kernel's pool: {made}");
            refused(made < least || made > most, found, ALONE)?;
        }
        let few = counted.kernel_reserved < self.kernel_reserved;
        refused(few, "the kernel has promised no page".to_owned(), ALONE)?;

        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let freed = sample.freed.unwrap_or_default();
        if let Some(found) = self.freed.found_wrong(freed, cpus as u64) {
            return Err(Error::claim(found, DRY_RUN));
        }
        match self.freed {
            Freed::Back | Freed::Later(_) if !sample.figures.contains_key("back_ms") => {
                Err(Error::NotBack(sample.memory.resident))
            }
            _ => Ok(()),
        }
    }
}

impl On {
    /// Whether a process that was started so has that.
    pub(crate) fn check(self, launch: &Launch, memory: &Memory) -> Result<(), Error> {
        let Memory {
            resident,
            huge,
            hugetlb,
            preloaded,
        } = *memory;
        let plain = !matches!(launch, Launch::Jumbo(_));
        let found = "the preload library is not in it".to_owned();
        refused(!plain && !preloaded, found, DRY_RUN)?;
        let found = "jumbo's preload library is in it".to_owned();
        refused(plain && preloaded, found, "see /etc/ld.so.preload")?;

        let any = format!("{huge} of it are in huge pages");
        let of = |part: Bytes, size: Bytes| {
            format!("{part} of {size} are in such pages as were to be had")
        };
        match self {
            Self::Any => Ok(()),
            Self::NoHuge => refused(huge > Bytes(0), any, BASE_PAGES),
            Self::Base(size) => {
                refused(huge > Bytes(0), any, BASE_PAGES)?;
                let found = format!("{resident} of {size} are resident");
                let few = resident < percent(MOST, size);
                refused(few, found, "measure less, with --size")
            }
            Self::Half => refused(huge < percent(50, resident), of(huge, resident), DOCTOR),
            Self::Huge(size) => refused(huge < percent(MOST, size), of(huge, size), DOCTOR),
            Self::Hugetlb(size) => refused(hugetlb < percent(MOST, size), of(hugetlb, size), ALONE),
        }
    }
}

impl Freed {
    fn found_wrong(self, freed: Freeing, cpus: u64) -> Option<String> {
        let Freeing {
            gathered,
            background,
            workers,
            ..
        } = freed;
        match self {
            Self::Later(size) if background < percent(MOST_FREED, size) => Some(format!(
                "{background} of {size} were freed in the background"
            )),
            Self::By(2.., size) if gathered < percent(MOST_FREED, size) => Some(format!(
                "{gathered} of {size} were freed by several threads"
            )),
            // Threads that find no CPU find nothing left to free.
            Self::By(asked, _)
                if workers > asked.into() || (asked > 1 && workers < cpus.min(asked.into())) =>
            {
                Some(format!("{} freed", counted(workers, "thread")))
            }
            _ => None,
        }
    }
}

/// So much of `size`.
fn percent(part: u64, size: Bytes) -> Bytes {
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
    fn a_side_that_is_not_what_it_claims_is_refused() {
        let base = On::Base(Bytes(1000));
        for (launch, on, resident, huge, preloaded, fine) in [
            (Launch::Plain, base, 1010, 0, false, true),
            (Launch::Plain, base, 900, 0, false, false),
            (Launch::Plain, base, 1010, 1, false, false),
            (Launch::Plain, base, 1010, 0, true, false),
            (Launch::JUMBO, base, 1010, 0, true, true),
            (Launch::JUMBO, base, 1010, 0, false, false),
            (Launch::JUMBO, base, 1010, 2, true, false),
            (Launch::Plain, On::NoHuge, 100, 0, false, true),
            (Launch::Plain, On::NoHuge, 100, 1, false, false),
            (Launch::Tunable, On::Half, 100, 90, false, true),
            (Launch::Tunable, On::Half, 100, 90, true, false),
            (Launch::JUMBO, On::Half, 100, 40, true, false),
            (Launch::Plain, On::Huge(Bytes(100)), 100, 96, false, true),
            (
                Launch::Plain,
                On::Hugetlb(Bytes(100)),
                100,
                96,
                false,
                false,
            ),
        ] {
            let memory = Memory {
                resident: Bytes(resident),
                huge: Bytes(huge),
                hugetlb: Bytes(0),
                preloaded,
            };
            let checked = on.check(&launch, &memory);
            assert_eq!(checked.is_ok(), fine, "{launch:?} {on:?} {memory:?}");
        }
    }

    #[test]
    fn a_side_that_freed_in_another_way_is_refused() {
        let size = Bytes(1000);
        let (one, four, later) = (Freed::By(1, size), Freed::By(4, size), Freed::Later(size));
        for (side, gathered, background, workers, fine) in [
            (one, 0, 0, 0, true),
            (one, 1000, 0, 1, true),
            (one, 1000, 0, 2, false),
            (four, 950, 0, 4, true),
            (four, 950, 0, 3, true),
            (four, 950, 0, 1, false),
            (four, 950, 0, 5, false),
            (four, 500, 0, 4, false),
            (four, 0, 0, 0, false),
            (later, 1000, 1000, 2, true),
            (later, 1000, 100, 2, false),
            (Freed::Back, 0, 0, 0, true),
        ] {
            let mut freed = Freeing::default();
            freed.gathered = Bytes(gathered);
            freed.background = Bytes(background);
            freed.workers = workers;
            let found = side.found_wrong(freed, 2);
            assert_eq!(found.is_none(), fine, "{side:?} {freed:?}");
        }
    }
}
