//! Aborts the program after a misuse of the heap ([`invalid`]), and the panic handler.
//!
//! No panic is intended. One that a bug causes reports its location, and must not unwind through
//! the program's frames.

use core::fmt::{self, Write};
use core::panic::PanicInfo;

/// Unbuffered standard error: the program's own stream may be broken.
struct Stderr;

impl Write for Stderr {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // SAFETY: write(2) reads the text; it fails if descriptor 2 is closed.
        let written = unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
        if written < 0 { Err(fmt::Error) } else { Ok(()) }
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
