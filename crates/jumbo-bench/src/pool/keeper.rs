//! The kernel's pool, changed for a measurement and put back however that ends: [`Host`] here, [`keep`] in a process of
//! its own.
//!
//! The keeper takes orders from the process that measures on its standard input, and puts everything back at the end of
//! that, which comes when that process ends, is interrupted, crashes or is killed. It hears no signal but SIGKILL; after
//! that `jumbo pool --undo` puts back, by the record that stands in the journal before the first write.

use std::io;
use std::process::Stdio;

use jumbo::host_pools::{Shortage, steer};
use jumbo::kernel::process::Signals;
use jumbo::kernel::{Root, hugetlb};
use jumbo::knobs::{Group, Journal, Knob, Steering, Value};
use jumbo::units::{Pages, counted};
use serde::{Deserialize, Serialize};

use super::SIZE;
use super::worker::kernel_pool;
use crate::child::{self, Launch, Talk};
use crate::worker::{Task, say};
use crate::{Error, Settings};

/// What the journal calls it.
const COMMAND: &str = "jumbo bench pool";

/// What there is to say where it could not be put back.
const NOT_BACK: &str = "not all of it could be put back; `jumbo pool --undo` tries again";

/// What the kernel's pool shall have beyond what it had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Wanted {
    /// Persistent pages.
    pub(super) persistent: Pages,
    /// Its overcommit.
    pub(super) overcommit: Pages,
}

/// What the keeper says, once when it has the pool and after each order: nothing, or why the pool is not as it was
/// ordered, or is not to be had at all.
type Answer = Result<(), String>;

/// The kernel's pool of 2 MiB pages, and the right to set it.
pub(super) struct Host {
    keeper: Talk,
    now: Wanted,
}

impl Host {
    /// Takes it, if it can have so many pages more, held or on demand; [`Error::Kernel`] says why not.
    pub(super) fn take(settings: &Settings, pages: Pages) -> Result<Self, Error> {
        let command = child::worker(&Launch::Plain, settings, &Task::Keep);
        let mut keeper = Talk::start(command, Stdio::inherit())?;
        keeper.hear::<Answer>()?.map_err(Error::Kernel)?;
        let now = Wanted::default();
        let mut host = Self { keeper, now };
        // What cannot be had is better known now than in the middle.
        host.provide(Wanted {
            persistent: pages,
            overcommit: pages,
        })?;
        Ok(host)
    }

    /// Sets it; [`Error::Kernel`] says why it cannot be so.
    pub(super) fn provide(&mut self, wanted: Wanted) -> Result<(), Error> {
        if self.now == wanted {
            return Ok(());
        }
        self.now = wanted;
        self.keeper.say(&wanted)?;
        self.keeper.hear::<Answer>()?.map_err(Error::Kernel)
    }

    /// Has it put back. Where that is not called, the end of the keeper's input has it put back.
    pub(super) fn give_back(mut self) -> Result<(), Error> {
        let ended = self.keeper.end();
        ended.map_err(|_| Error::Kernel(NOT_BACK.to_owned()))
    }
}

/// Takes the kernel's pool and sets it as each line of the standard input says; puts it back at the end of that.
pub(crate) fn keep() -> Result<(), Error> {
    // The signals of the terminal, and those to the whole group, end the process that measures, and so our input.
    let _ = rustix::process::setsid();
    let _deaf = Signals::take()?;
    match serve(&Root::host()) {
        Ok(put_back) => put_back.map_err(Error::Kernel),
        Err(refused) => say(&Answer::Err(refused.to_string())),
    }
}

/// What became of the pool in the end; the outer error is why it is not to be had.
fn serve(root: &Root) -> Result<Result<(), String>, Box<dyn std::error::Error>> {
    let pool = kernel_pool(root)?;
    let pool = pool.ok_or_else(|| format!("the kernel has no pool of {SIZE} pages"))?;
    Knob::persistent(SIZE, None).writable(root)?;
    let no_folder = "there is no folder for a record of what it was: XDG_RUNTIME_DIR";
    let journal = Journal::of_user(root).ok_or(no_folder)?;
    let locked = journal.lock(&Group::pool(SIZE), COMMAND)?;
    let mut steering = steer(root, &locked, &pool, COMMAND, false)?;
    // Whatever goes wrong from here on ends the orders, and nothing but that.
    let _ = obey(root, &mut steering, &pool);
    Ok(match steering.put_back(&mut ()) {
        Ok(undone) if undone.complete => Ok(()),
        Ok(_) => Err(NOT_BACK.to_owned()),
        Err(error) => Err(error.to_string()),
    })
}

/// Does as it is told until there are no more orders.
fn obey(root: &Root, steering: &mut Steering<'_>, pool: &hugetlb::Pool) -> Result<(), Error> {
    say(&Answer::Ok(()))?;
    for order in io::stdin().lines() {
        let wanted: Wanted = serde_json::from_str(&order?).map_err(io::Error::from)?;
        let overcommit = Pages(pool.overcommit.0 + wanted.overcommit.0);
        let persistent = Pages(pool.persistent().0 + wanted.persistent.0);
        let done = set(root, steering, &Knob::overcommit(SIZE), overcommit)
            .and_then(|()| set(root, steering, &Knob::persistent(SIZE, None), persistent));
        say(&done)?;
    }
    Ok(())
}

fn set(root: &Root, steering: &mut Steering<'_>, knob: &Knob, to: Pages) -> Answer {
    let written = steering.set(knob, to, &mut ());
    let written = written.map_err(|error| error.to_string())?;
    let after = written.step.after.as_ref();
    let after = after.and_then(Value::number).unwrap_or(0);
    if after >= to.0 {
        return Ok(());
    }
    let shortage = Shortage::of(root, &[written.step], false);
    let reasons = shortage.map_or(Vec::new(), |short| short.reasons);
    let came = format!("{after} of {} came", counted(to.0, "page"));
    let why: Vec<_> = std::iter::once(came).chain(reasons).collect();
    Err(why.join("; "))
}
