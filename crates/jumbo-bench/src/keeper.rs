//! Knobs of the kernel, changed for a measurement and put back however that ends: [`Keeper`] here, [`keep`] in a process of
//! its own. [`Kernel`] is all of them that a table needs.
//!
//! The keeper takes orders from the process that measures on its standard input, and puts everything back at the end of
//! that, which comes when that process ends, is interrupted, crashes or is killed. It hears no signal but SIGKILL; after
//! that `jumbo pool --undo` or `jumbo thp --undo` puts back, by the record that stands in the journal before the first write.

use std::cell::RefCell;
use std::io;
use std::process::Stdio;

use jumbo::units::{PageSize, Pages, counted};
use jumbo_host::host_pools::{Shortage, steer};
use jumbo_host::kernel::process::Signals;
use jumbo_host::kernel::thp::Thp;
use jumbo_host::kernel::{Root, hugetlb};
use jumbo_host::knobs::{Group, Journal, Knob, Steering, Value};

use crate::figures::ms;
use crate::launch::Launch;
use crate::talk::{Talk, say};
use crate::task::{Kept, Task};
use crate::work::Worker;
use crate::{Error, Settings};

/// Its name in the journal.
const COMMAND: &str = "jumbo bench";

/// The size of the pages of the kernel's pool.
pub(crate) const SIZE: PageSize = PageSize::SIZE_2M;

/// The answer of the keeper, once when it has the knobs and after each order: for how many
/// milliseconds the kernel worked, or why they are not as was ordered, or are not to be had at all.
type Answer = Result<f64, String>;

/// Knobs, and the right to set them.
pub(crate) struct Keeper {
    kept: Kept,
    talk: RefCell<Talk>,
    /// The values that were set.
    now: RefCell<Vec<(Knob, Value)>>,
    /// The kernel's pool before.
    pool: Option<hugetlb::Pool>,
}

/// The needs of a sample, of the kernel.
#[derive(Clone, Debug, Default)]
pub(crate) struct Needs {
    /// Pages of the kernel's pool beyond those that it had.
    pub(crate) persistent: Pages,
    pub(crate) overcommit: Pages,
    /// Other knobs.
    pub(crate) knobs: Vec<(Knob, Value)>,
}

/// The kernel, as far as this user may set it: its pool of 2 MiB pages, larger for a sample than it
/// was, and other knobs. What is `None` is left as it is.
pub(crate) struct Kernel {
    pub(crate) pool: Option<Keeper>,
    pub(crate) knobs: Option<Keeper>,
}

impl Kept {
    fn name(self) -> &'static str {
        match self {
            Self::Pool => "the kernel's pool of 2 MiB pages",
            Self::Shmem => "the kernel's controls of shared memory",
            Self::Hvo => "HVO",
        }
    }

    /// The message where they could not be put back.
    fn not_back(self) -> String {
        let command = match self {
            Self::Pool => "pool",
            Self::Shmem => "thp",
            Self::Hvo => "vmemmap",
        };
        format!("not all of it could be put back; `jumbo {command} --undo` tries again")
    }
}

impl Keeper {
    /// Takes the knobs; [`Error::Kernel`] says why they are not to be had.
    pub(crate) fn take(settings: &Settings, kept: Kept) -> Result<Self, Error> {
        let worker = Worker::new(Launch::Plain, Task::Keep(kept));
        let mut keeper = Self {
            kept,
            talk: worker.start(settings, Stdio::inherit())?.into(),
            now: RefCell::default(),
            pool: None,
        };
        keeper.hear()?;
        // No other process sets it now.
        keeper.pool = kernel_pool(&Root::host())?;
        Ok(keeper)
    }

    /// Takes the pool, if it can have so many pages more, held or on demand.
    pub(crate) fn of_pool(settings: &Settings, pages: Pages) -> Result<Self, Error> {
        let keeper = Self::take(settings, Kept::Pool)?;
        // What cannot be had is better known now than in the middle.
        keeper.resize(pages, pages)?;
        Ok(keeper)
    }

    /// Sets them, which the kernel took so many milliseconds for; [`Error::Kernel`] says why they cannot be so.
    fn set(&self, wanted: Vec<(Knob, Value)>) -> Result<f64, Error> {
        let mut new = wanted.clone();
        new.retain(|order| !self.now.borrow().contains(order));
        if new.is_empty() {
            return Ok(0.0);
        }
        self.now.replace(wanted);
        self.talk.borrow_mut().say(&new)?;
        self.hear()
    }

    /// Sets the pool, to so many pages beyond those that it had.
    fn resize(&self, persistent: Pages, overcommit: Pages) -> Result<f64, Error> {
        let before = self.pool.as_ref();
        let overcommit = before.map_or(0, |pool| pool.overcommit.0) + overcommit.0;
        let persistent = before.map_or(0, |pool| pool.persistent().0) + persistent.0;
        self.set(vec![
            (Knob::overcommit(SIZE), Pages(overcommit).into()),
            (Knob::persistent(SIZE, None), Pages(persistent).into()),
        ])
    }

    fn hear(&self) -> Result<f64, Error> {
        let answer: Answer = self.talk.borrow_mut().hear()?;
        answer.map_err(|why| Error::Kernel(self.kept.name(), why))
    }

