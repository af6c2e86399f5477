//! Kernel knobs, changed for a measurement and always restored: [`Keeper`] in the measuring
//! process, [`keep`] in a process of its own. [`KernelKnobs`] are all knobs of a table.
//!
//! The keeper reads requests from its standard input and restores the knobs at the end of input,
//! which comes when the measuring process ends, crashes or is killed. It ignores all signals but
//! SIGKILL; after that `jumbo pool --undo` or `jumbo thp --undo` restores from the journal, which
//! is written before the knobs.

use std::cell::RefCell;
use std::io;
use std::process::Stdio;

use jumbo::units::{PageSize, Pages, counted};
use jumbo_host::host_pools::{Shortage, steer};
use jumbo_host::kernel::process::Signals;
use jumbo_host::kernel::thp::Thp;
use jumbo_host::kernel::{Root, hugetlb};
use jumbo_host::knobs::{Group, Journal, Knob, Steering, Value};

use crate::json_child::{JsonChild, send};
use crate::launch::Launch;
use crate::task::{KnobSet, Task};
use crate::work::Worker;
use crate::{Error, Settings};

const JOURNAL_NAME: &str = "jumbo bench";

pub(crate) const PAGE_2M: PageSize = PageSize::SIZE_2M;

/// Answer of the keeper: the reason of a failure.
type Answer = Result<(), String>;

/// Knobs, and the process that sets them.
pub(crate) struct Keeper {
    kept: KnobSet,
    process: RefCell<JsonChild>,
    /// Values that were set last.
    now: RefCell<Vec<(Knob, Value)>>,
    /// The kernel's pool before the measurement.
    pool: Option<hugetlb::Pool>,
}

/// Kernel state that a sample needs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Needs {
    /// Pages of the kernel's pool beyond those before the measurement.
    pub(crate) persistent: Pages,
    pub(crate) overcommit: Pages,
    pub(crate) knobs: Vec<(Knob, Value)>,
}

/// Knobs of a table: the kernel's pool of 2 MiB pages, and others. `None`: left unchanged.
pub(crate) struct KernelKnobs {
    pub(crate) pool: Option<Keeper>,
    pub(crate) knobs: Option<Keeper>,
}

impl KnobSet {
    fn name(self) -> &'static str {
        match self {
            Self::Pool => "the kernel's pool of 2 MiB pages",
            Self::Shmem => "the kernel's controls of shared memory",
        }
    }

    fn not_back(self) -> String {
        let command = match self {
            Self::Pool => "pool",
            Self::Shmem => "thp",
        };
        format!("cannot restore all knobs; `jumbo {command} --undo` tries again")
    }
}

impl Keeper {
    /// Starts a keeper; [`Error::Kernel`] if the knobs cannot be set.
    pub(crate) fn take(settings: &Settings, kept: KnobSet) -> Result<Self, Error> {
        let worker = Worker::new(Launch::Plain, Task::Keep(kept));
        let mut keeper = Self {
            kept,
            process: worker.start(settings, Stdio::inherit())?.into(),
            now: RefCell::default(),
            pool: None,
        };
        keeper.receive()?;
        // No other process changes it from now on.
        keeper.pool = kernel_pool()?;
        Ok(keeper)
    }

    /// Starts a keeper of the pool, if the pool can grow by so many pages, persistent or surplus.
    pub(crate) fn of_pool(settings: &Settings, pages: Pages) -> Result<Self, Error> {
        let keeper = Self::take(settings, KnobSet::Pool)?;
        // A failure now is better than in the middle of the table.
        keeper.resize(pages, pages)?;
        Ok(keeper)
    }

    /// Sets the knobs and returns the milliseconds that the kernel took.
    fn set(&self, wanted: Vec<(Knob, Value)>) -> Result<(), Error> {
        let mut new = wanted.clone();
        new.retain(|order| !self.now.borrow().contains(order));
        if new.is_empty() {
            return Ok(());
        }
        self.now.replace(wanted);
        self.process.borrow_mut().send(&new)?;
        self.receive()
    }

    /// Sets the pool to so many pages beyond its state before the measurement.
    fn resize(&self, persistent: Pages, overcommit: Pages) -> Result<(), Error> {
        let before = self.pool.as_ref();
        let overcommit = before.map_or(0, |pool| pool.overcommit.0) + overcommit.0;
        let persistent = before.map_or(0, |pool| pool.persistent().0) + persistent.0;
        self.set(vec![
            (Knob::overcommit(PAGE_2M), Pages(overcommit).into()),
            (Knob::persistent(PAGE_2M, None), Pages(persistent).into()),
        ])
    }

    fn receive(&self) -> Result<(), Error> {
        let answer: Answer = self.process.borrow_mut().receive()?;
        answer.map_err(|why| Error::Kernel(self.kept.name(), why))
    }

    /// Restores the knobs. The keeper also does so at the end of its input.
    fn give_back(self) -> Result<(), Error> {
        let ended = self.process.into_inner().wait();
        ended.map_err(|_| Error::Kernel(self.kept.name(), self.kept.not_back()))
    }
}

impl Needs {
    pub(crate) fn persistent(persistent: Pages) -> Self {
        Self {
            persistent,
            ..Self::default()
        }
    }
}

