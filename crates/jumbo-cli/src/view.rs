//! Output of the commands. A command builds one document, [`View`], of headings, lines and tables.
//! Writers turn it into text, into lines for the screen of `jumbo top`, and (in [`crate::page`])
//! into HTML. On a terminal headings are bold, and lines fit its width.

mod table;

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use jumbo::units::Bytes;
use jumbo_host::status::Missing;
use rustix::termios::tcgetwinsize;

use table::Grid;

/// The cell of a value that does not exist, or that this user may not see.
pub(crate) const NONE: &str = "-";

/// Standard output. Its errors name it.
pub(crate) struct Stdout(io::StdoutLock<'static>);

impl Stdout {
    pub(crate) fn lock() -> Self {
        Self(io::stdout().lock())
    }
}

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).map_err(unwritten)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(unwritten)
    }
}

fn unwritten(error: io::Error) -> io::Error {
    io::Error::new(
        error.kind(),
        format!("cannot write to standard output: {error}"),
    )
}

/// Document of a command: headings, lines and tables. A command builds it once; it is written as
/// text, as lines for the screen of `jumbo top`, and as HTML ([`crate::page`]).
#[derive(Debug, Default)]
pub(crate) struct View(Vec<Block>);

#[derive(Debug)]
pub(crate) enum Block {
    Heading(String),
    Line(Line),
    /// Column titles, separated by `|`, each after `<` (aligned to the left) or `>`; rows.
    Table(String, Vec<Vec<String>>),
}

/// Text of one line.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) text: String,
    /// Blanks before each next line where it is wrapped.
    hang: usize,
    /// A pipe has prose in lines of [`WIDTH`] columns, too.
    is_prose: bool,
}

impl View {
    /// A heading with an empty line above it, unless it is the first block.
    pub(crate) fn heading(&mut self, text: &str) {
        self.0.push(Block::Heading(clean(text).into_owned()));
    }

    pub(crate) fn line(&mut self, text: impl AsRef<str>) {
        let text = text.as_ref();
        self.hung(text, indent(text) + 2, false);
    }

    /// A line that is wrapped at [`WIDTH`] columns in a pipe, too.
    pub(crate) fn prose(&mut self, text: &str) {
        self.hung(text, indent(text) + 2, true);
    }

    /// Prose that is aligned below the end of `first`.
    pub(crate) fn item(&mut self, first: &str, text: &str) {
        self.hung(&format!("{first}{text}"), first.chars().count(), true);
    }

    pub(crate) fn lines<T: AsRef<str>>(&mut self, lines: impl IntoIterator<Item = T>) {
        lines.into_iter().for_each(|line| self.line(line));
    }

    /// A heading with lines below it; nothing if there are no lines.
    pub(crate) fn list(&mut self, title: &str, lines: impl IntoIterator<Item = String>) {
        let mut lines = lines.into_iter().peekable();
        if lines.peek().is_some() {
            self.heading(title);
        }
        self.lines(lines.map(|line| format!("  {line}")));
    }

    /// Lists the parts that are missing from a page, with the reasons.
    pub(crate) fn missing<'a>(
        &mut self,
        title: &str,
        missing: impl IntoIterator<Item = &'a Missing>,
    ) {
        let line = |Missing { what, why }: &Missing| format!("{what}: {why}");
        self.list(title, missing.into_iter().map(line));
    }

    fn hung(&mut self, text: &str, hang: usize, is_prose: bool) {
        let text = clean(text).into_owned();
        self.0.push(Block::Line(Line {
            text,
            hang,
            is_prose,
        }));
    }

    /// `NAME   text`, with the names in a column.
    pub(crate) fn fact(&mut self, name: &str, text: impl AsRef<str>) {
        let name = format!("{name:<14}  ");
        let text = format!("{name}{}", text.as_ref());
        self.hung(&text, name.chars().count(), false);
    }

    /// Rows under column titles, as [`Block::Table`] has them.
    pub(crate) fn table<R: IntoIterator<Item = String>>(
        &mut self,
        columns: &str,
        rows: impl IntoIterator<Item = R>,
    ) {
        let cells = |row: R| row.into_iter().map(|cell| clean(&cell).into_owned());
        let rows = rows.into_iter().map(|row| cells(row).collect());
        self.0
            .push(Block::Table(columns.to_owned(), rows.collect()));
    }

    /// Lines of [`View::text`] for a terminal of that width.
    pub(crate) fn on_screen(&self, width: usize) -> Vec<String> {
        let text = self.text(Some(width), false);
        text.lines().map(str::to_owned).collect()
    }

    pub(crate) fn blocks(&self) -> &[Block] {
        &self.0
    }

    /// Text of at most `width` columns; each line is whole without it. Tables are indented by two
    /// blanks.
    pub(crate) fn text(&self, width: Option<usize>, bold: bool) -> String {
        let fold = |text: &str, hang: usize, is_prose: bool| {
            let prose = is_prose.then(|| width.map_or(WIDTH, |width| width.min(WIDTH)));
            let (blanks, words) = text.split_at(indent(text));
            match prose.or(width) {
                Some(width) => filled(blanks, words, hang, width),
                None => text.to_owned(),
            }
        };
        let mut out = String::new();
        for block in &self.0 {
            let lines = match block {
                Block::Heading(text) => {
                    out += if out.is_empty() { "" } else { "\n" };
                    let text = fold(text, 2, true);
                    vec![match bold {
                        true => format!("\x1b[1m{text}\x1b[0m"),
                        false => text,
                    }]
                }
                Block::Line(line) => vec![fold(&line.text, line.hang, line.is_prose)],
                Block::Table(columns, rows) => Grid::new(columns, rows).lines(width),
            };
            lines.iter().for_each(|line| out += &format!("{line}\n"));
        }
        // Prose has no-break spaces.
        out.replace('\u{a0}', " ")
    }

    /// Writes it to standard output. Bold unless that is piped or NO_COLOR is set
    /// (<https://no-color.org>).
    pub(crate) fn print(&self) -> io::Result<()> {
        let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let is_terminal = io::stdout().is_terminal();
        let width = is_terminal.then(|| columns(io::stdout()).unwrap_or(WIDTH));
        let mut out = Stdout::lock();
        out.write_all(self.text(width, is_terminal && !plain).as_bytes())?;
        out.flush()
    }
}

