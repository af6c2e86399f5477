//! The THP tables as a whole: short names of their knobs, a [`Table`] of their values, and the
//! equivalent arguments of the kernel's command line.
//!
//! The short names, as in `jumbo thp set`: `enabled`, `64K`, `shmem`, `64K.shmem`, `defrag`.

use std::collections::BTreeMap;

use serde::Serialize;

use super::knob::{Knob, Value};
use crate::kernel::thp::Thp;
use crate::units::PageSize;

/// Kind of memory that a control concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Anonymous memory.
    Anon,
    /// Shared memory.
    Shmem,
}

/// Values of the tables by the short names of their knobs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table(BTreeMap<String, Value>);

/// One argument of the kernel's command line (Documentation/admin-guide/kernel-parameters.txt).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Argument {
    /// The argument, as typed.
    pub text: String,
    /// First release that takes it.
    pub since: &'static str,
}

impl Side {
    /// Returns the kind of memory of a short name; `None` for both (`defrag`).
    pub fn of(name: &str) -> Option<Self> {
        match name {
            "enabled" => Some(Self::Anon),
            "shmem" => Some(Self::Shmem),
            name if name.ends_with(".shmem") => Some(Self::Shmem),
            name => name.parse::<PageSize>().ok().map(|_| Self::Anon),
        }
    }
}

impl Knob {
    /// Returns the knob of a short name.
    pub fn thp_named(name: &str) -> Option<Self> {
        let file = match name {
            "enabled" | "defrag" | "use_zero_page" | "shrink_underused" => name,
            "shmem" => "shmem_enabled",
            "max_ptes_none" => "khugepaged/max_ptes_none",
            _ => {
                let (size, file) = match name.strip_suffix(".shmem") {
                    Some(size) => (size, "shmem_enabled"),
                    None => (name, "enabled"),
                };
                return Some(Self::thp(Some(size.parse().ok()?), file));
            }
        };
        Some(Self::thp(None, file))
    }
}

/// Finds a knob that is set twice, possibly under two names (`64K`, `65536`).
pub fn twice(values: &[(Knob, Value)]) -> Option<&Knob> {
    let known = |index: usize, knob| values[..index].iter().any(|(other, _)| other == knob);
    let mut knobs = values.iter().enumerate();
    knobs.find_map(|(index, (knob, _))| known(index, knob).then_some(knob))
}

impl Table {
    /// Returns the values of `thp`; with `side`, of that memory.
    pub fn of(thp: &Thp, side: Option<Side>) -> Self {
        let word = |choice: &crate::kernel::thp::Choice| Value::Word(choice.current.clone());
        let flag = |flag: bool| Value::Number(flag.into());
        let mut values = BTreeMap::new();
        let mut add = |name: String, value: Option<Value>| {
            if let Some(value) = value.filter(|_| side.is_none() || side == Side::of(&name)) {
                values.insert(name, value);
            }
        };
        add("enabled".to_owned(), Some(word(&thp.enabled)));
        add("shmem".to_owned(), thp.shmem_enabled.as_ref().map(word));
        add("defrag".to_owned(), thp.defrag.as_ref().map(word));
        add("use_zero_page".to_owned(), thp.use_zero_page.map(flag));
        add(
            "shrink_underused".to_owned(),
            thp.shrink_underused.map(flag),
        );
        let max = thp.khugepaged.get("max_ptes_none").copied();
        add("max_ptes_none".to_owned(), max.map(Value::Number));
        for (size, control) in &thp.sizes {
            add(size.to_string(), control.enabled.as_ref().map(word));
            let shared = control.shmem_enabled.as_ref().map(word);
            add(format!("{size}.shmem"), shared);
        }
        Self(values)
    }

    /// Returns the knobs with their values.
    pub fn knobs(&self) -> Vec<(Knob, Value)> {
        let knob = |(name, value): (&String, &Value)| Some((Knob::thp_named(name)?, value.clone()));
        self.0.iter().filter_map(knob).collect()
    }

    /// Replaces the values of knobs that the table has.
    pub fn with(mut self, values: &[(Knob, Value)]) -> Self {
        for (name, value) in &mut self.0 {
            let knob = Knob::thp_named(name);
            if let Some((_, to)) = values
                .iter()
                .find(|(other, _)| Some(other) == knob.as_ref())
            {
                *value = to.clone();
            }
        }
        self
    }

