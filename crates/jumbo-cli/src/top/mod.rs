//! `jumbo top`: processes and control groups by their huge pages, on a terminal.
//!
//! - [`collect`]: samples, in a thread of its own, so that keys never wait.
//! - [`model`]: the lines of the list, from a sample and the options of the list.
//! - [`details`]: the pages of `jumbo status`, in the background.
//! - [`draw`]: the screen. [`keys`]: the keyboard.
//!
//! The state and the event loop are here. Invariant: the terminal is restored at every end of the
//! command except SIGKILL.

mod collect;
mod details;
mod draw;
mod keys;
mod model;
mod screen;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io::{self, IsTerminal as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use anyhow::Context as _;
use jumbo::units::counted;
use jumbo_host::kernel::process::Signals;
use jumbo_host::kernel::{FileError, Root};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use serde::Serialize;

use crate::signal::{end_by, poll};
use crate::value::interval;
use crate::view::{self, View};
use collect::{Collector, Sample};
use details::Whose;
use keys::{Decoder, Key};
use model::{Column, GroupSums, Line, ListOptions, Subject};
use screen::Screen;

/// Watch processes and control groups by their huge pages
///
/// SHARE is the part of a process's memory that is on huge pages, GAIN the memory that `jumbo
/// promote` could put there, WASTE huge memory that a program under jumbo run has not touched.
/// Above: memory, pools, fragmentation, pressure, and the kernel's counters a second. `?` has the
/// keys. Docs: docs/top.md
///
/// As a normal user it shows what it may, and says what it may not.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo top
  jumbo top --tree --sort waste
  jumbo top --once --sort gain | head
  jumbo top --json | jq '.processes[] | select(.glance.gain > 1e9) | .name'

Exit status: 0 done; 1 failed; 2 wrong usage, or no terminal; 128+N ended by signal N.")]
pub(crate) struct Args {
    /// Seconds between two samples
    #[arg(long, value_name = "SECONDS", value_parser = interval, allow_hyphen_values = true,
        default_value = "2")]
    interval: Duration,

    /// Sort by this column
    #[arg(long, value_name = "COLUMN", default_value = "gain")]
    sort: Column,

    /// A tree of control groups, with sums
    #[arg(long)]
    tree: bool,

    /// Print one sample as text, with the rates of an interval
    #[arg(long)]
    once: bool,

    /// Print one sample as JSON
    #[arg(long)]
    json: bool,
}

/// The output of `--json`.
#[derive(Serialize)]
struct Document<'a> {
    #[serde(flatten)]
    sample: &'a Sample,
    /// Control groups by path; each includes the groups below it.
    groups: BTreeMap<String, GroupSums>,
}

pub(crate) fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let collector = Collector::new(Root::host(), args.interval)?;
    if args.once || args.json {
        return once(args, collector);
    }
    let is_dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb" || term.is_empty());
    if is_dumb || !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        view::tell(
            "top draws on a terminal, and standard input, standard output or TERM is none\n\
             hint: `jumbo top --once` prints text, `jumbo top --json` JSON",
        );
        return Ok(ExitCode::from(2));
    }
    watch(args, collector)
}

/// Prints one sample, with rates.
fn once(args: &Args, mut collector: Collector) -> anyhow::Result<ExitCode> {
    // Rates need two readings of the counters.
    collector.sample(false)?;
    std::thread::sleep(args.interval);
    let sample = collector.sample(true)?;
    let page = Document {
        sample: &sample,
        groups: model::groups(&sample.processes),
    };
    let options = ListOptions::new(args.sort, args.tree);
    view::page(args.json, &page, |view, _| show(view, &sample, &options))
}

/// Prints the sample as text.
fn show(view: &mut View, sample: &Sample, options: &ListOptions) {
    view.lines(draw::summary(&sample.host));
    if sample.hidden > 0 {
        view.line(format!(
            "{} {}",
            counted(sample.hidden as u64, "process"),
            draw::why_hidden()
        ));
    }
    view.line("");
    let columns = draw::columns(80, options.tree);
    let titles = columns.iter().map(|column| {
        let side = if column.is_text() { '<' } else { '>' };
        format!("{side}{}", column.layout().0)
    });
    let titles = titles.collect::<Vec<_>>().join("|");
    let lines = options.lines(&sample.processes);
    let row = |line: &Line| {
        columns
            .iter()
            .map(|column| line.cell(*column))
            .collect::<Vec<_>>()
    };
    view.table(&titles, lines.iter().map(row))
}

/// Message of another thread to the event loop.
enum Event {
    Sample(Result<Box<Sample>, FileError>),
    Status(Whose, Result<View, FileError>),
}

/// Sender of events, which also wakes the event loop.
#[derive(Clone)]
struct Outbox(Sender<Event>, Arc<OwnedFd>);

