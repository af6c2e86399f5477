//! `jumbo top`: processes and control groups by their huge pages, on a terminal.
//!
//! - [`collect`]: samples, in a thread of its own: keys never wait.
//! - [`model`]: the lines of the list, from a sample and the user's choices.
//! - [`draw`]: the screen. [`keys`]: the keyboard.
//! - [`act`]: details of a process, and `jumbo promote`, in the background.
//!
//! The state and the loop are here. Invariant: however the command ends, but by SIGKILL, the terminal is as it was.

mod act;
mod collect;
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
use act::{Chosen, Look, News, Running, What};
use collect::{Collector, Host, Process, Sample};
use keys::{Decoder, Key};
use model::{Choice, Column, Group, Line, Who};
use screen::Screen;

/// Watch processes and control groups by their huge pages
///
/// SHARE is the part of a process's memory that is on huge pages, GAIN the memory that `p` (jumbo promote)
/// could put there, WASTE huge memory that a program under jumbo run has not touched. Above: memory, pools,
/// fragmentation, pressure, and the kernel's counters a second. `?` has the keys. Docs: docs/top.md
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
    #[arg(long, value_name = "SECONDS", value_parser = interval, allow_hyphen_values = true, default_value = "2")]
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

/// The JSON.
#[derive(Serialize)]
struct Document<'a> {
    host: &'a Host,
    processes: &'a [Process],
    /// By path, each with all below it.
    groups: BTreeMap<String, Group>,
    hidden: usize,
    held_back: usize,
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

/// One sample, with rates.
fn once(args: &Args, mut collector: Collector) -> anyhow::Result<ExitCode> {
    // The first look at the counters.
    collector.sample(false)?;
    std::thread::sleep(args.interval);
    let sample = collector.sample(true)?;
    let page = Document {
        host: &sample.host,
        processes: &sample.processes,
        groups: model::groups(&sample.processes),
        hidden: sample.hidden,
        held_back: sample.held_back,
    };
    let choice = Choice::new(args.sort, args.tree);
    view::page(args.json, &page, |view, _| show(view, &sample, &choice))
}

/// The sample, as text.
fn show(view: &mut View, sample: &Sample, choice: &Choice) -> io::Result<()> {
    view.lines(draw::summary(&sample.host))?;
    if sample.hidden > 0 {
        view.line(format!(
            "{} {}",
            counted(sample.hidden as u64, "process"),
            draw::why_hidden()
        ))?;
    }
    view.line("")?;
    let columns = draw::columns(80, choice.tree);
    let titles = columns.iter().map(|column| {
        let side = if column.is_text() { '<' } else { '>' };
        format!("{side}{}", column.layout().0)
    });
    let titles = titles.collect::<Vec<_>>().join("|");
    let lines = choice.lines(&sample.processes);
    let row = |line: &Line| {
        columns
            .iter()
            .map(|column| line.cell(*column))
            .collect::<Vec<_>>()
    };
    view.table(&titles, lines.iter().map(row))
}

/// A message of another thread to the loop.
enum Event {
    Sample(Result<Box<Sample>, FileError>),
    News(News),
}

/// Tells the loop, and wakes it.
#[derive(Clone)]
struct Outbox(Sender<Event>, Arc<OwnedFd>);

impl Outbox {
    fn send(&self, event: Event) {
        // The loop may have ended.
        let _ = self.0.send(event);
        let _ = rustix::io::write(&*self.1, &1_u64.to_ne_bytes());
    }
}

/// The part that is shown.
#[derive(Default)]
enum Page {
    #[default]
    List,
    Host,
    Help,
    /// `None` until it is read.
    Detail(Chosen, Option<Result<Box<Look>, String>>),
}

/// The state.
#[derive(Default)]
struct App {
    choice: Choice,
    interval: Duration,
    sample: Option<Box<Sample>>,
    lines: Vec<Line>,
    /// The line that is selected, wherever it moves.
    selection: Option<Who>,
    /// The first line that is shown, and how many fit.
    top: usize,
    rows: usize,
    /// Of a page of text.
    scroll: usize,
    page: Page,
    /// The filter is being typed.
    typing: bool,
    message: Vec<String>,
    /// The plan that the message shows.
    question: Option<(What, Chosen)>,
    /// A plan is made or carried out.
    busy: bool,
    width: usize,
    ended: bool,
}

