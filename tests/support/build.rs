//! The `jumbo` under test, its library, and test programs built from source.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the `jumbo` that cargo built for these tests, with the preload library beside it.
pub(crate) fn jumbo() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_jumbo"))
}

/// Returns the library that [`jumbo`] loads into programs.
pub(crate) fn preload() -> PathBuf {
    jumbo().with_file_name("libjumbo_preload.so")
}

/// A source file of `tests/programs`, with compiler flags.
pub(crate) enum Source {
    /// C, as an executable, with additional flags.
    C(&'static str, &'static [&'static str]),
    /// C, as a shared library.
    Library(&'static str),
    /// C, as an executable for musl, with additional flags.
    Musl(&'static str, &'static [&'static str]),
    /// Go.
    Go(&'static str),
}

/// Compiles test programs into a temporary folder.
pub(crate) fn compile(sources: &[Source]) -> Compiled {
    let folder = world_readable_folder();
    for source in sources {
        compile_one(source, folder.path());
    }
    Compiled { folder }
}

/// Creates a temporary folder that other users can read.
pub(crate) fn world_readable_folder() -> tempfile::TempDir {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::Builder::new()
        .prefix("jumbo-e2e-")
        .tempdir()
        .unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    folder
}

/// Compiled test programs.
pub(crate) struct Compiled {
    folder: tempfile::TempDir,
}

impl Compiled {
    /// Returns the path of a program, or of a library `libNAME.so`.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

fn compile_one(source: &Source, folder: &Path) {
    let programs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/programs");
    let mut compiler;
    match source {
        Source::C(name, flags) => {
            compiler = gcc();
            compiler.arg("-o").arg(folder.join(name));
            compiler.arg(programs.join(format!("{name}.c")));
            // The loader finds libraries beside the program.
            compiler.arg("-L").arg(folder).arg("-Wl,-rpath,$ORIGIN");
            compiler.args(*flags);
        }
        Source::Library(name) => {
            compiler = gcc();
            compiler.args(["-shared", "-fPIC", "-o"]);
            compiler.arg(folder.join(format!("lib{name}.so")));
            compiler.arg(programs.join(format!("{name}.c")));
        }
        Source::Musl(name, flags) => {
            compiler = Command::new("musl-gcc");
            compiler.args(["-O1", "-g", "-Wall", "-Wextra", "-o"]);
            compiler.arg(folder.join(name));
            compiler
                .arg(programs.join(format!("{name}.c")))
                .args(*flags);
        }
        Source::Go(name) => {
            compiler = Command::new("go");
            compiler.env("CGO_ENABLED", "0").args(["build", "-o"]);
            compiler.arg(folder.join(name));
            compiler.arg(programs.join(format!("{name}.go")));
        }
    }
    let output = compiler
        .output()
        .unwrap_or_else(|error| panic!("{compiler:?}: {error}"));
    assert!(
        output.status.success(),
        "{compiler:?}:\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

fn gcc() -> Command {
    let mut gcc = Command::new("gcc");
    // -fno-builtin: gcc would remove a malloc whose memory is only freed.
    gcc.args([
        "-std=gnu11",
        "-O1",
        "-g",
        "-Wall",
        "-Wextra",
        "-fno-builtin",
        "-pthread",
    ]);
    // The tests request impossible sizes on purpose.
    gcc.arg("-Wno-alloc-size-larger-than");
    gcc
}
