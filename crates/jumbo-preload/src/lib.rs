//! The library that `jumbo run` loads into a program.
//!
//! It interposes the `malloc` family ([`alloc`]), the `mmap` family ([`maps`]), a few calls that
//! bear on them and those that install seccomp filters ([`sandbox`]), and calls [`jumbo_inside::heap`], which
//! does the work; [`sharing`] meets what bears on the sibling of [`reaper`]. [`next`] finds the definitions that stand behind ours,
//! [`start`] is the constructor, [`environment`] what it reads and what children inherit, [`dlopen`] meets the libraries that the program
//! loads, [`glibc`] what is known of glibc's insides, [`slot`] shows others where we count.
//!
//! Rules of this crate: no allocation, no thread-local, no panic, no lock held over a call that can come
//! back in, errno left alone by what succeeds. A call that is none of our business costs a few comparisons and
//! a jump. mimalloc, which is not ours, has thread-locals, and reads the clock.
//!
//! Interposed: malloc, calloc, realloc, reallocarray, free, free_sized, free_aligned_sized, memalign,
//! posix_memalign, aligned_alloc, valloc, pvalloc, malloc_usable_size, malloc_trim; mmap, mmap64, munmap,
//! mremap, mprotect, dlopen, dlmopen, dlclose, sbrk, brk, mlock, mlock2, mlockall, munlockall, madvise; prctl, syscall; unshare, setns, capset,
//! setuid and its kin, setgroups, initgroups, shmat, io_setup, flock, fcntl, fcntl64; pthread_create, thrd_create, pthread_exit, thrd_exit;
//! read, write and their kin (see [`buffers`]).

#![no_std]

mod alloc;
mod buffers;
mod bytes;
mod dlopen;
mod end;
mod environment;
mod glibc;
mod limits;
mod maps;
#[cfg(feature = "mimalloc")]
mod mimalloc;
#[cfg(not(feature = "mimalloc"))]
#[path = "mimalloc/absent.rs"]
mod mimalloc;
mod next;
mod reaper;
mod sandbox;
mod sharing;
mod slot;
mod spawn;
mod start;
mod streams;
mod text;
mod threads;
