//! Tests of `jumbo export`: the metrics as Prometheus and its tools read them, and their agreement
//! with the programs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::Signal;
use serde_json::Value;

use crate::pool::group::Group;
use crate::support::{MIB, Program, Running, Source, build, compile, host, wait};

/// Returns the samples of the text format, each with its labels verbatim.
fn samples(text: &str) -> BTreeMap<&str, f64> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let sample = |line: &'_ str| {
        let (series, value) = line.rsplit_once(' ').unwrap();
        (series.len(), value.parse().unwrap())
    };
    lines
        .map(|line| {
            let (end, value) = sample(line);
            (&line[..end], value)
        })
        .collect()
}

fn export(options: &[&str]) -> String {
    let program = Program::new(build::jumbo()).arg("export").args(options);
    program.plain().ok().stdout
}

/// Checks a text with promtool.
#[track_caller]
fn check(promtool: &Path, arguments: &[&str], text: &str) {
    let mut command = Command::new(promtool);
    command
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(text.as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    let message = [output.stdout, output.stderr].map(|message| String::from_utf8(message).unwrap());
    let is_quiet = message.concat().is_empty() || arguments != ["check", "metrics"];
    assert!(output.status.success() && is_quiet, "{message:?}\n{text}");
}

fn packaging(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../packaging")
        .join(file)
}

#[test]
fn what_a_covered_program_has_is_summed_up_by_its_name_and_unit() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let (Some(promtool), Some(group)) = (host::command("promtool"), Group::of_service(1 << 30))
    else {
        return;
    };
    let files = compile(&[Source::C("heap", &[])]);
    let heap = Program::new(files.path("heap")).args(["128", "stay"]);
    let heap = heap.around(group.enter());
    let running = [
        heap.start_jumbo(&["--quiet"]),
        heap.start_jumbo(&["--quiet"]),
    ];
    for program in &running {
        program.wait_for_line("ready");
    }
    let unit = group.name();
    let labels = format!("{{comm=\"heap\",unit=\"{unit}\"}}");
    let of = |text: &str, name: &str, labels: &str| {
        let series = format!("{name}{labels}");
        let found = samples(text).get(&*series).copied();
        found.unwrap_or_else(|| panic!("no {series} in:\n{text}"))
    };
    // The library publishes its counts at its next scan.
    let half = (128 * MIB) as f64;
    let text = wait::until("huge pages in the metrics", wait::TIMEOUT, || {
        let text = export(&[]);
        Some(text).filter(|text| of(text, "jumbo_huge_bytes", &labels) > half)
    });
    check(&promtool, &["check", "metrics"], &text);
    assert_eq!(of(&text, "jumbo_covered_processes", &labels), 2.0);
    let [all, huge, wasted, large] = ["heap", "huge", "wasted", "large"]
        .map(|name| of(&text, &format!("jumbo_{name}_bytes"), &labels));
    assert!(
        all >= 2.0 * half && huge <= all && large >= half / 2.0,
        "{text}"
    );
    assert!(wasted <= (2 * 16 * MIB) as f64, "{text}");
    let reason = format!("{{comm=\"heap\",unit=\"{unit}\",reason=\"not_dense\"}}");
    assert_eq!(of(&text, "jumbo_not_huge_bytes", &reason), all - huge);
    // The kernel's own counter.
    let unit = format!("{{unit=\"{unit}\"}}");
    assert!(
        of(&text, "container_memory_anon_thp_bytes", &unit) > half,
        "{text}"
    );
    let pids = running
        .each_ref()
        .map(|program| program.pid().as_raw_nonzero().to_string());
    let names = samples(&text).into_keys().collect::<Vec<_>>().join("\n");
    assert!(
        !names.contains("pid=")
            && pids
                .iter()
                .all(|pid| !names.contains(&format!("\"{pid}\"")))
    );

    let bounded = export(&["--max-series", "0"]);
    check(&promtool, &["check", "metrics"], &bounded);
    let other = "{comm=\"other\"}";
    assert!(
        of(&bounded, "jumbo_covered_processes", other) >= 2.0,
        "{bounded}"
    );
    assert!(
        of(&bounded, "jumbo_heap_bytes", other) >= 2.0 * half,
        "{bounded}"
    );
    assert!(
        of(&bounded, "jumbo_export_dropped_series", "") >= 8.0,
        "{bounded}"
    );
    assert!(!bounded.contains("comm=\"heap\""), "{bounded}");

    // For another user, who may not read the processes, the metrics have their number.
    let nobody = Program::new("true")
        .unprivileged()
        .jumbo_itself(&["export"]);
    let nobody = nobody.ok().stdout;
    let denied = of(&nobody, "jumbo_unreadable_processes", "{reason=\"denied\"}");
    assert!(denied >= 2.0, "{nobody}");
    for program in running {
        program.signal(Signal::KILL);
        program.wait();
    }
}

