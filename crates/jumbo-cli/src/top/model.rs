//! Lines of the list: sums, order, filter, tree. Without input or output.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use clap::ValueEnum;
use jumbo::units::{Bytes, counted};
use serde::Serialize;

use super::collect::{ProcessRow, candidate};
use crate::view::{nonzero_bytes, or_none, percent};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum Column {
    #[default]
    Pid,
    User,
    Name,
    Resident,
    Anon,
    Shared,
    Hugetlb,
    Swap,
    Huge,
    Share,
    Gain,
    Waste,
    Group,
    Command,
}

impl Column {
    /// Title, width, and minimum width of a screen with the column.
    pub(super) const fn layout(self) -> (&'static str, usize, usize) {
        match self {
            Self::Pid => ("PID", 7, 0),
            Self::User => ("USER", 10, 100),
            // Minimum; the column takes free space.
            Self::Name => ("NAME", 15, 0),
            Self::Resident => ("RESIDENT", 10, 0),
            Self::Anon => ("ANON", 10, 120),
            Self::Shared => ("SHARED", 10, 120),
            Self::Hugetlb => ("HUGETLB", 10, 140),
            Self::Swap => ("SWAP", 10, 160),
            Self::Huge => ("HUGE", 10, 0),
            Self::Share => ("SHARE", 7, 0),
            Self::Gain => ("GAIN", 10, 0),
            Self::Waste => ("WASTE", 10, 0),
            Self::Group => ("CGROUP", 24, 160),
            // The rest of the line.
            Self::Command => ("COMMAND", 0, 100),
        }
    }

    pub(super) const fn is_text(self) -> bool {
        matches!(self, Self::User | Self::Name | Self::Group | Self::Command)
    }
}

/// Memory of a process, or of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct MemorySums {
    pub(super) resident: Bytes,
    pub(super) anon: Bytes,
    pub(super) shmem: Bytes,
    pub(super) hugetlb: Bytes,
    pub(super) swap: Bytes,
    /// Memory that can be huge, of the processes with known `huge`.
    pub(super) candidate: Bytes,
    /// Part of `candidate` on huge pages; `None` if unknown for all processes.
    pub(super) huge: Option<Bytes>,
    pub(super) gain: Option<Bytes>,
    pub(super) waste: Option<Bytes>,
}

impl MemorySums {
    fn of(process: &ProcessRow) -> Self {
        let (memory, glance) = (&process.memory, process.glance);
        let candidate = candidate(memory);
        let huge = |of: jumbo_host::status::Glance| of.huge.anon + of.huge.shmem + memory.hugetlb;
        Self {
            resident: candidate + memory.file,
            anon: memory.anon,
            shmem: memory.shmem,
            hugetlb: memory.hugetlb,
            swap: memory.swap,
            candidate: glance.map_or(Bytes(0), |_| candidate),
            // The two were read at different moments.
            huge: glance.map(|glance| huge(glance).min(candidate)),
            gain: glance.map(|glance| glance.gain.min(memory.anon)),
            waste: glance.and_then(|glance| glance.waste),
        }
    }

    fn add(&mut self, other: &Self) {
        let sum = |one: Option<Bytes>, other: Option<Bytes>| match (one, other) {
            (Some(one), Some(other)) => Some(one + other),
            (one, other) => one.or(other),
        };
        self.resident += other.resident;
        self.anon += other.anon;
        self.shmem += other.shmem;
        self.hugetlb += other.hugetlb;
        self.swap += other.swap;
        self.candidate += other.candidate;
        self.huge = sum(self.huge, other.huge);
        self.gain = sum(self.gain, other.gain);
        self.waste = sum(self.waste, other.waste);
    }

    /// Huge part of [`Self::candidate`], in parts per million.
    fn share(&self) -> Option<u64> {
        let whole = self.candidate.0.max(1);
        let share = |huge: Bytes| u128::from(huge.0) * 1_000_000 / u128::from(whole);
        self.huge.and_then(|huge| u64::try_from(share(huge)).ok())
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    Process(u32),
    /// Path of a control group.
    Group(String),
}

/// A line of the list.
#[derive(Clone, Debug)]
pub(super) struct Line {
    pub(super) subject: Subject,
    pub(super) depth: usize,
    pub(super) name: String,
    user: String,
    group: String,
    command: String,
    figures: MemorySums,
}

/// Options of the list that the user sets.
#[derive(Clone, Debug, Default)]
pub(super) struct ListOptions {
    pub(super) sort: Column,
    pub(super) ascending: bool,
    pub(super) filter: String,
    pub(super) tree: bool,
    /// Groups whose members are not shown.
    pub(super) folded: BTreeSet<String>,
}

/// Sums of a control group, including the groups below it.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct GroupSums {
    pub(super) processes: usize,
    #[serde(flatten)]
    pub(super) figures: MemorySums,
}

