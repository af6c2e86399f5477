//! `jumbo cdi show`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::anyhow;
use serde::Serialize;

use super::specification::{FILE_NAME, Specification};
use crate::view::{self, View};

/// Devices and mounts, for JSON.
#[derive(Serialize)]
struct CdiPage {
    specification: PathBuf,
    version: String,
    is_current: bool,
    mounts: Vec<MountState>,
    devices: BTreeMap<String, BTreeMap<String, String>>,
}

#[derive(Serialize)]
struct MountState {
    host: PathBuf,
    container: PathBuf,
    is_there: bool,
}

pub(super) fn main(dir: &Path, json: bool) -> anyhow::Result<ExitCode> {
    let path = dir.join(FILE_NAME);
    let none = || anyhow!("there is no {}\nhint: jumbo cdi generate", path.display());
    let found = Specification::read(&path)?.ok_or_else(none)?;
    let files = found.files().ok_or_else(|| {
        let path = path.display();
        anyhow!("{path} has only the names of devices\nhint: jumbo cdi generate")
    })?;
    let page = CdiPage {
        version: files.version().to_owned(),
        is_current: files.is_current(),
        mounts: found
            .mounts()
            .iter()
            .map(|mount| MountState {
                is_there: mount.host_path.exists(),
                host: mount.host_path.clone(),
                container: mount.container_path.clone(),
            })
            .collect(),
        devices: found
            .devices
            .iter()
            .map(|device| {
                let variables = device.variables();
                let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
                (device.full_name(), variables.collect())
            })
            .collect(),
        specification: path,
    };
    view::page(json, &page, show)
}

fn show(view: &mut View, page: &CdiPage) {
    view.fact("Specification", page.specification.display().to_string());
    let version = &page.version;
    view.fact(
        "Library",
        match page.is_current {
            true => format!("{version}, that of this command"),
            false => format!("{version}, not that of this command; hint: jumbo cdi generate"),
        },
    );
    view.heading("Mounts");
    let mounts = page.mounts.iter().map(|mount| {
        let is_there = if mount.is_there { "there" } else { "missing" };
        let paths = [&mount.host, &mount.container];
        let [host, container] = paths.map(|path| path.display().to_string());
        [host, container, is_there.to_owned()]
    });
    view.table("<on the host|<in containers|<", mounts);
    for (device, variables) in &page.devices {
        view.heading(&format!("--device {device}"));
        view.lines(
            variables
                .iter()
                .map(|(name, value)| format!("  {name}={value}")),
        );
    }
}
