//! How much is brought in at once: [`Streams`].
//!
//! A touch brings in its block. Where the block follows what was brought in before, and that follows what was before it, the
//! program goes through its memory in order, and more comes at once: of what such a stream has brought in already, so many
//! percent as may be wasted. So a program that stops has no more pages that it never touched than that, but for one block.

use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering};

/// The most at once: how long a touch waits.
const MAX_BYTES: usize = 2 << 20;

/// Where a program's streams have come to. Threads may find it half written: a stream is then forgotten.
#[derive(Debug)]
pub(super) struct Streams {
    /// The address behind what came last, and how much came in order until then.
    streams: [(AtomicUsize, AtomicUsize); 64],
    /// The next to be forgotten.
    oldest: AtomicUsize,
}

impl Streams {
    pub(super) const fn new() -> Self {
        Self {
            streams: [const { (AtomicUsize::new(0), AtomicUsize::new(0)) }; 64],
            oldest: AtomicUsize::new(0),
        }
    }

    /// What comes in a range from now on is no stream's yet.
    pub(super) fn begin_anew(&self, range: &Range<usize>) {
        for (next, before) in &self.streams {
            let at = next.load(Ordering::Relaxed);
            if range.start <= at && at <= range.end {
                next.store(0, Ordering::Relaxed);
                before.store(0, Ordering::Relaxed);
            }
        }
    }

    /// How much to bring in from `start` on, where what was touched is in the `first` bytes, up to `end` at most: whole
    /// blocks.
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
    fn what_is_brought_in_ahead_of_a_stream_is_a_small_part_of_it() {
        let (streams, end) = (Streams::new(), 1 << 30);
        let (mut at, mut calls) = (0, 0);
        while at < end {
            let length = streams.extend(at, BLOCK, end, BLOCK, 5);
            assert!(length >= BLOCK && length % BLOCK == 0 && length <= MAX_BYTES);
            assert!(length == BLOCK || (length - BLOCK) * 20 <= at);
            (at, calls) = (at + length, calls + 1);
        }
        assert_eq!(at, end);
        assert!(calls < 1000, "{calls} where blocks alone are 16384");
    }

    #[test]
    fn what_is_mapped_anew_goes_on_with_no_stream() {
        let (streams, end) = (Streams::new(), 64 << 20);
        let mut at = 0;
        while at < end {
            at += streams.extend(at, BLOCK, end, BLOCK, 5);
        }
        streams.begin_anew(&(end..2 * end));
        assert_eq!(streams.extend(end, BLOCK, 2 * end, BLOCK, 5), BLOCK);
    }

    #[test]
    fn out_of_order_it_is_one_block_each_time() {
        let (streams, end) = (Streams::new(), 1 << 30);
        for at in (0..end)
            .step_by(2 * BLOCK)
            .chain((BLOCK..end).step_by(2 * BLOCK))
        {
            assert_eq!(streams.extend(at, BLOCK, end, BLOCK, 5), BLOCK);
        }
        for at in (0..end).step_by(BLOCK) {
            assert_eq!(streams.extend(at, BLOCK, end, BLOCK, 0), BLOCK, "no waste");
        }
    }

    #[test]
    fn as_many_streams_as_threads_go_on_beside_each_other() {
        let streams = Streams::new();
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
