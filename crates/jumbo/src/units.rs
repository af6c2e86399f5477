//! Unit types, those of `jumbo-inside`, and numbers with their nouns: [`counted`].

pub use jumbo_sys::units::{Bytes, NodeId, Order, PageSize, Pages, SizeError};

/// Formats a number with its noun: `1 page`, `2 pages`, `2 processes`.
pub fn counted(number: u64, noun: &str) -> String {
    let ending = match number {
        1 => "",
        _ if noun.ends_with('s') => "es",
        _ => "s",
    };
    format!("{number} {noun}{ending}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_no_plural() {
        assert_eq!(
            [(0, "page"), (1, "page"), (1, "process"), (2, "process")]
                .map(|(number, noun)| counted(number, noun)),
            ["0 pages", "1 page", "1 process", "2 processes"]
        );
    }
}
