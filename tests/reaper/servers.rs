//! PostgreSQL and Redis: killed, restarted at once, everything there.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

use super::assert_no_sibling;
use crate::support::build::world_readable_folder;
use crate::support::{Program, Running, host, wait};

/// PostgreSQL in a folder of its own, as the user that must run it.
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

    /// Starts it, again and again as long as its own interlock refuses; how long that took.
    fn start(&self, mode: Option<&str>) -> (Running, Duration) {
        let begun = Instant::now();
        let running = wait::until("PostgreSQL to start", wait::MOMENT, || {
            let server = self.server();
            let running = match mode {
                Some(mode) => server.start_jumbo(&[mode]),
                None => server.start_plain(),
            };
            // Ready, or gone again: another server still uses the memory.
            let ready = wait::until("PostgreSQL to answer or end", wait::MOMENT, || {
                let answers = self.command("pg_isready").plain().status.success();
                answers
                    .then_some(true)
                    .or((!is_alive(running.pid())).then_some(false))
            });
            ready.then_some(running)
        });
        (running, begun.elapsed())
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

/// The newest installed version's commands.
fn postgresql() -> Option<PathBuf> {
    let versions = std::fs::read_dir("/usr/lib/postgresql").ok()?;
    let bins = versions.map(|version| version.unwrap().path().join("bin"));
    bins.filter(|bin| bin.join("initdb").exists()).max()
}

#[test]
fn postgresql_recovers_after_its_postmaster_was_killed() {
    let Some(bin) = postgresql() else {
        return host::skip("PostgreSQL is not installed under /usr/lib/postgresql");
    };
    if !host::root() {
        return;
    }
    for mode in [None, Some("--reaper=on"), Some("--reaper=auto")] {
        let postgres = Postgres::new(bin.clone());
        let (running, _) = postgres.start(mode);
        postgres.query(
            "create table rows as select i, md5(i::text) t from generate_series(1, 300000) i",
        );
        let digest = "select count(*), md5(string_agg(t, '' order by i)) from rows";
        let before = postgres.query(digest);
        rustix::process::kill_process(postgres.postmaster(), Signal::KILL).unwrap();
        assert_eq!(running.wait().shell_status(), 137);
        let (running, took) = postgres.start(mode);
        // Not eprintln!, which libtest keeps to itself.
        println!("{mode:?}: ready again after {took:?}");
        assert_eq!(postgres.query(digest), before, "{mode:?}");
        assert!(before.starts_with("300000|"), "{before}");
        running.signal(Signal::INT);
        running.wait().ok();
        assert_no_sibling(postgres.folder.path());
        assert_no_sibling(&postgres.bin);
    }
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
        wait::until("Redis to answer", wait::MOMENT, || {
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
        assert_no_sibling(folder);
    }
}