impl Outbox {
    fn send(&self, event: Event) {
        // The event loop may have ended.
        let _ = self.0.send(event);
        let _ = rustix::io::write(&*self.1, &1_u64.to_ne_bytes());
    }
}

#[derive(Default)]
enum Page {
    #[default]
    List,
    Help,
    /// Title; the page, or `None` until it is read.
    Status(Whose, String, Option<Result<View, FileError>>),
}

#[derive(Default)]
struct App {
    options: ListOptions,
    interval: Duration,
    sample: Option<Box<Sample>>,
    lines: Vec<Line>,
    /// Selected line; it stays selected when it moves.
    selection: Option<Subject>,
    /// Index of the first visible line, and the number of visible lines.
    top: usize,
    rows: usize,
    /// Scroll offset of a text page.
    scroll: usize,
    page: Page,
    /// The user is typing the filter.
    typing: bool,
    /// Error of the last sample.
    error: Option<FileError>,
    width: usize,
    ended: bool,
}

impl App {
    fn new(args: &Args) -> Self {
        Self {
            options: ListOptions::new(args.sort, args.tree),
            interval: args.interval,
            rows: 1,
            width: 80,
            ..Self::default()
        }
    }

    /// Index of the selected line. If that has disappeared, the line at its index is selected.
    fn selected(&self) -> usize {
        let is_it = |line: &Line| Some(&line.subject) == self.selection.as_ref();
        self.lines
            .iter()
            .position(is_it)
            .unwrap_or(self.top)
            .min(self.lines.len().saturating_sub(1))
    }

    fn select(&mut self, index: usize) {
        let index = index.min(self.lines.len().saturating_sub(1));
        self.selection = self.lines.get(index).map(|line| line.subject.clone());
    }

    fn refresh(&mut self) {
        let processes = self
            .sample
            .as_ref()
            .map_or(&[][..], |sample| &sample.processes);
        self.lines = self.options.lines(processes);
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Sample(Ok(sample)) => {
                self.sample = Some(sample);
                self.refresh();
            }
            Event::Sample(Err(error)) => self.error = Some(error),
            Event::Status(of, read) => {
                if let Page::Status(whose, _, page) = &mut self.page
                    && *whose == of
                {
                    *page = Some(read);
                }
            }
        }
    }

    /// Handles a key; returns whose page is to be read.
    fn key(&mut self, key: Key) -> Option<Whose> {
        if self.typing {
            self.type_filter(key);
            return None;
        }
        self.error = None;
        match (key, &self.page) {
            (Key::Char('q') | Key::Escape, Page::Help | Page::Status(..))
            | (Key::Tab, Page::Status(Whose::Host, ..)) => self.open(Page::List),
            (Key::Char('r'), Page::Status(whose, ..)) => return Some(*whose),
            (Key::Char('?' | 'h'), _) => self.open(Page::Help),
            (Key::Tab, _) => return self.open_status(Whose::Host, "jumbo top: the host"),
            (Key::Char('q'), Page::List) => self.ended = true,
            (key, Page::List) => return self.list_key(key),
            (key, _) => self.scroll = moved(key, self.scroll, self.rows, usize::MAX - self.rows),
        }
        None
    }

    fn list_key(&mut self, key: Key) -> Option<Whose> {
        let columns = draw::columns(self.width, self.options.tree);
        match key {
            Key::Char('/') => self.typing = true,
            Key::Escape => self.options.filter.clear(),
            Key::Char('>' | 's') => self.options.move_sort(&columns, true),
            Key::Char('<' | 'S') => self.options.move_sort(&columns, false),
            Key::Char('R' | 'I') => self.options.ascending = !self.options.ascending,
            Key::Char('t') => self.options.tree = !self.options.tree,
            Key::Char('*') if self.options.folded.is_empty() => {
                let below = self.lines.iter().filter(|line| line.depth > 0);
                self.options.folded = below.filter_map(Line::path).collect();
            }
            Key::Char('*') => self.options.folded.clear(),
            Key::Char(' ' | '+' | '-') | Key::Left | Key::Right => self.fold(),
            Key::Enter => {
                let line = self.lines.get(self.selected());
                if let Some(line) = line
                    && let Subject::Process(pid) = line.subject
                {
                    let title = format!("{pid} {}", line.name);
                    return self.open_status(Whose::Process(pid), &title);
                }
                self.fold();
            }
            key => {
                let last = self.lines.len().saturating_sub(1);
                self.select(moved(key, self.selected(), self.rows, last));
                return None;
            }
        }
        self.refresh();
        None
    }

    fn open(&mut self, page: Page) {
        (self.page, self.scroll) = (page, 0);
    }

    /// Opens a page of `jumbo status`, and returns whose page is to be read.
    fn open_status(&mut self, whose: Whose, title: &str) -> Option<Whose> {
        self.open(Page::Status(whose, title.to_owned(), None));
        Some(whose)
    }

    fn fold(&mut self) {
        if let Some(path) = self.lines.get(self.selected()).and_then(Line::path)
            && !self.options.folded.remove(&path)
        {
            self.options.folded.insert(path);
        }
    }

    fn type_filter(&mut self, key: Key) {
        match key {
            Key::Char(c) => self.options.filter.push(c),
            Key::Backspace => drop(self.options.filter.pop()),
            Key::Enter => self.typing = false,
            Key::Escape => {
                self.options.filter.clear();
                self.typing = false;
            }
            _ => {}
        }
        self.refresh();
    }
}

