//! The configuration files, `--show-config`, and `JUMBO=off`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use crate::support::{MODES, jumbo, output, run, skip, stderr, stdout};

const FILE: &str = "max-waste = 6
no-follow = true
keep = \"1G\"

[printenv]
maps = \"off\"
max-waste = 3
profile = \"node\"

[other]
max-waste = 9
";

/// `jumbo run` with `text` as the user's file.
fn configured(folder: &Path, text: &str) -> Command {
    fs::write(folder.join("jumbo.toml"), text).unwrap();
    let mut jumbo = jumbo();
    jumbo.env("XDG_CONFIG_HOME", folder).arg("run");
    jumbo
}

fn shown(command: &mut Command) -> BTreeMap<String, serde_json::Value> {
    serde_json::from_str(&stdout(command)).unwrap()
}

#[test]
fn options_come_from_the_file_by_program_and_the_command_line_wins() {
    let folder = tempfile::tempdir().unwrap();
    let orders = |options: &[&str]| {
        let mut run = configured(folder.path(), FILE);
        stdout(run.args(options).args(["printenv", "JUMBO_ORDERS"]))
    };
    // The profile sets `text`; `keep` comes from the section for all programs.
    let whole = folder.path().join("own.toml");
    fs::write(&whole, "data = \"off\"\nno-follow = false\n").unwrap();
    let own = whole.to_str().unwrap();
    let found = orders(&["--profile", own, "--max-waste=4"]);
    for (word, is_there) in [
        ("maps=0", true),
        ("max_waste=4", true),
        ("data=off", true),
        ("keep=1073741824", true),
        // A profile on the command line replaces the profile of the file.
        ("text=file", false),
        ("follow=1", true),
    ] {
        assert_eq!(found.contains(word), is_there, "{word}: {found}");
    }
    // A dry run: the library removes its orders from the environment of children.
    let mut run = configured(folder.path(), FILE);
    let plan = stdout(run.args(["--dry-run", "--json", "printenv"]));
    let plan: serde_json::Value = serde_json::from_str(&plan).unwrap();
    let orders = plan["environment"]["JUMBO_ORDERS"].as_str().unwrap();
    for word in ["follow=0", "max_waste=3", "maps=0"] {
        assert!(orders.contains(word), "{word}: {orders}");
    }
    // Settings of another program, selected by file name; then without files.
    for (options, waste) in [(&[][..], "6"), (&["--no-config"], "5")] {
        let mut run = configured(folder.path(), FILE);
        let shown = shown(
            run.args(options)
                .args(["--show-config", "--json", "/bin/true"]),
        );
        assert_eq!(shown["max-waste"]["value"], waste);
    }
}

#[test]
fn show_config_says_where_each_value_comes_from() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("jumbo.toml");
    let mut run = configured(folder.path(), FILE);
    run.args(["--heap=glibc", "--show-config", "--json"]);
    let shown = shown(run.args(["--", "/usr/bin/printenv"]));
    for (option, value, from) in [
        ("heap", "glibc", "command line".to_owned()),
        ("max-waste", "3", format!("{}, line 7", file.display())),
        ("keep", "1G", format!("{}, line 3", file.display())),
        ("no-follow", "true", format!("{}, line 2", file.display())),
        ("profile", "node", format!("{}, line 8", file.display())),
        ("text", "file", "profile node, line 7".to_owned()),
        ("data", "auto", "default".to_owned()),
    ] {
        assert_eq!(shown[option]["value"], value, "{option}");
        assert_eq!(shown[option]["from"], from, "{option}");
    }
    let table = stdout(configured(folder.path(), FILE).arg("--show-config"));
    assert!(
        table
            .lines()
            .any(|line| line.trim_start().starts_with("max-waste ")
                && line.contains(" 6 ")
                && line.trim_end().ends_with("line 1"))
    );
}

