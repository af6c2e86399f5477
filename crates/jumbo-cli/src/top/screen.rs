//! The terminal: [`Screen`]. A drop or a panic restores it.

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

/// Original settings of the terminal.
static ORIGINAL_SETTINGS: OnceLock<Termios> = OnceLock::new();

/// The terminal in cbreak mode, with the alternate screen.
pub(super) struct Screen(Terminal<CrosstermBackend<BufWriter<Stdout>>>);

impl Screen {
    /// Takes the terminal, on standard input and output.
    pub(super) fn enter() -> io::Result<Self> {
        let before = tcgetattr(stdin())?;
        let _ = ORIGINAL_SETTINGS.set(before);
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let tell = std::panic::take_hook();
            // A panic of any thread aborts the process.
            std::panic::set_hook(Box::new(move |info| {
                restore();
                tell(info);
            }));
        });
        set_cbreak()?;
        let backend = CrosstermBackend::new(BufWriter::new(io::stdout()));
        let terminal = Terminal::new(backend).inspect_err(|_| restore())?;
        Ok(Self(terminal))
    }

    /// Draws the changes; returns the width.
    pub(super) fn draw(&mut self, draw: impl FnOnce(&mut Buffer)) -> io::Result<usize> {
        let frame = self.0.draw(|frame| draw(frame.buffer_mut()))?;
        Ok(usize::from(frame.area.width))
    }

    /// Restores the terminal before a stop.
    pub(super) fn leave(&self) {
        restore();
    }

    /// Sets up the terminal again, and draws all of it next time.
    pub(super) fn enter_again(&mut self) -> io::Result<()> {
        set_cbreak()?;
        self.0.clear()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

/// Sets the terminal to unbuffered input without echo. Ctrl-C and Ctrl-Z still send signals.
fn set_cbreak() -> io::Result<()> {
    let mut settings = tcgetattr(stdin())?;
    settings.local_modes -= LocalModes::ICANON | LocalModes::ECHO | LocalModes::IEXTEN;
    settings.input_modes -= InputModes::IXON;
    tcsetattr(stdin(), OptionalActions::Drain, &settings)?;
    write(ENTER)
}

/// Restores the terminal by system calls alone: another thread may hold any lock.
fn restore() {
    let _ = write(LEAVE);
    if let Some(before) = ORIGINAL_SETTINGS.get() {
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
