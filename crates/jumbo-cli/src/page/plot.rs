//! Plots of a row, as SVG in the page. Horizontal positions are percentages, so a plot fills its
//! cell.

use jumbo_bench::stats::Spread;
use jumbo_bench::table::{Comparison, Row, Verdict};
use maud::{Markup, html};

/// Free margin on both sides, in percent of the width.
const MARGIN_PERCENT: f64 = 5.0;

/// Logarithmic axis of ratios, the same for all rows of a table.
pub(super) struct Axis {
    low: f64,
    high: f64,
}

/// Candidate marks of an axis; the first set with sufficient distances is used.
const MARKS: [&[f64]; 4] = [
    &[0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0],
    &[0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0],
    &[0.01, 0.1, 1.0, 10.0, 100.0, 1000.0],
    &[1e-6, 1e-3, 1.0, 1e3, 1e6],
];
/// Minimum distance of marks, as a fraction of the axis.
const MIN_MARK_DISTANCE: f64 = 0.13;

impl Axis {
    /// Returns the axis for all ratios of `rows` and 1; `None` without a ratio.
    pub(super) fn of(rows: &[Row]) -> Option<Self> {
        let ratios = rows.iter().filter_map(ratio).filter(is_shown);
        let ends: Vec<_> = ratios.flat_map(|it| [it.min.ln(), it.max.ln()]).collect();
        let low = ends.iter().copied().reduce(f64::min)?.min(-0.05);
        let high = ends.into_iter().reduce(f64::max)?.max(0.05);
        Some(Self { low, high })
    }

    fn place(&self, ratio: f64) -> String {
        percent((ratio.ln() - self.low) / (self.high - self.low))
    }

    fn marks(&self) -> Vec<f64> {
        let fit = |marks: &&[f64]| -> Vec<f64> {
            let marks = marks.iter().copied();
            marks
                .filter(|mark| (self.low..=self.high).contains(&mark.ln()))
                .collect()
        };
        let is_apart =
            |pair: &[f64]| (pair[1] / pair[0]).ln() >= (self.high - self.low) * MIN_MARK_DISTANCE;
        let fit_apart = |marks: &Vec<f64>| marks.len() > 1 && marks.windows(2).all(is_apart);
        let found = MARKS.iter().map(fit).find(fit_apart);
        found.unwrap_or_else(|| vec![1.0])
    }

    /// Draws the marks, for the head of the column.
    pub(super) fn head(&self) -> Markup {
        html! {
            svg height="16" aria-hidden="true" {
                @for mark in self.marks() { text x=(self.place(mark)) y="13" { (mark) } }
            }
        }
    }

    /// Draws the ratio of a row: the median as a dot, the range as a whisker, and a line at 1.
    pub(super) fn ratio(&self, row: &Row, words: &str) -> Markup {
        let Some(ratio) = ratio(row).filter(is_shown) else {
            return html! {};
        };
        let [low, middle, high] = [ratio.min, ratio.median, ratio.max].map(|it| self.place(it));
        let class = if row.is_aa() {
            "none"
        } else {
            class(row.verdict)
        };
        html! {
            svg height="22" role="img" {
                title { (words) }
                @for mark in self.marks().into_iter().filter(|mark| *mark != 1.0) {
                    @let at = self.place(mark);
                    line.one x1=(at) x2=(at) y1="8" y2="14" {}
                }
                @let one = self.place(1.0);
                line x1=(one) x2=(one) y1="0" y2="22" stroke-dasharray="3 2" {}
                line x1=(low) x2=(high) y1="11" y2="11" {}
                circle.dot.(class) cx=(middle) cy="11" r="4.5" {}
            }
        }
    }
}

/// Draws all samples of both sides of a row from 0, the baseline above.
pub(super) fn samples(row: &Row, words: &str) -> Markup {
    let sides = [("b", 7, &row.baseline), ("c", 19, &row.candidate)];
    let all = sides.iter().flat_map(|(.., side)| &side.samples);
    let max = all.copied().filter(|it| it.is_finite()).fold(0.0, f64::max);
    if max <= 0.0 {
        return html! {};
    }
    html! {
        svg height="26" role="img" {
            title { (words) }
            line.one x1=(percent(0.0)) x2=(percent(0.0)) y1="0" y2="26" {}
            @for (class, y, side) in sides {
                @for sample in side.samples.iter().filter(|it| it.is_finite()) {
                    circle.(class) cx=(percent(sample / max)) cy=(y) r="3" {}
                }
                @if side.spread.median.is_finite() {
                    @let middle = percent(side.spread.median / max);
                    line.(class) x1=(middle) x2=(middle) y1=(y - 6) y2=(y + 6) {}
                }
            }
        }
    }
}

pub(super) fn class(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Ahead => "ahead",
        Verdict::NoDifference => "none",
        Verdict::Behind => "behind",
    }
}

fn ratio(row: &Row) -> Option<Spread> {
    match row.comparison {
        Comparison::Ratio(ratio) => Some(ratio),
        Comparison::Difference(_) => None,
    }
}

/// Reports whether a ratio has a position: not if one side is 0.
fn is_shown(ratio: &Spread) -> bool {
    ratio.min > 0.0 && ratio.max.is_finite()
}

fn percent(part: f64) -> String {
    format!(
        "{:.2}%",
        MARGIN_PERCENT + part * (100.0 - 2.0 * MARGIN_PERCENT)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_few_and_1_is_among_them() {
        for (low, high) in [
            (0.95, 1.05),
            (0.5, 2.4),
            (0.07, 12.0),
            (0.2, 2500.0),
            (1e-7, 1e7),
        ] {
            let axis = Axis {
                low: f64::ln(low),
                high: f64::ln(high),
            };
            let marks = axis.marks();
            assert!(
                marks.contains(&1.0) && marks.len() <= 7,
                "{low} {high}: {marks:?}"
            );
            assert_eq!(axis.place(low), "5.00%");
            assert_eq!(axis.place(high), "95.00%");
        }
    }
}
