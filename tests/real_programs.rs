//! Tests of programs from Debian packages: same output with and without jumbo, and their heap on
//! huge pages.
//!
//! Each required share proves jumbo's effect: with THP at `madvise` none of these programs requests
//! huge pages itself.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;

use crate::memory::assert_huge;
use crate::shmem;
use crate::support::build::world_readable_folder;
use crate::support::program::{ReportFile, assert_alike};
use crate::support::{MIB, Program, Ran, Running, Source, assert_same, compile, host, smaps, wait};

/// A gigabyte of objects, most of them in CPython's arenas, and a few threads.
const OBJECTS: &str = "
import hashlib, sys, threading
objects = [(i, str(i), {'key': i}) for i in range(3_200_000)]
digest = hashlib.sha256()
for number, text, mapping in objects[::1000]:
    digest.update(f'{number} {text} {mapping}'.encode())
def work(results, at):
    results[at] = sum(len(text) for _, text, _ in objects[at::4])
results = [0] * 4
threads = [threading.Thread(target=work, args=(results, at)) for at in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print('digest', digest.hexdigest(), sum(results), flush=True)
print('to stderr', file=sys.stderr)
sys.stdin.readline()
sys.exit(3)
";

#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn cpython_with_a_gigabyte_of_objects() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let Some(python) = host::command("python3") else {
        return;
    };
    let program = Program::new(python).args(["-c", OBJECTS]);
    let plain = program.plain();
    assert_eq!(plain.shell_status(), 3, "{plain:?}");
    assert_alike(&plain, &program.jumbo(), "jumbo run");
    let (running, report) = program.start_reported(&[]);
    running.wait_for_line("digest");
    // On a busy host the program fills base pages before its advice. They are collapsed.
    wait::until("a heap of which 95 % is huge", wait::TIMEOUT, || {
        (smaps::resident(running.child()).huge_share() >= 0.95).then_some(())
    });
    running.wait_until_sampled();
    let ran = running.wait();
    assert_alike(&plain, &ran, "jumbo run --report");
    assert_huge(&report.read(&ran), 500 * MIB, 0.9);
}

#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn node_with_buffers_and_objects() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let Some(node) = host::command("node") else {
        return;
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/programs/heap.js");
    let (plain, report) = assert_same(&Program::new(node).arg(script));
    assert_eq!(plain.shell_status(), 3, "{plain:?}");
    // Buffers and large arrays are huge at once, V8's own heap after a scan: on a busy machine after
    // the program's end.
    assert_huge(&report, 200 * MIB, 0.2);
}

/// V8 reserves chunks of 256 KiB at random addresses, where no huge page fits.
#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn the_heap_of_v8_is_on_huge_pages() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let Some(node) = host::command("node") else {
        return;
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/programs/v8_heap.js");
    let waiting = |millis: &str| {
        Program::new(&node)
            .arg(&script)
            .args(["1000000", "0", millis])
    };
    let plain = waiting("1000").plain();
    // On a busy host the scanner has little CPU time.
    let jumbo = waiting("60000").jumbo();
    assert!(
        plain.number("share") < 10 || host::thp_is_always(),
        "{plain:?}"
    );
    assert!(jumbo.number("share") >= 60, "{jumbo:?}");
    let bound = plain.number("mib") / 20 + 16;
    assert!(
        jumbo.number("mib") <= plain.number("mib") + bound,
        "{plain:?} {jumbo:?}"
    );
    let off = waiting("1000").jumbo_with(&["--maps=off"]);
    assert!(off.number("share") < 10 || host::thp_is_always(), "{off:?}");
}

#[test]
fn a_static_binary_runs_untouched() {
    let files = compile(&[Source::C("churn", &["-static"])]);
    let (_, report) = assert_same(&Program::new(files.path("churn")).args(["8", "300"]));
    assert!(
        report.says("static"),
        "the report does not say why: {report:?}"
    );
}

#[test]
fn a_go_binary_runs_untouched() {
    if host::command("go").is_none() {
        return;
    }
    let files = compile(&[Source::Go("untouched")]);
    let (plain, report) = assert_same(&Program::new(files.path("untouched")));
    assert_eq!(plain.shell_status(), 5, "{plain:?}");
    assert!(
        report.says("Go program"),
        "the report does not say why: {report:?}"
    );
}

