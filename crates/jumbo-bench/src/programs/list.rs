//! [`PROGRAMS`]: the programs of `jumbo bench programs`, from `programs.toml`, which documents the
//! fields.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::Deserialize;

/// A program, its work and its requirements.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct ProgramEntry {
    pub(super) key: String,
    pub(super) what: String,
    pub(super) install: String,
    pub(super) needs: Vec<String>,
    pub(super) size: [u32; 2],
    /// Name of one of [`FILES`].
    pub(super) file: String,
    pub(super) once: String,
    pub(super) run: Vec<String>,
    /// Scripts of a server: without `load` the program ends by itself.
    pub(super) ready: String,
    pub(super) setup: String,
    pub(super) load: String,
    pub(super) says: bool,
}

/// All programs, in the order of the table.
pub(super) static PROGRAMS: LazyLock<Vec<ProgramEntry>> =
    LazyLock::new(|| read().unwrap_or_default());

/// Reads all entries. An entry with `like` inherits the fields that it lacks from an earlier one.
fn read() -> Result<Vec<ProgramEntry>, toml::de::Error> {
    let list: BTreeMap<String, Vec<toml::Table>> = toml::from_str(include_str!("programs.toml"))?;
    let mut entries: Vec<toml::Table> = Vec::new();
    for mut entry in list.into_values().flatten() {
        if let Some(like) = entry.remove("like") {
            let mut earlier = entries.iter();
            let base = earlier.find(|earlier| earlier.get("key") == Some(&like));
            let unknown = || {
                <toml::de::Error as serde::de::Error>::custom(format!(
                    "no earlier entry has the key {like}"
                ))
            };
            for (field, value) in base.cloned().ok_or_else(unknown)? {
                entry.entry(field).or_insert(value);
            }
        }
        entries.push(entry);
    }
    entries.into_iter().map(toml::Table::try_into).collect()
}

/// Files that programs run or read, by name.
pub(super) const FILES: [(&str, &str); 11] = [
    ("Main.java", include_str!("work/Main.java")),
    ("allocator.cpp", include_str!("work/allocator.cpp")),
    ("columns.py", include_str!("work/columns.py")),
    ("dictionary.py", include_str!("work/dictionary.py")),
    ("duck.py", include_str!("work/duck.py")),
    ("frame.py", include_str!("work/frame.py")),
    ("graph.cpp", include_str!("work/graph.cpp")),
    ("hashmap.cpp", include_str!("work/hashmap.cpp")),
    ("objects.js", include_str!("work/objects.js")),
    ("source.cpp", include_str!("work/source.cpp")),
    ("tables.sql", include_str!("work/tables.sql")),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn program_entries_are_unique_and_complete() {
        let all = read().unwrap();
        for entry in &all {
            let is_known = FILES.iter().any(|(name, _)| *name == entry.file);
            assert!(is_known || entry.file.is_empty(), "{entry:?}");
            let is_whole = !entry.run.is_empty() && !entry.install.is_empty();
            assert!(is_whole && entry.size[0] > entry.size[1], "{entry:?}");
            assert_eq!(entry.ready.is_empty(), entry.load.is_empty(), "{entry:?}");
        }
        let keys: BTreeSet<_> = all.iter().map(|entry| &entry.key).collect();
        assert_eq!((keys.len(), all.len()), (PROGRAMS.len(), PROGRAMS.len()));
    }
}
