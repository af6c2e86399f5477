//! Order of a list, and the fork protocol under shuttle, which searches its interleavings.

use core::sync::atomic::Ordering;
use std::cell::RefCell;

use shuttle::sync::Arc;
use shuttle::sync::atomic::AtomicU32;
use shuttle::thread;

use super::*;

thread_local! {
    static HEARD: RefCell<Vec<&'static str>> = const { RefCell::new(Vec::new()) };
}

fn hear(what: &'static str) {
    HEARD.with_borrow_mut(|heard| heard.push(what));
}

struct First;
struct Second;

impl Mechanism for First {
    fn unmapping(_address: usize, _length: usize) {
        hear("first");
    }

    fn around_change<T>(call: impl FnOnce() -> T) -> T {
        hear("first (");
        let answer = call();
        hear(") first");
        answer
    }

    fn lock_for_fork() {
        hear("first locks");
    }

    unsafe fn unlock_after_fork(side: Side) {
        hear(match side {
            Side::Parent => "first unlocks",
            Side::Child => "first unlocks in the child",
        });
    }

    unsafe fn is_forked(_pid: u32) {
        hear("first is forked");
    }
}

impl Mechanism for Second {
    fn unmapping(_address: usize, _length: usize) {
        hear("second");
    }

    unsafe fn unmap(_address: usize, _length: usize) -> bool {
        hear("second unmaps");
        true
    }

    fn around_change<T>(call: impl FnOnce() -> T) -> T {
        hear("second (");
        let answer = call();
        hear(") second");
        answer
    }

    fn about_to_fork() {
        hear("second is about to");
    }

    fn lock_for_fork() {
        hear("second locks");
    }

    unsafe fn unlock_after_fork(_side: Side) {
        hear("second unlocks");
    }

    fn has_forked() {
        hear("second has forked");
    }

    unsafe fn is_forked(_pid: u32) {
        hear("second is forked");
    }
}

/// Mechanism that handles an event in place of the kernel, and ends its propagation.
struct Third;

impl Mechanism for Third {
    unsafe fn unmap(_address: usize, _length: usize) -> bool {
        hear("third unmaps");
        true
    }
}

type All = list![First, Second, Third];

fn heard(act: impl FnOnce()) -> Vec<&'static str> {
    HEARD.take();
    act();
    HEARD.take()
}

#[test]
fn members_hear_in_the_order_of_the_list() {
    assert_eq!(heard(|| All::unmapping(0, 1)), ["first", "second"]);
    // A fixed mapping counts as an unmapping.
    assert_eq!(heard(|| All::mapping_at(0, 1)), ["first", "second"]);
    let around = heard(|| All::around_change(|| hear("call")));
    assert_eq!(
        around,
        ["first (", "second (", "call", ") second", ") first"]
    );
    // SAFETY: nothing is unmapped here.
    let unmap = || unsafe { All::unmap(0, 1) };
    assert_eq!(heard(|| assert!(unmap())), ["second unmaps"]);
}

#[test]
fn a_fork_is_heard_in_five_steps() {
    let begins = heard(before_fork::<All>);
    assert_eq!(
        begins,
        ["second is about to", "first locks", "second locks"]
    );
    // SAFETY: `before_fork` was called by this thread.
    let parent = heard(|| unsafe { after_fork::<All>() });
    assert_eq!(
        parent,
        ["second unlocks", "first unlocks", "second has forked"]
    );
    before_fork::<All>();
    // SAFETY: as above; the process has no other thread.
    let child = heard(|| unsafe { after_fork_child::<All>(1) });
    assert_eq!(
        child,
        [
            "second unlocks",
            "first unlocks in the child",
            "first is forked",
            "second is forked"
        ]
    );
}

#[test]
fn a_nested_fork_releases_no_lock() {
    let held = Held::new();
    held.took(0b11);
    held.took(0);
    assert_eq!(
        [held.give_back(), held.give_back(), held.give_back()],
        [0, 0b11, 0]
    );
}

/// Locks of the mechanisms, in the order of the list. A word holds the number of its owner.
#[derive(Debug)]
struct Locks([AtomicU32; 3]);

impl Locks {
    fn take(&self, at: usize, me: u32) {
        while self.0[at]
            .compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
        {
            thread::yield_now();
        }
    }

    fn give(&self, at: usize, me: u32) {
        assert_eq!(
            self.0[at].swap(0, Ordering::Release),
            me,
            "another's lock {at}"
        );
    }
}

shuttle::thread_local! {
    static MODEL: RefCell<Option<(Arc<Locks>, u32)>> = RefCell::new(None);
}

/// Mechanism that owns lock `AT`.
struct Holds<const AT: usize>;

impl<const AT: usize> Holds<AT> {
    fn with(act: impl FnOnce(&Locks, u32)) {
        let (locks, me) = MODEL.with(|model| model.borrow().clone()).unwrap();
        act(&locks, me);
    }
}

impl<const AT: usize> Mechanism for Holds<AT> {
    fn lock_for_fork() {
        Self::with(|locks, me| locks.take(AT, me));
    }

    unsafe fn unlock_after_fork(_side: Side) {
        Self::with(|locks, me| locks.give(AT, me));
    }
}

type Holding = list![Holds<0>, Holds<1>, Holds<2>];

/// Forking threads run beside threads that take an outer and then an inner lock, in the order of
/// the list. No thread waits forever, and at fork(2) the forking thread holds all locks.
fn forks_and_calls() {
    let locks = Arc::new(Locks([const { 0 }; 3].map(AtomicU32::new)));
    let forking = |me: u32| {
        let locks = locks.clone();
        thread::spawn(move || {
            MODEL.with(|model| *model.borrow_mut() = Some((locks.clone(), me)));
            before_fork::<Holding>();
            let copy: Vec<_> = locks
                .0
                .iter()
                .map(|lock| lock.load(Ordering::Relaxed))
                .collect();
            assert_eq!(copy, [me; 3], "the child would find another thread's lock");
            // SAFETY: as above.
            unsafe { after_fork::<Holding>() };
        })
    };
    let calling = |me: u32, outer: usize, inner: usize| {
        let locks = locks.clone();
        thread::spawn(move || {
            locks.take(outer, me);
            locks.take(inner, me);
            locks.give(inner, me);
            locks.give(outer, me);
        })
    };
    let threads = [
        forking(2),
        forking(10),
        calling(4, 0, 1),
        calling(6, 1, 2),
        calling(8, 0, 2),
    ];
    threads
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
    assert!(locks.0.iter().all(|lock| lock.load(Ordering::Relaxed) == 0));
}

#[test]
fn forks_cause_no_deadlock() {
    shuttle::check_random(forks_and_calls, 2000);
    shuttle::check_pct(forks_and_calls, 2000, 3);
}
