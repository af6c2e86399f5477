//! A kernel setting, [`Knob`], and its [`Value`].

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
    /// Name, in words.
    pub name: String,
    /// File, below a [`Root`].
    pub file: String,
    /// Format of the file.
    pub form: Form,
}

/// Format of a knob's file, and the values it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// A whole number.
    Number,
    /// One word of a list, as in `always [madvise] never`: the file shows all words, with the
    /// current one in brackets.
    Word,
    /// The persistent pages of a hugetlb pool. Reads of the file (`nr_hugepages`) include surplus
    /// pages, writes do not. A write succeeds even if the kernel makes only some of the pages.
    Pages,
    /// The persistent pages of a pool. The file (`demote`) takes the number of pages to split into
    /// smaller ones, and shows nothing.
    Demote,
}

/// Value of a knob.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Value {
    /// Value in [`Form::Number`], [`Form::Pages`] and [`Form::Demote`].
    Number(u64),
    /// Value in [`Form::Word`].
    Word(String),
}

impl Knob {
    /// Reads the value.
    ///
    /// # Errors
    /// [`FileError`] where a file cannot be read or parsed.
    pub fn read(&self, root: &Root) -> Result<Value, FileError> {
        self.read_stable(root).map(|(value, _)| value)
    }

    /// Reads the value, and reports whether it is consistent: a pool's surplus pages may change
    /// between the reads of two files, so both are read until two readings agree.
    pub(crate) fn read_stable(&self, root: &Root) -> Result<(Value, bool), FileError> {
        match self.form {
            Form::Number => Ok((Value::Number(root.read_u64(&self.file)?), true)),
            Form::Word => Ok((Value::Word(Choice::read(root, &self.file)?.current), true)),
            Form::Pages | Form::Demote => {
                let folder = self.file.rsplit_once('/').map_or("", |(folder, _)| folder);
                let file = |name: &str| format!("{folder}/{name}");
                let total = || root.read_u64(file("nr_hugepages"));
                let read = || Ok((total()?, root.read_u64(file("surplus_hugepages"))?));
                let ((total, surplus), is_stable) = stable(read)?;
                Ok((Value::Number(total.saturating_sub(surplus)), is_stable))
            }
        }
    }

    /// Reads the list of allowed words; empty for numbers.
    ///
    /// # Errors
    /// [`FileError`] where the file cannot be read or parsed.
    pub fn words(&self, root: &Root) -> Result<Vec<String>, FileError> {
        match self.form {
            Form::Word => Ok(Choice::read(root, &self.file)?.options),
            Form::Number | Form::Pages | Form::Demote => Ok(Vec::new()),
        }
    }

    /// Reports whether values are words.
    pub fn takes_word(&self) -> bool {
        self.form == Form::Word
    }

    /// Checks the permission to write.
    pub fn writable(&self, root: &Root) -> Result<(), FileError> {
        let path = root.path(&self.file);
        let may = access(&path, Access::WRITE_OK);
        may.map_err(|errno| FileError::io("write", &path)(errno.into()))
    }

    /// File that compacts memory when a 1 is written: of the knob's node, or of the host.
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
    /// Returns the number; `None` for a word.
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
