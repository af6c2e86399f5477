//! Tests of PostgreSQL and Redis: killed and restarted at once, with all data. They print the
//! times, plain and with each mode (`cargo test -- --nocapture`).

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

use super::{assert_no_reaper, is_started, reapers, states, status};
use crate::support::build::world_readable_folder;
use crate::support::program::ReportFile;
use crate::support::{MIB, Program, Running, host, wait};

const MODES: [Option<&str>; 3] = [None, Some("--reaper=on"), Some("--reaper=auto")];

/// Base pages on both sides: huge pages alone would shorten the exit.
const BASE_PAGES: [&str; 2] = ["--heap=off", "--maps=off"];

/// Starts a program plain, or under a `jumbo run` that reports.
fn start(program: &Program, mode: Option<&str>, options: &[&str]) -> (Running, Option<ReportFile>) {
    match mode {
        Some(mode) => {
            let (running, report) = program.start_reported(&[options, &[mode]].concat());
            (running, Some(report))
        }
        None => (program.start_plain(), None),
    }
}

/// Ends a process and returns the time that its parent waited.
fn time_end(pid: Pid, end: impl FnOnce()) -> Duration {
    use rustix::event::{PollFd, PollFlags, poll};
    use rustix::process::{PidfdFlags, pidfd_open};
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
    let begun = Instant::now();
    end();
    let bound = rustix::time::Timespec::try_from(wait::TIMEOUT).unwrap();
    let mut ended = [PollFd::new(&pidfd, PollFlags::IN)];
    assert_eq!(poll(&mut ended, Some(&bound)).unwrap(), 1, "it did not end");
    begun.elapsed()
}

fn kill(pid: Pid) -> Duration {
    time_end(pid, || {
        rustix::process::kill_process(pid, Signal::KILL).unwrap();
    })
}

/// PostgreSQL in a temporary folder, as the user that must run it.
struct Postgres {
    bin: PathBuf,
    folder: tempfile::TempDir,
}

impl Postgres {
    fn new(bin: PathBuf) -> Self {
        use std::os::unix::fs::PermissionsExt;
        let folder = world_readable_folder();
        let everybodys = std::fs::Permissions::from_mode(0o1777);
        std::fs::set_permissions(folder.path(), everybodys).unwrap();
        let postgres = Self { bin, folder };
        let initdb = postgres.command("initdb");
        initdb
            .args([
                "--pgdata",
                "data",
                "--auth",
                "trust",
                "--no-sync",
                "--locale",
                "C",
            ])
            .plain()
            .ok();
        postgres
    }

    fn command(&self, name: &str) -> Program {
        let program = Program::new(self.bin.join(name)).folder(self.folder.path());
        let program = program
            .env("PGHOST", self.folder.path())
            .env("PGDATABASE", "postgres");
        program.installed().user("postgres")
    }

    fn server(&self) -> Program {
        let server = self.command("postgres");
        server
            .args([
                "-D",
                "data",
                "-c",
                "listen_addresses=",
                "-c",
                "shared_buffers=256MB",
            ])
            .arg("-k")
            .arg(self.folder.path())
    }

    fn query(&self, sql: &str) -> String {
        let psql = self.command("psql");
        let ran = psql
            .args(["-X", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-c", sql])
            .plain();
        ran.ok().stdout.trim_end().to_owned()
    }

    /// Starts the server, again as long as its own interlock refuses; returns the total time, too.
    fn start(&self, mode: Option<&str>) -> (Running, Option<ReportFile>, Duration) {
        let begun = Instant::now();
        let (running, report) = wait::until("PostgreSQL to start", wait::TIMEOUT, || {
            // The server needs the folder that jumbo runs from.
            let server = self.server();
            let (running, report) = start(&server, mode, &[]);
            // Ready, or ended again: another server still uses the memory.
            let ready = wait::until("PostgreSQL to answer or end", wait::TIMEOUT, || {
                let answers = self.command("pg_isready").plain().status.success();
                answers
                    .then_some(true)
                    .or((!is_alive(running.pid())).then_some(false))
            });
            ready.then_some((running, report))
        });
        (running, report, begun.elapsed())
    }

    fn postmaster(&self) -> Pid {
        let file = self.folder.path().join("data/postmaster.pid");
        let text = std::fs::read_to_string(file).unwrap();
        Pid::from_raw(text.lines().next().unwrap().parse().unwrap()).unwrap()
    }
}

fn is_alive(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    stat.is_ok_and(|stat| !stat.contains(") Z "))
}

/// Returns the folder of the newest installed version's commands.
fn postgresql() -> Option<PathBuf> {
    let versions = std::fs::read_dir("/usr/lib/postgresql").ok()?;
    let bins = versions.map(|version| version.unwrap().path().join("bin"));
    bins.filter(|bin| bin.join("initdb").exists()).max()
}

#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn postgresql_recovers_after_its_postmaster_was_killed() {
    let Some(bin) = postgresql() else {
        return host::skip("PostgreSQL is not installed under /usr/lib/postgresql");
    };
    if !host::root() {
        return;
    }
    for mode in MODES {
        let postgres = Postgres::new(bin.clone());
        let (mut running, report, _) = postgres.start(mode);
        postgres.query(
            "create table rows as select i, md5(i::text) t from generate_series(1, 300000) i",
        );
        let digest = "select count(*), md5(string_agg(t, '' order by i)) from rows";
        let before = postgres.query(digest);
        let waited = kill(postgres.postmaster());
        // Not for the children: that is the interlock's task.
        running.reap();
        let (restarted, _, took) = postgres.start(mode);
        let ran = running.wait();
        assert_eq!(ran.shell_status(), 137);
        let states = report.map(|report| states(&report.read(&ran)));
        // Not eprintln!, which libtest captures.
        println!(
            "PostgreSQL, {}: killed, waited {waited:?}, answers again after {took:?}; {}",
            mode.unwrap_or("plain"),
            states.as_deref().map_or_else(String::new, counted)
        );
        // No child is large, and the shared segment is not considered yet.
        for state in states.iter().flatten() {
            let on = mode == Some("--reaper=on");
            assert_eq!(is_started(state), on, "{mode:?} {state}");
        }
        assert_eq!(postgres.query(digest), before, "{mode:?}");
        assert!(before.starts_with("300000|"), "{before}");
        rustix::process::kill_process(postgres.postmaster(), Signal::INT).unwrap();
        restarted.wait().ok();
        assert_no_reaper(postgres.folder.path());
        assert_no_reaper(&postgres.bin);
    }
}

/// Counts the processes of each state.
fn counted(states: &[String]) -> String {
    let mut counts = std::collections::BTreeMap::<_, usize>::new();
    for state in states {
        *counts.entry(state.as_str()).or_default() += 1;
    }
    let words: Vec<_> = counts
        .iter()
        .map(|(state, count)| format!("{count} {state}"))
        .collect();
    words.join(", ")
}

struct Redis {
    running: Running,
    cli: PathBuf,
}

impl Redis {
    fn start(server: &Path, cli: &Path, folder: &Path, mode: &str) -> Self {
        let program = Program::new(server).folder(folder);
        let program = program
            .args([
                "--port",
                "0",
                "--unixsocket",
                "redis.sock",
                "--appendonly",
                "yes",
            ])
            .args(["--appendfsync", "always", "--save", "", "--daemonize", "no"])
            .arg("--dir")
            .arg(folder);
        let running = program.start_jumbo(&[mode]);
        let redis = Self {
            running,
            cli: cli.to_owned(),
        };
        wait::until("Redis to answer", wait::TIMEOUT, || {
            (redis.ask(folder, &["ping"]).trim() == "PONG").then_some(())
        });
        redis
    }

