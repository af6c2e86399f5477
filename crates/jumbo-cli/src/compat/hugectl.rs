//! `hugectl`: `jumbo run` with the named parts of a program alone.

use std::ffi::OsString;

use anyhow::bail;
use jumbo::units::PageSize;

use super::{Refusals, Words, words};

/// Run a program with parts of its memory on huge pages: jumbo run, by hugectl's options
#[derive(Debug, clap::Parser)]
#[command(
    name = "hugectl",
    after_help = "See docs/libhugetlbfs.md for each option."
)]
pub(super) struct Args {
    /// Program text
    #[arg(long, value_name = "SIZE", require_equals = true)]
    text: Option<Option<PageSize>>,
    /// Data and bss
    #[arg(long, value_name = "SIZE", require_equals = true)]
    data: Option<Option<PageSize>>,
    /// Data and bss
    #[arg(long, value_name = "SIZE", require_equals = true)]
    bss: Option<Option<PageSize>>,
    /// The heap: malloc and large mappings
    #[arg(long, value_name = "SIZE", require_equals = true)]
    heap: Option<Option<PageSize>>,
    /// Shared memory
    #[arg(long)]
    shm: bool,
    /// The heap
    #[arg(long)]
    thp: bool,
    /// Always so: THPs need no reservation
    #[arg(long)]
    no_reserve: bool,
    /// Always so
    #[arg(long)]
    force_preload: bool,
    /// Show what would be done and run nothing
    #[arg(long)]
    dry_run: bool,
    /// Text as one copy for all processes
    #[arg(long)]
    share_text: bool,
    /// 0: no report; 2 and more: a report of all details
    #[arg(long, value_name = "LEVEL", value_parser = clap::value_parser!(u8).range(..100))]
    verbose: Option<u8>,
    /// More
    #[arg(short, action = clap::ArgAction::Count)]
    v: u8,
    /// The program and its arguments
    #[arg(value_name = "PROGRAM", required = true, trailing_var_arg = true)]
    program: Vec<OsString>,
}

impl Args {
    pub(super) fn commands(&self) -> anyhow::Result<Vec<Words>> {
        let sizes = [self.text, self.data, self.bss, self.heap];
        // What one PMD maps, for text, data and the heap.
        if let Some(size) = sizes
            .into_iter()
            .flatten()
            .flatten()
            .find(|size| *size != PageSize::SIZE_2M)
        {
            bail!(
                "pages of {size} are refused: text, data and the heap have pages of 2M\nhint: `jumbo run --pool SIZE:{size}`"
            );
        }
        let heap = self.heap.is_some() || self.thp;
        let text = self.text.is_some() || self.share_text;
        let data = self.data.is_some() || self.bss.is_some();
        if !(heap || text || data || self.shm) {
            bail!(
                "nothing is to be on huge pages\nhint: --heap, --text, --data, --shm, or `jumbo run` for all of it"
            );
        }
        let mode = |given: bool, mode| if given { mode } else { "off" };
        let run = [
            "run".to_owned(),
            format!("--heap={}", mode(heap, "on")),
            format!("--maps={}", mode(heap, "on")),
            format!(
                "--text={}",
                mode(text, if self.share_text { "shared" } else { "auto" })
            ),
            format!("--data={}", mode(data, "on")),
            format!("--shm={}", mode(self.shm, "auto")),
        ];
        let mut run = words(run.iter().map(String::as_str));
        match self.verbose.unwrap_or(1).saturating_add(self.v) {
            0 => run.push("--quiet".into()),
            1 => {}
            _ => run.push("--report=full".into()),
        }
        run.extend(self.dry_run.then(|| "--dry-run".into()));
        run.push("--".into());
        run.extend(self.program.iter().cloned());
        Ok(vec![run])
    }
}

/// The options without a counterpart, with the reasons.
pub(super) const REFUSED: Refusals = &[
    (
        "no-preload",
        "jumbo works by its library in the program\nhint: link with -lhugetlbfs, and start the program by itself",
    ),
    ("library-use-path", LIBRARY),
    ("library-path=PATH", LIBRARY),
];
const LIBRARY: &str =
    "jumbo uses the library of its own version\nhint: JUMBO_PRELOAD names another file";

#[cfg(test)]
mod tests {
    use super::super::tests::translated;
    use super::*;

    fn translate(line: &str) -> Result<Vec<String>, String> {
        translated(line, REFUSED, Args::commands)
    }

    #[test]
    fn parts_are_on_and_the_rest_is_off() {
        let all = "hugectl --heap --bss=2M --dry-run ls --heap=x";
        let expected =
            "run --heap=on --maps=on --text=off --data=on --shm=off --dry-run -- ls --heap=x";
        assert_eq!(translate(all).unwrap(), [expected]);
        let quiet = translate("hugectl --verbose 0 --share-text --shm ls").unwrap();
        let expected =
            "run --heap=off --maps=off --text=shared --data=off --shm=auto --quiet -- ls";
        assert_eq!(quiet, [expected]);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for (line, why) in [
            ("hugectl ls", "nothing is to be"),
            ("hugectl --heap=1G ls", "pages of 1G are refused"),
            ("hugectl --heap --no-preload ls", "--no-preload is refused"),
            (
                "hugectl --heap --library-path /x ls",
                "--library-path is refused",
            ),
            ("hugectl --heap", "required"),
            ("hugectl --heap=3 ls", "not a page size"),
        ] {
            let error = translate(line).unwrap_err();
            assert!(error.contains(why), "{line}: {error}");
        }
    }
}
