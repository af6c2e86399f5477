//! [`Side`]: the ways in which the block is freed, and what each must have done.

use std::borrow::Cow;
use std::num::NonZeroU32;

use jumbo::policy::FreeMode;
use jumbo::status::Freeing;
use jumbo::units::{Bytes, counted};

use super::worker::FreeSample;
use crate::Error;
use crate::child::{Launch, Options};
use crate::claim::{self, DRY_RUN};

/// So much of the block must have been freed the way the side's name says, in percent: its ends are the caller's.
const MOST: u64 = 90;

/// One way to free the block.
pub(super) struct Side {
    pub(super) launch: Launch,
    pub(super) back: Back,
    again: bool,
}

/// Whether a side waits until the memory is back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Back {
    Asked,
    NotAsked,
}

/// All of them, the baseline first.
pub(super) fn sides(workers: &[NonZeroU32]) -> Vec<Side> {
    let side = |launch, back| Side {
        launch,
        back,
        again: false,
    };
    let gathered = workers.iter().map(|workers| {
        let options = Options {
            free: Some(FreeMode::Sync),
            free_workers: Some(workers.get()),
            ..Options::NONE
        };
        side(Launch::Jumbo(options), Back::NotAsked)
    });
    let background = Launch::Jumbo(Options {
        free: Some(FreeMode::Background),
        ..Options::NONE
    });
    let mut sides = vec![
        side(Launch::Plain, Back::Asked),
        Side {
            again: true,
            ..side(Launch::Plain, Back::NotAsked)
        },
    ];
    sides.extend(gathered);
    sides.push(side(background, Back::Asked));
    sides
}

impl Side {
    /// As the table shows it.
    pub(super) fn name(&self) -> Cow<'static, str> {
        if self.again {
            "plain again".into()
        } else {
            self.launch.name()
        }
    }

    /// The key of its row.
    pub(super) fn key(&self) -> Cow<'static, str> {
        match (self.mode(), self.workers()) {
            (Some(FreeMode::Background), _) => "free_background_call".into(),
            (_, Some(workers)) => format!("free_{workers}_workers").into(),
            _ => "free_aa".into(),
        }
    }

    /// What its row measures.
    pub(super) fn measure(&self) -> Cow<'static, str> {
        match (self.mode(), self.workers()) {
            (Some(FreeMode::Background), _) => "free, until it returns".into(),
            (_, Some(1)) => "free by 1 thread".into(),
            (_, Some(workers)) => format!("free by up to {workers} threads").into(),
            _ => "free, A/A".into(),
        }
    }

    /// The figure that came with the mechanism: 10.8 s on one thread, 5.8 s by default, 4.8 s at best.
    pub(super) fn published(&self) -> Option<&'static str> {
        (self.workers()? > 1).then_some("1.86 by default, 2.26 at best")
    }

    /// That it runs under jumbo.
    pub(super) fn is_jumbo(&self) -> bool {
        matches!(self.launch, Launch::Jumbo(_))
    }

    /// Whether the sample was freed the way this side's name says, on a machine with so many CPUs.
    pub(super) fn check(&self, sample: &FreeSample, size: Bytes, cpus: usize) -> Result<(), Error> {
        let Some(freed) = sample.freed.filter(|_| self.is_jumbo()) else {
            return Ok(());
        };
        match self.found_wrong(&freed, size, cpus) {
            Some(found) => claim::refuse(self.launch, found, DRY_RUN),
            None => Ok(()),
        }
    }

    fn found_wrong(&self, freed: &Freeing, size: Bytes, cpus: usize) -> Option<String> {
        let most = |bytes: Bytes| bytes.0 >= size.0 / 100 * MOST;
        let least = |asked: u32| u64::from(asked).min(cpus as u64);
        let Freeing {
            gathered,
            background,
            workers,
            ..
        } = *freed;
        match (self.mode(), self.workers()) {
            (Some(FreeMode::Background), _) if !most(background) => Some(format!(
                "{background} of {size} were freed in the background"
            )),
            (Some(FreeMode::Sync), Some(asked)) if asked > 1 && !most(gathered) => Some(format!(
                "{gathered} of {size} were freed by several threads"
            )),
            // Threads that find no CPU find nothing left to free.
            (Some(FreeMode::Sync), Some(asked))
                if workers > u64::from(asked) || (asked > 1 && workers < least(asked)) =>
            {
                Some(format!("{} freed", counted(workers, "thread")))
            }
            _ => None,
        }
    }

    fn mode(&self) -> Option<FreeMode> {
        match self.launch {
            Launch::Jumbo(options) => options.free,
            _ => None,
        }
    }

    fn workers(&self) -> Option<u32> {
        match self.launch {
            Launch::Jumbo(options) => options.free_workers,
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workers(numbers: &[u32]) -> Vec<NonZeroU32> {
        numbers.iter().filter_map(|n| NonZeroU32::new(*n)).collect()
    }

    #[test]
    fn the_baseline_comes_twice_and_every_side_has_a_row_of_its_own() {
        let sides = sides(&workers(&[1, 2, 32]));
        let names: Vec<_> = sides.iter().map(Side::name).collect();
        assert_eq!(
            names,
            [
                "plain",
                "plain again",
                "jumbo run --free=sync --free-workers=1",
                "jumbo run --free=sync --free-workers=2",
                "jumbo run --free=sync --free-workers=32",
                "jumbo run --free=background",
            ]
        );
        let keys: Vec<_> = sides[1..].iter().map(Side::key).collect();
        assert_eq!(
            keys,
            [
                "free_aa",
                "free_1_workers",
                "free_2_workers",
                "free_32_workers",
                "free_background_call"
            ]
        );
    }

    #[test]
    fn a_side_that_freed_in_another_way_is_refused() {
        let sides = sides(&workers(&[1, 4]));
        let [_, _, one, four, background] = &sides[..] else {
            panic!("five sides");
        };
        let size = Bytes(1000);
        let freed = |gathered, background, workers| Freeing {
            gathered: Bytes(gathered),
            background: Bytes(background),
            workers,
            ..Freeing::default()
        };
        for (side, freed, fine) in [
            (one, freed(0, 0, 0), true),
            (one, freed(1000, 0, 1), true),
            (one, freed(1000, 0, 2), false),
            (four, freed(950, 0, 4), true),
            (four, freed(950, 0, 3), true),
            (four, freed(950, 0, 1), false),
            (four, freed(950, 0, 5), false),
            (four, freed(500, 0, 4), false),
            (four, freed(0, 0, 0), false),
            (background, freed(1000, 1000, 2), true),
            (background, freed(1000, 100, 2), false),
        ] {
            let found = side.found_wrong(&freed, size, 2);
            assert_eq!(found.is_none(), fine, "{} {freed:?}", side.name());
        }
    }
}
