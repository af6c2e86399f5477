//! The setting for the next boot, in the form of the host: [`Boot`].
//!
//! `sysctl.d` holds what is a sysctl: the default page size on all nodes together. Everything else is a
//! file of /sys, which `tmpfiles.d` can write early in the boot. Pages larger than the page allocator's
//! largest block need memory that is still in one piece, and a boot script may be too late for that:
//! the kernel command line is what they need, which is the boot loader's and is printed, not written.
//!
//! Both are whole files of ours, so that removing the setting leaves nothing behind and touches nothing of
//! anybody else. Each page size has files of its own (there is one default size), as it has a lock and
//! records of its own: putting one size back does not touch what was set for another since.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::change::{Knob, What};
use super::journal::{clear, replace, sync_folder};
use crate::kernel::hugetlb::{self, Pool};
use crate::kernel::{FileError, Root};
use crate::units::{NodeId, PageSize, Pages};

const SYSCTL: &str = "etc/sysctl.d/60-jumbo-pool.conf";
const TMPFILES: &str = "etc/tmpfiles.d";
const TMPFILES_PREFIX: &str = "jumbo-pool-";

/// What the host has that reads such files: any of these.
const SYSCTL_READERS: [&str; 5] = [
    "usr/lib/systemd/systemd-sysctl",
    "lib/systemd/systemd-sysctl",
    "usr/sbin/sysctl",
    "sbin/sysctl",
    "bin/sysctl",
];
const TMPFILES_READERS: [&str; 4] = [
    "usr/bin/systemd-tmpfiles",
    "bin/systemd-tmpfiles",
    "usr/sbin/tmpfiles",
    "sbin/tmpfiles",
];

const HEADER: &str =
    "# Written by `jumbo pool set --persist`; `jumbo pool set --forget` removes it.\n";

/// A file with its content before and after; `None`: no file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileChange {
    /// Its path below the root.
    pub file: String,
    /// What is in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<String>,
    /// What is to be in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
}

/// How the next boot is told.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Boot {
    /// The files that change.
    pub files: Vec<FileChange>,
    /// What belongs on the kernel command line, where only that is sure to work.
    pub command_line: Option<String>,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// A line of one of our files: what it sets, and the value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Setting {
    /// The knob.
    #[serde(flatten)]
    pub knob: Knob,
    /// Its value.
    pub value: Pages,
    /// The file it stands in, below the root.
    pub file: String,
}

impl FileChange {
    /// Makes the file what it is to be.
    ///
    /// # Errors
    /// [`FileError::Io`].
    pub fn apply(&self, root: &Root) -> Result<(), FileError> {
        self.put(root, self.after.as_deref())
    }

    /// Makes the file what it was.
    ///
    /// # Errors
    /// [`FileError::Io`].
    pub fn revert(&self, root: &Root) -> Result<(), FileError> {
        self.put(root, self.before.as_deref())
    }

    /// Removes what a process left beside the file that was killed while it wrote it.
    pub(super) fn clear_up(&self, root: &Root) {
        clear(&root.path(&self.file));
    }

    fn put(&self, root: &Root, content: Option<&str>) -> Result<(), FileError> {
        let path = root.path(&self.file);
        let folder = path.parent().unwrap_or(Path::new("/"));
        let done = match content {
            Some(text) => fs::create_dir_all(folder).and_then(|()| replace(&path, text, 0o644)),
            None => match fs::remove_file(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                done => done.and_then(|()| sync_folder(folder)),
            },
        };
        done.map_err(|source| FileError::Io {
            operation: if content.is_some() { "write" } else { "remove" },
            path,
            source,
        })
    }
}

/// Which files this host reads at boot.
#[derive(Clone, Copy, Debug)]
struct Forms {
    sysctl: bool,
    tmpfiles: bool,
}

impl Forms {
    fn of(root: &Root) -> Self {
        let any = |files: &[&str]| files.iter().any(|file| root.path(file).exists());
        Self {
            sysctl: any(&SYSCTL_READERS),
            tmpfiles: any(&TMPFILES_READERS),
        }
    }
}

