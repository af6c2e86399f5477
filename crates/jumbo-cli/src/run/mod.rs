//! `jumbo run`: starts a program with its memory on huge pages.
//!
//! The stages, one file each:
//! - [`options`], [`profile`], [`config`], [`args`]: the request.
//! - [`program`]: the executable, and whether LD_PRELOAD reaches it.
//! - [`library`]: the preload library. [`launch`]: the environment and the start.
//! - [`outside`]: promotion from outside, for programs that LD_PRELOAD does not reach.
//! - [`supervise`]: the parent process of the program. [`sample`]: measurements of its memory.
//! - [`outcome`], [`shortfall`]: the findings. [`report`], [`text`], [`destination`]: their output.
//! - [`dry_run`]: the plan alone.
//! - [`mod@standing`]: the environment for programs that other commands start.
//!
//! Invariant: a program can detect jumbo only by its environment and its memory. jumbo executes it in
//! place; with a report or a shared pool it stays as the parent, and the report says so.

mod args;
mod config;
mod destination;
mod dry_run;
mod launch;
pub(crate) mod library;
mod options;
mod outcome;
mod outside;
mod profile;
mod program;
mod report;
mod sample;
mod segments;
mod shmem;
mod shortfall;
mod standing;
mod supervise;
mod text;

use std::os::unix::ffi::OsStrExt as _;
use std::process::ExitCode;

use anyhow::Context as _;
use jumbo_host::kernel::Root;
use jumbo_host::kernel::process::start;
use jumbo_inside::orders;
use jumbo_sys::{ThpDisable, disable_thp};

pub(crate) use args::Args;
use args::RunSettings;
use options::ThpMode;
pub(crate) use profile::known as profiles;
pub(crate) use program::unreached;
pub(crate) use standing::{StandingOptions, preload, standing};

/// Exit code: wrong usage.
const USAGE: u8 = 2;
/// Exit code: jumbo itself failed.
const FAILED: u8 = 125;
/// Exit code: the program exists and cannot be started.
const NOT_EXECUTABLE: u8 = 126;
/// Exit code: there is no such program.
const NOT_FOUND: u8 = 127;

/// Environment entry that disables jumbo; the preload library reads it too.
const OFF: &str = "JUMBO=off";

fn is_off() -> bool {
    std::env::var_os("JUMBO").is_some_and(|value| orders::is_off(value.as_bytes()))
}

/// Prepares the process as Rust's runtime does before `main`, and records the original state for
/// PROGRAM.
///
/// The runtime also parses /proc/self/maps with scanf(3) to detect stack overflows: 0.1 ms.
pub(crate) fn begin() {
    start::record();
    start::prepare();
}

/// Reason why the program did not run, and the exit code.
#[derive(Debug)]
struct Failure {
    code: u8,
    message: String,
}

impl Failure {
    /// A failure of jumbo itself.
    fn own(message: impl Into<String>) -> Self {
        Self {
            code: FAILED,
            message: message.into(),
        }
    }
}

pub(crate) fn main(args: Args) -> anyhow::Result<ExitCode> {
    Ok(run(args).unwrap_or_else(|failure| {
        if !start::is_stderr_closed() {
            crate::view::tell(&failure.message);
        }
        ExitCode::from(failure.code)
    }))
}

/// Applies `--thp` to this process, of which the program is a child or becomes the image.
fn spare(mode: ThpMode) -> Result<(), Failure> {
    let (how, since) = match mode {
        ThpMode::Inherit => return Ok(()),
        ThpMode::Madvise => (ThpDisable::ExceptAdvised, "6.18"),
        ThpMode::Never => (ThpDisable::Completely, "3.15"),
    };
    disable_thp(how).map_err(|error| {
        Failure::own(format!(
            "cannot keep huge pages from the program: {error}; hint: --thp={} takes Linux {since}",
            if mode == ThpMode::Never {
                "never"
            } else {
                "madvise"
            }
        ))
    })
}

fn run(args: Args) -> Result<ExitCode, Failure> {
    if args.show_config {
        return match config::show(&args, &args.entries()?) {
            Err(error) if !crate::view::is_broken_pipe(&error) => {
                Err(Failure::own(crate::view::in_words(&error)))
            }
            _ => Ok(ExitCode::SUCCESS),
        };
    }
    let settings = RunSettings::new(args)?;
    let root = Root::host();
    let program = program::Program::find(
        &settings.command,
        settings.is_parent() || settings.free_given,
    );
    let program = program.map_err(|failure| settings.explain(failure))?;
    if let Some(mode) = settings.thp {
        spare(mode)?;
    }
    let launch = launch::Launch::prepare(&root, &settings, &program)?;
    if settings.dry_run {
        dry_run::print(&root, &settings, &launch)?;
        return Ok(ExitCode::SUCCESS);
    }
    if settings.print_env {
        dry_run::print_environment(&launch, settings.json)?;
        return Ok(ExitCode::SUCCESS);
    }
    if !settings.is_parent() {
        return Err(launch.exec());
    }
    let destination = settings.report.as_ref().map(|request| &request.destination);
    if let Some(args::Destination::File(file)) = destination {
        destination::check(file).map_err(|error| {
            Failure::own(format!(
                "cannot write a report to {}: {error}; \
                 hint: name a file in a folder that you may write to",
                file.display()
            ))
        })?;
    }
    if !supervise::is_harmless() {
        let why = "a seccomp filter would kill a process that makes the calls of a parent";
        return Err(supervise::in_place(&settings, &launch, why));
    }
    supervise::run(&root, &settings, &launch)
}

/// Makes the system calls of a parent, with a program that does nothing. A seccomp filter that
/// forbids one kills this process.
pub(crate) fn rehearse() -> anyhow::Result<ExitCode> {
    let failed = |failure: Failure| anyhow::anyhow!(failure.message);
    let args = Args::for_rehearsal()?.context("an option of the rehearsal does not exist")?;
    let settings = RunSettings::new(args).map_err(failed)?;
    let root = Root::host();
    let program = program::Program::find(&settings.command, true).map_err(failed)?;
    let launch = launch::Launch::prepare(&root, &settings, &program).map_err(failed)?;
    let code = supervise::run(&root, &settings, &launch).map_err(failed)?;
    // The program may have ended before the first sample.
    sample::rehearse(&root);
    Ok(code)
}
