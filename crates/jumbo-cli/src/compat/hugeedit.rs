//! `hugeedit`: `jumbo text align`, which writes a copy. The original edited a flag that only its
//! library reads.

use std::ffi::OsString;

use anyhow::bail;

use super::{Refusals, Words, refuse, words};

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
    /// Refused
    #[arg(long)]
    data: bool,
    /// Refused
    #[arg(long)]
    disable: bool,
    /// The program, which stays as it is
    program: OsString,
}

impl Args {
    pub(super) fn commands(&self) -> anyhow::Result<Vec<Words>> {
        let refusals: Refusals<'_> = &[
            (
                self.data,
                "--data",
                "no file can have it\nhint: `hugectl --data PROGRAM`",
            ),
            (
                self.disable,
                "--disable",
                "no program was changed\nhint: remove PROGRAM.huge",
            ),
        ];
        refuse(refusals)?;
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

#[cfg(test)]
mod tests {
    use super::super::tests::translated;
    use super::*;

    #[test]
    fn text_is_aligned_in_a_copy() {
        let text = translated("hugeedit --text /x/y", Args::commands).unwrap();
        assert_eq!(text, ["text align --output /x/y.huge /x/y"]);
        assert!(translated("hugeedit --data /x/y", Args::commands).is_err());
        assert!(translated("hugeedit /x/y", Args::commands).is_err());
    }
}