/// The lines of our files, by knob.
type Lines = BTreeMap<String, Setting>;

/// What it takes to have `pool` with these numbers after the next boot.
///
/// # Errors
/// [`FileError`] where our files, or what tells the sizes, cannot be read.
pub fn persist(
    root: &Root,
    pool: &Pool,
    values: &[(Knob, Pages)],
    gigantic: bool,
) -> Result<Boot, FileError> {
    let (forms, default) = (Forms::of(root), hugetlb::default_size(root)?);
    let mut lines = read(root, pool.size, default)?;
    let mut boot = Boot::default();
    for (knob, value) in values {
        // A total and a part of it would be written in an order that nobody guarantees.
        let clashes = |other: &Knob| {
            other.size == knob.size
                && other.what == knob.what
                && other.node.is_some() != knob.node.is_some()
        };
        if lines.values().any(|setting| clashes(&setting.knob)) {
            boot.notes.push(format!(
                "what stood there for {} pages {} goes",
                pool.size,
                if knob.node.is_some() {
                    "on all nodes together"
                } else {
                    "on single nodes"
                }
            ));
            lines.retain(|_, setting| !clashes(&setting.knob));
        }
        let as_sysctl = Some(knob.size) == default && knob.node.is_none() && forms.sysctl;
        let file = match (as_sysctl, forms.tmpfiles) {
            (true, _) => SYSCTL.to_owned(),
            (false, true) => tmpfiles(knob.size),
            (false, false) => {
                boot.notes.push(format!(
                    "nothing on this host sets the {knob} at boot: neither sysctl nor systemd-tmpfiles \
                     is here for it"
                ));
                continue;
            }
        };
        let setting = Setting {
            knob: *knob,
            value: *value,
            file,
        };
        lines.insert(knob.file(), setting);
    }
    let written = values
        .iter()
        .all(|(knob, _)| lines.contains_key(&knob.file()));
    if gigantic || !written {
        boot.command_line = command_line(pool.size, values);
    }
    boot.files = changes(root, pool.size, default, &lines)?;
    boot.notes.extend(others(root, pool.size, default));
    Ok(boot)
}

/// What it takes to have nothing of ours about `size`, or about its part on `node`, at the next boot.
///
/// # Errors
/// [`FileError`] where our files cannot be read.
pub fn forget(root: &Root, size: PageSize, node: Option<NodeId>) -> Result<Boot, FileError> {
    let default = hugetlb::default_size(root)?;
    let mut lines = read(root, size, default)?;
    lines.retain(|_, setting| node.is_some() && setting.knob.node != node);
    Ok(Boot {
        files: changes(root, size, default, &lines)?,
        command_line: None,
        notes: others(root, size, default),
    })
}

/// What our files set at the next boot.
///
/// # Errors
/// [`FileError`] where they cannot be read.
pub fn settings(root: &Root) -> Result<Vec<Setting>, FileError> {
    let default = hugetlb::default_size(root)?;
    let size = |name: &String| {
        let size = name.strip_prefix(TMPFILES_PREFIX)?.strip_suffix(".conf")?;
        size.parse::<PageSize>().ok()
    };
    let names = match root.list(TMPFILES) {
        Err(error) if error.is_missing() => Vec::new(),
        names => names?,
    };
    let sizes: BTreeSet<_> = names.iter().filter_map(size).chain(default).collect();
    let mut settings = Vec::new();
    for size in sizes {
        settings.extend(read(root, size, default)?.into_values());
    }
    Ok(settings)
}

fn tmpfiles(size: PageSize) -> String {
    format!("{TMPFILES}/{TMPFILES_PREFIX}{size}.conf")
}

