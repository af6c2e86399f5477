//! Sets the loading order, and avoids linking a C library.
//!
//! `initfirst`: this library's constructor runs before those of other libraries, so that its fork
//! handlers are the innermost. pthread_atfork(3) calls the first registered handler last, just
//! before the fork, where glibc takes its own malloc's locks. In any other order this library would
//! hold its locks while another library waits for its own.
//!
//! No C library: the symbols come from the program's, whose name and versions must not be
//! requested. Empty linker scripts of the same names are linked instead.

use std::path::Path;
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,initfirst");
    // The command identifies the library of its own version by the build ID.
    println!("cargo::rustc-cdylib-link-arg=-Wl,--build-id=sha1");
    if let Err(error) = write_empty_libraries() {
        println!("cargo::error=cannot replace the C library at link time: {error}");
    }
}

/// Writes an empty linker script for each library that the crate `libc` links.
fn write_empty_libraries() -> Result<(), String> {
    let out = env::var("OUT_DIR").map_err(|error| format!("OUT_DIR: {error}"))?;
    let folder = Path::new(&out).join("libc");
    fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    for name in ["c", "m", "rt", "pthread", "util", "dl"] {
        fs::write(folder.join(format!("lib{name}.so")), "/* nothing */\n")
            .map_err(|error| error.to_string())?;
    }
    println!("cargo::rustc-link-search=native={}", folder.display());
    Ok(())
}
