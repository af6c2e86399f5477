//! Tests of `jumbo fleet compare`: a fleet in a real Prometheus, and faulty files and servers.

use std::fmt::Write as _;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use rustix::process::Signal;
use serde_json::Value;

use crate::export::get;
use crate::support::{Program, Ran, build, host, wait};

fn compare(options: &[&str]) -> Ran {
    let program = Program::new(build::jumbo()).args(["fleet", "compare"]);
    program.args(options).plain()
}

/// Returns the error message of a comparison that fails.
#[track_caller]
fn refused(options: &[&str]) -> String {
    let ran = compare(options);
    assert_eq!(ran.status.code(), Some(1), "{ran:?}");
    assert!(ran.stdout.is_empty(), "{ran:?}");
    ran.stderr
}

const HOURS: u64 = 2;
const PODS: u64 = 24;

/// Two hours of 24 pods in the exposition format: jumbo needs 10 % less CPU per request and 5 %
/// more memory.
fn fleet(end: u64) -> String {
    let mut families = [
        "container_cpu_usage_seconds counter",
        "http_requests counter",
        "http_request_duration_seconds histogram",
        "container_memory_working_set_bytes gauge",
        "kube_pod_labels gauge",
        "kube_pod_info gauge",
        "jumbo_covered_processes gauge",
    ]
    .map(|family| format!("# TYPE {family}\n"));
    for pod in 0..PODS {
        let is_jumbo = pod % 2 == 1;
        // Variation of at most 2 % between pods, equal in both arms.
        let own = 1.0 + ((pod / 2 * 7) % 12) as f64 / 600.0;
        let cpu = own * if is_jumbo { 0.9 } else { 1.0 };
        let memory = own * if is_jumbo { 1.05 } else { 1.0 } * f64::from(1 << 30);
        let arm = if is_jumbo { "covered" } else { "plain" };
        let name = format!("namespace=\"shop\",pod=\"shop-{pod}\"");
        for minute in 0..=HOURS * 60 {
            let time = end - HOURS * 3600 + minute * 60;
            // Each pod has its own load, which grows.
            let requests = (minute * minute + 600 * minute) as f64 * (1.0 + pod as f64 / 20.0);
            let seconds = requests * 0.002 * cpu;
            let mut line = |family: usize, text: String| {
                writeln!(families[family], "{text} {time}").unwrap();
            };
            let container = format!("{name},container=\"app\"");
            line(
                0,
                format!("container_cpu_usage_seconds_total{{{container}}} {seconds}"),
            );
            // The pod's own cgroup, which counts the same time again.
            line(
                0,
                format!("container_cpu_usage_seconds_total{{{name},container=\"\"}} {seconds}"),
            );
            line(1, format!("http_requests_total{{{name}}} {requests}"));
            for (le, part) in [("0.05", 0.9), ("0.1", 0.985 + own / 100.0), ("+Inf", 1.0)] {
                let count = requests * part;
                line(
                    2,
                    format!("http_request_duration_seconds_bucket{{{name},le=\"{le}\"}} {count}"),
                );
            }
            line(
                3,
                format!("container_memory_working_set_bytes{{{container}}} {memory}"),
            );
            line(
                4,
                format!("kube_pod_labels{{{name},label_jumbo_dev_arm=\"{arm}\"}} 1"),
            );
            line(5, format!("kube_pod_info{{{name},uid=\"uid-{pod}\"}} 1"));
            if is_jumbo {
                line(
                    6,
                    format!("jumbo_covered_processes{{comm=\"shop\",pod=\"uid-{pod}\"}} 2"),
                );
            }
            if pod == 0 {
                let other = "container_memory_working_set_bytes{namespace=\"kube-system\",pod=\"dns\",container=\"dns\"} 1";
                line(3, other.to_owned());
            }
        }
    }
    format!("{}# EOF\n", families.concat())
}

