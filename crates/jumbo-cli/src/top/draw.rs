//! Drawing of the screen from the state: [`draw`]. Colour alone never has a meaning, and all text
//! is ASCII, for any terminal.

use ratatui_core::buffer::Buffer;
use ratatui_core::layout::{Constraint, Layout, Rect};
use ratatui_core::style::{Color, Modifier, Style};
use ratatui_core::text::{Line, Span};
use ratatui_core::widgets::{StatefulWidget, Widget as _};
use ratatui_widgets::paragraph::Paragraph;
use ratatui_widgets::table::{Row, Table, TableState};

use super::collect::{HostSample, Rates, Sample};
use super::model::{Column, Subject};
use super::{App, Page};
use crate::view::{clean, or_none, percent};

const TITLE: Style = Style::new().add_modifier(Modifier::REVERSED);
const LABEL: Style = Style::new().fg(Color::Cyan).add_modifier(Modifier::BOLD);
const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);

/// A line that begins with a highlighted label.
fn fact(text: &str) -> Line<'static> {
    let text = clean(text).to_string();
    let end = text.find("  ").unwrap_or(0);
    let (label, rest) = text.split_at(end);
    Line::from_iter([
        Span::styled(label.to_owned(), LABEL),
        Span::raw(rest.to_owned()),
    ])
}

/// Draws one line; its style extends to the end of the line.
fn line(text: &str, style: Style, area: Rect, buffer: &mut Buffer) {
    let area = Rect {
        height: area.height.min(1),
        ..area
    };
    Paragraph::new(clean(text))
        .style(style)
        .render(area, buffer);
}

/// Splits an area behind its first `lines` lines.
fn split(area: Rect, lines: usize) -> [Rect; 2] {
    let lines = u16::try_from(lines).unwrap_or(u16::MAX);
    Layout::vertical([Constraint::Length(lines), Constraint::Fill(1)]).areas(area)
}

/// Draws the whole screen. Scrolls the list so that the selected line is visible.
pub(super) fn draw(app: &mut App, buffer: &mut Buffer) {
    let area = buffer.area;
    let [above, below] = split(area, usize::from(area.height).saturating_sub(1));
    match &app.page {
        Page::List => list(app, above, buffer),
        Page::Help => {
            let lines = HELP.lines().map(str::to_owned);
            text(lines.collect(), &mut app.scroll, above, buffer);
        }
        Page::Status(_, title, read) => {
            let lines = match read {
                None => vec!["reading ...".to_owned()],
                Some(Err(error)) => vec![error.to_string()],
                Some(Ok(view)) => view.on_screen(area.width.into()),
            };
            let lines = [title.clone()].into_iter().chain(lines).collect();
            text(lines, &mut app.scroll, above, buffer);
        }
    }
    line(&foot(app), TITLE, below, buffer);
}

/// The last line: an error, the filter, or the keys.
fn foot(app: &App) -> String {
    match &app.page {
        _ if let Some(error) = &app.error => error.to_string(),
        _ if app.typing => format!("Filter: {}_   Enter keep   Esc drop", app.options.filter),
        Page::List => KEYS.to_owned(),
        Page::Help => "q back   arrows scroll".to_owned(),
        Page::Status(..) => "q back   arrows scroll   r read again".to_owned(),
    }
}

/// Keys of the list, in 80 columns.
const KEYS: &str = "? help  / filter  <> sort  t tree  Enter detail  Tab host  q quit";

/// Draws scrollable lines of text; the first is the title.
fn text(lines: Vec<String>, scroll: &mut usize, area: Rect, buffer: &mut Buffer) {
    let [title, rest] = split(area, 1);
    let (first, lines) = lines.split_first().unzip();
    line(first.map_or("", String::as_str), TITLE, title, buffer);
    let lines: Vec<_> = lines
        .unwrap_or_default()
        .iter()
        .map(|text| fact(text))
        .collect();
    *scroll = (*scroll).min(lines.len().saturating_sub(rest.height.into()));
    let offset = u16::try_from(*scroll).unwrap_or(u16::MAX);
    Paragraph::new(lines)
        .scroll((offset, 0))
        .render(rest, buffer);
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

fn list(app: &mut App, area: Rect, buffer: &mut Buffer) {
    let width = usize::from(area.width);
    let Some(sample) = &app.sample else {
        return line("jumbo top: reading ...", TITLE, area, buffer);
    };
    let mut head = vec![Line::styled(
        clean(&title(app, sample, width)).to_string(),
        BOLD,
    )];
    head.extend(summary(&sample.host).iter().map(|text| fact(text)));
    let [above, area] = split(area, head.len());
    Paragraph::new(head).render(above, buffer);

    let columns = columns(width, app.options.tree);
    let fixed: usize = columns.iter().map(|column| column.layout().1 + 1).sum();
    let room = (width + 1).saturating_sub(fixed);
    let name = match (columns.contains(&Column::Command), app.options.tree) {
        (false, _) => room,
        // The tree needs wide names; the command line gets the other half.
        (true, true) => room / 2,
        (true, false) => 5,
    };
    let widths = columns
        .iter()
        .map(|column| match (column, column.layout().1) {
            (Column::Command, _) => Constraint::Fill(1),
            (Column::Name, size) => {
                Constraint::Length(u16::try_from(size + name).unwrap_or(u16::MAX))
            }
            (_, size) => Constraint::Length(u16::try_from(size).unwrap_or(u16::MAX)),
        });
    let cell = |column: Column, text: String| match column {
        Column::Group => Line::raw(tail(&text, column.layout().1)),
        _ if column.is_text() => Line::raw(text),
        _ => Line::raw(text).right_aligned(),
    };
    let titles = columns.iter().map(|column| {
        let text = column.layout().0;
        let text = match (*column == app.options.sort, app.options.ascending) {
            (false, _) => text.to_owned(),
            (true, false) => format!("[{text}]"),
            (true, true) => format!("[{text}^]"),
        };
        cell(*column, text)
    });
    let rows = app.lines.iter().map(|line| {
        let cells = columns.iter();
        let cells = cells.map(|column| cell(*column, clean(&line.cell(*column)).to_string()));
        Row::new(cells).style(match line.subject {
            Subject::Group(_) => BOLD,
            Subject::Process(_) => Style::new(),
        })
    });
    let table = Table::new(rows, widths).header(Row::new(titles).style(TITLE));
    let selected = app.selected();
    let state = TableState::new().with_offset(app.top);
    let mut state = state.with_selected(selected);
    let table = table.row_highlight_style(TITLE);
    StatefulWidget::render(table, area, buffer, &mut state);
    let [_, below] = split(area, 1);
    (app.top, app.rows) = (state.offset(), usize::from(below.height).max(1));
    if app.lines.is_empty() {
        let filter = &app.options.filter;
        let none = format!("  no process matches `{filter}`: / changes the filter");
        line(&none, Style::new(), below, buffer);
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
    or_none(value.map(|value| count(*value)))
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

const HELP: &str = "\
jumbo top: help
Keys     arrows, j k, PgUp PgDn, Home End   move
         < > s        sort by another column, the one in brackets; R reverses
         /            filter by name, command, user, group or PID; Esc drops it
         t            tree by control group; Space folds a group, * all of them
         Enter        one process: the plan of jumbo promote, kinds, reasons,
                      mappings
         Tab          the host, as jumbo status shows it
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
