//! [`Citation`]: source of the figures in the column "published", and the conditions there.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Source of the published figures of a table.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Citation {
    /// Author, title and date; or that none is recorded.
    pub title: String,
    /// Link to it.
    pub url: Option<String>,
    /// Conditions there, as far as they differ from those here.
    pub conditions: String,
}

/// Citation for the published figures of `table`, if it has any.
pub(crate) fn source(table: &str) -> Option<Citation> {
    let mut sources: BTreeMap<String, Citation> =
        toml::from_str(include_str!("published/sources.toml")).unwrap_or_default();
    sources.remove(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_figures_have_dated_sources() {
        for table in ["free", "exit", "shmem", "vmemmap", "text", "pool"] {
            let title = source(table).map(|source| source.title);
            let is_dated = title.as_ref().is_some_and(|title| title.contains(" 20"));
            assert!(is_dated, "{table}: {title:?}");
        }
        assert_eq!(source("fork"), None);
    }
}
