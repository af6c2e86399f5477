//! The lines of the list, from processes: sums, order, filter, tree. Pure.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use clap::ValueEnum;
use jumbo::units::{Bytes, counted};
use serde::Serialize;

use super::collect::{Process, candidate};
use crate::view::{NONE, bytes, nonzero_bytes, percent};

/// A column, in the order of the screen.
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
    /// The title, the width, and the narrowest screen that has the column.
    pub(super) const fn layout(self) -> (&'static str, usize, usize) {
        match self {
            Self::Pid => ("PID", 7, 0),
            Self::User => ("USER", 10, 100),
            // At least.
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
            // The rest.
            Self::Command => ("COMMAND", 0, 100),
        }
    }

    pub(super) const fn is_text(self) -> bool {
        matches!(self, Self::User | Self::Name | Self::Group | Self::Command)
    }
}

/// The memory of a process, or of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Figures {
    pub(super) resident: Bytes,
    pub(super) anon: Bytes,
    pub(super) shmem: Bytes,
    pub(super) hugetlb: Bytes,
    pub(super) swap: Bytes,
    /// Memory that can be huge, of those whose huge memory is known.
    pub(super) candidate: Bytes,
    /// Of that on huge pages; `None` where it is not known of any.
    pub(super) huge: Option<Bytes>,
    pub(super) gain: Option<Bytes>,
    pub(super) waste: Option<Bytes>,
}

impl Figures {
    fn of(process: &Process) -> Self {
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
            // Both were read at different moments.
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

    /// The huge part of [`Self::candidate`], in parts of a million.
    fn share(&self) -> Option<u64> {
        let whole = self.candidate.0.max(1);
        let share = |huge: Bytes| u128::from(huge.0) * 1_000_000 / u128::from(whole);
        self.huge.and_then(|huge| u64::try_from(share(huge)).ok())
    }
}

/// The subject of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Who {
    Process(u32),
    /// By its path.
    Group(String),
}

/// A line of the list.
#[derive(Clone, Debug)]
pub(super) struct Line {
    pub(super) who: Who,
    pub(super) depth: usize,
    pub(super) name: String,
    user: String,
    group: String,
    command: String,
    figures: Figures,
}

/// The choices of the user.
#[derive(Clone, Debug, Default)]
pub(super) struct Choice {
    pub(super) sort: Column,
    pub(super) ascending: bool,
    pub(super) filter: String,
    pub(super) tree: bool,
    /// Groups whose members are not shown.
    pub(super) folded: BTreeSet<String>,
}

/// A control group with all below it.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Group {
    pub(super) processes: usize,
    #[serde(flatten)]
    pub(super) figures: Figures,
}

/// The group around a group.
fn parent(path: &str) -> Option<&str> {
    let (parent, _) = path.rsplit_once('/').filter(|_| path != "/")?;
    Some(if parent.is_empty() { "/" } else { parent })
}

