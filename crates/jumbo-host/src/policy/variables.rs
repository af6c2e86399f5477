//! Adds to and removes from `LD_PRELOAD` and `GLIBC_TUNABLES`, which the user may have set already.

/// The glibc tunable that makes malloc advise its own heap.
pub const HUGETLB_TUNABLE: &str = "glibc.malloc.hugetlb";

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

/// Versions 2.N of glibc whose malloc has the huge page tunable and stays within jumbo's bound. Later
/// ones also advise what the library cannot follow; earlier ones have no such tunable.
const TUNABLE_MINORS: std::ops::RangeInclusive<u32> = 35..=42;

/// Returns the reason against the tunable in a program with glibc 2.`minor`; `None` if there is no
/// reason.
pub fn why_no_tunable(minor: Option<u32>) -> Option<&'static str> {
    match minor {
        None => Some("the version of the program's C library is unknown"),
        Some(minor) if TUNABLE_MINORS.contains(&minor) => None,
        Some(minor) if minor < *TUNABLE_MINORS.start() => {
            Some("the program's glibc, before 2.35, has none")
        }
        Some(_) => Some("the program's glibc, 2.43 or later, would exceed the bound with it"),
    }
}

/// Appends malloc's huge page tunable to `GLIBC_TUNABLES`, unless the user has set it. The last
/// duplicate wins, so nothing may follow the user's.
///
/// # Errors
/// The user's own value.
pub fn tunables(current: Option<&[u8]>) -> Result<Vec<u8>, String> {
    let current = current.unwrap_or_default();
    let named = current.split(|byte| *byte == b':').rev().find_map(|entry| {
        entry
            .strip_prefix(HUGETLB_TUNABLE.as_bytes())?
            .strip_prefix(b"=")
    });
    match named {
        Some(value) => Err(String::from_utf8_lossy(value).into_owned()),
        None => Ok(join(current, format!("{HUGETLB_TUNABLE}=1").as_bytes())),
    }
}

/// Removes the last entry that [`tunables`] added; `None` where there is none.
pub fn without_tunable(current: &[u8]) -> Option<Vec<u8>> {
    let ours = format!("{HUGETLB_TUNABLE}=1").into_bytes();
    let mut entries: Vec<&[u8]> = current.split(|byte| *byte == b':').collect();
    let index = entries.iter().rposition(|entry| *entry == ours)?;
    entries.remove(index);
    Some(entries.join(&b':'))
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

    #[test]
    fn the_tunable_is_for_known_versions() {
        let has = |minor| why_no_tunable(minor).is_none();
        assert!(has(Some(35)) && has(Some(42)));
        assert!(!has(Some(34)) && !has(Some(43)) && !has(Some(u32::MAX)) && !has(None));
    }

    #[test]
    fn added_tunable_can_be_removed() {
        for before in ["", "glibc.malloc.check=3"] {
            let added = tunables(Some(before.as_bytes())).unwrap();
            assert_eq!(without_tunable(&added).unwrap(), before.as_bytes());
        }
        assert_eq!(without_tunable(b"glibc.malloc.hugetlb=2"), None);
    }

    #[test]
    fn tunable_of_the_user_stays() {
        let add = |current: Option<&str>| {
            tunables(current.map(str::as_bytes)).map(|v| String::from_utf8(v).unwrap())
        };
        assert_eq!(add(None).unwrap(), "glibc.malloc.hugetlb=1");
        assert_eq!(
            add(Some("glibc.malloc.check=3")).unwrap(),
            "glibc.malloc.check=3:glibc.malloc.hugetlb=1"
        );
        assert_eq!(add(Some("glibc.malloc.hugetlb=0")), Err(String::from("0")));
        assert_eq!(
            add(Some("glibc.malloc.hugetlb=0:x=1:glibc.malloc.hugetlb=2")),
            Err(String::from("2"))
        );
        assert!(add(Some("glibc.malloc.hugetlbx=2")).is_ok());
    }
}
