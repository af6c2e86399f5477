//! Drawing of the screen from the state: [`draw`]. Colour alone never has a meaning, and all text
//! is ASCII, for any terminal.

use jumbo_host::kernel::thp::Choice;
use jumbo_host::kernel::{Root, base_page};
use jumbo_host::promote::left_out;
use jumbo_host::status::Kind;
use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;
use ratatui_core::style::{Color, Modifier, Style};

use super::act::ProcessDetails;
use super::collect::{HostSample, Rates, Sample};
use super::model::{Column, Subject};
use super::{App, Page};
use crate::status::process::show_process;
use crate::view::{self, NONE, WIDTH, clean, filled, percent};

const PLAIN: Style = Style::new();
const TITLE: Style = Style::new().add_modifier(Modifier::REVERSED);
const LABEL: Style = Style::new().fg(Color::Cyan).add_modifier(Modifier::BOLD);
const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);

/// Minimum lines of a screen that shows the tables of the host above the list.
const MIN_HEIGHT_WITH_TABLES: u16 = 44;

/// Area of the screen, written line by line.
struct Canvas<'a> {
    buffer: &'a mut Buffer,
    area: Rect,
    y: u16,
}

impl Canvas<'_> {
    fn line(&mut self, text: &str, style: Style) {
        let at = self.area.y.saturating_add(self.y);
        if at < self.area.bottom() {
            let width = usize::from(self.area.width);
            self.buffer
                .set_stringn(self.area.x, at, clean(text), width, style);
            // Reverse video extends to the end of the line.
            if style.add_modifier.contains(Modifier::REVERSED) {
                self.buffer
                    .set_style(Rect::new(self.area.x, at, self.area.width, 1), style);
            }
        }
        self.y = self.y.saturating_add(1);
    }

    /// A line that begins with a highlighted label.
    fn fact(&mut self, text: &str) {
        let y = self.y;
        self.line(text, PLAIN);
        let end = text.find("  ").unwrap_or(0);
        let width = u16::try_from(end).unwrap_or(0).min(self.area.width);
        if self.area.y + y < self.area.bottom() && !text.starts_with(' ') {
            self.buffer
                .set_style(Rect::new(self.area.x, self.area.y + y, width, 1), LABEL);
        }
    }

    fn left(&self) -> usize {
        usize::from(self.area.height.saturating_sub(self.y))
    }
}

/// Draws the whole screen. Scrolls the list so that the selected line is visible.
pub(super) fn draw(app: &mut App, buffer: &mut Buffer) {
    let area = buffer.area;
    let foot = foot(app, usize::from(area.width));
    let lines = u16::try_from(foot.len())
        .unwrap_or(area.height)
        .min(area.height);
    let above = Rect {
        height: area.height - lines,
        ..area
    };
    let mut canvas = Canvas {
        buffer,
        area: above,
        y: 0,
    };
    match &app.page {
        Page::List => list(app, &mut canvas),
        Page::Host => host_page(app, &mut canvas),
        Page::Help => {
            let lines = HELP.lines().map(str::to_owned);
            text(&mut canvas, lines.collect(), &mut app.scroll);
        }
        Page::Detail(process, details) => {
            let name = format!("{} {}", process.pid, process.name);
            let lines = match details {
                None => vec![name, "reading ...".to_owned()],
                Some(Err(error)) => vec![name, error.clone()],
                Some(Ok(details)) => detail(details, usize::from(area.width)),
            };
            text(&mut canvas, lines, &mut app.scroll);
        }
    }
    let below = Rect {
        y: area.y + above.height,
        height: lines,
        ..area
    };
    let mut canvas = Canvas {
        buffer,
        area: below,
        y: 0,
    };
    let last = foot.len().saturating_sub(1);
    for (index, line) in foot.iter().enumerate() {
        canvas.line(line, if index == last { TITLE } else { BOLD });
    }
}

/// Message, question, and keys at the bottom.
fn foot(app: &App, width: usize) -> Vec<String> {
    let fold = |line: &String| {
        let indent = line.chars().take_while(|c| *c == ' ').count();
        filled(&" ".repeat(indent), line.trim_start(), indent + 2, width)
    };
    let folded: Vec<_> = app.message.iter().map(fold).collect();
    let lines = folded.iter().flat_map(|line| line.lines());
    let mut lines: Vec<_> = lines.map(str::to_owned).collect();
    lines.push(match &app.page {
        _ if app.question.is_some() && !app.busy => "y do it   n leave it".to_owned(),
        _ if app.typing => format!("Filter: {}_   Enter keep   Esc drop", app.options.filter),
        _ if app.busy => "working ...   Esc ends it".to_owned(),
        Page::List => KEYS.to_owned(),
        Page::Host | Page::Help => "q back   arrows scroll".to_owned(),
        Page::Detail(..) => "q back   arrows scroll   r read again   p promote   u undo".to_owned(),
    });
    lines
}

