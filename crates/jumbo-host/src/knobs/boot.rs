//! The setting for the next boot, in the form of the host: [`Boot`].
//!
//! `sysctl.d` holds what is a sysctl; every other knob is a file of /sys, which `tmpfiles.d` can write early in the
//! boot. Both are whole files of ours, so that removing the setting leaves nothing behind and touches nothing of
//! any other program. Each [`Group`] has files of its own, as it has a lock and records of its own: putting one group back
//! does not touch what was set for another since.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::knob::Value;
use super::known::Group;
use crate::kernel::thp::optional;
use crate::kernel::{FileError, Root};
use crate::whole_file::{self, Existing};

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

const HEADER: &str = "# Written by `jumbo ... --persist`; `--forget` removes it.\n";

/// Where sysctls are, below a [`Root`].
const SYSCTLS: &str = "proc/sys/";

/// A file with its content before and after; `None`: no file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
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
#[non_exhaustive]
pub struct Boot {
    /// The files that change; a plan has them too.
    #[serde(skip)]
    pub files: Vec<FileChange>,
    /// Knobs that no program on this host sets at boot.
    pub unset: Vec<String>,
    /// What belongs on the kernel command line, where only that is sure to work.
    pub command_line: Option<String>,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// A line of one of our files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Setting {
    /// What it writes, below the root.
    pub knob: String,
    /// The value.
    pub value: String,
    /// The file it stands in, below the root.
    pub file: String,
}

impl FileChange {
    /// Removes what a process left beside the file that was killed while it wrote it.
    pub(super) fn clear_up(&self, root: &Root) {
        whole_file::clear(&root.path(&self.file));
    }

    /// Gives the file this content, of which there is none before or after it.
    pub(crate) fn put(&self, root: &Root, content: Option<&str>) -> Result<(), FileError> {
        let path = root.path(&self.file);
        let folder = path.parent().unwrap_or(Path::new("/"));
        match content {
            Some(text) => fs::create_dir_all(folder)
                .and_then(|()| whole_file::write(&path, text.as_bytes(), 0o644, Existing::Replace))
                .map_err(FileError::io("write", &path)),
            None => whole_file::remove(&path).map_err(FileError::io("remove", &path)),
        }
    }
}

/// What our files of one group set, by knob.
type Lines = BTreeMap<String, Setting>;

/// What it takes to have these values, by file of the knob, after the next boot, and nothing of ours in the files of
/// `instead`.
///
/// # Errors
/// [`FileError`] where our files cannot be read.
pub fn persist(
    root: &Root,
    group: &Group,
    values: &[(String, Value)],
    instead: &[String],
) -> Result<Boot, FileError> {
    let any = |files: &[&str]| files.iter().any(|file| root.path(file).exists());
    let (sysctls, tmpfiles) = (any(&SYSCTL_READERS), any(&TMPFILES_READERS));
    let mut lines = read(root, group)?;
    let mut boot = Boot::default();
    for knob in instead {
        if lines.remove(knob).is_some() {
            boot.notes
                .push(format!("what stood there for /{knob} goes"));
        }
    }
    for (knob, value) in values {
        let [sysctl_file, tmpfiles_file] = files(group);
        let file = if sysctls && knob.starts_with(SYSCTLS) {
            sysctl_file
        } else if tmpfiles {
            tmpfiles_file
        } else {
            boot.notes.push(format!(
                "nothing on this host sets /{knob} at boot: neither sysctl nor systemd-tmpfiles is here for it"
            ));
            boot.unset.push(knob.clone());
            continue;
        };
        let (knob, value) = (knob.clone(), value.to_string());
        lines.insert(knob.clone(), Setting { knob, value, file });
    }
    boot.files = changes(root, group, &lines)?;
    let set = values.iter().map(|(knob, _)| knob);
    boot.notes.extend(others(root, group, set));
    Ok(boot)
}