/// `hugepagesz=1G hugepages=4`, which the kernel does before anything has broken memory up. Nodes can
/// be named since Linux 5.16.
fn command_line(size: PageSize, values: &[(Knob, Pages)]) -> Option<String> {
    let mut persistent = values
        .iter()
        .filter(|(knob, _)| knob.what == What::Persistent);
    let (knob, pages) = persistent.next()?;
    let pages = match knob.node {
        Some(node) => format!("{node}:{pages}"),
        None => pages.to_string(),
    };
    Some(format!("hugepagesz={size} hugepages={pages}"))
}

fn sysctl(what: What) -> &'static str {
    match what {
        What::Persistent => "vm.nr_hugepages",
        What::Overcommit => "vm.nr_overcommit_hugepages",
    }
}

/// The lines about `size`.
fn read(root: &Root, size: PageSize, default: Option<PageSize>) -> Result<Lines, FileError> {
    let mut lines = Lines::new();
    let mut add = |knob: Knob, value: &str, file: &str| {
        if let Ok(value) = value.trim().parse() {
            let setting = Setting {
                knob,
                value: Pages(value),
                file: file.to_owned(),
            };
            lines.insert(knob.file(), setting);
        }
    };
    let both = [What::Persistent, What::Overcommit];
    let sysctls = if default == Some(size) {
        text(root, SYSCTL)?
    } else {
        None
    };
    for line in sysctls.iter().flat_map(|text| text.lines()) {
        let Some((name, value)) = line.split_once('=') else {
            continue;
        };
        if let Some(what) = both.into_iter().find(|what| sysctl(*what) == name.trim()) {
            let node = None;
            add(Knob { size, what, node }, value, SYSCTL);
        }
    }
    let file = tmpfiles(size);
    for line in text(root, &file)?.iter().flat_map(|text| text.lines()) {
        // w /sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages - - - - 4
        let words: Vec<_> = line.split_whitespace().collect();
        if let ["w", path, _, _, _, _, value] = *words.as_slice()
            && let Some(knob) = knob_of(path).filter(|knob| knob.size == size)
        {
            add(knob, value, &file);
        }
    }
    Ok(lines)
}

/// A file's text; `None` where there is no file.
fn text(root: &Root, file: &str) -> Result<Option<String>, FileError> {
    match root.read(file) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.is_missing() => Ok(None),
        Err(error) => Err(error),
    }
}

/// The knob behind a path, as [`Knob::file`] makes it.
fn knob_of(path: &str) -> Option<Knob> {
    let parts: Vec<_> = path.split('/').collect();
    let &[.., folder, file] = parts.as_slice() else {
        return None;
    };
    let kib: u64 = folder
        .strip_prefix("hugepages-")?
        .strip_suffix("kB")?
        .parse()
        .ok()?;
    let size = PageSize::new(kib.checked_mul(1024)?).ok()?;
    let what = match file {
        "nr_hugepages" => What::Persistent,
        "nr_overcommit_hugepages" => What::Overcommit,
        _ => return None,
    };
    let number = |part: &&str| part.strip_prefix("node")?.parse().ok();
    let node = parts.iter().find_map(number).map(NodeId);
    let knob = Knob { size, what, node };
    (path.trim_start_matches('/') == knob.file()).then_some(knob)
}

/// The files of `size` with these lines in them, where that is not what they are.
fn changes(
    root: &Root,
    size: PageSize,
    default: Option<PageSize>,
    lines: &Lines,
) -> Result<Vec<FileChange>, FileError> {
    let mut changes = Vec::new();
    let sysctls = (default == Some(size)).then(|| SYSCTL.to_owned());
    for file in sysctls.into_iter().chain([tmpfiles(size)]) {
        let before = text(root, &file)?;
        let written: String = lines
            .values()
            .filter(|setting| setting.file == file)
            .map(|Setting { knob, value, .. }| match &*file {
                SYSCTL => format!("{} = {value}\n", sysctl(knob.what)),
                _ => format!("w /{} - - - - {value}\n", knob.file()),
            })
            .collect();
        let after = (!written.is_empty()).then(|| format!("{HEADER}{written}"));
        if before != after {
            changes.push(FileChange {
                file,
                before,
                after,
            });
        }
    }
    Ok(changes)
}

