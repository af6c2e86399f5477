//! Builds `libjumbo_preload.so` and puts it where the command will be, and where the command takes the copy from that it carries.
//!
//! The library is a workspace of its own, because cargo unifies features over a workspace: there, a crate that wants
//! `std` of a dependency that both share would bring it into the library. So cargo runs once more here, in a folder of
//! its own beside the command (two runs in one folder would wait for each other).

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

const LIBRARY: &str = "libjumbo_preload.so";

fn main() {
    if let Err(why) = date() {
        println!("cargo::error=cannot date the manual: {why}");
    }
    if let Err(why) = build() {
        println!("cargo::error=cannot build {LIBRARY}: {why}");
    }
    link_unwinder();
    // An executable at a fixed address has no pointers to relocate: the 5 000 of clap's and serde's tables are 24 pages that
    // each start would write to.
    if is_native_gnu() {
        println!("cargo::rustc-link-arg-bins=-no-pie");
    }
}

/// True where the C compiler at hand links for the target.
fn is_native_gnu() -> bool {
    let is_gnu = env::var("CARGO_CFG_TARGET_ENV").is_ok_and(|env| env == "gnu");
    is_gnu && env::var("HOST").is_ok() && env::var("HOST") == env::var("TARGET")
}

/// Links gcc's unwinder into the command. libgcc_s.so asks for the processor's features when it is loaded: 13 times
/// CPUID, each of which leaves a virtual machine. Without a static one of the compiler's, the shared one is taken.
fn link_unwinder() {
    if !is_native_gnu() {
        return;
    }
    let found = Command::new("cc")
        .arg("-print-file-name=libgcc_eh.a")
        .output();
    // The compiler answers with the name alone where it has no such file.
    let found = found.map(|found| PathBuf::from(String::from_utf8_lossy(&found.stdout).trim()));
    if let Some(folder) = found.as_deref().ok().and_then(Path::parent)
        && folder.is_absolute()
    {
        println!("cargo::rustc-link-search=native={}", folder.display());
        println!("cargo::rustc-link-lib=static=gcc_eh");
    }
}

fn build() -> Result<(), String> {
    let variable = |name| env::var(name).map_err(|error| format!("{name}: {error}"));
    let crates = PathBuf::from(variable("CARGO_MANIFEST_DIR")?).join("..");
    for part in ["jumbo-preload", "jumbo-inside", "jumbo-sys"] {
        for file in ["src", "build.rs", "Cargo.toml", "Cargo.lock"] {
            let path = crates.join(part).join(file);
            if path.exists() {
                println!("cargo::rerun-if-changed={}", path.display());
            }
        }
    }
    // target/PROFILE/build/jumbo-cli-HASH/out
    let out = PathBuf::from(variable("OUT_DIR")?);
    let beside = out
        .ancestors()
        .nth(3)
        .ok_or("OUT_DIR is no folder of cargo's")?;
    let built = beside.join("preload");

    let target = variable("TARGET")?;
    let profile = variable("PROFILE")?;
    let mut cargo = Command::new(variable("CARGO")?);
    cargo
        .args(["build", "--quiet", "--target", &target, "--manifest-path"])
        .arg(crates.join("jumbo-preload/Cargo.toml"))
        .arg("--target-dir")
        .arg(&built)
        // `cargo clippy` would have the library linted instead of built.
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        // A command that is linked statically carries a library all the same.
        .env("CARGO_ENCODED_RUSTFLAGS", remapped_paths())
        .env_remove("RUSTFLAGS");
    if profile == "release" {
        cargo.arg("--release");
    }
    let status = cargo.status().map_err(|error| format!("cargo: {error}"))?;
    if !status.success() {
        return Err(format!("cargo: {status}"));
    }
    let library = built.join(target).join(profile).join(LIBRARY);
    put(&library, &beside.join(LIBRARY))?;
    put(&library, &out.join(LIBRARY))?;
    empty(&out.join("32"))
}

/// Of the flags of this build those that a release keeps the paths of its machine out with.
fn remapped_paths() -> String {
    let flags = env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    let kept = flags
        .split('\x1f')
        .filter(|flag| flag.starts_with("--remap-path-prefix="));
    kept.collect::<Vec<_>>().join("\x1f")
}

/// A library of 32 bits that does nothing, for the processes that cannot load the other: without one their loader says on
/// stderr that it could not. An empty file where the compiler makes no such programs.
fn empty(folder: &Path) -> Result<(), String> {
    let library = folder.join(LIBRARY);
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(&library, []))
        .map_err(|error| format!("{}: {error}", library.display()))?;
    if env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch == "x86_64") {
        let layout = "-Wl,-z,noseparate-code,-z,max-page-size=4096,--build-id=none";
        let _ = Command::new("cc")
            .args([
                "-m32",
                "-shared",
                "-nostdlib",
                "-s",
                layout,
                "-x",
                "c",
                "/dev/null",
                "-o",
            ])
            .arg(&library)
            .status();
    }
    Ok(())
}

/// The date in the manual pages: that of the build, or what SOURCE_DATE_EPOCH says, so that a build can be repeated.
fn date() -> Result<(), String> {
    println!("cargo::rerun-if-env-changed=SOURCE_DATE_EPOCH");
    let when = env::var("SOURCE_DATE_EPOCH").map_or("now".into(), |seconds| format!("@{seconds}"));
    let date = Command::new("date")
        .args(["-u", "-d", &when, "+%Y-%m-%d"])
        .output();
    let date = date.map_err(|error| format!("date: {error}"))?;
    if !date.status.success() {
        return Err(format!("date: {}", String::from_utf8_lossy(&date.stderr)));
    }
    let date = String::from_utf8_lossy(&date.stdout);
    println!("cargo::rustc-env=JUMBO_DATE={}", date.trim());
    Ok(())
}

/// Replaces the file in one step: a program that runs has the old one mapped.
fn put(from: &Path, to: &Path) -> Result<(), String> {
    let new = to.with_extension("so.new");
    fs::copy(from, &new)
        .and_then(|_| fs::rename(&new, to))
        .map_err(|error| format!("{}: {error}", to.display()))
}
