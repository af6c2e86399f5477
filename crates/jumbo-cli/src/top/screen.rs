//! The terminal: [`Screen`]. As it was once this is dropped, and after a panic.

use std::io::{self, BufWriter, Stdout};
use std::sync::{Once, OnceLock};

use ratatui_core::buffer::Buffer;
use ratatui_core::terminal::Terminal;
use ratatui_crossterm::CrosstermBackend;
use rustix::stdio::{stdin, stdout};
use rustix::termios::{InputModes, LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};

/// The alternate screen, without a cursor.
const ENTER: &[u8] = b"\x1b[?1049h\x1b[?25l";
const LEAVE: &[u8] = b"\x1b[0m\x1b[?25h\x1b[?1049l";

/// The settings of the terminal before.
static BEFORE: OnceLock<Termios> = OnceLock::new();

/// A terminal that is drawn on.
pub(super) struct Screen(Terminal<CrosstermBackend<BufWriter<Stdout>>>);

impl Screen {
    /// Takes the terminal, on standard input and output.
    pub(super) fn enter() -> io::Result<Self> {
        let before = tcgetattr(stdin())?;
        let _ = BEFORE.set(before);
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let tell = std::panic::take_hook();
            // Of any thread: the process aborts.
            std::panic::set_hook(Box::new(move |info| {
                put_back();
                tell(info);
            }));
        });
        take()?;
        let backend = CrosstermBackend::new(BufWriter::new(io::stdout()));
        // What was taken is put back where this fails.
        let terminal = Terminal::new(backend).inspect_err(|_| put_back())?;
        Ok(Self(terminal))
    }

    /// Draws what has changed; gives the width.
    pub(super) fn draw(&mut self, draw: impl FnOnce(&mut Buffer)) -> io::Result<usize> {
        let frame = self.0.draw(|frame| draw(frame.buffer_mut()))?;
        Ok(usize::from(frame.area.width))
    }

    /// Gives the terminal back for a while.
    pub(super) fn leave(&self) {
        put_back();
    }

    /// Takes it again, whatever became of it.
    pub(super) fn enter_again(&mut self) -> io::Result<()> {
        take()?;
        self.0.clear()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        put_back();
    }
}

/// Keys come one by one and unseen; Ctrl-C and Ctrl-Z are signals still.
fn take() -> io::Result<()> {
    let mut settings = tcgetattr(stdin())?;
    settings.local_modes -= LocalModes::ICANON | LocalModes::ECHO | LocalModes::IEXTEN;
    settings.input_modes -= InputModes::IXON;
    tcsetattr(stdin(), OptionalActions::Drain, &settings)?;
    write(ENTER)
}

/// By system calls alone: another thread may hold any lock.
fn put_back() {
    let _ = write(LEAVE);
    if let Some(before) = BEFORE.get() {
        let _ = tcsetattr(stdin(), OptionalActions::Now, before);
    }
}

fn write(mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let written = rustix::io::write(stdout(), bytes)?;
        bytes = &bytes[written..];
    }
    Ok(())
}
