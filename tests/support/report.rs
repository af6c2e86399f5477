//! The JSON report of `jumbo run`.

use serde_json::Value;

/// A report, with accessors for the tests.
#[derive(Debug)]
pub(crate) struct Report(Value);

impl Report {
    pub(crate) fn parse(text: &str) -> Self {
        let value = serde_json::from_str(text);
        Self(value.unwrap_or_else(|error| panic!("not JSON: {error}:\n{text}")))
    }

    /// Returns the value at a JSON pointer such as `/peak/heap/bytes`.
    #[track_caller]
    pub(crate) fn at(&self, pointer: &str) -> &Value {
        let value = self.0.pointer(pointer);
        value.unwrap_or_else(|| panic!("no {pointer} in {:#}", self.0))
    }

    #[track_caller]
    pub(crate) fn number(&self, pointer: &str) -> f64 {
        let value = self.at(pointer).as_f64();
        value.unwrap_or_else(|| panic!("{pointer} is no number in {:#}", self.0))
    }

    #[track_caller]
    pub(crate) fn heap_bytes(&self) -> f64 {
        self.number("/peak/heap/bytes")
    }

    #[track_caller]
    pub(crate) fn heap_huge_share(&self) -> f64 {
        self.number("/peak/heap/huge_share")
    }

    /// Reports whether a text of the report contains `words`.
    pub(crate) fn says(&self, words: &str) -> bool {
        self.0.to_string().contains(words)
    }
}
