//! A server, measured by a load: [`Server`].

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use jumbo_host::kernel::Root;

use super::listens::listens;
use super::running::{ProgramRun, RunResult};
use super::served::{Pattern, Served};
use crate::figures::ms;
use crate::{Error, Settings};

/// Maximum time until a server is ready, the last probe included.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// Timeout of a probe that starts before the server listens: such a client may hang. It doubles
/// with each probe.
const EARLY_PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time to wait for a listening socket; after it, a server without one is probed nevertheless.
const LISTEN_TIMEOUT: Duration = Duration::from_millis(500);
/// Time after which the user is told that the measurement waits for the server.
const NOTICE_DELAY: Duration = Duration::from_secs(2);
/// Interval of checks that the server still exists: its clients may hang without it.
const SERVER_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum time of one setup or load.
const MAX_COMMAND_TIME: Duration = Duration::from_secs(30 * 60);
/// Time between two probes.
const PROBE_INTERVAL: Duration = Duration::from_millis(50);

/// A program that does not end by itself, and its load. `sh -c` runs the commands, without jumbo.
#[derive(Clone, Debug, Default)]
pub struct Server {
    /// Command that succeeds once the server is ready; repeated for up to a minute. `None`: the
    /// load.
    pub ready: Option<String>,
    /// Command that fills the server, unmeasured.
    pub setup: Option<String>,
    /// Command whose time is measured. `None`: the CPU time of the server.
    pub load: Option<String>,
    /// Duration for which the load is repeated; the mean counts. `None`: once.
    pub time: Option<Duration>,
    /// The last line of the load's output is the figure, in milliseconds.
    pub says: bool,
    /// Finds figures in the output of the load; not needed for known tools.
    pub figures: Option<Pattern>,
}

impl Server {
    /// Waits until the server is ready, runs the load, and stops the server. Returns the
    /// milliseconds of the load, `None` without a load, and the figures that it printed.
    ///
    /// `look` is not called while the load is timed: the load runs once more for it.
    pub(super) fn serve(
        &self,
        settings: &Settings,
        server: &ProgramRun,
        folder: Option<&Path>,
        look: &mut dyn FnMut() -> Duration,
    ) -> Result<(Option<f64>, Option<Served>), Error> {
        self.wait_until_ready(settings, server, READY_TIMEOUT, &mut |command, most| {
            run(command, server, (folder, most), look).map(drop)
        })?;
        if let Some(setup) = &self.setup {
            run(setup, server, (folder, MAX_COMMAND_TIME), look)?;
        }
        let (took, served) = match &self.load {
            None => {
                server.wait(self.time, look)?;
                (None, None)
            }
            Some(load) => {
                let (took, served) = self.loaded(load, server, folder)?;
                run(load, server, (folder, MAX_COMMAND_TIME), look)?;
                (Some(took), served)
            }
        };
        server.stop()?;
        Ok((took, served))
    }

    /// Runs the load: returns its milliseconds, and the figures that it printed.
    fn loaded(
        &self,
        load: &str,
        server: &ProgramRun,
        folder: Option<&Path>,
    ) -> Result<(f64, Option<Served>), Error> {
        let (clock, mut times, mut said, mut served) = (Instant::now(), 0, None, Vec::new());
        while times == 0 || self.time.is_some_and(|time| clock.elapsed() < time) {
            let ended = run(load, server, (folder, MAX_COMMAND_TIME), &mut || {
                SERVER_CHECK_INTERVAL
            })?;
            times += 1;
            let out = ended.said[0].as_ref();
            said = out.map(|said| said.last.clone());
            served.extend(out.map(|said| Served::read(&said.end, self.figures.as_ref())));
        }
        let mut took = ms(clock.elapsed()) / f64::from(times);
        if self.says {
            let said = said.unwrap_or_default();
            let number = said.parse();
            took = number.map_err(|_| Error::NoFigure(load.to_owned(), said))?;
        }
        Ok((took, Served::median(&served)))
    }

