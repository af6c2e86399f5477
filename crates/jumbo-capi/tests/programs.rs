//! C and C++ programs with the library that is shipped: built by what pkg-config says, run plainly,
//! under valgrind and with AddressSanitizer.
#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

#[expect(dead_code, reason = "what the tests of the pool need besides")]
#[path = "../../jumbo/tests/pool/host.rs"]
mod host;
#[path = "../../../tests/support/needs.rs"]
mod needs;

const CRATE: &str = env!("CARGO_MANIFEST_DIR");

/// The library, laid out as for packages.
static INSTALLED: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libjumbo");
    let script = format!("{CRATE}/../../packaging/libjumbo");
    output(Command::new(script).arg(&folder));
    folder
});

/// The same, or `None` after a reported skip: a script makes the manual pages.
#[track_caller]
fn installed() -> Option<&'static Path> {
    needs::command("python3")?;
    Some(&INSTALLED)
}

fn output(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns a program of a source in the crate, or `None` after a reported skip.
fn build(source: &str, flags: &[&str]) -> Option<PathBuf> {
    installed()?;
    needs::command("pkg-config")?;
    let (compiler, standard) = match source.ends_with(".cpp") {
        true => ("c++", "-std=c++17"),
        false => ("cc", "-std=gnu11"),
    };
    needs::command(compiler)?;
    let linked = output(
        Command::new("pkg-config")
            .args(["--cflags", "--libs", "jumbo"])
            .env("PKG_CONFIG_PATH", INSTALLED.join("lib/pkgconfig")),
    );
    let name = format!("{}{}", source.replace('/', "-"), flags.concat());
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let mut command = Command::new(compiler);
    let warnings = [
        "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-pthread", standard,
    ];
    command.args(warnings).args(flags);
    command
        .arg("-o")
        .arg(&program)
        .arg(format!("{CRATE}/{source}"));
    output(command.args(linked.split_whitespace()));
    Some(program)
}

fn run(words: &[&str]) -> String {
    let mut command = Command::new("timeout");
    command.args(["--verbose", "300"]).args(words);
    output(command.env("LD_LIBRARY_PATH", INSTALLED.join("lib")))
}

/// Runs a program in all ways; returns the output of the plain run.
fn check(source: &str) -> Option<String> {
    let program = build(source, &[])?;
    let plain = run(&[program.to_str().unwrap()]);
    if needs::command("valgrind").is_some() {
        let leaks = ["--leak-check=full", "--errors-for-leak-kinds=definite"];
        let mut words = vec!["valgrind", "--quiet", "--error-exitcode=99"];
        words.extend(leaks);
        words.push(program.to_str().unwrap());
        assert!(!run(&words).is_empty());
    }
    let sanitized = build(source, &["-fsanitize=address"])?;
    assert_eq!(run(&[sanitized.to_str().unwrap()]), plain);
    Some(plain)
}

fn has(printed: Option<String>, lines: &[&str]) {
    let Some(printed) = printed else { return };
    for line in lines {
        assert!(printed.contains(line), "{line:?} is not in:\n{printed}");
    }
}

#[test]
fn a_pool_in_c() {
    let _alone = host::Alone::new();
    let lines = [
        "refused: quota of 1 pages",
        "3 taken, 1 reserved",
        "not closed",
    ];
    has(check("examples/pool.c"), &lines);
}

#[test]
fn shared_regions_and_frees_in_c() {
    let _alone = host::Alone::new();
    let lines = [
        "bytes of this process, and of another process",
        "punched: \"\"",
        "resident: less than the table",
    ];
    has(check("examples/shared.c"), &lines);
}

#[test]
fn containers_in_cpp() {
    let _alone = host::Alone::new();
    let lines = [
        "20000 words and 1048576 numbers",
        "too large: ",
        "0 pages when all is freed",
        "open: 1\nopen: 0, ",
    ];
    has(check("examples/containers.cpp"), &lines);
}

#[test]
fn files_in_cpp() {
    let lines = ["a file of 5242880 bytes"];
    has(check("tests/programs/file.cpp"), &lines);
}

#[test]
fn the_measurement_of_strings_measures() {
    let _alone = host::Alone::new();
    if let Some(program) = build("examples/strings.cpp", &[]) {
        let printed = run(&[program.to_str().unwrap(), "0.05", "1"]);
        has(Some(printed), &["malloc / pool: "]);
    }
}

#[test]
fn bad_input_is_an_error() {
    let source = "tests/programs/bad_input.c";
    has(check(source), &["all refused"]);
    let _alone = host::Alone::new();
    let mut knobs = host::Knobs::new();
    if !knobs.set(Path::new(host::POOL).join("nr_overcommit_hugepages"), 64) {
        return needs::skip("cannot let the kernel's pool of 2M pages grow");
    }
    if let Some(program) = build(source, &[]) {
        let printed = run(&[program.to_str().unwrap()]);
        has(Some(printed), &["with pages of the kernel's pool"]);
    }
}

/// Not under valgrind or AddressSanitizer, which need addresses.
#[test]
fn a_limit_of_addresses_and_a_fork_lose_nothing() {
    let _alone = host::Alone::new();
    if let Some(program) = build("tests/programs/process.c", &[]) {
        has(Some(run(&[program.to_str().unwrap()])), &["as it was"]);
    }
}

#[test]
fn the_static_library_links() {
    let _alone = host::Alone::new();
    let (Some(_), Some(_), Some(cc)) = (
        installed(),
        needs::command("pkg-config"),
        needs::command("cc"),
    ) else {
        return;
    };
    let program = INSTALLED.join("static");
    let flags = output(
        Command::new("pkg-config")
            .args(["--static", "--cflags", "--libs", "jumbo"])
            .env("PKG_CONFIG_PATH", INSTALLED.join("lib/pkgconfig")),
    );
    let mut command = Command::new(cc);
    command
        .arg("-o")
        .arg(&program)
        .arg(format!("{CRATE}/examples/pool.c"));
    // The archive, where the linker would prefer the shared library.
    let flags = flags.split_whitespace().map(|flag| match flag {
        "-ljumbo" => "-l:libjumbo.a",
        flag => flag,
    });
    output(command.args(flags));
    let output = Command::new(&program).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// Names of the functions that the header declares.
fn declared() -> BTreeSet<String> {
    let header = std::fs::read_to_string(format!("{CRATE}/include/jumbo.h")).unwrap();
    let lines = header.lines().filter(|line| !line.starts_with("//"));
    let names = lines.filter_map(|line| line.split_once('(')?.0.split([' ', '*']).next_back());
    names
        .filter(|name| name.starts_with("jumbo_"))
        .map(str::to_owned)
        .collect()
}

#[test]
fn the_symbols_are_those_of_the_header_with_their_version() {
    if installed().is_none() || needs::command("nm").is_none() {
        return;
    }
    let mut command = Command::new("nm");
    command
        .args(["--dynamic", "--defined-only"])
        .arg(INSTALLED.join("lib/libjumbo.so"));
    let symbols = output(&mut command);
    let symbols = symbols.lines().filter_map(|line| line.split(' ').nth(2));
    let symbols: BTreeSet<_> = symbols.map(str::to_owned).collect();
    let mut expected: BTreeSet<_> = declared()
        .iter()
        .map(|name| format!("{name}@@JUMBO_1"))
        .collect();
    assert!(expected.len() > 20, "{expected:?}");
    expected.insert("JUMBO_1".to_owned());
    assert_eq!(symbols, expected);
}

#[test]
fn each_function_has_a_manual_page() {
    let Some(installed) = installed() else {
        return;
    };
    let man = installed.join("share/man/man3");
    let page = std::fs::read_to_string(man.join("jumbo.3")).unwrap();
    for name in declared() {
        assert!(page.contains(&format!(".SS {name}\n")), "{name}");
        assert!(man.join(format!("{name}.3")).is_file(), "{name}");
    }
}