/// Number of blanks that a line begins with.
fn indent(text: &str) -> usize {
    text.len() - text.trim_start_matches(' ').len()
}

/// Replaces control characters: a process chooses its own name and the names of its files, and must
/// not control the terminal of the user.
pub(crate) fn clean(text: &str) -> Cow<'_, str> {
    without(text, char::is_control)
}

/// [`clean`] for text of several lines. Names in it are cleaned before: they may contain newlines.
pub(crate) fn clean_lines(text: &str) -> Cow<'_, str> {
    without(text, |c| c.is_control() && c != '\n')
}

fn without(text: &str, control: impl Fn(char) -> bool + Copy) -> Cow<'_, str> {
    match text.contains(control) {
        true => Cow::Owned(text.replace(control, "\u{fffd}")),
        false => Cow::Borrowed(text),
    }
}

/// Columns of a terminal; `None` if the stream is no terminal.
fn columns(stream: impl rustix::fd::AsFd) -> Option<usize> {
    let columns = usize::from(tcgetwinsize(stream).ok()?.ws_col);
    // A terminal of unknown size reports 0.
    Some(if columns == 0 { WIDTH } else { columns })
}

/// Prints a page on standard output: as JSON, or as the document that `show` builds.
pub(crate) fn page<P: serde::Serialize>(
    as_json: bool,
    page: &P,
    show: impl FnOnce(&mut View, &P),
) -> anyhow::Result<ExitCode> {
    if as_json {
        json(page)?;
    } else {
        let mut view = View::default();
        show(&mut view, page);
        view.print()?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints `value` as one JSON document on standard output.
pub(crate) fn json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    writeln!(
        Stdout::lock(),
        "{}",
        escaped(serde_json::to_string_pretty(value)?)
    )?;
    Ok(())
}

/// Prints `value` as one line of JSON on standard output, and flushes it for a reader of a pipe.
pub(crate) fn json_line(value: &impl serde::Serialize) -> anyhow::Result<()> {
    let mut out = Stdout::lock();
    writeln!(out, "{}", escaped(serde_json::to_string(value)?))?;
    Ok(out.flush()?)
}

/// Escapes the control characters from DEL to U+009F, which serde_json leaves as they are.
pub(crate) fn escaped(json: String) -> String {
    let control = |c: char| ('\u{7f}'..='\u{9f}').contains(&c);
    if !json.contains(control) {
        return json;
    }
    let escape = |c| match control(c) {
        true => format!("\\u{:04x}", u32::from(c)),
        false => c.to_string(),
    };
    json.chars().map(escape).collect()
}

/// Prints a message on stderr. A write error is ignored: `eprintln!` would panic.
pub(crate) fn tell(message: &str) {
    let message = format!("jumbo: {}", clean_lines(message));
    let _ = writeln!(io::stderr(), "{}", fitted(&message));
}

/// Prints why the arguments of the command are refused, or the help, and ends this process.
pub(crate) fn refuse(error: &clap::Error) -> ! {
    let text = error.render().to_string();
    let fitted = fitted(&text);
    if error.use_stderr() && fitted != text {
        let _ = write!(io::stderr(), "{fitted}");
    } else if let Err(why) = error.print().and_then(|()| io::stdout().flush())
        && !error.use_stderr()
        && why.kind() != io::ErrorKind::BrokenPipe
    {
        tell(&unwritten(why).to_string());
        std::process::exit(1)
    }
    std::process::exit(error.exit_code())
}

/// Wraps the lines of a message that are wider than the terminal on stderr.
fn fitted(message: &str) -> String {
    let width = columns(io::stderr()).unwrap_or(usize::MAX);
    let lines = message.split('\n').map(|line| filled("", line, 2, width));
    lines.collect::<Vec<_>>().join("\n")
}

/// The error and its causes. A cause that the message already ends with is not repeated.
pub(crate) fn in_words(error: &anyhow::Error) -> String {
    let mut words = error.to_string();
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        if !words.ends_with(&cause) {
            words = format!("{words}: {cause}");
        }
    }
    words
}

