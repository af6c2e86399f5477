//! Size classes of blocks: [`of`] a size, [`size`] of a class, [`CLASS`] with the shape of slabs.
//!
//! Classes are 16 bytes apart up to 1024 bytes, and a sixteenth of a power of two above. So the
//! rounding of a size adds at most 15 bytes, or 6.25 %.

/// Unit of slabs: a slab is one or more units of a chunk.
pub(super) const UNIT_BYTES: usize = 32 << 10;
/// Chunk of addresses that is mapped at once: a huge page.
pub(super) const CHUNK_BYTES: usize = 2 << 20;
/// Units of a chunk.
pub(super) const UNITS: usize = CHUNK_BYTES / UNIT_BYTES;

/// Distance of small classes, and the alignment of all blocks.
pub(super) const GRAIN: usize = 16;
/// Largest size with classes [`GRAIN`] apart.
const MAX_EXACT_BYTES: usize = 1024;
const EXACT: usize = MAX_EXACT_BYTES / GRAIN;
const EXACT_LOG: usize = MAX_EXACT_BYTES.ilog2() as usize;
/// Classes of each doubling above.
const STEPS_LOG: usize = 4;
const STEPS: usize = 1 << STEPS_LOG;
/// Largest block.
pub(super) const MAX_BYTES: usize = 128 << 10;
const DOUBLINGS: usize = MAX_BYTES.ilog2() as usize - EXACT_LOG;
/// Number of classes; class 0 has no blocks.
pub(super) const CLASSES: usize = 1 + EXACT + DOUBLINGS * STEPS;

/// Largest number of units of a slab.
const MAX_UNITS: usize = 16;
/// Part of a slab that may be too short for a block.
const MAX_REST_DIVISOR: usize = 128;
/// Bytes of one class in the cache of a thread, and its largest number of blocks.
const CACHED_BYTES: usize = 64 << 10;
const MAX_CACHED: usize = 1024;
/// Largest block in the cache of a thread.
const MAX_CACHED_SIZE: usize = 64 << 10;

/// Returns the class of a size of at most [`MAX_BYTES`].
#[inline(always)]
pub(super) const fn of(size: usize) -> usize {
    let below = size.saturating_sub(1);
    if below < MAX_EXACT_BYTES {
        return below / GRAIN + 1;
    }
    let log = below.ilog2() as usize;
    let step = (below >> (log - STEPS_LOG)) & (STEPS - 1);
    EXACT + (log - EXACT_LOG) * STEPS + step + 1
}

/// Returns the size of the blocks of a class, in bytes.
pub(super) const fn size(class: usize) -> usize {
    if class <= EXACT {
        return class * GRAIN;
    }
    let (log, step) = ((class - EXACT - 1) / STEPS, (class - EXACT - 1) % STEPS);
    (STEPS + step + 1) << (log + EXACT_LOG - STEPS_LOG)
}

/// Shape of the slabs of a class.
#[derive(Clone, Copy, Debug)]
pub(super) struct Class {
    /// Size of a block, in bytes.
    pub(super) size: u32,
    /// Factor by which `offset * factor >> 32` is the number of the block at an offset.
    pub(super) factor: u32,
    /// Units of a slab.
    pub(super) units: u8,
    /// Blocks of a slab.
    pub(super) blocks: u16,
    /// Largest number of blocks in the cache of a thread.
    pub(super) cached: u16,
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "bounded by the constants above"
)]
const fn shape(class: usize) -> Class {
    let size = size(class);
    let (mut units, mut tried) = (1, 1);
    while tried <= MAX_UNITS {
        let (rest, best) = (tried * UNIT_BYTES % size, units * UNIT_BYTES % size);
        // A slab of fewer units is preferred, if its rest is small.
        if best * MAX_REST_DIVISOR > units * UNIT_BYTES && rest * units < best * tried {
            units = tried;
        }
        tried += 1;
    }
    // At least one block fits.
    if units * UNIT_BYTES < size {
        units = size.div_ceil(UNIT_BYTES);
    }
    let cached = if size > MAX_CACHED_SIZE {
        0
    } else if CACHED_BYTES / size > MAX_CACHED {
        MAX_CACHED
    } else if CACHED_BYTES / size < 2 {
        2
    } else {
        CACHED_BYTES / size
    };
    Class {
        size: size as u32,
        factor: (1_u64 << 32).div_ceil(size as u64) as u32,
        units: units as u8,
        blocks: (units * UNIT_BYTES / size) as u16,
        cached: cached as u16,
    }
}

/// Shapes of all classes.
pub(super) static CLASS: [Class; CLASSES] = {
    let mut all = [Class {
        size: 0,
        factor: 0,
        units: 0,
        blocks: 0,
        cached: 0,
    }; CLASSES];
    let mut class = 1;
    while class < CLASSES {
        all[class] = shape(class);
        class += 1;
    }
    all
};

/// Returns the shape of a class.
#[inline(always)]
pub(super) fn shape_of(class: usize) -> &'static Class {
    CLASS.get(class).unwrap_or(&CLASS[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_rounded_by_less_than_16_bytes_or_a_sixteenth() {
        for size in 1..=MAX_BYTES {
            let class = of(size);
            let rounded = super::size(class);
            assert!(class < CLASSES && rounded >= size, "{size}");
            assert!(
                rounded - size < GRAIN.max(size / STEPS + 1),
                "{size} becomes {rounded}"
            );
            assert!(class == 1 || super::size(class - 1) < size, "{size}");
        }
        assert_eq!(of(0), 1);
        assert_eq!(of(MAX_BYTES) + 1, CLASSES);
    }

    #[test]
    fn a_block_is_found_by_its_offset() {
        for class in CLASS.iter().skip(1) {
            let (size, blocks) = (class.size as usize, class.blocks as usize);
            assert!(blocks >= 1 && usize::from(class.units) <= MAX_UNITS);
            assert!(blocks * size <= usize::from(class.units) * UNIT_BYTES);
            for number in 0..blocks {
                let offset = (number * size) as u64;
                assert_eq!((offset * u64::from(class.factor)) >> 32, number as u64);
            }
        }
    }
}
