//! Amount of pages on the command line, `512` or `1G`: [`Amount`].

use jumbo::units::{Bytes, PageSize, Pages, SizeError};

use crate::knobs::usage;

/// Number of pages; a number with a unit is memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Amount {
    Pages(Pages),
    Memory(Bytes),
}

impl Amount {
    /// Converts to pages of `size`. Memory that is no multiple of `size` is wrong usage: the user
    /// chooses how to round.
    pub(super) fn pages(self, size: PageSize) -> Pages {
        match self {
            Self::Pages(pages) => pages,
            Self::Memory(bytes) => {
                let pages = bytes.whole_pages(size);
                if pages.bytes(size) != bytes {
                    let above = Pages(pages.0 + 1);
                    usage(&format!(
                        "{bytes} is no whole number of {size} pages\nhint: {pages} of them are {}, {above} are {}",
                        pages.bytes(size),
                        above.bytes(size)
                    ));
                }
                pages
            }
        }
    }
}

impl std::str::FromStr for Amount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.chars().all(|c| c.is_ascii_digit())
            && let Ok(pages) = text.parse()
        {
            return Ok(Self::Pages(Pages(pages)));
        }
        let bytes: Result<Bytes, _> = text.parse();
        bytes.map(Self::Memory).map_err(|error| match error {
            SizeError::TooLarge => format!("{text} is {error}"),
            _ => format!(
                "`{text}` is neither a whole number of pages, such as 512, nor one of memory with a unit \
                 (K, M, G, T), such as 1G"
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_pages_and_sizes_are_memory() {
        let pages = |text: &str| text.parse::<Amount>().unwrap().pages(PageSize::SIZE_2M).0;
        assert_eq!((pages("512"), pages("1G"), pages("0")), (512, 512, 0));
        for bad in ["", "-1", "1.5G", "many", "99999999999999999999"] {
            assert!(bad.parse::<Amount>().is_err(), "{bad}");
        }
    }
}
