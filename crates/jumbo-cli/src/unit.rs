//! `jumbo unit`: a drop-in for a systemd unit, whose command stays unchanged.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;

use crate::run::{StandingOptions, preload, standing};
use crate::view::{Stdout, tell};

/// Print a drop-in that puts a systemd unit on huge pages
///
/// The unit's ExecStart and its main process stay as they are: the drop-in sets the environment
/// that `jumbo run` would. There is no report.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  sudo mkdir /etc/systemd/system/redis-server.service.d
  jumbo unit redis-server |
    sudo tee /etc/systemd/system/redis-server.service.d/jumbo.conf
  sudo systemctl daemon-reload && sudo systemctl restart redis-server

To undo it, remove the file, and do the last line again.")]
pub(crate) struct Args {
    /// The unit; without a suffix a service
    #[arg(value_parser = unit)]
    name: String,

    /// Take options from FILE, or from a profile known by NAME
    #[arg(long, value_name = "FILE|NAME")]
    profile: Option<PathBuf>,
}

/// Parses a unit name (systemd.unit(5)).
pub(crate) fn unit(typed: &str) -> Result<String, String> {
    let is_known = |c: char| c.is_ascii_alphanumeric() || ":-_.\\@".contains(c);
    if typed.is_empty() || !typed.chars().all(is_known) {
        return Err(String::from("systemd has no unit of such a name"));
    }
    let suffix = if typed.contains('.') { "" } else { ".service" };
    Ok(format!("{typed}{suffix}"))
}

pub(crate) fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let options = match &args.profile {
        Some(profile) => StandingOptions::Typed(profile),
        None => StandingOptions::Default,
    };
    let library = preload()?;
    let library = library
        .to_str()
        .context("cannot use a library whose path is not UTF-8")?;
    if let Some(folder) = closed_folder(Path::new(library)) {
        let folder = folder.display();
        tell(&format!(
            "{folder} is closed to other users: the unit loads the library only as its owner or root; \
             hint: install jumbo for all users"
        ));
    }
    let mut variables = vec![("LD_PRELOAD", library.to_owned())];
    variables.extend(standing(&options, None, false)?);
    let mut text = format!(
        "# /etc/systemd/system/{}.d/jumbo.conf, by jumbo {}\n\
         # These replace variables of the same names in the unit: add the values that it has.\n\
         [Service]\n",
        args.name,
        env!("CARGO_PKG_VERSION")
    );
    for (name, value) in variables {
        text += &format!("Environment=\"{name}={}\"\n", escaped(&value));
    }
    Stdout::lock().write_all(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// Finds a folder above the library that other users may not enter.
fn closed_folder(library: &Path) -> Option<&Path> {
    let is_closed =
        |folder: &&Path| fs::metadata(folder).is_ok_and(|of| of.mode() & libc::S_IXOTH == 0);
    library.ancestors().skip(1).find(is_closed)
}

/// Escapes a value for double quotes. `%` begins a specifier; `$` is a plain character
/// (systemd.exec(5)).
fn escaped(value: &str) -> String {
    value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('%', "%%")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_values_are_valid_for_systemd() {
        assert_eq!(unit("redis").unwrap(), "redis.service");
        assert_eq!(unit("a@b.service").unwrap(), "a@b.service");
        assert!(unit("").is_err() && unit("a b").is_err() && unit("../x").is_err());
        assert_eq!(escaped(r#"$LIB 5% "\"#), r#"$LIB 5%% \"\\"#);
    }
}
