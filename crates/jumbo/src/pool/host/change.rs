//! What is to change: [`Wish`]; and how: [`Plan`].

use std::fmt;

use serde::{Deserialize, Serialize};

use super::boot::FileChange;
use crate::kernel::hugetlb::{self, Pool};
use crate::kernel::{FileError, Root};
use crate::units::{NodeId, PageSize, Pages, counted};

/// One number of a pool that can be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Knob {
    /// The pool's page size.
    pub size: PageSize,
    /// Which of its numbers.
    pub what: What,
    /// The node it is for; `None` for all together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeId>,
}

/// Which number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// Pages that stay when nobody needs them. The file, `nr_hugepages`, takes this number and shows
    /// another: the surplus pages are in it.
    Persistent,
    /// `nr_overcommit_hugepages`: how many surplus pages there may be.
    Overcommit,
}

/// What somebody wants of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    /// Its persistent pages.
    pub persistent: Option<Amount>,
    /// How many surplus pages there may be.
    pub overcommit: Option<Pages>,
    /// The node that `persistent` is about; `None`: the kernel spreads over all.
    pub node: Option<NodeId>,
}

/// A number of pages, by itself or from what is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// So many.
    To(Pages),
    /// So many more.
    More(Pages),
    /// So many less.
    Less(Pages),
}

/// One write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// What is written.
    #[serde(flatten)]
    pub knob: Knob,
    /// Its value before.
    pub before: Pages,
    /// The value written.
    pub to: Pages,
    /// The value read back; `None` until then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<Pages>,
}

/// A knob and the value it had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saved {
    /// The knob.
    #[serde(flatten)]
    pub knob: Knob,
    /// Its value.
    pub value: Pages,
}

/// What the kernel does for a new number of persistent pages (`set_max_huge_pages` in mm/hugetlb.c).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Effect {
    /// Surplus pages that become persistent: no memory is needed for them.
    pub adopted: Pages,
    /// Pages made of free memory.
    pub made: Pages,
    /// Free pages given back to the host.
    pub freed: Pages,
    /// Pages in use or reserved that become surplus, and go back when they are free.
    pub turned_surplus: Pages,
}

/// Everything that is to be done, in order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// The pool.
    pub size: PageSize,
    /// The writes. Those that would change nothing are not in it.
    pub steps: Vec<Step>,
    /// What becomes of the persistent pages.
    pub effect: Effect,
    /// What has to be written to have everything back as it is.
    pub saved: Vec<Saved>,
    /// Files for the next boot.
    pub files: Vec<FileChange>,
}

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// No such node, or none at all on a kernel without NUMA.
    #[error("there is no node {node}: the pool of {size} pages has {nodes}")]
    NoNode {
        /// The node asked for.
        node: NodeId,
        /// The pool.
        size: PageSize,
        /// The nodes there are, in words.
        nodes: String,
    },
    /// Fewer pages than are to go.
    #[error("the pool of {size} pages cannot shrink by {by}: it has {}{place}", counted(has.0, "persistent page"))]
    TooFew {
        /// The pool.
        size: PageSize,
        /// How many were to go.
        by: Pages,
        /// How many there are.
        has: Pages,
        /// ` on node N`, or nothing.
        place: String,
    },
    /// More pages than a number holds.
    #[error("{by} pages more than {has} are more than a kernel can count")]
    TooMany {
        /// How many more.
        by: Pages,
        /// How many there are.
        has: Pages,
    },
}

impl Knob {
    /// The file, below a [`Root`].
    pub fn file(&self) -> String {
        let name = match self.what {
            What::Persistent => "nr_hugepages",
            What::Overcommit => "nr_overcommit_hugepages",
        };
        hugetlb::file(self.size, self.node, name)
    }

    /// The value now. `nr_hugepages` counts surplus pages too and they come and go meanwhile, so both
    /// are read until one reading is of one moment.
    ///
    /// # Errors
    /// [`FileError`] where a file cannot be read or understood.
    pub fn read(&self, root: &Root) -> Result<Pages, FileError> {
        self.read_settled(root).map(|(value, _)| value)
    }

    /// The same, and whether it is of one moment; false where the pool did not rest.
    fn read_settled(&self, root: &Root) -> Result<(Pages, bool), FileError> {
        let file = self.file();
        if self.what == What::Overcommit {
            return root.read_u64(file).map(|value| (Pages(value), true));
        }
        let surplus_file = hugetlb::file(self.size, self.node, "surplus_hugepages");
        let read = || Ok((root.read_u64(&file)?, root.read_u64(&surplus_file)?));
        let ((total, surplus), rests) = hugetlb::settled(read)?;
        Ok((Pages(total.saturating_sub(surplus)), rests))
    }

    /// Writes it.
    ///
    /// # Errors
    /// [`FileError::Io`]: EACCES without root, EROFS in a container, EINVAL for a size that this kernel
    /// makes at boot only.
    pub fn write(&self, root: &Root, value: Pages) -> Result<(), FileError> {
        root.write(self.file(), &value.to_string())
    }
}

