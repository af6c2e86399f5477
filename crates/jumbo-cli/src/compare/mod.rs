//! `jumbo compare`: the gain of a program on this machine.
//!
//! `jumbo_bench::program` measures. This module has the arguments, and `show` the output.

mod show;

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::builder::PossibleValuesParser;
use jumbo_bench::program::verdict::Agreement;
use jumbo_bench::program::{self, Comparison, Pattern, Program, Server, Way};
use jumbo_bench::{Error, Settings, interrupt};
use jumbo_host::whole_file::{self, Existing};

use crate::bench::{MIN_ROUNDS, bar, hinted};
use crate::page;
use crate::run::unreached;
use crate::signal::end_by;
use crate::value::{interval, positive};
use crate::view::{self, View};
pub(crate) use show::{bytes, percent};

/// Exit code: output or exit status of the program differed with jumbo.
const DIFFERS: u8 = 3;

/// Run a program with and without jumbo, in turn, and say what it gains
///
/// PROGRAM is run as it is and under `jumbo run`, in turn, a few times each: time, memory, and
/// whether output and exit status are the same. It is also compared with itself: these differences
/// are noise, and no smaller difference is claimed. The time of its children counts.
///
/// Its input is empty, or the file that stdin is redirected from, from the beginning each time. Its
/// output is compared and not shown. It must do the same each time: let --prepare restore what it
/// changes.
#[derive(Debug, clap::Args)]
#[command(override_usage = "jumbo compare [OPTIONS] [--] PROGRAM [ARG]...")]
#[command(after_help = "Examples:
  jumbo compare -- python3 script.py
  jumbo compare --modes default,pool --peers jemalloc -- ./program
  jumbo compare --modes '--heap=glibc --text=shared' -- ./program
  jumbo compare --prepare 'rm -rf out' -- make -s
  jumbo compare --html page.html -- ./program
  jumbo compare --for 10s --ready 'redis-cli ping' \\
      --load 'redis-benchmark -q -t set' -- redis-server

Exit status: 0 compared; 3 compared, and its output or exit status was another one with jumbo; \
1 it could not be compared, 2 wrong usage; 128+N when signal N ended it, which leaves nothing behind.")]
pub(crate) struct Args {
    /// Number of runs of each kind [default: as many as take about a minute, 5 to 20]
    #[arg(long, value_name = "N", value_parser = positive::<NonZeroUsize>,
        allow_negative_numbers = true)]
    runs: Option<NonZeroUsize>,

    /// Modes of jumbo: default, glibc, pool, text, background; or its options
    ///
    /// Several are separated by commas; a word that begins with `-` has options of `jumbo run`.
    /// `pool` has a pool as large as the program needs. May be given several times.
    #[arg(long, value_name = "MODE,...", value_parser = modes, default_value = "default",
        allow_hyphen_values = true)]
    modes: Vec<Modes>,

    /// Compare with these too: tunable, jemalloc, tcmalloc, mimalloc
    ///
    /// glibc with `hugetlb=1`, and allocators by LD_PRELOAD, each with its setting for huge pages if it has one. The output
    /// lists those that are not installed.
    #[arg(long, value_name = "PEER,...", value_delimiter = ',', hide_possible_values = true,
        value_parser = PossibleValuesParser::new(Way::peers()))]
    peers: Vec<String>,

    /// Run CMD by `sh -c` before each run, unmeasured
    #[arg(long, value_name = "CMD")]
    prepare: Option<String>,

    /// PROGRAM is a server: measure it for so many seconds, then end it by SIGTERM
    ///
    /// The measure is the time of one run of --load; without --load, the CPU time of the server.
    #[arg(long = "for", value_name = "SECONDS", value_parser = interval)]
    time: Option<Duration>,

    /// The work of the server: CMD is run by `sh -c` again and again for that time
    #[arg(long, value_name = "CMD", requires = "time")]
    load: Option<String>,

    /// Succeeds once the server serves [default: the load does]
    ///
    /// CMD is run by `sh -c` until it succeeds, for a minute at most. Name one where the load takes
    /// long, or hangs while there is no server.
    #[arg(long, value_name = "CMD", requires = "time")]
    ready: Option<String>,

    /// Finds latencies in what --load prints, in milliseconds, by the first group of REGEX
    ///
    /// Each match is one request: p50 and p99 are of all that the load prints, of its last 64 KiB.
    /// Groups named `throughput`, `p50` and `p99`, as in `(?<p99>[0-9.]+)`, are taken as they are.
    /// The figures of pgbench, redis-benchmark, wrk and ab are found without.
    #[arg(long, value_name = "REGEX", requires = "load")]
    latency_regex: Option<Pattern>,

    /// Print JSON
    #[arg(long)]
    json: bool,

    /// Write a page with the figures and a plot of every run; it needs no other file and no network
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// The modes in one word of `--modes`.
#[derive(Clone, Debug)]
struct Modes(Vec<Way>);

