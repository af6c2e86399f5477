//! `jumbo unit`: a drop-in for a systemd unit, whose command stays unchanged.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, bail};
use jumbo_host::kernel::{Root, task, version};
use jumbo_host::policy::Orders;
use jumbo_host::status::LIBRARY;

use crate::run::{StandingOptions, preload, standing};
use crate::view::{Stdout, tell};

/// Print a drop-in that puts a systemd unit on huge pages
///
/// The unit's ExecStart and its main process stay as they are: the drop-in sets the environment
/// that `jumbo run` would. There is no report.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  sudo mkdir -p /etc/systemd/system/redis-server.service.d
  jumbo unit redis-server |
    sudo tee /etc/systemd/system/redis-server.service.d/jumbo.conf
  sudo systemctl daemon-reload && sudo systemctl restart redis-server
  sudo jumbo unit --verify redis-server

To undo it, remove the file, and do the third line again.")]
pub(crate) struct Args {
    /// The unit; without a suffix a service
    #[arg(value_parser = unit)]
    name: String,

    /// Take options from FILE, or from a profile known by NAME
    #[arg(long, value_name = "FILE|NAME")]
    profile: Option<PathBuf>,

    /// Report whether the running unit is on jumbo, and change nothing; the exit status is 1 where it
    /// is not
    #[arg(long, conflicts_with = "profile")]
    verify: bool,
}

/// Parses a unit name (systemd.unit(5)).
pub(crate) fn unit(typed: &str) -> Result<String, String> {
    let is_known = |c: char| c.is_ascii_alphanumeric() || ":-_.\\@".contains(c);
    if typed.is_empty() || !typed.chars().all(is_known) {
        return Err(String::from("systemd has no unit of such a name"));
    }
    let kinds = "socket target device mount automount swap timer path slice scope";
    match typed.rsplit_once('.') {
        Some((_, "service")) => Ok(typed.to_owned()),
        Some((_, kind)) if kinds.split(' ').any(|known| known == kind) => {
            Err(format!("a {kind} starts no program: name its service"))
        }
        _ => Ok(format!("{typed}.service")),
    }
}

/// Properties of a unit: its main process, and those that decide whether it can load the library.
const PROPERTIES: &str = "LoadState,MainPID,NoExecPaths,ExecPaths,ProtectHome,PrivateTmp,InaccessiblePaths,RootDirectory,RootImage,MemoryTHP";

/// Asks systemd about the unit; `None` where there is none to ask.
fn look_up(name: &str) -> Option<String> {
    let output = Command::new("systemctl")
        .args(["show", "--property", PROPERTIES, "--", name])
        .output();
    let output = output.ok().filter(|output| output.status.success())?;
    String::from_utf8(output.stdout).ok()
}

/// Lines for the drop-in, and notes for the user, on the sandbox of a unit as `systemctl show` has
/// it.
#[derive(Debug, Default, PartialEq, Eq)]
struct Sandbox {
    lines: String,
    notes: Vec<String>,
}

/// Finds a property in the output of `systemctl show`; empty where it is not there.
fn value<'a>(shown: &'a str, key: &str) -> &'a str {
    let mut lines = shown.lines().filter_map(|line| line.split_once('='));
    let found = lines.find_map(|(name, value)| (name == key).then_some(value));
    found.unwrap_or_default()
}

impl Sandbox {
    fn of(shown: &str, library: &Path) -> Self {
        let value = |key: &str| value(shown, key);
        let is_below = |paths: &str| {
            let mut paths = paths
                .split(' ')
                .map(|path| path.trim_start_matches(['-', '+']));
            paths.any(|path| !path.is_empty() && library.starts_with(path))
        };
        let mut sandbox = Self::default();
        let mut note = |option: &str, why: &str| {
            sandbox.notes.push(format!("{option} of the unit {why}: the drop-in has no effect; hint: install jumbo for all users, below /usr"));
        };
        if value("LoadState") == "not-found" {
            sandbox.notes.push("systemd knows no such unit; hint: `systemctl list-units --type=service` lists those it runs".to_owned());
            return sandbox;
        }
        let homes = ["/home", "/root", "/run/user"];
        let protects = !matches!(value("ProtectHome"), "" | "no" | "read-only");
        if protects && homes.iter().any(|home| library.starts_with(home)) {
            note("ProtectHome", "hides the library");
        }
        let is_private = !matches!(value("PrivateTmp"), "" | "no");
        if is_private && (library.starts_with("/tmp") || library.starts_with("/var/tmp")) {
            note("PrivateTmp", "hides the library");
        }
        if is_below(value("InaccessiblePaths")) {
            note("InaccessiblePaths", "hides the library");
        }
        if !value("RootDirectory").is_empty() || !value("RootImage").is_empty() {
            note("RootDirectory or RootImage", "may lack the library");
        }
        if is_below(value("NoExecPaths")) && !is_below(value("ExecPaths")) {
            let folder = library.parent().unwrap_or(library).display();
            sandbox.lines =
                format!("# NoExecPaths of the unit covers the library.\nExecPaths={folder}\n");
        }
        // systemd.exec(5), systemd 260. Where the kernel cannot spare advised memory, it is left to the
        // host.
        if value("MemoryTHP") == "disable" {
            let policy = match version(&rustix::system::uname().release().to_string_lossy()) {
                Some(kernel) if kernel >= (6, 18) => "madvise",
                _ => "system",
            };
            sandbox.lines +=
                &format!("# MemoryTHP of the unit forbids all huge pages.\nMemoryTHP={policy}\n");
        }
        sandbox
    }
}

