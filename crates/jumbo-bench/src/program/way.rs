//! Ways to start a program: [`Way`].

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use jumbo::units::Bytes;

use super::PLAIN;
use crate::Error;
use crate::launch::{Launch, Peer};
use crate::table::Missing;

/// A named way to start a program.
#[derive(Clone, Debug)]
pub struct Way {
    /// Part of the names of its figures.
    pub key: String,
    /// Options, or the name of the peer.
    pub name: String,
    launch: Launch,
}

/// Mode of `jumbo run` without options.
const DEFAULT_MODE: &str = "default";

const MODES: [(&str, &str); 5] = [
    (DEFAULT_MODE, ""),
    ("glibc", "--heap=glibc"),
    ("pool", POOL_OPTION),
    ("text", "--text=shared"),
    ("background", "--free=background"),
];

/// The pool has 5/4 of the program's plain size, plus this.
const POOL_OPTION: &str = "--pool";
const POOL_OVERHEAD_BYTES: u64 = 64 << 20;

/// The only variable that never belongs to the user.
const JUMBO_VARIABLES: [&str; 1] = ["JUMBO_ORDERS"];

impl Way {
    pub(crate) fn plain() -> Self {
        Self::of(PLAIN, Launch::Plain)
    }

    pub(crate) fn of(key: &str, launch: Launch) -> Self {
        Self {
            key: key.to_owned(),
            name: launch.name(),
            launch,
        }
    }

    /// `jumbo run` in a mode of [`Way::modes`], or with literal options.
    ///
    /// # Errors
    /// [`Error::Way`]: unknown mode.
    pub fn mode(name: &str) -> Result<Self, Error> {
        if name.starts_with('-') {
            let letters = name.split(|c: char| !c.is_ascii_alphanumeric());
            let letters: Vec<_> = letters.filter(|word| !word.is_empty()).collect();
            return Ok(Self::of(&letters.join("_"), Launch::Jumbo(name.to_owned())));
        }
        let options = MODES.iter().find(|(known, _)| *known == name);
        let options = options.map(|(_, options)| Launch::Jumbo((*options).to_owned()));
        let launch = options.ok_or_else(|| {
            let known: Vec<_> = Self::modes().collect();
            let known = known.join(", ");
            Error::Way(format!(
                "there is no mode `{name}`: {known}, or options of `jumbo run` (-...)"
            ))
        })?;
        Ok(Self::of(name, launch))
    }

    /// Names of the modes.
    pub fn modes() -> impl Iterator<Item = &'static str> {
        MODES.into_iter().map(|(name, _)| name)
    }

    /// An alternative to jumbo: one of [`Way::peers`].
    ///
    /// # Errors
    /// [`Error::Way`]: unknown, or not installed.
    pub fn peer(name: &str) -> Result<Self, Error> {
        let launch = Launch::Preload(Peer::find(name).map_err(Error::Way)?);
        // The prefix tells it from a mode.
        Ok(Self::of(&format!("peer_{name}"), launch))
    }

    /// The peers of those names, and the missing ones.
    pub fn peers_of(names: &[impl AsRef<str>]) -> (Vec<Self>, Vec<Missing>) {
        let (mut ways, mut missing) = (Vec::new(), Vec::new());
        let is_asked = |name: &&str| names.iter().any(|asked| asked.as_ref() == *name);
        for what in Self::peers().filter(is_asked) {
            match Self::peer(what) {
                Ok(way) => ways.push(way),
                Err(why) => missing.push(Missing {
                    what,
                    why: why.to_string(),
                }),
            }
        }
        (ways, missing)
    }

    /// Names of the peers.
    pub fn peers() -> impl Iterator<Item = &'static str> {
        Peer::names()
    }

    /// Name of its row.
    pub fn row(&self, key: &str) -> String {
        match self.key.as_str() {
            DEFAULT_MODE => key.to_owned(),
            way => format!("{key}_{way}"),
        }
    }

    /// Name of the row that compares this peer with the default mode.
    pub(crate) fn peer_row(&self, key: &str) -> Option<String> {
        (!self.is_jumbo()).then(|| format!("{key}_vs_{}", self.key))
    }

    pub(super) fn is_default(&self) -> bool {
        self.key == DEFAULT_MODE
    }

    pub(super) fn is_jumbo(&self) -> bool {
        matches!(self.launch, Launch::Jumbo(_))
    }

    /// Command that starts `program` of that plain size; `as_set` keeps the user's variables.
    pub(super) fn command(
        &self,
        jumbo: &Path,
        program: &OsStr,
        (as_set, size): (bool, Bytes),
    ) -> Command {
        let launch = match &self.launch {
            Launch::Jumbo(options) if options.ends_with(POOL_OPTION) => {
                let size = (size.0 + size.0 / 4 + POOL_OVERHEAD_BYTES) >> 20;
                Launch::Jumbo(format!("{options}={size}M"))
            }
            other => other.clone(),
        };
        match as_set {
            true => launch.command_without(&JUMBO_VARIABLES, jumbo, program),
            false => launch.command(jumbo, program),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::line;

    #[test]
    fn a_mode_is_a_name_or_options() {
        let typed = |name: &str, as_set| {
            let way = Way::mode(name).unwrap();
            let size = Bytes(256 << 20);
            line(&way.command(Path::new("/j"), OsStr::new("/p"), (as_set, size)))
        };
        assert_eq!(typed("default", true), "/j run --report=none -- /p");
        assert_eq!(
            typed("pool", false),
            "/j run --report=none --no-config --pool=384M -- /p"
        );
        let options = "--heap=off --maps=off";
        assert_eq!(
            typed(options, true),
            format!("/j run --report=none {options} -- /p")
        );
        assert_eq!(Way::mode(options).unwrap().row("x"), "x_heap_off_maps_off");
        assert_eq!(Way::mode("default").unwrap().row("x"), "x");
        assert!(
            Way::mode("fast")
                .unwrap_err()
                .to_string()
                .contains("background")
        );
        assert!(Way::peer("fast").is_err());
    }
}
