//! Exclusion of reaper starts during calls of other threads: [`Gate`].
//!
//! A reaper that starts while the program changes its root would keep the old root, and one that
//! starts during unshare(2) would make the kernel refuse. So a thread closes the gate before such a
//! call, and then ends the reaper; a thread that starts a reaper checks the gate under the lock of
//! `launch`. One of the two sees the other. The gate is a count instead of a lock, since the call
//! may take long and a signal handler may interrupt it: a thread that finds the gate closed leaves
//! the start to the thread that opens it last.
//!
//! A thread that never returns from its call (longjmp(3) out of a handler) leaves the gate closed:
//! no reaper starts from then on.

use core::sync::atomic::{AtomicU32, Ordering};

use crate::sync::Word;

const ORDER: Ordering = Ordering::SeqCst;

/// Number of present calls, and a flag for a start after them.
#[derive(Debug)]
pub(super) struct Gate<W = AtomicU32> {
    calls: W,
    wanted: W,
}

impl Gate {
    pub(super) const fn new() -> Self {
        Self {
            calls: AtomicU32::new(0),
            wanted: AtomicU32::new(0),
        }
    }
}

impl<W: Word> Gate<W> {
    /// Forgets the parent's calls, in the child of a fork.
    pub(super) fn reset(&self) {
        self.calls.swap(0, ORDER);
        self.wanted.swap(0, ORDER);
    }

    /// Blocks starts before a call.
    pub(super) fn close(&self) {
        self.calls.fetch_add(1, ORDER);
    }

    /// Ends the call; `wanted`: a reaper ended for it. True if the caller must start a reaper: it
    /// is the last one, and a reaper is wanted.
    pub(super) fn open(&self, wanted: bool) -> bool {
        if wanted {
            self.wanted.swap(1, ORDER);
        }
        self.leave() && self.take()
    }

    /// Reports whether the calling thread may start a reaper. If not, [`Self::open`] leads to the
    /// start.
    pub(super) fn admits(&self) -> bool {
        let open = self.calls.load(ORDER) == 0;
        if !open {
            self.wanted.swap(1, ORDER);
        }
        open
    }

    /// Reports after a refused start whether the caller must repeat it: no other thread will.
    pub(super) fn was_opened(&self) -> bool {
        self.calls.load(ORDER) == 0 && self.take()
    }

    fn take(&self) -> bool {
        self.wanted.swap(0, ORDER) != 0
    }

    /// Ends a call; true if it was the last. Saturates: a fork in a signal handler returns in the
    /// child to a call that only the parent counted.
    fn leave(&self) -> bool {
        loop {
            let before = self.calls.load(ORDER);
            let after = before.saturating_sub(1);
            if self.calls.compare_exchange(before, after, ORDER).is_ok() {
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

    /// Process with a root, the root of its reaper (0: none), and the lock of `launch`.
    #[derive(Debug)]
    struct Process {
        gate: Gate<Number>,
        root: AtomicU32,
        reaper: AtomicU32,
        busy: AtomicU32,
    }

    impl Process {
        fn new() -> Arc<Self> {
            let zero = || AtomicU32::new(0);
            Arc::new(Self {
                gate: Gate {
                    calls: Number::default(),
                    wanted: Number::default(),
                },
                root: AtomicU32::new(1),
                reaper: zero(),
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
                if admitted && self.reaper.load(ORDER) == 0 {
                    let root = self.root.load(ORDER);
                    self.reaper.store(root, ORDER);
                }
                admitted
            };
            while !self.exclusively(launch) && self.gate.was_opened() {}
        }

        fn retire(&self) -> bool {
            if self.busy.load(ORDER) == 0 && self.reaper.load(ORDER) == 0 {
                return false;
            }
            self.exclusively(|| self.reaper.swap(0, ORDER) != 0)
        }

        fn change_root(&self) {
            self.gate.close();
            let retired = self.retire();
            self.root.fetch_add(1, ORDER);
            assert_eq!(self.reaper.load(ORDER), 0);
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
    fn the_reaper_has_the_last_root() {
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
            assert_eq!(process.reaper.load(ORDER), 5);
        });
    }

    #[test]
    fn a_call_that_began_in_the_parent_ends_in_the_child() {
        let gate = Gate::new();
        gate.close();
        assert!(!gate.admits());
        gate.reset();
        assert!(gate.admits() && !gate.open(false) && gate.admits());
        gate.close();
        assert!(!gate.admits() && !gate.was_opened() && gate.open(false) && gate.admits());
    }
}