/// Tells whether the main process of a unit has the library.
fn verify(name: &str) -> anyhow::Result<ExitCode> {
    let shown = look_up(name).with_context(|| {
        format!("cannot ask systemd about {name}; hint: jumbo status -p PID shows a process")
    })?;
    let pid: u32 = value(&shown, "MainPID").parse().unwrap_or(0);
    if pid == 0 {
        bail!("{name} has no main process; hint: systemctl status {name}");
    }
    let root = Root::host();
    // Unreadable mappings are no answer.
    root.open(format!("proc/{pid}/maps"))
        .context("cannot see the mappings of the unit; hint: as root")?;
    let is_covered = task::map_each(&root, &[pid], LIBRARY) == [true];
    let mut out = Stdout::lock();
    if is_covered {
        writeln!(
            out,
            "{name}: process {pid} is on jumbo; jumbo status -p {pid} shows its memory"
        )?;
        return Ok(ExitCode::SUCCESS);
    }
    writeln!(
        out,
        "{name}: process {pid} has no {LIBRARY}; hint: was the unit restarted after daemon-reload? \
         systemctl show --property Environment,DropInPaths {name}"
    )?;
    Ok(ExitCode::FAILURE)
}

pub(crate) fn main(args: &Args) -> anyhow::Result<ExitCode> {
    if args.verify {
        return verify(&args.name);
    }
    let options = match &args.profile {
        Some(profile) => StandingOptions::Typed(profile),
        None => StandingOptions::Default,
    };
    let library = preload()?;
    let library = library
        .to_str()
        .context("cannot use a library whose path is not UTF-8")?;
    if let Some(folder) = closed_folder(Path::new(library)) {
        let folder = folder.display();
        tell(&format!(
            "{folder} is closed to other users: the unit loads the library only as its owner or root; \
             hint: install jumbo for all users"
        ));
    }
    let variables = [
        ("LD_PRELOAD", library),
        (Orders::VARIABLE, &standing(&options, false)?),
    ];
    let sandbox = look_up(&args.name).map(|shown| Sandbox::of(&shown, Path::new(library)));
    let sandbox = sandbox.unwrap_or_default();
    for note in &sandbox.notes {
        tell(note);
    }
    let mut text = format!(
        "# /etc/systemd/system/{}.d/jumbo.conf, by jumbo {}\n\
         # These replace variables of the same names in the unit: add its values.\n\
         [Service]\n",
        args.name,
        env!("CARGO_PKG_VERSION")
    );
    for (name, value) in variables {
        text += &format!("Environment=\"{name}={}\"\n", escaped(value));
    }
    text += &sandbox.lines;
    Stdout::lock().write_all(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// Finds a folder above the library that other users may not enter.
fn closed_folder(library: &Path) -> Option<&Path> {
    let is_closed =
        |folder: &&Path| fs::metadata(folder).is_ok_and(|of| of.mode() & libc::S_IXOTH == 0);
    library.ancestors().skip(1).find(is_closed)
}

/// Escapes a value for double quotes. `%` begins a specifier; `$` is a plain character
/// (systemd.exec(5)).
fn escaped(value: &str) -> String {
    value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('%', "%%")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_that_hinders_the_library_is_named_or_opened() {
        // Debian's redis-server.
        let redis = "LoadState=loaded\nNoExecPaths=/\nExecPaths=/usr/bin/redis-server /usr/lib /lib\nProtectHome=yes\nPrivateTmp=yes\n";
        let of = |path: &str| Sandbox::of(redis, Path::new(path));
        assert_eq!(of("/usr/lib/jumbo/0.1.0/lib.so"), Sandbox::default());
        assert!(
            of("/opt/jumbo/lib.so")
                .lines
                .contains("ExecPaths=/opt/jumbo\n")
        );
        assert!(of("/home/a/lib.so").notes[0].contains("ProtectHome"));
        assert!(of("/tmp/lib.so").notes[0].contains("PrivateTmp"));
        let forbidding = Sandbox::of("MemoryTHP=disable\n", Path::new("/usr/lib.so"));
        assert!(forbidding.lines.contains("\nMemoryTHP="), "{forbidding:?}");
        let none = Sandbox::of("LoadState=not-found\n", Path::new("/usr/lib.so"));
        assert!(none.notes[0].contains("no such unit"));
        assert_eq!(
            Sandbox::of("", Path::new("/tmp/lib.so")),
            Sandbox::default()
        );
    }

    #[test]
    fn names_and_values_are_valid_for_systemd() {
        assert_eq!(unit("redis").unwrap(), "redis.service");
        assert_eq!(unit("a@b.service").unwrap(), "a@b.service");
        assert!(unit("").is_err() && unit("a b").is_err() && unit("../x").is_err());
        assert_eq!(unit("a.b").unwrap(), "a.b.service");
        assert!(
            unit("redis.socket")
                .unwrap_err()
                .contains("starts no program")
        );
        assert_eq!(escaped(r#"$LIB 5% "\"#), r#"$LIB 5%% \"\\"#);
    }
}
