//! The kernel's pool, changed for a measurement and put back however that ends: [`keep`], a process of its own.
//!
//! It takes orders from whoever measures on its standard input, and puts everything back at the end of that, which
//! comes when the one who measures ends, is interrupted, crashes or is killed. It hears no signal but SIGKILL; after
//! that `jumbo pool --undo` puts back, by the record that stands in the journal before the first write.

use std::io::{self, BufRead as _, Write as _};

use jumbo::host_pools::{Shortage, steer};
use jumbo::kernel::Root;
use jumbo::kernel::process::Signals;
use jumbo::knobs::{Group, Journal, Knob, Steering};
use jumbo::units::{Pages, counted};
use serde::{Deserialize, Serialize};

use super::SIZE;
use super::worker::kernel_pool;
use crate::Error;

/// What the journal calls it.
const COMMAND: &str = "jumbo bench pool";

/// What there is to say where it could not be put back.
pub(super) const NOT_BACK: &str =
    "not all of it could be put back; `jumbo pool --undo` tries again";

/// What the kernel's pool shall have beyond what it had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Wanted {
    /// Persistent pages.
    pub(super) persistent: Pages,
    /// Its overcommit.
    pub(super) overcommit: Pages,
}

/// What the keeper says: once when it has the pool, and after each order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    /// The pool is as it was ordered.
    Done,
    /// It is not, or is not to be had at all: why.
    Refused(String),
}

/// Takes the kernel's pool and sets it as each line of the standard input says; puts it back at the end of that.
///
/// # Errors
/// [`Error::Kernel`] where it is not all put back, [`Error::Pipe`], [`Error::File`].
pub(super) fn keep() -> Result<(), Error> {
    // Of the terminal's signals, and of those to the whole group; whoever stops the others ends our input.
    let _ = rustix::process::setsid();
    let _deaf = Signals::take().map_err(Error::Pipe)?;

    let root = Root::host();
    let refused = |why: String| say(&Answer::Refused(why));
    let Some(pool) = kernel_pool(&root)? else {
        return refused(format!("the kernel has no pool of {SIZE} pages"));
    };
    if let Err(error) = Knob::persistent(SIZE, None).writable(&root) {
        return refused(error.to_string());
    }
    let Some(journal) = Journal::of_user(&root) else {
        return refused(
            "there is no folder for a record of what it was: XDG_RUNTIME_DIR".to_owned(),
        );
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
    let undone = steering
        .put_back(&mut ())
        .map_err(|error| Error::Kernel(error.to_string()))?;
    if undone.complete {
        return Ok(());
    }
    Err(Error::Kernel(NOT_BACK.to_owned()))
}

/// Does as it is told until there are no more orders.
fn obey(
    root: &Root,
    steering: &mut Steering<'_>,
    persistent: Pages,
    overcommit: Pages,
) -> Result<(), Error> {
    say(&Answer::Done)?;
    for order in io::stdin().lock().lines() {
        let order = order.map_err(Error::Pipe)?;
        let wanted: Wanted =
            serde_json::from_str(&order).map_err(|error| Error::Pipe(error.into()))?;
        let wanted = Wanted {
            persistent: Pages(persistent.0 + wanted.persistent.0),
            overcommit: Pages(overcommit.0 + wanted.overcommit.0),
        };
        say(&match set(root, steering, wanted) {
            Ok(()) => Answer::Done,
            Err(why) => Answer::Refused(why),
        })?;
    }
    Ok(())
}

fn set(root: &Root, steering: &mut Steering<'_>, wanted: Wanted) -> Result<(), String> {
    let numbers = [
        (Knob::overcommit(SIZE), wanted.overcommit),
        (Knob::persistent(SIZE, None), wanted.persistent),
    ];
    for (knob, to) in numbers {
        let written = steering
            .set(&knob, to, &mut ())
            .map_err(|error| error.to_string())?;
        let after = written.step.after.as_ref().and_then(|after| after.number());
        let after = after.unwrap_or(0);
        if after < to.0 {
            let shortage = Shortage::of(root, &[written.step], false);
            let reasons = shortage.map_or(Vec::new(), |short| short.reasons);
            let came = format!("{after} of {} came", counted(to.0, "page"));
            let why: Vec<_> = std::iter::once(came).chain(reasons).collect();
            return Err(why.join("; "));
        }
    }
    Ok(())
}

/// Tells the one who asked.
pub(super) fn say(what: &impl Serialize) -> Result<(), Error> {
    let line = serde_json::to_string(what).map_err(|error| Error::Pipe(error.into()))?;
    let mut out = io::stdout().lock();
    writeln!(out, "{line}").map_err(Error::Pipe)?;
    out.flush().map_err(Error::Pipe)
}