    /// Returns the kernel arguments that set this table at boot. `tmpfs`: the `huge=` of tmpfs
    /// mounts, which goes with shared memory.
    ///
    /// A size that such an argument omits is `never`. Without the argument the PMD size is
    /// `inherit`, so it is named where all sizes are `never`. The command line has nothing for
    /// `deny` and `force` ([`Table::lost_at_boot`]), nor for values outside the tables.
    pub fn arguments(&self, tmpfs: Option<&str>) -> Vec<Argument> {
        let word = |name: &str| match self.0.get(name) {
            Some(Value::Word(word)) => Some(word.as_str()),
            _ => None,
        };
        let argument = |name: &str, value: Option<&str>, since| {
            let text = format!("{name}={}", value?);
            Some(Argument { text, since })
        };
        let sizes = |side: Side| {
            let mut by_value: BTreeMap<&str, Vec<PageSize>> = BTreeMap::new();
            // The kernel has controls up to the PMD size.
            let mut largest = None;
            for (name, value) in &self.0 {
                let size = name.trim_end_matches(".shmem").parse();
                if let (Ok(size), Some(of), Value::Word(word)) = (size, Side::of(name), value)
                    && of == side
                {
                    largest = largest.max(Some(size));
                    if word != "never" {
                        by_value.entry(word).or_default().push(size);
                    }
                }
            }
            if by_value.is_empty() {
                by_value.insert("never", vec![largest?]);
            }
            let of_value = by_value.into_iter().map(|(word, mut sizes)| {
                sizes.sort_unstable();
                let sizes: Vec<_> = sizes.iter().map(PageSize::to_string).collect();
                format!("{}:{word}", sizes.join(","))
            });
            Some(of_value.collect::<Vec<_>>().join(";"))
        };
        let bootable = |_: &&str| self.lost_at_boot().is_none();
        let tmpfs = tmpfs.filter(|_| word("shmem").is_some());
        let arguments = [
            argument("transparent_hugepage", word("enabled"), "2.6.38"),
            argument("thp_anon", sizes(Side::Anon).as_deref(), "6.12"),
            argument(
                "transparent_hugepage_shmem",
                word("shmem").filter(bootable),
                "6.13",
            ),
            argument("thp_shmem", sizes(Side::Shmem).as_deref(), "6.13"),
            argument("transparent_hugepage_tmpfs", tmpfs, "6.14"),
        ];
        arguments.into_iter().flatten().collect()
    }

    /// Returns the top value of shared memory that no argument sets: `deny` or `force`. The kernel
    /// boots with `never` then.
    pub fn lost_at_boot(&self) -> Option<&str> {
        match self.0.get("shmem") {
            Some(Value::Word(word)) if ["deny", "force"].contains(&word.as_str()) => Some(word),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::fake::host;
    use crate::kernel::thp::FOLDER;

    fn table(side: Option<Side>) -> Table {
        let size = |kib: u64| format!("{FOLDER}/hugepages-{kib}kB");
        let files = [
            (format!("{FOLDER}/enabled"), "always [madvise] never"),
            (format!("{FOLDER}/shmem_enabled"), "[advise] never"),
            (format!("{FOLDER}/hpage_pmd_size"), "2097152"),
            (format!("{FOLDER}/use_zero_page"), "1"),
            (format!("{FOLDER}/khugepaged/max_ptes_none"), "511"),
            (size(8) + "/shmem_enabled", "[always] never"),
            (size(64) + "/enabled", "always [never]"),
            (size(64) + "/shmem_enabled", "[always] never"),
            (size(2048) + "/enabled", "[inherit] never"),
            (size(2048) + "/shmem_enabled", "[inherit] never"),
        ];
        let files: Vec<_> = files
            .iter()
            .map(|(file, text)| (file.as_str(), *text))
            .collect();
        let (_folder, root) = host(&files);
        Table::of(&Thp::read(&root).unwrap().unwrap(), side)
    }

    #[test]
    fn a_table_has_the_knobs_of_its_side() {
        let count = |side| table(side).knobs().len();
        assert_eq!(
            (
                count(None),
                count(Some(Side::Anon)),
                count(Some(Side::Shmem))
            ),
            (9, 3, 4)
        );
    }

    #[test]
    fn a_knob_that_is_set_twice_is_found() {
        let value = |name| (Knob::thp_named(name).unwrap(), Value::from("never"));
        assert_eq!(twice(&["64K", "64K.shmem"].map(value)), None);
        let values = ["64K", "enabled", "65536"].map(value);
        assert_eq!(twice(&values), Some(&values[0].0));
    }

    #[test]
    fn arguments_name_each_size_that_is_not_never() {
        let text = |table: &Table, tmpfs| {
            let arguments = table.arguments(tmpfs).into_iter();
            arguments
                .map(|argument| argument.text)
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(
            text(&table(None), Some("within_size")),
            "transparent_hugepage=madvise thp_anon=2M:inherit transparent_hugepage_shmem=advise \
             thp_shmem=8K,64K:always;2M:inherit transparent_hugepage_tmpfs=within_size"
        );
        let knob = |name| Knob::thp_named(name).unwrap();
        let values = [
            (knob("shmem"), "deny".into()),
            (knob("2M.shmem"), "never".into()),
        ];
        let other = table(Some(Side::Shmem)).with(&values);
        assert_eq!(text(&other, None), "thp_shmem=8K,64K:always");
        assert_eq!(other.lost_at_boot(), Some("deny"));
        let never = ["8K.shmem", "64K.shmem", "shmem"].map(|name| (knob(name), "never".into()));
        assert_eq!(
            text(&other.with(&never), None),
            "transparent_hugepage_shmem=never thp_shmem=2M:never",
            "else the kernel begins with 2M:inherit"
        );
        let anon = table(Some(Side::Anon)).with(&[(knob("2M"), "never".into())]);
        assert_eq!(
            text(&anon, Some("advise")),
            "transparent_hugepage=madvise thp_anon=2M:never",
            "files of tmpfs are no anonymous memory"
        );
    }
}
