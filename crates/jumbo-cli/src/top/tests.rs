//! Tests of the list and the screen with made-up processes.

use jumbo::units::Bytes;
use jumbo_host::kernel::task::Memory;
use jumbo_host::status::Glance;
use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;
use ratatui_core::style::Modifier;

use super::collect::ProcessRow;
use super::*;

/// A process of `anon` MiB; `glance` has huge and gain in MiB, `None` for an unreadable process.
fn process(pid: u32, name: &str, group: &str, anon: u64, glance: Option<(u64, u64)>) -> ProcessRow {
    let mib = |mib: u64| Bytes(mib << 20);
    let memory = Memory {
        anon: mib(anon),
        ..Memory::default()
    };
    ProcessRow {
        pid,
        name: name.to_owned(),
        user: "someone".to_owned(),
        group: group.to_owned(),
        command: format!("/usr/bin/{name} --serve"),
        memory,
        glance: glance.map(|(huge, gain)| {
            let mut glance = Glance::default();
            (glance.huge.anon, glance.gain) = (mib(huge), mib(gain));
            glance.waste = (name == "covered").then_some(mib(3));
            glance
        }),
    }
}

fn processes() -> Vec<ProcessRow> {
    let service = "/system.slice/web.service";
    vec![
        process(10, "small", service, 8, Some((0, 8))),
        process(11, "large", service, 1000, Some((900, 90))),
        process(12, "covered", "/user.slice", 100, Some((100, 0))),
        process(13, "secret", "/user.slice", 5000, None),
        process(14, "\u{1b}[31mred", "/user.slice", 1, Some((0, 0))),
    ]
}

fn app(change: impl FnOnce(&mut App)) -> App {
    let args = Args {
        interval: Duration::from_secs(2),
        sort: Column::Gain,
        tree: false,
        once: false,
        json: false,
    };
    let mut app = App::new(&args);
    change(&mut app);
    app.event(Event::Sample(Ok(Box::new(Sample {
        processes: processes(),
        hidden: 1,
        ..Sample::default()
    }))));
    app
}

fn pids(app: &App) -> Vec<u32> {
    let pid = |line: &Line| match line.subject {
        Subject::Process(pid) => Some(pid),
        Subject::Group(_) => None,
    };
    app.lines.iter().filter_map(pid).collect()
}

fn press(app: &mut App, keys: &str) -> Vec<Whose> {
    Decoder::default()
        .keys(keys.as_bytes())
        .into_iter()
        .filter_map(|key| app.key(key))
        .collect()
}

/// Lines of a screen, and the selected one.
fn screen(app: &mut App, width: u16, height: u16) -> (Vec<String>, String) {
    let mut buffer = Buffer::empty(Rect::new(0, 0, width, height));
    app.width = usize::from(width);
    draw::draw(app, &mut buffer);
    let line = |y| {
        let cells = (0..width).map(|x| buffer[(x, y)].symbol());
        cells.collect::<String>().trim_end().to_owned()
    };
    let lines: Vec<_> = (0..height).map(line).collect();
    let is_reversed = |y: &u16| buffer[(0, *y)].modifier.contains(Modifier::REVERSED);
    let mut reversed = (0..height.saturating_sub(1)).filter(is_reversed);
    let selected = reversed.next_back().map(line).unwrap_or_default();
    (lines, selected)
}

#[test]
fn the_list_is_sorted_and_unknown_values_come_last() {
    let mut app = app(|_| ());
    assert_eq!(pids(&app), [11, 10, 12, 14, 13]);
    press(&mut app, "R");
    assert_eq!(pids(&app), [12, 14, 10, 11, 13]);
    press(&mut app, "<");
    assert_eq!(app.options.sort, Column::Share);
    assert_eq!(pids(&app), [12, 11, 10, 14, 13]);
    press(&mut app, ">>");
    assert_eq!((app.options.sort, pids(&app)[0]), (Column::Waste, 12));
    // From the last column to the first.
    press(&mut app, ">");
    assert_eq!(app.options.sort, Column::Pid);
    assert_eq!(pids(&app), [10, 11, 12, 13, 14]);
}

#[test]
fn a_filter_finds_names_groups_and_pids() {
    let mut app = app(|_| ());
    for (filter, found) in [
        ("LARGE", &[11][..]),
        ("web.service", &[11, 10]),
        ("13", &[13]),
        ("someone", &[11, 10, 12, 14, 13]),
        ("nothing", &[]),
    ] {
        press(&mut app, &format!("/{filter}\r"));
        assert_eq!(pids(&app), found, "{filter}");
        let (lines, _) = screen(&mut app, 80, 24);
        assert!(lines[0].contains(&format!("{} of 5 processes", found.len())));
        press(&mut app, "\x1b");
    }
    assert_eq!(pids(&app).len(), 5);
}

