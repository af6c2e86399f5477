//! [`Orders`]: what the launcher tells the preload library, in one environment variable.
//!
//! The text is `key=value` pairs with commas between them. It is written by the launcher with
//! [`Orders::encode`] and read inside the program with [`Orders::decode`], which allocates nothing.

use std::fmt::Write as _;

/// What the preload library is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Orders<'a> {
    /// Large allocations go to the window, glibc's thread arenas are advised (`--heap`).
    pub heap: bool,
    /// Anonymous mappings are advised and packed (`--maps`).
    pub maps: bool,
    /// How much of the memory may be beyond what was asked for, in percent (`--max-waste`).
    pub max_waste: u32,
    /// Children are covered too (`--follow`); otherwise the library takes itself out of the environment.
    pub follow: bool,
    /// The launcher added `glibc.malloc.hugetlb=1` to GLIBC_TUNABLES (so it is to be taken out again
    /// where children are not covered).
    pub tunable: bool,
    /// The PMD size in bytes, so that the program need not open files in /sys to learn it.
    pub pmd: usize,
    /// Where the ledger is mapped from, if anybody wants one.
    pub ledger: Option<&'a str>,
}

impl Default for Orders<'_> {
    fn default() -> Self {
        Self {
            heap: true,
            maps: true,
            max_waste: 5,
            follow: true,
            tunable: false,
            pmd: 2 << 20,
            ledger: None,
        }
    }
}

impl<'a> Orders<'a> {
    /// The environment variable that carries them.
    pub const VARIABLE: &'static str = "JUMBO_ORDERS";

    /// The text for the environment.
    pub fn encode(&self) -> String {
        let mut text = format!(
            "heap={},maps={},max_waste={},follow={},tunable={},pmd={}",
            u8::from(self.heap),
            u8::from(self.maps),
            self.max_waste,
            u8::from(self.follow),
            u8::from(self.tunable),
            self.pmd
        );
        if let Some(ledger) = self.ledger {
            // Writing to a String cannot fail.
            let _ = write!(text, ",ledger={ledger}");
        }
        text
    }

    /// The orders in `text`. A key that is not known, or a value that does not parse, keeps the default:
    /// a program must run whatever its environment says.
    pub fn decode(text: &'a str) -> Self {
        let mut orders = Self::default();
        for (key, value) in text.split(',').filter_map(|pair| pair.split_once('=')) {
            match key {
                "heap" => orders.heap = value != "0",
                "maps" => orders.maps = value != "0",
                "tunable" => orders.tunable = value != "0",
                "follow" => orders.follow = value != "0",
                "max_waste" => orders.max_waste = value.parse().unwrap_or(orders.max_waste),
                "pmd" => {
                    orders.pmd = value
                        .parse()
                        .ok()
                        .filter(|pmd: &usize| pmd.is_power_of_two() && *pmd >= 1 << 16)
                        .unwrap_or(orders.pmd);
                }
                "ledger" => orders.ledger = Some(value),
                _ => {}
            }
        }
        orders
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn nonsense_keeps_the_defaults() {
        for text in ["", ",,", "pmd=3", "pmd=x", "what=1", "max_waste=-1", "="] {
            assert_eq!(Orders::decode(text), Orders::default(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(
            heap: bool, maps: bool, follow: bool, tunable: bool, max_waste in 0u32..1000, shift in 16u32..30,
            ledger in proptest::option::of("/proc/[0-9]{1,5}/fd/[0-9]{1,3}"),
        ) {
            let orders =
                Orders { heap, maps, max_waste, follow, tunable, pmd: 1 << shift, ledger: ledger.as_deref() };
            let text = orders.encode();
            prop_assert_eq!(Orders::decode(&text), orders);
        }

        #[test]
        fn any_text_is_survived(text in ".*") {
            let _ = Orders::decode(&text);
        }
    }
}
