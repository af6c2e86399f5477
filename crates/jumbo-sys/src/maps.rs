//! Parser of /proc/PID/maps, byte by byte: [`Lines`] turns each line into a [`MapsLine`].
//!
//! A line can be longer than any buffer here, and the lines more than any table holds, so only the
//! needed fields are kept. Pure: it allocates nothing and makes no system call. See
//! proc_pid_maps(5).

/// Kept bytes of a path's start.
const MAX_PREFIX_BYTES: usize = 16;
/// Kept bytes of a file name, the part of its path after the last slash.
const MAX_NAME_BYTES: usize = 64;

/// A file in /proc/PID/maps and /proc/locks: device (major and minor number) and inode.
pub type File = ((u64, u64), u64);

/// One mapping of an address space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MapsLine {
    /// First address.
    pub start: usize,
    /// End address.
    pub end: usize,
    /// `r` of the permissions.
    pub readable: bool,
    /// `w` of the permissions.
    pub writable: bool,
    /// `p` of the permissions: private.
    pub private: bool,
    /// `x` of the permissions.
    pub executable: bool,
    /// File offset.
    pub offset: u64,
    /// Major and minor number of the file's device; 0 without a file.
    pub device: (u64, u64),
    /// Inode of the file; 0 without a file.
    pub inode: u64,
    path_prefix: [u8; MAX_PREFIX_BYTES],
    prefix_length: usize,
    name: Name,
}

/// The last component of a path, truncated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name {
    bytes: [u8; MAX_NAME_BYTES],
    length: usize,
}

impl Default for Name {
    fn default() -> Self {
        Self {
            bytes: [0; MAX_NAME_BYTES],
            length: 0,
        }
    }
}

impl Name {
    /// Returns the name.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }

    fn push(&mut self, byte: u8) {
        if byte == b'/' {
            self.length = 0;
        } else if let Some(place) = self.bytes.get_mut(self.length) {
            *place = byte;
            self.length += 1;
        }
    }
}

impl MapsLine {
    /// Returns the last component of its path.
    pub fn last_name(&self) -> Name {
        self.name
    }

    /// Reports whether its path or label starts with `prefix`.
    pub fn is_named(&self, prefix: &[u8]) -> bool {
        let known = self
            .path_prefix
            .get(..self.prefix_length)
            .unwrap_or_default();
        known.starts_with(prefix)
    }

    /// Returns its file; zeroes without one.
    pub fn file(&self) -> File {
        (self.device, self.inode)
    }

    /// Reports whether it is private memory without a file.
    pub fn is_private_anonymous(&self) -> bool {
        self.private && self.inode == 0 && !self.is_kernels()
    }

    /// Reports whether it is the kernel's: `[vdso]`, `[vvar]`, `[vvar_vclock]`, `[vsyscall]`.
    pub fn is_kernels(&self) -> bool {
        self.is_named(b"[v")
    }
}

/// The field of a line that is parsed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Field {
    #[default]
    Start,
    End,
    Permissions,
    Offset,
    Major,
    Minor,
    Inode,
    Name,
}

/// A parser of lines.
#[derive(Debug, Default)]
pub struct Lines {
    field: Field,
    number: u64,
    mapping: MapsLine,
}

impl Lines {
    /// Parses a line, and returns the path at its end; `None` if it lacks a field.
    pub fn parse(line: &[u8]) -> Option<(MapsLine, &[u8])> {
        let mut lines = Self::default();
        let fields = line.iter().take_while(|byte| {
            let _ = lines.push(**byte);
            lines.field != Field::Name
        });
        let path = line.get(fields.count() + 1..).unwrap_or_default();
        let is_whole = matches!(lines.field, Field::Inode | Field::Name);
        let mapping = lines.push(b'\n').filter(|_| is_whole)?;
        Some((mapping, path.trim_ascii_start()))
    }

    /// Takes the next byte; returns a mapping at the end of a line.
    pub fn push(&mut self, byte: u8) -> Option<MapsLine> {
        if byte == b'\n' {
            if self.field == Field::Inode {
                self.mapping.inode = self.number;
            }
            return Some(core::mem::take(self).mapping);
        }
        match (self.field, byte) {
            (Field::Name, _) => self.name(byte),
            (Field::Permissions, b'r') => self.mapping.readable = true,
            (Field::Permissions, b'w') => self.mapping.writable = true,
            (Field::Permissions, b'p') => self.mapping.private = true,
            (Field::Permissions, b'x') => self.mapping.executable = true,
            (_, b' ' | b'-' | b':') if self.field != Field::Permissions || byte == b' ' => {
                self.end_field();
            }
            (Field::Inode, _) => self.digit(byte, 10),
            (Field::Permissions, _) => {}
            _ => self.digit(byte, 16),
        }
        None
    }

