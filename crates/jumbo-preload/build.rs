//! Links the unwinder statically, and has the loader start us first.
//!
//! std refers to it for backtraces, by the name `gcc_s`. As a shared library it would be loaded into
//! every wrapped program, be missing in small containers, and cost a third of our start-up time. A
//! linker script of that name, found first, names the static one instead.

//!
//! `initfirst`: our constructor runs before those of other libraries, so that our fork handlers are the
//! innermost. pthread_atfork(3) calls the first registered last, just before the fork, where glibc takes
//! its own malloc's locks; the other way round we would hold ours while another library waits for its.

use std::path::Path;
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "mimalloc")]
    mimalloc();
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,initfirst");
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

/// Compiles mimalloc with our shim. The crate that brings its sources says where they are.
#[cfg(feature = "mimalloc")]
fn mimalloc() {
    const SHIM: &str = "src/mimalloc/shim.c";
    println!("cargo::rerun-if-changed={SHIM}");
    let Some(include) = env::var_os("DEP_MIMALLOC_INCLUDE_DIR") else {
        println!("cargo::error=libmimalloc-sys does not say where its sources are");
        return;
    };
    let include = Path::new(&include);
    cc::Build::new()
        .file(SHIM)
        .include(include)
        .include(include.join("../src"))
        .flag_if_supported("-ftls-model=initial-exec")
        .flag_if_supported("-fno-builtin-malloc")
        .define("MI_DEBUG", "0")
        .define("MI_BUILD_RELEASE", None)
        .define("NDEBUG", None)
        .opt_level(3)
        .warnings(false)
        .compile("jumbo_mimalloc");
}