/// What it takes to have nothing of ours about `group` at the next boot; with `only`, about these files of knobs.
///
/// # Errors
/// [`FileError`] where our files cannot be read.
pub fn forget(root: &Root, group: &Group, only: Option<&[String]>) -> Result<Boot, FileError> {
    let mut lines = read(root, group)?;
    let goes = |knob: &String| only.is_none_or(|only| only.contains(knob));
    let gone: Lines = lines.extract_if(.., |knob, _| goes(knob)).collect();
    Ok(Boot {
        files: changes(root, group, &lines)?,
        notes: others(root, group, gone.keys()),
        ..Boot::default()
    })
}

/// What our files set at the next boot.
///
/// # Errors
/// [`FileError`] where they cannot be read.
pub fn settings(root: &Root, groups: &[Group]) -> Result<Vec<Setting>, FileError> {
    let mut settings = Vec::new();
    for group in groups {
        settings.extend(read(root, group)?.into_values());
    }
    Ok(settings)
}

/// Of sysctls, and of everything else.
fn files(group: &Group) -> [String; 2] {
    let id = &group.id;
    [
        format!("etc/sysctl.d/60-jumbo-{id}.conf"),
        format!("etc/tmpfiles.d/jumbo-{id}.conf"),
    ]
}

/// `vm.nr_hugepages` for `proc/sys/vm/nr_hugepages`.
fn sysctl(knob: &str) -> Option<String> {
    Some(knob.strip_prefix(SYSCTLS)?.replace('/', "."))
}

/// The lines about `group`.
fn read(root: &Root, group: &Group) -> Result<Lines, FileError> {
    let mut lines = Lines::new();
    for file in files(group) {
        let text = optional(root.read(&file))?.unwrap_or_default();
        for line in text.lines() {
            let words: Vec<_> = line.split_whitespace().collect();
            let (knob, value) = match words.as_slice() {
                // w /sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages - - - - 4
                ["w", knob, _, _, _, _, value] => (knob.trim_start_matches('/').to_owned(), value),
                // vm.nr_hugepages = 512
                [name, "=", value] => (format!("{SYSCTLS}{}", name.replace('.', "/")), value),
                _ => continue,
            };
            let (value, file) = ((*value).to_owned(), file.clone());
            lines.insert(knob.clone(), Setting { knob, value, file });
        }
    }
    Ok(lines)
}

