//! Containers that were made with a device of the specification.

use std::process::Command;

use serde_json::Value;

use super::specification::KIND;
use crate::view;

/// Engines whose containers keep the name of a device, and look it up at each start.
const ENGINES: [&str; 2] = ["podman", "docker"];

/// Counts the containers, running or not, of this user's engines that have a device of jumbo: each
/// engine that has any, with their number.
pub(super) fn made_with_devices() -> Vec<(&'static str, usize)> {
    let counted = ENGINES.into_iter().map(|engine| (engine, count(engine)));
    counted.filter(|(_, count)| *count > 0).collect()
}

/// An engine that is not installed has none; one that does not answer is named.
fn count(engine: &str) -> usize {
    let ask = |words: &[&str]| {
        let Ok(output) = Command::new(engine).args(words).output() else {
            return Vec::new();
        };
        if !output.status.success() {
            let why = String::from_utf8_lossy(&output.stderr);
            let why = why.lines().next().unwrap_or("no reason given").to_owned();
            let words = words.first().unwrap_or(&"");
            view::tell(&format!(
                "the containers of {engine} are not counted: {engine} {words}: {why}"
            ));
        }
        output.stdout
    };
    let names = ask(&["ps", "--all", "--quiet", "--no-trunc"]);
    let names = String::from_utf8_lossy(&names);
    let names: Vec<_> = names.split_whitespace().collect();
    if names.is_empty() {
        return 0;
    }
    let found = ask(&[&["container", "inspect"], names.as_slice()].concat());
    let found: Vec<Value> = serde_json::from_slice(&found).unwrap_or_default();
    // podman has the device in the command that made the container, docker among the requests.
    let device = format!("{KIND}=");
    let has_device = |container: &&Value| container.to_string().contains(&device);
    found.iter().filter(has_device).count()
}