/// Path of the parent group.
fn parent(path: &str) -> Option<&str> {
    let (parent, _) = path.rsplit_once('/').filter(|_| path != "/")?;
    Some(if parent.is_empty() { "/" } else { parent })
}

/// All groups with processes in them, by path.
pub(super) fn groups<'a>(
    processes: impl IntoIterator<Item = &'a ProcessRow>,
) -> BTreeMap<String, GroupSums> {
    let mut all: BTreeMap<String, GroupSums> = BTreeMap::new();
    for process in processes {
        let figures = MemorySums::of(process);
        let mut at = Some(process.group.as_str());
        while let Some(path) = at {
            let group = all.entry(path.to_owned()).or_default();
            group.processes += 1;
            group.figures.add(&figures);
            at = parent(path);
        }
    }
    all
}

impl Line {
    fn of(process: &ProcessRow, depth: usize) -> Self {
        Self {
            subject: Subject::Process(process.pid),
            depth,
            name: process.name.clone(),
            user: process.user.clone(),
            group: process.group.clone(),
            command: process.command.clone(),
            figures: MemorySums::of(process),
        }
    }

    fn of_group(
        path: &str,
        around: &str,
        group: &GroupSums,
        depth: usize,
        is_folded: bool,
    ) -> Self {
        let inside = path.strip_prefix(around).unwrap_or(path);
        let inside = if around.is_empty() {
            inside
        } else {
            inside.trim_start_matches('/')
        };
        let mark = if is_folded { '+' } else { '-' };
        Self {
            subject: Subject::Group(path.to_owned()),
            depth,
            name: format!("{mark} {inside}"),
            user: String::new(),
            group: path.to_owned(),
            command: counted(group.processes as u64, "process"),
            figures: group.figures,
        }
    }

    /// Path, if the line is a group.
    pub(super) fn path(&self) -> Option<String> {
        match &self.subject {
            Subject::Group(path) => Some(path.clone()),
            Subject::Process(_) => None,
        }
    }

    /// Text in a column, and the number for sorting.
    fn value(&self, column: Column) -> (String, Option<u64>) {
        let figures = &self.figures;
        let text = |text: &str| (text.to_owned(), None);
        let size = |size: Option<Bytes>| (or_none(size), size.map(|size| size.0));
        let part = |size: Bytes| (nonzero_bytes(size), Some(size.0));
        match column {
            Column::Pid => match self.subject {
                Subject::Process(pid) => (pid.to_string(), Some(pid.into())),
                Subject::Group(_) => text(""),
            },
            Column::User => text(&self.user),
            Column::Name => text(&format!("{:1$}{2}", "", 2 * self.depth, self.name)),
            Column::Resident => size(Some(figures.resident)),
            Column::Anon => part(figures.anon),
            Column::Shared => part(figures.shmem),
            Column::Hugetlb => part(figures.hugetlb),
            Column::Swap => part(figures.swap),
            Column::Huge => size(figures.huge),
            Column::Share => {
                let share = |huge| percent(huge, figures.candidate);
                (or_none(figures.huge.map(share)), figures.share())
            }
            Column::Gain => size(figures.gain),
            Column::Waste => size(figures.waste),
            Column::Group => text(&self.group),
            Column::Command => text(&self.command),
        }
    }

    pub(super) fn cell(&self, column: Column) -> String {
        self.value(column).0
    }
}

impl ListOptions {
    pub(super) fn new(sort: Column, tree: bool) -> Self {
        Self {
            sort,
            ascending: Self::ascends(sort),
            tree,
            ..Self::default()
        }
    }

    /// Default order of a column: ascending for text and PIDs, descending for sizes.
    fn ascends(column: Column) -> bool {
        column.is_text() || column == Column::Pid
    }