/// A dynamic program starts a static one, and the reverse.
#[test]
fn static_and_dynamic_programs_start_each_other() {
    let files = compile(&[Source::C("spawn", &["-static"]), Source::C("heap", &[])]);
    assert_same(
        &Program::new(files.path("spawn"))
            .arg(files.path("heap"))
            .args(["16", "go"]),
    );
    let files = compile(&[Source::C("spawn", &[]), Source::C("heap", &["-static"])]);
    assert_same(
        &Program::new(files.path("spawn"))
            .arg(files.path("heap"))
            .args(["16", "go"]),
    );
}

/// A million keys: loaded through the protocol, counted, digested and saved by Redis itself.
#[test]
fn redis_with_a_million_keys() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let (Some(server), Some(cli)) = (host::command("redis-server"), host::command("redis-cli"))
    else {
        return;
    };
    let plain = Redis::start(&server, &cli, false).fill();
    let plain_digest = plain.digest();
    plain.stop();
    let wrapped = Redis::start(&server, &cli, true).fill();
    assert_eq!(wrapped.digest(), plain_digest);
    // A snapshot forks; the child reads all memory.
    assert_eq!(wrapped.ask(&["bgsave"]), "Background saving started");
    wait::until("the snapshot", Duration::from_secs(120), || {
        wrapped
            .ask(&["info", "persistence"])
            .contains("rdb_bgsave_in_progress:0")
            .then_some(())
    });
    assert!(
        wrapped
            .ask(&["info", "persistence"])
            .contains("rdb_last_bgsave_status:ok")
    );
    let seen = smaps::resident(wrapped.running.child());
    assert!(
        seen.huge_share() >= 0.8,
        "{} of {seen:?}",
        seen.huge_share()
    );
    let (ran, report) = wrapped.stop();
    let report = report.unwrap().read(&ran);
    assert_huge(&report, 100 * MIB, 0.8);
}

struct Redis {
    running: Running,
    report: Option<ReportFile>,
    cli: PathBuf,
    folder: tempfile::TempDir,
}

impl Redis {
    fn start(server: &Path, cli: &Path, wrapped: bool) -> Self {
        let folder = world_readable_folder();
        // On a socket in its folder, so that no port conflicts. It saves on command.
        let program = Program::new(server)
            .folder(folder.path())
            .args([
                "--port",
                "0",
                "--unixsocket",
                "redis.sock",
                "--save",
                "",
                "--daemonize",
                "no",
            ])
            .args(["--enable-debug-command", "yes"]);
        let (running, report) = if wrapped {
            let (running, report) = program.start_reported(&[]);
            (running, Some(report))
        } else {
            (program.start_plain(), None)
        };
        let redis = Self {
            running,
            report,
            cli: cli.to_owned(),
            folder,
        };
        wait::until("Redis to answer", wait::TIMEOUT, || {
            (redis.cli().arg("ping").plain().stdout == "PONG\n").then_some(())
        });
        redis
    }

    fn cli(&self) -> Program {
        Program::new(&self.cli)
            .folder(self.folder.path())
            .args(["-s", "redis.sock"])
    }

    fn ask(&self, command: &[&str]) -> String {
        self.cli()
            .args(command)
            .plain()
            .ok()
            .stdout
            .trim_end()
            .to_owned()
    }

    fn fill(self) -> Self {
        let mut commands = String::new();
        for key in 0..1_000_000 {
            let value = format!("value {key} {}", "x".repeat(key % 200));
            commands += &format!("SET key:{key} \"{value}\"\r\n");
        }
        let filled = self.cli().arg("--pipe").stdin(commands).plain().ok();
        assert!(
            filled.stdout.contains("errors: 0, replies: 1000000"),
            "{filled:?}"
        );
        assert_eq!(self.ask(&["dbsize"]), "1000000");
        assert_eq!(
            self.ask(&["get", "key:777003"]),
            format!("value 777003 {}", "x".repeat(3))
        );
        self
    }

    fn digest(&self) -> String {
        self.ask(&["debug", "digest"])
    }

