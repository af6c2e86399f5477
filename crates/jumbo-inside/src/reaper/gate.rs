//! Calls during which no sibling may be started: [`Gate`].
//!
//! A sibling that another thread makes while the program changes its root would keep the old one, and one
//! that is made while it unshares would have the kernel refuse. So who makes such a call shuts the gate first
//! and ends the sibling then; who starts one looks at the gate when it is the thread that is at it. Of the
//! two, one sees the other. It is a count and no lock, since the call may take long and a signal handler may
//! come between: a start that finds it shut is not waited for, but left to the thread that opens the gate last.
//!
//! A thread that never comes back from its call (a longjmp(3) out of a handler) leaves it shut: there is no
//! sibling from then on.

use core::sync::atomic::{AtomicU32, Ordering};

use crate::sync::Word;

const ORDER: Ordering = Ordering::SeqCst;

/// How many calls are being made, and whether a sibling is wanted after them.
#[derive(Debug)]
pub(super) struct Gate<W = AtomicU32> {
    shut: W,
    wanted: W,
}

impl Gate {
    pub(super) const fn new() -> Self {
        Self {
            shut: AtomicU32::new(0),
            wanted: AtomicU32::new(0),
        }
    }
}

impl<W: Word> Gate<W> {
    /// In the child of a fork, where no other thread is: the calls were the parent's.
    pub(super) fn reset(&self) {
        self.shut.swap(0, ORDER);
        self.wanted.swap(0, ORDER);
    }

    /// Before a call: a start of a sibling is refused from here on.
    pub(super) fn shut(&self) {
        self.shut.fetch_add(1, ORDER);
    }

    /// After it; `wanted`: a sibling was ended for it. True where the caller is the last one, and a sibling
    /// is wanted: it starts one.
    pub(super) fn open(&self, wanted: bool) -> bool {
        if wanted {
            self.wanted.swap(1, ORDER);
        }
        self.leave() && self.take()
    }

    /// Asked by the thread that is at a start. Where the answer is no, the start is left to [`Self::open`].
    pub(super) fn admits(&self) -> bool {
        let open = self.shut.load(ORDER) == 0;
        if !open {
            self.wanted.swap(1, ORDER);
        }
        open
    }

    /// After a refused start: whether it is to be tried again, since no thread is left that would.
    pub(super) fn was_opened(&self) -> bool {
        self.shut.load(ORDER) == 0 && self.take()
    }

    fn take(&self) -> bool {
        self.wanted.swap(0, ORDER) != 0
    }

    /// True where no thread is in a call any more. The child of a fork that was made in a signal handler returns
    /// into a call that was counted in its parent.
    fn leave(&self) -> bool {
        loop {
            let before = self.shut.load(ORDER);
            let after = before.saturating_sub(1);
            if self.shut.compare_exchange(before, after, ORDER).is_ok() {
                return after == 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use shuttle::sync::Arc;
    use shuttle::sync::atomic::AtomicU32;
    use shuttle::thread;

    use super::*;
    use crate::gather::Number;

    /// A process: its root, its sibling's (0: there is none), and the thread that is at it, as in `launch`.
    #[derive(Debug)]
    struct Process {
        gate: Gate<Number>,
        root: AtomicU32,
        sibling: AtomicU32,
        busy: AtomicU32,
    }

    impl Process {
        fn new() -> Arc<Self> {
            let zero = || AtomicU32::new(0);
            Arc::new(Self {
                gate: Gate {
                    shut: Number::default(),
                    wanted: Number::default(),
                },
                root: AtomicU32::new(1),
                sibling: zero(),
                busy: zero(),
            })
        }

        fn exclusively<T>(&self, work: impl FnOnce() -> T) -> T {
            while self.busy.compare_exchange(0, 1, ORDER, ORDER).is_err() {
                thread::yield_now();
            }
            let result = work();
            self.busy.store(0, ORDER);
            result
        }

        fn start(&self) {
            let launch = || {
                let admitted = self.gate.admits();
                if admitted && self.sibling.load(ORDER) == 0 {
                    let root = self.root.load(ORDER);
                    self.sibling.store(root, ORDER);
                }
                admitted
            };
            while !self.exclusively(launch) && self.gate.was_opened() {}
        }

        fn retire(&self) -> bool {
            if self.busy.load(ORDER) == 0 && self.sibling.load(ORDER) == 0 {
                return false;
            }
            self.exclusively(|| self.sibling.swap(0, ORDER) != 0)
        }

        fn change_root(&self) {
            self.gate.shut();
            let retired = self.retire();
            self.root.fetch_add(1, ORDER);
            assert_eq!(self.sibling.load(ORDER), 0);
            if self.gate.open(retired) {
                self.start();
            }
        }
    }

    fn search(scenario: impl Fn() + Send + Sync + Clone + 'static) {
        shuttle::check_random(scenario.clone(), 3000);
        shuttle::check_pct(scenario, 3000, 3);
    }

    #[test]
    fn no_sibling_has_a_root_that_was_left_and_none_is_lost() {
        search(|| {
            let process = Process::new();
            let started = process.clone();
            let mut threads = vec![thread::spawn(move || started.start())];
            for _ in 0..2 {
                let process = process.clone();
                threads.push(thread::spawn(move || {
                    process.change_root();
                    process.change_root();
                }));
            }
            for thread in threads {
                thread.join().unwrap();
            }
            assert_eq!(process.root.load(ORDER), 5);
            assert_eq!(process.sibling.load(ORDER), 5);
        });
    }

    #[test]
    fn a_call_that_began_in_the_parent_ends_in_the_child() {
        let gate = Gate::new();
        gate.shut();
        assert!(!gate.admits());
        gate.reset();
        assert!(gate.admits() && !gate.open(false) && gate.admits());
        gate.shut();
        assert!(!gate.admits() && !gate.was_opened() && gate.open(false) && gate.admits());
    }
}
