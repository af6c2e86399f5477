//! A table for people: baseline and candidate side by side, each with its spread.

use std::io;

use jumbo::units::Bytes;
use jumbo_bench::machine::Machine;
use jumbo_bench::stats::Spread;
use jumbo_bench::table::{Comparison, Row, Side, Table, Unit, Verdict};

use crate::view::{Align, View};

/// Shows `table`, with a line about the machine above and two about reading it below.
pub(super) fn show(view: &mut View, table: &Table) -> io::Result<()> {
    view.line(table.title())?;
    view.line(machine(table.machine()))?;
    view.line("")?;
    view.table(
        [
            ("measure", Align::Left),
            ("baseline", Align::Left),
            ("", Align::Right),
            ("compared", Align::Left),
            ("", Align::Right),
            ("difference", Align::Right),
            ("", Align::Left),
            ("published", Align::Left),
        ],
        table.rows().iter().map(cells),
    )?;
    view.line("")?;
    view.line("  Median [least to most] of the rounds. A ratio is baseline / compared: above 1x compared is ahead.")?;
    view.line("  Ahead, BEHIND: in every round; even: the rounds do not agree. A/A: the baseline against itself.")
}

fn machine(machine: &Machine) -> String {
    let thp = match machine.thp.get("enabled") {
        Some(value) => format!("THP {value}"),
        None => "no THP".to_owned(),
    };
    format!(
        "{}, {} cores, {}, Linux {}, {thp}, load {:.1} before",
        machine.cpu.as_deref().unwrap_or("unknown processor"),
        machine.cores,
        machine.ram,
        machine.kernel,
        machine.load
    )
}

fn cells(row: &Row) -> [String; 8] {
    let side = |side: &Side| {
        (
            side.name.to_owned(),
            spread(side.spread, |value| figure(value, row.unit)),
        )
    };
    let (baseline, candidate) = (side(&row.baseline), side(&row.candidate));
    let comparison = match row.comparison {
        Comparison::Ratio(ratio) => spread(ratio, |value| format!("{value:.2}x")),
        Comparison::Difference(difference) => spread(difference, |value| signed(value, row.unit)),
    };
    [
        row.measure.to_owned(),
        baseline.0,
        baseline.1,
        candidate.0,
        candidate.1,
        comparison,
        match row.verdict {
            Verdict::Ahead => "ahead",
            Verdict::Even => "even",
            Verdict::Behind => "BEHIND",
        }
        .to_owned(),
        row.published.unwrap_or_default().to_owned(),
    ]
}

fn spread(spread: Spread, show: impl Fn(f64) -> String) -> String {
    format!(
        "{} [{} to {}]",
        show(spread.median),
        show(spread.min),
        show(spread.max)
    )
}

/// Three digits are what such measurements carry.
fn figure(value: f64, unit: Unit) -> String {
    let digits = if value.abs() < 9.995 {
        2
    } else if value.abs() < 99.95 {
        1
    } else {
        0
    };
    match unit {
        Unit::Ms => format!("{value:.digits$} ms"),
        Unit::Ns => format!("{value:.digits$} ns"),
        Unit::Bytes => bytes(value),
    }
}

fn signed(value: f64, unit: Unit) -> String {
    let sign = if value < 0.0 { '-' } else { '+' };
    format!("{sign}{}", figure(value.abs(), unit))
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a number of bytes, rounded; the cast saturates"
)]
fn bytes(value: f64) -> String {
    Bytes(value.round() as u64).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_carry_three_digits_and_a_unit() {
        assert_eq!(figure(1402.4, Unit::Ms), "1402 ms");
        assert_eq!(figure(14.02, Unit::Ms), "14.0 ms");
        assert_eq!(figure(1.402, Unit::Ns), "1.40 ns");
        assert_eq!(figure(3.0 * 1024.0, Unit::Bytes), "3 KiB");
        assert_eq!(signed(-0.25, Unit::Ms), "-0.25 ms");
        assert_eq!(signed(0.25, Unit::Ms), "+0.25 ms");
    }

    #[test]
    fn a_row_shows_both_sides_and_a_loss_in_capitals() {
        let what = ("startup_ms", "start", Unit::Ms);
        let row = Row::difference(what, ("direct", &[1.0, 1.0]), ("jumbo run", &[3.0, 4.0]));
        assert_eq!(
            cells(&row.published("2 ms")),
            [
                "start",
                "direct",
                "1.00 ms [1.00 ms to 1.00 ms]",
                "jumbo run",
                "3.50 ms [3.00 ms to 4.00 ms]",
                "+2.50 ms [+2.00 ms to +3.00 ms]",
                "BEHIND",
                "2 ms"
            ]
        );
    }
}