    /// Repeats the probe until it succeeds, for at most `patience`. Without a probe the load
    /// serves.
    fn wait_until_ready(
        &self,
        settings: &Settings,
        server: &ProgramRun,
        patience: Duration,
        probe: &mut dyn FnMut(&str, Duration) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let Some(command) = self.ready.as_ref().or(self.load.as_ref()) else {
            return Ok(());
        };
        let (root, clock) = (Root::host(), Instant::now());
        let is_listening = || listens(&root, server.pid());
        let is_over = || server.is_gone() || clock.elapsed() >= patience;
        while !is_listening() && !is_over() && clock.elapsed() < LISTEN_TIMEOUT {
            server.wait(Some(PROBE_INTERVAL / 5), &mut || PROBE_INTERVAL)?;
        }
        let (mut early, mut is_told, shown) =
            (EARLY_PROBE_TIMEOUT, false, settings.progress.message());
        loop {
            let left = patience.saturating_sub(clock.elapsed());
            let most = match is_listening() {
                true => left,
                false => left.min(early),
            };
            let last = match probe(command, most) {
                Ok(()) => break,
                Err(Error::Failed(_, _, last)) => last,
                Err(error @ Error::Endless(..)) if server.is_gone() => return Err(error),
                Err(Error::Endless(_, seconds)) => {
                    early *= 2;
                    format!("it did not end within {seconds} s")
                }
                Err(error) => return Err(error),
            };
            if is_over() {
                let waited = clock.elapsed().as_secs();
                return Err(Error::NotReady(waited, command.clone(), last));
            }
            if !is_told && clock.elapsed() >= NOTICE_DELAY {
                settings.show_progress(format!(
                    "waiting until `{command}` succeeds, for at most {} s: {last}",
                    patience.as_secs()
                ));
                is_told = true;
            }
            std::thread::sleep(PROBE_INTERVAL);
        }
        if is_told {
            settings.progress.set_message(shown);
        }
        Ok(())
    }
}

/// Runs a command to its end, for at most `most`, and only while the server exists.
fn run(
    command: &str,
    server: &ProgramRun,
    (folder, most): (Option<&Path>, Duration),
    look: &mut dyn FnMut() -> Duration,
) -> Result<RunResult, Error> {
    let (mut shell, clock) = (shell(command, folder), Instant::now());
    shell.stdin(Stdio::null());
    let running = ProgramRun::start(&Root::host(), shell)?;
    while !running.wait(Some(SERVER_CHECK_INTERVAL), look)? {
        let passed = clock.elapsed();
        if server.is_gone() || passed > most {
            return Err(Error::Endless(command.to_owned(), passed.as_secs()));
        }
    }
    running.succeed(look)
}

/// Command `sh -c COMMAND` in that folder.
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
            ProgramRun::start(&Root::host(), server).unwrap()
        };
        let hangs = Some("sleep 1000".to_owned());
        let [ready, load] = [true, false].map(|is_ready| Server {
            ready: hangs.clone().filter(|_| is_ready),
            load: hangs.clone().filter(|_| !is_ready),
            ..Server::default()
        });
        let settings = Settings::for_tests();
        for serves in [ready, load] {
            let server = start();
            let error = serves
                .serve(&settings, &server, None, &mut || PROBE_INTERVAL)
                .unwrap_err();
            assert!(matches!(error, Error::Endless(..)), "{error}");
            assert!(server.is_gone());
        }
    }

    #[test]
    fn a_probe_that_hangs_is_given_up_and_named() {
        let mut server = shell("exec sleep 1000", None);
        server.stdin(Stdio::null());
        let server = ProgramRun::start(&Root::host(), server).unwrap();
        let serves = Server {
            load: Some("hangs".to_owned()),
            ..Server::default()
        };
        let settings = Settings::for_tests();
        let mut limits = Vec::new();
        let mut hang = |command: &str, most: Duration| {
            limits.push(most);
            std::thread::sleep(Duration::from_millis(100));
            Err(Error::Endless(command.to_owned(), most.as_secs()))
        };
        let patience = Duration::from_secs(2);
        let error = serves
            .wait_until_ready(&settings, &server, patience, &mut hang)
            .unwrap_err();
        let error = error.to_string();
        assert!(
            error.contains("not ready") && error.contains("`hangs`"),
            "{error}"
        );
        assert!(limits.len() > 1 && limits.iter().all(|limit| *limit <= patience));
        limits.clear();
        let mut hangs_once = |_: &str, most: Duration| {
            limits.push(most);
            match limits.len() {
                1 => Err(Error::Endless(String::new(), most.as_secs())),
                _ => Ok(()),
            }
        };
        let ready = serves.wait_until_ready(&settings, &server, READY_TIMEOUT, &mut hangs_once);
        assert!(ready.is_ok());
        assert_eq!(limits, [EARLY_PROBE_TIMEOUT, EARLY_PROBE_TIMEOUT * 2]);
    }
}
