//! Human-readable output: aligned tables with plain headings. On a terminal headings are bold, and
//! lines fit its width.

mod table;

use std::borrow::Cow;
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

/// Writer of headings, lines and tables.
pub(crate) struct View<'a> {
    out: Box<dyn Write + 'a>,
    bold: bool,
    /// Columns of the terminal; `None` in a pipe.
    width: Option<usize>,
    /// True until the first write.
    fresh: bool,
}

impl View<'_> {
    /// Standard output. Bold unless it is piped or NO_COLOR is set (<https://no-color.org>).
    pub(crate) fn stdout() -> Self {
        let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let is_terminal = io::stdout().is_terminal();
        Self {
            bold: is_terminal && !plain,
            width: is_terminal.then(width),
            out: Box::new(io::BufWriter::new(Stdout::lock())),
            fresh: true,
        }
    }

    /// A heading with an empty line above it, unless it is the first line.
    pub(crate) fn heading(&mut self, text: &str) -> io::Result<()> {
        let text = self.fold(&clean(text), 2);
        let above = if std::mem::take(&mut self.fresh) {
            ""
        } else {
            "\n"
        };
        if self.bold {
            writeln!(self.out, "{above}\x1b[1m{text}\x1b[0m")
        } else {
            writeln!(self.out, "{above}{text}")
        }
    }

    pub(crate) fn line(&mut self, text: impl AsRef<str>) -> io::Result<()> {
        let text = text.as_ref();
        let indent = text.chars().take_while(|c| *c == ' ').count();
        self.line_hung(text, indent + 2)
    }

    pub(crate) fn lines<T: AsRef<str>>(
        &mut self,
        lines: impl IntoIterator<Item = T>,
    ) -> io::Result<()> {
        lines.into_iter().try_for_each(|line| self.line(line))
    }

    /// A heading with lines below it; nothing if there are no lines.
    pub(crate) fn list(
        &mut self,
        title: &str,
        lines: impl IntoIterator<Item = String>,
    ) -> io::Result<()> {
        let mut lines = lines.into_iter().peekable();
        if lines.peek().is_some() {
            self.heading(title)?;
        }
        self.lines(lines.map(|line| format!("  {line}")))
    }

    /// One line. On a narrower terminal it is wrapped, with `hang` blanks before each next line.
    fn line_hung(&mut self, text: &str, hang: usize) -> io::Result<()> {
        self.fresh = false;
        let text = self.fold(&clean(text), hang);
        writeln!(self.out, "{text}")
    }

    fn fold(&self, text: &str, hang: usize) -> String {
        match self.width {
            Some(width) if text.chars().count() > width => {
                let rest = text.trim_start_matches(' ');
                filled(&text[..text.len() - rest.len()], rest, hang, width)
            }
            _ => text.to_owned(),
        }
    }

    /// `NAME   text`, with the names in a column.
    pub(crate) fn fact(&mut self, name: &str, text: impl AsRef<str>) -> io::Result<()> {
        let name = format!("{name:<14}  ");
        let text = format!("{name}{}", text.as_ref());
        self.line_hung(&text, name.chars().count())
    }

    /// Rows under column titles, indented by two blanks. `columns` has the titles, separated by
    /// `|`, each after `<` (aligned to the left) or `>`.
    pub(crate) fn table<R: IntoIterator<Item = String>>(
        &mut self,
        columns: &str,
        rows: impl IntoIterator<Item = R>,
    ) -> io::Result<()> {
        let cells = |row: R| row.into_iter().map(|cell| clean(&cell).into_owned());
        let rows = rows.into_iter().map(|row| cells(row).collect());
        let grid = Grid::new(columns, rows.collect());
        for line in grid.lines(self.width) {
            self.fresh = false;
            writeln!(self.out, "{line}")?;
        }
        Ok(())
    }

    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.out.flush()
    }
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

/// Columns of the terminal on standard output.
fn width() -> usize {
    columns(io::stdout()).unwrap_or(WIDTH)
}

/// Lists the parts that are missing from a page, with the reasons.
pub(crate) fn missing<'a>(
    view: &mut View,
    title: &str,
    missing: impl IntoIterator<Item = &'a Missing>,
) -> io::Result<()> {
    let line = |Missing { what, why }: &Missing| format!("{what}: {why}");
    view.list(title, missing.into_iter().map(line))
}

/// Prints a page on standard output: as JSON, or as text by `show`.
pub(crate) fn page<P: serde::Serialize>(
    as_json: bool,
    page: &P,
    show: impl FnOnce(&mut View, &P) -> io::Result<()>,
) -> anyhow::Result<ExitCode> {
    if as_json {
        json(page)?;
    } else {
        let mut view = View::stdout();
        show(&mut view, page)?;
        view.finish()?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Lines of a page for a terminal of that width, without bold.
pub(crate) fn lines(width: usize, show: impl FnOnce(&mut View) -> io::Result<()>) -> Vec<String> {
    let mut text = Vec::new();
    let mut view = View {
        out: Box::new(&mut text),
        bold: false,
        width: Some(width),
        fresh: true,
    };
    // Writes to memory cannot fail.
    let _ = show(&mut view);
    drop(view);
    String::from_utf8_lossy(&text)
        .lines()
        .map(str::to_owned)
        .collect()
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

/// `first` and the words of `text`, wrapped at [`WIDTH`] columns and aligned below the end of
/// `first`, without a final newline.
pub(crate) fn wrapped(first: &str, text: &str) -> String {
    filled(first, text, first.chars().count(), WIDTH)
}

/// [`wrapped`] at `width` columns, with `indent` blanks before each next line.
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

/// Bytes, or a dash for an unknown value.
pub(crate) fn bytes(bytes: Option<Bytes>) -> String {
    bytes.map_or_else(|| NONE.to_owned(), |bytes| bytes.to_string())
}

/// Bytes, or a dash for zero.
pub(crate) fn nonzero_bytes(value: Bytes) -> String {
    bytes(Some(value).filter(|value| *value > Bytes(0)))
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
    fn lines_are_wrapped_at_eighty_columns_and_aligned() {
        let text = "one two ".repeat(20);
        let lines = wrapped("  hint: ", text.trim_end());
        assert!(lines.lines().all(|line| line.chars().count() <= 80));
        assert!(
            lines
                .lines()
                .skip(1)
                .all(|line| line.starts_with("        "))
        );
        let words = |text: &str| {
            text.split_whitespace()
                .map(String::from)
                .collect::<Vec<_>>()
        };
        assert_eq!(words(&lines)[1..], words(&text));
        assert_eq!(
            wrapped("a ", &"b".repeat(90)),
            format!("a {}", "b".repeat(90))
        );
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