#[test]
fn a_textfile_is_whole_and_readable_for_all() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("jumbo.prom");
    let path = file.to_str().unwrap();
    for _ in 0..2 {
        assert_eq!(export(&["--textfile", path]), "");
        let text = fs::read_to_string(&file).unwrap();
        let is_last = |line: &str| line.starts_with("jumbo_export_duration_seconds ");
        assert!(
            text.lines().last().is_some_and(is_last) && text.ends_with('\n'),
            "{text}"
        );
    }
    assert_eq!(
        fs::metadata(&file).unwrap().permissions().mode() & 0o444,
        0o444
    );
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    let missing = Program::new(build::jumbo()).args(["export", "--textfile", "/no-such-folder/f"]);
    let failed = missing.plain();
    assert_eq!(failed.status.code(), Some(1));
    assert!(
        failed.stderr.contains("/no-such-folder/f") && failed.stderr.contains("hint:"),
        "{failed:?}"
    );
}

/// Returns the response to a request, head and body.
fn ask(address: &str, request: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(wait::TIMEOUT))?;
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

pub(crate) fn get(address: &str, path: &str) -> std::io::Result<String> {
    ask(
        address,
        &format!("GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n"),
    )
}

/// Starts `jumbo export --listen`; returns it and its address.
fn listen() -> (Running, String) {
    let script = "exec \"$0\" export --listen 127.0.0.1:0 2>&1";
    let running = Program::shell(script).arg(build::jumbo()).start_plain();
    let line = running.wait_for_line("jumbo: serving ");
    let address = line
        .split("http://")
        .nth(1)
        .unwrap()
        .trim_end_matches("/metrics");
    (running, address.to_owned())
}

#[test]
fn slow_and_odd_clients_hold_nobody_up() {
    let (running, address) = listen();
    // Slow clients: one sends nothing, one half a request, one reads nothing.
    let slow: Vec<_> = ["", "GET /metr", "GET /metrics HTTP/1.1\r\n\r\n"]
        .into_iter()
        .cycle()
        .take(12)
        .map(|text| {
            let mut stream = TcpStream::connect(&address).unwrap();
            stream.write_all(text.as_bytes()).unwrap();
            stream
        })
        .collect();
    let answer = get(&address, "/metrics").unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains("text/plain; version=0.0.4"), "{head}");
    assert!(
        head.contains(&format!("Content-Length: {}\r\n", body.len())),
        "{head}"
    );
    for (request, status) in [
        ("GET / HTTP/1.1\r\n\r\n", "404"),
        ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
        ("\0\r\n\r\n", "400"),
        ("HEAD /metrics?a=b HTTP/1.1\r\n\r\n", "200"),
    ] {
        let answer = ask(&address, request).unwrap();
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")),
            "{request}: {answer}"
        );
        assert!(status != "200" || answer.ends_with("\r\n\r\n"), "{answer}");
    }
    running.signal(Signal::TERM);
    running.wait().ok();
    drop(slow);
}

