//! A fresh process for each sample: [`Worker`] says how it is started, and which [`Task`] it does.
//!
//! A worker is the `jumbo` executable itself: an ordinary, dynamically linked program whose only
//! allocator is the `malloc` that it finds at run time. A process that has freed memory is not the
//! process that allocated it: its allocator keeps some, its address space is laid out differently.
//! So no two samples come from one process.

use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use jumbo_host::kernel::Root;
use jumbo_host::status::Covered;

use crate::claim::{self, Claim};
use crate::figures::Figures;
use crate::launch::Launch;
use crate::talk::Talk;
use crate::task::Task;
use crate::{Error, Settings};

/// A worker that is to be started.
pub(crate) struct Worker {
    launch: Launch,
    /// A copy of the `jumbo` executable; `None`: itself.
    program: Option<PathBuf>,
    task: Task,
}

impl Worker {
    /// A worker that is started so, and does that.
    pub(crate) fn new(launch: Launch, task: Task) -> Self {
        let program = None;
        Self {
            launch,
            program,
            task,
        }
    }

    /// The same in a copy of the `jumbo` executable.
    pub(crate) fn of(self, program: PathBuf) -> Self {
        let program = Some(program);
        Self { program, ..self }
    }

    /// Starts it, with its standard error as it is told.
    pub(crate) fn start(&self, settings: &Settings, stderr: Stdio) -> Result<Talk, Error> {
        let program = self.program.as_ref().unwrap_or(&settings.jumbo);
        let mut command = self.launch.command(&settings.jumbo, program.as_os_str());
        let task = serde_json::to_string(&self.task).map_err(io::Error::from)?;
        command.args(["bench", "worker", &task]);
        Talk::start(command, stderr)
    }

    /// Starts it, and hears its figures, for which the claims must hold. It stays where its task
    /// says so.
    pub(crate) fn begin(
        &self,
        settings: &Settings,
        claims: &[Claim],
    ) -> Result<(Talk, Figures), Error> {
        let mut talk = self.start(settings, Stdio::piped())?;
        let figures = talk.hear()?;
        claim::check(claims, &self.launch, &figures)?;
        Ok((talk, figures))
    }

    /// A sample: its figures, once it has ended.
    pub(crate) fn sample(&self, settings: &Settings, claims: &[Claim]) -> Result<Figures, Error> {
        let (mut talk, figures) = self.begin(settings, claims)?;
        talk.end()?;
        Ok(figures)
    }
}

/// The longest that the preload library may take for what it does beside the program.
const PATIENCE: Duration = Duration::from_secs(5);

/// The first thing that `see` finds in what the preload library shows of this process; `None` where
/// there is none in time, or no such library.
pub(crate) fn shown<T>(
    root: &Root,
    see: impl Fn(Covered) -> Option<T>,
) -> Result<Option<T>, Error> {
    let clock = Instant::now();
    while let Some(covered) = Covered::read(root, std::process::id())?
        && clock.elapsed() < PATIENCE
    {
        if let Some(seen) = see(covered) {
            return Ok(Some(seen));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(None)
}

/// Does `work` on the first of `parts`, while a thread of its own does it on each other.
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

/// The time of one of many, in nanoseconds, when so many threads do it again and again, for a span,
/// and so many between two looks at the clock.
pub(crate) fn by_threads(
    threads: usize,
    (span, batch): (Duration, u64),
    once: impl Fn() -> Result<(), Error> + Sync,
) -> Result<f64, Error> {
    // The first ones fill caches, and find the code.
    for _ in 0..batch {
        once()?;
    }
    let done = AtomicU64::new(0);
    let clock = Instant::now();
    on_threads(0..threads, |_| {
        while clock.elapsed() < span {
            for _ in 0..batch {
                once()?;
            }
            done.fetch_add(batch, Ordering::Relaxed);
        }
        Ok(())
    })?;
    let took = clock.elapsed().as_secs_f64() * 1e9;
    Ok(took / done.into_inner().max(1) as f64)
}