#[test]
fn the_user_s_file_counts_over_the_system_s() {
    let name = "the_user_s_file_counts_over_the_system_s";
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    for part in ["etc", "upper", "work"] {
        fs::create_dir(path.join(part)).unwrap();
    }
    fs::write(
        path.join("etc/jumbo.toml"),
        "quiet = true\nkeep = \"1M\"\n[true]\nmax-waste = 7\n",
    )
    .unwrap();
    // An overlay on tmpfs, in a mount namespace that ends with its process.
    let script = "mount -t overlay overlay -o lowerdir=$0/etc:/etc /etc && exec \"$@\"";
    let below = |command: &[&str]| {
        let mut below = Command::new("unshare");
        below.args(["-m", "sh", "-c", script]).arg(path);
        below.args(command).env("XDG_CONFIG_HOME", path);
        below
    };
    if !output(&mut below(&["true"])).status.success() {
        return skip(name, "no overlay can be mounted here");
    }
    fs::write(path.join("jumbo.toml"), "max-waste = 8\nquiet = false\n").unwrap();
    let command = [
        env!("CARGO_BIN_EXE_jumbo"),
        "run",
        "--show-config",
        "--json",
        "true",
    ];
    let shown = shown(&mut below(&command));
    for (option, value, from) in [
        (
            "max-waste",
            "8",
            format!("{}/jumbo.toml, line 1", path.display()),
        ),
        (
            "quiet",
            "false",
            format!("{}/jumbo.toml, line 2", path.display()),
        ),
        ("keep", "1M", "/etc/jumbo.toml, line 2".to_owned()),
    ] {
        assert_eq!(shown[option]["value"], value, "{option}");
        assert_eq!(shown[option]["from"], from, "{option}");
    }
}

#[test]
fn a_file_that_cannot_be_used_names_itself_and_nothing_is_started() {
    let folder = tempfile::tempdir().unwrap();
    let started = folder.path().join("started");
    for (text, line, key) in [
        ("heap = \"off\"\nmax-wast = 3\n", "line 2", "'--max-waste'"),
        ("[touch]\n\nheap = \"maybe\"\n", "line 3", "'--heap <MODE>'"),
        ("heap = \n", "line 1", ""),
        ("[touch]\ndry-run = true\n", "line 2", "'--dry-run"),
        ("[touch.x]\ny = 1\n", "line 1", "x is neither"),
        ("profile = \"nothing\"\n", "`nothing`", ""),
    ] {
        let mut run = configured(folder.path(), text);
        let output = output(run.args(["--quiet", "touch"]).arg(&started));
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(125), "{message}");
        let file = folder.path().join("jumbo.toml");
        let names_file = message.contains(&file.display().to_string()) || key.is_empty();
        assert!(
            names_file && message.contains(line) && message.contains(key),
            "{message}"
        );
        assert!(!started.exists(), "{text}");
    }
    // A bad file does not prevent a start without it.
    for (name, value, option) in [("JUMBO", "off", "--quiet"), ("X", "", "--no-config")] {
        let mut run = configured(folder.path(), "heap = ");
        stdout(run.env(name, value).args([option, "touch"]).arg(&started));
        fs::remove_file(&started).unwrap();
    }
    let file = folder.path().join("jumbo.toml");
    let mut run = configured(folder.path(), "");
    if std::os::unix::fs::chown(&file, Some(4711), None).is_ok() {
        let output = output(run.args(["--quiet", "touch"]).arg(&started));
        assert_eq!(output.status.code(), Some(125));
        assert!(stderr(&output).contains("another user owns it"));
    }
    let mut run = configured(folder.path(), "");
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    let output = output(run.args(["--quiet", "touch"]).arg(&started));
    assert_eq!(output.status.code(), Some(125));
    assert!(
        stderr(&output).contains("jumbo.toml: "),
        "{}",
        stderr(&output)
    );
    assert!(!started.exists());
}

#[test]
fn a_relative_profile_stands_beside_the_file_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    file("mine.toml", "keep = \"10%\"\n");
    let shown = |config: &str| {
        file("jumbo.toml", config);
        let mut jumbo = jumbo();
        jumbo
            .args(["run", "--show-config", "true"])
            .current_dir("/");
        output(jumbo.env("XDG_CONFIG_HOME", folder.path()))
    };
    let ok = shown("profile = \"./mine.toml\"\n");
    assert!(
        String::from_utf8_lossy(&ok.stdout).contains("mine.toml, line 1"),
        "{ok:?}"
    );
    for (config, error) in [
        ("\nprofile = \"nodee\"\n", "the nearest is node;"),
        ("\nprofile = \"./none.toml\"\n", "none.toml"),
    ] {
        let output = shown(config);
        let error_text = stderr(&output);
        assert_eq!(output.status.code(), Some(125), "{error_text}");
        assert!(error_text.contains("jumbo.toml, line 2"), "{error_text}");
        assert!(error_text.contains(error), "{error_text}");
    }
}