impl fmt::Display for Knob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = self.size;
        match self.what {
            What::Persistent => write!(f, "persistent {size} pages")?,
            What::Overcommit => write!(f, "overcommit of {size} pages")?,
        }
        self.node
            .map_or(Ok(()), |node| write!(f, " on node {node}"))
    }
}

impl Step {
    /// True where the pool is to get pages.
    pub fn grows(&self) -> bool {
        self.knob.what == What::Persistent && self.to > self.before
    }

    /// How many pages did not come; none where nothing was read back.
    pub fn missing(&self) -> Pages {
        let after = self.after.unwrap_or(self.to);
        Pages(if self.grows() {
            self.to.0.saturating_sub(after.0)
        } else {
            0
        })
    }
}

impl Plan {
    /// What it takes to give the pool what is wished.
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn new(pool: &Pool, wish: &Wish) -> Result<Self, PlanError> {
        let size = pool.size;
        let mut plan = Self {
            size,
            steps: Vec::new(),
            effect: Effect::default(),
            saved: Vec::new(),
            files: Vec::new(),
        };
        if let Some(to) = wish.overcommit.filter(|to| *to != pool.overcommit) {
            let knob = Knob {
                size,
                what: What::Overcommit,
                node: None,
            };
            plan.step(knob, pool.overcommit, to);
            plan.saved.push(Saved {
                knob,
                value: pool.overcommit,
            });
        }
        let Some(amount) = wish.persistent else {
            return Ok(plan);
        };
        let part = Part::of(pool, wish.node)?;
        let to = amount.from(&part, size, wish.node)?;
        if to != part.persistent {
            let knob = Knob {
                size,
                what: What::Persistent,
                node: wish.node,
            };
            plan.step(knob, part.persistent, to);
            plan.effect = Effect::of(&part, to);
            plan.saved.extend(saved(pool));
        }
        Ok(plan)
    }

    fn step(&mut self, knob: Knob, before: Pages, to: Pages) {
        self.steps.push(Step {
            knob,
            before,
            to,
            after: None,
        });
    }

    /// True where everything is already as wished.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty() && self.files.is_empty()
    }

    /// The first knob whose value is not what the plan says it was before, with what the plan says and what it
    /// is: the pool has changed since, or was read while it did. What does not rest is not the value either.
    ///
    /// # Errors
    /// [`FileError`] where a knob cannot be read.
    pub fn moved(&self, root: &Root) -> Result<Option<(Knob, Pages, Pages)>, FileError> {
        let steps = self.steps.iter().map(|step| (step.knob, step.before));
        let saved = self.saved.iter().map(|saved| (saved.knob, saved.value));
        for (knob, planned) in steps.chain(saved) {
            let (now, rests) = knob.read_settled(root)?;
            if now != planned || !rests {
                return Ok(Some((knob, planned, now)));
            }
        }
        Ok(None)
    }

    /// True where a step is to make pages of free memory.
    pub fn makes(&self) -> bool {
        self.effect.made > Pages(0)
    }
}

impl Amount {
    fn from(self, part: &Part, size: PageSize, node: Option<NodeId>) -> Result<Pages, PlanError> {
        let has = part.persistent;
        match self {
            Self::To(to) => Ok(to),
            Self::More(by) => {
                let sum = has.0.checked_add(by.0).map(Pages);
                sum.ok_or(PlanError::TooMany { by, has })
            }
            Self::Less(by) => {
                let rest = has.0.checked_sub(by.0).map(Pages);
                let place = node.map_or(String::new(), |node| format!(" on node {node}"));
                rest.ok_or(PlanError::TooFew {
                    size,
                    by,
                    has,
                    place,
                })
            }
        }
    }
}

/// A pool, or its part on one node, as far as resizing goes.
struct Part {
    persistent: Pages,
    surplus: Pages,
    /// Pages that cannot be given back now: mapped or reserved, of the whole pool.
    pinned: u64,
    /// Persistent pages of the whole pool.
    of_pool: u64,
    /// Free pages here.
    free: u64,
}

impl Part {
    fn of(pool: &Pool, node: Option<NodeId>) -> Result<Self, PlanError> {
        let pinned = pool.used().0 + pool.reserved.0;
        let of_pool = pool.persistent().0;
        let Some(node) = node else {
            return Ok(Self {
                persistent: pool.persistent(),
                surplus: pool.surplus,
                pinned,
                of_pool,
                free: pool.free.0,
            });
        };
        let here = pool.nodes.get(&node).ok_or_else(|| PlanError::NoNode {
            node,
            size: pool.size,
            nodes: nodes_in_words(pool),
        })?;
        Ok(Self {
            persistent: here.persistent(),
            surplus: here.surplus,
            pinned,
            of_pool,
            free: here.free.0,
        })
    }
}

fn nodes_in_words(pool: &Pool) -> String {
    let nodes: Vec<_> = pool.nodes.keys().map(ToString::to_string).collect();
    match nodes.as_slice() {
        [] => "no nodes".to_owned(),
        [only] => format!("node {only}"),
        several => format!("nodes {}", several.join(", ")),
    }
}