/// Files of others that set the same: which of them wins at boot is the order of their names.
fn others(root: &Root, size: PageSize, default: Option<PageSize>) -> Vec<String> {
    let mut found = Vec::new();
    let mut look = |file: String| {
        let Ok(text) = root.read(&file) else {
            return;
        };
        let folder = format!("hugepages-{}kB/", size.kib());
        let sets = |line: &str| {
            let line = line.trim_start();
            let name = line
                .split('=')
                .next()
                .unwrap_or("")
                .trim()
                .trim_start_matches('-');
            let is_sysctl = name.replace('/', ".").starts_with("vm.nr_");
            let is_sysctl = is_sysctl && name.ends_with("hugepages") && Some(size) == default;
            !line.starts_with(['#', ';']) && (is_sysctl || line.contains(&folder))
        };
        if text.lines().any(sets) {
            found.push(format!(
                "/{file} sets {size} pages too, and may win at boot"
            ));
        }
    };
    for kind in ["sysctl.d", "tmpfiles.d"] {
        for place in ["etc", "run", "usr/local/lib", "usr/lib"] {
            let folder = format!("{place}/{kind}");
            let names = root.list(&folder).unwrap_or_default();
            let files = names.into_iter().map(|name| format!("{folder}/{name}"));
            // /etc/sysctl.conf is there under this name too.
            let files =
                files.filter(|file| file.ends_with(".conf") && !file.ends_with("99-sysctl.conf"));
            let ours = tmpfiles(size);
            files
                .filter(|file| *file != SYSCTL && *file != ours)
                .for_each(&mut look);
        }
    }
    look("etc/sysctl.conf".to_owned());
    if let Ok(line) = root.read("proc/cmdline")
        && line.contains(&format!("hugepagesz={size}"))
    {
        found.push(format!(
            "the kernel command line sets {size} pages too: `{}`",
            line.trim()
        ));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Host(tempfile::TempDir);

    impl Host {
        fn with(readers: &[&str]) -> Self {
            let host = Self(tempfile::tempdir().unwrap());
            host.write("proc/meminfo", MEMINFO);
            for reader in readers {
                host.write(reader, "");
            }
            host
        }

        fn write(&self, file: &str, text: &str) {
            let path = self.0.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn root(&self) -> Root {
            Root::at(self.0.path())
        }

        fn persist(&self, size: PageSize, node: Option<u32>, pages: u64) -> Boot {
            let knob = Knob {
                size,
                what: What::Persistent,
                node: node.map(NodeId),
            };
            let values = [(knob, Pages(pages))];
            let gigantic = size == PageSize::SIZE_1G;
            let boot = persist(&self.root(), &pool(size), &values, gigantic).unwrap();
            for file in &boot.files {
                file.apply(&self.root()).unwrap();
            }
            boot
        }

        fn text(&self, file: &str) -> Option<String> {
            fs::read_to_string(self.0.path().join(file)).ok()
        }
    }

    const MEMINFO: &str = "MemTotal: 1 kB\nMemFree: 1 kB\nBuffers: 0 kB\nCached: 0 kB\nSwapCached: 0 kB\n\
        Active: 0 kB\nInactive: 0 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\nDirty: 0 kB\nWriteback: 0 kB\n\
        Mapped: 0 kB\nSlab: 0 kB\nCommitted_AS: 0 kB\nVmallocTotal: 0 kB\nVmallocUsed: 0 kB\n\
        VmallocChunk: 0 kB\nHugepagesize: 2048 kB\n";
    const BOTH: &[&str] = &["usr/bin/systemd-tmpfiles", "sbin/sysctl"];

    fn pool(size: PageSize) -> Pool {
        Pool {
            size,
            total: Pages(0),
            free: Pages(0),
            reserved: Pages(0),
            surplus: Pages(0),
            overcommit: Pages(0),
            demote_size: None,
            nodes: BTreeMap::new(),
        }
    }

    #[test]
    fn the_default_size_is_a_sysctl_and_others_are_files_of_sys() {
        let host = Host::with(BOTH);
        assert_eq!(
            host.persist(PageSize::SIZE_2M, None, 512).command_line,
            None
        );
        assert_eq!(
            host.text(SYSCTL).unwrap(),
            format!("{HEADER}vm.nr_hugepages = 512\n")
        );
        let small = PageSize::new(64 << 10).unwrap();
        host.persist(small, None, 7);
        assert_eq!(
            host.text(&tmpfiles(small)).unwrap(),
            format!("{HEADER}w /sys/kernel/mm/hugepages/hugepages-64kB/nr_hugepages - - - - 7\n")
        );
        let set: Vec<_> = settings(&host.root())
            .unwrap()
            .iter()
            .map(|setting| (setting.knob.size.to_string(), setting.value.0))
            .collect();
        assert_eq!(set, [("64K".to_owned(), 7), ("2M".to_owned(), 512)]);
    }

    #[test]
    fn gigantic_pages_are_for_the_command_line_too() {
        let host = Host::with(BOTH);
        let boot = host.persist(PageSize::SIZE_1G, Some(1), 4);
        assert_eq!(
            boot.command_line.as_deref(),
            Some("hugepagesz=1G hugepages=1:4")
        );
        assert!(
            host.text(&tmpfiles(PageSize::SIZE_1G))
                .unwrap()
                .contains("/node1/hugepages/hugepages-1048576kB/")
        );
    }

    #[test]
    fn a_host_that_reads_neither_is_told_the_command_line() {
        let host = Host::with(&[]);
        let boot = host.persist(PageSize::SIZE_2M, None, 4);
        assert!(boot.files.is_empty() && boot.notes.len() == 1, "{boot:?}");
        assert_eq!(
            boot.command_line.as_deref(),
            Some("hugepagesz=2M hugepages=4")
        );
    }

    #[test]
    fn a_node_replaces_the_total_and_forgetting_leaves_nothing() {
        let host = Host::with(BOTH);
        host.persist(PageSize::SIZE_2M, None, 512);
        host.persist(PageSize::SIZE_1G, None, 1);
        let boot = host.persist(PageSize::SIZE_2M, Some(0), 3);
        assert_eq!(boot.notes.len(), 1, "{boot:?}");
        assert_eq!(host.text(SYSCTL), None);
        host.persist(PageSize::SIZE_2M, Some(1), 4);
        assert_eq!(settings(&host.root()).unwrap().len(), 3);
        let forget = |size, node| {
            let boot = forget(&host.root(), size, node).unwrap();
            boot.files
                .iter()
                .for_each(|file| file.apply(&host.root()).unwrap());
            boot
        };
        forget(PageSize::SIZE_2M, Some(NodeId(1)));
        assert_eq!(settings(&host.root()).unwrap().len(), 2);
        forget(PageSize::SIZE_2M, None);
        let last = forget(PageSize::SIZE_1G, None);
        assert_eq!(host.text(&tmpfiles(PageSize::SIZE_1G)), None);
        last.files[0].revert(&host.root()).unwrap();
        assert!(host.text(&tmpfiles(PageSize::SIZE_1G)).is_some());
    }

    #[test]
    fn what_others_set_is_named() {
        let host = Host::with(BOTH);
        host.write("etc/sysctl.d/99-database.conf", "# x\nvm.nr_hugepages=9\n");
        host.write(
            "etc/sysctl.d/10-other.conf",
            "#vm.nr_hugepages=9\nvm.swappiness=1\n",
        );
        host.write("proc/cmdline", "quiet hugepagesz=1G hugepages=2\n");
        let notes = host.persist(PageSize::SIZE_2M, None, 1).notes;
        assert_eq!(notes.len(), 1, "{notes:?}");
        assert!(notes[0].starts_with("/etc/sysctl.d/99-database.conf"));
        assert!(host.persist(PageSize::SIZE_1G, None, 1).notes[0].contains("command line"));
    }
}
