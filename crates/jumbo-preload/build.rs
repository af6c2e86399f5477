//! Has the loader start us first, links no C library, and compiles mimalloc.
//!
//! `initfirst`: our constructor runs before those of other libraries, so that our fork handlers are the
//! innermost. pthread_atfork(3) calls the first registered last, just before the fork, where glibc takes
//! its own malloc's locks; the other way round we would hold ours while another library waits for its.

//!
//! No C library: the library takes its symbols from that of the program, whose name and versions it must not
//! ask for. What is linked instead are empty linker scripts of the same names.

use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "mimalloc")]
    mimalloc();
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,initfirst");
    // By it the command tells its own library from that of another version.
    println!("cargo::rustc-cdylib-link-arg=-Wl,--build-id=sha1");
    if let Err(why) = stand_in() {
        println!("cargo::error=cannot stand in for the C library: {why}");
    }
}

/// Puts an empty file in the place of each library that the crate `libc` has linked.
fn stand_in() -> Result<(), String> {
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

/// Compiles mimalloc with our shim. The crate that brings its sources says where they are.
#[cfg(feature = "mimalloc")]
fn mimalloc() {
    const SHIM: &str = "src/mimalloc/shim.c";
    println!("cargo::rerun-if-changed=src/mimalloc");
    let Some(include) = env::var_os("DEP_MIMALLOC_INCLUDE_DIR") else {
        println!("cargo::error=libmimalloc-sys does not say where its sources are");
        return;
    };
    let sources = match changed_sources(Path::new(&include)) {
        Ok(sources) => sources,
        Err(why) => return println!("cargo::error=cannot change mimalloc's sources: {why}"),
    };
    cc::Build::new()
        .file(SHIM)
        .include(sources.join("include"))
        .include(sources.join("src"))
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

#[cfg(feature = "mimalloc")]
const INTERNAL: &str = "include/mimalloc/internal.h";
/// The changes in mimalloc's sources: a file, its text, and what stands there instead.
///
/// An address in a free list is encoded by one exclusive or, as glibc's safe-linking does, with the random key of its
/// page. It is looked up only where it is in another slice. So a write into a freed object is found as before, and an
/// allocation takes less time. And a page is free where none but swept blocks is left (`src/mimalloc/sweep.h`).
#[cfg(feature = "mimalloc")]
const CHANGES: [(&str, &str, &str); 6] = [
    (
        INTERNAL,
        "return (page->used == 0);",
        "return (page->used == 0 || jumbo_is_left((mi_page_t*)page));",
    ),
    (
        INTERNAL,
        "uint16_t frac = page->reserved / 8U;",
        "uint16_t frac = (page->reserved - jumbo_swept(page)) / 8U;",
    ),
    (
        "src/page.c",
        "if (page->used == 1) {",
        "if (page->used == 1 + jumbo_swept(page)) {",
    ),
    (
        INTERNAL,
        "(mi_rotr(x - keys[0], keys[0]) ^ keys[1]);",
        "(x ^ keys[1]);",
    ),
    (
        INTERNAL,
        "mi_rotl(x ^ keys[1], keys[0]) + keys[0];",
        "x ^ keys[1];",
    ),
    (
        INTERNAL,
        "next!=NULL && !mi_is_in_same_page(block, next)",
        "next!=NULL && ((uintptr_t)block ^ (uintptr_t)next) >= MI_ARENA_SLICE_SIZE && !mi_is_in_same_page(block, next)",
    ),
];

/// A copy of mimalloc's sources with the [`CHANGES`]. `include` is their folder of headers.
#[cfg(feature = "mimalloc")]
fn changed_sources(include: &Path) -> Result<PathBuf, String> {
    let out = env::var("OUT_DIR").map_err(|error| format!("OUT_DIR: {error}"))?;
    let to = Path::new(&out).join("mimalloc-sources");
    for name in ["include", "src"] {
        copy(&include.join("..").join(name), &to.join(name)).map_err(|error| error.to_string())?;
    }
    for (file, old, new) in CHANGES {
        let path = to.join(file);
        let why = |error: std::io::Error| format!("{}: {error}", path.display());
        let text = fs::read_to_string(&path).map_err(why)?;
        if text.matches(old).count() != 1 {
            return Err(format!("{}: not once: {old}", path.display()));
        }
        fs::write(&path, text.replace(old, new)).map_err(why)?;
    }
    Ok(to)
}

#[cfg(feature = "mimalloc")]
fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let name = entry?.file_name();
        let (from, to) = (from.join(&name), to.join(&name));
        match from.is_dir() {
            true => copy(&from, &to)?,
            // A registry's files may be read-only, which fs::copy would keep.
            false => fs::write(&to, fs::read(&from)?)?,
        }
    }
    Ok(())
}
