//! How large a pool should be now: [`AutoSize`], what `jumbo pool auto` asks at every look.
//!
//! Pure: counters and a clock go in, numbers for the two knobs come out. The rule is that of a sliding
//! maximum. What is mapped or reserved, and some headroom, is needed; the pool is made as large as the
//! most that was needed within the idle time. So it grows at once, ahead of the next mapping, and a page
//! goes back when it was not needed for the idle time, and not before. What is there at the first look
//! counts as needed then. The headroom is filled up when half of it is used, so that demand that climbs
//! page by page makes few resizes.
//!
//! A mapping larger than the headroom cannot wait for the next look: it fails. So the rest up to the
//! maximum is lent to the kernel as overcommit, for surplus pages made at the mapping itself, and the
//! next look makes those persistent.
//!
//! Memory that is available on the host bounds both. Where it falls below what is to be kept, pages that
//! no program needs go back at once, idle or not.
//!
//! Invariants: `min <= persistent` asked for, unless the memory for it would go below what is to be
//! kept; `persistent + overcommit <= max`, unless demand is there already; what one decision can make the
//! kernel take leaves `keep_free` available.

use std::collections::VecDeque;
use std::time::Duration;

use serde::Serialize;

use crate::kernel::hugetlb::Pool;
use crate::units::{Bytes, Pages};

/// After a growth that fell short nothing is asked for so long, and each time twice as long.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest of these pauses.
const LAST_PAUSE: Duration = Duration::from_secs(60);

/// What the pool is kept within.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Bounds {
    /// The least persistent pages.
    pub min: Pages,
    /// The most pages, surplus included.
    pub max: Pages,
    /// Pages kept ready beyond what is needed.
    pub headroom: Pages,
    /// How long a page is not needed before it goes back.
    pub idle: Duration,
    /// What stays available on the host, whatever the pool needs.
    pub keep_free: Bytes,
    /// Whether surplus pages may be made for what outruns the looks.
    pub overcommit: bool,
}

/// One look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// When, on a clock that never goes back.
    pub at: Duration,
    /// The pool.
    pub pool: Pool,
    /// `MemAvailable`: what the host can give without swapping.
    pub available: Bytes,
}

/// What is to be written, and why.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Decision {
    /// Persistent pages; `None`: leave them.
    pub persistent: Option<Pages>,
    /// Overcommit; `None`: leave it.
    pub overcommit: Option<Pages>,
    /// Why the persistent pages change, in words.
    pub reason: String,
}

/// What was needed lately, and what failed lately.
#[derive(Clone, Debug)]
pub struct AutoSize {
    bounds: Bounds,
    /// Times and needs, each need larger than all after it: the first is the maximum.
    peaks: VecDeque<(Duration, u64)>,
    pause: Duration,
    paused_until: Duration,
}

