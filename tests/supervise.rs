//! `jumbo run --supervise` around servers: killed or shut down, their memory is given back from two sides,
//! and nothing of what they kept is lost.

use std::path::{Path, PathBuf};

use rustix::process::Signal;

use crate::support::build::world_readable_folder;
use crate::support::program::ReportFile;
use crate::support::{MIB, Program, Report, Running, host, wait};

const OPTIONS: [&str; 2] = ["--supervise", "--reaper=off"];

#[track_caller]
fn assert_released(report: &Report, least: u64) {
    let at = |key| report.number(&format!("/obtained/supervised/{key}"));
    assert!(
        report.at("/obtained/supervised/reason").is_null(),
        "{report:?}"
    );
    assert!(
        at("anonymous") > least as f64 && at("released") > 0.0,
        "{report:?}"
    );
}

#[test]
fn redis_killed_and_shut_down() {
    let (Some(server), Some(cli)) = (host::command("redis-server"), host::command("redis-cli"))
    else {
        return;
    };
    for kill in [true, false] {
        let folder = world_readable_folder();
        let program = Program::new(&server).folder(folder.path()).args([
            "--port",
            "0",
            "--unixsocket",
            "redis.sock",
            "--save",
            "",
            "--enable-debug-command",
            "yes",
        ]);
        let (running, report) = program.start_reported(&OPTIONS);
        let cli = |words: &[&str]| {
            let cli = Program::new(&cli).folder(folder.path());
            cli.args(["-s", "redis.sock"]).args(words).plain()
        };
        wait::until("Redis to answer", wait::MOMENT, || {
            (cli(&["ping"]).stdout == "PONG\n").then_some(())
        });
        let filled = cli(&["debug", "populate", "1000000", "key", "100"]);
        assert_eq!(filled.stdout, "OK\n", "{filled:?}");
        match kill {
            true => rustix::process::kill_process(running.child(), Signal::KILL).unwrap(),
            false => drop(cli(&["shutdown", "nosave"])),
        }
        let ran = running.wait();
        assert_eq!(ran.shell_status(), if kill { 137 } else { 0 }, "{ran:?}");
        assert_released(&report.read(&ran), 100 * MIB);
    }
}

/// The first server process has little memory of its own, and so nothing is gained; but its children
/// notice its end, and the next server recovers, as without.
#[test]
fn postgresql_killed_recovers() {
    let Some(bin) = postgresql() else {
        return host::skip("PostgreSQL is not installed under /usr/lib/postgresql");
    };
    if !host::root() {
        return;
    }
    let folder = world_readable_folder();
    let everybodys = std::os::unix::fs::PermissionsExt::from_mode(0o1777);
    std::fs::set_permissions(folder.path(), everybodys).unwrap();
    let folder = folder.path();
    let initdb = as_postgres(&bin, folder, "initdb");
    let options = [
        "--pgdata",
        "data",
        "--auth",
        "trust",
        "--no-sync",
        "--locale",
        "C",
    ];
    initdb.args(options).plain().ok();

    let (running, report) = start(&bin, folder);
    query(
        &bin,
        folder,
        "create table kept as select generate_series(1, 100000) i",
    );
    rustix::process::kill_process(running.child(), Signal::KILL).unwrap();
    let ran = running.wait();
    assert_eq!(ran.shell_status(), 137, "{ran:?}");
    assert!(!report.read(&ran).at("/obtained/supervised").is_null());

    let (running, _report) = start(&bin, folder);
    assert_eq!(
        query(&bin, folder, "select count(*), sum(i) from kept"),
        "100000|5000050000"
    );
    running.signal(Signal::INT);
    running.wait().ok();
}

fn postgresql() -> Option<PathBuf> {
    let versions = std::fs::read_dir("/usr/lib/postgresql").ok()?;
    let bins = versions.map(|version| version.unwrap().path().join("bin"));
    bins.filter(|bin| bin.join("initdb").exists()).max()
}

fn as_postgres(bin: &Path, folder: &Path, name: &str) -> Program {
    Program::new(bin.join(name))
        .folder(folder)
        .env("PGHOST", folder)
        .env("PGDATABASE", "postgres")
        .installed()
        .user("postgres")
}

/// Starts it as soon as its predecessor's processes let it.
fn start(bin: &Path, folder: &Path) -> (Running, ReportFile) {
    let server = as_postgres(bin, folder, "postgres")
        .args(["-D", "data", "-c", "listen_addresses=", "-k"])
        .arg(folder)
        .args(["-c", "fsync=off"]);
    wait::until("PostgreSQL to start", wait::MOMENT, || {
        let (running, report) = server.start_reported(&OPTIONS);
        let answers = || {
            as_postgres(bin, folder, "pg_isready")
                .plain()
                .status
                .success()
        };
        let is_up = wait::until("PostgreSQL to answer or to end", wait::MOMENT, || {
            match (answers(), running.has_ended()) {
                (_, true) => Some(false),
                (true, false) => Some(true),
                (false, false) => None,
            }
        });
        is_up.then_some((running, report))
    })
}

fn query(bin: &Path, folder: &Path, sql: &str) -> String {
    let psql = as_postgres(bin, folder, "psql");
    let psql = psql.args(["-X", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-c", sql]);
    psql.plain().ok().stdout.trim_end().to_owned()
}