#[test]
fn jumbo_off_starts_the_program_plainly() {
    let plain = stdout(Command::new("env").arg("-0").env("JUMBO", "off"));
    for mode in MODES {
        assert_eq!(
            stdout(run(mode).args(["env", "-0"]).env("JUMBO", "off")),
            plain
        );
    }
    for (value, is_off) in [
        ("OFF", true),
        ("0", true),
        ("No", true),
        ("false", true),
        ("1", false),
    ] {
        let mut run = run(MODES[0]);
        let seen = stdout(run.args(["env", "-0"]).env("JUMBO", value));
        assert_eq!(seen.contains("LD_PRELOAD"), !is_off, "{value}");
    }
    let mut quiet = jumbo();
    quiet.args(["run", "--report=json", "--pool=64M", "true"]);
    assert_eq!(stderr(&output(quiet.env("JUMBO", "off"))), "");
}

#[test]
fn jumbo_off_switches_the_library_off() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    // The advice flag (`hg`) is independent of the host's THP setting.
    let script = "import mmap
a = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
print(sum('VmFlags' in line and ' hg' in line for line in open('/proc/self/smaps')))";
    let advised = |off: &str| {
        let program = ["env", off, "/usr/bin/python3", "-c", script];
        let mut jumbo = jumbo();
        stdout(jumbo.args(["run", "--quiet"]).args(program))
    };
    assert_ne!(advised("JUMBO=on"), "0\n");
    for off in ["JUMBO=off", "JUMBO=OFF", "JUMBO=0"] {
        assert_eq!(advised(off), "0\n", "{off}");
    }
}

#[test]
fn no_option_comes_from_a_file_that_another_user_wrote() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let written = at("written");
    let options = format!("report-file = \"{}\"\n", written.display());
    fs::create_dir_all(at("jumbo/profiles")).unwrap();
    let files = ["jumbo/profiles/theirs.toml", "typed.toml", "jumbo.toml"];
    for (file, profile) in files.into_iter().zip(["theirs", "./typed.toml", "node"]) {
        fs::write(at(file), &options).unwrap();
        // Only root may change the owner.
        if std::os::unix::fs::chown(at(file), Some(4711), None).is_err() {
            return;
        }
        let mut run = jumbo();
        run.current_dir(&folder)
            .env("XDG_CONFIG_HOME", folder.path());
        let output = output(run.args(["run", "--profile", profile, "true"]));
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(125), "{message}");
        assert!(message.contains("another user owns it (4711)"), "{message}");
        assert!(message.contains("hint: ") && !written.exists(), "{message}");
    }
}

#[test]
fn a_name_is_no_file_in_the_current_folder_and_a_fifo_does_not_hang() {
    let folder = tempfile::tempdir().unwrap();
    let run = |profile: &str| {
        let mut run = jumbo();
        run.current_dir(&folder)
            .env("XDG_CONFIG_HOME", folder.path());
        run.args(["run", "--dry-run", "--json", "--profile", profile, "true"]);
        run
    };
    fs::write(folder.path().join("node"), "heap = \"off\"\n").unwrap();
    fs::write(folder.path().join("own"), "heap = \"off\"\n").unwrap();
    assert!(!stdout(&mut run("node")).contains("heap=0"));
    assert!(stdout(&mut run("./own")).contains("heap=0"));
    let message = stderr(&output(&mut run("own")));
    assert!(
        message.contains("no profile `own`") && message.contains("./own"),
        "{message}"
    );
    for file in ["fifo.toml", "jumbo.toml"] {
        let path = folder.path().join(file);
        let made = std::process::Command::new("mkfifo").arg(path).status();
        assert!(made.unwrap().success());
        let output = output(&mut run("./fifo.toml"));
        assert_eq!(output.status.code(), Some(125));
        assert!(stderr(&output).contains("no regular file"));
    }
}
