//! Settings for the next boot: [`Boot`].
//!
//! Every knob is a file of /proc or /sys, which `tmpfiles.d` can write early in the boot
//! (tmpfiles.d(5)). Each [`Group`] has a file of its own there: to remove it leaves the files of
//! other programs and the settings of other groups as they are.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::knob::Value;
use super::known::Group;
use crate::kernel::thp::optional;
use crate::kernel::{FileError, Root, hugetlb};
use crate::whole_file::{self, Existing};

/// Programs that read such files; the host needs one of them.
const READERS: [&str; 4] = [
    "usr/bin/systemd-tmpfiles",
    "bin/systemd-tmpfiles",
    "usr/sbin/tmpfiles",
    "sbin/tmpfiles",
];

const HEADER: &str = "# Written by `jumbo ... --persist`; `--forget` removes it.\n";

/// Content of a file before and after a change; `None`: no file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileChange {
    /// Path below the root.
    pub file: String,
    /// Current content.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<String>,
    /// New content.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
}

/// Changes for the next boot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Boot {
    /// The files that change; a plan has them too.
    #[serde(skip)]
    pub files: Vec<FileChange>,
    /// Knobs that no program on this host sets at boot.
    pub unset: Vec<String>,
    /// Arguments for the kernel command line, where a boot script may be too late.
    pub command_line: Option<String>,
    /// Notes for the user.
    pub notes: Vec<String>,
}

/// A line of one of our files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Setting {
    /// File of the knob, below the root.
    pub knob: String,
    /// The value.
    pub value: String,
    /// File with this line, below the root.
    pub file: String,
}

