//! Links the unwinder statically.
//!
//! std refers to it for backtraces, by the name `gcc_s`. As a shared library it would be loaded into
//! every wrapped program, be missing in small containers, and cost a third of our start-up time. A
//! linker script of that name, found first, names the static one instead.

use std::path::Path;
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let Some(out) = env::var_os("OUT_DIR") else {
        return;
    };
    let script = Path::new(&out).join("libgcc_s.so");
    match fs::write(&script, "GROUP ( -lgcc_eh -lgcc )\n") {
        Ok(()) => println!(
            "cargo::rustc-link-search=native={}",
            Path::new(&out).display()
        ),
        Err(error) => println!("cargo::error=cannot write {}: {error}", script.display()),
    }
}