    fn digit(&mut self, byte: u8, radix: u64) {
        let value = char::from(byte).to_digit(16).unwrap_or(0);
        self.number = self
            .number
            .wrapping_mul(radix)
            .wrapping_add(u64::from(value));
    }

    fn end_field(&mut self) {
        let number = core::mem::take(&mut self.number);
        let address = usize::try_from(number).unwrap_or(0);
        self.field = match self.field {
            Field::Start => {
                self.mapping.start = address;
                Field::End
            }
            Field::End => {
                self.mapping.end = address;
                Field::Permissions
            }
            Field::Permissions => Field::Offset,
            Field::Offset => {
                self.mapping.offset = number;
                Field::Major
            }
            Field::Major => {
                self.mapping.device.0 = number;
                Field::Minor
            }
            Field::Minor => {
                self.mapping.device.1 = number;
                Field::Inode
            }
            Field::Inode | Field::Name => {
                self.mapping.inode = number;
                Field::Name
            }
        };
    }

    fn name(&mut self, byte: u8) {
        // Leading blanks are padding.
        if byte == b' ' && self.mapping.prefix_length == 0 {
            return;
        }
        self.mapping.name.push(byte);
        if let Some(place) = self.mapping.path_prefix.get_mut(self.mapping.prefix_length) {
            *place = byte;
            self.mapping.prefix_length += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(text: &str) -> Vec<MapsLine> {
        let mut lines = Lines::default();
        text.bytes().filter_map(|byte| lines.push(byte)).collect()
    }

    #[test]
    fn parses_the_lines_of_a_process() {
        let maps = all("\
200000000000-200000400000 rw-p 00000000 00:00 0 
55d6a1e00000-55d6a1e21000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000021000 r-xp 00001000 fe:1c 1234                       /usr/lib/a b.so
7f0000100000-7f0000200000 rw-s 00000000 00:01 99                         /SYSV00000000 (deleted)
7ffd40000000-7ffd40021000 r-xp 00000000 00:00 0                          [vdso]
7ffd50000000-7ffd50021000 rw-p 00000000 00:00 0                          [stack]
");
        let private: Vec<bool> = maps.iter().map(MapsLine::is_private_anonymous).collect();
        assert_eq!(private, [true, true, false, false, false, true]);
        assert_eq!(
            (maps[0].start, maps[0].end),
            (0x2000_0000_0000, 0x2000_0040_0000)
        );
        assert_eq!((maps[2].device, maps[2].inode), ((0xfe, 0x1c), 1234));
        assert!(maps[2].executable && !maps[1].executable && maps[2].offset == 0x1000);
        assert_eq!(maps[2].last_name().bytes(), b"a b.so");
        assert!(!maps[2].writable && maps[2].private && maps[2].is_named(b"/usr/lib/a b"));
        assert!(maps[3].writable && !maps[3].private && maps[3].is_named(b"/SYSV"));
        assert!(maps[4].is_kernels());
    }

    #[test]
    fn an_inode_may_end_the_line() {
        let maps = all("1000-2000 rw-p 00000000 00:00 7\n3000-4000 rw-p 00000000 00:00 0\n");
        assert_eq!((maps[0].inode, maps[1].inode), (7, 0));
    }

    proptest! {
        #[test]
        fn parses_any_line(
            start in 0usize..1 << 47, length in 1usize..1 << 40, writable: bool, private: bool,
            major in 0u64..4096, minor in 0u64..1 << 20, inode: u64, name in "(/[ -~]{0,4000})?",
        ) {
            let end = start + length;
            let (w, p) = (if writable { 'w' } else { '-' }, if private { 'p' } else { 's' });
            let device = format!("{major:02x}:{minor:02x}");
            let line = format!("{start:x}-{end:x} r{w}-{p} 0001f000 {device} {inode} {name}\n");
            let [mapping] = all(&line)[..] else { panic!("one line, one mapping") };
            prop_assert_eq!((mapping.start, mapping.end), (start, end));
            prop_assert_eq!((mapping.writable, mapping.private), (writable, private));
            prop_assert_eq!((mapping.device, mapping.inode), ((major, minor), inode));
            prop_assert!(mapping.is_named(&name.as_bytes()[..name.len().min(16)]));
        }

        #[test]
        fn accepts_any_bytes(bytes: Vec<u8>) {
            let mut lines = Lines::default();
            for byte in bytes {
                let _ = lines.push(byte);
            }
        }
    }
}
