//! The kernel's pool, changed for a measurement and put back however that ends: [`Host`] here, [`keep`] in a process of
//! its own.
//!
//! The keeper takes orders from the process that measures on its standard input, and puts everything back at the end of
//! that, which comes when that process ends, is interrupted, crashes or is killed. It hears no signal but SIGKILL; after
//! that `jumbo pool --undo` puts back, by the record that stands in the journal before the first write.

use std::io;
use std::process::Stdio;

use jumbo::host_pools::{Shortage, steer};
use jumbo::kernel::Root;
use jumbo::kernel::process::Signals;
use jumbo::knobs::{Group, Journal, Knob, Steering};
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
    /// Takes it; why it is not to be had is the inner error.
    pub(super) fn take(settings: &Settings) -> Result<Result<Self, String>, Error> {
        let command = child::worker(&Launch::Plain, settings, &Task::Keep);
        let mut keeper = Talk::start(command, Stdio::inherit())?;
        let now = Wanted::default();
        Ok(keeper.hear::<Answer>()?.map(|()| Self { keeper, now }))
    }

    /// Sets it; why it cannot be so is the inner error.
    pub(super) fn provide(&mut self, wanted: Wanted) -> Result<Answer, Error> {
        if self.now == wanted {
            return Ok(Ok(()));
        }
        self.now = wanted;
        self.keeper.say(&wanted)?;
        self.keeper.hear()
    }

    /// Has it put back.
    pub(super) fn give_back(mut self) -> Result<(), Error> {
        let ended = self.keeper.end();
        ended.map_err(|_| Error::Kernel(NOT_BACK.to_owned()))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // The keeper puts back what it has, and says itself where that fails.
        let _ = self.keeper.end();
    }
}

/// Takes the kernel's pool and sets it as each line of the standard input says; puts it back at the end of that.
pub(crate) fn keep() -> Result<(), Error> {
    // The signals of the terminal, and those to the whole group, end the process that measures, and so our input.
    let _ = rustix::process::setsid();
    let _deaf = Signals::take().map_err(Error::Pipe)?;

    let root = Root::host();
    let refused = |why: String| say(&Answer::Err(why));
    let Some(pool) = kernel_pool(&root)? else {
        return refused(format!("the kernel has no pool of {SIZE} pages"));
    };
    if let Err(error) = Knob::persistent(SIZE, None).writable(&root) {
        return refused(error.to_string());
    }
    let Some(journal) = Journal::of_user(&root) else {
        let why = "there is no folder for a record of what it was: XDG_RUNTIME_DIR";
        return refused(why.to_owned());
    };
    let locked = match journal.lock(&Group::pool(SIZE), COMMAND) {
        Ok(locked) => locked,
        Err(error) => return refused(error.to_string()),
    };
    let mut steering = match steer(&root, &locked, &pool, COMMAND, false) {
        Ok(steering) => steering,
        Err(error) => return refused(error.to_string()),
    };
    // Whatever goes wrong from here on ends the orders, and nothing but that.
    let _ = obey(&root, &mut steering, pool.persistent(), pool.overcommit);
    match steering.put_back(&mut ()) {
        Ok(undone) if undone.complete => Ok(()),
        Ok(_) => Err(Error::Kernel(NOT_BACK.to_owned())),
        Err(error) => Err(Error::Kernel(error.to_string())),
    }
}

/// Does as it is told until there are no more orders.
fn obey(
    root: &Root,
    steering: &mut Steering<'_>,
    persistent: Pages,
    overcommit: Pages,
) -> Result<(), Error> {
    say(&Answer::Ok(()))?;
    for order in io::stdin().lines() {
        let order = order.map_err(Error::Pipe)?;
        let wanted: Wanted =
            serde_json::from_str(&order).map_err(|error| Error::Pipe(error.into()))?;
        let overcommit = Pages(overcommit.0 + wanted.overcommit.0);
        let persistent = Pages(persistent.0 + wanted.persistent.0);
        let done = set(root, steering, &Knob::overcommit(SIZE), overcommit)
            .and_then(|()| set(root, steering, &Knob::persistent(SIZE, None), persistent));
        say(&done)?;
    }
    Ok(())
}

fn set(root: &Root, steering: &mut Steering<'_>, knob: &Knob, to: Pages) -> Answer {
    let written = steering.set(knob, to, &mut ());
    let written = written.map_err(|error| error.to_string())?;
    let after = written.step.after.as_ref().and_then(|after| after.number());
    let after = after.unwrap_or(0);
    if after >= to.0 {
        return Ok(());
    }
    let shortage = Shortage::of(root, &[written.step], false);
    let reasons = shortage.map_or(Vec::new(), |short| short.reasons);
    let came = format!("{after} of {} came", counted(to.0, "page"));
    let why: Vec<_> = std::iter::once(came).chain(reasons).collect();
    Err(why.join("; "))
}