/// The work that a key asks for.
#[derive(Debug, PartialEq)]
enum Work {
    Look(u32),
    Plan(What, Chosen),
    CarryOut(What, Chosen),
    End,
}

impl App {
    fn new(args: &Args) -> Self {
        Self {
            choice: Choice::new(args.sort, args.tree),
            interval: args.interval,
            rows: 1,
            width: 80,
            ..Self::default()
        }
    }

    /// The index of the selected line. One that is gone leaves the line in its place.
    fn selected(&self) -> usize {
        let is_it = |line: &Line| Some(&line.who) == self.selection.as_ref();
        self.lines
            .iter()
            .position(is_it)
            .unwrap_or(self.top)
            .min(self.lines.len().saturating_sub(1))
    }

    fn select(&mut self, index: usize) {
        let index = index.min(self.lines.len().saturating_sub(1));
        self.selection = self.lines.get(index).map(|line| line.who.clone());
    }

    fn refresh(&mut self) {
        let processes = self
            .sample
            .as_ref()
            .map_or(&[][..], |sample| &sample.processes);
        self.lines = self.choice.lines(processes);
    }

    /// The selected process, or that of the page.
    fn chosen(&self) -> Option<Chosen> {
        if let Page::Detail(chosen, _) = &self.page {
            return Some(chosen.clone());
        }
        let line = self.lines.get(self.selected())?;
        match line.who {
            Who::Process(pid) => Some(Chosen::new(pid, &line.name)),
            Who::Group(_) => None,
        }
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Sample(Ok(sample)) => {
                self.sample = Some(sample);
                self.refresh();
            }
            Event::Sample(Err(error)) => self.message = vec![error.to_string()],
            Event::News(News::Look(pid, result)) => {
                if let Page::Detail(chosen, look) = &mut self.page
                    && chosen.pid == pid
                {
                    *look = Some(result);
                }
            }
            Event::News(News::Plan(lines, can_be_done)) => {
                self.busy = false;
                self.message = lines;
                if !can_be_done || self.message.iter().any(|line| line.contains(": nothing ")) {
                    self.question = None;
                }
            }
            Event::News(News::Done(lines)) => {
                (self.busy, self.message) = (false, lines);
            }
        }
    }

    fn key(&mut self, key: Key) -> Option<Work> {
        if self.typing {
            self.type_filter(key);
            return None;
        }
        if self.busy {
            return matches!(key, Key::Escape | Key::Char('q')).then_some(Work::End);
        }
        if let Some((what, chosen)) = self.question.take() {
            self.message.clear();
            if matches!(key, Key::Char('y' | 'Y')) {
                (self.busy, self.message) = (true, vec![format!("{} {}", chosen.pid, chosen.name)]);
                return Some(Work::CarryOut(what, chosen));
            }
            return None;
        }
        self.message.clear();
        match (key, &self.page) {
            (Key::Char('p'), Page::List | Page::Detail(..)) => return self.plan(What::Promote),
            (Key::Char('u'), Page::List | Page::Detail(..)) => return self.plan(What::Undo),
            (Key::Char('q') | Key::Escape, Page::Host | Page::Help | Page::Detail(..)) => {
                self.open(Page::List)
            }
            (Key::Tab, Page::Host) => self.open(Page::List),
            (Key::Char('r'), Page::Detail(chosen, _)) => return Some(Work::Look(chosen.pid)),
            (Key::Char('?' | 'h'), _) => self.open(Page::Help),
            (Key::Tab, _) => self.open(Page::Host),
            (Key::Char('q'), Page::List) => self.ended = true,
            (key, Page::List) => return self.list_key(key),
            (key, _) => self.scroll = moved(key, self.scroll, self.rows, usize::MAX - self.rows),
        }
        None
    }

    fn list_key(&mut self, key: Key) -> Option<Work> {
        let columns = draw::columns(self.width, self.choice.tree);
        match key {
            Key::Char('/') => self.typing = true,
            Key::Escape => self.choice.filter.clear(),
            Key::Char('>' | 's') => self.choice.move_sort(&columns, true),
            Key::Char('<' | 'S') => self.choice.move_sort(&columns, false),
            Key::Char('R' | 'I') => self.choice.ascending = !self.choice.ascending,
            Key::Char('t') => self.choice.tree = !self.choice.tree,
            Key::Char('*') if self.choice.folded.is_empty() => {
                let below = self.lines.iter().filter(|line| line.depth > 0);
                self.choice.folded = below.filter_map(Line::path).collect();
            }
            Key::Char('*') => self.choice.folded.clear(),
            Key::Char(' ' | '+' | '-') | Key::Left | Key::Right => self.fold(),
            Key::Enter => match self.chosen() {
                Some(chosen) => {
                    let pid = chosen.pid;
                    self.open(Page::Detail(chosen, None));
                    return Some(Work::Look(pid));
                }
                None => self.fold(),
            },
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

    fn fold(&mut self) {
        if let Some(path) = self.lines.get(self.selected()).and_then(Line::path)
            && !self.choice.folded.remove(&path)
        {
            self.choice.folded.insert(path);
        }
    }

    fn plan(&mut self, what: What) -> Option<Work> {
        let Some(chosen) = self.chosen() else {
            self.message = vec![
                "that is a group; `jumbo promote --cgroup PATH` promotes all of it".to_owned(),
            ];
            return None;
        };
        self.question = Some((what, chosen.clone()));
        (self.busy, self.message) = (true, vec![format!("{} {}", chosen.pid, chosen.name)]);
        Some(Work::Plan(what, chosen))
    }

    fn type_filter(&mut self, key: Key) {
        match key {
            Key::Char(c) => self.choice.filter.push(c),
            Key::Backspace => drop(self.choice.filter.pop()),
            Key::Enter => self.typing = false,
            Key::Escape => {
                self.choice.filter.clear();
                self.typing = false;
            }
            _ => {}
        }
        self.refresh();
    }
}

/// The place that a key moves to.
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

/// The loop.
fn watch(args: &Args, collector: Collector) -> anyhow::Result<ExitCode> {
    // Before any thread: all of them inherit the mask.
    let signals = Signals::take().context("cannot read signals from a descriptor")?;
    let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .context("cannot make an eventfd")?;
    let (sender, events) = channel();
    let outbox = Outbox(sender, Arc::new(wake));
    let (wanted, asked) = channel();
    let samples = outbox.clone();
    std::thread::spawn(move || {
        collector.run(&asked, |sample| {
            samples.send(Event::Sample(sample.map(Box::new)))
        })
    });
    let mut screen = Screen::enter().context("cannot draw on the terminal")?;
    let running = Running::default();
    let mut app = App::new(args);
    let ended_by = turn(
        &mut app,
        &mut screen,
        &signals,
        &events,
        |work| {
            let (outbox, running, wanted) = (outbox.clone(), running.clone(), wanted.clone());
            std::thread::spawn(move || {
                let (news, pid) = match work {
                    Work::End => return running.end(),
                    Work::Look(pid) => (act::look(pid), pid),
                    Work::Plan(what, chosen) => (running.plan(what, &chosen), chosen.pid),
                    Work::CarryOut(what, chosen) => (running.carry_out(what, &chosen), chosen.pid),
                };
                outbox.send(Event::News(news));
                let _ = wanted.send(pid);
            });
        },
        &outbox,
    );
    running.end();
    drop(screen);
    Ok(match ended_by.context("cannot draw on the terminal")? {
        Some(signal) => end_by(signal),
        None => ExitCode::SUCCESS,
    })
}

/// Draws, waits, and answers, until the user or a signal ends it.
fn turn(
    app: &mut App,
    screen: &mut Screen,
    signals: &Signals,
    events: &Receiver<Event>,
    work: impl Fn(Work),
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
            // The terminal has hung up where nothing is there.
            let Ok(read @ 1..) = rustix::io::read(stdin, &mut bytes) else {
                return Ok(Some(libc::SIGHUP));
            };
            for key in decoder.keys(&bytes[..read]) {
                app.key(key).into_iter().for_each(&work);
            }
        } else if keyboard.intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL) {
            return Ok(Some(libc::SIGHUP));
        }
        if app.ended {
            return Ok(None);
        }
    }
}