/// Position after a movement key.
fn moved(key: Key, at: usize, page: usize, last: usize) -> usize {
    let to = match key {
        Key::Up | Key::Char('k') => at.saturating_sub(1),
        Key::Down | Key::Char('j') => at + 1,
        Key::PageUp => at.saturating_sub(page),
        Key::PageDown => at + page,
        Key::Home | Key::Char('g') => 0,
        Key::End | Key::Char('G') => last,
        _ => at,
    };
    to.min(last)
}

/// Starts the threads and runs the event loop.
fn watch(args: &Args, collector: Collector) -> anyhow::Result<ExitCode> {
    // Before any thread starts: threads inherit the signal mask.
    let signals = Signals::take().context("cannot read signals from a descriptor")?;
    let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .context("cannot make an eventfd")?;
    let (sender, events) = channel();
    let outbox = Outbox(sender, Arc::new(wake));
    let (wanted, asked) = channel();
    let samples = outbox.clone();
    let thread = std::thread::Builder::new;
    let collect = move || {
        collector.run(&asked, |sample| {
            samples.send(Event::Sample(sample.map(Box::new)))
        })
    };
    thread().spawn(collect).context("cannot make a thread")?;
    let mut screen = Screen::enter().context("cannot draw on the terminal")?;
    let mut app = App::new(args);
    let ended_by = event_loop(
        &mut app,
        &mut screen,
        &signals,
        &events,
        |whose| {
            let (to, wanted) = (outbox.clone(), wanted.clone());
            let read = move || {
                to.send(Event::Status(whose, details::read(whose)));
                if let Whose::Process(pid) = whose {
                    let _ = wanted.send(pid);
                }
            };
            thread().spawn(read).map(drop)
        },
        &outbox,
    );
    drop(screen);
    Ok(match ended_by.context("cannot draw on the terminal")? {
        Some(signal) => end_by(signal),
        None => ExitCode::SUCCESS,
    })
}

/// Draws the screen and handles events until the user quits; returns the signal that ended it.
fn event_loop(
    app: &mut App,
    screen: &mut Screen,
    signals: &Signals,
    events: &Receiver<Event>,
    inspect: impl Fn(Whose) -> io::Result<()>,
    outbox: &Outbox,
) -> io::Result<Option<i32>> {
    let mut decoder = Decoder::default();
    loop {
        app.width = screen.draw(|buffer| draw::draw(app, buffer))?;
        #[cfg(debug_assertions)]
        if std::env::var_os("JUMBO_TOP_PANIC").is_some() && app.sample.is_some() {
            panic!("asked for by JUMBO_TOP_PANIC");
        }
        let stdin = rustix::stdio::stdin();
        let mut ready = [
            PollFd::new(&stdin, PollFlags::IN),
            PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN),
            PollFd::new(&*outbox.1, PollFlags::IN),
        ];
        poll(&mut ready, None)?;
        let [keyboard, ..] = ready.map(|fd| fd.revents());
        let _ = rustix::io::read(&*outbox.1, &mut [0; 8]);
        while let Some(signal) = signals.next()? {
            match signal.number {
                libc::SIGCHLD | libc::SIGWINCH | libc::SIGURG | libc::SIGPIPE => {}
                libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU => {
                    screen.leave();
                    signals.stop_by(signal.number);
                    screen.enter_again()?;
                }
                libc::SIGCONT => screen.enter_again()?,
                number => return Ok(Some(number)),
            }
        }
        events.try_iter().for_each(|event| app.event(event));
        if keyboard.intersects(PollFlags::IN) {
            let mut bytes = [0; 256];
            // A read of 0 bytes: the terminal has hung up.
            let Ok(read @ 1..) = rustix::io::read(stdin, &mut bytes) else {
                return Ok(Some(libc::SIGHUP));
            };
            for key in decoder.keys(&bytes[..read]) {
                app.key(key).map_or(Ok(()), &inspect)?;
            }
        } else if keyboard.intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL) {
            return Ok(Some(libc::SIGHUP));
        }
        if app.ended {
            return Ok(None);
        }
    }
}
