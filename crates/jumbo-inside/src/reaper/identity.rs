//! Which user the calling thread is, and whether it could become another: [`is_fixed`].
//!
//! The sibling stays for ever what the program was when it made it. Where the program stays that too, what
//! happens in the sibling's name is nothing that the program could not have in its own.
#![expect(unsafe_code, reason = "the kernel writes IDs and capabilities")]

use super::raw;

/// What capget(2) and capset(2) are told first, of the caller: `_LINUX_CAPABILITY_VERSION_3`, Linux 2.6.26.
pub(super) const CAPABILITIES: [u32; 2] = [0x2008_0522, 0];

/// Whether the user and group of the calling thread are one each (real, effective and saved), and no
/// capability is permitted that could change them. Both can still come with a user namespace of its own,
/// which the kernel gives no process that shares memory, and with exec, after which the memory is another.
pub(super) fn is_fixed() -> bool {
    is_one(libc::SYS_getresuid) && is_one(libc::SYS_getresgid) && is_without_capabilities()
}

/// Whether getresuid(2), or getresgid(2), tells the same ID three times.
fn is_one(call: libc::c_long) -> bool {
    let mut ids = [0u32; 3];
    let [real, effective, saved] = ids.each_mut().map(|id| (&raw mut *id).expose_provenance());
    // SAFETY: the kernel writes one ID to each.
    let answer = unsafe { raw::call(call, [real, effective, saved, 0, 0, 0]) };
    let [real, effective, saved] = ids;
    answer == 0 && real == effective && effective == saved
}

/// Whether the permitted set is empty; so the effective and the ambient one are, too.
fn is_without_capabilities() -> bool {
    const PERMITTED: [usize; 2] = [1, 4];
    // Effective, permitted, inheritable; the low halves, then the high ones.
    let (header, mut sets) = (CAPABILITIES, [u32::MAX; 6]);
    let arguments = [
        (&raw const header).expose_provenance(),
        (&raw mut sets).expose_provenance(),
        0,
        0,
        0,
        0,
    ];
    // SAFETY: the kernel writes six words, and writes no header whose version it knows.
    let answer = unsafe { raw::call(libc::SYS_capget, arguments) };
    answer == 0 && PERMITTED.iter().all(|at| sets.get(*at) == Some(&0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_capabilities_may_become_another() {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = |key: &str| {
            status
                .lines()
                .find_map(|line| line.strip_prefix(key))
                .unwrap()
        };
        let none = line("CapPrm:").trim().bytes().all(|digit| digit == b'0');
        let one = |key: &str| {
            let ids: Vec<&str> = line(key).split_whitespace().take(3).collect();
            ids.iter().all(|id| *id == ids[0])
        };
        assert_eq!(is_without_capabilities(), none);
        assert_eq!(is_one(libc::SYS_getresuid), one("Uid:"));
        assert_eq!(is_fixed(), none && one("Uid:") && one("Gid:"));
    }
}
