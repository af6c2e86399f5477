//! `Rung`: on which kind of page the text of a process is, and whose.

use jumbo::units::Bytes;

use super::program::{Cached, Program};
use super::worker::Text;
use crate::claim::{Claim, exactly, most_of, part_of};
use crate::launch::Launch;

/// Nothing but text differs.
const TEXT_ALONE: &str = "--heap=off --maps=off --free=off --reaper=off --data=off";

/// The kind of page that text is on, and whose it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rung {
    pub(super) name: &'static str,
    /// The end of the names of rows on it. The rung that costs nothing has the plain names.
    pub(super) suffix: &'static str,
    /// The mode of `jumbo run --text`; empty: plain.
    mode: &'static str,
    /// How the page cache has the program before it starts. Images are made of text that is not huge yet.
    pub(super) cached: Cached,
    /// The figure that counts its huge pages.
    huge: &'static str,
}

impl Rung {
    /// None of it is huge.
    pub(super) const BASE: Self = Self::new(["4 KiB pages", "", "", ""], Cached::Base);
    /// As a plain program has it.
    pub(super) const FOUND: Self = Self::new(["as found", "", "", ""], Cached::AsRead);
    pub(super) const FILE: Self = Self::new(
        ["file, primed", "", "file", "text_file_huge_bytes"],
        Cached::Primed,
    );
    pub(super) const SHARED: Self = Self::new(
        [
            "shared image",
            "_shared",
            "shared",
            "text_shared_huge_bytes",
        ],
        Cached::Base,
    );
    pub(super) const HUGE: [Self; 2] = [Self::FILE, Self::SHARED];

    const fn new([name, suffix, mode, huge]: [&'static str; 4], cached: Cached) -> Self {
        Self {
            name,
            suffix,
            mode,
            cached,
            huge,
        }
    }

    pub(super) fn launch(self) -> Launch {
        match self.mode {
            "" => Launch::Plain,
            mode => Launch::Jumbo(format!("--text={mode} {TEXT_ALONE}")),
        }
    }

    /// The text that was touched is there: none of it on huge pages, or at least half, of the kind
    /// that the rung has.
    pub(super) fn claims(self, touched: Bytes) -> Vec<Claim> {
        let mut claims = vec![most_of("text_resident_bytes", touched)];
        if self == Self::BASE {
            claims.push(exactly("text_huge_bytes", 0));
        }
        if !self.huge.is_empty() {
            claims.push(part_of(self.huge, 50, touched));
        }
        claims
    }

    /// Of all text the part `touched`, and so many calls.
    pub(super) fn work(self, program: &Program, touched: Bytes, calls: u64) -> Text {
        Text {
            size: program.size,
            touched,
            calls,
            any: false,
            base: self == Self::BASE,
            stays: false,
        }
    }
}
