//! [`Figures`]: the figures of one sample, by name. A name ends in its unit.

use std::collections::BTreeMap;
use std::time::Duration;

/// Costs of a sample, and the evidence for the claims of its side ([`claim`](crate::claim)).
pub(crate) type Figures = BTreeMap<String, f64>;

pub(crate) fn figures<const N: usize>(named: [(&str, f64); N]) -> Figures {
    named.map(|(name, figure)| (name.to_owned(), figure)).into()
}

pub(crate) fn with<const N: usize>(mut figures: Figures, more: [(&str, f64); N]) -> Figures {
    figures.extend(self::figures(more));
    figures
}

pub(crate) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

pub(crate) fn cpu_ms(time: libc::timeval) -> f64 {
    time.tv_sec as f64 * 1e3 + time.tv_usec as f64 / 1e3
}

/// Unit at the end of a figure's name; a figure without one counts page faults.
pub(crate) fn unit(figure: &str) -> &'static str {
    const UNITS: [&str; 10] = [
        "ms",
        "us",
        "ns",
        "bytes",
        "misses",
        "percent",
        "pages",
        "faults/s",
        "faults/s/CPU",
        "x",
    ];
    let unit = UNITS.into_iter().find(|unit| figure.ends_with(unit));
    unit.unwrap_or("faults")
}
