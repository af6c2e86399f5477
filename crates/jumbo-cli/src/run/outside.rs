//! Promotion from outside, for programs that LD_PRELOAD does not reach.
//!
//! A process beside the program runs `jumbo promote`; [`Beside`] has its constraints. The program
//! starts all the same if that process cannot be started.

use std::ffi::{OsStr, OsString};
use std::io;
use std::time::Duration;

use jumbo::units::Bytes;
use jumbo_host::kernel::process::{Beside, Child, ProgramImage, Signals};
use jumbo_host::policy::{HeapMode, MaxWaste, Orders, Reach};
use jumbo_host::promote::missing_privilege;
use jumbo_inside::{reaper, sandbox};
use jumbo_sys::has_collapse;
use jumbo_sys::proc::children_change_namespace;

use super::args::RunSettings;
use crate::promote::{Promoted, attend};

/// Minimum memory of a program that can gain.
const MIN_MEMORY: Bytes = Bytes(16 << 20);
/// Timeout of the result after the program's end, which the process notices at once.
const RESULT_TIMEOUT: Duration = Duration::from_secs(2);

/// The bound of the promotion from outside, or the reason against it; `None` if it is not the method
/// for the program (`Reach::is_outside`).
pub(super) type Outside = Option<Result<MaxWaste, String>>;

/// Decides whether a program is promoted from outside.
pub(super) fn decide(
    settings: &RunSettings,
    reach: &Reach,
    orders: &Orders<'_>,
    thp: bool,
) -> Outside {
    if !reach.is_outside() {
        return None;
    }
    let none = |why: &str| Some(Err(why.to_owned()));
    match () {
        () if settings.requested.heap == HeapMode::Off => none("--heap=off"),
        () if !settings.requested.maps => none("--maps=off"),
        // The filter may kill this process for a call.
        () if sandbox::inherited() != Some(0) => none("a seccomp filter is in force"),
        () if !thp => none("this kernel has no transparent huge pages"),
        () if jumbo_inside::heap::thp_disabled() => {
            none("THP is switched off for this process and its children (PR_SET_THP_DISABLE)")
        }
        () if !has_collapse() => none("this kernel has no MADV_COLLAPSE (Linux 6.1)"),
        () if let Some(why) = missing_privilege() => Some(Err(format!(
            "{why}; hint: start it as root, or promote it later: sudo jumbo promote --follow PID"
        ))),
        // The first child would be PID 1 there.
        () if children_change_namespace() => none("children are born into another PID namespace"),
        () if !settings.is_parent() && std::process::id() != 1 && !reaper::init_reaps_orphans() => {
            none("init of this PID namespace waits for no orphan; hint: --report, or another init")
        }
        () => Some(Ok(orders.max_waste)),
    }
}

/// Starts the process beside this one, which will exec the program.
pub(super) fn beside_this(outside: &Outside) -> Option<Beside> {
    let Some(Ok(bound)) = outside else {
        return None;
    };
    // On errors the program starts without it; there is no report to give the reason.
    let (pid, bound) = (std::process::id(), *bound);
    let image = image(pid, bound).ok()?;
    Beside::of_this(MIN_MEMORY, |may_execute| match may_execute {
        true => drop(image.exec()),
        false => drop(attend(pid, bound)),
    })
    .ok()
}

pub(super) fn beside_child(
    outside: &Outside,
    child: &Child,
    signals: &Signals,
) -> Option<io::Result<Beside>> {
    let Some(Ok(bound)) = outside else {
        return None;
    };
    let start = |image| Beside::of_child(child.pid(), &image, MIN_MEMORY, signals);
    Some(image(child.pid(), *bound).and_then(start))
}

fn image(pid: u32, bound: MaxWaste) -> io::Result<ProgramImage> {
    let words = format!("promote --follow --from-start --rate 0 --max-waste {bound} {pid}");
    let words: Vec<OsString> = words.split(' ').map(OsString::from).collect();
    let words = words.iter().map(OsString::as_os_str);
    let words = std::iter::once(OsStr::new("jumbo")).chain(words);
    // It needs no environment.
    ProgramImage::new(&std::env::current_exe()?, words, Vec::new())
}

/// Result after the program's end, or the reason why there is none.
pub(super) fn result(
    outside: &Outside,
    beside: Option<io::Result<Beside>>,
) -> Option<Result<Promoted, String>> {
    if let Some(Err(why)) = outside {
        return Some(Err(why.clone()));
    }
    Some(match beside?.map(|beside| beside.finish(RESULT_TIMEOUT)) {
        Err(error) => Err(format!("no process beside the program: {error}")),
        Ok(None) => Err(String::from("the process beside the program was killed")),
        Ok(Some(text)) if text.is_empty() => {
            Err(format!("it held less than {MIN_MEMORY}, or too briefly"))
        }
        Ok(Some(text)) => match serde_json::from_str::<Promoted>(&text) {
            Ok(Promoted {
                method: None,
                reason,
                ..
            }) => {
                let none = || String::from("no block of a huge page was half full");
                Err(reason.unwrap_or_else(none))
            }
            promoted => promoted.map_err(|error| error.to_string()),
        },
    })
}
