//! `jumbo plan postgres`: the main shared memory segment.

use std::fs::{self, File};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};
use jumbo::units::{Bytes, PageSize};

use crate::value::size_with_unit;

use super::sizing::{PageKind, PlannedMapping, Workload};
use crate::planned::all;

/// Plan the shared memory of PostgreSQL
///
/// Shared memory is more than shared_buffers: descriptors of buffers, the buffer of the WAL, and
/// some 50 KiB for each connection. The estimate is for PostgreSQL 15 with other settings at their
/// defaults, and at most 4 MiB or 0.3 % too large. With --data the program itself computes it.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(after_help = "Examples:
  jumbo plan postgres --shared-buffers 200G --connections 500
  jumbo plan postgres --data /var/lib/postgresql/15/main
  jumbo plan postgres --shared-buffers 200G --nodes 2 --for tmpfiles")]
pub(super) struct Args {
    /// shared_buffers, such as 200G; with --data that of its configuration if not given
    #[arg(long, value_name = "SIZE", value_parser = size_with_unit, required_unless_present = "data")]
    pub(super) shared_buffers: Option<Bytes>,

    /// max_connections
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=262_143))]
    pub(super) connections: Option<u32>,

    /// Ask `postgres -C` (15 or later) about the data directory DIR, whose server is stopped
    #[arg(long, value_name = "DIR")]
    pub(super) data: Option<PathBuf>,

    /// The program for --data; else one of PATH, /usr/lib/postgresql and /usr/pgsql-*
    #[arg(long, value_name = "FILE", requires = "data")]
    pub(super) program: Option<PathBuf>,

    /// Shared memory of a running server.
    #[arg(skip)]
    pub(super) measured: Option<Bytes>,
}

/// Maximum shared memory of PostgreSQL 15 with default settings (`CalculateShmemSize`).
fn estimate(buffers: Bytes, connections: u32) -> Bytes {
    const BLCKSZ: u64 = 8 << 10;
    let blocks = buffers.0 / BLCKSZ;
    // bufmgr: a descriptor (64), a condition variable (16), an entry to sort at a checkpoint (20)
    // and one in the hash table (16 of header, 24 of tag and number); checkpointer: a request (24;
    // releases since 2025 stop at 10 million).
    let each = 64 + 16 + 20 + 40 + 24;
    // The hash table has a power of two of buckets, a pointer each, for blocks and 128 partitions,
    // and a directory with a pointer for 256 of them.
    let buckets = (blocks + 128).next_power_of_two() * 8;
    let buckets = buckets + buckets / 256;
    // xlog: wal_buffers = -1 is a 32nd, up to a segment. clog, commit_ts: up to 128 and 256 pages.
    let wal = (buffers.0 / 32).min(16 << 20);
    let slru = ((blocks / 512).min(128) + (blocks / 256).min(256)) * BLCKSZ;
    // Locks, predicate locks, PGPROC, status: per connection, and for 22 backends of autovacuum,
    // workers and WAL senders; measured: 47 to 49 KiB.
    let backends = (u64::from(connections) + 22) * (49 << 10);
    let fixed = 3 << 20;
    let parts = [
        blocks.saturating_mul(each),
        buckets,
        wal,
        slru,
        backends,
        fixed,
    ];
    buffers + parts.into_iter().map(Bytes).sum()
}

/// Installed programs, the newest first.
fn programs() -> Vec<PathBuf> {
    let mut found: Vec<(u32, PathBuf)> = Vec::new();
    for (folder, prefix) in [("/usr/lib/postgresql", ""), ("/usr", "pgsql-")] {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        found.extend(entries.filter_map(|entry| {
            let version = entry
                .file_name()
                .to_str()?
                .strip_prefix(prefix)?
                .parse()
                .ok()?;
            Some((version, entry.path().join("bin/postgres")))
        }));
    }
    found.retain(|(_, program)| program.is_file());
    found.sort_by(|a, b| b.cmp(a));
    let found = found.into_iter().map(|(_, program)| program);
    found.chain([PathBuf::from("postgres")]).collect()
}

