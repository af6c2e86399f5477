//! [`listens`]: reports whether a server accepts connections, by the kernel's socket tables.
//!
//! A load that connects too early may hang instead of failing (redis-benchmark does).

use std::collections::BTreeSet;
use std::fs;

use jumbo_host::kernel::Root;
use jumbo_host::kernel::process::tree;

/// A table under /proc/PID/net: name, columns of state and inode, state of a listener.
type SocketTable = (&'static str, usize, usize, &'static str);

/// `0A` is TCP_LISTEN; bit 16 of the flags is `__SO_ACCEPTCON`.
///
/// # References
/// proc_pid_net(5)
const SOCKET_TABLES: [SocketTable; 3] = [
    ("tcp", 3, 9, "0A"),
    ("tcp6", 3, 9, "0A"),
    ("unix", 3, 6, "00010000"),
];

/// Reports whether `pid` or a descendant has a listening socket. False without permission.
pub(super) fn listens(root: &Root, pid: u32) -> bool {
    let mut left = vec![pid];
    while let Some(pid) = left.pop() {
        left.extend(tree::children(root, pid));
        let sockets = sockets(root, pid);
        let is_listening = |table| has_listener(root, pid, table, &sockets);
        if !sockets.is_empty() && SOCKET_TABLES.into_iter().any(is_listening) {
            return true;
        }
    }
    false
}

/// Inodes of the sockets that `pid` has open.
fn sockets(root: &Root, pid: u32) -> BTreeSet<String> {
    let Ok(files) = fs::read_dir(root.path(format!("proc/{pid}/fd"))) else {
        return BTreeSet::new();
    };
    let links = files
        .flatten()
        .filter_map(|file| file.path().read_link().ok());
    let inode = |link: std::path::PathBuf| {
        let inode = link.to_str()?.strip_prefix("socket:[")?;
        Some(inode.strip_suffix(']')?.to_owned())
    };
    links.filter_map(inode).collect()
}

fn has_listener(
    root: &Root,
    pid: u32,
    (name, state, inode, listening): SocketTable,
    sockets: &BTreeSet<String>,
) -> bool {
    let table = root.read(format!("proc/{pid}/net/{name}"));
    let table = table.unwrap_or_default();
    table.lines().skip(1).any(|line| {
        let columns: Vec<_> = line.split_ascii_whitespace().collect();
        columns.get(state) == Some(&listening)
            && columns
                .get(inode)
                .is_some_and(|inode| sockets.contains(*inode))
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn listening_sockets_are_found() {
        // Another test of this process may listen meanwhile, but not a child without sockets.
        let mut sleeps = std::process::Command::new("sleep")
            .arg("1000")
            .spawn()
            .unwrap();
        assert!(!listens(&Root::host(), sleeps.id()));
        sleeps.kill().unwrap();
        sleeps.wait().unwrap();
        let own = || listens(&Root::host(), std::process::id());
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(own());
        drop(tcp);
        let folder = tempfile::tempdir().unwrap();
        let _unix = UnixListener::bind(folder.path().join("socket")).unwrap();
        assert!(own());
    }
}
