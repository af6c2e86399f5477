//! [`Group`]: sides that are measured in turn, and rows that compare them. [`measure`] fills a
//! table with groups.
//!
//! Only samples of one round are compared: a disturbance most likely affects both. The order of the
//! sides changes from lap to lap, so that after-effects of a run (a fragmented machine, a throttled
//! processor) affect all of them.

use std::ops::Range;
use std::rc::Rc;

use jumbo::units::{Bytes, counted};

use crate::claim::Claim;
use crate::figures::{Figures, unit};
use crate::keeper::{KernelKnobs, Needs};
use crate::launch::Launch;
use crate::memory::{Retakes, sample};
use crate::stats::{Spread, median};
use crate::table::{Quantity, Row, Samples, Table};
use crate::task::Task;
use crate::work::Worker;
use crate::{Error, Settings, interrupt};

/// Sides that are measured in turn, and the rows between them.
pub(crate) struct Group<'a> {
    settings: &'a Settings,
    what: &'static str,
    sides: Vec<SidePlan<'a>>,
    rows: Vec<RowPlan>,
    /// Number of laps per sample; `fold` combines them.
    laps: usize,
    fold: fn(&[f64]) -> f64,
    /// Kernel knobs, set for each sample as its side needs.
    kernel: Option<&'a KernelKnobs>,
    /// All samples of a side take the same system time: more means that the host was slow.
    pub(crate) is_even: bool,
    /// Errors after which the group is reported as missing, and the other groups go on.
    pub(crate) optional: fn(&Error) -> bool,
    /// Sides of which each may be missing alone after such an error, with its rows.
    pub(crate) spare: Range<usize>,
}

#[derive(Clone)]
struct SidePlan<'a> {
    name: String,
    /// Unmeasured step before a sample; returns the memory that the sample takes.
    prepare: Rc<dyn Fn() -> Result<Bytes, Error> + 'a>,
    measure: Rc<dyn Fn() -> Result<Figures, Error> + 'a>,
    needs: Needs,
    /// Second measurement of the same side, for A/A rows.
    again: Option<usize>,
}

/// A future row: of one figure, or of a sum of figures (`a_ms+b_ms`).
struct RowPlan {
    what: Quantity,
    figure: &'static str,
    sides: [usize; 2],
    /// `None` for a mere value of the first side.
    compare: Option<Compare>,
}

/// Constructor of a row from two sides.
pub(crate) type Compare = fn(Quantity, [Samples; 2]) -> Row;

/// Figures of a side, per lap; or the reason why there are none.
type Sampled = Result<Vec<Figures>, String>;

