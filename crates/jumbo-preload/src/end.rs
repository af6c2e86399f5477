//! Aborts the program after a misuse of the heap ([`invalid`]), and the panic handler.
//!
//! No panic is intended. One that a bug causes reports its location, and must not unwind through
//! the program's frames.

use core::fmt::{self, Write};
use core::panic::PanicInfo;

use rustix::fd::BorrowedFd;

/// Unbuffered standard error: the program's own stream may be broken.
pub(crate) struct Stderr;

impl Write for Stderr {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // SAFETY: the call fails if the descriptor is closed.
        let stderr = unsafe { BorrowedFd::borrow_raw(2) };
        // The kernel's call: a program may define write(2).
        rustix::io::write(stderr, text.as_bytes()).map_or(Err(fmt::Error), |_| Ok(()))
    }
}

/// Aborts as glibc does after a misuse of its heap: a message on stderr, then abort(3).
pub(crate) fn invalid(message: &str) -> ! {
    abort(format_args!("{message}"))
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    abort(format_args!("libjumbo_preload.so: {info}"))
}

fn abort(message: fmt::Arguments<'_>) -> ! {
    let _ = writeln!(Stderr, "{message}");
    // SAFETY: abort(3) may always be called.
    unsafe { libc::abort() }
}

// The unwind tables of the prebuilt `core` refer to this symbol; with `panic = "abort"` nothing
// calls it. Hidden: a Rust program has its own.
core::arch::global_asm!(
    ".pushsection .rodata.jumbo_personality, \"a\", @progbits",
    ".globl rust_eh_personality",
    ".hidden rust_eh_personality",
    "rust_eh_personality: .quad 0",
    ".popsection",
);
