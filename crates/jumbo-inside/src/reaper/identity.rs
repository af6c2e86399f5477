//! Which user the calling thread is, and whether it could become another: [`is_fixed`], [`stays`].
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
    let is_one = |call| one(call).is_some();
    is_one(libc::SYS_getresuid) && is_one(libc::SYS_getresgid) && is_without_capabilities()
}

/// The IDs that a call sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ids {
    /// setuid(2) and its kin.
    User,
    /// setgid(2) and its kin.
    Group,
}

/// Whether a call that asks for these IDs (`u32::MAX`: as it is) leaves the calling thread who it is, whatever the call
/// answers. Where the thread's three IDs differ it may not.
pub fn stays(ids: Ids, wanted: &[u32]) -> bool {
    let now = match ids {
        Ids::User => one(libc::SYS_getresuid),
        Ids::Group => one(libc::SYS_getresgid),
    };
    let is_same = |now| wanted.iter().all(|id| *id == now || *id == u32::MAX);
    now.is_some_and(is_same) || is_fixed()
}

/// The ID that getresuid(2), or getresgid(2), tells three times.
fn one(call: libc::c_long) -> Option<u32> {
    let mut ids = [0u32; 3];
    let [real, effective, saved] = ids.each_mut().map(|id| (&raw mut *id).expose_provenance());
    // SAFETY: the kernel writes one ID to each.
    let answer = unsafe { raw::call(call, [real, effective, saved, 0, 0, 0]) };
    let [real, effective, saved] = ids;
    (answer == 0 && real == effective && effective == saved).then_some(real)
}

/// Where in the answer of capget(2) the permitted set is: effective, permitted, inheritable; the low halves, then the
/// high ones.
const PERMITTED: [usize; 2] = [1, 4];

/// Whether the permitted set is empty; so the effective and the ambient one are, too.
fn is_without_capabilities() -> bool {
    capabilities().is_some_and(|sets| permitted_alone(sets) == [0; 6])
}

/// The three sets of the calling thread, as capget(2) tells them.
pub(super) fn capabilities() -> Option<[u32; 6]> {
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
    (answer == 0).then_some(sets)
}

/// These sets with the permitted one alone.
pub(super) fn permitted_alone(mut sets: [u32; 6]) -> [u32; 6] {
    for (at, half) in sets.iter_mut().enumerate() {
        *half *= u32::from(PERMITTED.contains(&at));
    }
    sets
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
        let is_one = |key: &str| {
            let ids: Vec<&str> = line(key).split_whitespace().take(3).collect();
            ids.iter().all(|id| *id == ids[0])
        };
        assert_eq!(is_without_capabilities(), none);
        assert_eq!(one(libc::SYS_getresuid).is_some(), is_one("Uid:"));
        assert_eq!(is_fixed(), none && is_one("Uid:") && is_one("Gid:"));
    }

    #[test]
    fn a_call_for_who_the_thread_is_changes_nothing() {
        let own = rustix::process::getuid().as_raw();
        assert!(stays(Ids::User, &[own]) && stays(Ids::User, &[u32::MAX, own, own]));
        assert_eq!(stays(Ids::User, &[own, own + 1]), is_fixed());
        assert_eq!(
            stays(Ids::Group, &[rustix::process::getgid().as_raw() + 1]),
            is_fixed()
        );
    }
}
