//! Programs that LD_PRELOAD does not reach: a process of jumbo promotes their memory from outside.
//!
//! It is `jumbo promote`, as the user could start it: see [`Beside`] for what it must not disturb. The
//! program starts without it where it is not to be had.

use std::ffi::{OsStr, OsString};
use std::io;
use std::time::Duration;

use jumbo::units::Bytes;
use jumbo_host::kernel::process::{Beside, Child, ProgramImage, Signals};
use jumbo_host::policy::{HeapMode, MaxWaste, Orders, Reach};
use jumbo_inside::sys::has_collapse;
use jumbo_inside::{reaper, sandbox};

use super::args::Settings;
use crate::promote::{Promoted, attend};

/// Of a program with less there is nothing to gain.
const LEAST: Bytes = Bytes(16 << 20);
/// The process sees the end of the program at once, and gives its result then.
const PATIENCE: Duration = Duration::from_secs(2);

/// Whether the program is promoted from outside, with the bound, or why not; `None` where that is not the way.
pub(super) type Outside = Option<Result<MaxWaste, String>>;

/// The decision for a program with this reach.
pub(super) fn decide(
    settings: &Settings,
    reach: &Reach,
    orders: &Orders<'_>,
    thp: bool,
) -> Outside {
    if !reach.is_outside() {
        return None;
    }
    let none = |why: &str| Some(Err(why.to_owned()));
    match () {
        () if settings.asked.heap == HeapMode::Off => none("--heap=off"),
        () if !settings.asked.maps => none("--maps=off"),
        // It might end this process for a call, and no thread of the program could be had make one.
        () if sandbox::inherited() != Some(0) => none("a seccomp filter is in force"),
        () if !thp => none("this kernel has no transparent huge pages"),
        () if jumbo_inside::heap::thp_disabled() => {
            none("THP is switched off for this process and its children (PR_SET_THP_DISABLE)")
        }
        () if !has_collapse() => none("this kernel has no MADV_COLLAPSE (Linux 6.1)"),
        // The first of them would be PID 1 there.
        () if reaper::children_change_namespace() => {
            none("children are born into another PID namespace")
        }
        () if !settings.is_parent() && std::process::id() != 1 && !reaper::init_reaps_orphans() => {
            none("init of this PID namespace waits for no orphan; hint: --report, or another init")
        }
        () => Some(Ok(orders.max_waste)),
    }
}

/// Starts the process beside the program that this one is about to become.
pub(super) fn beside_this(outside: &Outside) -> Option<Beside> {
    let Some(Ok(bound)) = outside else {
        return None;
    };
    // Without it the program starts all the same, and there is no report to say why.
    let (pid, bound) = (std::process::id(), *bound);
    let image = image(pid, bound).ok()?;
    Beside::of_this(LEAST, |may_execute| match may_execute {
        true => drop(image.exec()),
        false => drop(attend(pid, bound)),
    })
    .ok()
}

/// Starts the process beside a child.
pub(super) fn beside_child(
    outside: &Outside,
    child: &Child,
    signals: &Signals,
) -> Option<io::Result<Beside>> {
    let Some(Ok(bound)) = outside else {
        return None;
    };
    let start = |image| Beside::of_child(child.pid(), &image, LEAST, signals);
    Some(image(child.pid(), *bound).and_then(start))
}

fn image(pid: u32, bound: MaxWaste) -> io::Result<ProgramImage> {
    let words = format!("promote --follow --from-start --rate 0 --max-waste {bound} {pid}");
    let words: Vec<OsString> = words.split(' ').map(OsString::from).collect();
    let words = words.iter().map(OsString::as_os_str);
    let words = std::iter::once(OsStr::new("jumbo")).chain(words);
    // Of the environment it needs nothing.
    ProgramImage::new(&std::env::current_exe()?, words, Vec::new())
}

/// The result, once the program has ended; the error: why there is none.
pub(super) fn result(
    outside: &Outside,
    beside: Option<io::Result<Beside>>,
) -> Option<Result<Promoted, String>> {
    if let Some(Err(why)) = outside {
        return Some(Err(why.clone()));
    }
    Some(match beside? {
        Err(error) => Err(format!("no process for it: {error}")),
        Ok(beside) => {
            match beside.finish(PATIENCE) {
                None => Err(String::from("the process that was to do it was ended")),
                Some(text) if text.is_empty() => {
                    Err(format!("it held less than {LEAST}, or too briefly"))
                }
                Some(text) => match serde_json::from_str::<Promoted>(&text) {
                    Ok(Promoted {
                        method: None,
                        reason,
                        ..
                    }) => Err(reason
                        .unwrap_or_else(|| String::from("no block of a huge page was half full"))),
                    promoted => promoted.map_err(|error| error.to_string()),
                },
            }
        }
    })
}
