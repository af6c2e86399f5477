//! Mounts of a mount namespace: /proc/PID/mountinfo (proc_pid_mountinfo(5)).

/// A mount. Its paths are escaped ([`unescaped`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mount<'a> {
    /// The folder of the file system that it shows.
    pub root: &'a [u8],
    /// Its place.
    pub point: &'a [u8],
    /// Type of the file system.
    pub kind: &'a [u8],
    options: &'a [u8],
}

/// Returns the mounts in the text of a file, in its order: a later one may hide an earlier one.
pub fn mounts(text: &[u8]) -> impl Iterator<Item = Mount<'_>> {
    text.split(|byte| *byte == b'\n').filter_map(mount)
}

/// `ID PARENT MAJOR:MINOR ROOT POINT OPTIONS [TAG]... - KIND SOURCE OPTIONS`, of the file system in
/// the end.
fn mount(line: &[u8]) -> Option<Mount<'_>> {
    let mut fields = line.split(|byte| *byte == b' ');
    let (root, point) = (fields.nth(3)?, fields.next()?);
    let mut fields = fields.skip_while(|field| *field != b"-").skip(1);
    Some(Mount {
        root,
        point,
        kind: fields.next()?,
        options: fields.nth(1)?,
    })
}

impl<'a> Mount<'a> {
    /// Returns the options of its file system, with their values.
    pub fn options(&self) -> impl Iterator<Item = (&'a [u8], Option<&'a [u8]>)> + use<'a> {
        self.options.split(|byte| *byte == b',').map(|option| {
            let mut parts = option.splitn(2, |byte| *byte == b'=');
            (parts.next().unwrap_or_default(), parts.next())
        })
    }

    /// Reports whether its file system has an option.
    pub fn has(&self, name: &[u8]) -> bool {
        self.options().any(|(option, _)| option == name)
    }
}

/// Decodes the octal escapes of a path: blanks, tabs, newlines and backslashes.
pub fn unescaped(mut field: &[u8]) -> impl Iterator<Item = u8> {
    core::iter::from_fn(move || {
        let (first, rest) = field.split_first()?;
        let digits = rest.get(..3).filter(|_| *first == b'\\');
        let digits = digits.and_then(|digits| core::str::from_utf8(digits).ok());
        let byte = digits.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        field = rest.get(byte.map_or(0, |_| 3)..).unwrap_or_default();
        Some(byte.unwrap_or(*first))
    })
}

/// Returns the path that a field of a [`Mount`] has.
#[cfg(feature = "std")]
pub fn path(field: &[u8]) -> std::path::PathBuf {
    use std::os::unix::ffi::OsStringExt as _;
    std::ffi::OsString::from_vec(unescaped(field).collect()).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_mount_has_the_options_of_its_file_system() {
        let text =
            b"30 23 0:26 / /a\\040b rw,nosuid shared:7 master:1 - cgroup cgroup rw,memory,x=1\n\
            31 23 0:27 /c /d rw - tmpfs none rw\ntorn 1 0:2 / /e rw - ext4\n";
        let [first, second] = mounts(text).collect::<Vec<_>>()[..] else {
            panic!("two mounts");
        };
        assert_eq!((first.root, first.kind), (&b"/"[..], &b"cgroup"[..]));
        assert_eq!(unescaped(first.point).collect::<Vec<_>>(), b"/a b");
        assert!(first.has(b"memory") && !first.has(b"nosuid") && !first.has(b"mem"));
        assert_eq!(first.options().last(), Some((&b"x"[..], Some(&b"1"[..]))));
        assert_eq!((second.root, second.point), (&b"/c"[..], &b"/d"[..]));
    }

    #[test]
    fn the_mounts_of_this_process_are_read() {
        let text = std::fs::read("/proc/self/mountinfo").unwrap();
        let lines = text.iter().filter(|byte| **byte == b'\n').count();
        assert_eq!(mounts(&text).count(), lines);
        assert!(mounts(&text).any(|mount| mount.kind == b"proc"));
    }

    #[test]
    fn only_whole_escapes_are_decoded() {
        let all = |field| unescaped(field).collect::<Vec<_>>();
        assert_eq!(all(br"/a\134\011b\04"), b"/a\\\tb\\04");
        assert_eq!(all(br"\999\"), br"\999\");
    }

    proptest! {
        #[test]
        fn accepts_any_bytes(bytes: Vec<u8>, line in "([0-9:]{0,5} |- |/[a-z\\\\0-9]{0,9} |[a-z=,]{0,9} |\n){0,30}") {
            for text in [&bytes[..], line.as_bytes()] {
                for mount in mounts(text) {
                    prop_assert!(mount.options().count() > 0);
                    prop_assert!(unescaped(mount.point).count() <= mount.point.len());
                }
            }
        }
    }
}
