//! Has the loader start us first, and compiles mimalloc.
//!
//! `initfirst`: our constructor runs before those of other libraries, so that our fork handlers are the
//! innermost. pthread_atfork(3) calls the first registered last, just before the fork, where glibc takes
//! its own malloc's locks; the other way round we would hold ours while another library waits for its.

#[cfg(feature = "mimalloc")]
use std::{env, path::Path};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "mimalloc")]
    mimalloc();
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,initfirst");
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
        // What could be replaced from outside is not inlined.
        .flag_if_supported("-fvisibility=hidden")
        .define("MI_DEBUG", "0")
        .define("MI_BUILD_RELEASE", None)
        .define("NDEBUG", None)
        // Free lists hold encoded addresses, which are verified: a write into a freed object cannot choose what malloc returns.
        // The rest of MI_SECURE (padding, guard pages) costs memory.
        .define("MI_ENCODE_FREELIST", "1")
        .opt_level(3)
        .warnings(false)
        .compile("jumbo_mimalloc");
}
