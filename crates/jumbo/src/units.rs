//! Units that live in types, those of `jumbo-inside`, and how many of what in words: [`counted`]. It uses no other module.

pub use jumbo_inside::units::{Bytes, NodeId, Order, PageSize, Pages, SizeError};

/// `1 page`, `2 pages`; of a noun that takes an s, or es after one.
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