/// Keys of the list, in 80 columns.
const KEYS: &str = "? help  / filter  <> sort  t tree  Enter detail  p promote  u undo  q quit";

/// Draws scrollable lines of text; the first is the title.
fn text(canvas: &mut Canvas<'_>, lines: Vec<String>, scroll: &mut usize) {
    let mut lines = lines.into_iter();
    canvas.line(&lines.next().unwrap_or_default(), TITLE);
    let lines: Vec<_> = lines.collect();
    *scroll = (*scroll).min(lines.len().saturating_sub(canvas.left()));
    for line in lines.iter().skip(*scroll) {
        canvas.fact(line);
    }
}

/// Columns of a screen of this width. A tree needs no column for the group.
pub(super) fn columns(width: usize, tree: bool) -> Vec<Column> {
    use clap::ValueEnum as _;
    let all = Column::value_variants().iter().copied();
    let fits = |column: &Column| column.layout().2 <= width && !(tree && *column == Column::Group);
    all.filter(fits).collect()
}

/// The last `size` characters: the end of a path says more than its beginning.
fn tail(text: &str, size: usize) -> String {
    match text.chars().count().checked_sub(size) {
        None | Some(0) => text.to_owned(),
        Some(over) => format!("~{}", text.chars().skip(over + 1).collect::<String>()),
    }
}

fn list(app: &mut App, canvas: &mut Canvas<'_>) {
    let width = usize::from(canvas.area.width);
    let Some(sample) = &app.sample else {
        canvas.line("jumbo top: reading ...", TITLE);
        return;
    };
    canvas.line(&title(app, sample, width), BOLD);
    for line in summary(&sample.host) {
        canvas.fact(&line);
    }
    if canvas.area.height >= MIN_HEIGHT_WITH_TABLES {
        tables(&sample.host)
            .iter()
            .for_each(|line| canvas.fact(line));
    }
    let columns = columns(width, app.options.tree);
    let fixed: usize = columns.iter().map(|column| column.layout().1 + 1).sum();
    let room = (width + 1).saturating_sub(fixed);
    let has_commands = columns.contains(&Column::Command);
    let name = match (has_commands, app.options.tree) {
        (false, _) => room,
        // The tree needs wide names; the command line gets the other half.
        (true, true) => room / 2,
        (true, false) => 5,
    };
    let cell = |column: Column, text: &str| {
        let size = match column {
            Column::Name => Column::Name.layout().1 + name,
            column => column.layout().1,
        };
        match column {
            Column::Command => text.to_owned(),
            Column::Group => format!("{:<size$}", tail(text, size)),
            _ if column.is_text() => format!("{text:<size$.size$}"),
            _ => format!("{text:>size$.size$}"),
        }
    };
    let titles = columns.iter().map(|column| {
        let text = column.layout().0;
        let text = match (*column == app.options.sort, app.options.ascending) {
            (false, _) => text.to_owned(),
            (true, false) => format!("[{text}]"),
            (true, true) => format!("[{text}^]"),
        };
        cell(*column, &text)
    });
    canvas.line(&titles.collect::<Vec<_>>().join(" "), TITLE);
    app.rows = canvas.left().max(1);
    let selected = app.selected();
    app.top = app
        .top
        .min(selected)
        .max((selected + 1).saturating_sub(app.rows));
    for (index, line) in app.lines.iter().enumerate().skip(app.top).take(app.rows) {
        let cells: Vec<_> = columns
            .iter()
            .map(|column| cell(*column, &clean(&line.cell(*column))))
            .collect();
        let style = match line.subject {
            _ if index == selected => TITLE,
            Subject::Group(_) => BOLD,
            Subject::Process(_) => PLAIN,
        };
        canvas.line(&cells.join(" "), style);
    }
    if app.lines.is_empty() {
        canvas.line(
            &format!(
                "  no process matches `{}`: / changes the filter",
                app.options.filter
            ),
            PLAIN,
        );
    }
}

