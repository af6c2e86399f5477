//! Adds to `LD_PRELOAD`, which the user may have set already.

/// File name of the library in all versions.
const LIBRARY_FILE: &[u8] = b"/libjumbo_preload.so";

/// Appends `library` to `LD_PRELOAD`, after the user's own interposers, and removes other versions
/// of it. Returns `None` where the library is listed already: a `jumbo run` under `jumbo run`.
///
/// Colons and blanks separate entries (ld.so(8)).
pub fn preload(current: Option<&[u8]>, library: &[u8]) -> Option<Vec<u8>> {
    let current = current.unwrap_or_default();
    let listed = || current.split(|byte| is_preload_separator(*byte));
    if listed().any(|entry| entry.ends_with(LIBRARY_FILE) && entry != library) {
        let kept = listed().filter(|entry| !entry.is_empty() && !entry.ends_with(LIBRARY_FILE));
        let kept = kept.fold(Vec::new(), |all, entry| join(&all, entry));
        return Some(join(&kept, library));
    }
    if listed().any(|entry| entry == library) {
        return None;
    }
    Some(join(current, library))
}

/// Reports whether a byte separates paths in `LD_PRELOAD`.
pub fn is_preload_separator(byte: u8) -> bool {
    byte == b':' || byte == b' '
}

fn join(current: &[u8], more: &[u8]) -> Vec<u8> {
    match current {
        [] => more.to_vec(),
        _ => [current, more].join(&b':'),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_is_appended_once() {
        let add = |current: Option<&str>| {
            preload(current.map(str::as_bytes), b"/l/j.so").map(|v| String::from_utf8(v).unwrap())
        };
        assert_eq!(add(None).as_deref(), Some("/l/j.so"));
        assert_eq!(add(Some("")).as_deref(), Some("/l/j.so"));
        assert_eq!(add(Some("a.so b.so")).as_deref(), Some("a.so b.so:/l/j.so"));
        assert_eq!(
            add(Some("/l/j.so.old")).as_deref(),
            Some("/l/j.so.old:/l/j.so")
        );
        assert_eq!(add(Some("a.so:/l/j.so")), None);
        assert_eq!(add(Some("/l/j.so a.so")), None);
        // Two versions would both serve the program.
        let new = b"/2/libjumbo_preload.so";
        for before in [
            "/1/libjumbo_preload.so:a.so",
            "/1/libjumbo_preload.so a.so /2/libjumbo_preload.so",
        ] {
            assert_eq!(
                preload(Some(before.as_bytes()), new).unwrap(),
                b"a.so:/2/libjumbo_preload.so"
            );
        }
    }
}
