//! What is to be written, in order: [`Plan`].

use serde::{Deserialize, Serialize};

use super::apply::ApplyError;
use super::boot::FileChange;
use super::knob::{Form, Knob, Value};
use super::known::Group;
use crate::kernel::{FileError, Root};

/// One write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// What is written.
    #[serde(flatten)]
    pub knob: Knob,
    /// Its value before.
    pub before: Value,
    /// The value written.
    pub to: Value,
    /// The value read back; `None` until then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<Value>,
}

/// A knob and the value it had.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saved {
    /// The knob.
    #[serde(flatten)]
    pub knob: Knob,
    /// Its value.
    pub value: Value,
}

/// Everything that is to be done to one group of knobs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// Which.
    pub group: Group,
    /// The writes. Those that would change nothing are not in it.
    pub steps: Vec<Step>,
    /// What has to be written to have everything back as it is.
    pub saved: Vec<Saved>,
    /// Files for the next boot.
    pub files: Vec<FileChange>,
}

impl Step {
    /// A write that is still to be done.
    pub fn new(knob: Knob, before: impl Into<Value>, to: impl Into<Value>) -> Self {
        Self {
            knob,
            before: before.into(),
            to: to.into(),
            after: None,
        }
    }

    /// True where the kernel is to make pages.
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

    /// When it is written, beside others. What gives memory back is first, as what wants some may need it. The kernel takes
    /// `force` for shared memory only while no size but the PMD size inherits it, and lets no other size inherit it then:
    /// so `force` goes before the sizes are set, and comes after.
    pub(super) fn turn(&self) -> (bool, u8) {
        let rank = match &self.to {
            _ if self.knob != Knob::thp(None, "shmem_enabled") => 1,
            Value::Word(word) if word == "force" => 2,
            _ => 0,
        };
        (self.grows(), rank)
    }

    /// How many pages did not come; none where nothing was read back.
    pub fn missing(&self) -> u64 {
        let after = self.after.as_ref().unwrap_or(&self.to);
        match (self.to.number(), after.number()) {
            (Some(to), Some(after)) if self.grows() => to.saturating_sub(after),
            _ => 0,
        }
    }
}

impl Plan {
    /// Nothing to do yet.
    pub fn new(group: Group) -> Self {
        Self {
            group,
            steps: Vec::new(),
            saved: Vec::new(),
            files: Vec::new(),
        }
    }

    /// What it takes to give these knobs these values.
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

    /// Adds a write, where it changes something, and what puts it back.
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

    /// True where everything is already as wished.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty() && self.files.is_empty()
    }

    /// Whether its knobs could be written, so that nothing begins that must fail.
    ///
    /// # Errors
    /// [`FileError::Io`] as writing would give it.
    pub fn writable(&self, root: &Root) -> Result<(), FileError> {
        let mut knobs = self.steps.iter().map(|step| &step.knob);
        knobs.try_for_each(|knob| knob.writable(root))
    }
}