impl FileChange {
    /// Replaces the content of the file; `None` removes it.
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

/// Settings of one group, by knob.
type Lines = BTreeMap<String, Setting>;

/// Returns the changes that set `values`, by file of the knob, at the next boot. Lines of the knobs
/// in `replaced` are removed.
///
/// # Errors
/// [`FileError`] where our files cannot be read.
pub fn persist(
    root: &Root,
    group: &Group,
    values: &[(String, Value)],
    replaced: &[String],
) -> Result<Boot, FileError> {
    let is_read = READERS.iter().any(|file| root.path(file).exists());
    let mut lines = read(root, group)?;
    let mut boot = Boot::default();
    for knob in replaced {
        if lines.remove(knob).is_some() {
            boot.notes
                .push(format!("the setting of /{knob} there is removed"));
        }
    }
    for (knob, value) in values {
        if !is_read {
            boot.notes.push(format!(
                "nothing on this host sets /{knob} at boot: it has no systemd-tmpfiles"
            ));
            boot.unset.push(knob.clone());
            continue;
        }
        let (knob, value, file) = (knob.clone(), value.to_string(), file(group));
        lines.insert(knob.clone(), Setting { knob, value, file });
    }
    boot.files = changes(root, group, &lines)?;
    let set = values.iter().map(|(knob, _)| knob);
    boot.notes.extend(others(root, group, set));
    Ok(boot)
}

/// Returns the files without our settings of `group`; with `only`, without those knobs.
///
/// # Errors
/// [`FileError`] where our files cannot be read.
pub fn forget(root: &Root, group: &Group, only: Option<&[String]>) -> Result<Boot, FileError> {
    let mut lines = read(root, group)?;
    let is_removed = |knob: &String| only.is_none_or(|only| only.contains(knob));
    let removed: Lines = lines.extract_if(.., |knob, _| is_removed(knob)).collect();
    Ok(Boot {
        files: changes(root, group, &lines)?,
        notes: others(root, group, removed.keys()),
        ..Boot::default()
    })
}

/// Reads the settings of our files.
pub fn settings(root: &Root, groups: &[Group]) -> Result<Vec<Setting>, FileError> {
    let mut settings = Vec::new();
    for group in groups {
        settings.extend(read(root, group)?.into_values());
    }
    Ok(settings)
}

fn file(group: &Group) -> String {
    format!("etc/tmpfiles.d/jumbo-{}.conf", group.id)
}

/// Returns the sysctl of the same knob: `vm.nr_hugepages` for the pool of the default size.
fn sysctl(root: &Root, knob: &str) -> Option<String> {
    if let Some(name) = knob.strip_prefix("proc/sys/") {
        return Some(name.replace('/', "."));
    }
    let (size, node) = hugetlb::of_file(knob)?;
    let is_default = node.is_none() && hugetlb::default_size(root).ok()? == Some(size);
    is_default.then(|| format!("vm.{}", knob.rsplit('/').next().unwrap_or_default()))
}

fn read(root: &Root, group: &Group) -> Result<Lines, FileError> {
    let file = file(group);
    let text = optional(root.read(&file))?.unwrap_or_default();
    let setting = |line: &str| {
        // w /sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages - - - - 4
        let ["w", knob, _, _, _, _, value] = line.split_whitespace().collect::<Vec<_>>()[..] else {
            return None;
        };
        let (knob, value) = (knob.trim_start_matches('/').to_owned(), value.to_owned());
        let file = file.clone();
        Some((knob.clone(), Setting { knob, value, file }))
    };
    Ok(text.lines().filter_map(setting).collect())
}

/// Returns the change of our file of `group` to these lines, if they differ.
fn changes(root: &Root, group: &Group, lines: &Lines) -> Result<Vec<FileChange>, FileError> {
    let file = file(group);
    let before = optional(root.read(&file))?;
    let line = |Setting { knob, value, .. }: &Setting| format!("w /{knob} - - - - {value}\n");
    let written: String = lines.values().map(line).collect();
    let after = (!written.is_empty()).then(|| format!("{HEADER}{written}"));
    let change = (before != after).then_some(FileChange {
        file,
        before,
        after,
    });
    Ok(change.into_iter().collect())
}

/// Notes on other files that set the same knobs: the order of names decides which wins at boot.
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
            line.contains(&format!("/{knob}"))
                || sysctl(root, knob).is_some_and(|sysctl| sysctl == name)
        };
        !line.starts_with(['#', ';']) && knobs.iter().any(is_set)
    };
    let mut found = Vec::new();
    for kind in ["sysctl.d", "tmpfiles.d"] {
        for place in ["etc", "run", "usr/local/lib", "usr/lib"] {
            let folder = format!("{place}/{kind}");
            let mut names = root.list(&folder).unwrap_or_default();
            // A link to /etc/sysctl.conf.
            names.retain(|name| name.ends_with(".conf") && name != "99-sysctl.conf");
            found.extend(names.into_iter().map(|name| format!("{folder}/{name}")));
        }
    }
    found.push("etc/sysctl.conf".to_owned());
    let is_set = |file: &String| root.read(file).is_ok_and(|text| text.lines().any(sets));
    found.retain(|found| *found != file(group) && is_set(found));
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

    const HVO: &str = "etc/tmpfiles.d/jumbo-hvo.conf";
    const THP: &str = "etc/tmpfiles.d/jumbo-thp.conf";
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
    fn knobs_are_persisted_and_forgotten() {
        let (_folder, root) = host(&[TMPFILES]);
        set(&root, &Group::hvo(), Knob::hvo(), 1);
        set(&root, &Group::thp(), small(), "always");
        set(&root, &Group::thp(), Knob::thp(None, "defrag"), "defer");
        let text = |file| root.read(file).unwrap();
        assert_eq!(
            text(HVO),
            format!("{HEADER}w /proc/sys/vm/hugetlb_optimize_vmemmap - - - - 1\n")
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
    fn no_file_is_written_without_a_reader() {
        let (_folder, root) = host(&[TMPFILES]);
        set(&root, &Group::hvo(), Knob::hvo(), 0);
        assert_eq!(settings(&root, &[Group::hvo()]).unwrap()[0].value, "0");
        let (_folder, root) = host(&[]);
        let boot = set(&root, &Group::thp(), small(), "always");
        assert!(boot.files.is_empty() && boot.notes.len() == 1, "{boot:?}");
    }

    #[test]
    fn other_settings_are_noted() {
        let (_folder, root) = host(&[TMPFILES]);
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
