//! What can be set: [`Knob`]; and what it is set to: [`Value`].

use std::fmt;

use rustix::fs::{Access, access};
use serde::{Deserialize, Serialize};

use crate::kernel::hugetlb::stable;
use crate::kernel::thp::Choice;
use crate::kernel::{FileError, Root};
use crate::units::Pages;

/// One setting of the kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Knob {
    /// What it is called, in words.
    pub name: String,
    /// Its file, below a [`Root`].
    pub file: String,
    /// What stands in the file.
    pub form: Form,
}

/// How a knob is read, and which values it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// A whole number.
    Number,
    /// One word of a list, as in `always [madvise] never`: reading shows the list with that word in brackets, and the
    /// list is what it takes.
    Word,
    /// The persistent pages of a hugetlb pool. The file (`nr_hugepages`) takes this number and shows another: the
    /// surplus pages are in it. The kernel makes what it can, and answers a part with success.
    Pages,
    /// The same pages, of which the file (`demote`) takes how many are to be split into smaller ones. It shows nothing.
    Demote,
}

/// What a knob is set to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Value {
    /// Of [`Form::Number`] and [`Form::Pages`].
    Number(u64),
    /// Of [`Form::Word`].
    Word(String),
}

impl Knob {
    /// The value now.
    ///
    /// # Errors
    /// [`FileError`] where a file cannot be read or understood.
    pub fn read(&self, root: &Root) -> Result<Value, FileError> {
        self.read_stable(root).map(|(value, _)| value)
    }

    /// The value now, and whether it is of one moment: a pool's surplus pages come and go while two files are read,
    /// so both are read until two readings agree; false where the pool did not rest.
    pub(crate) fn read_stable(&self, root: &Root) -> Result<(Value, bool), FileError> {
        match self.form {
            Form::Number => Ok((Value::Number(root.read_u64(&self.file)?), true)),
            Form::Word => Ok((Value::Word(Choice::read(root, &self.file)?.current), true)),
            Form::Pages | Form::Demote => {
                let folder = self.file.rsplit_once('/').map_or("", |(folder, _)| folder);
                let file = |name: &str| format!("{folder}/{name}");
                let total = || root.read_u64(file("nr_hugepages"));
                let read = || Ok((total()?, root.read_u64(file("surplus_hugepages"))?));
                let ((total, surplus), rests) = stable(read)?;
                Ok((Value::Number(total.saturating_sub(surplus)), rests))
            }
        }
    }

    /// The words it takes; none where it takes a number.
    ///
    /// # Errors
    /// [`FileError`] where the file cannot be read or understood.
    pub fn words(&self, root: &Root) -> Result<Vec<String>, FileError> {
        match self.form {
            Form::Word => Ok(Choice::read(root, &self.file)?.options),
            Form::Number | Form::Pages | Form::Demote => Ok(Vec::new()),
        }
    }

    /// True where it takes words, and no number.
    pub fn takes_word(&self) -> bool {
        self.form == Form::Word
    }

    /// Whether it could be written.
    ///
    /// # Errors
    /// [`FileError::Io`] as writing would give it.
    pub fn writable(&self, root: &Root) -> Result<(), FileError> {
        let path = root.path(&self.file);
        let may = access(&path, Access::WRITE_OK);
        may.map_err(|errno| FileError::io("write", &path)(errno.into()))
    }

    /// Where a 1 has the kernel move memory together for it.
    pub(crate) fn compaction(&self) -> String {
        match self.file.split_once("/hugepages/") {
            Some((node, _)) if node.starts_with("sys/devices/") => format!("{node}/compact"),
            _ => "proc/sys/vm/compact_memory".to_owned(),
        }
    }
}

impl fmt::Display for Knob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.name.fmt(f)
    }
}

impl Value {
    /// The number; `None` of a word.
    pub fn number(&self) -> Option<u64> {
        match self {
            Self::Number(number) => Some(*number),
            Self::Word(_) => None,
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Word(word) => word.fmt(f),
        }
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        Self::Number(number)
    }
}

impl From<Pages> for Value {
    fn from(pages: Pages) -> Self {
        Self::Number(pages.0)
    }
}

impl From<&str> for Value {
    fn from(word: &str) -> Self {
        Self::Word(word.to_owned())
    }
}
