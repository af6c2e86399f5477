//! Sets the loading order, avoids linking a C library, and compiles mimalloc.
//!
//! `initfirst`: this library's constructor runs before those of other libraries, so that its fork
//! handlers are the innermost. pthread_atfork(3) calls the first registered handler last, just
//! before the fork, where glibc takes its own malloc's locks. In any other order this library would
//! hold its locks while another library waits for its own.
//!
//! No C library: the symbols come from the program's, whose name and versions must not be
//! requested. Empty linker scripts of the same names are linked instead.

use std::path::Path;
#[cfg(feature = "mimalloc")]
use std::path::PathBuf;
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "mimalloc")]
    mimalloc();
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

/// Compiles mimalloc with the shim, from the sources of the crate `libmimalloc-sys`.
#[cfg(feature = "mimalloc")]
fn mimalloc() {
    const SHIM: &str = "src/mimalloc/shim.c";
    println!("cargo::rerun-if-changed=src/mimalloc");
    let Some(include) = env::var_os("DEP_MIMALLOC_INCLUDE_DIR") else {
        println!("cargo::error=libmimalloc-sys does not say where its sources are");
        return;
    };
    let sources = match patched_sources(Path::new(&include)) {
        Ok(sources) => sources,
        Err(error) => return println!("cargo::error=cannot patch mimalloc's sources: {error}"),
    };
    cc::Build::new()
        .file(SHIM)
        .include(sources.join("include"))
        .include(sources.join("src"))
        .flag_if_supported("-ftls-model=initial-exec")
        .flag_if_supported("-fno-builtin-malloc")
        // The compiler does not inline functions that other objects could interpose.
        .flag_if_supported("-fvisibility=hidden")
        // A comment that does not end hides code.
        .flag_if_supported("-Werror=comment")
        .define("MI_DEBUG", "0")
        .define("MI_BUILD_RELEASE", None)
        .define("NDEBUG", None)
        // Free lists hold encoded addresses, which are verified: a write into a freed object cannot
        // choose the next result of malloc. The rest of MI_SECURE (padding, guard pages) costs
        // memory.
        .define("MI_ENCODE_FREELIST", "1")
        .opt_level(3)
        .warnings(false)
        .compile("jumbo_mimalloc");
}

#[cfg(feature = "mimalloc")]
const INTERNAL: &str = "include/mimalloc/internal.h";
/// Patches of mimalloc's sources: file, old text, new text.
///
/// One exclusive or with the random key of the page encodes an address in a free list, as in
/// glibc's safe-linking. The page of a decoded address is looked up only if the address is in
/// another slice. So a write into a freed object is detected as before, and allocations are faster.
/// A page counts as free when only swept blocks are left in it (`src/mimalloc/sweep.h`). The size
/// classes are 16 bytes apart up to 512 bytes and 32 up to 1024: 28 more than mimalloc's. A
/// statistic that only MI_STAT=2 fills gives up its room in the state of a thread. The shim has
/// _mi_malloc_generic.
#[cfg(feature = "mimalloc")]
const PATCHES: [(&str, &str, &str); 13] = [
    (
        "include/mimalloc-stats.h",
        "malloc_bins[MI_BIN_HUGE+1];",
        "malloc_bins[1];",
    ),
    (
        "src/init.c",
        "{ MI_INIT74(MI_STAT_COUNT_NULL) }, \\\n  { MI_INIT74(MI_STAT_COUNT_NULL) }, \\",
        "{ MI_STAT_COUNT_NULL() }, \\\n  { MI_INIT74(MI_STAT_COUNT_NULL) }, \\",
    ),
    (
        "include/mimalloc-stats.h",
        "#define MI_BIN_HUGE             (73U)",
        "#define MI_BIN_HUGE             (101U)",
    ),
    (
        "include/mimalloc/types.h",
        "#if MI_BIN_HUGE != 73U",
        "#if MI_BIN_HUGE != 101U",
    ),
    (
        "src/init.c",
        "QNULL(    10), QNULL(    12), QNULL(    14), QNULL(    16), QNULL(    20), QNULL(    24), \
         QNULL(    28), QNULL(    32), /* 16 */ \\\n    \
         QNULL(    40), QNULL(    48), QNULL(    56), QNULL(    64), \
         QNULL(    80), QNULL(    96), QNULL(   112), QNULL(   128), /* 24 */",
        "QNULL(10), QNULL(12), QNULL(14), QNULL(16), QNULL(18), QNULL(20), QNULL(22), QNULL(24), \
         QNULL(26), QNULL(28), QNULL(30), QNULL(32), QNULL(34), QNULL(36), QNULL(38), QNULL(40), \
         QNULL(42), QNULL(44), QNULL(46), QNULL(48), QNULL(50), QNULL(52), QNULL(54), QNULL(56), \
         QNULL(58), QNULL(60), QNULL(62), QNULL(64), QNULL(68), QNULL(72), QNULL(76), QNULL(80), \
         QNULL(84), QNULL(88), QNULL(92), QNULL(96), QNULL(100), QNULL(104), QNULL(108), \
         QNULL(112), QNULL(116), QNULL(120), QNULL(124), QNULL(128),",
    ),
    (
        "src/page-queue.c",
        "const size_t bin = ((b << 2) + ((wsize >> (b - 2)) & 0x03)) - 3;",
        "const size_t bin = wsize < 64 ? 5 + wsize / 2 : wsize < 128 ? 21 + wsize / 4 \
         : ((b << 2) + ((wsize >> (b - 2)) & 3)) + 25;",
    ),
    (
        "src/page.c",
        "void* _mi_malloc_generic(",
        "static mi_decl_noinline void* malloc_generic(",
    ),
    (
        INTERNAL,
        "return (page->used == 0);",
        "return (page->used == 0 || jumbo_is_only_swept((mi_page_t*)page));",
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
        "next!=NULL && ((uintptr_t)block ^ (uintptr_t)next) >= MI_ARENA_SLICE_SIZE \
         && !mi_is_in_same_page(block, next)",
    ),
];

/// Copies mimalloc's sources and applies the [`PATCHES`]. `include` is their folder of headers.
#[cfg(feature = "mimalloc")]
fn patched_sources(include: &Path) -> Result<PathBuf, String> {
    let out = env::var("OUT_DIR").map_err(|error| format!("OUT_DIR: {error}"))?;
    let to = Path::new(&out).join("mimalloc-sources");
    for name in ["include", "src"] {
        copy(&include.join("..").join(name), &to.join(name)).map_err(|error| error.to_string())?;
    }
    for (file, old, new) in PATCHES {
        let path = to.join(file);
        let with_path = |error: std::io::Error| format!("{}: {error}", path.display());
        let text = fs::read_to_string(&path).map_err(with_path)?;
        if text.matches(old).count() != 1 {
            return Err(format!("{}: not exactly one match: {old}", path.display()));
        }
        fs::write(&path, text.replace(old, new)).map_err(with_path)?;
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
            // Files of cargo's registry may be read-only; fs::copy would keep that.
            false => fs::write(&to, fs::read(&from)?)?,
        }
    }
    Ok(())
}