/// Reports whether the reader of standard output closed its end.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let kind = cause
            .downcast_ref::<io::Error>()
            .map(io::Error::kind)
            .or_else(|| cause.downcast_ref::<serde_json::Error>()?.io_error_kind());
        kind == Some(io::ErrorKind::BrokenPipe)
    })
}

/// Maximum columns of a line, except for longer words.
pub(crate) const WIDTH: usize = 80;

/// `first` and the words of `text`, wrapped at `width` columns, with `indent` blanks before each
/// next line.
pub(crate) fn filled(first: &str, text: &str, indent: usize, width: usize) -> String {
    let (mut out, mut column) = (first.to_owned(), first.chars().count());
    for (index, word) in text.split(' ').enumerate() {
        let length = word.chars().count();
        if index > 0 && column + 1 + length > width {
            out.push_str(&format!("\n{:indent$}", ""));
            column = indent;
        } else if index > 0 {
            out.push(' ');
            column += 1;
        }
        out.push_str(word);
        column += length;
    }
    out
}

/// The value, or a dash without one.
pub(crate) fn or_none(value: Option<impl Display>) -> String {
    value.map_or_else(|| NONE.to_owned(), |value| value.to_string())
}

/// Bytes, or a dash for zero.
pub(crate) fn nonzero_bytes(value: Bytes) -> String {
    or_none(Some(value).filter(|value| *value > Bytes(0)))
}

/// A time in milliseconds below one second, else in seconds.
pub(crate) fn duration(duration: Duration) -> String {
    match duration.as_secs_f64() {
        seconds if seconds < 1.0 => format!("{:.1} ms", seconds * 1e3),
        seconds => format!("{seconds:.2} s"),
    }
}

/// A part in percent of the whole, or a dash if the whole is zero.
pub(crate) fn percent(part: Bytes, whole: Bytes) -> String {
    percent_to(0, part, whole)
}

/// [`percent`] with `digits` digits after the point.
pub(crate) fn percent_to(digits: usize, part: Bytes, whole: Bytes) -> String {
    match whole {
        Bytes(0) => NONE.to_owned(),
        // The kernel reports the two at different moments; a process may grow between.
        _ => format!(
            "{:.digits$}%",
            (100.0 * part.0 as f64 / whole.0 as f64).min(100.0)
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_a_process_has_no_control_characters() {
        let name = "a\u{1b}[31m\u{9b}7m\u{7f}\nb";
        let drives = |text: &str| text.contains(|c: char| c.is_control() && c != '\n');
        assert!(drives(name) && !clean(name).contains(char::is_control));
        assert!(!drives(&clean_lines(name)) && clean_lines(name).contains('\n'));
        let json = escaped(serde_json::to_string(name).unwrap());
        assert!(!drives(&json), "{json:?}");
        assert_eq!(serde_json::from_str::<String>(&json).unwrap(), name);
    }

    #[test]
    fn prose_is_wrapped_at_eighty_columns_and_aligned() {
        let shown = |first: &str, text: &str, width| {
            let mut view = View::default();
            view.item(first, text);
            view.text(width, false)
        };
        let text = "one two ".repeat(20);
        let lines = shown("  hint: ", text.trim_end(), None);
        assert!(lines.lines().all(|line| line.chars().count() <= 80));
        let rest = || lines.lines().skip(1);
        assert!(rest().count() > 1 && rest().all(|line| line.starts_with("        o")));
        let words = |text: &str| {
            text.split_whitespace()
                .map(String::from)
                .collect::<Vec<_>>()
        };
        assert_eq!(words(&lines)[1..], words(&text));
        assert_eq!(
            shown("a ", &"b".repeat(90), Some(100)),
            format!("a\n  {}\n", "b".repeat(90))
        );
        let mut view = View::default();
        view.prose(&format!("  {text}no\u{a0}break"));
        view.line(&text);
        let lines = view.text(Some(40), true);
        assert!(lines.lines().all(|line| line.chars().count() <= 40));
        assert!(lines.contains("\n    t") && lines.contains("no break"));
        assert_eq!(view.text(None, true).lines().last(), Some(&*text));
    }

    #[test]
    fn a_cause_is_printed_once() {
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        let error = anyhow::Error::from(jumbo_host::kernel::FileError::Io {
            operation: "write",
            path: "/run/file".into(),
            source: full(),
        });
        assert_eq!(in_words(&error), "cannot write /run/file: no storage space");
        let error = anyhow::Error::from(full()).context("cannot show it");
        assert_eq!(in_words(&error), "cannot show it: no storage space");
    }
}
