//! The library that `jumbo run` loads into a program.
//!
//! It stands in front of functions of the C library, and turns calls into events that the mechanisms of
//! [`jumbo_inside`] hear:
//!
//! - [`doors`]: the system calls, by name and by number, in one table. Their doors are in [`maps`], [`sharing`],
//!   [`sandbox`] and [`limits`].
//! - [`mechanisms`]: who hears, in which order; fork(2).
//! - [`alloc`]: the `malloc` family, and [`mimalloc`] behind it. [`buffers`]: calls that read and write memory.
//!   [`threads`]: the end of the first thread. [`dlopen`]: libraries that the program loads.
//! - [`next`] finds the definitions behind ours, by [`symbols`]. [`start`] is the constructor, [`environment`] what it reads and what
//!   children inherit, [`reaper`] when the sibling is started and ended, [`glibc`] what is known of glibc's insides,
//!   [`morecore`] the heap of older ones,
//!   [`slot`] where others find our counters.
//!
//! Rules of this crate: no allocation, no thread-local, no panic, no lock held over a call that can come
//! back in, errno left alone by what succeeds. A call that is none of our business costs a few comparisons and
//! a jump. mimalloc, which is not ours, has thread-locals, and reads the clock.

#![no_std]

mod alloc;
mod buffers;
mod bytes;
mod dlopen;
mod doors;
mod end;
mod environment;
mod glibc;
mod limits;
mod maps;
mod mechanisms;
#[cfg(feature = "mimalloc")]
mod mimalloc;
#[cfg(not(feature = "mimalloc"))]
#[path = "mimalloc/absent.rs"]
mod mimalloc;
mod morecore;
mod next;
mod reaper;
mod sandbox;
mod sharing;
mod slot;
mod start;
mod streams;
mod symbols;
mod system;
mod text;
mod threads;