impl Effect {
    /// The kernel frees free pages until what is mapped or reserved, in the whole pool, would no longer
    /// fit; the rest of the difference it calls surplus.
    fn of(part: &Part, to: Pages) -> Self {
        let (has, to) = (part.persistent.0, to.0);
        if to >= has {
            let adopted = part.surplus.0.min(to - has);
            return Self {
                adopted: Pages(adopted),
                made: Pages(to - has - adopted),
                ..Self::default()
            };
        }
        let spare = part.of_pool.saturating_sub(part.pinned).min(part.free);
        let freed = spare.min(has - to);
        Self {
            freed: Pages(freed),
            turned_surplus: Pages(has - to - freed),
            ..Self::default()
        }
    }
}

/// The persistent pages of a pool as they lie. The total does not say where they are: putting back a
/// total would spread them over all nodes anew.
pub(super) fn saved(pool: &Pool) -> Vec<Saved> {
    let knob = |node| Knob {
        size: pool.size,
        what: What::Persistent,
        node,
    };
    if pool.nodes.len() < 2 {
        return vec![Saved {
            knob: knob(None),
            value: pool.persistent(),
        }];
    }
    let on_node = |(node, pages): (&NodeId, &hugetlb::NodePool)| Saved {
        knob: knob(Some(*node)),
        value: pages.persistent(),
    };
    pool.nodes.iter().map(on_node).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::hugetlb::NodePool;

    fn pool(total: u64, free: u64, reserved: u64, surplus: u64) -> Pool {
        Pool {
            size: PageSize::SIZE_2M,
            total: Pages(total),
            free: Pages(free),
            reserved: Pages(reserved),
            surplus: Pages(surplus),
            overcommit: Pages(4),
            demote_size: None,
            nodes: [(NodeId(0), (total, free, surplus))]
                .into_iter()
                .map(|(node, (total, free, surplus))| {
                    let part = NodePool {
                        total: Pages(total),
                        free: Pages(free),
                        surplus: Pages(surplus),
                    };
                    (node, part)
                })
                .collect(),
        }
    }

    fn wish(persistent: Amount) -> Wish {
        Wish {
            persistent: Some(persistent),
            overcommit: None,
            node: None,
        }
    }

    fn effect(pool: &Pool, to: u64) -> [u64; 4] {
        let Effect {
            adopted,
            made,
            freed,
            turned_surplus,
        } = Plan::new(pool, &wish(Amount::To(Pages(to))))
            .unwrap()
            .effect;
        [adopted.0, made.0, freed.0, turned_surplus.0]
    }

    #[test]
    fn growth_adopts_surplus_first() {
        assert_eq!(effect(&pool(12, 0, 0, 4), 20), [4, 8, 0, 0]);
        assert_eq!(effect(&pool(12, 0, 0, 4), 10), [2, 0, 0, 0]);
    }

    #[test]
    fn shrinking_leaves_what_is_used_or_reserved() {
        // 10 persistent: 6 free, 2 of them reserved, so 4 can go.
        assert_eq!(effect(&pool(10, 6, 2, 0), 8), [0, 0, 2, 0]);
        assert_eq!(effect(&pool(10, 6, 2, 0), 0), [0, 0, 4, 6]);
        assert_eq!(effect(&pool(10, 0, 0, 0), 3), [0, 0, 0, 7]);
    }

    #[test]
    fn nothing_to_do_is_no_step() {
        let plan = Plan::new(&pool(10, 10, 0, 0), &wish(Amount::To(Pages(10)))).unwrap();
        assert!(plan.is_empty() && plan.saved.is_empty());
    }

    #[test]
    fn amounts_beyond_the_pool_are_refused() {
        let ten = pool(10, 10, 0, 0);
        let less = Plan::new(&ten, &wish(Amount::Less(Pages(11)))).unwrap_err();
        assert!(less.to_string().contains("has 10 persistent"), "{less}");
        let more = Plan::new(&ten, &wish(Amount::More(Pages(u64::MAX)))).unwrap_err();
        assert!(matches!(more, PlanError::TooMany { .. }));
        let elsewhere = Wish {
            node: Some(NodeId(7)),
            ..wish(Amount::To(Pages(1)))
        };
        let error = Plan::new(&ten, &elsewhere).unwrap_err();
        assert!(error.to_string().contains("has node 0"), "{error}");
    }

    #[test]
    fn with_several_nodes_each_is_saved() {
        let mut pool = pool(10, 10, 0, 0);
        let part = NodePool {
            total: Pages(3),
            free: Pages(3),
            surplus: Pages(1),
        };
        pool.nodes.insert(NodeId(2), part);
        let plan = Plan::new(&pool, &wish(Amount::More(Pages(5)))).unwrap();
        let saved: Vec<_> = plan
            .saved
            .iter()
            .map(|saved| (saved.knob.node.map(|node| node.0), saved.value.0))
            .collect();
        assert_eq!(saved, [(Some(0), 10), (Some(2), 2)]);
        assert_eq!(plan.steps[0].knob.node, None);
    }
}
