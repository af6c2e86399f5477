use std::collections::BTreeMap;
use std::os::unix::fs::symlink;

use jumbo::units::Bytes;
use jumbo_bench::table::Quantity;
use roxmltree::{Document as Xml, Node};

use super::*;
use crate::bench::all::NotMeasured;

/// A name with a script, the end of an attribute, and a terminal escape.
const HOSTILE: &str = "</style><script>alert(1)</script>\" onload='x' \u{1b}[2J";

fn row(name: &str, samples: [&[f64]; 2]) -> Row {
    let what = Quantity {
        name: name.to_owned(),
        measure: format!("{HOSTILE} {name}"),
        unit: "ms",
        published: Some("1.21"),
    };
    let [base, ours] = samples.map(<[f64]>::to_vec);
    Row::ratio(
        what,
        [("plain".to_owned(), base), (HOSTILE.to_owned(), ours)],
    )
}

/// Document with a row of each verdict, one without a ratio, and an unmeasured table.
fn document() -> Document {
    let settings = jumbo_bench::Settings {
        jumbo: "/j".into(),
        rounds: std::num::NonZeroUsize::MIN,
        progress: indicatif::ProgressBar::hidden(),
        line: None,
    };
    let mut table = Table::new("free", HOSTILE.to_owned(), &settings).unwrap();
    table.push(row("gain", [&[4.0, 4.2, 4.1], &[2.0, 2.1, 2.0]]));
    table.push(row("loss", [&[2.0, 2.1, 2.0], &[4.0, 4.2, 4.1]]));
    table.push(row("noise", [&[4.0, 4.2, 4.1], &[3.9, 1.0, 4.0]]));
    table.push(row("nothing", [&[0.0, 0.0], &[0.0, 0.0]]));
    let why = HOSTILE.to_owned();
    table.missing.push(Missing {
        what: "hugetlb",
        why: why.clone(),
    });
    Document {
        version: "0.1.0",
        began: 1_709_210_096,
        seconds: 61.0,
        quick: true,
        complete: false,
        machine: Machine {
            cpu: Some(HOSTILE.to_owned()),
            cores: 2,
            ram: Bytes(1 << 30),
            kernel: "6.18".to_owned(),
            load: 0.0,
            thp: BTreeMap::new(),
        },
        knobs: BTreeMap::from([("/sys/a".to_owned(), why.clone())]),
        tables: vec![Measured {
            table,
            seconds: 60.0,
        }],
        not_measured: vec![NotMeasured { table: "pool", why }],
    }
}

fn words(node: Node<'_, '_>) -> String {
    node.descendants().filter_map(|node| node.text()).collect()
}

#[test]
fn the_page_is_well_formed_and_refers_to_nothing_outside() {
    let page = bench(&document());
    assert!(page.starts_with("<!DOCTYPE html><html lang=\"en\">"));
    let (head, rest) = page.split_once("<body>").unwrap();
    assert!(
        head.contains(&format!("content=\"{CONTENT_POLICY}\"")),
        "{head}"
    );
    assert!(!head.contains("http:") && !head.contains("https:") && !head.contains("url("));
    let body = format!("<body>{}", rest.strip_suffix("</html>").unwrap());
    let xml = Xml::parse(&body).unwrap();
    for node in xml.descendants() {
        assert!(!["script", "img", "iframe", "object", "link"].contains(&node.tag_name().name()));
        for attribute in node.attributes() {
            let (name, value) = (attribute.name(), attribute.value());
            assert!(
                !name.starts_with("on") && name != "style" && name != "src",
                "{name}"
            );
            // A link loads nothing until a click.
            assert!(name != "href" || value.starts_with('#') || value.starts_with("https://"));
        }
    }
    assert!(!page.contains('\u{1b}') && !page.contains("<script>"));
    let ids: Vec<_> = xml
        .descendants()
        .filter_map(|node| node.attribute("id"))
        .collect();
    for id in ["machine", "overview", "free", "not-measured"] {
        assert_eq!(ids.iter().filter(|it| **it == id).count(), 1, "{id}");
    }
}

#[test]
fn rows_have_a_verdict_and_plots_with_titles() {
    let page = bench(&document());
    let body = &page[page.find("<body>").unwrap()..page.find("</html>").unwrap()];
    let xml = Xml::parse(body).unwrap();
    let rows = xml
        .descendants()
        .find(|node| node.attribute("class") == Some("rows"));
    let body = rows
        .unwrap()
        .children()
        .find(|node| node.has_tag_name("tbody"))
        .unwrap();
    let rows: Vec<_> = body.children().collect();
    let verdicts = [
        "ahead",
        "BEHIND",
        "no difference seen",
        "no difference seen",
    ];
    assert_eq!(rows.len(), verdicts.len());
    for (row, verdict) in rows.iter().zip(verdicts) {
        let text = words(*row);
        assert!(text.contains(verdict) && text.contains("1.21"), "{text}");
    }
    let svg = |row: &Node<'_, '_>| {
        row.descendants()
            .filter(|it| it.has_tag_name("svg"))
            .count()
    };
    // Rows without a sample above 0 have no plot.
    assert_eq!(rows.iter().map(svg).collect::<Vec<_>>(), [1, 1, 1, 0]);
    let circles = rows[0]
        .descendants()
        .filter(|node| node.has_tag_name("circle"));
    assert_eq!(circles.count(), 3 + 3);
    let images = rows[0]
        .descendants()
        .filter(|node| node.attribute("role") == Some("img"));
    assert!(images.map(words).all(|title| title.contains("gain")));
    let json = serde_json::to_value(document()).unwrap();
    let verdict = |at: usize| json["tables"][0]["rows"][at]["verdict"].clone();
    assert_eq!(verdict(2), "no_difference_seen");
    for text in [
        "Incomplete.",
        "2024-02-29 12:34 UTC",
        "Aaron Lu",
        "pool: ",
        "1 min 1 s",
    ] {
        assert!(words(xml.root()).contains(text), "{text}");
    }
}

#[test]
fn unwritable_files_are_refused_before_the_measurement() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    assert_eq!(target(&at("new")).unwrap(), at("new"));
    fs::write(at("old"), "old").unwrap();
    symlink(at("old"), at("link")).unwrap();
    assert_eq!(target(&at("link")).unwrap(), at("old"));
    // The name of a temporary file, on which the folder's owner put a link.
    symlink(at("old"), at("new.jumbo-new")).unwrap();
    target(&at("new")).unwrap();
    for (path, why) in [
        (Path::new("/dev/null"), "no regular file"),
        (folder.path(), "no regular file"),
        (&at("no/such"), "No such file or directory"),
        (Path::new("/proc/new"), "cannot write /proc/new"),
    ] {
        let error = format!("{:#}", target(path).unwrap_err());
        assert!(error.contains(why) && error.contains("hint: "), "{error}");
    }
    assert_eq!(fs::read_to_string(at("old")).unwrap(), "old");
}