    /// Sorts by the next of these columns, or by the previous one.
    pub(super) fn move_sort(&mut self, columns: &[Column], forward: bool) {
        let at = columns.iter().position(|column| *column == self.sort);
        let at = at.map_or(0, |at| at + if forward { 1 } else { columns.len() - 1 });
        if let Some(column) = columns.get(at % columns.len().max(1)) {
            (self.sort, self.ascending) = (*column, Self::ascends(*column));
        }
    }

    fn matches(&self, process: &ProcessRow) -> bool {
        let wanted = self.filter.to_lowercase();
        let ProcessRow {
            name,
            user,
            group,
            command,
            ..
        } = process;
        let mut texts = [name, user, group, command].into_iter();
        texts.any(|text| text.to_lowercase().contains(&wanted)) || process.pid.to_string() == wanted
    }

    fn order(&self, one: &Line, other: &Line) -> Ordering {
        let turned = |order: Ordering| match self.ascending {
            true => order,
            false => order.reverse(),
        };
        let [(text, number), (other_text, other_number)] =
            [one, other].map(|it| it.value(self.sort));
        let by_column = match (number, other_number) {
            _ if self.sort.is_text() => turned(text.cmp(&other_text)),
            (Some(one), Some(other)) => turned(one.cmp(&other)),
            // Unknown values come last.
            (one, other) => other.is_some().cmp(&one.is_some()),
        };
        let resident = |line: &Line| line.figures.resident;
        let by_size = resident(other).cmp(&resident(one));
        by_column
            .then(by_size)
            .then_with(|| one.cell(Column::Pid).cmp(&other.cell(Column::Pid)))
    }

    pub(super) fn lines(&self, processes: &[ProcessRow]) -> Vec<Line> {
        let taken: Vec<_> = processes
            .iter()
            .filter(|process| self.matches(process))
            .collect();
        if !self.tree {
            let mut lines: Vec<_> = taken.iter().map(|process| Line::of(process, 0)).collect();
            lines.sort_by(|one, other| self.order(one, other));
            return lines;
        }
        let groups = groups(taken.iter().copied());
        let mut tree = Tree {
            options: self,
            below: BTreeMap::new(),
            own: BTreeMap::new(),
            groups: &groups,
            lines: Vec::new(),
        };
        for path in groups.keys() {
            let siblings = tree.below.entry(parent(path).unwrap_or_default());
            siblings.or_default().push(path);
        }
        for process in taken {
            tree.own.entry(&process.group).or_default().push(process);
        }
        for top in tree.below.get("").cloned().unwrap_or_default() {
            tree.add(top, "", 0);
        }
        tree.lines
    }
}

/// State of a walk through the tree of groups.
struct Tree<'a> {
    options: &'a ListOptions,
    groups: &'a BTreeMap<String, GroupSums>,
    /// Child groups, and processes of the group itself, by path.
    below: BTreeMap<&'a str, Vec<&'a str>>,
    own: BTreeMap<&'a str, Vec<&'a ProcessRow>>,
    lines: Vec<Line>,
}

impl<'a> Tree<'a> {
    /// Adds the lines of a group and of everything below it; `around` is the path of its parent.
    fn add(&mut self, mut path: &'a str, around: &str, depth: usize) {
        // A group whose only content is one group has no line of its own.
        while let (None, Some([only])) =
            (self.own.get(path), self.below.get(path).map(Vec::as_slice))
        {
            path = only;
        }
        let Some(group) = self.groups.get(path) else {
            return;
        };
        let is_folded = self.options.folded.contains(path);
        let line = Line::of_group(path, around, group, depth, is_folded);
        self.lines.push(line);
        if is_folded {
            return;
        }
        let order = |one: &Line, other: &Line| self.options.order(one, other);
        let below = self.below.get(path).into_iter().flatten();
        let line = |below: &&'a str| {
            let group = self.groups.get(*below).cloned().unwrap_or_default();
            (Line::of_group(below, path, &group, 0, false), *below)
        };
        let mut below: Vec<_> = below.map(line).collect();
        below.sort_by(|one, other| order(&one.0, &other.0));
        let own = self.own.get(path).into_iter().flatten();
        let mut own: Vec<_> = own.map(|process| Line::of(process, depth + 1)).collect();
        own.sort_by(order);
        for (_, below) in below {
            self.add(below, path, depth + 1);
        }
        self.lines.extend(own);
    }
}