/// Adds rows to a group, each as `NAME => MEASURE, FIGURE, SIDES, PUBLISHED;`. The sides are
/// `baseline / candidate` for a ratio, `candidate - baseline` for a difference, `side / side` or
/// `side - side` for an A/A row. The published figure is optional.
macro_rules! rows {
    ($group:expr; $($name:expr => $measure:expr, $figure:expr, $one:ident $how:tt $other:ident
        $(, $published:expr)?;)*) => {$(
        let row = $group.row(($name, $measure, $figure), $crate::group::rows!(@ $one $how $other));
        row.published = [$($published.into(),)? None::<&'static str>][0];
    )*};
    (@ $baseline:ident / $candidate:ident) => {
        ([$baseline, $candidate], $crate::table::Row::ratio)
    };
    (@ $candidate:ident - $baseline:ident) => {
        ([$baseline, $candidate], $crate::table::Row::difference)
    };
}
pub(crate) use rows;

impl<'a> Group<'a> {
    pub(crate) fn new(settings: &'a Settings, what: &'static str) -> Self {
        Self {
            settings,
            what,
            sides: Vec::new(),
            rows: Vec::new(),
            laps: 1,
            fold: median,
            kernel: None,
            is_even: true,
            optional: |_| false,
            spare: 0..0,
        }
    }

    /// Makes each sample of several laps.
    pub(crate) fn laps(self, laps: usize, fold: fn(&[f64]) -> f64) -> Self {
        Self { laps, fold, ..self }
    }

    /// Sets kernel knobs for each sample.
    pub(crate) fn on(self, kernel: &'a KernelKnobs) -> Self {
        let kernel = Some(kernel);
        Self { kernel, ..self }
    }

    /// Adds a side whose samples take `size` bytes, and returns its number.
    pub(crate) fn side(
        &mut self,
        name: impl Into<String>,
        size: Bytes,
        measure: impl Fn() -> Result<Figures, Error> + 'a,
    ) -> usize {
        self.prepared(name, move || Ok(size), measure)
    }

    /// Adds a side with a `prepare` step before each sample, which returns the sample's memory.
    pub(crate) fn prepared(
        &mut self,
        name: impl Into<String>,
        prepare: impl Fn() -> Result<Bytes, Error> + 'a,
        measure: impl Fn() -> Result<Figures, Error> + 'a,
    ) -> usize {
        self.sides.push(SidePlan {
            name: name.into(),
            prepare: Rc::new(prepare),
            measure: Rc::new(measure),
            needs: Needs::default(),
            again: None,
        });
        self.sides.len() - 1
    }

    /// Adds a side whose samples come from a worker with this launch and task.
    pub(crate) fn work(
        &mut self,
        launch: Launch,
        task: Task,
        size: Bytes,
        claims: Vec<Claim>,
    ) -> usize {
        self.worker(launch.name(), Worker::new(launch, task), size, claims)
    }

    /// Adds a side whose samples come from any worker.
    pub(crate) fn worker(
        &mut self,
        name: impl Into<String>,
        worker: Worker,
        size: Bytes,
        claims: Vec<Claim>,
    ) -> usize {
        let settings = self.settings;
        self.side(name, size, move || worker.sample(settings, &claims))
    }

    pub(crate) fn needs(&mut self, side: usize, needs: Needs) -> usize {
        self.sides[side].needs = needs;
        side
    }

    /// Second measurement of `side`.
    fn again(&mut self, side: usize) -> usize {
        if let Some(again) = self.sides[side].again {
            return again;
        }
        let mut again = self.sides[side].clone();
        again.name += " again";
        self.sides.push(again);
        let at = self.sides.len() - 1;
        self.sides[side].again = Some(at);
        at
    }

    /// Adds a row of a name, a measure and a figure, on two sides; see [`rows`].
    pub(crate) fn row(
        &mut self,
        (name, measure, figure): (impl Into<String>, impl Into<String>, &'static str),
        ([baseline, mut candidate], compare): ([usize; 2], Compare),
    ) -> &mut Quantity {
        let mut measure = measure.into();
        if baseline == candidate {
            candidate = self.again(baseline);
            measure += ", A/A";
        }
        let sides = [baseline, candidate];
        self.plan((name.into(), measure, figure), sides, Some(compare))
    }

    /// Adds a figure without comparison: the median of all laps.
    pub(crate) fn value(&mut self, name: impl Into<String>, figure: &'static str, side: usize) {
        self.plan((name.into(), String::new(), figure), [side; 2], None);
    }

    fn plan(
        &mut self,
        (name, measure, figure): (String, String, &'static str),
        sides: [usize; 2],
        compare: Option<Compare>,
    ) -> &mut Quantity {
        let row = RowPlan {
            what: Quantity {
                name,
                measure,
                unit: unit(figure),
                published: None,
            },
            figure,
            sides,
            compare,
        };
        &mut self.rows.push_mut(row).what
    }

    /// Measures all sides and returns their figures lap by lap, without the warm-up lap; or the
    /// reason why there are none. Fewer laps after a signal.
    fn samples(&self, hit: &mut Retakes) -> Result<Vec<Sampled>, Error> {
        let rounds = self.settings.rounds.get();
        let progress = &self.settings.progress;
        let mut samples: Vec<Sampled> = self.sides.iter().map(|_| Ok(Vec::new())).collect();
        let mut least = vec![f64::INFINITY; self.sides.len()];
        for lap in 0..=rounds * self.laps {
            let when = match lap.div_ceil(self.laps) {
                0 => "warm-up".to_owned(),
                round => format!("round {round} of {rounds}"),
            };
            let is_first = lap == 0 || (lap - 1).is_multiple_of(self.laps);
            for at in order(lap, self.sides.len()) {
                if interrupt::asked().is_some() {
                    return Ok(samples);
                }
                let side = &self.sides[at];
                if is_first {
                    let what = self.what;
                    self.settings
                        .show_progress(format!("{when}: {what}: {}", side.name));
                }
                progress.inc(u64::from(is_first));
                let Ok(laps) = &mut samples[at] else {
                    continue;
                };
                if !self.is_even {
                    least[at] = f64::INFINITY;
                }
                let measure = || {
                    self.kernel
                        .map_or(Ok(()), |kernel| kernel.provide(&side.needs))?;
                    (side.measure)()
                };
                let figures = sample(&*side.prepare, (&mut least[at], hit), &measure)
                    .map_err(|error| error.of_side(&side.name));
                match figures {
                    Ok(figures) if lap > 0 => laps.push(figures),
                    Ok(_) => {}
                    // The worker may have received the signal too.
                    Err(_) if interrupt::asked().is_some() => return Ok(samples),
                    Err(error) if self.spare.contains(&at) && (self.optional)(&error) => {
                        samples[at] = Err(format!("{}: {error}", side.name));
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(samples)
    }

    fn push(self, table: &mut Table, samples: &[Sampled]) {
        for (side, why) in samples.iter().enumerate() {
            if let Err(why) = why {
                let values = self.rows.iter().filter(|row| row.sides == [side; 2]);
                let values: Vec<_> = values.map(|row| row.what.name.as_str()).collect();
                table.without(&values, self.what, why.clone());
            }
        }
        let laps = samples.iter().flatten().map(Vec::len).min();
        let whole = laps.unwrap_or_default() / self.laps * self.laps;
        if whole == 0 && laps.is_some() {
            return table.missing(self.what, "interrupted during the first round");
        }
        for row in self.rows {
            let [Ok(baseline), Ok(candidate)] = row.sides.map(|side| samples[side].as_ref()) else {
                continue;
            };
            let fold = row
                .compare
                .map_or(median as fn(&[f64]) -> f64, |_| self.fold);
            let laps = [(row.sides[0], baseline), (row.sides[1], candidate)];
            let sides: [Samples; 2] = laps.map(|(side, laps)| {
                let of_lap = |laps: &[Figures], name| {
                    let figures = laps.iter().filter_map(|lap| lap.get(name).copied());
                    fold(&figures.collect::<Vec<_>>())
                };
                let of_round = |laps| row.figure.split('+').map(|name| of_lap(laps, name)).sum();
                let rounds = laps[..whole].chunks(self.laps).map(of_round);
                (self.sides[side].name.clone(), rounds.collect())
            });
            let is_absent = |(_, rounds): &Samples| rounds.iter().all(|figure| figure.is_nan());
            match row.compare {
                // Some figures exist on one side only.
                _ if sides.iter().any(is_absent) => {}
                Some(compare) => table.push(compare(row.what, sides)),
                None => table.value(row.what.name, row.what.unit, Spread::of(&sides[0].1)),
            }
        }
    }
}

/// Measures all groups, one after the other, and fills `table` with their rows.
pub(crate) fn measure(
    settings: &Settings,
    mut table: Table,
    groups: Vec<Group<'_>>,
) -> Result<Table, Error> {
    let sides: usize = groups.iter().map(|group| group.sides.len()).sum();
    let steps = sides * (settings.rounds.get() + 1);
    let mut names: Vec<_> = groups.iter().map(|group| group.what).collect();
    names.dedup();
    let (rounds, samples) = (settings.rounds.get(), counted(steps as u64, "sample"));
    // One line each: together they are wider than a terminal.
    settings.progress.println(format!(
        "{}: {rounds} rounds after a warm-up, {samples}:\n  {}",
        table.table,
        names.join("\n  ")
    ));
    settings.progress.set_length(steps as u64);
    for group in groups {
        match group.samples(&mut table.hit) {
            Ok(samples) => group.push(&mut table, &samples),
            // The other groups do not depend on it.
            Err(error) if (group.optional)(&error) => table.missing(group.what, error.to_string()),
            Err(error) => return Err(error),
        }
    }
    table.interrupted = interrupt::asked();
    Ok(table)
}

/// Order of the sides in a lap: it rotates, and every second lap runs backwards.
fn order(lap: usize, sides: usize) -> Vec<usize> {
    let mut order: Vec<_> = (0..sides).collect();
    order.rotate_left(lap % sides.max(1));
    if lap % 2 == 1 {
        order.reverse();
    }
    order
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::figures::figures;
    use crate::stats::minimum;

    fn measured(settings: &Settings, groups: Vec<Group<'_>>) -> Result<serde_json::Value, Error> {
        let table = Table::new("t", String::new(), settings)?;
        let table = measure(settings, table, groups)?;
        Ok(serde_json::to_value(&table).unwrap())
    }

    #[test]
    fn laps_are_combined_after_a_warm_up_and_figures_added() {
        // One warm-up, and three laps for each of two rounds.
        let left = RefCell::new(vec![9.0, 3.0, 5.0, 4.0, 8.0, 7.0, 6.0].into_iter());
        let settings = Settings::for_tests();
        let mut group = Group::new(&settings, "g").laps(3, minimum);
        let a = group.side("a", Bytes(0), || {
            let next = left.borrow_mut().next().unwrap();
            Ok(figures([("x_ms", next), ("y_ms", 10.0)]))
        });
        let b = group.side("b", Bytes(0), || {
            Ok(figures([("x_ms", 1.0), ("y_ms", 0.0)]))
        });
        rows! { group;
            "r" => "m", "x_ms+y_ms", a / b, "p";
            "d" => "m", "x_ms", b - a;
            "aa" => "m", "x_ms", b / b;
        }
        group.value("v", "x_ms", a);
        let table = measured(&settings, vec![group]).unwrap();
        assert_eq!(table["ratios"]["r"]["min"], 13.0);
        assert_eq!(table["ratios"]["r"]["max"], 16.0);
        assert_eq!(table["values"]["d"]["median"], -3.5);
        assert_eq!(table["values"]["v"]["unit"], "ms");
        assert_eq!(table["rows"][0]["published"], "p");
        assert_eq!(table["rows"][1]["candidate"]["name"], "b");
        assert_eq!(table["rows"][2]["measure"], "m, A/A");
        assert_eq!(table["rows"][2]["candidate"]["name"], "b again");
        assert_eq!(table["hit"]["samples"], 21);
    }

    #[test]
    fn a_failing_side_is_named_and_an_optional_group_is_missing() {
        let settings = Settings::for_tests();
        let group = || {
            let mut group = Group::new(&settings, "g");
            let side = group.side("a", Bytes(0), || Err(Error::claim("nothing", "try")));
            rows! { group; "aa" => "m", "x_ms", side / side; }
            group
        };
        let error = measured(&settings, vec![group()]).unwrap_err().to_string();
        assert!(
            error.contains("`a`") || error.contains("`a again`"),
            "{error}"
        );
        let mut group = group();
        group.optional = Error::is_of_host;
        let table = measured(&settings, vec![group]).unwrap();
        assert_eq!(table["missing"][0]["what"], "g");
    }

    #[test]
    fn an_optional_side_is_missing_alone_with_its_rows() {
        let settings = Settings::for_tests();
        let mut group = Group::new(&settings, "g");
        let works = || Ok(figures([("x_ms", 2.0)]));
        let [plain, fails, works] = [
            group.side("plain", Bytes(0), works),
            group.side("fails", Bytes(0), || Err(Error::claim("nothing", "try"))),
            group.side("works", Bytes(0), works),
        ];
        rows! { group;
            "gone" => "m", "x_ms", plain / fails;
            "there" => "m", "x_ms", plain / works;
        }
        group.value("gone_x_ms", "x_ms", fails);
        (group.optional, group.spare) = (Error::is_of_host, fails..works);
        let table = measured(&settings, vec![group]).unwrap();
        assert_eq!(table["ratios"]["there"]["median"], 1.0);
        assert!(table["ratios"].get("gone").is_none(), "{table}");
        assert!(table["values"]["gone_x_ms"].is_null(), "{table}");
        let missing = &table["missing"][0];
        assert_eq!(missing["what"], "g");
        assert!(
            missing["why"].as_str().unwrap().starts_with("fails: "),
            "{table}"
        );
    }

    #[test]
    fn each_side_runs_once_per_lap_in_changing_order() {
        let laps: Vec<_> = (0..5).map(|lap| order(lap, 4)).collect();
        for lap in &laps {
            let mut sorted = lap.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, [0, 1, 2, 3]);
        }
        for place in 0..4 {
            assert!(
                laps.iter().any(|lap| lap[place] != laps[0][place]),
                "{laps:?}"
            );
        }
    }
}
