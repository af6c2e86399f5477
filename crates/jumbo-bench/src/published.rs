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
    fn published_figures_have_links() {
        for table in ["free", "exit", "shmem", "vmemmap"] {
            let url = source(table).and_then(|source| source.url);
            assert!(
                url.is_some_and(|url| url.starts_with("https://")),
                "{table}"
            );
        }
        assert_eq!(source("fork"), None);
    }
}
