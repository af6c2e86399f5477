//! The library that `jumbo run` loads into a program.
//!
//! It interposes functions of the C library and turns calls into events for the mechanisms of
//! [`jumbo_inside`]:
//!
//! - [`doors`]: one table of system calls, by name and by number. Handlers: [`maps`], [`sharing`],
//!   [`sandbox`].
//! - [`mechanisms`]: the receivers of events, in order; the handlers around fork(2).
//! - [`alloc`]: the `malloc` family; [`small`]: blocks of the slabs. [`threads`]: the end of the
//!   first thread; [`leave`]: that of the program. [`dlopen`]: loaded libraries.
//! - [`next`]: the interposed definitions, found by [`symbols`]. [`own_stack`]: stacks for deep work,
//!   since the caller's may have a few KiB. [`start`]: the constructor. [`environment`]: the
//!   variables that it reads and that children inherit. [`reaper`]: start and end of the reaper
//!   process. [`glibc`]: the thread's identity. [`slot`]: the symbol by which other processes find the
//!   counters.
//!
//! Rules of this crate: no allocation, no thread-local but two words ([`small`]), no panic, no lock
//! held over a re-entrant call; a call that succeeds leaves errno unchanged; at most 512 bytes of the
//! caller's stack beyond the C library's own ([`own_stack`]). A call that concerns no mechanism costs
//! a few comparisons and a jump.

#![no_std]

mod alloc;
mod bytes;
mod dlopen;
mod doors;
mod end;
mod environment;
mod glibc;
mod info;
mod leave;
mod local;
mod maps;
mod mechanisms;
mod next;
mod objects;
mod own_stack;
mod reaper;
mod rings;
mod sandbox;
mod sharing;
mod slot;
mod small;
mod start;
mod streams;
mod symbols;
mod system;
mod text;
mod threads;