impl Args {
    /// Runs `postgres -C NAME` and returns the value.
    fn ask(&self, program: &Path, data: &Path, name: &str) -> anyhow::Result<String> {
        let mut command = Command::new(match program.components().count() {
            1 => program.to_owned(),
            _ => std::path::absolute(program)?,
        });
        // Opened once: its owner could put a link to a folder of another user in its place.
        let folder = File::options()
            .read(true)
            .custom_flags(libc::O_PATH | libc::O_DIRECTORY)
            .open(data);
        let cannot = || format!("cannot read {}", data.display());
        let folder = folder.with_context(cannot)?;
        let owner = folder.metadata().with_context(cannot)?;
        // -C must be first: only then root may call it.
        command
            .args(["-C", name, "-D", "."])
            .current_dir(format!("/proc/self/fd/{}", folder.as_raw_fd()))
            .env("LC_ALL", "C");
        // It runs as the owner of the data, because the configuration may load libraries.
        if rustix::process::geteuid().is_root() {
            if owner.uid() == 0 {
                bail!(
                    "{} belongs to root, as which no server runs\nhint: chown it to the server's user",
                    data.display()
                );
            }
            command.uid(owner.uid()).gid(owner.gid());
        }
        if let Some(size) = self.shared_buffers {
            command.args(["-c", &format!("shared_buffers={}kB", size.0 >> 10)]);
        }
        if let Some(connections) = self.connections {
            command.args(["-c", &format!("max_connections={connections}")]);
        }
        let output = command
            .output()
            .with_context(|| {
                let hint = "hint: --program names the server's program, such as /usr/lib/postgresql/15/bin/postgres";
                format!("cannot start {}\n{hint}", program.display())
            })?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        if !output.status.success() {
            let message = text(&output.stderr);
            let hint = match message.contains("is running") || message.contains("lock file") {
                true => "\nhint: `jumbo plan --pid PID` reads a server that runs",
                false => {
                    "\nhint: --program names the program of the version that made the data directory"
                }
            };
            bail!("{} -C {name}: {message}{hint}", program.display());
        }
        Ok(text(&output.stdout))
    }

    /// Size of shared memory, shared_buffers, and the source of both.
    fn sizes(&self) -> anyhow::Result<(Bytes, Option<Bytes>, String)> {
        if let Some(size) = self.measured {
            return Ok((
                size,
                self.shared_buffers,
                "the shared mapping of the process".into(),
            ));
        }
        let Some(data) = &self.data else {
            let buffers = self.shared_buffers.unwrap_or_default();
            let size = estimate(buffers, self.connections.unwrap_or(100));
            let source = "an estimate for PostgreSQL 15; --data has the program compute it";
            return Ok((size, Some(buffers), source.into()));
        };
        let mut failed = None;
        for program in self
            .program
            .clone()
            .map_or_else(programs, |program| vec![program])
        {
            let asked = self
                .ask(&program, data, "shared_memory_size")
                .and_then(|size| {
                    let buffers = self.ask(&program, data, "shared_buffers")?;
                    Ok((size, buffers))
                });
            match asked {
                Ok((size, blocks)) => {
                    let number = |text: &str| -> anyhow::Result<u64> {
                        let number = text.parse();
                        number.with_context(|| {
                            format!("{}: `{text}` is no number", program.display())
                        })
                    };
                    // In MB and in blocks of 8 KiB, without a unit.
                    let (size, blocks) = (number(&size)?, number(&blocks)?);
                    let source = format!("{} -C shared_memory_size", program.display());
                    return Ok((Bytes(size << 20), Some(Bytes(blocks << 13)), source));
                }
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        Err(failed.context("there is no program to ask")?)
    }

    pub(super) fn workload(&self, page: Option<PageSize>) -> anyhow::Result<Workload> {
        let (size, buffers, source) = self.sizes()?;
        let mut workload = Workload::new(
            "postgres",
            PageKind::Mapped,
            page,
            vec![PlannedMapping::new("shared memory", size)],
        );
        workload.unit = "postgresql@.service".into();
        workload.source = source;
        workload.template = include_str!("templates/postgres.txt");
        workload.values = vec![
            ("shared", all([size])),
            ("shared_buffers", all(buffers.map(|size| size.0 >> 20))),
            ("connections", all(self.connections)),
        ];
        workload.notes = vec![String::from(
            "work_mem and maintenance_work_mem are of each backend and no hugetlb pages: \
             `jumbo unit --profile postgresql postgresql@` puts them on THPs",
        )];
        Ok(workload)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values in MB of `postgres -C shared_memory_size` of PostgreSQL 15.18.
    #[test]
    fn the_estimate_is_a_tight_upper_bound() {
        for (connections, buffers, measured) in [
            (10, 16, 20),
            (10, 64, 71),
            (10, 512, 546),
            (10, 2 << 10, 2116),
            (10, 200 << 10, 208_809),
            (100, 64, 75),
            (100, 128, 143),
            (100, 512, 551),
            (100, 2 << 10, 2120),
            (100, 8 << 10, 8399),
            (100, 32 << 10, 33_516),
            (50, 64 << 10, 67_002),
            (100, 200 << 10, 208_813),
            (100, 1 << 20, 1_068_808),
            (1000, 16, 65),
            (1000, 512, 592),
            (1000, 200 << 10, 208_854),
            (5000, 16, 259),
            (5000, 2 << 10, 2355),
            (5000, 1 << 20, 1_069_043),
        ] {
            // The program rounds up to a megabyte.
            let planned = estimate(Bytes(buffers << 20), connections)
                .0
                .div_ceil(1 << 20);
            let max = measured + measured * 3 / 100 + 3;
            assert!(
                (measured..=max).contains(&planned),
                "{connections} {buffers}: {planned} for {measured}"
            );
        }
    }
}
