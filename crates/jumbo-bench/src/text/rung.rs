//! `Rung`: on which kind of page the text of a process is, and whose.

use jumbo::units::Bytes;

use super::program::{Cached, Program};
use super::worker::Text;
use crate::child::Launch;
use crate::claim::{self, Claim};

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
}

impl Rung {
    pub(super) const HUGE: [Self; 2] = [Self::File, Self::Shared];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Base => "4 KiB pages",
            Self::Found => "as found",
            Self::File => "file, primed",
            Self::Shared => "shared image",
        }
    }

    /// What is added to the names of rows on it. What costs nothing has the plain name.
    pub(super) fn suffix(self) -> &'static str {
        match self {
            Self::Base | Self::Found | Self::File => "",
            Self::Shared => "_shared",
        }
    }

    pub(super) fn launch(self) -> Launch {
        let text = match self {
            Self::Base | Self::Found => return Launch::Plain,
            Self::File => "file",
            Self::Shared => "shared",
        };
        Launch::Jumbo(format!("--text={text} {TEXT_ALONE}"))
    }

    /// What the page cache is to have of the program before it starts. Images are made of text that is not huge yet.
    pub(super) fn cached(self) -> Cached {
        match self {
            Self::Found => Cached::AsRead,
            Self::File => Cached::Primed,
            Self::Base | Self::Shared => Cached::Base,
        }
    }

    pub(super) fn claims(self, touched: Bytes) -> Vec<Claim> {
        let huge = |figure| claim::text_on_huge(figure, touched);
        match self {
            Self::Base => claim::text_on_base(touched),
            Self::Found => claim::text(touched),
            Self::File => huge("text_file_huge_bytes"),
            Self::Shared => huge("text_shared_huge_bytes"),
        }
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
