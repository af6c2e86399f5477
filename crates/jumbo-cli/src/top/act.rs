//! Background work on one process: its details, and `jumbo promote`.
//!
//! A promotion is a process of its own, whose output is shown: if this process is killed, no thread
//! of the target stays in an injected call.

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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Promote,
    Undo,
}

/// A process that the user selected. Its start time detects a reused PID.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SelectedProcess {
    pub(super) pid: u32,
    pub(super) name: String,
    /// `None` if the process has ended.
    started: Option<u64>,
}

#[derive(Debug)]
pub(super) struct ProcessDetails {
    pub(super) detail: Detail,
    /// The plan of `jumbo promote`; or why it would do nothing.
    pub(super) plan: Result<PromotePlan, String>,
}

pub(super) enum WorkResult {
    Details(u32, Result<Box<ProcessDetails>, String>),
    /// The text of the plan, and whether it can be carried out.
    Plan(Vec<String>, bool),
    Done(Vec<String>),
}

/// The running `jumbo promote`.
#[derive(Clone, Default)]
pub(super) struct Promotion(Arc<Mutex<Option<Child>>>);

/// Timeout for the end of `jumbo promote` after SIGINT. It releases a stopped thread within
/// milliseconds.
const END_TIMEOUT: Duration = Duration::from_secs(2);

impl SelectedProcess {
    pub(super) fn new(pid: u32, name: &str) -> Self {
        Self {
            pid,
            name: name.to_owned(),
            started: task::started(&Root::host(), pid).ok(),
        }
    }

    fn is_alive(&self) -> bool {
        self.started.is_some() && task::started(&Root::host(), self.pid).ok() == self.started
    }
}

/// Reads everything about a process.
pub(super) fn read_details(pid: u32) -> WorkResult {
    let root = Root::host();
    let read = || {
        let mut inspector = Inspector::new(&root)?;
        inspector.mappings = true;
        let mut detail = inspector.inspect(pid)?;
        detail.mappings.retain(|mapping| mapping.bytes > Bytes(0));
        let by_size = |mapping: &MappingDetail| (Reverse(mapping.bytes), mapping.start);
        detail.mappings.sort_by_key(by_size);
        let wish = Selection::of_heap(MaxWaste::DEFAULT);
        let plan =
            Target::open(&root, pid).and_then(|target| PromotePlan::new(&target, &wish, Bytes(0)));
        let plan = plan.map_err(|refusal| match refusal.hint() {
            Some(hint) => format!("{refusal}; hint: {hint}"),
            None => refusal.to_string(),
        });
        Ok(Box::new(ProcessDetails { detail, plan }))
    };
    WorkResult::Details(
        pid,
        read().map_err(|error: jumbo_host::kernel::FileError| error.to_string()),
    )
}

impl Promotion {
    /// Carries out the action, or makes its plan.
    pub(super) fn promote(
        &self,
        action: Action,
        process: &SelectedProcess,
        dry_run: bool,
    ) -> WorkResult {
        if !dry_run && !process.is_alive() {
            return WorkResult::Done(vec![format!("{} {} has ended", process.pid, process.name)]);
        }
        let result = self.run(action, process.pid, dry_run);
        let (lines, is_success) = result
            .unwrap_or_else(|error| (vec![format!("cannot run jumbo promote: {error}")], false));
        match dry_run {
            true => WorkResult::Plan(lines, is_success),
            false => WorkResult::Done(lines),
        }
    }

    fn run(&self, action: Action, pid: u32, dry_run: bool) -> io::Result<(Vec<String>, bool)> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("promote").args(dry_run.then_some("--dry-run"));
        command
            .args((action == Action::Undo).then_some("--undo"))
            .arg(pid.to_string());
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let pipes = (child.stdout.take(), child.stderr.take());
        self.set(Some(child));
        // The output is a few lines and fits into both pipes.
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
            lines.push(format!("ended by signal {signal}; huge memory stays huge"));
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

    /// Sends SIGINT and waits for the end.
    pub(super) fn end(&self) {
        let Some(mut child) = self.set(None) else {
            return;
        };
        if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::INT);
        }
        let started = std::time::Instant::now();
        while started.elapsed() < END_TIMEOUT && matches!(child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
