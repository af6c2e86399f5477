//! Control groups: /proc/PID/cgroup and the files of a group, in both versions (cgroups(7)).

use crate::proc::number;

/// A group of a process, in one hierarchy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group<'a> {
    /// Version of the hierarchy: 1 or 2.
    pub version: u8,
    controllers: &'a [u8],
    /// Its path below the root of the hierarchy.
    pub path: &'a [u8],
}

/// Returns the groups in the text of /proc/PID/cgroup.
pub fn groups(text: &[u8]) -> impl Iterator<Item = Group<'_>> {
    text.split(|byte| *byte == b'\n').filter_map(|line| {
        let mut fields = line.splitn(3, |byte| *byte == b':');
        let (number, controllers) = (fields.next()?, fields.next()?);
        Some(Group {
            version: if number == b"0" { 2 } else { 1 },
            controllers,
            path: fields.next()?,
        })
    })
}

/// Returns the group that has a controller, as far as known: version 2 lists no controllers.
pub fn with_controller<'a>(text: &'a [u8], controller: &[u8]) -> Option<Group<'a>> {
    let has = |group: &Group<'_>| {
        let mut names = group.controllers.split(|byte| *byte == b',');
        names.any(|name| name == controller)
    };
    let v2 = || groups(text).find(|group| group.version == 2);
    groups(text).find(has).or_else(v2)
}

/// Parses the number in a file of a group; `usize::MAX`: no limit. `max` means that in version 2, and
/// a number near 2^63 in version 1.
pub fn limit(text: &[u8]) -> Option<usize> {
    match text.starts_with(b"max") {
        true => Some(usize::MAX),
        false => number(text).map(|limit| if limit < 1 << 60 { limit } else { usize::MAX }),
    }
}

/// Returns a field of memory.stat.
pub fn field(text: &[u8], name: &[u8]) -> Option<usize> {
    let mut lines = text.split(|byte| *byte == b'\n');
    lines.find_map(|line| number(line.strip_prefix(name)?.strip_prefix(b" ")?))
}

/// Returns the clean page cache of a group in bytes, by its memory.stat; `None` if unknown.
pub fn clean_files(text: &[u8]) -> Option<usize> {
    // The last line may be truncated.
    let end = text.iter().rposition(|byte| *byte == b'\n')?;
    let value = |name: &[u8]| field(&text[..end], name);
    // In v1 only the lines with `total_` include the groups below.
    let either = |first: &[u8], second: &[u8]| value(first).or_else(|| value(second));
    let kept = either(b"total_inactive_file", b"inactive_file")?
        .checked_add(either(b"total_active_file", b"active_file")?)?;
    let busy = either(b"total_dirty", b"file_dirty")?
        .checked_add(either(b"total_writeback", b"file_writeback")?)?;
    Some(kept.saturating_sub(busy))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_controller_of_version_1_comes_first() {
        let text = b"4:memory,x:/a:b\n1:cpu:/\n0::/c\n";
        let path = |controller: &[u8]| with_controller(text, controller).map(|group| group.path);
        assert_eq!(path(b"memory"), Some(&b"/a:b"[..]));
        assert_eq!(path(b"pids"), Some(&b"/c"[..]));
        assert_eq!(with_controller(b"1:cpu:/\n", b"pids"), None);
    }

    #[test]
    fn a_large_number_is_no_limit() {
        let known = |text: &str| limit(text.as_bytes());
        assert_eq!(known("max\n"), Some(usize::MAX));
        assert_eq!(known("9223372036854771712\n"), Some(usize::MAX));
        assert_eq!((known("4096\n"), known("")), (Some(4096), None));
    }

    #[test]
    fn this_process_has_the_groups_that_the_kernel_lists() {
        // A kernel without control groups lacks the file.
        let text = std::fs::read("/proc/self/cgroup").unwrap_or_default();
        let lines = text.iter().filter(|byte| **byte == b'\n').count();
        assert_eq!(groups(&text).count(), lines);
        assert!(groups(&text).all(|group| group.path.starts_with(b"/")));
    }

    proptest! {
        #[test]
        fn accepts_any_bytes(bytes: Vec<u8>, controller: Vec<u8>) {
            let _ = (with_controller(&bytes, &controller), limit(&bytes), clean_files(&bytes));
        }
    }
}
