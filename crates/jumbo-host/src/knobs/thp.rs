//! The THP tables as a whole: short names of their knobs, a [`Table`] to save and restore, and the
//! equivalent arguments of the kernel's command line.
//!
//! The short names, as in `jumbo thp set`: `enabled`, `64K`, `shmem`, `64K.shmem`, `defrag`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::knob::{Knob, Value};
use crate::kernel::thp::Thp;
use crate::units::PageSize;

/// Version of [`Table`] that is written, and the newest that is read.
const VERSION: u32 = 1;

/// Kind of memory that a control concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Anonymous memory.
    Anon,
    /// Shared memory.
    Shmem,
}

/// Values of the tables by the names of their knobs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// Version of this format.
    pub version: u32,
    /// Release of the kernel that had these values.
    pub kernel: String,
    /// Values by short name.
    pub values: BTreeMap<String, Value>,
}

/// Reasons why a saved table cannot be restored.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// Written by a later jumbo.
    #[error("the table is of version {0}, and this jumbo reads up to version {VERSION}")]
    Version(u32),
    /// Unknown name.
    #[error("the table sets `{0}`, which is no knob")]
    Name(String),
    /// A word where the knob takes a number, or vice versa.
    #[error("the table sets {0} to {1}, which is no value of it")]
    Value(String, Value),
    /// A knob that is set twice, possibly under two names (`64K`, `65536`).
    #[error("{0} is given twice")]
    Twice(Knob),
    /// No value for the requested kind of memory.
    #[error("the table has no value for that memory")]
    Nothing,
}

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

/// Checks that each knob has one value.
///
/// # Errors
/// [`TableError::Twice`].
pub fn once(values: &[(Knob, Value)]) -> Result<(), TableError> {
    for (index, (knob, _)) in values.iter().enumerate() {
        if values[..index].iter().any(|(other, _)| other == knob) {
            return Err(TableError::Twice(knob.clone()));
        }
    }
    Ok(())
}

impl Table {
    /// Returns the values of `thp`, of a kernel of that release; with `side`, of that memory.
    pub fn of(thp: &Thp, kernel: &str, side: Option<Side>) -> Self {
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
        let (version, kernel) = (VERSION, kernel.to_owned());
        Self {
            version,
            kernel,
            values,
        }
    }

    /// Returns the knobs with their values; with `side`, those of that memory.
    ///
    /// # Errors
    /// [`TableError`] where any part is invalid.
    pub fn knobs(&self, side: Option<Side>) -> Result<Vec<(Knob, Value)>, TableError> {
        if self.version > VERSION {
            return Err(TableError::Version(self.version));
        }
        let mut knobs = Vec::new();
        for (name, value) in &self.values {
            let knob = Knob::thp_named(name).ok_or_else(|| TableError::Name(name.clone()))?;
            if knob.takes_word() != value.number().is_none() {
                return Err(TableError::Value(name.clone(), value.clone()));
            }
            if side.is_none() || side == Side::of(name) {
                knobs.push((knob, value.clone()));
            }
        }
        once(&knobs)?;
        match knobs.is_empty() {
            true => Err(TableError::Nothing),
            false => Ok(knobs),
        }
    }

    /// Replaces the values of knobs that the table has.
    pub fn with(mut self, values: &[(Knob, Value)]) -> Self {
        for (name, value) in &mut self.values {
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
        let word = |name: &str| match self.values.get(name) {
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
            for (name, value) in &self.values {
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
        match self.values.get("shmem") {
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
        Table::of(&Thp::read(&root).unwrap().unwrap(), "6.18.0", side)
    }

    #[test]
    fn table_survives_serialization() {
        let all = table(None);
        assert_eq!(all.values.len(), 9, "{all:?}");
        let text = serde_json::to_string(&all).unwrap();
        let again: Table = serde_json::from_str(&text).unwrap();
        assert_eq!(again, all);
        assert_eq!(again.knobs(None).unwrap().len(), 9);
        assert_eq!(again.knobs(Some(Side::Anon)).unwrap().len(), 3);
        assert_eq!(
            table(Some(Side::Shmem))
                .knobs(Some(Side::Shmem))
                .unwrap()
                .len(),
            4
        );
        assert_eq!(
            table(Some(Side::Shmem)).knobs(Some(Side::Anon)),
            Err(TableError::Nothing)
        );
    }

    #[test]
    fn invalid_tables_are_rejected() {
        let with = |name: &str, value: Value| {
            let mut table = table(None);
            table.values.insert(name.to_owned(), value);
            table.knobs(None).unwrap_err()
        };
        assert_eq!(
            with("63K", "never".into()),
            TableError::Name("63K".to_owned())
        );
        let number = Value::Number(1);
        assert_eq!(
            with("64K", number.clone()),
            TableError::Value("64K".to_owned(), number)
        );
        let twice = TableError::Twice(Knob::thp_named("64K").unwrap());
        assert_eq!(with("65536", "never".into()), twice);
        let mut later = table(None);
        later.version = 2;
        assert_eq!(later.knobs(None), Err(TableError::Version(2)));
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
