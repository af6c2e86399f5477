//! `jumbo export`: metrics for Prometheus, once or over HTTP.
//!
//! - [`metrics`]: metrics, samples, and the bound on their number.
//! - [`host`], [`programs`]: sources of the samples. [`serve`]: HTTP.
//!
//! By design no label is a PID, and no series belongs to one process: their number would grow
//! without bound. The name of a transient unit may contain a PID (`run-p4711-i4812.service`);
//! `--max-series` bounds these.

mod host;
mod metrics;
mod programs;
mod serve;

use std::fmt::Display;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context as _;
use jumbo_host::kernel::{FileError, Root};
use jumbo_host::whole_file::{self, Existing};

use crate::value::whole;
use crate::view::Stdout;
use metrics::Metrics;

/// Metrics for Prometheus: host, control groups, covered programs
///
/// In the text format of Prometheus, on standard output. docs/export.md names all metrics.
/// Processes that this user may not examine are counted, and left out.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo export
  jumbo export --textfile /var/lib/prometheus/node-exporter/jumbo.prom
  jumbo export --listen 127.0.0.1:9841

Exit status: 0 done, or ended by SIGINT or SIGTERM; 1 failed; 2 wrong usage.")]
pub(crate) struct Args {
    /// Write this file atomically: for the textfile collector of node_exporter,
    /// which reads *.prom
    #[arg(long, value_name = "FILE", conflicts_with = "listen")]
    textfile: Option<PathBuf>,

    /// Serve GET /metrics at this address until SIGINT or SIGTERM; port 0 is
    /// any free one
    #[arg(long, value_name = "ADDR:PORT", value_parser = address)]
    listen: Option<SocketAddr>,

    /// Maximum number of series. The smallest programs beyond are summed up under
    /// comm="other", groups under unit="other"; those of the host always stay
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = whole::<usize>,
        allow_negative_numbers = true)]
    max_series: usize,
}

/// Parses an address with a port; a bare port names the address that is probably meant.
fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        let port = text.trim_start_matches(':').parse::<u16>();
        let port = port.map_or_else(|_| String::from("9841"), |port| port.to_string());
        format!(
            "expected an address and a port: 127.0.0.1:{port} for clients of this host, 0.0.0.0:{port} for all"
        )
    })
}

pub(crate) fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let root = Root::host();
    if let Some(address) = args.listen {
        return serve::until_ended(address, |max| text(&Root::host(), max), args.max_series);
    }
    let text = text(&root, args.max_series)?;
    match &args.textfile {
        None => {
            let mut out = Stdout::lock();
            out.write_all(text.as_bytes())?;
            out.flush()?;
        }
        Some(path) => {
            let written = whole_file::write(path, text.as_bytes(), 0o644, Existing::Publish);
            written.with_context(|| {
                let path = path.display();
                format!("cannot write {path}\nhint: name a regular file, or a new one, in a folder that takes new files")
            })?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Sources that could not be read.
#[derive(Debug, Default)]
struct Failures(Vec<&'static str>);

impl Failures {
    /// Returns the value; after an error the default, and `what` is recorded.
    fn or_default<T: Default>(&mut self, read: Result<T, FileError>, what: &'static str) -> T {
        read.unwrap_or_else(|_| {
            self.0.push(what);
            T::default()
        })
    }
}

fn label(name: &'static str, value: impl Display) -> (&'static str, String) {
    (name, value.to_string())
}

/// Gauges of the export itself.
const OWN_GAUGES: &str = "\
jumbo_build_info            -       The version of jumbo
jumbo_export_dropped_series -       Series beyond --max-series, which were summed up
jumbo_export_failed         -       1 for each source that could not be read
jumbo_export_duration       seconds The time that reading all of this took";

fn text(root: &Root, max_series: usize) -> anyhow::Result<String> {
    let begin = Instant::now();
    let (mut page, mut failures) = (Metrics::default(), Failures::default());
    host::add(&mut page, root, &mut failures);
    // Three series follow the programs and groups.
    let room = max_series.saturating_sub(3);
    let dropped = programs::add(&mut page, root, room, &mut failures);
    let version = vec![label("version", env!("CARGO_PKG_VERSION"))];
    let failed = failures.0.iter();
    let failed = failed.map(|what| (vec![label("what", what)], 1.0));
    let own = [
        vec![(version, 1.0)],
        vec![(vec![], dropped as f64)],
        failed.collect(),
        vec![(vec![], begin.elapsed().as_secs_f64())],
    ];
    page.each(OWN_GAUGES, own);
    page.text().context("cannot encode the metrics")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_without_an_address_names_the_address_that_is_meant() {
        for typed in ["9842", ":9842"] {
            let error = address(typed).unwrap_err();
            assert!(
                error.contains("127.0.0.1:9842 for clients of this host"),
                "{error}"
            );
        }
        assert!(address("localhost").unwrap_err().contains("127.0.0.1:9841"));
        assert_eq!(address("[::1]:9841"), Ok("[::1]:9841".parse().unwrap()));
    }
}