    fn stop(self) -> (Ran, Option<ReportFile>) {
        // The server closes the connection instead of an answer.
        self.cli().args(["shutdown", "nosave"]).plain();
        let ran = self.running.wait().ok();
        assert!(ran.stdout.contains("ready to exit"), "{ran:?}");
        (ran, self.report)
    }
}

/// Runs initdb, pgbench, a sort in memory, and a clean stop, as the user that must run it.
#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn postgresql_from_initdb_to_a_clean_stop() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let Some(bin) = postgresql() else {
        return host::skip("PostgreSQL is not installed under /usr/lib/postgresql");
    };
    if !host::root() {
        return;
    }
    let plain = Postgres::start(&bin, None, &[]);
    let sorted = plain.work();
    plain.stop();
    let wrapped = Postgres::start(&bin, Some(&[]), &[]);
    assert_eq!(wrapped.work(), sorted);
    let (ran, report) = wrapped.stop();
    let report = report.unwrap().read(&ran);
    // Memory of the sort, above that of each backend.
    assert_huge(&report, 64 * MIB, 0.5);
    assert!(
        report.number("/peak/shared/bytes") > (20 * MIB) as f64,
        "{report:?}"
    );
}

/// Buffers that queries have filled, in each process that maps them, without privilege and with the
/// kernel's controls unchanged.
#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn postgresqls_shared_buffers_are_collapsed() {
    let Some(_held) = shmem::ready() else {
        return;
    };
    let Some(bin) = postgresql() else {
        return host::skip("PostgreSQL is not installed under /usr/lib/postgresql");
    };
    if !host::root() {
        return;
    }
    let settings = ["shared_buffers=256MB", "huge_pages=off"];
    let postgres = Postgres::start(&bin, Some(&["--heap=off"]), &settings);
    let initialize = ["--initialize", "--quiet", "--scale=10"];
    postgres.client("pgbench").args(initialize).plain().ok();
    let select = ["--select-only", "--transactions=40000", "--no-vacuum"];
    wait::until("the buffers to be huge", 3 * wait::TIMEOUT, || {
        let bench = postgres.client("pgbench").args(select).plain().ok();
        assert!(bench.stdout.contains("failed transactions: 0"), "{bench:?}");
        let mut session = postgres.psql().start_plain();
        session.write("select sum(abalance) from pgbench_accounts;\n\\echo held\n");
        session.wait_for_line("held");
        let resident = postgres.shared_buffers();
        session.write("\\q\n");
        session.wait().ok();
        let (resident, huge) = resident;
        (resident > 100 * MIB && huge >= resident / 10 * 9).then_some(())
    });
    let (ran, report) = postgres.stop();
    let report = report.unwrap().read(&ran);
    assert_eq!(report.at("/obtained/shmem/rung"), "collapse", "{report:?}");
}

/// Folder of the newest installed version's commands.
fn postgresql() -> Option<PathBuf> {
    let versions = std::fs::read_dir("/usr/lib/postgresql").ok()?;
    let bins = versions.map(|version| version.unwrap().path().join("bin"));
    bins.filter(|bin| bin.join("initdb").exists()).max()
}

struct Postgres {
    running: Running,
    report: Option<ReportFile>,
    bin: PathBuf,
    folder: tempfile::TempDir,
}

impl Postgres {
    /// Starts the server, under jumbo if there are options.
    fn start(bin: &Path, options: Option<&[&str]>, settings: &[&str]) -> Self {
        use std::os::unix::fs::PermissionsExt;
        let folder = world_readable_folder();
        let everybodys = std::fs::Permissions::from_mode(0o1777);
        std::fs::set_permissions(folder.path(), everybodys).unwrap();
        let user = |program: Program| program.folder(folder.path()).installed().user("postgres");
        let initdb = user(Program::new(bin.join("initdb"))).args([
            "--pgdata",
            "data",
            "--auth",
            "trust",
            "--no-sync",
            "--locale",
            "C",
        ]);
        if options.is_some() {
            initdb.jumbo()
        } else {
            initdb.plain()
        }
        .ok();
        let server = user(Program::new(bin.join("postgres")))
            .args(["-D", "data", "-c", "listen_addresses="])
            .arg("-k")
            .arg(folder.path())
            .args(["-c", "work_mem=400MB", "-c", "fsync=off"])
            .args(["-c", "max_parallel_workers_per_gather=0"])
            .args(settings.iter().flat_map(|setting| ["-c", setting]));
        let (running, report) = if let Some(options) = options {
            let (running, report) = server.start_reported(options);
            (running, Some(report))
        } else {
            (server.start_plain(), None)
        };
        let postgres = Self {
            running,
            report,
            bin: bin.to_owned(),
            folder,
        };
        wait::until("PostgreSQL to answer", wait::TIMEOUT, || {
            postgres
                .client("pg_isready")
                .plain()
                .status
                .success()
                .then_some(())
        });
        postgres
    }

