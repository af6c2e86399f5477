//! Memory pressure: /proc/pressure/memory, and `memory.pressure` of a control group
//! (Documentation/accounting/psi.rst, Linux 4.20).

use std::path::Path;
use std::time::Duration;

use super::{FileError, Root, optional};

/// Total stall times since boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pressure {
    /// Time in which some task waited for memory.
    pub some: Duration,
    /// Time in which all tasks that were not idle waited.
    pub full: Duration,
}

/// Memory pressure of the host; `None` where the kernel does not account for it.
pub fn memory(root: &Root) -> Result<Option<Pressure>, FileError> {
    memory_in(root, "proc/pressure/memory")
}

/// Memory pressure in the file `relative` of a control group.
pub fn memory_in(root: &Root, relative: impl AsRef<Path>) -> Result<Option<Pressure>, FileError> {
    let relative = relative.as_ref();
    let Some(text) = optional(root.read(relative))? else {
        return Ok(None);
    };
    let total = |kind: &str| {
        let mut lines = text.lines();
        let line = lines.find_map(|line| line.strip_prefix(kind));
        let (_, micros) = line?.rsplit_once("total=")?;
        micros.trim().parse().ok().map(Duration::from_micros)
    };
    match (total("some "), total("full ")) {
        (Some(some), Some(full)) => Ok(Some(Pressure { some, full })),
        _ => Err(root.misread(relative, "no `total=` behind `some` and `full`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::fake::host;

    #[test]
    fn the_totals_are_microseconds() {
        let text = "some avg10=0.00 avg60=0.00 avg300=0.00 total=1500000\n\
                    full avg10=0.00 avg60=0.00 avg300=0.00 total=7\n";
        let (_folder, root) = host(&[("proc/pressure/memory", text)]);
        let pressure = memory(&root).unwrap().unwrap();
        assert_eq!(pressure.some, Duration::from_millis(1500));
        assert_eq!(pressure.full, Duration::from_micros(7));
        let (_folder, root) = host(&[("proc/pressure/memory", "some\n")]);
        assert!(memory(&root).is_err());
    }
}