fn title(app: &App, sample: &Sample, width: usize) -> String {
    let all = sample.processes.len();
    let mut parts = vec![match app.options.filter.as_str() {
        "" => format!("jumbo top: {all} processes"),
        filter => {
            let shown = app
                .lines
                .iter()
                .filter(|line| matches!(line.subject, Subject::Process(_)));
            format!(
                "jumbo top: {} of {all} processes, filter `{filter}`",
                shown.count()
            )
        }
    }];
    if sample.hidden > 0 && app.options.filter.is_empty() {
        parts.push(format!("{} {}", sample.hidden, why_hidden()));
    }
    if sample.held_back > 0 {
        parts.push(format!("{} hold their memory back", sample.held_back));
    }
    let every = format!("every {} s", app.interval.as_secs_f64());
    let left = parts.join(", ");
    let blanks = width
        .saturating_sub(left.chars().count() + every.len())
        .max(2);
    format!("{left}{:blanks$}{every}", "")
}

/// Reason and remedy for unreadable processes, to follow their number.
pub(super) fn why_hidden() -> &'static str {
    match rustix::process::geteuid().is_root() {
        true => "unread, for lack of CAP_SYS_PTRACE",
        false => "of other users unread: run it as root",
    }
}

/// Rate of an event per second.
fn rate(rates: Option<&Rates>, name: &str) -> String {
    let value = rates.and_then(|rates| rates.events.get(name));
    value.map_or(NONE.to_owned(), |value| count(*value))
}

fn count(value: f64) -> String {
    match value {
        0.0 => "0".to_owned(),
        value if value < 10.0 => format!("{value:.1}"),
        value if value < 100_000.0 => format!("{value:.0}"),
        value => format!("{:.0}k", value / 1e3),
    }
}

/// Summary of the host in four lines.
pub(super) fn summary(host: &HostSample) -> Vec<String> {
    let memory = &host.memory;
    let rates = host.rates.as_ref();
    let pools = host.pools.iter().map(|pool| {
        let size = pool.size;
        match pool.total.0 {
            0 => format!("{size}: none"),
            total => {
                let more = match (pool.reserved.0, pool.surplus.0) {
                    (0, 0) => String::new(),
                    (reserved, surplus) => format!(", {reserved} reserved, {surplus} surplus"),
                };
                format!("{size}: {} of {total} free{more}", pool.free)
            }
        }
    });
    let pools = pools.collect::<Vec<_>>().join("; ");
    let stall = rates.and_then(|rates| rates.stall);
    let stall = stall.map_or("unknown".to_owned(), |(some, full)| {
        format!("{:.1}% {:.1}%", some * 100.0, full * 100.0)
    });
    let huge = match (host.free_huge, host.pmd) {
        (Some(huge), Some(size)) => {
            format!("{} of it in blocks of {size}", percent(huge, host.free))
        }
        _ => "in blocks of unknown size".to_owned(),
    };
    let enabled = host.thp.as_ref().and_then(|thp| thp.anon(thp.pmd_size));
    let enabled = enabled.map_or("unknown", |choice| choice.current.as_str());
    let of = |name| rate(rates, name);
    vec![
        format!(
            "Memory  {} of {} available, {} free, {huge}",
            memory.available, memory.total, host.free
        ),
        format!(
            "Huge    {} of {} anon, {} of {} shared; PSI {stall}",
            percent(memory.anon_huge, memory.anon),
            memory.anon,
            percent(memory.shmem_huge, memory.shmem),
            memory.shmem
        ),
        format!("Pools   {}", if pools.is_empty() { "none" } else { &pools }),
        format!(
            "THP     {enabled}; a second: {} faulted, {} fell back, {} collapsed, {} split",
            of("thp_fault_alloc"),
            of("thp_fault_fallback"),
            of("thp_collapse_alloc"),
            of("thp_split_page"),
        ),
    ]
}

/// Formats a table without indentation.
fn table(titles: &str, rows: Vec<Vec<String>>) -> Vec<String> {
    let lines = view::lines(WIDTH, |view| view.table(titles, rows));
    lines
        .iter()
        .map(|line| line.replacen("  ", "", 1))
        .collect()
}

