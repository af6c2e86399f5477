//! `Rung`: on which kind of page the text of a process is, and whose.

use jumbo::units::Bytes;

use super::program::{Cached, Program};
use super::worker::Text;
use crate::claim::{Claim, exactly, most_of, part_of};
use crate::launch::Launch;

/// Nothing but text differs.
const TEXT_ALONE: &str = "--heap=off --maps=off --free=off --reaper=off --data=off";

/// On which kind of page text is, and whose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rung {
    /// None huge.
    Base,
    /// As a plain program has it.
    Found,
    File,
    Shared,
    Private,
}

impl Rung {
    pub(super) const HUGE: [Self; 3] = [Self::File, Self::Shared, Self::Private];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Base => "4 KiB pages",
            Self::Found => "as found",
            Self::File => "file, primed",
            Self::Shared => "shared image",
            Self::Private => "private copy",
        }
    }

    /// What is added to the names of rows on it. What costs nothing has the plain name.
    pub(super) fn suffix(self) -> &'static str {
        match self {
            Self::Base | Self::Found | Self::File => "",
            Self::Shared => "_shared",
            Self::Private => "_private",
        }
    }

    pub(super) fn launch(self) -> Launch {
        let text = match self {
            Self::Base | Self::Found => return Launch::Plain,
            Self::File => "file",
            Self::Shared => "shared",
            Self::Private => "private",
        };
        Launch::Jumbo(format!("--text={text} {TEXT_ALONE}"))
    }

    /// What the page cache is to have of the program before it starts. Copies and images are made of text that is not huge yet.
    pub(super) fn cached(self) -> Cached {
        match self {
            Self::Found => Cached::AsRead,
            Self::File => Cached::Primed,
            Self::Base | Self::Shared | Self::Private => Cached::Base,
        }
    }

    /// The text that was touched is there: none of it on huge pages, or at least half, of the kind that the rung has.
    pub(super) fn claims(self, touched: Bytes) -> Vec<Claim> {
        let huge = |figure| Some(part_of(figure, 50, touched));
        let pages = match self {
            Self::Base => Some(exactly("text_huge_bytes", 0)),
            Self::Found => None,
            Self::File => huge("text_file_huge_bytes"),
            Self::Shared => huge("text_shared_huge_bytes"),
            Self::Private => huge("text_private_huge_bytes"),
        };
        let resident = most_of("text_resident_bytes", touched);
        [Some(resident), pages].into_iter().flatten().collect()
    }

    /// Of all text the part `touched`, and so many calls.
    pub(super) fn work(self, program: &Program, touched: Bytes, calls: u64) -> Text {
        Text {
            size: program.size,
            touched,
            calls,
            any: false,
            base: self == Self::Base,
            stays: false,
        }
    }
}
