//! `--dry-run` prints the plan, `--print-env` the environment.

use std::io::Write as _;

use jumbo::units::{Bytes, PageSize};
use jumbo_host::kernel::thp::Thp;
use jumbo_host::kernel::{Root, hugetlb};
use serde_json::json;

use super::Failure;
use super::args::RunSettings;
use super::launch::Launch;
use crate::view::{self, View};

pub(super) fn print(
    root: &Root,
    settings: &RunSettings,
    launch: &Launch<'_>,
) -> Result<(), Failure> {
    // The plan reports unreadable controls as unknown.
    let thp = Thp::read_controls(root).ok().flatten();
    let (plan, program) = (&launch.plan, launch.program);
    let mut memory = plan.memory(
        &program.reach,
        thp.as_ref(),
        jumbo_inside::heap::thp_disabled(),
    );
    if let Some(Ok(bound)) = &launch.outside {
        let heap = memory.iter_mut().filter(|memory| memory.is_heap());
        for memory in heap {
            memory.sizes = PageSize::new(plan.orders.pmd as u64).into_iter().collect();
            memory.how =
                format!("collapsed from outside once it is half full; --max-waste={bound}");
        }
    }
    let changes = launch.changes(None);
    written(if settings.json {
        let environment: serde_json::Map<_, _> = changes
            .iter()
            .map(|(name, value)| ((*name).to_owned(), json!(String::from_utf8_lossy(value))))
            .collect();
        let command = settings.command.iter().map(|arg| arg.to_string_lossy());
        let plan = json!({
            "program": command.collect::<Vec<_>>(),
            "path": program.path,
            "binary": program.binary,
            "mode": if settings.is_parent() { "parent" } else { "exec" },
            "reach": { "reached": program.reach.is_reached(), "reason": program.reach.reason() },
            "outside": launch.outside.as_ref().map(|outside| match outside {
                Ok(_) => json!({"promoted": true}),
                Err(reason) => json!({"promoted": false, "reason": reason}),
            }),
            "environment": environment,
            "memory": memory,
            "pool": launch.plan.orders.pool.map(|pool| host_pool(pool.page)),
            "not_freed_later": launch.why_not_later(),
        });
        view::json(&plan)
    } else {
        let mut view = View::default();
        describe(&mut view, settings, launch, &changes, &memory);
        view.print().map_err(Into::into)
    })
}

/// Prints the variables for a program that another command starts.
pub(super) fn print_environment(launch: &Launch<'_>, json: bool) -> Result<(), Failure> {
    let variables = launch.variables();
    if json {
        let text = variables.into_iter().map(|(name, value)| {
            let value = String::from_utf8(value).map_err(|error| {
                let value = error.as_bytes().escape_ascii();
                Failure::own(format!(
                    "cannot print {name}={value} as JSON: it is not UTF-8; hint: leave --json out"
                ))
            })?;
            Ok((name.to_owned(), json!(value)))
        });
        let text = text.collect::<Result<serde_json::Map<_, _>, Failure>>()?;
        return written(view::json(&text));
    }
    let mut lines = Vec::new();
    for (name, value) in variables {
        if value.contains(&b'\n') {
            return Err(Failure::own(format!(
                "cannot print {name} on one line: the value that it has contains a newline; hint: change it"
            )));
        }
        lines.extend([name.as_bytes(), b"=", &value, b"\n"].concat());
    }
    written(view::Stdout::lock().write_all(&lines).map_err(Into::into))
}

/// Converts the result of printing. A closed pipe is no failure.
fn written(shown: anyhow::Result<()>) -> Result<(), Failure> {
    shown.or_else(|error| match view::is_broken_pipe(&error) {
        true => Ok(()),
        false => Err(Failure::own(view::in_words(&error))),
    })
}

/// Free pages of the kernel's pool, in words.
fn host_pool(page: usize) -> String {
    let pools = hugetlb::pools(&Root::host()).ok().flatten();
    let pools = pools.unwrap_or_default();
    let pool = pools.iter().find(|pool| pool.size.bytes() == page as u64);
    match pool {
        None => String::from("this kernel has no hugetlb pages of that size: THPs"),
        Some(pool) => format!(
            "hugetlb: {} free now, {} on demand, while the program has one thread and until it forks; \
             beyond that THPs",
            pool.unused().bytes(pool.size),
            pool.may_grow_by().bytes(pool.size)
        ),
    }
}

fn describe(
    view: &mut View,
    settings: &RunSettings,
    launch: &Launch<'_>,
    changes: &[super::launch::Change],
    memory: &[jumbo_host::policy::MemoryPlan],
) {
    let program = launch.program;
    view.fact("Program", program.path.to_string_lossy());
    if program.binary != program.path {
        view.fact("Interpreter", program.binary.to_string_lossy());
    }
    let reached = match program.reach.reason() {
        None => String::from("yes, through LD_PRELOAD"),
        Some(reason) => format!("no: {reason}"),
    };
    view.fact("Reached", reached);
    if let Some(outside) = &launch.outside {
        view.fact(
            "Promoted",
            match outside {
                Ok(_) => String::from("yes, from outside, by a process beside it: docs/live.md"),
                Err(reason) => format!("no: {reason}"),
            },
        );
    }
    let started = match (&settings.report, settings.shares_pool()) {
        (None, false) => "in place of jumbo, with its process ID",
        (None, true) => "as a child of jumbo, which keeps the account of the pool",
        (Some(_), _) => "as a child of jumbo, which reports at the end",
    };
    view.fact("Started", started);
    view.heading("Environment");
    for (name, value) in changes {
        view.line(format!("  {name}={}", String::from_utf8_lossy(value)));
    }
    if let Some(pool) = launch.plan.orders.pool {
        view.heading("Pool");
        let whose = match pool.each {
            true => "for each process",
            false => "for all processes of the run together",
        };
        let beforehand = match pool.warm {
            Some(_) => "made resident before the program starts",
            None => "a bound: no page is taken before a process asks for it",
        };
        let size = Bytes((pool.size + pool.overcommit) as u64);
        view.line(format!("  {size} {whose}, {beforehand}"));
        if let Some(why) = launch.plan.why_other_pages() {
            view.line(format!("  {why}"));
        }
        view.line(format!("  {}", host_pool(pool.page)));
    }
    if let Some(why) = launch.why_not_later() {
        view.heading("Large frees");
        view.line(format!("  {why}"));
    }
    view.heading("Memory");
    view.table(
        "<|<|<",
        memory.iter().map(|memory| {
            let sizes: Vec<_> = memory.sizes.iter().map(ToString::to_string).collect();
            let sizes = match sizes.is_empty() {
                true => String::from("as it is"),
                false => sizes.join(" "),
            };
            [memory.what.to_owned(), sizes, memory.how.clone()]
        }),
    )
}