#[test]
fn prometheus_scrapes_and_knows_the_rules() {
    let Some(prometheus) = host::command("prometheus") else {
        return;
    };
    let (running, address) = listen();
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("prometheus.yml");
    let text = format!(
        "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\n\
         rule_files: [{}]\n{}",
        packaging("prometheus/jumbo.rules.yml")
            .canonicalize()
            .unwrap()
            .display(),
        fs::read_to_string(packaging("prometheus/jumbo.scrape.yml"))
            .unwrap()
            .replace("127.0.0.1:9841", &address)
    );
    fs::write(&config, text).unwrap();
    // Probably still free: Prometheus does not report a port that it chose itself.
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let server = Program::new(prometheus)
        .arg(format!("--config.file={}", config.display()))
        .arg(format!(
            "--storage.tsdb.path={}",
            folder.path().join("data").display()
        ))
        .arg(format!("--web.listen-address={port}"))
        .start_plain();
    let port = port.to_string();
    let api = |path: &str| -> Option<Value> {
        let answer = ask(&port, &format!("GET /api/v1/{path} HTTP/1.0\r\n\r\n")).ok()?;
        let answer: Value = serde_json::from_str(answer.split_once("\r\n\r\n")?.1).ok()?;
        (answer["status"] == "success").then(|| answer["data"].clone())
    };
    let value = wait::until("a scrape by Prometheus", wait::TIMEOUT, || {
        assert!(!server.has_ended(), "Prometheus has ended");
        let found = api("query?query=jumbo_build_info")?;
        let sample = &found["result"][0];
        sample["value"][1]
            .as_str()
            .map(|value| (value.to_owned(), sample["metric"]["version"].clone()))
    });
    assert_eq!(value, ("1".to_owned(), env!("CARGO_PKG_VERSION").into()));
    assert_eq!(api("query?query=up").unwrap()["result"][0]["value"][1], "1");
    // HELP and TYPE are included.
    let known = api("metadata?metric=jumbo_vmstat_thp_fault_alloc_total").unwrap();
    assert_eq!(
        known["jumbo_vmstat_thp_fault_alloc_total"][0]["type"],
        "counter"
    );
    wait::until("the rules to be evaluated", wait::TIMEOUT, || {
        let rules = api("rules")?;
        let rules = rules["groups"][0]["rules"].as_array()?.clone();
        let is_ok = |rule: &Value| rule["health"] == "ok";
        (rules.len() >= 5 && rules.iter().all(is_ok)).then_some(())
    });
    server.signal(Signal::TERM);
    server.wait();
    running.signal(Signal::INT);
    running.wait().ok();
}

/// Returns the names of metrics in an expression.
fn metrics(expression: &str) -> impl Iterator<Item = &str> {
    let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("jumbo_") || word.starts_with("container_"))
}

fn expressions<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
    match value {
        Value::Object(fields) => {
            found.extend(fields.get("expr").and_then(Value::as_str));
            fields.values().for_each(|field| expressions(field, found));
        }
        Value::Array(values) => values.iter().for_each(|value| expressions(value, found)),
        _ => {}
    }
}

#[test]
fn the_dashboard_and_the_rules_use_metrics_that_there_are() {
    let text = export(&[]);
    let types = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    let known: BTreeSet<_> = types.collect();
    let dashboard = fs::read_to_string(packaging("grafana/jumbo.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&dashboard).unwrap();
    let mut shown = Vec::new();
    expressions(&dashboard, &mut shown);
    assert!(shown.len() >= 12);
    let rules = fs::read_to_string(packaging("prometheus/jumbo.rules.yml")).unwrap();
    let rules_alone = rules
        .lines()
        .filter(|line| !line.trim_start().starts_with('#'));
    let used: BTreeSet<_> = shown
        .into_iter()
        .chain(rules_alone)
        .flat_map(metrics)
        .collect();
    let absent: Vec<_> = used.difference(&known).collect();
    assert!(used.len() > 15 && absent.is_empty(), "{absent:?}");
    if let Some(promtool) = host::command("promtool") {
        let rules = packaging("prometheus/jumbo.rules.yml");
        check(&promtool, &["check", "rules", rules.to_str().unwrap()], "");
        check(&promtool, &["check", "metrics"], &text);
    }
}
