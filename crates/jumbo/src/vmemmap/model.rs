//! The [`Table`] under a scheduler that searches its interleavings (shuttle), on words of the
//! scheduler and memory that detects writes after its free.
//!
//! The tests search for a look-up whose result was never true, a reference that does not keep its
//! page whole, a write to a descriptor without memory, and a deadlock (which shuttle detects).

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::io::Errno;
use shuttle::sync::atomic::AtomicU64;
use shuttle::sync::{Arc, Mutex};
use shuttle::thread;

use super::table::{Place, Store, Table};
use super::words::{Counts, Descriptor, Kind, Section, State, Word};
use super::{Error, Geometry, Unsaved};
use crate::units::PageSize;

/// Pages of 128 bytes, two descriptors to each; a section of four pages.
const BASE: u64 = 128;
const SECTION: u32 = 2;
/// Two sections, in which all happens.
const WHOLE: u32 = 3;
const PAGES: usize = 1 << WHOLE;

#[derive(Debug, Default)]
struct Number {
    value: AtomicU64,
    /// Unknown to the scheduler: it changes together with the value.
    is_gone: AtomicBool,
}

impl Number {
    /// Checks an operation. The scheduler switches threads before an operation, not after it.
    #[track_caller]
    fn written(&self) {
        assert!(
            !self.is_gone.load(Ordering::Relaxed),
            "a write to memory that was given back"
        );
    }
}

impl Word for Number {
    fn load(&self, order: Ordering) -> u64 {
        self.value.load(order)
    }

    fn store(&self, value: u64, order: Ordering) {
        self.value.store(value, order);
        self.written();
    }

    fn replace(&self, current: u64, new: u64) -> Result<u64, u64> {
        let order = Ordering::SeqCst;
        let replaced = self.value.compare_exchange(current, new, order, order);
        self.written();
        replaced
    }

    fn fetch_add(&self, more: u64, order: Ordering) -> u64 {
        let before = self.value.fetch_add(more, order);
        self.written();
        before
    }

    fn fetch_sub(&self, less: u64, order: Ordering) -> u64 {
        let before = self.value.fetch_sub(less, order);
        self.written();
        before
    }
}

#[derive(Debug)]
struct Model {
    sections: Vec<Section<Number>>,
    descriptors: Vec<Descriptor<Number>>,
    lock: Mutex<()>,
    /// False: allocations fail.
    has_memory: AtomicBool,
    /// True: frees fail.
    is_locked: AtomicBool,
}

impl Model {
    fn words(&self, sections: Range<usize>) -> impl Iterator<Item = &Number> {
        let pages = sections.start << SECTION..sections.end << SECTION;
        let all = self.descriptors[pages].iter();
        all.flat_map(|it| [&it.mark, &it.counts, &it.owner])
    }
}

impl Store for Model {
    type Word = Number;

    fn section(&self, section: usize) -> &Section<Number> {
        &self.sections[section]
    }

    fn descriptor(&self, page: usize) -> &Descriptor<Number> {
        &self.descriptors[page]
    }

