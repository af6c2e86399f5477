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

use jumbo::units::{Bytes, Pages};
use jumbo_host::kernel::Root;
use jumbo_host::kernel::hugetlb::Pool;
use jumbo_host::kernel::memory::Memory;

use crate::claim::{self, Claim};
use crate::figures::{Figures, figures, with};
use crate::keeper::kernel_pool;
use crate::launch::Launch;
use crate::memory::{LIBRARIES, libraries};
use crate::program::{Running, Server};
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

/// The size of a `pgbench` database for one of its scale, with the index.
const OF_SCALE: u64 = 15 << 20;

/// How many queries a sample is for each MiB of buffers, and the clients that send them.
const QUERIES: u64 = 100;
const CLIENTS: u64 = 4;

/// Brings all of the database into the server's buffers.
const PREWARM: &str = "psql -X -v ON_ERROR_STOP=1 \
    -c \"select pg_prewarm('pgbench_accounts'), pg_prewarm('pgbench_accounts_pkey')\"";

/// How long collapsing what the server touched may take: longer than between two looks of a process
/// that has nothing to do.
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
        database.run(Command::new(&database.jumbo).arg("--version"))?;
        let options = "--pgdata=data --auth=trust --no-sync --locale=C --username=postgres";
        let initdb = database.bin.join("initdb");
        database.run(Command::new(initdb).args(options.split(' ')))?;
        let scale = size.0 / 4 * 3 / OF_SCALE + 1;
        let fill = format!(
            "pgbench --initialize --quiet --unlogged-tables --scale={scale} && \
             psql -X -v ON_ERROR_STOP=1 -c 'create extension pg_prewarm'"
        );
        let server = database.start(settings, Buffers::Plain, &fill)?;
        server.stop()?;
        server.reap()?;
        Ok(database)
    }

    /// The pool's pages that the server takes for all of its shared memory: its buffers, what describes them, and the rest.
    pub(super) fn shared(&self) -> Bytes {
        Bytes(self.size.0 + self.size.0 / 8 + (64 << 20))
    }

    /// A server, and what a query takes it with all of the database in its buffers.
    pub(super) fn sample(&self, settings: &Settings, buffers: Buffers) -> Result<Figures, Error> {
        let root = Root::host();
        let before = Shared::read(&root)?;
        let server = self.start(settings, buffers, PREWARM)?;
        let claims = buffers.claims(self.size);
        let clock = Instant::now();
        let figures = loop {
            let libraries = [(LIBRARIES, libraries(&root, server.pid())?)];
            let figures = with(Shared::read(&root)?.since(&before), libraries);
            // What is touched is collapsed a moment later.
            match claim::check(&claims, &buffers.launch(), &figures) {
                Ok(()) => break figures,
                Err(error) if buffers != Buffers::Jumbo || clock.elapsed() > PATIENCE => {
                    return Err(error);
                }
                Err(_) => std::thread::sleep(PAUSE),
            }
        };
        let each = (self.size.0 >> 20) * QUERIES / CLIENTS;
        let load = self.client(&format!(
            "pgbench --select-only --protocol=prepared --no-vacuum --jobs=2 --client={CLIENTS} \
             --transactions={each}"
        ));
        let (_, served) = Server::default().loaded(&load, &server, Some(&self.folder))?;
        server.stop()?;
        server.reap()?;
        let rate = served.and_then(|served| served.throughput);
        let rate = rate.ok_or_else(|| Error::Corrupt("pgbench names no rate".to_owned()))?;
        Ok(with(figures, [("query_us", 1e6 / rate)]))
    }

    /// A server that answers, and is filled by a script.
    fn start(&self, settings: &Settings, buffers: Buffers, fill: &str) -> Result<Running, Error> {
        let program = self.bin.join("postgres");
        let mut command = buffers.launch().command(&self.jumbo, program.as_os_str());
        let own = if buffers == Buffers::Own { "on" } else { "off" };
        let size = format!("shared_buffers={}kB", self.size.0 >> 10);
        command.args(["-D", "data", "-k"]).arg(&self.folder);
        for set in [
            "listen_addresses=",
            "fsync=off",
            "autovacuum=off",
            "jit=off",
            &size,
        ] {
            command.args(["-c", set]);
        }
        command.args(["-c", &format!("huge_pages={own}")]);
        let server = Running::start(&Root::host(), self.as_user(&command))?;
        let serves = Server {
            ready: Some(self.client("pg_isready --quiet")),
            setup: Some(self.client(fill)),
            ..Server::default()
        };
        match serves.prepare(settings, &server, Some(&self.folder), &mut || PAUSE) {
            Ok(()) => Ok(server),
            Err(error) => Err(server.blame(error)),
        }
    }

    /// A script in which PostgreSQL's commands talk to the server of the folder in which it runs.
    fn client(&self, script: &str) -> String {
        let bin = self.bin.display();
        let server = "PGHOST=\"$PWD\" PGUSER=postgres PGDATABASE=postgres";
        format!("export {server} PATH=\"{bin}:$PATH\"; {script}")
    }

    /// Runs a command to its end.
    fn run(&self, command: &Command) -> Result<(), Error> {
        let running = Running::start(&Root::host(), self.as_user(command))?;
        running.succeed(&mut || PAUSE).map(drop)
    }

    /// The same command in the folder, as the user who may, and ended with this process.
    fn as_user(&self, command: &Command) -> Command {
        let mut whole = Command::new("setpriv");
        whole.args(["--pdeathsig", "INT"]);
        if let Some(user) = self.user {
            whole.args(["--reuid", user, "--regid", user, "--init-groups"]);
        }
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        whole.arg("--").args(words).stdin(Stdio::null());
        // No side sets a variable.
        for (name, _) in command.get_envs() {
            whole.env_remove(name);
        }
        whole.current_dir(&self.folder);
        whole
    }
}

/// The shared memory of all programs, and their pages of the kernel's pool.
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