/// All groups with processes in them, by path.
pub(super) fn groups<'a>(
    processes: impl IntoIterator<Item = &'a Process>,
) -> BTreeMap<String, Group> {
    let mut all: BTreeMap<String, Group> = BTreeMap::new();
    for process in processes {
        let figures = Figures::of(process);
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
    fn of(process: &Process, depth: usize) -> Self {
        Self {
            who: Who::Process(process.pid),
            depth,
            name: process.name.clone(),
            user: process.user.clone(),
            group: process.group.clone(),
            command: process.command.clone(),
            figures: Figures::of(process),
        }
    }

    fn of_group(path: &str, around: &str, group: &Group, depth: usize, is_folded: bool) -> Self {
        let inside = path.strip_prefix(around).unwrap_or(path);
        let inside = if around.is_empty() {
            inside
        } else {
            inside.trim_start_matches('/')
        };
        let mark = if is_folded { '+' } else { '-' };
        Self {
            who: Who::Group(path.to_owned()),
            depth,
            name: format!("{mark} {inside}"),
            user: String::new(),
            group: path.to_owned(),
            command: counted(group.processes as u64, "process"),
            figures: group.figures,
        }
    }

    /// The path of a group.
    pub(super) fn path(&self) -> Option<String> {
        match &self.who {
            Who::Group(path) => Some(path.clone()),
            Who::Process(_) => None,
        }
    }

    /// The text in a column, and the number that it is sorted by.
    fn value(&self, column: Column) -> (String, Option<u64>) {
        let figures = &self.figures;
        let text = |text: &str| (text.to_owned(), None);
        let size = |size: Option<Bytes>| (bytes(size), size.map(|size| size.0));
        let part = |size: Bytes| (nonzero_bytes(size), Some(size.0));
        match column {
            Column::Pid => match self.who {
                Who::Process(pid) => (pid.to_string(), Some(pid.into())),
                Who::Group(_) => text(""),
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
                (figures.huge.map_or(NONE.to_owned(), share), figures.share())
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

impl Choice {
    pub(super) fn new(sort: Column, tree: bool) -> Self {
        Self {
            sort,
            ascending: Self::ascends(sort),
            tree,
            ..Self::default()
        }
    }

    /// The usual order: texts and PIDs from the first on, sizes from the largest on.
    fn ascends(column: Column) -> bool {
        column.is_text() || column == Column::Pid
    }

    /// Sorts by the next of these columns, or by the one before.
    pub(super) fn move_sort(&mut self, columns: &[Column], forward: bool) {
        let at = columns.iter().position(|column| *column == self.sort);
        let at = at.map_or(0, |at| at + if forward { 1 } else { columns.len() - 1 });
        if let Some(column) = columns.get(at % columns.len().max(1)) {
            (self.sort, self.ascending) = (*column, Self::ascends(*column));
        }
    }

    fn takes(&self, process: &Process) -> bool {
        let wanted = self.filter.to_lowercase();
        let Process {
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
            // The unknown comes last.
            (one, other) => other.is_some().cmp(&one.is_some()),
        };
        let resident = |line: &Line| line.figures.resident;
        let by_size = resident(other).cmp(&resident(one));
        by_column
            .then(by_size)
            .then_with(|| one.cell(Column::Pid).cmp(&other.cell(Column::Pid)))
    }

    /// The lines, in their order.
    pub(super) fn lines(&self, processes: &[Process]) -> Vec<Line> {
        let taken: Vec<_> = processes
            .iter()
            .filter(|process| self.takes(process))
            .collect();
        if !self.tree {
            let mut lines: Vec<_> = taken.iter().map(|process| Line::of(process, 0)).collect();
            lines.sort_by(|one, other| self.order(one, other));
            return lines;
        }
        let groups = groups(taken.iter().copied());
        let mut tree = Tree {
            choice: self,
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

/// The lines of a tree, as far as it was walked.
struct Tree<'a> {
    choice: &'a Choice,
    groups: &'a BTreeMap<String, Group>,
    /// By path the groups right below, and the processes of the group itself.
    below: BTreeMap<&'a str, Vec<&'a str>>,
    own: BTreeMap<&'a str, Vec<&'a Process>>,
    lines: Vec<Line>,
}

impl<'a> Tree<'a> {
    /// Adds a group with all below it, below the group `around`.
    fn add(&mut self, mut path: &'a str, around: &str, depth: usize) {
        // A group of one group alone has no line of its own.
        while let (None, Some([only])) =
            (self.own.get(path), self.below.get(path).map(Vec::as_slice))
        {
            path = only;
        }
        let Some(group) = self.groups.get(path) else {
            return;
        };
        let is_folded = self.choice.folded.contains(path);
        let line = Line::of_group(path, around, group, depth, is_folded);
        self.lines.push(line);
        if is_folded {
            return;
        }
        let order = |one: &Line, other: &Line| self.choice.order(one, other);
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