    fn ask(&self, folder: &Path, command: &[&str]) -> String {
        let cli = Program::new(&self.cli).folder(folder);
        cli.args(["-s", "redis.sock"]).args(command).plain().stdout
    }
}

#[test]
fn redis_is_killed_restarted_and_shut_down() {
    let (Some(server), Some(cli)) = (host::command("redis-server"), host::command("redis-cli"))
    else {
        return;
    };
    for mode in ["--reaper=on", "--reaper=auto"] {
        let folder = world_readable_folder();
        let folder = folder.path();
        let redis = Redis::start(&server, &cli, folder, mode);
        let filled = redis.ask(folder, &["eval", "for i = 1, 200000 do redis.call('set', 'key:' .. i, string.rep('x', i % 500)) end return 1", "0"]);
        assert_eq!(filled.trim(), "1");
        redis.running.signal(Signal::KILL);
        assert_eq!(redis.running.wait().shell_status(), 137);
        let redis = Redis::start(&server, &cli, folder, mode);
        assert_eq!(redis.ask(folder, &["dbsize"]).trim(), "200000");
        assert_eq!(redis.ask(folder, &["strlen", "key:777"]).trim(), "277");
        redis.ask(folder, &["shutdown"]);
        let ran = redis.running.wait().ok();
        assert!(ran.stdout.contains("ready to exit"), "{ran:?}");
        assert_no_reaper(folder);
    }
}

#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn a_large_redis_ends_at_once() {
    let (Some(server), Some(cli)) = (host::command("redis-server"), host::command("redis-cli"))
    else {
        return;
    };
    for mode in MODES {
        for killed in [true, false] {
            let folder = world_readable_folder();
            let program = Program::new(&server)
                .folder(folder.path())
                .args(["--port", "0", "--unixsocket", "redis.sock", "--save", ""])
                .args(["--enable-debug-command", "yes"]);
            let (running, report) = start(&program, mode, &BASE_PAGES);
            let ask = |words: &[&str]| {
                let cli = Program::new(&cli).folder(folder.path());
                cli.args(["-s", "redis.sock"]).args(words).plain().stdout
            };
            wait::until("Redis to answer", wait::TIMEOUT, || {
                (ask(&["ping"]) == "PONG\n").then_some(())
            });
            assert_eq!(ask(&["debug", "populate", "1500000", "key", "800"]), "OK\n");
            let pid = match mode {
                Some(_) => running.child(),
                None => running.pid(),
            };
            let resident = status(pid, "RssAnon");
            let kib: u64 = resident.trim().trim_end_matches(" kB").parse().unwrap();
            assert!(kib << 10 > 1200 * MIB, "{resident}");
            let waited = match killed {
                true => kill(pid),
                false => time_end(pid, || drop(ask(&["shutdown", "nosave"]))),
            };
            let ran = running.wait();
            assert_eq!(ran.shell_status(), if killed { 137 } else { 0 }, "{ran:?}");
            wait::until("the reapers' end", wait::TIMEOUT, || {
                reapers(&server).is_empty().then_some(())
            });
            println!(
                "Redis, {} MiB, {}: {}, waited {waited:?}",
                kib >> 10,
                mode.unwrap_or("plain"),
                if killed { "killed" } else { "SHUTDOWN" },
            );
            if let Some(report) = report {
                let report = report.read(&ran);
                assert!(is_started(&states(&report)[0]), "{mode:?} {report:?}");
            }
        }
    }
}
