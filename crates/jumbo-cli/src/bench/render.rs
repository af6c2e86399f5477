//! Text output of a table: baseline and candidate side by side, each with its spread.

use jumbo::units::counted;
use jumbo_bench::machine::Machine;
use jumbo_bench::stats::Spread;
use jumbo_bench::table::{Comparison, Row, Side, Table};

use crate::view::View;

/// Shows `table`, with the machine above and the explanation below.
pub(super) fn show(view: &mut View, table: &Table) {
    view.line(title(table));
    view.line(machine(&table.machine));
    view.line("");
    view.table(
        "<measure|<baseline|>|<compared|>|>difference|<|<published",
        table.rows.iter().map(cells),
    );
    let beside: Vec<_> = table.beside().map(beside).collect();
    if !beside.is_empty() {
        view.line("");
        view.table("<value|<", beside);
    }
    view.line("");
    view.line("  Median [least to most] of the rounds. A ratio is baseline / compared: above 1x compared is ahead.");
    view.line("  No difference seen: the spread is larger. A/A: the baseline against itself.");
    let hit = table.hit;
    view.line(format!(
        "  Each sample had its memory touched right before. {} of {} waited for the host all the same: taken again. Kept: {}.",
        counted(hit.taken_again as u64, "sample"), hit.samples + hit.taken_again, hit.kept
    ));
    for missing in &table.missing {
        view.line(format!("  Not measured: {}: {}", missing.what, missing.why));
    }
}

/// Name and value of a figure without a comparison.
pub(crate) fn beside((name, figure, unit): (&str, Spread, &'static str)) -> [String; 2] {
    let (divisor, unit) = scale(unit);
    let figure = spread(figure, &unit, |value| digits(value / divisor));
    [name.to_owned(), figure]
}

/// Name, contents and rounds of the table.
pub(crate) fn title(table: &Table) -> String {
    let rounds = counted(table.rounds as u64, "round");
    format!("{}: {}, {rounds}", table.table, table.what)
}

pub(super) fn machine(machine: &Machine) -> String {
    let thp = match machine.thp.get("enabled") {
        Some(value) => format!("THP {value}"),
        None => "no THP".to_owned(),
    };
    format!(
        "{}, {}, {}, Linux {}, {thp}, load {:.1} before",
        machine.cpu.as_deref().unwrap_or("unknown processor"),
        counted(machine.cores as u64, "core"),
        machine.ram,
        machine.kernel,
        machine.load
    )
}

pub(crate) fn cells(row: &Row) -> [String; 8] {
    let (divisor, unit) = scale(row.what.unit);
    let side = |side: &Side| spread(side.spread, &unit, |value| digits(value / divisor));
    let comparison = match row.comparison {
        Comparison::Ratio(ratio) => spread(ratio, "x", |value| format!("{value:.2}")),
        Comparison::Difference(difference) => {
            spread(difference, &unit, |value| signed(value / divisor))
        }
    };
    [
        row.what.measure.clone(),
        row.baseline.name.clone(),
        side(&row.baseline),
        row.candidate.name.clone(),
        side(&row.candidate),
        comparison,
        row.verdict_text().to_owned(),
        row.what.published.unwrap_or_default().to_owned(),
    ]
}

/// Divisor and displayed unit of a figure.
fn scale(unit: &str) -> (f64, String) {
    match unit {
        "bytes" => (f64::from(1 << 20), " MiB".to_owned()),
        "faults" => (1.0, String::new()),
        unit => (1.0, format!(" {unit}")),
    }
}

fn spread(spread: Spread, unit: &str, show: impl Fn(f64) -> String) -> String {
    let [median, min, max] = [spread.median, spread.min, spread.max].map(show);
    format!("{median}{unit} [{min} to {max}]")
}

/// Formats a value with three significant digits.
fn digits(value: f64) -> String {
    let decimals = match value.abs() {
        value if value < 9.995 => 2,
        value if value < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$}")
}

fn signed(value: f64) -> String {
    let sign = if value < 0.0 { '-' } else { '+' };
    format!("{sign}{}", digits(value.abs()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use jumbo_bench::table::{Quantity, Samples};

    #[test]
    fn figures_have_three_digits() {
        for (value, shown) in [(1402.4, "1402"), (14.02, "14.0"), (1.402, "1.40")] {
            assert_eq!(digits(value), shown);
        }
        assert_eq!([-0.25, 0.25].map(signed), ["-0.25", "+0.25"]);
    }

    #[test]
    fn a_row_has_both_sides_in_its_unit_and_a_loss_in_capitals() {
        let row = |of: fn(Quantity, [Samples; 2]) -> Row, unit, [one, other]: [[f64; 2]; 2]| {
            let what = Quantity {
                name: "startup".to_owned(),
                measure: "start".to_owned(),
                unit,
                published: Some("2 ms"),
            };
            let sides = [("direct", one), ("jumbo run", other)];
            let sides = sides.map(|(name, samples)| (name.to_owned(), samples.to_vec()));
            cells(&of(what, sides)).join("|")
        };
        assert_eq!(
            row(Row::difference, "ms", [[1.0, 1.0], [3.0, 4.0]]),
            "start|direct|1.00 ms [1.00 to 1.00]|jumbo run|3.50 ms [3.00 to 4.00]|\
             +2.50 ms [+2.00 to +3.00]|BEHIND|2 ms"
        );
        let half = f64::from(1 << 19);
        let bytes = row(Row::ratio, "bytes", [[half; 2], [half * 2.0; 2]]);
        assert!(
            bytes.contains("|0.50 MiB [0.50 to 0.50]|jumbo run|"),
            "{bytes}"
        );
        assert!(bytes.contains("|0.50x [0.50 to 0.50]|"), "{bytes}");
    }
}
