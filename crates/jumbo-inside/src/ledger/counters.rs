//! The one table of counters: [`Slot`](super::Slot), where a process counts, and [`Counts`](super::Counts), what was counted.

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
                Self { $($name: slot.$name.load(Ordering::Relaxed),)* }
            }

            /// What a slot holds whose memory was read; 0 for what is not in `bytes`.
            pub fn read(bytes: &[u8]) -> Self {
                Self {
                    $($name: bytes
                        .get(core::mem::offset_of!(Slot, $name)..)
                        .and_then(|rest| rest.first_chunk())
                        .map_or(0, |chunk| $value::from_ne_bytes(*chunk)),)*
                }
            }

            /// Both together.
            #[must_use]
            pub fn and(self, other: Self) -> Self {
                Self { $($name: counters!($how self.$name, other.$name),)* }
            }
        }
    };
    (sum $one:expr, $other:expr) => { $one.saturating_add($other) };
    (most $one:expr, $other:expr) => { $one.max($other) };
    (bits $one:expr, $other:expr) => { $one | $other };
    (last $one:expr, $other:expr) => { if $other == 0 { $one } else { $other } };
}
