//! `hugeedit`: `jumbo text align`, which writes a copy. The original edited a flag that only its
//! library reads.

use std::ffi::OsString;

use anyhow::bail;

use super::{Refusals, Words, words};

/// Write a copy of a program, PROGRAM.huge, whose text can be huge: jumbo text align
#[derive(Debug, clap::Parser)]
#[command(
    name = "hugeedit",
    after_help = "See docs/libhugetlbfs.md for each option."
)]
pub(super) struct Args {
    /// Align the text, in a copy
    #[arg(long)]
    text: bool,
    /// The program, which stays as it is
    program: OsString,
}

impl Args {
    pub(super) fn commands(&self) -> anyhow::Result<Vec<Words>> {
        if !self.text {
            bail!("nothing is to be done\nhint: --text");
        }
        let mut copy = self.program.clone();
        copy.push(".huge");
        let mut command = words(["text", "align", "--output"]);
        command.extend([copy, self.program.clone()]);
        Ok(vec![command])
    }
}

/// The options without a counterpart, with the reasons.
pub(super) const REFUSED: Refusals = &[
    (
        "data",
        "no file can have it\nhint: `hugectl --data PROGRAM`",
    ),
    (
        "disable",
        "no program was changed\nhint: remove PROGRAM.huge",
    ),
];

#[cfg(test)]
mod tests {
    use super::super::tests::translated;
    use super::*;

    #[test]
    fn text_is_aligned_in_a_copy() {
        let text = translated("hugeedit --text /x/y", REFUSED, Args::commands).unwrap();
        assert_eq!(text, ["text align --output /x/y.huge /x/y"]);
        assert!(translated("hugeedit --data /x/y", REFUSED, Args::commands).is_err());
        assert!(translated("hugeedit /x/y", REFUSED, Args::commands).is_err());
    }
}