impl KernelKnobs {
    /// Sets the knobs; returns the milliseconds that the pool took.
    pub(crate) fn provide(&self, needs: &Needs) -> Result<(), Error> {
        if let Some(keeper) = &self.knobs {
            keeper.set(needs.knobs.clone())?;
        }
        let pool = self.pool.as_ref();
        pool.map_or(Ok(()), |keeper| {
            keeper.resize(needs.persistent, needs.overcommit)
        })
    }

    pub(crate) fn give_back(self) -> Result<(), Error> {
        let mut keepers = self.pool.into_iter().chain(self.knobs);
        keepers.try_for_each(Keeper::give_back)
    }
}

/// Sets knobs as each line of the standard input says; restores them at its end.
pub(crate) fn keep(kept: KnobSet) -> Result<(), Error> {
    // Signals of the terminal end the measuring process, and so our input.
    let _ = rustix::process::setsid();
    let _deaf = Signals::take()?;
    match serve_knobs(&Root::host(), kept) {
        Ok(put_back) => put_back.map_err(|why| Error::Kernel(kept.name(), why)),
        Err(refused) => send(&Answer::Err(refused.to_string())),
    }
}

/// Locks and serves the knobs. The inner error is a failure to restore, the outer one to begin.
fn serve_knobs(
    root: &Root,
    kept: KnobSet,
) -> Result<Result<(), String>, Box<dyn std::error::Error>> {
    let no_folder = "no folder for the journal: XDG_RUNTIME_DIR";
    let journal = Journal::of_user(root).ok_or(no_folder)?;
    let pool = kernel_pool()?;
    let (group, knobs) = match (kept, &pool) {
        (KnobSet::Pool, None) => Err(format!("the kernel has no pool of {PAGE_2M} pages"))?,
        (KnobSet::Pool, _) => (Group::pool(PAGE_2M), vec![Knob::persistent(PAGE_2M, None)]),
        (KnobSet::Shmem, _) => (
            Group::thp(),
            sizes(root)?.into_iter().map(control).collect(),
        ),
    };
    let first = knobs
        .first()
        .ok_or("the kernel has no such control (before Linux 6.12)")?;
    first.writable(root)?;
    let locked = journal.lock(&group, JOURNAL_NAME)?;
    let mut steering = match pool.filter(|_| kept == KnobSet::Pool) {
        Some(pool) => steer(root, &locked, &pool, JOURNAL_NAME)?,
        None => Steering::of(root, &locked, knobs, JOURNAL_NAME)?,
    };
    // Any failure ends the requests only: the knobs are restored below.
    let _ = serve_requests(root, &mut steering);
    Ok(match steering.put_back() {
        Ok(undone) if undone.complete => Ok(()),
        Ok(_) => Err(kept.not_back()),
        Err(error) => Err(error.to_string()),
    })
}

fn serve_requests(root: &Root, steering: &mut Steering<'_>) -> Result<(), Error> {
    send(&Answer::Ok(()))?;
    for order in io::stdin().lines() {
        let wanted: Vec<(Knob, Value)> = serde_json::from_str(&order?).map_err(io::Error::from)?;
        let mut orders = wanted.into_iter();
        let all: Answer = orders.try_for_each(|(knob, to)| set(root, steering, &knob, to));
        send(&all)?;
    }
    Ok(())
}

fn set(root: &Root, steering: &mut Steering<'_>, knob: &Knob, to: Value) -> Answer {
    let step = steering.set(knob, to.clone());
    let step = step.map_err(|error| error.to_string())?;
    let after = step.after.clone().unwrap_or_else(|| step.before.clone());
    let reached = match (after.number(), to.number()) {
        (Some(after), Some(to)) => after >= to,
        _ => after == to,
    };
    if reached {
        return Ok(());
    }
    let result = match to.number() {
        Some(to) => format!("{after} of {} obtained", counted(to, "page")),
        None => format!("{knob} is {after} instead of {to}"),
    };
    let shortage = Shortage::of(root, &[step], false);
    let reasons = shortage.map_or(Vec::new(), |short| short.reasons);
    let why: Vec<_> = std::iter::once(result).chain(reasons).collect();
    Err(why.join("; "))
}

/// The kernel's pool of [`PAGE_2M`] pages, if it has one.
pub(crate) fn kernel_pool() -> Result<Option<hugetlb::Pool>, Error> {
    let pools = hugetlb::pools(&Root::host())?.unwrap_or_default();
    Ok(pools.into_iter().find(|pool| pool.size == PAGE_2M))
}

/// Folio sizes that have a control for shared memory (Linux 6.12).
pub(crate) fn sizes(root: &Root) -> Result<Vec<PageSize>, Error> {
    let sizes = Thp::read_controls(root)?.map_or_else(Default::default, |thp| thp.sizes);
    let controlled = sizes
        .into_iter()
        .filter(|(_, has)| has.shmem_enabled.is_some());
    Ok(controlled.map(|(size, _)| size).collect())
}

/// Knob of the shared-memory control of one folio size.
pub(crate) fn control(size: PageSize) -> Knob {
    Knob::thp(Some(size), "shmem_enabled")
}
