//! `--print-boot`: the lines that repeat settings at the next boot. It writes nothing.

use std::process::ExitCode;

use jumbo_host::kernel::Root;
use jumbo_host::knobs::{Group, Knob, Value, boot};
use serde_json::json;

use crate::planned::{self, all, fill};
use crate::view;

/// Prints files with these values: of sysctl.d where the knob has a name there, else of tmpfiles.d.
/// `arguments`: those of the kernel's command line, and why they are needed.
pub(crate) fn print(
    root: &Root,
    group: &Group,
    values: &[(Knob, Value)],
    arguments: Option<(String, String)>,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let (mut sysctl, mut number, mut file, mut value) = (vec![], vec![], vec![], vec![]);
    for (knob, to) in values {
        match boot::sysctl(root, &knob.file) {
            Some(name) => {
                sysctl.push(name);
                number.push(to.to_string());
            }
            None => {
                file.push(knob.file.clone());
                value.push(to.to_string());
            }
        }
    }
    // grub-mkconfig puts the text into a script without quotes, where a semicolon ends a command.
    let arguments = arguments.map(|(text, why)| (text.replace(';', r"\\;"), why));
    let (arguments, why): (Vec<_>, Vec<_>) = arguments.into_iter().unzip();
    let name = all([&group.id]);
    let values = vec![
        ("name", name),
        ("sysctl", sysctl),
        ("number", number),
        ("file", file),
        ("value", value),
        ("arguments", arguments),
        ("why", why),
    ];
    let files = fill(include_str!("boot.txt"), &values);
    match json {
        true => view::json(&json!({"files": files}))?,
        false => planned::print(&files)?,
    }
    Ok(ExitCode::SUCCESS)
}
