//! PostgreSQL, whose buffers are anonymous shared memory: [`Database`].
//!
//! A database as large as three quarters of the buffers is made once. A sample is a server started afresh, with all of it in its
//! buffers, and `pgbench -S` (a row looked up by its key, at random, again and again) against it.
//!
//! The kernel's counters of all shared memory say on which pages the buffers are: no process of a server has all of them mapped.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use jumbo::kernel::Root;
use jumbo::kernel::hugetlb::Pool;
use jumbo::kernel::memory::Memory;
use jumbo::units::{Bytes, Pages};
use rustix::process::{Pid, Signal, kill_process};

use crate::claim::{self, Claim};
use crate::error::QUIET;
use crate::figures::{Figures, figures, with};
use crate::keeper::kernel_pool;
use crate::launch::{Launch, line};
use crate::talk::Talk;
use crate::{Error, Settings, on_disk};

/// On which pages the buffers are to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Buffers {
    Plain,
    Jumbo,
    /// PostgreSQL's `huge_pages=on`.
    Own,
}

/// A database, and how its servers are started.
pub(super) struct Database {
    /// The server's buffers.
    pub(super) size: Bytes,
    jumbo: PathBuf,
    bin: PathBuf,
    /// It does not start for root.
    user: Option<&'static str>,
    folder: PathBuf,
    /// Removes the folder at the end of its input.
    _broom: Talk,
}

/// What `pgbench` puts into a database for one of its scale, with the index.
const OF_SCALE: u64 = 15 << 20;

/// How many queries a sample is for each MiB of buffers, and the clients that send them.
const QUERIES: u64 = 100;
const CLIENTS: u64 = 4;

/// How long starting may take, and collapsing what the server touched: longer than between two looks of a process that has nothing
/// to do.
const PATIENCE: Duration = Duration::from_secs(100);
const PAUSE: Duration = Duration::from_millis(20);

impl Buffers {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Jumbo => "jumbo run",
            Self::Own => "huge_pages=on",
        }
    }

    fn launch(self) -> Launch {
        match self {
            Self::Plain | Self::Own => Launch::Plain,
            Self::Jumbo => Launch::JUMBO,
        }
    }

    fn claims(self, size: Bytes) -> Vec<Claim> {
        match self {
            Self::Plain => vec![claim::within("shared_huge_percent", 0..=5)],
            Self::Jumbo => vec![claim::within("shared_huge_percent", 90..=100)],
            Self::Own => claim::hugetlb(size),
        }
    }
}

impl Database {
    /// Makes one, for a server with buffers of `size`.
    pub(super) fn make(settings: &Settings, size: Bytes) -> Result<Self, Error> {
        settings.progress.set_message("making a database");
        let none = || io::Error::other("PostgreSQL is not installed under /usr/lib/postgresql");
        let bin = newest().ok_or_else(none)?;
        let root = rustix::process::geteuid().is_root();
        // The server's user writes to it.
        let (folder, broom) = swept(if root { "1777" } else { "700" })?;
        let database = Self {
            size,
            jumbo: settings.jumbo.clone(),
            bin,
            user: root.then_some("postgres"),
            folder,
            _broom: broom,
        };
        // It may be where that user may not look.
        run(database.as_user(Command::new(&database.jumbo).arg("--version")))?;
        let options = ["--pgdata=data", "--auth=trust", "--no-sync", "--locale=C"];
        database.client("initdb", &options)?;
        let mut server = database.start(Buffers::Plain)?;
        let scale = format!("--scale={}", size.0 / 4 * 3 / OF_SCALE + 1);
        database.client(
            "pgbench",
            &["--initialize", "--quiet", "--unlogged-tables", &scale],
        )?;
        database.query("create extension pg_prewarm")?;
        server.stop()?;
        Ok(database)
    }

    /// The pool's pages that the server takes for all of its shared memory: its buffers, what describes them, and the rest.
    pub(super) fn shared(&self) -> Bytes {
        Bytes(self.size.0 + self.size.0 / 8 + (64 << 20))
    }