    /// Has them put back. Where that is not called, the end of the keeper's input has them put back.
    fn give_back(self) -> Result<(), Error> {
        let ended = self.talk.into_inner().end();
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

impl Kernel {
    /// Sets it; the pool took so many milliseconds. [`Error::Kernel`] says why it cannot be so.
    pub(crate) fn provide(&self, needs: &Needs) -> Result<f64, Error> {
        if let Some(keeper) = &self.knobs {
            keeper.set(needs.knobs.clone())?;
        }
        let pool = self.pool.as_ref();
        pool.map_or(Ok(0.0), |keeper| {
            keeper.resize(needs.persistent, needs.overcommit)
        })
    }

    /// Has it put back.
    pub(crate) fn give_back(self) -> Result<(), Error> {
        let mut keepers = self.pool.into_iter().chain(self.knobs);
        keepers.try_for_each(Keeper::give_back)
    }
}

/// Takes the knobs and sets them as each line of the standard input says; puts them back at the end of that.
pub(crate) fn keep(kept: Kept) -> Result<(), Error> {
    // The signals of the terminal, and those to the whole group, end the process that measures, and so our input.
    let _ = rustix::process::setsid();
    let _deaf = Signals::take()?;
    match serve(&Root::host(), kept) {
        Ok(put_back) => put_back.map_err(|why| Error::Kernel(kept.name(), why)),
        Err(refused) => say(&Answer::Err(refused.to_string())),
    }
}

/// The outcome for the knobs in the end; the outer error is why they are not to be had.
fn serve(root: &Root, kept: Kept) -> Result<Result<(), String>, Box<dyn std::error::Error>> {
    let no_folder = "there is no folder for a record of what it was: XDG_RUNTIME_DIR";
    let journal = Journal::of_user(root).ok_or(no_folder)?;
    let pool = kernel_pool(root)?;
    let (group, knobs) = match (kept, &pool) {
        (Kept::Pool, None) => Err(format!("the kernel has no pool of {SIZE} pages"))?,
        (Kept::Pool, _) => (Group::pool(SIZE), vec![Knob::persistent(SIZE, None)]),
        (Kept::Hvo, _) => (Group::hvo(), vec![Knob::hvo()]),
        (Kept::Shmem, _) => (
            Group::thp(),
            sizes(root)?.into_iter().map(control).collect(),
        ),
    };
    let first = knobs
        .first()
        .ok_or("the kernel has none (before Linux 6.12)")?;
    first.writable(root)?;
    let locked = journal.lock(&group, COMMAND)?;
    let steering = match pool.filter(|_| kept == Kept::Pool) {
        Some(pool) => steer(root, &locked, &pool, COMMAND)?,
        None => Steering::of(root, &locked, knobs, COMMAND)?,
    };
    Ok(until_the_end(root, kept, steering))
}

fn until_the_end(root: &Root, kept: Kept, mut steering: Steering<'_>) -> Result<(), String> {
    // Whatever goes wrong ends the orders, and nothing but that.
    let _ = obey(root, &mut steering);
    match steering.put_back(&mut ()) {
        Ok(undone) if undone.complete => Ok(()),
        Ok(_) => Err(kept.not_back()),
        Err(error) => Err(error.to_string()),
    }
}

/// Does as it is told until there are no more orders.
fn obey(root: &Root, steering: &mut Steering<'_>) -> Result<(), Error> {
    say(&Answer::Ok(0.0))?;
    for order in io::stdin().lines() {
        let wanted: Vec<(Knob, Value)> = serde_json::from_str(&order?).map_err(io::Error::from)?;
        let mut orders = wanted.into_iter();
        let all: Answer = orders.try_fold(0.0, |took, (knob, to)| {
            Ok(took + set(root, steering, &knob, to)?)
        });
        say(&all)?;
    }
    Ok(())
}

fn set(root: &Root, steering: &mut Steering<'_>, knob: &Knob, to: Value) -> Answer {
    let written = steering.set(knob, to.clone(), &mut ());
    let written = written.map_err(|error| error.to_string())?;
    let (step, took) = (written.step, ms(written.elapsed));
    let after = step.after.clone().unwrap_or_else(|| step.before.clone());
    let reached = match (after.number(), to.number()) {
        (Some(after), Some(to)) => after >= to,
        _ => after == to,
    };
    if reached {
        return Ok(took);
    }
    let came = match to.number() {
        Some(to) => format!("{after} of {} came", counted(to, "page")),
        None => format!("{knob} is {after}, and not {to}"),
    };
    let shortage = Shortage::of(root, &[step], false);
    let reasons = shortage.map_or(Vec::new(), |short| short.reasons);
    let why: Vec<_> = std::iter::once(came).chain(reasons).collect();
    Err(why.join("; "))
}

/// The kernel's pool of [`SIZE`], where there is one.
pub(crate) fn kernel_pool(root: &Root) -> Result<Option<hugetlb::Pool>, Error> {
    let pools = hugetlb::pools(root)?.unwrap_or_default();
    Ok(pools.into_iter().find(|pool| pool.size == SIZE))
}

/// The folio sizes that have a control of shared memory (Linux 6.12).
pub(crate) fn sizes(root: &Root) -> Result<Vec<PageSize>, Error> {
    let sizes = Thp::read_controls(root)?.map_or_else(Default::default, |thp| thp.sizes);
    let controlled = sizes
        .into_iter()
        .filter(|(_, has)| has.shmem_enabled.is_some());
    Ok(controlled.map(|(size, _)| size).collect())
}

/// The control of shared memory of one folio size.
pub(crate) fn control(size: PageSize) -> Knob {
    Knob::thp(Some(size), "shmem_enabled")
}