fn backfill(promtool: &Path, folder: &Path, text: &str) {
    let file = folder.join("fleet.om");
    fs::write(&file, text).unwrap();
    let mut command = Command::new(promtool);
    command.args(["tsdb", "create-blocks-from", "openmetrics"]);
    command.arg(&file).arg(folder.join("data"));
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn a_fleet_in_prometheus_is_compared() {
    let (Some(prometheus), Some(promtool)) =
        (host::command("prometheus"), host::command("promtool"))
    else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let end = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs() - 60;
    backfill(&promtool, folder, &fleet(end));
    let config = folder.join("prometheus.yml");
    fs::write(&config, "global: {}\n").unwrap();
    // Probably still free: Prometheus does not report a port that it chose itself.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr();
    let port = port.unwrap().to_string();
    let server = Program::new(prometheus)
        .arg(format!("--config.file={}", config.display()))
        .arg(format!(
            "--storage.tsdb.path={}",
            folder.join("data").display()
        ))
        .arg(format!("--web.listen-address={port}"))
        .start_plain();
    wait::until("Prometheus to be ready", wait::TIMEOUT, || {
        assert!(!server.has_ended(), "Prometheus has ended");
        let answer = get(&port, "/-/ready").ok()?;
        answer.contains(" 200 ").then_some(())
    });
    let (url, end) = (format!("http://{port}/"), end.to_string());
    let hours = HOURS.to_string();
    let common = [
        "--prometheus",
        &url,
        "--hours",
        &hours,
        "--end",
        &end,
        "--json",
    ];
    let pages = [
        vec!["--select", "namespace=\"shop\"", "--pods", "1000"],
        // Arm determined by covered processes, as docs/fleet.md does for the NRI plugin.
        vec!["--pods", "1000", "--arm", "arm", "--arms", COVERED_QUERY],
    ]
    .map(|own| -> Value {
        let options = [&common[..], &own].concat();
        serde_json::from_str(&compare(&options).ok().stdout).unwrap()
    });
    for page in &pages {
        assert_eq!(page["pods"]["plain"], PODS / 2, "{page}");
        assert_eq!(page["pods"]["jumbo"], PODS / 2, "{page}");
        assert_eq!(page["per_request"], true, "{page}");
        let figure = |index: usize, key: &str| page["figures"][index][key].as_f64().unwrap();
        assert!((figure(0, "plain") - 0.002).abs() < 0.0001, "{page}");
        for (index, factor) in [(0, 0.9), (2, 1.05)] {
            assert_eq!(page["figures"][index]["seen"], true, "{page}");
            assert!(
                (figure(index, "ratio") * factor - 1.0).abs() < 0.005,
                "{page}"
            );
            assert_eq!(page["figures"][index]["aa"]["seen"], false, "{page}");
        }
        assert_eq!(page["figures"][1]["seen"], false, "{page}");
        assert!((0.09..0.1).contains(&figure(1, "plain")), "{page}");
        let saving = |index: usize| page["figures"][index]["saving"]["amount"].as_f64().unwrap();
        let memory = -0.05 * 1000.0 * 1.01 * f64::from(1 << 30);
        assert!((saving(2) / memory - 1.0).abs() < 0.05, "{page}");
        assert!((3.0..4.5).contains(&saving(0)), "{page}");
    }
    // The second query covers all namespaces.
    let notes = |index: usize| pages[index]["notes"].to_string();
    assert_eq!(notes(0), "[]");
    assert!(notes(1).contains("no arm"), "{}", notes(1));

    let nothing = refused(&["--prometheus", &url, "--select", "pod=\"none\""]);
    assert!(
        nothing.contains("label_jumbo_dev_arm") && nothing.contains("hint:"),
        "{nothing}"
    );
    let wrong = refused(&["--prometheus", &url, "--select", "namespace=shop"]);
    assert!(
        wrong.contains("400") && wrong.contains("parse error"),
        "{wrong}"
    );
    server.signal(Signal::TERM);
    server.wait();
}

/// The query of docs/fleet.md, in one line.
const COVERED_QUERY: &str = r#"label_replace(kube_pod_info and on (uid) label_replace(last_over_time(jumbo_covered_processes[2h] @ end()), "uid", "$1", "pod", "(.+)"), "arm", "jumbo", "", "") or label_replace(kube_pod_info{namespace="shop"}, "arm", "plain", "", "") unless on (uid) label_replace(last_over_time(jumbo_covered_processes[2h] @ end()), "uid", "$1", "pod", "(.+)")"#;

/// Starts a server that treats all clients alike; returns its address.
fn server(answer: impl Fn(&mut TcpStream) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut request = [0; 4096];
            let _ = stream.read(&mut request);
            answer(&mut stream);
        }
    });
    format!("http://{address}")
}

