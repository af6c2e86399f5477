//! The one table of counters: [`Slot`](super::Slot), where a process counts, and [`Counts`](super::Counts), what was counted.

/// A count that the program may have overwritten.
pub(super) trait Bounded {
    /// The count, as far as it is believed: arithmetic on a few of them cannot overflow.
    fn bounded(self) -> Self;
}

impl Bounded for u64 {
    /// At most 64 PiB: what a process can map with five levels of page tables (x86-64).
    fn bounded(self) -> Self {
        self.min(1 << 56)
    }
}

impl Bounded for u32 {
    /// At most 2^24: a process has fewer images of text.
    fn bounded(self) -> Self {
        self.min(1 << 24)
    }
}

/// Makes both of lines `name: Atomic as value, how;`, where `how` is how the values of several processes add up.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident: $atomic:ident as $value:ident, $how:ident;)*) => {
        /// What one process (one image of it: `exec` claims a new slot) asked for and got. All in bytes
        /// unless named otherwise.
        #[repr(C, align(128))]
        #[derive(Debug, Default)]
        pub struct Slot {
            $($(#[$doc])* pub $name: $atomic,)*
        }

        impl Slot {
            /// A slot of which nothing was counted yet.
            pub const fn new() -> Self {
                Self { $($name: $atomic::new(0),)* }
            }
        }

        /// The values of a [`Slot`], or of several together.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Counts {
            $($(#[$doc])* pub $name: $value,)*
        }

        impl Counts {
            /// What a slot holds now.
            pub fn of(slot: &Slot) -> Self {
                Self { $($name: counters!(bound $how slot.$name.load(Ordering::Relaxed)),)* }
            }

            /// What a slot holds whose memory was read; 0 for what is not in `bytes`.
            pub fn read(bytes: &[u8]) -> Self {
                Self {
                    $($name: counters!(bound $how bytes
                        .get(core::mem::offset_of!(Slot, $name)..)
                        .and_then(|rest| rest.first_chunk())
                        .map_or(0, |chunk| $value::from_ne_bytes(*chunk))),)*
                }
            }

            /// Both together.
            #[must_use]
            pub fn and(self, other: Self) -> Self {
                Self { $($name: counters!($how self.$name, other.$name),)* }
            }
        }
    };
    (bound sum $value:expr) => { counters::Bounded::bounded($value) };
    (bound most $value:expr) => { counters::Bounded::bounded($value) };
    (bound $how:ident $value:expr) => { $value };
    (sum $one:expr, $other:expr) => { counters::Bounded::bounded($one.saturating_add($other)) };
    (most $one:expr, $other:expr) => { $one.max($other) };
    (bits $one:expr, $other:expr) => { $one | $other };
    (last $one:expr, $other:expr) => { if $other == 0 { $one } else { $other } };
}
