//! A child process that hears and says lines of JSON: [`Talk`].
//!
//! A worker asks the kernel to be killed with its parent ([`die_with_parent`]), so an interrupted
//! measurement leaves no gigabytes behind.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};

use rustix::process::{Signal, set_parent_process_death_signal};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Error;
use crate::launch::line;

/// A process that hears and says lines of JSON.
pub(crate) struct Talk {
    pub(crate) child: Child,
    /// The command as a user would type it.
    pub(crate) command: String,
    from: Option<BufReader<ChildStdout>>,
}

impl Talk {
    /// Starts it; the last line on its standard error is in the error where it fails, if that is a
    /// pipe.
    pub(crate) fn start(mut command: Command, stderr: Stdio) -> Result<Self, Error> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let line = line(&command);
        let started = command.stderr(stderr).spawn();
        let mut child = started.map_err(|error| Error::Start(line.clone(), error))?;
        Ok(Self {
            from: child.stdout.take().map(BufReader::new),
            child,
            command: line,
        })
    }

    /// Says something to it.
    pub(crate) fn say(&mut self, what: &impl Serialize) -> Result<(), Error> {
        let text = serde_json::to_string(what).map_err(io::Error::from)?;
        let to = self.child.stdin.as_mut();
        Ok(to.map_or(Ok(()), |to| writeln!(to, "{text}"))?)
    }

    /// The next thing that it says; [`Error::Failed`] where it has ended instead.
    pub(crate) fn hear<T: DeserializeOwned>(&mut self) -> Result<T, Error> {
        let mut text = String::new();
        let read = self.from.as_mut().map(|from| from.read_line(&mut text));
        if read.unwrap_or(Ok(0))? == 0 {
            let status = self.child.wait()?;
            return Err(self.failed(status));
        }
        serde_json::from_str(&text).map_err(|error| Error::Answer(self.command.clone(), error))
    }

    /// Waits for its end, having nothing more to say: its input ends.
    pub(crate) fn end(&mut self) -> Result<(), Error> {
        match self.child.wait()? {
            status if status.success() => Ok(()),
            status => Err(self.failed(status)),
        }
    }

    /// The error that it ended in another way than it was to, with the last that it said.
    pub(crate) fn failed(&mut self, status: ExitStatus) -> Error {
        let mut said = Vec::new();
        if let Some(stderr) = &mut self.child.stderr {
            let _ = stderr.read_to_end(&mut said);
        }
        let said = String::from_utf8_lossy(&said);
        let last = said.lines().last().unwrap_or("no message").to_owned();
        Error::Failed(self.command.clone(), status, last)
    }
}

impl Drop for Talk {
    /// A process whose input ends ends by itself, and says itself what failed.
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// Has the kernel kill this process when its parent is gone.
pub(crate) fn die_with_parent() {
    // Where it is refused the worker still ends by itself, a moment later.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
}

/// Says something to the process that measures.
pub(crate) fn say(what: &impl Serialize) -> Result<(), Error> {
    let line = serde_json::to_string(what).map_err(io::Error::from)?;
    Ok(writeln!(io::stdout(), "{line}")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(program: &str, script: &str) -> Result<Vec<u64>, String> {
        let mut command = Command::new(program);
        command.args(["-c", script]);
        let talk = Talk::start(command, Stdio::piped());
        talk.and_then(|mut talk| talk.hear())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_said_is_parsed_and_failures_say_what_ran_and_why() {
        assert_eq!(answer("sh", "echo '[1, 2]'"), Ok(vec![1, 2]));
        for (script, message) in [
            (
                "echo out of memory >&2; exit 3",
                "exit status: 3: out of memory",
            ),
            ("kill -9 $$", "signal: 9 (SIGKILL): no message"),
            ("echo nonsense", "printed no sample"),
        ] {
            let error = answer("sh", script).unwrap_err();
            assert!(
                error.contains(message) && error.contains("sh -c"),
                "{error}"
            );
        }
        let error = answer("/nonexistent", "").unwrap_err();
        assert!(error.starts_with("cannot start `/nonexistent"), "{error}");
    }
}