/// The files of `group` with these lines in them, where that is not what they are.
fn changes(root: &Root, group: &Group, lines: &Lines) -> Result<Vec<FileChange>, FileError> {
    let mut changes = Vec::new();
    for file in files(group) {
        let before = optional(root.read(&file))?;
        let is_sysctl = file.starts_with("etc/sysctl.d");
        let here = lines.values().filter(|line| line.file == file);
        let written: String = here
            .map(|Setting { knob, value, .. }| match sysctl(knob) {
                Some(name) if is_sysctl => format!("{name} = {value}\n"),
                _ => format!("w /{knob} - - - - {value}\n"),
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
fn others<'a>(
    root: &Root,
    group: &Group,
    knobs: impl IntoIterator<Item = &'a String>,
) -> Vec<String> {
    let knobs: Vec<_> = knobs.into_iter().collect();
    let sets = |line: &str| {
        let line = line.trim_start().trim_start_matches('-');
        let name = line.split('=').next().unwrap_or("").trim();
        let name = name.replace('/', ".");
        let is_set = |knob: &&String| {
            line.contains(&format!("/{knob}")) || sysctl(knob).is_some_and(|sysctl| sysctl == name)
        };
        !line.starts_with(['#', ';']) && knobs.iter().any(is_set)
    };
    let mut found = Vec::new();
    for kind in ["sysctl.d", "tmpfiles.d"] {
        for place in ["etc", "run", "usr/local/lib", "usr/lib"] {
            let folder = format!("{place}/{kind}");
            let mut names = root.list(&folder).unwrap_or_default();
            // /etc/sysctl.conf is there under that name too.
            names.retain(|name| name.ends_with(".conf") && name != "99-sysctl.conf");
            found.extend(names.into_iter().map(|name| format!("{folder}/{name}")));
        }
    }
    found.push("etc/sysctl.conf".to_owned());
    let is_set = |file: &String| root.read(file).is_ok_and(|text| text.lines().any(sets));
    found.retain(|file| !files(group).contains(file) && is_set(file));
    let name = &group.name;
    let note = |file| format!("/{file} sets {name} too, and may win at boot");
    found.into_iter().map(note).collect()
}

#[cfg(test)]
mod tests {
    use super::super::knob::Knob;
    use super::*;
    use crate::kernel::fake::{host, write};
    use crate::units::PageSize;

    const HVO: &str = "etc/sysctl.d/60-jumbo-hvo.conf";
    const THP: &str = "etc/tmpfiles.d/jumbo-thp.conf";
    const SYSCTL: (&str, &str) = ("sbin/sysctl", "");
    const TMPFILES: (&str, &str) = ("usr/bin/systemd-tmpfiles", "");

    fn set(root: &Root, group: &Group, knob: Knob, value: impl Into<Value>) -> Boot {
        let boot = persist(root, group, &[(knob.file, value.into())], &[]).unwrap();
        for file in &boot.files {
            file.put(root, file.after.as_deref()).unwrap();
        }
        boot
    }

    fn small() -> Knob {
        Knob::thp(PageSize::new(64 << 10).ok(), "enabled")
    }

    #[test]
    fn sysctls_and_files_of_sys_are_persisted_and_forgotten() {
        let (_folder, root) = host(&[TMPFILES, SYSCTL]);
        set(&root, &Group::hvo(), Knob::hvo(), 1);
        set(&root, &Group::thp(), small(), "always");
        set(&root, &Group::thp(), Knob::thp(None, "defrag"), "defer");
        let text = |file| root.read(file).unwrap();
        assert_eq!(
            text(HVO),
            format!("{HEADER}vm.hugetlb_optimize_vmemmap = 1\n")
        );
        let folder = "w /sys/kernel/mm/transparent_hugepage";
        assert_eq!(
            text(THP),
            format!(
                "{HEADER}{folder}/defrag - - - - defer\n{folder}/hugepages-64kB/enabled - - - - always\n"
            )
        );
        let groups = [Group::hvo(), Group::thp()];
        assert_eq!(settings(&root, &groups).unwrap().len(), 3);
        let one = forget(&root, &groups[1], Some(&[small().file])).unwrap();
        let put = |file: &FileChange, text: &Option<String>| file.put(&root, text.as_deref());
        put(&one.files[0], &one.files[0].after).unwrap();
        assert_eq!(settings(&root, &groups).unwrap().len(), 2);
        let all = forget(&root, &groups[1], None).unwrap();
        put(&all.files[0], &all.files[0].after).unwrap();
        assert!(root.read(THP).is_err());
        put(&all.files[0], &all.files[0].before).unwrap();
        assert_eq!(settings(&root, &groups).unwrap().len(), 2);
    }

    #[test]
    fn what_no_program_reads_is_not_written() {
        let (_folder, root) = host(&[TMPFILES]);
        set(&root, &Group::hvo(), Knob::hvo(), 0);
        assert_eq!(settings(&root, &[Group::hvo()]).unwrap()[0].value, "0");
        let (_folder, root) = host(&[SYSCTL]);
        let boot = set(&root, &Group::thp(), small(), "always");
        assert!(boot.files.is_empty() && boot.notes.len() == 1, "{boot:?}");
    }

    #[test]
    fn what_others_set_is_named() {
        let (_folder, root) = host(&[TMPFILES, SYSCTL]);
        let line = "# x\nvm.hugetlb_optimize_vmemmap=1\n";
        write(&root, "etc/sysctl.d/99-database.conf", line);
        let other = line.replace("vm", "#vm");
        write(&root, "etc/sysctl.d/10-other.conf", other);
        let never = format!("w! /{} - - - - never", small().file);
        write(&root, "usr/lib/tmpfiles.d/thp.conf", never);
        let hvo = set(&root, &Group::hvo(), Knob::hvo(), 1).notes;
        let thp = set(&root, &Group::thp(), small(), "always").notes;
        assert_eq!((hvo.len(), thp.len()), (1, 1), "{hvo:?} {thp:?}");
        assert!(hvo[0].starts_with("/etc/sysctl.d/99-database.conf sets HVO"));
        assert!(thp[0].starts_with("/usr/lib/tmpfiles.d/thp.conf"));
    }
}
