//! A server that is measured by the load that it serves: [`Server`].

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use jumbo_host::kernel::Root;

use super::listens::listens;
use super::running::{Ended, Running};
use super::served::{Pattern, Served};
use crate::figures::ms;
use crate::{Error, Settings};

/// How long a server may take until it serves, the last question included.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a question may take that was put before the server listened: such a client may hang. The next has twice as long.
const EARLY: Duration = Duration::from_secs(5);
/// How long to wait for a server to listen. One that needs no socket is asked nevertheless.
const LISTENS: Duration = Duration::from_millis(500);
/// The user is told after so long that the measurement waits for the server.
const TOLD: Duration = Duration::from_secs(2);
/// What it serves may hang once it is gone: that is looked at so often.
const GLANCE: Duration = Duration::from_secs(1);
/// How long one run of what fills or loads a server may take: it is not to hang for ever.
const LONGEST: Duration = Duration::from_secs(30 * 60);
/// The time between two questions whether it does.
const PAUSE: Duration = Duration::from_millis(50);

/// A program that does not end by itself, and its load. The commands are run by `sh -c`, without
/// jumbo.
#[derive(Clone, Debug, Default)]
pub struct Server {
    /// Succeeds once the server serves; it is run until it does, for a minute. `None`: the load is.
    pub ready: Option<String>,
    /// Fills the server, before anything is measured.
    pub setup: Option<String>,
    /// The load that is measured: how long it takes. `None`: the CPU time of the server.
    pub load: Option<String>,
    /// How long the load is run again and again: what counts is the mean. `None`: it is run once.
    pub time: Option<Duration>,
    /// The load says on the last line of its output what counts, in milliseconds.
    pub says: bool,
    /// Finds figures in the output of the load; those of some tools are found without.
    pub figures: Option<Pattern>,
}

impl Server {
    /// Waits until the server serves, has it serve the load, and asks it to end. How long the load took, in milliseconds,
    /// `None` without a load; and the figures that it printed.
    ///
    /// While the load is timed there is no `look`: the load runs once more, and it is looked at then.
    pub(super) fn serve(
        &self,
        settings: &Settings,
        server: &Running,
        folder: Option<&Path>,
        look: &mut dyn FnMut() -> Duration,
    ) -> Result<(Option<f64>, Option<Served>), Error> {
        self.prepare(settings, server, folder, look)?;
        let (took, served) = match &self.load {
            None => {
                server.wait(self.time, look)?;
                (None, None)
            }
            Some(load) => {
                let (took, served) = self.loaded(load, server, folder)?;
                run(load, server, (folder, LONGEST), look)?;
                (Some(took), served)
            }
        };
        server.stop()?;
        Ok((took, served))
    }

    /// Waits until the server serves, and fills it.
    fn prepare(
        &self,
        settings: &Settings,
        server: &Running,
        folder: Option<&Path>,
        look: &mut dyn FnMut() -> Duration,
    ) -> Result<(), Error> {
        self.wait_until_ready(settings, server, PATIENCE, &mut |command, most| {
            run(command, server, (folder, most), look).map(drop)
        })?;
        let setup = self.setup.as_ref();
        let filled = setup.map(|setup| run(setup, server, (folder, LONGEST), look));
        filled.transpose().map(drop)
    }

    /// Has the server serve the load: how long it took, in milliseconds, and the figures that it
    /// printed.
    fn loaded(
        &self,
        load: &str,
        server: &Running,
        folder: Option<&Path>,
    ) -> Result<(f64, Option<Served>), Error> {
        let (clock, mut times, mut said, mut served) = (Instant::now(), 0, None, Vec::new());
        while times == 0 || self.time.is_some_and(|time| clock.elapsed() < time) {
            let ended = run(load, server, (folder, LONGEST), &mut || GLANCE)?;
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

    /// Runs the probe until it succeeds, for `patience` in all. The probe is the load where there is no other.
    fn wait_until_ready(
        &self,
        settings: &Settings,
        server: &Running,
        patience: Duration,
        probe: &mut dyn FnMut(&str, Duration) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let Some(command) = self.ready.as_ref().or(self.load.as_ref()) else {
            return Ok(());
        };
        let (root, clock) = (Root::host(), Instant::now());
        let is_listening = || listens(&root, server.pid());
        let is_over = || server.is_gone() || clock.elapsed() >= patience;
        while !is_listening() && !is_over() && clock.elapsed() < LISTENS {
            server.wait(Some(PAUSE / 5), &mut || PAUSE)?;
        }
        let (mut early, mut is_told, shown) = (EARLY, false, settings.progress.message());
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
            if !is_told && clock.elapsed() >= TOLD {
                settings.say(format!(
                    "waiting until `{command}` succeeds, for at most {} s: {last}",
                    patience.as_secs()
                ));
                is_told = true;
            }
            std::thread::sleep(PAUSE);
        }
        if is_told {
            settings.progress.set_message(shown);
        }
        Ok(())
    }
}

/// Runs a command to its end, for `most` at most, and no longer than the server is there.
fn run(
    command: &str,
    server: &Running,
    (folder, most): (Option<&Path>, Duration),
    look: &mut dyn FnMut() -> Duration,
) -> Result<Ended, Error> {
    let (mut shell, clock) = (shell(command, folder), Instant::now());
    shell.stdin(Stdio::null());
    let running = Running::start(&Root::host(), shell)?;
    while !running.wait(Some(GLANCE), look)? {
        let passed = clock.elapsed();
        if server.is_gone() || passed > most {
            return Err(Error::Endless(command.to_owned(), passed.as_secs()));
        }
    }
    running.succeed(look)
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
        let settings = Settings::for_tests();
        for serves in [ready, load] {
            let server = start();
            let error = serves
                .serve(&settings, &server, None, &mut || PAUSE)
                .unwrap_err();
            assert!(matches!(error, Error::Endless(..)), "{error}");
            assert!(server.is_gone());
        }
    }

    #[test]
    fn a_probe_that_hangs_is_given_up_and_named() {
        let mut server = shell("exec sleep 1000", None);
        server.stdin(Stdio::null());
        let server = Running::start(&Root::host(), server).unwrap();
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
        let ready = serves.wait_until_ready(&settings, &server, PATIENCE, &mut hangs_once);
        assert!(ready.is_ok());
        assert_eq!(limits, [EARLY, EARLY * 2]);
    }
}