    /// A server, and what a query takes it with all of the database in its buffers.
    pub(super) fn sample(&self, buffers: Buffers) -> Result<Figures, Error> {
        let root = Root::host();
        let before = Shared::read(&root)?;
        let mut server = self.start(buffers)?;
        self.query("select pg_prewarm('pgbench_accounts'), pg_prewarm('pgbench_accounts_pkey')")?;
        let claims = buffers.claims(self.size);
        let clock = Instant::now();
        let figures = loop {
            let figures = Shared::read(&root)?.since(&before);
            let figures = with(figures, [("preload_libraries", server.libraries(&root)?)]);
            // What is touched is collapsed a moment later.
            let checked = claim::check(&claims, &buffers.launch(), &figures);
            match checked {
                Ok(()) => break figures,
                Err(error) if buffers != Buffers::Jumbo || clock.elapsed() > PATIENCE => {
                    return Err(error);
                }
                Err(_) => std::thread::sleep(PAUSE),
            }
        };
        let queries = (self.size.0 >> 20) * QUERIES;
        let clients = format!("--client={CLIENTS}");
        let each = format!("--transactions={}", queries / CLIENTS);
        let jobs = "--jobs=2";
        let query = [
            "--select-only",
            "--protocol=prepared",
            "--no-vacuum",
            jobs,
            &clients,
            &each,
        ];
        let said = self.client("pgbench", &query)?;
        server.stop()?;
        let rate = said.lines().find_map(|line| {
            let number = line.strip_prefix("tps = ")?.split_whitespace().next()?;
            number.parse::<f64>().ok()
        });
        let rate = rate.ok_or_else(|| Error::Corrupt(format!("pgbench names no rate: {said}")))?;
        Ok(with(figures, [("query_us", 1e6 / rate)]))
    }

    /// A server that answers.
    fn start(&self, buffers: Buffers) -> Result<Server, Error> {
        let own = if buffers == Buffers::Own { "on" } else { "off" };
        let launched = buffers.launch();
        let mut command = launched.command(&self.jumbo, self.bin.join("postgres").as_os_str());
        command.args([
            "-D",
            "data",
            "-c",
            "listen_addresses=",
            "-c",
            "fsync=off",
            "-k",
        ]);
        command
            .arg(&self.folder)
            .args(["-c", "autovacuum=off", "-c", "jit=off"]);
        command.arg("-c").arg(format!("huge_pages={own}"));
        command
            .arg("-c")
            .arg(format!("shared_buffers={}kB", self.size.0 >> 10));
        let mut server = Server(Talk::start(self.as_user(&command), Stdio::piped())?);
        let clock = Instant::now();
        while self.client("pg_isready", &["--quiet"]).is_err() {
            if let Some(status) = server.0.child.try_wait()? {
                return Err(server.0.failed(status));
            }
            if clock.elapsed() > PATIENCE {
                return Err(Error::claim("server does not answer", QUIET));
            }
            std::thread::sleep(PAUSE);
        }
        Ok(server)
    }

    fn query(&self, sql: &str) -> Result<String, Error> {
        self.client("psql", &["-X", "-v", "ON_ERROR_STOP=1", "-c", sql])
    }

    /// Runs one of PostgreSQL's commands, and returns what it printed.
    fn client(&self, name: &str, arguments: &[&str]) -> Result<String, Error> {
        run(self.as_user(Command::new(self.bin.join(name)).args(arguments)))
    }

    /// The same command in the folder, as the user who may, and ended with this process.
    fn as_user(&self, command: &Command) -> Command {
        let mut whole = Command::new("setpriv");
        whole.args(["--pdeathsig", "INT"]);
        if let Some(user) = self.user {
            whole.args(["--reuid", user, "--regid", user, "--init-groups"]);
        }
        whole
            .arg("--")
            .arg(command.get_program())
            .args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => whole.env(name, value),
                None => whole.env_remove(name),
            };
        }
        whole
            .current_dir(&self.folder)
            .env("PGHOST", &self.folder)
            .env("PGDATABASE", "postgres");
        whole
    }
}

