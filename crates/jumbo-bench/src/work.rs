//! A fresh process for each sample: [`Worker`], with its launch and its [`Task`].
//!
//! A worker is the `jumbo` executable, a dynamically linked program that uses the `malloc` it finds
//! at run time. No two samples come from one process: after a `free` the allocator keeps memory,
//! and the address space has changed.

use std::ffi::OsStr;
use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use jumbo_host::kernel::Root;
use jumbo_host::status::Covered;

use crate::claim::{self, Claim};
use crate::figures::{Figures, ms};
use crate::json_child::JsonChild;
use crate::launch::Launch;
use crate::task::Task;
use crate::{Error, Settings};

pub(crate) struct Worker {
    launch: Launch,
    /// A copy of the `jumbo` executable; `None`: `jumbo` itself.
    program: Option<PathBuf>,
    task: Task,
}

impl Worker {
    pub(crate) fn new(launch: Launch, task: Task) -> Self {
        let program = None;
        Self {
            launch,
            program,
            task,
        }
    }

    /// Replaces the executable by a copy.
    pub(crate) fn of(self, program: PathBuf) -> Self {
        let program = Some(program);
        Self { program, ..self }
    }

    pub(crate) fn start(&self, settings: &Settings, stderr: Stdio) -> Result<JsonChild, Error> {
        let program = self.program.as_ref().unwrap_or(&settings.jumbo);
        let mut command = self.launch.command(&settings.jumbo, program.as_os_str());
        let task = serde_json::to_string(&self.task).map_err(io::Error::from)?;
        command.args(["bench", "worker", &task]);
        JsonChild::start(command, stderr)
    }

    /// Starts the worker, receives its figures and checks the claims.
    pub(crate) fn begin(
        &self,
        settings: &Settings,
        claims: &[Claim],
    ) -> Result<(JsonChild, Figures), Error> {
        let mut child = self.start(settings, Stdio::piped())?;
        let figures = child.receive()?;
        claim::check(claims, &self.launch, &figures)?;
        Ok((child, figures))
    }

    /// Runs the worker to its end and returns its figures.
    pub(crate) fn sample(&self, settings: &Settings, claims: &[Claim]) -> Result<Figures, Error> {
        let (mut child, figures) = self.begin(settings, claims)?;
        child.wait()?;
        Ok(figures)
    }
}

/// Timeout of the preload library's background work.
const STATUS_TIMEOUT: Duration = Duration::from_secs(5);

/// Polls the status of the preload library in this process until `see` returns a value.
pub(crate) fn wait_for_status<T>(see: impl Fn(Covered) -> Option<T>) -> Result<Option<T>, Error> {
    let clock = Instant::now();
    while let Some(covered) = Covered::read(&Root::host(), std::process::id())?
        && clock.elapsed() < STATUS_TIMEOUT
    {
        if let Some(seen) = see(covered) {
            return Ok(Some(seen));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(None)
}

/// Runs `work` on each of `parts`: on the first in this thread, on each other in a new thread.
pub(crate) fn on_threads<P: Send>(
    mut parts: impl Iterator<Item = P>,
    work: impl Fn(P) -> Result<(), Error> + Sync,
) -> Result<(), Error> {
    let work = &work;
    let first = parts.next();
    std::thread::scope(|scope| {
        let threads: Vec<_> = parts.map(|part| scope.spawn(move || work(part))).collect();
        let done = first.map_or(Ok(()), work);
        let died = || Err(Error::Corrupt("a thread died".to_owned()));
        let ended = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| died()));
        ended.fold(done, Result::and)
    })
}

/// Nanoseconds per call of `once`, repeated for `span`.
pub(crate) fn ns_per_call(
    (span, batch): (Duration, u64),
    once: impl Fn() -> Result<(), Error>,
) -> Result<f64, Error> {
    let mut done = 0u64;
    // The first calls warm the caches.
    for _ in 0..batch {
        once()?;
    }
    let clock = Instant::now();
    while clock.elapsed() < span {
        for _ in 0..batch {
            once()?;
        }
        done += batch;
    }
    let took = clock.elapsed().as_secs_f64() * 1e9;
    Ok(took / done.max(1) as f64)
}

/// Runs `program` to its end and returns its milliseconds.
pub(crate) fn time(launch: &Launch, settings: &Settings, program: &str) -> Result<f64, Error> {
    let command = launch.command(&settings.jumbo, OsStr::new(program));
    let clock = Instant::now();
    JsonChild::start(command, Stdio::piped())?.wait()?;
    Ok(ms(clock.elapsed()))
}
