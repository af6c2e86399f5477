//! The kernel's pool in our hands for as long as a table is measured: [`Host`].
//!
//! Other than [`jumbo::knobs::Steering`] in this process would be, it is put back also when this process is
//! killed: a keeper ([`super::keeper`]) holds it, and does that when it hears nothing more from us.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use super::keeper::{Answer, NOT_BACK, Wanted};
use super::plan::Side;
use super::task::Task;
use super::worker_command;
use crate::Error;

/// The kernel's pool of 2 MiB pages, and the right to set it.
pub(super) struct Host {
    keeper: Child,
    /// `None` once there are no more orders.
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    now: Wanted,
}

impl Host {
    /// Takes it; why it is not to be had is the inner error.
    ///
    /// # Errors
    /// [`Error::Start`], [`Error::Pipe`], [`Error::Answer`].
    pub(super) fn take(jumbo: &Path) -> Result<Result<Self, String>, Error> {
        let mut command = worker_command(jumbo, &Side::new(Task::Keep));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut keeper = command.spawn().map_err(|source| Error::Start {
            command: crate::child::line(&command),
            source,
        })?;
        let broken = || Error::Pipe(std::io::ErrorKind::BrokenPipe.into());
        let mut host = Self {
            orders: Some(keeper.stdin.take().ok_or_else(broken)?),
            answers: BufReader::new(keeper.stdout.take().ok_or_else(broken)?),
            keeper,
            now: Wanted::default(),
        };
        Ok(match host.answer()? {
            Answer::Done => Ok(host),
            Answer::Refused(why) => Err(why),
        })
    }

    /// Sets it; why it cannot be so is the inner error.
    ///
    /// # Errors
    /// [`Error::Pipe`], [`Error::Answer`].
    pub(super) fn provide(&mut self, wanted: Wanted) -> Result<Result<(), String>, Error> {
        if self.now == wanted {
            return Ok(Ok(()));
        }
        let order = serde_json::to_string(&wanted).map_err(|error| Error::Pipe(error.into()))?;
        if let Some(orders) = &mut self.orders {
            writeln!(orders, "{order}").map_err(Error::Pipe)?;
        }
        self.now = wanted;
        Ok(match self.answer()? {
            Answer::Done => Ok(()),
            Answer::Refused(why) => Err(why),
        })
    }

    /// Has it put back.
    ///
    /// # Errors
    /// [`Error::Kernel`] where it is not.
    pub(super) fn give_back(mut self) -> Result<(), Error> {
        drop(self.orders.take());
        match self.keeper.wait() {
            Ok(status) if status.success() => Ok(()),
            _ => Err(Error::Kernel(NOT_BACK.to_owned())),
        }
    }

    fn answer(&mut self) -> Result<Answer, Error> {
        let mut line = String::new();
        self.answers.read_line(&mut line).map_err(Error::Pipe)?;
        serde_json::from_str(&line).map_err(|source| Error::Answer {
            command: "jumbo bench worker pool".to_owned(),
            source,
        })
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // It puts back what it has, and says itself where that fails.
        drop(self.orders.take());
        let _ = self.keeper.wait();
    }
}
