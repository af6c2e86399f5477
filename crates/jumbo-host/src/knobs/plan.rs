//! The writes to a group of knobs, in order: [`Plan`].

use serde::{Deserialize, Serialize};

use super::apply::ApplyError;
use super::knob::{Form, Knob, Value};
use super::known::Group;
use crate::kernel::{FileError, Root};

/// One write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// The knob.
    #[serde(flatten)]
    pub knob: Knob,
    /// The value before.
    pub before: Value,
    /// The value written.
    pub to: Value,
    /// The value read back; `None` until then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<Value>,
}

/// A knob and its value before a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saved {
    /// The knob.
    #[serde(flatten)]
    pub knob: Knob,
    /// The value.
    pub value: Value,
}

/// A change of one group of knobs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// The group.
    pub group: Group,
    /// The writes that change something.
    pub steps: Vec<Step>,
    /// The values that restore the current state.
    pub saved: Vec<Saved>,
}

impl Step {
    /// A write that is not done yet.
    pub fn new(knob: Knob, before: impl Into<Value>, to: impl Into<Value>) -> Self {
        Self {
            knob,
            before: before.into(),
            to: to.into(),
            after: None,
        }
    }

    /// Reports whether the kernel has to make pages.
    pub fn grows(&self) -> bool {
        self.knob.form == Form::Pages && self.to.number() > self.before.number()
    }

    /// The text that is written.
    pub(super) fn text(&self) -> String {
        match (self.knob.form, self.before.number(), self.to.number()) {
            (Form::Demote, Some(before), Some(to)) => before.saturating_sub(to).to_string(),
            _ => self.to.to_string(),
        }
    }

    /// Sort key of the writes. Steps that free memory come first, because those that allocate may
    /// need it. The kernel takes `force` for shared memory only while no size but the PMD size
    /// inherits it, and then rejects `inherit` for other sizes: so `force` is removed before the
    /// sizes, and set after them.
    pub(super) fn turn(&self) -> (bool, u8) {
        let rank = match &self.to {
            _ if self.knob != Knob::thp(None, "shmem_enabled") => 1,
            Value::Word(word) if word == "force" => 2,
            _ => 0,
        };
        (self.grows(), rank)
    }

    /// Number of pages that the kernel did not make; 0 before the value is read back.
    pub fn missing(&self) -> u64 {
        let after = self.after.as_ref().unwrap_or(&self.to);
        match (self.to.number(), after.number()) {
            (Some(to), Some(after)) if self.grows() => to.saturating_sub(after),
            _ => 0,
        }
    }
}

impl Plan {
    /// An empty plan.
    pub fn new(group: Group) -> Self {
        Self {
            group,
            steps: Vec::new(),
            saved: Vec::new(),
        }
    }

    /// Plans these values of these knobs.
    ///
    /// # Errors
    /// [`ApplyError::Refused`] where a knob cannot be read; [`ApplyError::Word`].
    pub fn of(
        root: &Root,
        group: Group,
        values: impl IntoIterator<Item = (Knob, Value)>,
    ) -> Result<Self, ApplyError> {
        let mut plan = Self::new(group);
        for (knob, to) in values {
            let before = knob.read(root)?;
            let words = knob.words(root)?;
            if let Value::Word(word) = &to
                && !words.contains(word)
            {
                let word = word.clone();
                return Err(ApplyError::Word { knob, word, words });
            }
            plan.add(knob, before, to);
        }
        plan.steps.sort_by_key(Step::turn);
        Ok(plan)
    }

    /// Adds a write and the value that undoes it, if the write changes something.
    pub fn add(&mut self, knob: Knob, before: impl Into<Value>, to: impl Into<Value>) {
        let step = Step::new(knob, before, to);
        if step.before != step.to {
            self.saved.push(Saved {
                knob: step.knob.clone(),
                value: step.before.clone(),
            });
            self.steps.push(step);
        }
    }

    /// Reports whether nothing has to be changed.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Checks the permission to write all knobs, before the first write.
    pub fn writable(&self, root: &Root) -> Result<(), FileError> {
        let mut knobs = self.steps.iter().map(|step| &step.knob);
        knobs.try_for_each(|knob| knob.writable(root))
    }
}
