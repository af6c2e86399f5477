//! File for engines: [`Specification`].
//!
//! Its version is 0.5.0, the latest that podman 4.3 knows. Engines refuse unknown fields, so it has
//! only necessary ones.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use jumbo_host::policy::Orders;
use jumbo_host::whole_file::{self, Existing};
use serde::{Deserialize, Serialize};

use super::files::Files;
use crate::run::{StandingOptions, profiles, standing};

pub(super) const FILE_NAME: &str = "jumbo.json";
pub(super) const KIND: &str = "jumbo.dev/memory";
/// Device with the default options.
const DEFAULT_DEVICE: &str = "default";

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Specification {
    cdi_version: String,
    kind: String,
    pub(super) devices: Vec<Device>,
    container_edits: Mounts,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Device {
    name: String,
    container_edits: Environment,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Environment {
    env: Vec<String>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Mounts {
    mounts: Vec<Mount>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Mount {
    pub(super) host_path: PathBuf,
    pub(super) container_path: PathBuf,
    options: Vec<String>,
}

impl Mount {
    fn new(host: PathBuf, container: impl Into<PathBuf>) -> Self {
        let options = ["ro", "nosuid", "nodev", "bind"];
        Self {
            host_path: host,
            container_path: container.into(),
            options: options.map(String::from).to_vec(),
        }
    }
}

impl Device {
    fn new(name: &str, options: &StandingOptions<'_>) -> anyhow::Result<Self> {
        let orders = format!("{}={}", Orders::VARIABLE, standing(options, true)?);
        Ok(Self {
            name: name.to_owned(),
            container_edits: Environment { env: vec![orders] },
        })
    }

    /// Argument of an engine's `--device`.
    pub(super) fn full_name(&self) -> String {
        format!("{KIND}={}", self.name)
    }

    pub(super) fn variables(&self) -> impl Iterator<Item = (&str, &str)> {
        let variables = self.container_edits.env.iter();
        variables.filter_map(|variable| variable.split_once('='))
    }
}

impl Specification {
    /// Makes a device for each profile, on this host.
    pub(super) fn new(files: &Files) -> anyhow::Result<Self> {
        let mut devices = Vec::new();
        let known: Vec<_> = profiles()
            .into_iter()
            .filter(|name| is_device_name(name))
            .collect();
        if !known.iter().any(|name| name == DEFAULT_DEVICE) {
            devices.push(Device::new(DEFAULT_DEVICE, &StandingOptions::Default)?);
        }
        for name in &known {
            devices.push(Device::new(name, &StandingOptions::Known(name))?);
        }
        let mounts = vec![
            Mount::new(files.folder(), Files::IN_CONTAINERS),
            Mount::new(files.preload(), "/etc/ld.so.preload"),
        ];
        Ok(Self {
            cdi_version: String::from("0.5.0"),
            kind: String::from(KIND),
            devices,
            container_edits: Mounts { mounts },
        })
    }

    /// Reads a specification; `None` without a file.
    pub(super) fn read(path: &Path) -> anyhow::Result<Option<Self>> {
        let shown = path.display();
        let text = match fs::read_to_string(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            read => read.with_context(|| format!("cannot read {shown}"))?,
        };
        let foreign = |why: String| {
            anyhow!("{shown} is not of `jumbo cdi generate`: {why}\nhint: move it away")
        };
        let found: Self =
            serde_json::from_str(&text).map_err(|error| foreign(error.to_string()))?;
        if found.kind != KIND || found.files().is_none() && !found.mounts().is_empty() {
            return Err(foreign(format!("it has devices {}", found.kind)));
        }
        Ok(Some(found))
    }

    /// Writes the file, as a whole.
    pub(super) fn write(&self, path: &Path) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        whole_file::write(path, text.as_bytes(), 0o644, Existing::Replace)?;
        Ok(())
    }

    /// Leaves devices that change nothing: engines refuse one without any edit.
    pub(super) fn keep_names(&mut self) {
        self.container_edits.mounts.clear();
        for device in &mut self.devices {
            device.container_edits.env = vec![String::from("JUMBO=off")];
        }
    }

    /// Mounts; none where only the names were left.
    pub(super) fn mounts(&self) -> &[Mount] {
        &self.container_edits.mounts
    }

    pub(super) fn files(&self) -> Option<Files> {
        Files::at(&self.mounts().first()?.host_path)
    }
}

/// Reports whether all engines accept the name.
fn is_device_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric();
    name.starts_with(is_plain)
        && name.ends_with(is_plain)
        && name.chars().all(|c| is_plain(c) || "_.-".contains(c))
}
