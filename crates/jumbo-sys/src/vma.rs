//! The mapping of an address, by the PROCMAP_QUERY request.

use core::ops::Range;

use rustix::io::Result;
use rustix::ioctl::{Opcode, opcode};

use super::{File, control, open};

/// Argument of PROCMAP_QUERY (`struct procmap_query`, linux/fs.h).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Query {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}

/// `_IOWR('f', 17, struct procmap_query)`.
pub(super) const PROCMAP_QUERY: Opcode = opcode::read_write::<Query>(b'f', 17);

const VMA_WRITABLE: u64 = 1 << 1;
const VMA_EXECUTABLE: u64 = 1 << 2;
const VMA_SHARED: u64 = 1 << 3;

/// Open /proc/self/maps.
#[derive(Debug)]
pub struct Maps(File);

/// Mapping of this process.
#[derive(Clone, Debug)]
pub struct Vma {
    /// Addresses of the mapping.
    pub range: Range<usize>,
    /// Private, and without a file, /dev/zero and hugetlb included.
    pub is_private_anonymous: bool,
    /// Writable for the program.
    pub is_writable: bool,
    /// Executable for the program.
    pub is_executable: bool,
}

impl Maps {
    /// Opens the file.
    ///
    /// # Errors
    /// Those of open(2): no /proc, no free descriptor.
    pub fn open() -> Result<Self> {
        open(c"/proc/self/maps").map(Self)
    }

    /// Returns the mapping that contains `address`.
    ///
    /// # References
    /// PROCMAP_QUERY in linux/fs.h; Linux 6.11.
    ///
    /// # Errors
    /// ENOENT: no mapping; ENOTTY: an older kernel.
    pub fn mapping(&self, address: usize) -> Result<Vma> {
        let mut query = Query {
            size: size_of::<Query>() as u64,
            query_addr: address as u64,
            ..Query::default()
        };
        #[expect(unsafe_code, reason = "an ioctl that rustix lacks")]
        // SAFETY: the request reads and writes a `struct procmap_query`, which `Query` is. The
        // sizes of the name and the build ID are 0, so the kernel writes only to `query`.
        unsafe {
            control(&self.0, PROCMAP_QUERY, &mut query)?;
        }
        let at = |address| usize::try_from(address).unwrap_or(0);
        Ok(Vma {
            range: at(query.vma_start)..at(query.vma_end),
            is_private_anonymous: query.vma_flags & VMA_SHARED == 0
                && (query.inode, query.dev_major, query.dev_minor) == (0, 0, 0),
            is_writable: query.vma_flags & VMA_WRITABLE != 0,
            is_executable: query.vma_flags & VMA_EXECUTABLE != 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn a_mapping_is_told_from_its_neighbours() {
        let maps = Maps::open().unwrap();
        let local = 0u8;
        let stack = match maps.mapping(std::ptr::from_ref(&local).addr()) {
            Err(Errno::NOTTY) => return eprintln!("skipped: no PROCMAP_QUERY (Linux 6.11)"),
            stack => stack.unwrap(),
        };
        assert!(stack.is_private_anonymous);
        assert!(stack.range.contains(&std::ptr::from_ref(&local).addr()));
        let code = a_mapping_is_told_from_its_neighbours as fn() as *const u8;
        let code = maps.mapping(code.addr()).unwrap();
        assert!(!code.is_private_anonymous, "a file's: {code:?}");
        assert!(code.is_executable && !stack.is_executable);
        assert_eq!(maps.mapping(0).unwrap_err(), Errno::NOENT);
    }
}
