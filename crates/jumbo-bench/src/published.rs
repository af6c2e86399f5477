//! [`Source`]: where the figures in the column "published" come from, and what differs there.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The origin of the published figures of a table.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Source {
    /// Author, title and date; or that none is recorded.
    pub title: String,
    /// Where it can be read.
    pub url: Option<String>,
    /// The conditions there, where they differ from those here.
    pub conditions: String,
}

/// The source of the published figures of `table`, where it has some.
pub(crate) fn source(table: &str) -> Option<Source> {
    let mut sources: BTreeMap<String, Source> =
        toml::from_str(include_str!("published/sources.toml")).unwrap_or_default();
    sources.remove(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_one_and_tables_without_published_figures_have_none() {
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
