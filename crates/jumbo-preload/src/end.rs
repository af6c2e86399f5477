//! Ends the program where nothing else is left: [`invalid`], and what a panic does.
//!
//! There is no panic on purpose. One that a mistake of ours makes says where, and must not unwind through the program's
//! frames.

use core::fmt::{self, Write};
use core::panic::PanicInfo;

/// Standard error, without a buffer: the program's own stream may be what is broken.
struct Stderr;

impl Write for Stderr {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // SAFETY: write(2) reads the text; where descriptor 2 is closed it is an error.
        let written = unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
        if written < 0 { Err(fmt::Error) } else { Ok(()) }
    }
}

/// Ends the program as glibc does where its heap is misused: a message on stderr, then abort(3).
pub(crate) fn invalid(what: &str) -> ! {
    end(format_args!("{what}"))
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    end(format_args!("libjumbo_preload.so: {info}"))
}

fn end(why: fmt::Arguments<'_>) -> ! {
    let _ = writeln!(Stderr, "{why}");
    // SAFETY: abort(3) may always be called.
    unsafe { libc::abort() }
}

// The prebuilt `core` names it in its unwind tables; with `panic = "abort"` nothing calls it. Hidden: a program in Rust
// has one of its own.
core::arch::global_asm!(
    ".pushsection .rodata.jumbo_personality, \"a\", @progbits",
    ".globl rust_eh_personality",
    ".hidden rust_eh_personality",
    "rust_eh_personality: .quad 0",
    ".popsection",
);