#[test]
fn a_tree_has_sums_and_folds() {
    let mut app = app(|app| app.options.tree = true);
    let shown = |app: &App| {
        let name = |line: &Line| line.cell(Column::Name);
        app.lines.iter().map(name).collect::<Vec<_>>()
    };
    let all = shown(&app);
    assert_eq!(
        all[..4],
        [
            "- /",
            "  - system.slice/web.service",
            "    large",
            "    small"
        ]
    );
    assert_eq!(all.len(), 3 + 5);
    let cells = |app: &App, line: usize| {
        let columns = [Column::Resident, Column::Huge, Column::Share, Column::Gain];
        columns.map(|column| app.lines[line].cell(column))
    };
    // An unread process does not count in the share.
    assert_eq!(cells(&app, 0), ["6.0 GiB", "1000 MiB", "90%", "98 MiB"]);
    assert_eq!(cells(&app, 1), ["1008 MiB", "900 MiB", "89%", "98 MiB"]);
    app.select(1);
    press(&mut app, " ");
    assert_eq!(
        shown(&app)[1..3],
        ["  + system.slice/web.service", "  - user.slice"]
    );
    press(&mut app, "**");
    assert_eq!(shown(&app).len(), 3);
    press(&mut app, "*t");
    assert_eq!(shown(&app).len(), 5);
}

#[test]
fn the_screen_has_what_matters_in_80_columns_and_more_in_200() {
    let mut app = app(|_| ());
    let (narrow, selected) = screen(&mut app, 80, 24);
    assert!(
        narrow[0].starts_with("jumbo top: 5 processes, 1 "),
        "{narrow:#?}"
    );
    assert!(narrow[0].ends_with("every 2 s"));
    let titles = "    PID NAME                   RESIDENT       HUGE   SHARE     [GAIN]      WASTE";
    assert_eq!(narrow[5], titles);
    let large = "     11 large                  1000 MiB    900 MiB     90%     90 MiB          -";
    assert_eq!((narrow[6].as_str(), selected.as_str()), (large, large));
    let secret = "     13 secret                  4.9 GiB          -       -          -          -";
    assert_eq!(narrow[10], secret);
    assert!(narrow[23].starts_with("? help") && narrow[23].ends_with("q quit"));
    let (wide, _) = screen(&mut app, 200, 50);
    for part in ["USER", "ANON", "HUGETLB", "SWAP", "CGROUP", "COMMAND"] {
        assert!(
            wide.iter().any(|line| line.contains(part)),
            "{part}: {wide:#?}"
        );
    }
    assert!(
        wide.iter()
            .any(|line| line.contains("/usr/bin/large --serve"))
    );
    for (width, height) in [(80, 24), (200, 50), (20, 5), (1, 1), (0, 0), (300, 3)] {
        for keys in ["", "?", "q\t", "qt", "\x1b[F"] {
            press(&mut app, keys);
            let (lines, _) = screen(&mut app, width, height);
            assert!(!lines.concat().contains(char::is_control));
        }
        press(&mut app, "t");
    }
}

#[test]
fn no_text_of_help_or_host_is_cut_at_80_columns() {
    let mut app = app(|_| ());
    for (keys, part) in [("?", "0.5 % of a CPU"), ("q\t", "reading ...")] {
        press(&mut app, keys);
        let (narrow, _) = screen(&mut app, 80, 30);
        let (wide, _) = screen(&mut app, 200, 30);
        assert_eq!(narrow, wide);
        assert!(narrow.iter().any(|line| line.contains(part)), "{narrow:#?}");
    }
}

#[test]
fn enter_and_tab_read_pages_of_status_and_an_error_is_shown() {
    let mut app = app(|_| ());
    assert_eq!(press(&mut app, "\r"), [Whose::Process(11)]);
    let (lines, _) = screen(&mut app, 80, 24);
    assert_eq!(lines[..2], ["11 large", "reading ..."]);
    let missing = Root::at("/nonexistent").read("proc/11/status").unwrap_err();
    app.event(Event::Status(Whose::Process(11), Err(missing)));
    let (lines, _) = screen(&mut app, 80, 24);
    assert!(
        lines[1].contains("/nonexistent/proc/11/status"),
        "{lines:#?}"
    );
    assert_eq!(press(&mut app, "r"), [Whose::Process(11)]);
    assert_eq!(press(&mut app, "q\t"), [Whose::Host]);
    // The page of the process, which came late, is not that of the host.
    app.event(Event::Status(Whose::Process(11), Ok(View::default())));
    assert_eq!(screen(&mut app, 80, 24).0[1], "reading ...");
    let mut page = View::default();
    page.fact("Pools", "none");
    app.event(Event::Status(Whose::Host, Ok(page)));
    let (lines, _) = screen(&mut app, 80, 24);
    assert_eq!(lines[..2], ["jumbo top: the host", "Pools           none"]);
    press(&mut app, "\tq");
    assert!(app.ended);
}
