//! The output of a [`Report`], and its JSON format (docs/report.md).

use std::io::{self, Write as _};

use jumbo::units::Bytes;
use jumbo_host::policy::{HeapMode, MaxWaste};
use jumbo_host::status::{KindUsage, Usage};
use jumbo_host::whole_file;
use jumbo_inside::ledger::{Counts, flag};
use serde_json::{Value, json};

use super::args::{Destination, ReportRequest};
use super::options::ReportFormat;
use super::outcome::{KINDS, Report, has, pool_reasons, status};
use super::segments;
use super::shmem;
use super::shortfall;
use super::text;
use crate::view::escaped;

impl Report<'_> {
    fn json(&self) -> Value {
        let (settings, outcome, counted) = (self.settings, &self.outcome, &self.counted);
        let (requested, total, pool) = (&settings.requested, &counted.total, self.pool());
        let command = settings.command.iter().map(|arg| arg.to_string_lossy());
        let heap = outcome.heap();
        let processes = outcome.peak.iter().flat_map(|peak| &peak.processes);
        let process = |process: &super::sample::ProcessSample| {
            let mut row = json!({"pid": process.pid, "comm": process.name});
            add_kinds(&mut row, &process.usage);
            row["ledger"] =
                json!((counted.by_pid.get(&process.pid)).map(|counts| counts_json(counts, None)));
            row
        };
        let reapers = counted.reapers.iter().map(|(state, counts)| {
            json!({
                "pid": counts.pid,
                "reaper_pid": counts.reaper_pid,
                "state": state.name(),
                "reason": state.text(),
                "freed": counts.reaper_freed,
            })
        });
        json!({
            "program": command.collect::<Vec<_>>(),
            "pid": outcome.pid,
            "summary": text::headline(self),
            "mode": "parent",
            "exit": match status(outcome.end.change) {
                Ok(code) => json!({"code": code}),
                Err(signal) => json!({"signal": signal}),
            },
            "wall_seconds": outcome.wall.as_secs_f64(),
            "reach": {
                "reached": self.reached,
                "reason": (!self.reached).then(|| shortfall::unreached(self.launch)),
            },
            "outside": match &outcome.outside {
                Some(Err(reason)) => json!({"reason": reason}),
                promoted => json!(promoted.as_ref().and_then(|promoted| promoted.as_ref().ok())),
            },
            "peak": outcome.peak.as_ref().map(|peak| {
                let mut kinds = json!({});
                add_kinds(&mut kinds, &peak.usage);
                kinds
            }),
            "processes": processes.map(process).collect::<Vec<_>>(),
            "sampled": outcome.sampled,
            "max_rss": outcome.end.faults.max_rss,
            "faults": {"minor": outcome.end.faults.minor, "major": outcome.end.faults.major},
            // Requests to jumbo, and of jumbo to the kernel.
            "requested": {
                "heap": requested.heap != HeapMode::Off,
                "pool": pool,
                "overcommit": pool.map_or(Bytes(0), |pool| pool.overcommit),
                "warm": pool.is_some_and(|pool| pool.warm),
                "maps": requested.maps,
                "max_waste": match requested.max_waste {
                    MaxWaste::Percent(percent) => json!(percent),
                    MaxWaste::Unbounded => json!("unbounded"),
                },
                "first_touch": if requested.huge_at_once { "huge" } else { "auto" },
                "keep": requested.keep.map(|keep| keep.to_string()),
                "text": requested.text,
                "data": requested.data,
                "files": requested.files,
                "shm": requested.shm,
                "follow": requested.follow,
                "free": requested.free,
                "reaper": requested.reaper,
                "advised": total.advised,
                "large_calls": total.large_calls,
            },
            "obtained": {
                "huge": heap.as_ref().map(|heap| heap.huge),
                "huge_share": heap.as_ref().and_then(KindUsage::huge_share),
                "images": counted.images,
                "ledger": counts_json(total, counted.run_pool_peak),
                "text": segments::json(self),
                "shmem": shmem::json(self),
                "reapers": reapers.collect::<Vec<_>>(),
            },
            "shortfalls": self.shortfalls,
        })
    }

    pub(super) fn write(&self, request: &ReportRequest) -> io::Result<()> {
        let text = match request.format {
            ReportFormat::Json => format!("{}\n", escaped(format!("{:#}", self.json()))),
            format => text::render(self, format == ReportFormat::Full),
        };
        match &request.destination {
            Destination::File(file) => whole_file::write_in_place(file, text.as_bytes(), 0o666),
            Destination::Stderr => io::stderr().lock().write_all(text.as_bytes()),
            Destination::Stdout => {
                let mut stdout = io::stdout().lock();
                stdout.write_all(text.as_bytes())?;
                stdout.flush()
            }
        }
    }
}

fn counts_json(of: &Counts, run_pool_peak: Option<Bytes>) -> Value {
    let mut pool = json!({
        "hugetlb": of.pool_hugetlb_peak,
        "thp": of.pool_thp_peak,
        "beyond": of.pool_beyond,
        "moved": of.pool_moved,
        "stuck": of.pool_stuck,
    });
    if let Some(run) = run_pool_peak {
        pool["run"] = json!(run);
    }
    pool["reasons"] = json!(pool_reasons(of));
    json!({
        "malloc_diverted": has(of, flag::MALLOC),
        "slabs_serve": has(of, flag::SLABS),
        "maps_covered": has(of, flag::MAPS),
        "large_peak": of.large_peak,
        "large_calls": of.large_calls,
        "large_fallback": of.large_fallback,
        "advised": of.advised,
        "untouched": of.untouched,
        "refused": of.refused,
        "maps_advised": of.maps_advised,
        "maps_left": of.maps_left,
        "files_advised": of.files_advised,
        "collapsed": of.collapsed,
        "first_touch": {
            "costly": of.costly,
            "huge_ns": of.touch_huge_ns,
            "base_ns": of.touch_base_ns,
        },
        "free": {
            "gathered": of.free_gathered,
            "inline": of.free_inline,
            "background": of.free_background,
            "workers": of.free_workers,
            "waits": of.free_waits,
        },
        "populate": { "bytes": of.populated, "workers": of.populate_workers },
        "pool": pool,
    })
}

/// Adds a field for each kind of memory.
fn add_kinds(row: &mut Value, usage: &Usage) {
    for kind in KINDS {
        let usage = usage.kind(kind);
        row[kind.name()] = json!(usage);
        row[kind.name()]["huge_share"] = json!(usage.huge_share());
    }
}
