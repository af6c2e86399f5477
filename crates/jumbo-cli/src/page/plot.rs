//! Plots of a row, as SVG in the page. Horizontal positions are percentages, so a plot fills its
//! cell.

use jumbo_bench::table::Row;
use maud::{Markup, html};

/// Free margin on both sides, in percent of the width.
const MARGIN_PERCENT: f64 = 5.0;

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

fn percent(part: f64) -> String {
    format!(
        "{:.2}%",
        MARGIN_PERCENT + part * (100.0 - 2.0 * MARGIN_PERCENT)
    )
}
