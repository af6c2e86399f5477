//! Decoder of keys from the bytes of a terminal: [`Decoder`].
//!
//! crossterm's reader was rejected: after a hangup it reads 0 bytes in an endless loop, and it
//! blocks in the middle of a sequence that arrives in parts, while all signals are blocked.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Char(char),
    Enter,
    Escape,
    Backspace,
    Tab,
    Up,
    Down,
    Left,
    Right,
    PageUp,
    PageDown,
    Home,
    End,
}

/// Holds the bytes of an incomplete key.
#[derive(Debug, Default)]
pub(super) struct Decoder(Vec<u8>);

impl Decoder {
    /// Returns the keys that these bytes complete, without unknown keys.
    pub(super) fn keys(&mut self, bytes: &[u8]) -> Vec<Key> {
        self.0.extend_from_slice(bytes);
        let (mut keys, mut rest) = (Vec::new(), self.0.as_slice());
        while let Some((key, length)) = first(rest) {
            keys.extend(key);
            rest = rest.get(length..).unwrap_or_default();
        }
        self.0 = rest.to_vec();
        keys
    }
}

/// First key and its length; `None` if more bytes are needed.
fn first(bytes: &[u8]) -> Option<(Option<Key>, usize)> {
    match bytes {
        [] | [0x1b, b'[' | b'O'] => None,
        [0x1b, b'[' | b'O', rest @ ..] => {
            let end = rest.iter().position(|byte| (0x40..0x7f).contains(byte));
            // No key is that long.
            let Some(end) = end else {
                return (rest.len() > 16).then_some((None, bytes.len()));
            };
            Some((sequence(&rest[..end], rest[end]), end + 3))
        }
        [0x1b, ..] => Some((Some(Key::Escape), 1)),
        [b'\r' | b'\n', ..] => Some((Some(Key::Enter), 1)),
        [b'\t', ..] => Some((Some(Key::Tab), 1)),
        [0x7f | 0x08, ..] => Some((Some(Key::Backspace), 1)),
        [0..0x20, ..] => Some((None, 1)),
        [lead, ..] => {
            let length = match lead {
                0xc0..0xe0 => 2,
                0xe0..0xf0 => 3,
                0xf0.. => 4,
                _ => 1,
            };
            let whole = bytes.get(..length)?;
            let text = str::from_utf8(whole)
                .ok()
                .and_then(|text| text.chars().next());
            // Invalid UTF-8: one byte is dropped.
            Some((text.map(Key::Char), text.map_or(1, char::len_utf8)))
        }
    }
}

fn sequence(parameters: &[u8], end: u8) -> Option<Key> {
    Some(match (parameters, end) {
        (_, b'A') => Key::Up,
        (_, b'B') => Key::Down,
        (_, b'C') => Key::Right,
        (_, b'D') => Key::Left,
        (_, b'H') | (b"1" | b"7", b'~') => Key::Home,
        (_, b'F') | (b"4" | b"8", b'~') => Key::End,
        (b"5", b'~') => Key::PageUp,
        (b"6", b'~') => Key::PageDown,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_decoded_from_bytes_in_parts() {
        let bytes = "q\x1b[A\x1bOB\x1b[5~\r\t\x7f\u{e9}\x01\x1b[15~\x1b[1;5D".as_bytes();
        use Key::{Backspace, Char, Down, Enter, Left, PageUp, Tab, Up};
        let (first, last) = ([Char('q'), Up, Down, PageUp, Enter], [Tab, Backspace]);
        let keys = [&first[..], &last, &[Char('\u{e9}'), Left]].concat();
        assert_eq!(Decoder::default().keys(bytes), keys);
        for cut in (0..bytes.len()).filter(|cut| bytes[..*cut].last() != Some(&0x1b)) {
            let mut decoder = Decoder::default();
            let (one, two) = bytes.split_at(cut);
            let found = [decoder.keys(one), decoder.keys(two)].concat();
            assert_eq!(found, keys, "{cut}");
        }
        // A single ESC byte is the Escape key.
        assert_eq!(Decoder::default().keys(b"\x1b"), [Key::Escape]);
        let noise: Vec<u8> = (0..=255).cycle().take(2000).collect();
        assert!(!Decoder::default().keys(&noise).is_empty());
    }
}
