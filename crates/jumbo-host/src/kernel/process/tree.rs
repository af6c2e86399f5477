//! The processes of a program, and their anonymous memory.

use procfs_core::process::StatM;

use super::ProcessState;
use crate::kernel::{FileError, Root, parse};
use crate::units::Bytes;

/// Children of all threads of `pid`. Empty where the process is gone, and without
/// CONFIG_PROC_CHILDREN.
pub fn children(root: &Root, pid: u32) -> Vec<u32> {
    let mut children = Vec::new();
    for thread in root.list(format!("proc/{pid}/task")).unwrap_or_default() {
        let list = root.read(format!("proc/{pid}/task/{thread}/children"));
        let list = list.unwrap_or_default();
        children.extend(list.split_ascii_whitespace().flat_map(str::parse::<u32>));
    }
    children
}

/// Reports whether `pid` is `ancestor` or a descendant of it. False where a process between them is
/// gone.
pub fn is_within(root: &Root, pid: u32, ancestor: u32) -> bool {
    let mut pid = pid;
    while pid > 1 {
        if pid == ancestor {
            return true;
        }
        pid = ProcessState::read(root, pid).map_or(0, |process| process.parent);
    }
    false
}

/// Reports whether a process or thread exists, zombies included.
pub fn exists(root: &Root, pid: u32) -> bool {
    root.path(format!("proc/{pid}")).exists()
}

/// Resident anonymous memory of `pid`. The kernel's counters lag by a few pages per thread. Zero
/// for a zombie.
pub fn resident_anonymous(root: &Root, pid: u32) -> Result<Bytes, FileError> {
    let pages: StatM = parse(root, &format!("proc/{pid}/statm"))?;
    let page = rustix::param::page_size() as u64;
    Ok(Bytes(pages.resident.saturating_sub(pages.shared) * page))
}

/// Reports whether both processes share their memory, as after vfork(2). `None` without the
/// permission to trace both, or without the call.
///
/// # References
/// kcmp(2), Linux 3.5
#[expect(unsafe_code, reason = "libc has no function for this system call")]
pub fn shares_memory(one: u32, other: u32) -> Option<bool> {
    const KCMP_VM: u32 = 1;
    // SAFETY: the call takes numbers and touches no memory.
    let order = unsafe { libc::syscall(libc::SYS_kcmp, one, other, KCMP_VM, 0, 0) };
    (order >= 0).then_some(order == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_found_with_memory_of_its_own() {
        let (root, own) = (Root::host(), std::process::id());
        let mut sleep = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        assert!(children(&root, own).contains(&sleep.id()));
        assert!(is_within(&root, sleep.id(), own) && is_within(&root, own, own));
        assert!(!is_within(&root, own, sleep.id()));
        assert_eq!(shares_memory(own, own), Some(true));
        assert_eq!(shares_memory(own, sleep.id()), Some(false));
        assert!(resident_anonymous(&root, own).unwrap() > Bytes(0));
        sleep.kill().unwrap();
        sleep.wait().unwrap();
        assert!(
            resident_anonymous(&root, sleep.id())
                .unwrap_err()
                .is_missing()
        );
        assert_eq!(shares_memory(own, sleep.id()), None);
        assert!(children(&root, sleep.id()).is_empty());
    }
}
