//! Compiles and runs programs with large text.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

/// 4 MiB of text, all executed.
const BIG: &str = r#"
__asm__(".text\n.globl big\n.type big,@function\nbig:\n.fill 4194304,1,0x90\nret\n.size big,.-big\n");
"#;
const MAIN: &str = r#"
#include <stdio.h>
extern void big(void);
int main(void) { big(); puts("ran"); fflush(stdout); getchar(); return 0; }
"#;

pub(crate) fn jumbo(arguments: &[&str]) -> Output {
    let group = match arguments[0] {
        "prime" | "show" => "files",
        _ => "text",
    };
    let mut jumbo = Command::new(env!("CARGO_BIN_EXE_jumbo"));
    jumbo
        .arg(group)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

/// Runs a command that ends with exit status `code` and returns its JSON.
#[track_caller]
pub(crate) fn json(code: i32, arguments: &[&str]) -> Value {
    let output = jumbo(&[arguments, &["--json"]].concat());
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Returns the error message of a refused command.
#[track_caller]
pub(crate) fn refused(arguments: &[&str]) -> String {
    let output = jumbo(arguments);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

/// Returns the output of another program, which must succeed without messages.
#[track_caller]
pub(crate) fn clean(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{program}: {output:?}"
    );
    String::from_utf8(output.stdout).unwrap()
}

/// Reports whether the programs are installed; otherwise skips the test, or fails it with
/// JUMBO_TEST_STRICT=1.
#[track_caller]
pub(crate) fn has(test: &str, programs: &[&str]) -> bool {
    let path = std::env::var_os("PATH").unwrap();
    let is_here =
        |name: &&&str| !std::env::split_paths(&path).any(|folder| folder.join(name).exists());
    match programs.iter().find(is_here) {
        None => true,
        Some(lacking) => {
            skip(&format!("{test}: {lacking} is not installed"));
            false
        }
    }
}

#[track_caller]
pub(crate) fn skip(why: &str) {
    let strict = std::env::var_os("JUMBO_TEST_STRICT").is_some_and(|value| value == "1");
    assert!(!strict, "SKIP {why}");
    eprintln!("SKIP {why}");
}

/// Files in a temporary folder.
pub(crate) struct Folder(tempfile::TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    /// Compiles a program with large text, in the program or in `libbig.so`.
    pub(crate) fn program(&self, name: &str, flags: &[&str], library: bool) -> String {
        fs::write(self.path("big.c"), BIG).unwrap();
        fs::write(self.path("main.c"), MAIN).unwrap();
        let (big, main, out) = (self.path("big.c"), self.path("main.c"), self.path(name));
        let (libbig, folder) = (self.path("libbig.so"), self.0.path().to_str().unwrap());
        if library {
            clean(
                "gcc",
                &[
                    "-shared",
                    "-fPIC",
                    "-o",
                    &libbig,
                    &big,
                    "-Wl,-z,noexecstack",
                ],
            );
            let search = ["-L", folder, "-lbig", "-Wl,-rpath,$ORIGIN"];
            clean("gcc", &[&["-o", &out, &main], &search[..], flags].concat());
        } else {
            clean(
                "gcc",
                &[&["-o", &out, &main, &big, "-Wl,-z,noexecstack"], flags].concat(),
            );
        }
        out
    }
}

/// A program that has executed its text and waits.
pub(crate) struct Running(Child);

impl Running {
    pub(crate) fn start(program: &str) -> Self {
        let mut child = Command::new(program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        assert_eq!(line, "ran\n");
        Self(child)
    }

    pub(crate) fn pid(&self) -> String {
        self.0.id().to_string()
    }

    /// Returns the KiB of this file that are PMD-mapped, as smaps reports.
    pub(crate) fn pmd_mapped(&self, file: &str) -> u64 {
        let smaps = fs::read_to_string(format!("/proc/{}/smaps", self.pid())).unwrap();
        let (mut of_file, mut sum) = (false, 0);
        for line in smaps.lines() {
            if !line.starts_with(|c: char| c.is_ascii_uppercase()) {
                of_file = line.ends_with(file);
            } else if let Some(value) = line.strip_prefix("FilePmdMapped:").filter(|_| of_file) {
                sum += value.trim().trim_end_matches(" kB").parse::<u64>().unwrap();
            }
        }
        sum
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Reports whether files in temporary folders can have huge folios.
#[track_caller]
pub(crate) fn has_huge_folios(test: &str) -> bool {
    let folder = Folder::new();
    let file = folder.program("program", &["-no-pie"], false);
    let page = json(0, &["show", &file]);
    let file_rung = page["files"][0]["rungs"][0].to_string();
    let lacks = file_rung.contains("file system") || file_rung.contains("no transparent");
    if lacks {
        skip(&format!("{test}: {file_rung}"));
    }
    !lacks
}
