//! System calls for memory policies and nodes.

use rustix::io::Result;

use crate::request;
use crate::units::NodeId;

/// Supported nodes: the bits of a word.
const MAX_NODES: usize = 64;
/// Words of a mask: the kernel refuses one that is too short for its MAX_NUMNODES.
const WORDS: usize = 1024 / MAX_NODES;
/// MPOL_F_MEMS_ALLOWED of <linux/mempolicy.h>.
const MEMS_ALLOWED: u32 = 1 << 2;
/// The flags that share a word with the mode (MPOL_MODE_FLAGS).
const MODE_FLAGS: i32 = 0b111 << 13;

/// Effect of a thread's memory policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyMode {
    /// MPOL_DEFAULT and MPOL_LOCAL: near the thread.
    Local,
    /// MPOL_BIND: nowhere else.
    Bind,
    /// MPOL_PREFERRED and MPOL_PREFERRED_MANY: there first.
    Preferred,
    /// MPOL_INTERLEAVE and MPOL_WEIGHTED_INTERLEAVE: there in turn.
    Interleave,
}

#[expect(unsafe_code, reason = "a system call that rustix lacks")]
fn get_mempolicy(flags: u32) -> Result<(i32, u64)> {
    let (mut mode, mut mask) = (0i32, [0u64; WORDS]);
    let addresses = [
        (&raw mut mode).expose_provenance(),
        mask.as_mut_ptr().expose_provenance(),
    ];
    let arguments = [
        addresses[0],
        addresses[1],
        WORDS * MAX_NODES,
        0,
        flags as usize,
        0,
    ];
    // SAFETY: the kernel writes one int and WORDS words, and there is room for both; no address is
    // asked about.
    unsafe { request(libc::SYS_get_mempolicy, arguments)? };
    Ok((mode, mask[0]))
}

/// `get_mempolicy(NULL, mask, MPOL_F_MEMS_ALLOWED)`: the nodes of the thread's cpuset, a bit each,
/// of the first 64.
///
/// # References
/// get_mempolicy(2); Linux 2.6.24.
///
/// # Errors
/// ENOSYS: a kernel without NUMA; EPERM: seccomp.
pub fn allowed_nodes() -> Result<u64> {
    get_mempolicy(MEMS_ALLOWED).map(|(_, nodes)| nodes)
}

/// `get_mempolicy(mode, mask, 0)`: the thread's memory policy, and its nodes.
///
/// # References
/// get_mempolicy(2); Linux 2.6.7.
///
/// # Errors
/// Same as [`allowed_nodes`].
pub fn memory_policy() -> Result<(PolicyMode, u64)> {
    let (mode, nodes) = get_mempolicy(0)?;
    let mode = match mode & !MODE_FLAGS {
        1 | 5 => PolicyMode::Preferred,
        2 => PolicyMode::Bind,
        3 | 6 => PolicyMode::Interleave,
        _ => PolicyMode::Local,
    };
    Ok((mode, nodes))
}

/// `mbind(address, length, MPOL_BIND, nodes)`: later allocations in the range come from `nodes` (a
/// bit each) or fail.
///
/// Safe for any range: the content does not change.
///
/// # References
/// mbind(2); Linux 2.6.7.
///
/// # Errors
/// EINVAL: a node that is not there or not in the cpuset; ENOSYS: a kernel without NUMA.
#[expect(unsafe_code, reason = "a system call that rustix lacks")]
pub fn bind(address: usize, length: usize, nodes: u64) -> Result<()> {
    const MPOL_BIND: usize = 2;
    let mut mask = [0u64; WORDS];
    mask[0] = nodes;
    let mask = mask.as_ptr().expose_provenance();
    let arguments = [address, length, MPOL_BIND, mask, WORDS * MAX_NODES, 0];
    // SAFETY: the kernel reads WORDS words, which are there, and a policy changes no byte of
    // memory.
    unsafe { request(libc::SYS_mbind, arguments) }.map(drop)
}

/// `getcpu(NULL, node)`: the node that the thread runs on at this moment.
///
/// # References
/// getcpu(2); Linux 2.6.19.
///
/// # Errors
/// ENOSYS: seccomp.
#[expect(unsafe_code, reason = "a system call that rustix lacks")]
pub fn local_node() -> Result<NodeId> {
    let mut node = 0u32;
    let arguments = [0, (&raw mut node).expose_provenance(), 0, 0, 0, 0];
    // SAFETY: the kernel writes one unsigned int, for which there is room.
    unsafe { request(libc::SYS_getcpu, arguments)? };
    Ok(NodeId(node))
}
