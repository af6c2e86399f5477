//! Tests of HTML reports of small real runs, in a real browser: `jumbo compare --html`, `jumbo
//! bench all --html`.

use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use crate::support::browser::Browser;
use crate::support::wait::{TIMEOUT, until};
use crate::support::{Program, build, host};

fn jumbo(words: &[&str]) -> Program {
    // At least two rounds with warm-ups, on a loaded machine.
    Program::new(build::jumbo())
        .args(words)
        .working_for(Duration::from_mins(3))
}

/// Opens a page in every colour scheme and width and returns its text. Writes screenshots to the
/// folder JUMBO_TEST_SHOTS, if set.
#[track_caller]
fn open_everywhere(browser: &mut Browser, file: &Path) -> String {
    let mut grounds = Vec::new();
    let mut text = Value::Null;
    for (scheme, width) in [
        ("light", 1280),
        ("dark", 1280),
        ("light", 390),
        ("dark", 390),
    ] {
        browser.open(file, width, scheme);
        assert_eq!(browser.value("innerWidth"), width);
        let root = "document.documentElement";
        let beyond = format!("{root}.scrollWidth - {root}.clientWidth");
        assert_eq!(browser.value(&beyond), 0, "{scheme}: wider than the window");
        let ground = "getComputedStyle(document.body).backgroundColor";
        grounds.push(browser.value(ground));
        // A blank screenshot of that size has a few KiB.
        let picture = browser.screenshot();
        assert!(picture.len() > 60_000, "{scheme}: {} bytes", picture.len());
        if let Some(folder) = std::env::var_os("JUMBO_TEST_SHOTS") {
            let name = file.file_stem().unwrap().to_string_lossy();
            let name = format!("{name}-{scheme}-{width}.png.base64");
            fs::write(Path::new(&folder).join(name), picture).unwrap();
        }
        let hidden = "[...document.querySelectorAll('main h2, main th[scope=row], svg[role=img]')]
            .filter(it => !it.closest('details') && it.getBoundingClientRect().height < 5).length";
        assert_eq!(browser.value(hidden), 0, "{scheme} {width}");
        let unnamed = "[...document.querySelectorAll('svg[role=img]')].filter(it => !it.querySelector('title').textContent).length";
        assert_eq!(browser.value(unnamed), 0);
        text = browser.value("document.body.innerText");
    }
    assert!(
        grounds[0] == grounds[2] && grounds[1] == grounds[3] && grounds[0] != grounds[1],
        "{grounds:?}"
    );
    let name = file.display().to_string();
    for event in &browser.events {
        let method = event["method"].as_str().unwrap();
        let url = event["params"]["request"]["url"]
            .as_str()
            .unwrap_or_default();
        let is_own = url.is_empty() || url.ends_with(&name) || url == "data:,";
        assert!(method != "Network.requestWillBeSent" || is_own, "{event:#}");
        assert!(
            ![
                "Log.entryAdded",
                "Runtime.consoleAPICalled",
                "Runtime.exceptionThrown"
            ]
            .contains(&method),
            "{event:#}"
        );
    }
    text.as_str().unwrap().to_owned()
}

#[test]
fn a_comparison_is_a_page_that_a_browser_shows() {
    let folder = build::world_readable_folder();
    let file = folder.path().join("compare.html");
    // Bytes that are no valid text, and a script.
    let hostile = std::ffi::OsStr::from_bytes(b"<script>alert('\xff')</script>");
    let program = jumbo(&["compare", "--runs", "2", "--html"])
        .arg(&file)
        .args(["--", "echo"])
        .arg(hostile);
    let ran = program.plain().ok();
    assert!(ran.stdout.contains("2 runs of each kind"), "{ran:?}");
    let Some(mut browser) = Browser::start() else {
        return host::skip("no chromium");
    };
    let text = open_everywhere(&mut browser, &file);
    for part in [
        "echo <script>alert('\u{fffd}')</script>",
        "program, time",
        "program, page faults",
        "Output and exit status were the same",
        "no difference seen",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(browser.value("document.scripts.length"), 0);
}

#[test]
fn all_tables_are_a_page_that_a_browser_shows() {
    let Some(held) = host::with_thp() else { return };
    let folder = build::world_readable_folder();
    let [html, json] = ["bench.html", "bench.json"].map(|name| folder.path().join(name));
    let words = [
        "bench",
        "all",
        "--quick",
        "--rounds",
        "2",
        "--only",
        "exit,text",
        "--html",
    ];
    // Without a folder for its program one table cannot be measured.
    let program = jumbo(&words)
        .arg(&html)
        .arg("--json")
        .arg(&json)
        .env("TMPDIR", "/proc");
    let ran = program.plain().ok();
    drop(held);
    let document: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    assert_eq!(document["complete"], true);
    assert_eq!(document["tables"][0]["table"], "exit");
    assert_eq!(document["not_measured"][0]["table"], "text");
    for part in ["exit, table 1 of 2", "text was not measured"] {
        assert!(ran.stderr.contains(part), "{part}: {ran:?}");
    }
    let rows = document["tables"][0]["rows"].as_array().unwrap();
    assert_eq!(rows[0]["baseline"]["samples"].as_array().unwrap().len(), 2);
    let Some(mut browser) = Browser::start() else {
        return host::skip("no chromium");
    };
    let text = open_everywhere(&mut browser, &html);
    for table in document["tables"].as_array().unwrap() {
        for row in table["rows"].as_array().unwrap() {
            let measure = row["measure"].as_str().unwrap();
            assert!(text.contains(measure), "{measure}: {text}");
        }
    }
    for part in [
        "Tables that were not measured",
        "/proc",
        "Machine",
        "Overview",
        "no difference seen",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn an_interrupt_leaves_a_page_that_says_it_is_incomplete() {
    let Some(held) = host::with_thp() else { return };
    let folder = build::world_readable_folder();
    let json = folder.path().join("bench.json");
    let words = [
        "bench",
        "all",
        "--quick",
        "--rounds",
        "50",
        "--only",
        "fork,heap",
        "--json",
    ];
    let running = jumbo(&words).arg(&json).start_plain();
    // The command measures its table once it has a worker.
    let children = format!("/proc/{0}/task/{0}/children", running.pid());
    until("a worker", TIMEOUT, || {
        let children = fs::read_to_string(&children).ok()?;
        (!children.trim().is_empty()).then_some(())
    });
    running.signal(Signal::INT);
    let ran = running.wait();
    drop(held);
    assert_eq!(ran.shell_status(), 130, "{ran:?}");
    let document: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    assert_eq!(document["complete"], false);
    assert_eq!(document["not_measured"], serde_json::json!([]));
}
