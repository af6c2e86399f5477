//! `jumbo bench programs`: a row for each program, a column for each way to start it.

use std::time::Duration;

use clap::builder::PossibleValuesParser;
use jumbo_bench::program::Way;
use jumbo_bench::program::verdict::Change;
use jumbo_bench::table::{Missing, Table};
use jumbo_bench::{Error, Settings, programs};

use super::{Common, render};
use crate::view::{View, duration};

/// Programs that are not installed are left out, with what installs them; `jumbo compare` is for
/// your own.
///
/// With --quick each has little to do: one program takes up to a minute, all of them many. Without,
/// all programs in all modes take hours: name some of them.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    pub(super) common: Common,
    /// Modes of jumbo, as `jumbo compare` has them [default: default,glibc; default with --quick]
    #[arg(long, value_name = "MODE,...", value_delimiter = ',', hide_possible_values = true,
        value_parser = PossibleValuesParser::new(Way::modes()))]
    modes: Vec<String>,
    /// Alternatives to jumbo: tunable (glibc's hugetlb=1), jemalloc, tcmalloc, mimalloc [default: all; none with --quick]
    #[arg(long, value_name = "PEER,...", value_delimiter = ',', hide_possible_values = true,
        value_parser = PossibleValuesParser::new(Way::peers()))]
    peers: Vec<String>,
    /// Programs to run [default: all]
    #[arg(value_name = "NAME", value_parser = PossibleValuesParser::new(programs::names().map(|(name, _)| name)))]
    names: Vec<String>,
}

impl Args {
    pub(super) fn measure(&self, settings: &Settings) -> Result<Table, Error> {
        let (ways, missing) = self.ways()?;
        let mut table = programs::measure(settings, &self.names, &ways, self.common.quick)?;
        table.missing.extend(missing);
        Ok(table)
    }

    pub(super) fn show(&self, view: &mut View, table: &Table) {
        // The same as were measured.
        let (ways, _) = self.ways().unwrap_or_default();
        view.line(render::title(table));
        view.line(render::machine(&table.machine));
        view.line("");
        let names = ways
            .iter()
            .map(|way| way.name.trim_start_matches("jumbo run --"));
        let names: Vec<_> = names.map(|name| format!("|>{name}")).collect();
        let measured =
            programs::names().filter(|(key, _)| table.ratio_of(&format!("{key}_aa")).is_some());
        let rows = measured.map(|(key, what)| row(table, &ways, key, what));
        view.table(
            &format!("<program|<|>plain|>plain again{}|>memory", names.concat()),
            rows,
        );
        view.line("");
        view.line("  Plain time / that of the column: above 1 the column is faster. Memory: plain / the first column.");
        view.line("  In brackets: within what plain differs by from itself. LOSS: slower, or larger, than that.");
        view.line("  FAILED: the program failed in that way, and not plain; why is below.");
        for missing in &table.missing {
            view.line(format!("  Not measured: {}: {}", missing.what, missing.why));
        }
    }

    /// Selected ways, and the peers that are not installed.
    fn ways(&self) -> Result<(Vec<Way>, Vec<Missing>), Error> {
        let modes: Vec<_> = match (self.modes.is_empty(), self.common.quick) {
            (false, _) => Way::modes()
                .filter(|name| self.modes.iter().any(|asked| asked == name))
                .collect(),
            (true, false) => vec!["default", "glibc"],
            (true, true) => vec!["default"],
        };
        let (peers, missing) = match (self.peers.is_empty(), self.common.quick) {
            (false, _) => Way::peers_of(&self.peers),
            (true, false) => Way::peers_of(&Way::peers().collect::<Vec<_>>()),
            (true, true) => (Vec::new(), Vec::new()),
        };
        let mut ways = modes
            .into_iter()
            .map(Way::mode)
            .collect::<Result<Vec<_>, _>>()?;
        ways.extend(peers);
        Ok((ways, missing))
    }
}

fn row(table: &Table, ways: &[Way], key: &str, what: &str) -> Vec<String> {
    let plain = table.value_of(&format!("{key}_plain_time_ms"));
    let plain = plain.and_then(|time| Duration::try_from_secs_f64(time.median / 1e3).ok());
    let again = table.ratio_of(&format!("{key}_aa"));
    let again = again.map(|again| format!("{:.2} to {:.2}", again.min, again.max));
    let cell = |row: &str, aa: &str| {
        // Plain succeeded: only this way failed.
        let Some(ratio) = table.ratio_of(row) else {
            return "FAILED".to_owned();
        };
        match Change::of(table, row, aa) {
            Change::None { .. } => format!("({:.2})", ratio.median),
            Change::More { .. } => format!("{:.2} LOSS", ratio.median),
            _ => format!("{:.2}", ratio.median),
        }
    };
    let mut cells = vec![
        key.to_owned(),
        what.to_owned(),
        plain.map(duration).unwrap_or_default(),
        again.unwrap_or_default(),
    ];
    cells.extend(
        ways.iter()
            .map(|way| cell(&way.row(key), &format!("{key}_aa"))),
    );
    let first = ways.first().map(|way| way.row(key)).unwrap_or_default();
    cells.push(cell(&format!("{first}_rss"), &format!("{key}_rss_aa")));
    cells
}