/// Runs a command to its end, and returns what it printed.
fn run(mut command: Command) -> Result<String, Error> {
    let ended = command.stdin(Stdio::null()).output();
    let line = line(&command);
    let ended = ended.map_err(|error| Error::Start(line.clone(), error))?;
    if !ended.status.success() {
        let said = String::from_utf8_lossy(&ended.stderr);
        let last = said.lines().last().unwrap_or("no message").to_owned();
        return Err(Error::Failed(line, ended.status, last));
    }
    Ok(String::from_utf8_lossy(&ended.stdout).into_owned())
}

/// A server that runs. It is stopped when this is dropped.
struct Server(Talk);

impl Server {
    /// Has it end, without waiting for those who are connected.
    fn signal(&self) {
        if let Some(pid) = i32::try_from(self.0.child.id())
            .ok()
            .and_then(Pid::from_raw)
        {
            let _ = kill_process(pid, Signal::INT);
        }
    }

    fn stop(&mut self) -> Result<(), Error> {
        self.signal();
        self.0.end()
    }

    fn libraries(&self, root: &Root) -> Result<f64, Error> {
        let maps = root.read(format!("proc/{}/maps", self.0.child.id()))?;
        Ok(f64::from(u8::from(maps.contains("libjumbo_preload"))))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // One that was waited for has no process ID any more.
        if let Ok(None) = self.0.child.try_wait() {
            self.signal();
        }
    }
}

/// What all programs have of shared memory, and of the kernel's pool.
struct Shared {
    memory: Memory,
    pool: Option<Pool>,
}

impl Shared {
    fn read(root: &Root) -> Result<Self, Error> {
        Ok(Self {
            memory: Memory::read(root)?,
            pool: kernel_pool(root)?,
        })
    }

    fn since(&self, before: &Self) -> Figures {
        let more = |what: fn(&Memory) -> Bytes| {
            what(&self.memory).0.saturating_sub(what(&before.memory).0) as f64
        };
        // What is mapped is reserved until it is touched.
        let taken = |pool: &Pool| Pages(pool.used().0 + pool.reserved.0).bytes(pool.size).0;
        let [now, then] = [&self.pool, &before.pool].map(|pool| pool.as_ref().map_or(0, taken));
        let huge = more(|memory| memory.shmem_huge) / more(|memory| memory.shmem).max(1.0) * 100.0;
        let hugetlb = now.saturating_sub(then) as f64;
        figures([("shared_huge_percent", huge), ("hugetlb_bytes", hugetlb)])
    }
}

/// A new folder, which is removed when this process has ended, however it did: by a shell that makes it, and hears no signal of
/// the terminal.
fn swept(mode: &str) -> Result<(PathBuf, Talk), Error> {
    // A server that has not ended yet goes on to write.
    let script =
        "trap '' HUP INT QUIT TERM PIPE; mkdir -m \"$1\" \"$0\" || exit; echo true; read end
        until rm -rf \"$0\" 2>/dev/null; do sleep 0.1; done";
    let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    let name = format!("jumbo-bench-{}-{}", std::process::id(), since.as_nanos());
    let folder = on_disk().join(name);
    let mut command = Command::new("sh");
    command.args(["-c", script]).arg(&folder).arg(mode);
    let mut broom = Talk::start(command, Stdio::piped())?;
    broom.hear::<bool>()?;
    Ok((folder, broom))
}

/// The newest installed version's commands.
fn newest() -> Option<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").ok()?;
    let version = |path: &PathBuf| path.file_name()?.to_str()?.parse::<u32>().ok();
    let versions = versions.filter_map(|version| Some(version.ok()?.path()));
    let newest = versions.filter(|path| path.join("bin/pgbench").exists());
    Some(newest.max_by_key(version)?.join("bin"))
}
