//! Work for one process, beside the screen: its details, and `jumbo promote`.
//!
//! A promotion is a process of its own, and its text is that of the command: whatever becomes of this one, no thread of the target is
//! left in a call of ours.

use std::cmp::Reverse;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use jumbo::units::Bytes;
use jumbo_host::kernel::{Root, task};
use jumbo_host::promote::{PromotePlan, Selection, Target};
use jumbo_host::status::{Detail, Inspector, MappingDetail};
use jumbo_inside::orders::MaxWaste;
use rustix::process::{Pid, Signal, kill_process};

/// The change that is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Promote,
    Undo,
}

/// A process as it was when the user chose it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chosen {
    pub(super) pid: u32,
    pub(super) name: String,
    /// `None`: it is gone.
    started: Option<u64>,
}

/// One process, closely.
#[derive(Debug)]
pub(super) struct Look {
    pub(super) detail: Detail,
    /// The plan of `jumbo promote`; or why it would do nothing.
    pub(super) plan: Result<PromotePlan, String>,
}

/// The result of a piece of work.
pub(super) enum News {
    Look(u32, Result<Box<Look>, String>),
    /// The plan, and whether it can be carried out.
    Plan(Vec<String>, bool),
    Done(Vec<String>),
}

/// `jumbo promote` under way.
#[derive(Clone, Default)]
pub(super) struct Running(Arc<Mutex<Option<Child>>>);

/// So long may it take to end once it was asked to. A thread that it holds is let go within milliseconds.
const PATIENCE: Duration = Duration::from_secs(2);

impl Chosen {
    pub(super) fn new(pid: u32, name: &str) -> Self {
        Self {
            pid,
            name: name.to_owned(),
            started: task::started(&Root::host(), pid).ok(),
        }
    }

    fn is_there(&self) -> bool {
        self.started.is_some() && task::started(&Root::host(), self.pid).ok() == self.started
    }
}

/// Reads everything about a process.
pub(super) fn look(pid: u32) -> News {
    let root = Root::host();
    let look = || {
        let mut inspector = Inspector::new(&root)?;
        inspector.mappings = true;
        let mut detail = inspector.inspect(pid)?;
        detail.mappings.retain(|mapping| mapping.bytes > Bytes(0));
        let by_size = |mapping: &MappingDetail| (Reverse(mapping.bytes), mapping.start);
        detail.mappings.sort_by_key(by_size);
        let wish = Selection {
            heap: true,
            text: false,
            shm: false,
            max_waste: MaxWaste::USUAL,
        };
        let plan =
            Target::open(&root, pid).and_then(|target| PromotePlan::new(&target, &wish, Bytes(0)));
        let plan = plan.map_err(|refusal| match refusal.hint() {
            Some(hint) => format!("{refusal}; hint: {hint}"),
            None => refusal.to_string(),
        });
        Ok(Box::new(Look { detail, plan }))
    };
    News::Look(
        pid,
        look().map_err(|error: jumbo_host::kernel::FileError| error.to_string()),
    )
}

impl Running {
    /// The plan for a process, changing nothing.
    pub(super) fn plan(&self, what: What, chosen: &Chosen) -> News {
        match self.promote(what, chosen, true) {
            Ok((lines, is_success)) => News::Plan(lines, is_success),
            Err(error) => News::Plan(vec![format!("cannot run jumbo promote: {error}")], false),
        }
    }

    /// Carries it out.
    pub(super) fn carry_out(&self, what: What, chosen: &Chosen) -> News {
        if !chosen.is_there() {
            return News::Done(vec![format!("{} {} has ended", chosen.pid, chosen.name)]);
        }
        News::Done(match self.promote(what, chosen, false) {
            Ok((lines, _)) => lines,
            Err(error) => vec![format!("cannot run jumbo promote: {error}")],
        })
    }

    fn promote(&self, what: What, chosen: &Chosen, dry: bool) -> io::Result<(Vec<String>, bool)> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("promote").args(dry.then_some("--dry-run"));
        command
            .args((what == What::Undo).then_some("--undo"))
            .arg(chosen.pid.to_string());
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let pipes = (child.stdout.take(), child.stderr.take());
        self.set(Some(child));
        // Both are a few lines, and fit into their pipes.
        let mut text = String::new();
        for pipe in [
            pipes.0.map(io::read_to_string),
            pipes.1.map(io::read_to_string),
        ] {
            text += &pipe.transpose()?.unwrap_or_default();
        }
        let child = self.set(None);
        let status = child.map(|mut child| child.wait()).transpose()?;
        let mut lines: Vec<_> = text
            .lines()
            .map(|line| line.trim_start_matches("jumbo: ").to_owned())
            .collect();
        if let Some(signal) = status.and_then(|status| status.signal()) {
            lines.push(format!("ended by signal {signal}; what is huge stays so"));
        }
        Ok((lines, status.is_some_and(|status| status.success())))
    }

    fn set(&self, child: Option<Child>) -> Option<Child> {
        let mut held = self
            .0
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        std::mem::replace(&mut held, child)
    }

    /// Asks it to end, and waits for that.
    pub(super) fn end(&self) {
        let Some(mut child) = self.set(None) else {
            return;
        };
        if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::INT);
        }
        let started = std::time::Instant::now();
        while started.elapsed() < PATIENCE && matches!(child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