fn modes(typed: &str) -> Result<Modes, Error> {
    let ways = match typed.starts_with('-') {
        true => vec![Way::mode(typed)?],
        false => typed.split(',').map(Way::mode).collect::<Result<_, _>>()?,
    };
    Ok(Modes(ways))
}

pub(crate) fn main(args: Args) -> anyhow::Result<ExitCode> {
    if args.runs.is_some_and(|runs| runs.get() < MIN_ROUNDS) {
        view::tell(&format!(
            "fewer than {MIN_ROUNDS} runs: the spread says little"
        ));
    }
    let html = args.html.as_deref().map(page::target).transpose()?;
    let mut ways: Vec<_> = args.modes.into_iter().flat_map(|modes| modes.0).collect();
    let (peers, missing) = Way::peers_of(&args.peers);
    ways.extend(peers);
    let program = Program {
        words: args.command,
        as_set: true,
        prepare: args.prepare,
        input: input(),
        server: args.time.map(|time| Server {
            ready: args.ready,
            load: args.load,
            time: Some(time),
            figures: args.latency_regex,
            ..Server::default()
        }),
        ..Program::default()
    };
    let progress = bar();
    let settings = Settings {
        jumbo: std::env::current_exe().context("cannot find the jumbo executable")?,
        rounds: NonZeroUsize::MIN,
        line: progress.is_hidden().then_some(view::tell),
        progress,
    };
    interrupt::watch();
    let compared = program::compare(&settings, &program, &ways, args.runs);
    settings.progress.finish_and_clear();
    let mut comparison = match compared {
        Err(Error::Interrupted(signal)) => return Ok(end_by(signal)),
        compared => compared.map_err(hinted)?,
    };
    comparison.table.missing = missing;
    let unreached = unreached(&program.words);
    comparison.outside = unreached.as_ref().is_some_and(|(_, outside)| *outside);
    comparison.unreached = unreached.map(|(reason, _)| reason);
    if let Some(path) = html {
        let shown = path.display();
        let mut view = View::default();
        show::body(&mut view, &comparison, program.server.as_ref());
        let page = page::compare(&comparison, &view);
        whole_file::write(&path, page.as_bytes(), 0o644, Existing::Publish)
            .with_context(|| format!("cannot write {shown}"))?;
    }
    view::page(args.json, &comparison, |view, it| {
        show::show(view, it, program.server.as_ref())
    })?;
    Ok(match differs(&comparison) {
        true => ExitCode::from(DIFFERS),
        false => ExitCode::SUCCESS,
    })
}

/// Reports whether output or exit status differed with jumbo. Differences of peers do not count.
fn differs(comparison: &Comparison) -> bool {
    let ours = comparison.ways.iter().filter(|way| way.is_jumbo);
    let mut seen = ours.flat_map(|way| [way.status, way.stdout, way.stderr]);
    seen.any(|agreement| agreement == Some(Agreement::Differs))
}

/// The file that stdin is redirected from; any other stdin can be read only once.
fn input() -> Option<PathBuf> {
    let stdin = PathBuf::from("/proc/self/fd/0");
    std::fs::metadata(&stdin)
        .is_ok_and(|file| file.is_file())
        .then_some(stdin)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_one_mode_despite_commas() {
        let keys = |typed: &str| -> Vec<_> {
            let Modes(ways) = modes(typed).unwrap();
            ways.into_iter().map(|way| way.key).collect()
        };
        assert_eq!(keys("default,pool"), ["default", "pool"]);
        assert_eq!(keys("--pool=1G,each --warm"), ["pool_1G_each_warm"]);
        assert!(modes("default,best").is_err());
    }
}
