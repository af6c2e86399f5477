//! A server that is measured by the load that it serves: [`Server`].

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use jumbo::kernel::Root;

use super::running::{Ended, Running};
use crate::Error;
use crate::worker::ms;

/// How long a server may take until it serves.
const PATIENCE: Duration = Duration::from_secs(60);
/// What it serves may hang once it is gone: that is looked at so often.
const GLANCE: Duration = Duration::from_secs(1);
/// How long one run of what fills or loads a server may take: it is not to hang for ever.
const LONGEST: Duration = Duration::from_secs(30 * 60);
/// The time between two questions whether it does.
const PAUSE: Duration = Duration::from_millis(50);

/// What a program serves that does not end by itself. The commands are run by `sh -c`, without jumbo.
#[derive(Clone, Debug, Default)]
pub struct Server {
    /// Succeeds once the server serves; it is run until it does. `None`: the load is.
    pub ready: Option<String>,
    /// Fills the server, before anything is measured.
    pub setup: Option<String>,
    /// What is measured: how long it takes. `None`: the CPU time of the server.
    pub load: Option<String>,
    /// How long the load is run again and again: what counts is the mean. `None`: it is run once.
    pub time: Option<Duration>,
    /// The load says on the last line of its output what counts, in milliseconds.
    pub says: bool,
}

impl Server {
    /// Waits until the server serves, has it serve the load, and asks it to end. How long the load took, in milliseconds;
    /// `None` without a load.
    ///
    /// While the load is timed there is no `look`: the load runs once more, and it is looked at then.
    pub(super) fn serve(
        &self,
        server: &Running,
        folder: Option<&Path>,
        look: &mut dyn FnMut() -> Duration,
    ) -> Result<Option<f64>, Error> {
        // At most so long, and no longer than the server is there.
        let mut run = |command: &str, most: Duration, is_timed: bool| -> Result<Ended, Error> {
            let look: &mut dyn FnMut() -> Duration = if is_timed { &mut || GLANCE } else { look };
            let (mut shell, clock) = (shell(command, folder), Instant::now());
            shell.stdin(Stdio::null());
            let running = Running::start(&Root::host(), shell)?;
            while !running.wait(Some(GLANCE), look)? {
                if server.is_gone() || clock.elapsed() > most {
                    return Err(Error::Endless(
                        command.to_owned(),
                        clock.elapsed().as_secs(),
                    ));
                }
            }
            running.succeed(look)
        };
        if let Some(ready) = self.ready.as_ref().or(self.load.as_ref()) {
            let clock = Instant::now();
            let most = || match self.ready {
                Some(_) => PATIENCE.saturating_sub(clock.elapsed()),
                // A load may take longer than to become ready may.
                None => LONGEST,
            };
            while let Err(error) = run(ready, most(), false) {
                let Error::Failed(command, _, last) = error else {
                    return Err(error);
                };
                if server.is_gone() || clock.elapsed() > PATIENCE {
                    let waited = clock.elapsed().as_secs();
                    return Err(Error::NotReady(waited, command, last));
                }
                std::thread::sleep(PAUSE);
            }
        }
        if let Some(setup) = &self.setup {
            run(setup, LONGEST, false)?;
        }
        let (clock, mut times, mut said) = (Instant::now(), 0, None);
        let took = match (&self.load, self.time) {
            (None, time) => {
                server.wait(time, look)?;
                None
            }
            (Some(load), time) => {
                while times == 0 || time.is_some_and(|time| clock.elapsed() < time) {
                    let ended = run(load, LONGEST, true)?;
                    times += 1;
                    said = ended.said[0].as_ref().map(|said| said.last.clone());
                }
                let took = ms(clock.elapsed()) / f64::from(times);
                run(load, LONGEST, false)?;
                Some(took)
            }
        };
        server.stop()?;
        match (self.says, said) {
            (true, said) => {
                let said = said.unwrap_or_default();
                let number: Result<f64, _> = said.parse();
                let load = self.load.clone().unwrap_or_default();
                let number = number.map_err(|_| Error::NoFigure(load, said))?;
                Ok(Some(number))
            }
            (false, _) => Ok(took),
        }
    }
}

/// `sh -c COMMAND` in that folder.
pub(super) fn shell(command: &str, folder: Option<&Path>) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", command]);
    if let Some(folder) = folder {
        shell.current_dir(folder);
    }
    shell
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_hangs_is_given_up_once_the_server_is_gone() {
        let start = || {
            let mut server = shell("exec sleep 0.2", None);
            server.stdin(Stdio::null());
            Running::start(&Root::host(), server).unwrap()
        };
        let hangs = Some("sleep 1000".to_owned());
        let [ready, load] = [true, false].map(|is_ready| Server {
            ready: hangs.clone().filter(|_| is_ready),
            load: hangs.clone().filter(|_| !is_ready),
            ..Server::default()
        });
        for serves in [ready, load] {
            let server = start();
            let error = serves.serve(&server, None, &mut || PAUSE).unwrap_err();
            assert!(matches!(error, Error::Endless(..)), "{error}");
            assert!(server.is_gone());
        }
    }
}