impl AutoSize {
    /// One that has seen nothing yet.
    pub fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            peaks: VecDeque::new(),
            pause: FIRST_PAUSE,
            paused_until: Duration::ZERO,
        }
    }

    /// What to do after one look.
    pub fn decide(&mut self, seen: &Seen) -> Decision {
        let Bounds {
            min,
            max,
            headroom,
            keep_free,
            idle,
            ..
        } = self.bounds;
        let Seen { pool, .. } = seen;
        // Pages mapped or promised, and pages that stay when demand is gone.
        let (demand, has) = (pool.used().0 + pool.reserved.0, pool.persistent().0);
        if self.peaks.is_empty() && !idle.is_zero() {
            self.remember(seen.at, has);
        }
        let peak = self.remember(seen.at, demand.saturating_add(headroom.0));
        // A maximum below what is there already takes nothing from a program.
        let ceiling = max.0.max(min.0);
        let want = peak.clamp(min.0, ceiling);

        // Pages for which memory may be taken now, and pages that memory is short of.
        let size = pool.size.bytes();
        let room = seen.available.0.saturating_sub(keep_free.0) / size;
        let short = keep_free.0.saturating_sub(seen.available.0).div_ceil(size);

        let now = format!("{} in use and {} reserved", pool.used(), pool.reserved);
        let mut decision = Decision::default();
        let mut made = 0;
        let mut to = has;
        if short > 0 {
            // Only free pages that no program was promised come back now.
            let idle_pages = pool.unused().0;
            let gives = short.min(idle_pages).min(has.saturating_sub(min.0));
            to = has - gives;
            decision.reason = format!(
                "the host has {} available, less than the {keep_free} to be kept",
                seen.available
            );
        } else if want > has && (has < min.0 || has < demand.saturating_add(headroom.0.div_ceil(2)))
        {
            let adopted = pool.surplus.0.min(want - has);
            let may_make = if seen.at < self.paused_until { 0 } else { room };
            made = (want - has - adopted).min(may_make);
            to = has + adopted + made;
            let bound = if to < want && made == room {
                format!("; {keep_free} are to be kept available")
            } else {
                String::new()
            };
            decision.reason = match (demand, to <= min.0) {
                (_, true) => format!("the least is {min}{bound}"),
                _ => format!("{now}, headroom {headroom}{bound}"),
            };
        } else if want < has {
            to = want;
            decision.reason = if has > ceiling {
                format!("the most is {ceiling}")
            } else if idle.is_zero() {
                format!("{now}, headroom {headroom}")
            } else {
                format!("no more than {want} needed for {} s", idle.as_secs_f64())
            };
        }
        if to != has {
            decision.persistent = Some(Pages(to));
        }
        if self.bounds.overcommit {
            decision.overcommit = self.overcommit(pool, to, room.saturating_sub(made));
        }
        decision
    }

    /// A growth fell short: memory is not to be had now, and asking at every look would compact it
    /// without end.
    pub fn fell_short(&mut self, at: Duration) -> Duration {
        let pause = self.pause;
        self.paused_until = at + pause;
        self.pause = (pause * 2).min(LAST_PAUSE);
        pause
    }

    /// A growth brought what was asked.
    pub fn grew(&mut self) {
        self.pause = FIRST_PAUSE;
    }

    /// Takes a need in, and returns the largest of the idle time.
    fn remember(&mut self, at: Duration, need: u64) -> u64 {
        let begin = at.saturating_sub(self.bounds.idle);
        while self
            .peaks
            .back()
            .is_some_and(|(_, smaller)| *smaller <= need)
        {
            self.peaks.pop_back();
        }
        self.peaks.push_back((at, need));
        while self.peaks.front().is_some_and(|(when, _)| *when < begin) {
            self.peaks.pop_front();
        }
        self.peaks.front().map_or(need, |(_, largest)| *largest)
    }

    /// How many surplus pages there may be when `persistent` pages are there and memory for `room` more
    /// may be taken. In steps, so that every breath of the host is no write.
    fn overcommit(&self, pool: &Pool, persistent: u64, room: u64) -> Option<Pages> {
        let max = self.bounds.max.0;
        let adopted = persistent
            .saturating_sub(pool.persistent().0)
            .min(pool.surplus.0);
        let surplus = pool.surplus.0 - adopted;
        let grain = (max / 16).max(1);
        let whole = max.saturating_sub(persistent);
        let lent = surplus.saturating_add(room);
        let to = if lent >= whole {
            whole
        } else {
            (lent / grain * grain).max(surplus).min(whole)
        };
        (to != pool.overcommit.0).then_some(Pages(to))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::fake::pool;
    use crate::units::PageSize;
    use proptest::prelude::*;

    const SIZE: PageSize = PageSize::SIZE_2M;

    fn bounds() -> Bounds {
        Bounds {
            min: Pages(4),
            max: Pages(64),
            headroom: Pages(2),
            idle: Duration::from_secs(10),
            keep_free: Pages(100).bytes(SIZE),
            overcommit: true,
        }
    }

    /// A kernel that does what it is told: demand takes free pages, then surplus ones.
    struct Model {
        persistent: u64,
        overcommit: u64,
        demand: u64,
        memory: u64,
    }

    impl Model {
        fn surplus(&self) -> u64 {
            self.demand.saturating_sub(self.persistent)
        }

        fn total(&self) -> u64 {
            self.persistent.max(self.demand)
        }

        fn available(&self) -> u64 {
            self.memory.saturating_sub(self.total())
        }

        /// Demand goes where it wants, as far as the kernel lets it.
        fn demand(&mut self, wanted: u64) {
            let may = self.persistent + self.overcommit.min(self.available() + self.surplus());
            self.demand = wanted.min(may.max(self.demand));
        }

        fn look(&self, seconds: u64) -> Seen {
            let total = self.total();
            Seen {
                at: Duration::from_secs(seconds),
                pool: Pool {
                    overcommit: Pages(self.overcommit),
                    ..pool(total, total - self.demand, 0, self.surplus())
                },
                available: Pages(self.available()).bytes(SIZE),
            }
        }

        fn obey(&mut self, decision: &Decision) {
            if let Some(persistent) = decision.persistent {
                self.persistent = persistent.0;
            }
            if let Some(overcommit) = decision.overcommit {
                self.overcommit = overcommit.0;
            }
        }
    }

    fn model() -> Model {
        Model {
            persistent: 0,
            overcommit: 0,
            demand: 0,
            memory: 1000,
        }
    }

    #[test]
    fn it_grows_at_once_and_shrinks_after_the_idle_time() {
        let (mut auto_size, mut model) = (AutoSize::new(bounds()), model());
        let mut at = |second, wanted| {
            model.demand(wanted);
            let decision = auto_size.decide(&model.look(second));
            model.obey(&decision);
            (model.persistent, model.overcommit)
        };
        assert_eq!(at(0, 0), (4, 60));
        assert_eq!(at(1, 30), (32, 32));
        assert_eq!(at(2, 0), (32, 32));
        assert_eq!(at(11, 0), (32, 32));
        assert_eq!(at(12, 0), (4, 60));
        assert_eq!(at(13, 1000), (64, 0));
    }

    #[test]
    fn memory_to_be_kept_bounds_the_pool() {
        let (mut auto_size, mut model) = (AutoSize::new(bounds()), model());
        model.memory = 108;
        let decision = auto_size.decide(&model.look(0));
        model.obey(&decision);
        assert_eq!((model.persistent, model.overcommit), (4, 4));
        model.demand(40);
        let decision = auto_size.decide(&model.look(1));
        assert!(decision.reason.contains("kept"), "{decision:?}");
        model.obey(&decision);
        assert_eq!(model.available(), 100);
        // Other programs take memory: what is not needed goes back, down to the least.
        model.demand = 0;
        model.memory -= 3;
        let decision = auto_size.decide(&model.look(2));
        assert_eq!(decision.persistent, Some(Pages(model.persistent - 3)));
        assert!(decision.reason.contains("less than"), "{decision:?}");
    }

    #[test]
    fn after_a_shortage_it_pauses_ever_longer() {
        let mut auto_size = AutoSize::new(bounds());
        let model = model();
        assert_eq!(auto_size.decide(&model.look(0)).persistent, Some(Pages(4)));
        assert_eq!(auto_size.fell_short(Duration::ZERO), FIRST_PAUSE);
        let early = Seen {
            at: FIRST_PAUSE / 2,
            ..model.look(0)
        };
        assert_eq!(auto_size.decide(&early).persistent, None);
        assert_eq!(auto_size.decide(&model.look(1)).persistent, Some(Pages(4)));
        assert_eq!(auto_size.fell_short(FIRST_PAUSE), FIRST_PAUSE * 2);
        for _ in 0..10 {
            auto_size.fell_short(FIRST_PAUSE);
        }
        assert_eq!(auto_size.fell_short(FIRST_PAUSE), LAST_PAUSE);
        auto_size.grew();
        assert_eq!(auto_size.fell_short(FIRST_PAUSE), FIRST_PAUSE);
    }

    #[test]
    fn what_is_there_is_needed_until_the_idle_time_is_over() {
        let (mut auto_size, mut model) = (AutoSize::new(bounds()), model());
        model.persistent = 20;
        let mut at = |second| auto_size.decide(&model.look(second)).persistent;
        assert_eq!((at(0), at(10)), (None, None));
        assert_eq!(at(11), Some(Pages(4)));
        let bounds = Bounds {
            idle: Duration::ZERO,
            ..bounds()
        };
        let now = AutoSize::new(bounds).decide(&model.look(0));
        assert_eq!(now.persistent, Some(Pages(4)));
    }

    #[test]
    fn demand_that_climbs_makes_few_resizes() {
        let bounds = Bounds {
            headroom: Pages(8),
            ..bounds()
        };
        let (mut auto_size, mut model) = (AutoSize::new(bounds), model());
        let mut resizes = 0;
        for second in 0..40 {
            model.demand(second);
            let decision = auto_size.decide(&model.look(second));
            resizes += u32::from(decision.persistent.is_some());
            model.obey(&decision);
            assert!(model.persistent >= second + 4);
        }
        assert!(resizes < 12, "{resizes}");
    }

    proptest! {
        #[test]
        fn bounds_hold_whatever_the_demand(
            steps in prop::collection::vec((0u64..200, 0u64..300, 0u64..4), 1..60),
            min in 0u64..20,
            more in 0u64..80,
            headroom in 0u64..20,
        ) {
            let bounds = Bounds {
                min: Pages(min), max: Pages(min + more), headroom: Pages(headroom), ..bounds()
            };
            let kept = bounds.keep_free.whole_pages(SIZE).0;
            let (mut auto_size, mut model) = (AutoSize::new(bounds), model());
            let mut second = 0;
            for (wanted, memory, passed) in steps {
                second += passed;
                // Others take and give memory, never what the pool has.
                model.memory = memory.max(model.total());
                model.demand(wanted);
                let (before, had) = (model.available(), model.persistent);
                let decision = auto_size.decide(&model.look(second));
                model.obey(&decision);
                prop_assert!(model.available() >= kept.min(before), "took what was to be kept");
                let lent = model.overcommit.saturating_sub(model.surplus());
                prop_assert!(lent == 0 || model.available() >= kept + lent, "lent what was to be kept");
                prop_assert!(model.persistent <= bounds.max.0);
                prop_assert!(model.persistent + model.overcommit <= bounds.max.0.max(model.total()));
                prop_assert!(
                    model.persistent >= bounds.min.0 || model.available() <= kept + model.memory - before
                        || model.persistent >= had,
                    "below the least"
                );
            }
        }
    }
}
