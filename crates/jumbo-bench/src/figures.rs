//! [`Figures`]: what one sample found, by name. A name ends in its unit.

use std::collections::BTreeMap;
use std::time::Duration;

/// The costs of a sample, and the proof that it is what its side claims to be
/// ([`claim`](crate::claim)).
pub(crate) type Figures = BTreeMap<String, f64>;

/// Figures of these names.
pub(crate) fn figures<const N: usize>(named: [(&str, f64); N]) -> Figures {
    named.map(|(name, figure)| (name.to_owned(), figure)).into()
}

/// `figures`, and these beside them.
pub(crate) fn with<const N: usize>(mut figures: Figures, more: [(&str, f64); N]) -> Figures {
    figures.extend(self::figures(more));
    figures
}

/// A duration in milliseconds.
pub(crate) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// A CPU time in milliseconds.
pub(crate) fn cpu_ms(time: libc::timeval) -> f64 {
    time.tv_sec as f64 * 1e3 + time.tv_usec as f64 / 1e3
}

/// The unit in which a figure's name ends; a figure without one is a number of page faults.
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