/// Tables of folio sizes and counters.
fn tables(host: &HostSample) -> Vec<String> {
    let rates = host.rates.as_ref();
    let or_none = |value: Option<String>| value.unwrap_or_else(|| NONE.to_owned());
    let sizes = host
        .thp
        .iter()
        .flat_map(|thp| thp.sizes.iter().map(move |size| (thp, size)));
    let rows = sizes.map(|(thp, (size, control))| {
        let word = |choice: Option<&Choice>| or_none(choice.map(|choice| choice.current.clone()));
        let number = control.stats.get("nr_anon").map(u64::to_string);
        let rate = |name: &str| {
            or_none(rates.and_then(|it| Some(count(*it.folios.get(size)?.get(name)?))))
        };
        let events = [
            "anon_fault_alloc",
            "anon_fault_fallback",
            "shmem_alloc",
            "split",
            "swpout",
        ];
        let words = [
            word(thp.anon(*size)),
            word(thp.shared(*size)),
            or_none(number),
        ];
        let words = [size.to_string()].into_iter().chain(words);
        words.chain(events.map(rate)).collect()
    });
    let titles = "<Folios|>ENABLED|>SHMEM|>FOLIOS|>FAULT/s|>FALLBACK/s|>SHMEM/s|>SPLIT/s|>SWAP/s";
    let mut lines = table(titles, rows.collect());
    let of = |name| rate(rates, name);
    lines.push(format!(
        "Events  a second: {} page faults, {} compaction stalls, {} in vain, {} moved",
        of("pgfault"),
        of("compact_stall"),
        of("compact_fail"),
        of("pgmigrate_success"),
    ));
    lines.push(format!(
        "Files   {} of page cache in huge folios; page tables take {}",
        host.memory.file_huge, host.memory.page_tables
    ));
    lines
}

fn host_page(app: &mut App, canvas: &mut Canvas<'_>) {
    let Some(sample) = &app.sample else {
        return;
    };
    let host = &sample.host;
    let base = base_page(&Root::host());
    let zones = host.zones.iter().map(|zone| {
        let huge = host
            .pmd
            .and_then(|pmd| Some(zone.whole(pmd, base)?.bytes(pmd)));
        let free = zone.free(base);
        let share = huge.map_or(NONE.to_owned(), |huge| percent(huge, free));
        let (node, name) = (zone.node.to_string(), zone.name.clone());
        vec![String::new(), node, name, free.to_string(), share]
    });
    let zones = table("<Zones|>NODE|>ZONE|>FREE|>HUGE BLOCKS", zones.collect());
    let missing = host.missing.iter();
    let missing = missing.map(|missing| format!("  {}: {}", missing.what, missing.why));
    let title = ["jumbo top: the host".to_owned()].into_iter();
    let lines = title
        .chain(summary(host))
        .chain(tables(host))
        .chain(zones)
        .chain(missing);
    text(canvas, lines.collect(), &mut app.scroll);
}

/// Details of a process: the plan of `jumbo promote`, and the page of `jumbo status -p`.
fn detail(details: &ProcessDetails, width: usize) -> Vec<String> {
    let ProcessDetails { detail, plan } = details;
    let mut lines = vec![format!("{} {}", detail.pid, clean(&detail.name))];
    lines.extend(view::lines(width, |view| {
        match plan {
            Err(why) => view.fact("Promote", why)?,
            Ok(plan) if plan.is_empty() => view.fact("Promote", "would gain nothing")?,
            Ok(plan) => {
                let (gain, cost) = (plan.gain, plan.cost);
                view.fact(
                    "Promote",
                    format!("{gain} would be huge, for {cost} more memory"),
                )?;
            }
        }
        let heap = plan.iter().filter_map(|plan| plan.kinds.get(&Kind::Heap));
        let left = heap.flat_map(|part| &part.left);
        view.lines(left.map(|(reason, bytes)| format!("  {bytes} stay {}", left_out(reason))))?;
        show_process(view, detail)?;
        view::missing(view, "Not shown", &detail.missing)
    }));
    lines
}

const HELP: &str = "\
jumbo top: help
Keys     arrows, j k, PgUp PgDn, Home End   move
         < > s        sort by another column, the one in brackets; R reverses
         /            filter by name, command, user, group or PID; Esc drops it
         t            tree by control group; Space folds a group, * all of them
         Enter        one process: plan, kinds, reasons, mappings
         p u          promote a process, undo that: shows the plan, then asks
         Tab          the host: folio sizes, counters, zones
         ? q          this help; back, or quit
Columns  RESIDENT     anonymous, shared and hugetlb memory, and mapped files
         HUGE SHARE   on huge pages, of memory that can be: all but files
         GAIN         private memory that could be, an estimate: on base pages
                      in mappings that hold a huge page. Enter has it exactly
         WASTE        huge and not known to be touched, at most: of programs
                      under jumbo run; of others it is not known
         -            not known: not read yet, or another user's process
Cost     Processes are looked into each 5 s at most, large ones less often:
         all of these reads together aim at 0.5 % of a CPU.
Host     PSI: time in which some, and all, tasks waited for memory. THP: huge
         pages that faults got, or got base pages instead of, a second; huge
         pages that were collapsed from base pages, and that were split.";