    fn populate(&self, sections: Range<usize>) -> Result<(), Error> {
        if !self.has_memory.load(Ordering::Relaxed) {
            return Err(Error::Memory {
                bytes: crate::units::Bytes(0),
                operation: "model",
                errno: Errno::NOMEM,
            });
        }
        for word in self.words(sections) {
            word.is_gone.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    fn give_back(&self, sections: Range<usize>) -> Result<(), Errno> {
        if self.is_locked.load(Ordering::Relaxed) {
            return Err(Errno::INVAL);
        }
        for word in self.words(sections) {
            word.value.store(0, Ordering::SeqCst);
            word.is_gone.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    fn alone<R>(&self, _: usize, work: impl FnOnce() -> R) -> R {
        let _held = self.lock.lock().unwrap();
        work()
    }

    fn relax(&self, _: u32) {
        thread::yield_now();
    }
}

/// Returns a table with one optimised page over both sections.
fn table() -> Arc<Table<Model>> {
    let size = |bytes| PageSize::new(bytes).unwrap();
    let geometry = Geometry::new(size(BASE), size(BASE << SECTION)).unwrap();
    assert_eq!(geometry.section().0, SECTION);
    let store = Model {
        sections: (0..PAGES >> SECTION).map(|_| Section::default()).collect(),
        descriptors: (0..PAGES).map(|_| Descriptor::default()).collect(),
        lock: Mutex::new(()),
        has_memory: AtomicBool::new(true),
        is_locked: AtomicBool::new(false),
    };
    for word in store.words(0..PAGES >> SECTION) {
        word.is_gone.store(true, Ordering::Relaxed);
    }
    let origin = 0;
    let table = Table {
        store,
        geometry,
        origin,
    };
    table.prepare(0, WHOLE).unwrap();
    Arc::new(table)
}

fn search(scenario: impl Fn() + Send + Sync + Clone + 'static) {
    shuttle::check_random(scenario.clone(), 2000);
    shuttle::check_pct(scenario, 2000, 3);
}

/// A writer's operation, and the order of page 5's compound page after it.
type Step = (fn(&Table<Model>) -> bool, u32);

/// A sequence with each transition into and out of descriptors.
const STEPS: [Step; 9] = [
    (|table| table.restore(0).is_ok(), WHOLE),
    (|table| table.optimise(0).is_ok(), WHOLE),
    (|table| table.split(0, 0).is_ok(), 0),
    (|table| table.merge(4, 1).is_ok(), 1),
    (|table| table.merge(0, WHOLE).is_ok(), WHOLE),
    (|table| table.split(0, SECTION).is_ok(), SECTION),
    (|table| table.split(4, 1).is_ok(), 1),
    (|table| table.merge(4, SECTION).is_ok(), SECTION),
    (|table| table.merge(0, WHOLE).is_ok(), WHOLE),
];

#[test]
fn each_look_up_was_true_at_some_time() {
    search(|| {
        let table = table();
        let [begun, done] = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
        let reader = {
            let (table, begun, done) = (table.clone(), begun.clone(), done.clone());
            thread::spawn(move || {
                for _ in 0..4 {
                    let before = done.load(Ordering::SeqCst);
                    let seen = table.look(5).unwrap();
                    let after = begun.load(Ordering::SeqCst);
                    let at = |step: usize| step.checked_sub(1).map_or(WHOLE, |at| STEPS[at].1);
                    let mut orders = (before..=after).map(at);
                    assert!(orders.any(|order| order == seen.order), "{seen:?}");
                    assert_eq!(seen.head, 5 >> seen.order << seen.order);
                }
            })
        };
        for (step, _) in STEPS {
            begun.fetch_add(1, Ordering::SeqCst);
            assert!(step(&table), "readers do not block writers");
            done.fetch_add(1, Ordering::SeqCst);
        }
        reader.join().unwrap();
    });
}

#[test]
fn an_owner_read_without_a_reference_was_the_pages() {
    search(|| {
        let table = table();
        table.words(Place::Section(0)).1.store(7, Ordering::Relaxed);
        let reader = {
            let table = table.clone();
            thread::spawn(move || {
                for _ in 0..4 {
                    let (seen, _, owner) = table.read(5).unwrap();
                    assert_eq!(owner, 7, "{seen:?}");
                }
            })
        };
        for (step, _) in STEPS {
            assert!(step(&table), "readers do not block writers");
        }
        reader.join().unwrap();
    });
}

/// Gets a page, checks it, and puts it.
fn hold(table: &Table<Model>, page: usize) {
    let seen = table.raise(page, |_| 1).unwrap();
    for other in [page, seen.head] {
        let again = table.look(other).unwrap();
        assert_eq!(
            (again.head, again.order, again.place),
            (seen.head, seen.order, seen.place)
        );
    }
    let (_, counts, owner) = table.read(page).unwrap();
    assert!(counts.references() >= 2, "{counts:?}");
    assert_eq!(owner, 7);
    table.lower(seen.place, 1);
}

#[test]
fn references_keep_pages_whole_and_allocate_no_memory() {
    search(|| {
        let table = table();
        table.words(Place::Section(0)).1.store(7, Ordering::Relaxed);
        let readers: Vec<_> = [5, 0]
            .map(|page| {
                let table = table.clone();
                thread::spawn(move || hold(&table, page))
            })
            .into();
        for (step, _) in STEPS {
            // May fail: the page is in use.
            step(&table);
        }
        for reader in readers {
            reader.join().unwrap();
        }
        at_rest(&table);
    });
}

#[test]
fn writers_exclude_each_other_and_a_failure_changes_nothing() {
    search(|| {
        let table = table();
        table.words(Place::Section(0)).1.store(7, Ordering::Relaxed);
        let other = {
            let table = table.clone();
            thread::spawn(move || {
                table.store.has_memory.store(false, Ordering::Relaxed);
                let _ = table.split(0, 0);
                table.store.has_memory.store(true, Ordering::Relaxed);
                let _ = table.restore(0);
            })
        };
        let reader = {
            let table = table.clone();
            thread::spawn(move || hold(&table, 5))
        };
        for (step, _) in STEPS {
            step(&table);
        }
        other.join().unwrap();
        reader.join().unwrap();
        at_rest(&table);
    });
}

#[test]
fn content_of_memory_that_was_not_freed_is_ignored() {
    let scenario = || {
        let table = table();
        table.split(0, 0).unwrap();
        table.store.is_locked.store(true, Ordering::Relaxed);
        let refused = Some(Unsaved::Refused(Errno::INVAL));
        let saving = table.merge(0, WHOLE).unwrap();
        assert_eq!((saving.pages.0, saving.why), (0, refused));
        table.split(0, SECTION).unwrap();
        table.split(4, 0).unwrap();
        for page in 4..8 {
            table.release(page).unwrap();
        }
        table.prepare(6, 1).unwrap();
        assert_eq!((table.look(4), table.look(5)), (None, None));
        assert_eq!(table.look(7).unwrap().head, 6);
        assert!(table.raise(5, |_| 1).is_err());
        table.store.is_locked.store(false, Ordering::Relaxed);
        table.release(6).unwrap();
        let mut words = table.store.words(1..2);
        assert!(words.all(|word| word.is_gone.load(Ordering::Relaxed)));
    };
    shuttle::check_random(scenario, 1);
}

/// Checks that each page has only the owner's reference, and only described sections have memory.
fn at_rest(table: &Table<Model>) {
    let mut page = 0;
    while page < PAGES {
        let (seen, counts, owner) = table.read(page).unwrap();
        assert_eq!((seen.head, counts, owner), (page, Counts::OWNED, 7));
        page = seen.pages().end;
    }
    for (at, section) in table.store.sections.iter().enumerate() {
        assert_eq!(section.users.load(Ordering::Relaxed), 0);
        let state = State(section.state.load(Ordering::Relaxed));
        let is_described = state.kind() == Kind::Described;
        for word in table.store.words(at..at + 1) {
            assert_eq!(word.is_gone.load(Ordering::Relaxed), !is_described);
        }
    }
}
