//! User, group and capabilities of the calling thread: [`is_fixed`], [`keeps_ids`].
//!
//! The reaper keeps the identity that the program had when it started. If the program keeps it too,
//! the reaper can do nothing that the program could not.
#![expect(unsafe_code, reason = "the kernel writes IDs and capabilities")]

use super::raw;

/// Header of capget(2) and capset(2): `_LINUX_CAPABILITY_VERSION_3` (Linux 2.6.26), and the calling
/// thread.
pub(super) const CAPABILITY_HEADER: [u32; 2] = [0x2008_0522, 0];

/// Reports whether the calling thread cannot change its IDs: the real, effective and saved ones are
/// equal, and no capability is permitted. It could still enter a new user namespace, which the
/// kernel refuses while memory is shared, or exec, which replaces the memory.
pub(super) fn is_fixed() -> bool {
    let is_single = |call| single_id(call).is_some();
    is_single(libc::SYS_getresuid) && is_single(libc::SYS_getresgid) && is_without_capabilities()
}

/// IDs that a call sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ids {
    /// IDs of setuid(2) and similar calls.
    User,
    /// IDs of setgid(2) and similar calls.
    Group,
}

/// Reports whether a call that requests these IDs (`u32::MAX`: unchanged) cannot change those of
/// the calling thread.
pub fn keeps_ids(ids: Ids, requested: &[u32]) -> bool {
    let now = match ids {
        Ids::User => single_id(libc::SYS_getresuid),
        Ids::Group => single_id(libc::SYS_getresgid),
    };
    let is_same = |now| requested.iter().all(|id| *id == now || *id == u32::MAX);
    now.is_some_and(is_same) || is_fixed()
}

/// Returns the ID of getresuid(2) or getresgid(2), if all three are equal.
fn single_id(call: libc::c_long) -> Option<u32> {
    let mut ids = [0u32; 3];
    let [real, effective, saved] = ids.each_mut().map(|id| (&raw mut *id).expose_provenance());
    // SAFETY: the kernel writes one ID to each.
    let result = unsafe { raw::call(call, [real, effective, saved, 0, 0, 0]) };
    let [real, effective, saved] = ids;
    (result == 0 && real == effective && effective == saved).then_some(real)
}

/// Indices of the permitted set in the result of capget(2): effective, permitted, inheritable;
/// first the low halves.
const PERMITTED: [usize; 2] = [1, 4];

/// Reports whether the permitted set is empty, and so the effective and the ambient one.
fn is_without_capabilities() -> bool {
    capabilities().is_some_and(|sets| permitted_alone(sets) == [0; 6])
}

/// Returns the sets of the calling thread in the order of capget(2).
pub(super) fn capabilities() -> Option<[u32; 6]> {
    let (header, mut sets) = (CAPABILITY_HEADER, [u32::MAX; 6]);
    let arguments = [
        (&raw const header).expose_provenance(),
        (&raw mut sets).expose_provenance(),
        0,
        0,
        0,
        0,
    ];
    // SAFETY: the kernel writes six words; it writes the header only for an unknown version.
    let result = unsafe { raw::call(libc::SYS_capget, arguments) };
    (result == 0).then_some(sets)
}

/// Clears the effective and the inheritable set.
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
    fn a_thread_with_capabilities_may_change_its_ids() {
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
        assert_eq!(single_id(libc::SYS_getresuid).is_some(), is_one("Uid:"));
        assert_eq!(is_fixed(), none && is_one("Uid:") && is_one("Gid:"));
    }

    #[test]
    fn a_request_for_the_present_ids_keeps_them() {
        let own = rustix::process::getuid().as_raw();
        assert!(keeps_ids(Ids::User, &[own]) && keeps_ids(Ids::User, &[u32::MAX, own, own]));
        assert_eq!(keeps_ids(Ids::User, &[own, own + 1]), is_fixed());
        assert_eq!(
            keeps_ids(Ids::Group, &[rustix::process::getgid().as_raw() + 1]),
            is_fixed()
        );
    }
}
