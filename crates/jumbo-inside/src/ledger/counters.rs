//! Definition of [`Slot`](super::Slot), the counters of a process, and of
//! [`Counts`](super::Counts), their values.

/// A counter that the program may have overwritten.
pub(super) trait Bounded {
    /// Limits the value, so that sums of several cannot overflow.
    fn bounded(self) -> Self;
}

impl Bounded for u64 {
    /// Limit: 64 PiB, the address space of five-level page tables (x86-64).
    fn bounded(self) -> Self {
        self.min(1 << 56)
    }
}

impl Bounded for u32 {
    /// Limit: 2^24, more images of text than a process has.
    fn bounded(self) -> Self {
        self.min(1 << 24)
    }
}

/// Defines both from lines `name: Atomic as value, how;`, where `how` combines the values of
/// several processes.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident: $atomic:ident as $value:ident, $how:ident;)*) => {
        /// Counters of one process image (`exec` claims a new slot), in bytes unless stated
        /// otherwise.
        #[repr(C, align(128))]
        #[derive(Debug, Default)]
        pub struct Slot {
            $($(#[$doc])* pub $name: $atomic,)*
        }

        impl Slot {
            /// A slot with all counters 0.
            pub const fn new() -> Self {
                Self { $($name: $atomic::new(0),)* }
            }
        }

        /// Values of one or several [`Slot`]s.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Counts {
            $($(#[$doc])* pub $name: $value,)*
        }

        impl Counts {
            /// Reads a slot.
            pub fn of(slot: &Slot) -> Self {
                Self { $($name: counters!(bound $how slot.$name.load(Ordering::Relaxed)),)* }
            }

            /// Parses the memory of a slot; counters beyond the end of `bytes` are 0.
            pub fn read(bytes: &[u8]) -> Self {
                Self {
                    $($name: counters!(bound $how bytes
                        .get(core::mem::offset_of!(Slot, $name)..)
                        .and_then(|rest| rest.first_chunk())
                        .map_or(0, |chunk| $value::from_ne_bytes(*chunk))),)*
                }
            }

            /// Combines two processes.
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
