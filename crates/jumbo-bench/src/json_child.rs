//! A child process that receives and sends lines of JSON: [`JsonChild`].
//!
//! The kernel kills a worker with its parent ([`die_with_parent`]), so an interrupted measurement
//! leaves no gigabytes behind.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};

use rustix::process::{Signal, set_parent_process_death_signal};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Error;
use crate::launch::line;

pub(crate) struct JsonChild {
    pub(crate) process: Child,
    /// The command as a user would type it.
    pub(crate) command: String,
    from: Option<BufReader<ChildStdout>>,
}

impl JsonChild {
    /// Starts `command`. Errors contain the last line of its stderr if that is a pipe.
    pub(crate) fn start(mut command: Command, stderr: Stdio) -> Result<Self, Error> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let line = line(&command);
        let started = command.stderr(stderr).spawn();
        let mut process = started.map_err(|error| Error::Start(line.clone(), error))?;
        Ok(Self {
            from: process.stdout.take().map(BufReader::new),
            process,
            command: line,
        })
    }

    pub(crate) fn send(&mut self, what: &impl Serialize) -> Result<(), Error> {
        let text = serde_json::to_string(what).map_err(io::Error::from)?;
        let to = self.process.stdin.as_mut();
        Ok(to.map_or(Ok(()), |to| writeln!(to, "{text}"))?)
    }

    /// Receives the next value; [`Error::Failed`] if the child has ended.
    pub(crate) fn receive<T: DeserializeOwned>(&mut self) -> Result<T, Error> {
        let mut text = String::new();
        let read = self.from.as_mut().map(|from| from.read_line(&mut text));
        if read.unwrap_or(Ok(0))? == 0 {
            let status = self.process.wait()?;
            return Err(self.failed(status));
        }
        serde_json::from_str(&text).map_err(|error| Error::Answer(self.command.clone(), error))
    }

    /// Closes the child's input and waits for its end.
    pub(crate) fn wait(&mut self) -> Result<(), Error> {
        match self.process.wait()? {
            status if status.success() => Ok(()),
            status => Err(self.failed(status)),
        }
    }

    /// The error of a child that failed, with its last line of stderr.
    pub(crate) fn failed(&mut self, status: ExitStatus) -> Error {
        let mut said = Vec::new();
        if let Some(stderr) = &mut self.process.stderr {
            let _ = stderr.read_to_end(&mut said);
        }
        let said = String::from_utf8_lossy(&said);
        let last = said.lines().last().unwrap_or("no message").to_owned();
        Error::Failed(self.command.clone(), status, last)
    }
}

impl Drop for JsonChild {
    /// A child ends when its input ends, and reports its own failures.
    fn drop(&mut self) {
        let _ = self.wait();
    }
}

/// Makes the kernel kill this process when its parent ends.
pub(crate) fn die_with_parent() {
    // If this is refused, the worker still ends at the end of its input.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
}

/// Sends a value to the parent, which measures.
pub(crate) fn send(what: &impl Serialize) -> Result<(), Error> {
    let line = serde_json::to_string(what).map_err(io::Error::from)?;
    Ok(writeln!(io::stdout(), "{line}")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(program: &str, script: &str) -> Result<Vec<u64>, String> {
        let mut command = Command::new(program);
        command.args(["-c", script]);
        let child = JsonChild::start(command, Stdio::piped());
        child
            .and_then(|mut child| child.receive())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn output_is_parsed_and_failures_name_command_and_reason() {
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