    /// Returns the resident shared memory and its PMD-mapped part, of the process with most of it.
    fn shared_buffers(&self) -> (u64, u64) {
        let file = std::fs::read_to_string(self.folder.path().join("data/postmaster.pid"));
        let parent: i32 = file.unwrap().lines().next().unwrap().parse().unwrap();
        let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"));
        let children = children.unwrap();
        let smaps = children
            .split_whitespace()
            .filter_map(|child| std::fs::read_to_string(format!("/proc/{child}/smaps")).ok());
        let largest = |smaps: String| {
            let (mut here, mut resident, mut huge) = (false, 0, 0);
            for line in smaps.lines() {
                let mut words = line.split_whitespace();
                let name = words.next().unwrap_or_default();
                let mut kib = || words.next().and_then(|kib| kib.parse::<u64>().ok());
                match name {
                    "Rss:" if here => resident += kib().unwrap_or(0) << 10,
                    "ShmemPmdMapped:" if here => huge += kib().unwrap_or(0) << 10,
                    _ if !name.ends_with(':') => here = line.contains("/dev/zero"),
                    _ => {}
                }
            }
            (resident, huge)
        };
        smaps.map(largest).max().unwrap_or_default()
    }

    fn client(&self, name: &str) -> Program {
        let client = Program::new(self.bin.join(name)).user("postgres");
        client
            .folder(self.folder.path())
            .env("PGHOST", self.folder.path())
            .env("PGDATABASE", "postgres")
    }

    fn psql(&self) -> Program {
        let options = ["-X", "-A", "-t", "-v", "ON_ERROR_STOP=1"];
        self.client("psql").args(options)
    }

    fn query(&self, sql: &str) -> String {
        let psql = self.psql().args(["-c", sql]);
        psql.plain().ok().stdout.trim_end().to_owned()
    }

    /// Initialises and runs pgbench, checks its balance, and returns the digest of a large sort.
    fn work(&self) -> String {
        self.client("pgbench")
            .args(["--initialize", "--quiet", "--scale=3"])
            .plain()
            .ok();
        let bench = [
            "--client=4",
            "--jobs=2",
            "--transactions=200",
            "--no-vacuum",
        ];
        let bench = self.client("pgbench").args(bench).plain().ok();
        assert!(
            bench.stdout.contains("actually processed: 800/800"),
            "{bench:?}"
        );
        // An invariant of pgbench, whatever the order of its transactions.
        let balance = "select (select sum(abalance) from pgbench_accounts)
            = (select sum(delta) from pgbench_history), (select count(*) from pgbench_history)";
        assert_eq!(self.query(balance), "t|800");
        let sort = "select md5(string_agg(t, '')) from (select t from (select md5(i::text) t
            from generate_series(1, 1500000) i) s order by t offset 1400000) u";
        let sorted = self.query(sort);
        assert_eq!(sorted.len(), 32, "{sorted}");
        self.hold_a_sort();
        sorted
    }

    /// Repeats a sort and holds its memory until a sample includes it.
    fn hold_a_sort(&self) {
        let mut session = self.psql().start_plain();
        session.write(
            "begin; declare sorted cursor for select md5(i::text) t from generate_series(1, 1500000) i order by t;
            fetch 1 from sorted;\n\\echo held\n",
        );
        session.wait_for_line("held");
        if self.report.is_some() {
            self.running.wait_until_sampled();
        }
        session.write("\\q\n");
        session.wait().ok();
    }

    fn stop(self) -> (Ran, Option<ReportFile>) {
        self.running.signal(Signal::INT);
        let ran = self.running.wait().ok();
        assert!(
            ran.stderr.contains("database system is shut down"),
            "{ran:?}"
        );
        (ran, self.report)
    }
}
