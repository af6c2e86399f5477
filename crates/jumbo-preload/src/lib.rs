//! The library that `jumbo run` loads into a program.
//!
//! It interposes functions of the C library and turns calls into events for the mechanisms of
//! [`jumbo_inside`]:
//!
//! - [`doors`]: one table of system calls, by name and by number. Handlers: [`maps`], [`sharing`],
//!   [`sandbox`], [`limits`].
//! - [`mechanisms`]: the receivers of events, in order; the handlers around fork(2).
//! - [`alloc`]: the `malloc` family; [`mimalloc`]: small objects. [`threads`]: the end of the first
//!   thread; [`leave`]: that of the program. [`dlopen`]: loaded libraries.
//! - [`next`]: the interposed definitions, found by [`symbols`]. [`own_stack`]: stacks for deep work,
//!   since the caller's may have a few KiB. [`start`]: the constructor. [`environment`]: the
//!   variables that it reads and that children inherit. [`reaper`]: start and end of the reaper
//!   process. [`glibc`]: internals of glibc. [`morecore`]: the heap of old glibc versions. [`slot`]:
//!   the symbol by which other processes find the counters.
//!
//! Rules of this crate: no allocation, no thread-local, no panic, no lock held over a re-entrant
//! call; a call that succeeds leaves errno unchanged; at most 512 bytes of the caller's stack beyond
//! the C library's own ([`own_stack`]). A call that concerns no mechanism costs a few comparisons and
//! a jump. mimalloc is the exception: it has thread-locals and reads the clock.

#![no_std]

mod alloc;
mod bytes;
mod dlopen;
mod doors;
mod end;
mod environment;
mod glibc;
mod leave;
mod limits;
mod main_heap;
mod maps;
mod mechanisms;
#[cfg(feature = "mimalloc")]
mod mimalloc;
#[cfg(not(feature = "mimalloc"))]
#[path = "mimalloc/absent.rs"]
mod mimalloc;
mod morecore;
mod next;
mod own_stack;
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