#[test]
fn servers_that_fail_are_named() {
    let fails = server(|stream| {
        let body = "{\"status\":\"error\",\"error\":\"the disk is \\u001b[31mfull\"}";
        let length = body.len();
        let head =
            format!("HTTP/1.1 500 Internal Server Error\r\nContent-Length: {length}\r\n\r\n");
        let _ = stream.write_all((head + body).as_bytes());
    });
    let message = refused(&["--prometheus", &fails]);
    assert!(
        message.contains(&fails) && message.contains("500"),
        "{message}"
    );
    assert!(
        message.contains("the disk is \u{fffd}[31mfull"),
        "{message}"
    );

    let page = server(|stream| {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>");
    });
    let message = refused(&["--prometheus", &page]);
    assert!(message.contains("hint: is this a Prometheus?"), "{message}");

    let hangs = server(|stream| {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 600\r\n\r\n");
        // Until the client disconnects.
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let begin = Instant::now();
    let message = refused(&["--prometheus", &hangs, "--timeout", "0.5"]);
    assert!(
        message.contains("timeout") && message.contains("hint: --timeout"),
        "{message}"
    );
    assert!(begin.elapsed() < Duration::from_secs(30));

    let huge = server(|stream| {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n");
        let chunk = [b' '; 1 << 16];
        while stream.write_all(&chunk).is_ok() {}
    });
    let message = refused(&["--prometheus", &huge]);
    assert!(message.contains("hint: --select"), "{message}");

    let gone = refused(&["--prometheus", "http://127.0.0.1:1"]);
    assert!(gone.contains("refused"), "{gone}");
    let tls = refused(&["--prometheus", "https://127.0.0.1:1"]);
    assert!(
        tls.contains("without TLS") && tls.contains("hint:"),
        "{tls}"
    );
}

/// A CSV with these numbers of pods in each arm.
fn csv(plain: usize, jumbo: usize, value: &str) -> String {
    let arms = [("plain", plain), ("jumbo", jumbo)];
    let pods = arms
        .iter()
        .flat_map(|(arm, pods)| (0..*pods).map(move |pod| (arm, pod)));
    let lines = pods.map(|(arm, pod)| format!("0,{arm}-{pod},{arm},memory_bytes,{value}\n"));
    format!("time,unit,arm,metric,value\n{}", lines.collect::<String>())
}

#[test]
fn a_csv_that_is_wrong_is_refused_with_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("fleet.csv");
    let path = file.to_str().unwrap();
    let row = |row: &str| format!("{}{row}\n", csv(4, 4, "1"));
    for (text, expected) in [
        (String::new(), "fleet.csv is empty"),
        ("time,unit,arm,metric,value\n".to_owned(), "no samples"),
        (
            "time,pod,arm,metric,value\n".to_owned(),
            "hint: the first line",
        ),
        (csv(4, 1, "1"), "4 plain and 1 jumbo pods"),
        (csv(4, 0, "1"), "4 plain and 0 jumbo pods"),
        (csv(0, 4, "1"), "0 plain and 4 jumbo pods"),
        (csv(4, 4, "0"), "0 plain and 0 jumbo pods"),
        (
            row("0,x,plain,p99_seconds,NaN"),
            "line 10, column value: NaN",
        ),
        (row("0,x,plain,p99_seconds,-1"), "line 10, column value: -1"),
        (
            row("0,x,plain,p99_seconds,fast"),
            "line 10, column value: 'fast'",
        ),
        (row("0,x,plain,p98,1"), "line 10, column metric: 'p98'"),
        (
            row("0,x,control,p99_seconds,1"),
            "line 10, column arm: 'control'",
        ),
        (
            row("0,plain-1,jumbo,p99_seconds,1"),
            "line 10, column arm: plain-1",
        ),
        (
            row("0,plain-1,plain,memory_bytes,1"),
            "line 10, column time: plain-1",
        ),
        (row("0,,plain,p99_seconds,1"), "line 10, column unit"),
        (
            row("today,x,plain,p99_seconds,1"),
            "line 10, column time: 'today'",
        ),
        (row("0,x,plain,p99_seconds"), "line: 10"),
    ] {
        fs::write(&file, &text).unwrap();
        let message = refused(&["--csv", path]);
        assert!(message.contains(expected), "{expected}: {message}");
        assert!(
            message.contains(path) || text.starts_with("time,unit"),
            "{message}"
        );
    }
    let missing = refused(&["--csv", "/no-such-file"]);
    assert!(missing.contains("/no-such-file: No such file"), "{missing}");

    fs::write(&file, csv(9, 9, "1e9")).unwrap();
    let message = compare(&["--csv", path]).ok().stdout;
    assert!(message.contains("memory: no difference seen"), "{message}");
    assert!(
        message.contains("CPU: 0 plain and 0 jumbo pods"),
        "{message}"
    );
}

#[test]
fn a_plan_is_the_same_for_a_seed() {
    let plan = |seed: &str| {
        let options = ["--simulate", "20", "--spread", "0.5,2", "--seed", seed];
        compare(&options).ok().stdout
    };
    let first = plan("1");
    assert_eq!(first, plan("1"));
    assert_ne!(first, plan("2"));
    assert!(first.contains("with 80 % power after"), "{first}");
    let few = refused(&["--simulate", "3"]);
    assert!(
        few.contains("3 pods are too few") && few.contains("hint:"),
        "{few}"
    );
    let many = refused(&["--simulate", "10000", "--pods-per-node", "2"]);
    assert!(many.contains("20000 pods are too many"), "{many}");
    for wrong in [
        &["--simulate", "0"][..],
        &["--simulate", "20", "--effect", "0"],
        &["--simulate", "20", "--spread", "0,0"],
        &["--spread", "1,1"],
        &[],
    ] {
        assert_eq!(compare(wrong).status.code(), Some(2), "{wrong:?}");
    }
}
