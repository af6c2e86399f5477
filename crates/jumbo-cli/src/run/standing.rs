//! Environment of a program that jumbo covers without `jumbo run`: [`standing()`].
//!
//! For images, containers and systemd units. Without a launcher there is no report, and no pool
//! that processes share.

use std::path::Path;

use anyhow::{anyhow, bail};
use clap::{Args as _, FromArgMatches as _};
use jumbo_host::kernel::{Root, base_page};
use jumbo_host::policy::{Orders, Reach, RunPlan};

use super::args::RunSettings;
use super::launch::host;
use super::options::Options;
use super::profile::{self, FileOption};
use super::{Failure, library};

/// Source of the options for [`standing()`].
pub(crate) enum StandingOptions<'a> {
    /// All defaults.
    Default,
    /// A profile of [`profile::known`].
    Known(&'a str),
    /// A profile as typed: a name or a file.
    Typed(&'a Path),
}

/// Value of [`Orders::VARIABLE`]. `container`: an engine starts the program in a container.
pub(crate) fn standing(options: &StandingOptions<'_>, container: bool) -> anyhow::Result<String> {
    let failed = |failure: Failure| anyhow!(failure.message);
    let entries = match options {
        StandingOptions::Default => Ok(Vec::new()),
        StandingOptions::Known(name) => profile::entries_of_known(name),
        StandingOptions::Typed(profile) => profile::entries(profile),
    };
    let mut settings = settings(entries.map_err(failed)?).map_err(failed)?;
    if let Some(pool) = &mut settings.pool {
        // Without a launcher nothing accounts for a shared pool.
        pool.each = true;
    }
    let root = Root::host();
    if let Some(reason) = Reach::on_base_pages(base_page(&root)).and_then(|none| none.reason()) {
        bail!("jumbo does nothing on this host: {reason}");
    }
    let host = host(&root, &settings).map_err(failed)?;
    let plan = RunPlan::new(settings.requested, settings.pool, host, &Reach::Reached);
    let orders = Orders {
        libs: settings.libs.as_deref(),
        container,
        ..plan.orders
    };
    Ok(orders.to_string())
}

fn settings(entries: Vec<FileOption>) -> Result<RunSettings, Failure> {
    let words = entries.into_iter().filter_map(|entry| entry.word);
    let command = Options::augment_args(clap::Command::new("run").no_binary_name(true));
    let options = command.args_override_self(true).try_get_matches_from(words);
    let options = options.and_then(|matches| Options::from_arg_matches(&matches));
    RunSettings::of(options.map_err(|error| Failure::own(error.to_string()))?)
}

/// Path of the library for LD_PRELOAD.
pub(crate) fn preload() -> anyhow::Result<std::path::PathBuf> {
    library::find().map_err(|failure| anyhow!(failure.message))
}
