//! The variables `HUGETLB_*`: [`settings`], read once, when the library is loaded.

use std::env;
use std::ffi::OsString;
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::sync::OnceLock;

use jumbo::units::PageSize;

/// Level of HUGETLB_VERBOSE from which a message is printed; the default is 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    Error = 1,
    Warning = 2,
}

/// The variables that the library obeys.
#[derive(Debug, Default)]
pub(crate) struct Settings {
    verbose: u8,
    /// HUGETLB_DEFAULT_PAGE_SIZE.
    pub(crate) size: Option<PageSize>,
    /// HUGETLB_PATH: folders on hugetlbfs, in this order.
    pub(crate) path: Option<OsString>,
    /// HUGETLB_SHM.
    pub(crate) shm: bool,
    /// HUGETLB_NO_PREFAULT: no page is touched ahead.
    pub(crate) no_prefault: bool,
    /// HUGETLB_NO_RESERVE: MAP_NORESERVE.
    pub(crate) no_reserve: bool,
}

const RUN: &str = "this library replaces no malloc and moves no text; hint: start the program by `hugectl` or `jumbo run`";
const SHARE: &str = "no need of it: `jumbo run --text=shared` has one copy for all processes";

/// The variables without effect here, with the reason. `jumbo run` has what the first ones ask for.
const REFUSED: &[(&str, &str)] = &[
    ("HUGETLB_MORECORE", RUN),
    ("HUGETLB_ELFMAP", RUN),
    ("HUGETLB_FORCE_ELFMAP", RUN),
    (
        "HUGETLB_MORECORE_SHRINK",
        "no need of it: the heap of `jumbo run` returns memory, see --keep",
    ),
    (
        "HUGETLB_MORECORE_HEAPBASE",
        "the heap of `jumbo run` has no single address",
    ),
    ("HUGETLB_SHARE", SHARE),
    ("HUGETLB_SHARE_PATH", SHARE),
    (
        "HUGETLB_MINIMAL_COPY",
        "no need of it: `jumbo run` copies the pages that are resident",
    ),
    (
        "HUGETLB_FEATURES",
        "the library asks the kernel itself for what it can do",
    ),
];

/// The library is loaded: programs may change their environment later.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = {
    extern "C" fn start() {
        settings();
    }
    start
};

pub(crate) fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| {
        // A program with more privilege than its caller obeys none of the caller's variables.
        // SAFETY: getauxval(3) takes a number, and reads what the kernel passed to the program.
        let is_secure = unsafe { libc::getauxval(libc::AT_SECURE) } != 0;
        let (settings, messages) = read(&|name| env::var_os(name).filter(|_| !is_secure));
        for message in messages {
            settings.tell(Level::Error, &message);
        }
        settings
    })
}

/// Prints a message to stderr.
pub(crate) fn tell(level: Level, message: &str) {
    settings().tell(level, message);
}

impl Settings {
    fn tell(&self, level: Level, message: &str) {
        if self.verbose >= level as u8 {
            let line = format!("libhugetlbfs (jumbo): {message}\n");
            let _ = std::io::stderr().write_all(line.as_bytes());
        }
    }
}

fn read(variable: &dyn Fn(&str) -> Option<OsString>) -> (Settings, Vec<String>) {
    let mut messages = Vec::new();
    let mut settings = Settings {
        verbose: Level::Error as u8,
        ..Settings::default()
    };
    // Other programs of a script get the variables too, and obey none.
    if let Some(names) = variable("HUGETLB_RESTRICT_EXE") {
        let own = env::current_exe().ok();
        let own = own.as_deref().and_then(|path| path.file_name());
        let own = own.map_or(&b""[..], |name| name.as_bytes());
        if !names
            .as_bytes()
            .split(|byte| *byte == b':')
            .any(|name| name == own)
        {
            return (settings, messages);
        }
    }
    let text = |name| variable(name).map(|value| value.to_string_lossy().into_owned());
    if let Some(level) = text("HUGETLB_VERBOSE") {
        match level.parse() {
            Ok(level @ 0..=99) => settings.verbose = level,
            _ => messages.push(format!("HUGETLB_VERBOSE={level}: expected 0 to 99")),
        }
    }
    if variable("HUGETLB_DEBUG").is_some() {
        settings.verbose = 99;
    }
    if let Some(size) = text("HUGETLB_DEFAULT_PAGE_SIZE") {
        match size.parse() {
            Ok(size) => settings.size = Some(size),
            Err(error) => messages.push(format!("HUGETLB_DEFAULT_PAGE_SIZE={size}: {error}")),
        }
    }
    settings.path = variable("HUGETLB_PATH");
    let yes = |name| variable(name).is_some_and(|value| value != "no" && value != "0");
    settings.shm = yes("HUGETLB_SHM");
    settings.no_prefault = yes("HUGETLB_NO_PREFAULT");
    settings.no_reserve = yes("HUGETLB_NO_RESERVE");
    // Under `jumbo run` the program has what these ask for, or its report says why not.
    let is_run = variable("JUMBO_ORDERS").is_some();
    for (name, why) in REFUSED {
        if let Some(value) = text(name).filter(|value| value != "no" && !is_run) {
            messages.push(format!("{name}={value} has no effect: {why}"));
        }
    }
    (settings, messages)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(variables: &[(&str, &str)]) -> (Settings, Vec<String>) {
        read(&|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| value.into())
        })
    }

    #[test]
    fn variables_are_obeyed_or_named() {
        let (settings, messages) = with(&[
            ("HUGETLB_SHM", "yes"),
            ("HUGETLB_DEFAULT_PAGE_SIZE", "1G"),
            ("HUGETLB_VERBOSE", "many"),
            ("HUGETLB_MORECORE", "yes"),
            ("HUGETLB_ELFMAP", "no"),
        ]);
        assert!(settings.shm && !settings.no_reserve);
        assert_eq!(settings.size, Some(PageSize::SIZE_1G));
        assert_eq!(messages.len(), 2, "{messages:?}");
        assert!(messages[1].contains("HUGETLB_MORECORE=yes has no effect"));
    }

    #[test]
    fn other_programs_than_the_listed_ones_obey_nothing() {
        let shm = ("HUGETLB_SHM", "yes");
        let (settings, messages) =
            with(&[shm, ("HUGETLB_RESTRICT_EXE", "a:b"), ("HUGETLB_SHARE", "1")]);
        assert!(!settings.shm && messages.is_empty());
        let own = env::current_exe().unwrap();
        let own = format!("a:{}", own.file_name().unwrap().to_str().unwrap());
        assert!(with(&[shm, ("HUGETLB_RESTRICT_EXE", &own)]).0.shm);
    }

    #[test]
    fn each_variable_has_a_row_in_the_document() {
        let document = include_str!("../../../docs/libhugetlbfs.md");
        for name in REFUSED.iter().map(|(name, _)| *name).chain([
            "HUGETLB_RESTRICT_EXE",
            "HUGETLB_VERBOSE",
            "HUGETLB_DEBUG",
            "HUGETLB_DEFAULT_PAGE_SIZE",
            "HUGETLB_PATH",
            "HUGETLB_SHM",
            "HUGETLB_NO_PREFAULT",
            "HUGETLB_NO_RESERVE",
        ]) {
            assert!(document.contains(&format!("`{name}`")), "{name}");
        }
    }
}
