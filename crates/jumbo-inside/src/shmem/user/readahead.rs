//! Readahead of sequential touches: [`Readahead`].
//!
//! A touch populates its block. Touches of one block after another form a stream: the program walks
//! through its memory in order. More is then populated at once, up to the allowed percentage of the
//! bytes that the stream has populated so far. That percentage and one block bound the untouched
//! pages of a program that stops.

use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering};

/// Maximum bytes populated at once: a touch waits for them.
const MAX_BYTES: usize = 2 << 20;

/// Positions of a program's streams. A thread may read a half-written one: it is then forgotten.
#[derive(Debug)]
pub(super) struct Readahead {
    /// Address after the last populated byte, and bytes populated in order so far.
    streams: [(AtomicUsize, AtomicUsize); 64],
    /// Index of the stream to replace next.
    oldest: AtomicUsize,
}

impl Readahead {
    pub(super) const fn new() -> Self {
        Self {
            streams: [const { (AtomicUsize::new(0), AtomicUsize::new(0)) }; 64],
            oldest: AtomicUsize::new(0),
        }
    }

    /// Forgets the streams in a range that is about to be registered.
    pub(super) fn forget(&self, range: &Range<usize>) {
        for (next, before) in &self.streams {
            let at = next.load(Ordering::Relaxed);
            if range.start <= at && at <= range.end {
                next.store(0, Ordering::Relaxed);
                before.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Returns the bytes to populate from `start` on, in whole blocks up to `end`; the touched page
    /// is in the `first` bytes.
    pub(super) fn extend(
        &self,
        start: usize,
        first: usize,
        end: usize,
        block: usize,
        max_waste: usize,
    ) -> usize {
        let mut streams = self.streams.iter();
        let (next, before) = match streams.find(|(next, _)| next.load(Ordering::Relaxed) == start) {
            Some(stream) => stream,
            None => {
                let oldest = self.oldest.fetch_add(1, Ordering::Relaxed) % self.streams.len();
                let stream = &self.streams[oldest];
                stream.1.store(0, Ordering::Relaxed);
                stream
            }
        };
        let so_far = before.load(Ordering::Relaxed);
        let more = (so_far / 100).saturating_mul(max_waste);
        let more = more.min(MAX_BYTES.saturating_sub(first)) / block * block;
        let length = (first + more).min(end.saturating_sub(start));
        before.store(so_far.saturating_add(length), Ordering::Relaxed);
        next.store(start.saturating_add(length), Ordering::Relaxed);
        length
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = 64 << 10;

    #[test]
    fn readahead_is_a_small_part_of_its_stream() {
        let (streams, end) = (Readahead::new(), 1 << 30);
        let (mut at, mut calls) = (0, 0);
        while at < end {
            let length = streams.extend(at, BLOCK, end, BLOCK, 5);
            assert!(length >= BLOCK && length % BLOCK == 0 && length <= MAX_BYTES);
            assert!(length == BLOCK || (length - BLOCK) * 20 <= at);
            (at, calls) = (at + length, calls + 1);
        }
        assert_eq!(at, end);
        assert!(calls < 1000, "{calls}; 16384 without readahead");
    }

    #[test]
    fn a_new_mapping_continues_no_stream() {
        let (streams, end) = (Readahead::new(), 64 << 20);
        let mut at = 0;
        while at < end {
            at += streams.extend(at, BLOCK, end, BLOCK, 5);
        }
        streams.forget(&(end..2 * end));
        assert_eq!(streams.extend(end, BLOCK, 2 * end, BLOCK, 5), BLOCK);
    }

    #[test]
    fn random_touches_populate_one_block_each() {
        let (streams, end) = (Readahead::new(), 1 << 30);
        let even = (0..end).step_by(2 * BLOCK);
        for at in even.chain((BLOCK..end).step_by(2 * BLOCK)) {
            assert_eq!(streams.extend(at, BLOCK, end, BLOCK, 5), BLOCK);
        }
        for at in (0..end).step_by(BLOCK) {
            assert_eq!(streams.extend(at, BLOCK, end, BLOCK, 0), BLOCK, "no waste");
        }
    }

    #[test]
    fn each_thread_has_a_stream_of_its_own() {
        let streams = Readahead::new();
        let mut at: Vec<usize> = (0..32).map(|thread| thread << 30).collect();
        for _ in 0..100 {
            for at in &mut at {
                *at += streams.extend(*at, BLOCK, usize::MAX, BLOCK, 5);
            }
        }
        for (thread, at) in at.iter().enumerate() {
            assert!(at - (thread << 30) > 150 * BLOCK, "{}", at - (thread << 30));
        }
    }
}
