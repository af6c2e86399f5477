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
const MAX_COMMAND_TIME: Duration = Duration::from_secs(30 * 60);
const PROBE_INTERVAL: Duration = Duration::from_millis(50);

/// A program that does not end by itself, and its load. `sh -c` runs the commands, without jumbo.
#[derive(Clone, Debug, Default)]
pub struct Server {
    /// Command that succeeds once the server is ready, within a minute. `None`: the load.
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
    /// `sample` is not called while the load is timed: the load runs once more for it.
    pub(super) fn serve(
        &self,
        settings: &Settings,
        server: &ProgramRun,
        folder: Option<&Path>,
        sample: &mut dyn FnMut() -> Duration,
    ) -> Result<(Option<f64>, Option<Served>), Error> {
        self.wait_until_ready(settings, server, READY_TIMEOUT, &mut |command, timeout| {
            run(command, server, (folder, timeout), sample).map(drop)
        })?;
        if let Some(setup) = &self.setup {
            run(setup, server, (folder, MAX_COMMAND_TIME), sample)?;
        }
        let (elapsed_ms, served) = match &self.load {
            None => {
                server.wait(self.time, sample)?;
                (None, None)
            }
            Some(load) => {
                let (elapsed_ms, served) = self.loaded(load, server, folder)?;
                run(load, server, (folder, MAX_COMMAND_TIME), sample)?;
                (Some(elapsed_ms), served)
            }
        };
        server.stop()?;
        Ok((elapsed_ms, served))
    }

    /// Runs the load: returns its milliseconds, and the figures that it printed.
    fn loaded(
        &self,
        load: &str,
        server: &ProgramRun,
        folder: Option<&Path>,
    ) -> Result<(f64, Option<Served>), Error> {
        let (clock, mut times, mut last_line, mut served) = (Instant::now(), 0, None, Vec::new());
        while times == 0 || self.time.is_some_and(|time| clock.elapsed() < time) {
            let ended = run(load, server, (folder, MAX_COMMAND_TIME), &mut || {
                SERVER_CHECK_INTERVAL
            })?;
            times += 1;
            let out = ended.output[0].as_ref();
            last_line = out.map(|last_line| last_line.last.clone());
            served.extend(out.map(|last_line| Served::read(&last_line.end, self.figures.as_ref())));
        }
        let mut elapsed_ms = ms(clock.elapsed()) / f64::from(times);
        if self.says {
            let last_line = last_line.unwrap_or_default();
            let number = last_line.parse();
            elapsed_ms = number.map_err(|_| Error::NoFigure(load.to_owned(), last_line))?;
        }
        Ok((elapsed_ms, Served::median(&served)))
    }

    /// Repeats the probe, or else the load, until it succeeds, for at most `ready_timeout`.
    fn wait_until_ready(
        &self,
        settings: &Settings,
        server: &ProgramRun,
        ready_timeout: Duration,
        probe: &mut dyn FnMut(&str, Duration) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let Some(command) = self.ready.as_ref().or(self.load.as_ref()) else {
            return Ok(());
        };
        let (root, clock) = (Root::host(), Instant::now());
        let is_listening = || listens(&root, server.pid());
        let is_over = || server.is_gone() || clock.elapsed() >= ready_timeout;
        while !is_listening() && !is_over() && clock.elapsed() < LISTEN_TIMEOUT {
            server.wait(Some(PROBE_INTERVAL / 5), &mut || PROBE_INTERVAL)?;
        }
        let (mut early_timeout, mut is_noticed, message) =
            (EARLY_PROBE_TIMEOUT, false, settings.progress.message());
        loop {
            let left = ready_timeout.saturating_sub(clock.elapsed());
            let timeout = match is_listening() {
                true => left,
                false => left.min(early_timeout),
            };
            let last = match probe(command, timeout) {
                Ok(()) => break,
                Err(Error::Failed(_, _, last)) => last,
                Err(error @ Error::Endless(..)) if server.is_gone() => return Err(error),
                Err(Error::Endless(_, seconds)) => {
                    early_timeout *= 2;
                    format!("it did not end within {seconds} s")
                }
                Err(error) => return Err(error),
            };
            if is_over() {
                let waited = clock.elapsed().as_secs();
                return Err(Error::NotReady(waited, command.clone(), last));
            }
            if !is_noticed && clock.elapsed() >= NOTICE_DELAY {
                settings.show_progress(format!(
                    "waiting until `{command}` succeeds, for at most {} s: {last}",
                    ready_timeout.as_secs()
                ));
                is_noticed = true;
            }
            std::thread::sleep(PROBE_INTERVAL);
        }
        if is_noticed {
            settings.progress.set_message(message);
        }
        Ok(())
    }
}

/// Runs a command to its end, for at most `timeout`, and only while the server exists.
fn run(
    command: &str,
    server: &ProgramRun,
    (folder, timeout): (Option<&Path>, Duration),
    sample: &mut dyn FnMut() -> Duration,
) -> Result<RunResult, Error> {
    let (mut shell, clock) = (shell(command, folder), Instant::now());
    shell.stdin(Stdio::null());
    let running = ProgramRun::start(&Root::host(), shell)?;
    while !running.wait(Some(SERVER_CHECK_INTERVAL), sample)? {
        let passed = clock.elapsed();
        if server.is_gone() || passed > timeout {
            return Err(Error::Endless(command.to_owned(), passed.as_secs()));
        }
    }
    running.succeed(sample)
}

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
    fn a_hanging_command_is_given_up_after_the_server_ended() {
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
    fn a_hanging_probe_is_given_up_and_named() {
        let mut server = shell("exec sleep 1000", None);
        server.stdin(Stdio::null());
        let server = ProgramRun::start(&Root::host(), server).unwrap();
        let serves = Server {
            load: Some("hangs".to_owned()),
            ..Server::default()
        };
        let settings = Settings::for_tests();
        let mut limits = Vec::new();
        let mut hang = |command: &str, timeout: Duration| {
            limits.push(timeout);
            std::thread::sleep(Duration::from_millis(100));
            Err(Error::Endless(command.to_owned(), timeout.as_secs()))
        };
        let ready_timeout = Duration::from_secs(2);
        let error = serves
            .wait_until_ready(&settings, &server, ready_timeout, &mut hang)
            .unwrap_err();
        let error = error.to_string();
        assert!(
            error.contains("not ready") && error.contains("`hangs`"),
            "{error}"
        );
        assert!(limits.len() > 1 && limits.iter().all(|limit| *limit <= ready_timeout));
        limits.clear();
        let mut hangs_once = |_: &str, timeout: Duration| {
            limits.push(timeout);
            match limits.len() {
                1 => Err(Error::Endless(String::new(), timeout.as_secs())),
                _ => Ok(()),
            }
        };
        let ready = serves.wait_until_ready(&settings, &server, READY_TIMEOUT, &mut hangs_once);
        assert!(ready.is_ok());
        assert_eq!(limits, [EARLY_PROBE_TIMEOUT, EARLY_PROBE_TIMEOUT * 2]);
    }
}
