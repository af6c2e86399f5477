//! Files with a reason for each line: [`File`], and those of the host: [`of_host`], [`of_unit`],
//! [`of_pod`].
//!
//! A file is printed so that it can be copied whole: a reason is a comment of the file's own
//! format.

use jumbo::units::{Bytes, PageSize};
use jumbo_host::host_pools::boot;
use jumbo_host::kernel::{hugetlb, hvo};
use serde::Serialize;

use super::Plan;
use super::sizing::{Kind, Workload};
use crate::view::filled;

/// The part of a system that reads a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Reader {
    /// sysctl.d(5): settings below /proc/sys
    Sysctl,
    /// tmpfiles.d(5): pools by node, THP
    Tmpfiles,
    /// The kernel command line, as update-grub(8) reads it
    CommandLine,
    /// systemd units: limits, environment, mounts
    Systemd,
    /// The configuration of the program
    Config,
    /// A pod; not in the default output
    Kubernetes,
}

/// A line and the reason for it; one without a reason belongs to the line above it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Line {
    pub(super) line: String,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub(super) why: String,
}

/// A file to be installed by the operator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct File {
    pub(super) path: String,
    pub(super) reader: Reader,
    pub(super) lines: Vec<Line>,
}

/// The columns of a comment.
const WIDTH: usize = 80;

impl Line {
    pub(super) fn new(line: impl Into<String>, why: impl Into<String>) -> Self {
        let (line, why) = (line.into(), why.into());
        Self { line, why }
    }
}

impl File {
    pub(super) fn new(path: impl Into<String>, reader: Reader, lines: Vec<Line>) -> Self {
        let path = path.into();
        Self {
            path,
            reader,
            lines,
        }
    }

    /// The text of the file, with its path and the reasons as comments.
    pub(super) fn text(&self) -> String {
        let is_xml = self.path.ends_with(".xml");
        let comment = |indent: &str, text: &str| {
            let (open, close) = if is_xml {
                ("<!-- ", " -->")
            } else {
                ("# ", "")
            };
            let text = filled(
                "",
                &format!("{text}{close}"),
                0,
                WIDTH - indent.len() - open.len(),
            );
            // A comment of XML goes on by itself.
            let next = if is_xml { "     " } else { open };
            format!(
                "{indent}{open}{}\n",
                text.replace('\n', &format!("\n{indent}{next}"))
            )
        };
        let mut text = comment("", &self.path);
        for Line { line, why } in &self.lines {
            let indent = &line[..line.len() - line.trim_start().len()];
            if !why.is_empty() {
                text += &comment(indent, why);
            }
            text += &format!("{line}\n");
        }
        text
    }
}

/// The files that give the host its pages, before any program starts.
pub(super) fn of_host(plan: &Plan, workload: &Workload) -> Vec<File> {
    let (mut sysctl, mut tmpfiles, mut boot) = (Vec::new(), Vec::new(), Vec::new());
    let page = workload.page;
    let in_sysctl = plan.pools.len() == 1 && page == plan.default_page;
    if workload.kind == Kind::Thp {
        for (knob, value, why) in [
            (
                "enabled",
                "madvise",
                "THPs for programs that ask for them, as those under jumbo do; others stay as they are.",
            ),
            (
                "defrag",
                "defer+madvise",
                "Only a program that asked for THPs waits for compaction at a fault.",
            ),
        ] {
            let line = format!("w /sys/kernel/mm/transparent_hugepage/{knob} - - - - {value}");
            tmpfiles.push(Line::new(line, why));
        }
    }
    if plan.vmemmap_saved > Bytes(0) {
        let saved = plan.vmemmap_saved;
        let why = format!(
            "HVO (Linux 5.18) frees {saved} of page descriptors. It acts on pages that are made after it."
        );
        // The same reader as that of the pool, which it stands before: two readers have no order.
        if plan.gigantic {
            boot.push(Line::new(argument("hugetlb_free_vmemmap=on"), why));
        } else if in_sysctl {
            sysctl.push(Line::new("vm.hugetlb_optimize_vmemmap = 1", why));
        } else {
            tmpfiles.push(Line::new(format!("w /{} - - - - 1", hvo::FILE), why));
        }
    }
    if let Some(group) = workload.group {
        let why = "shmget(2) with SHM_HUGETLB is for members of this group, and for root.";
        sysctl.push(Line::new(format!("vm.hugetlb_shm_group = {group}"), why));
    }
    let total: u64 = plan.pools.iter().map(|pool| pool.pages.0).sum();
    match &plan.pools[..] {
        [] => {}
        pools if plan.gigantic => {
            let nodes: Vec<_> = pools.iter().map(|pool| (pool.node, pool.pages)).collect();
            let by_node = match pools.len() {
                1 => "",
                _ => " NODE:PAGES needs Linux 5.16.",
            };
            let why = format!(
                "The kernel sets {total} pages of {page} aside before memory is in pieces. At run time \
                 an allocation of {page} fails on a host that was in use.{by_node}"
            );
            boot.push(Line::new(argument(&boot::command_line(page, &nodes)), why));
        }
        _ if in_sysctl => {
            let why = format!(
                "{total} pages of {page} in all. Add the pages of other programs of this host: this is the \
                 total of the pool."
            );
            sysctl.push(Line::new(format!("vm.nr_hugepages = {total}"), why));
        }
        pools => {
            for pool in pools {
                let file = hugetlb::file(page, pool.node, "nr_hugepages");
                let why = match pool.node {
                    Some(node) => format!(
                        "{} on node {node}. A total in vm.nr_hugepages is spread anew where a node is short.",
                        pool.memory
                    ),
                    None => format!(
                        "vm.nr_hugepages is for pages of {} alone.",
                        plan.default_page
                    ),
                };
                tmpfiles.push(Line::new(format!("w /{file} - - - - {}", pool.pages), why));
            }
        }
    }
    let name = workload.name;
    let files = [
        (
            format!("/etc/sysctl.d/60-hugepages-{name}.conf"),
            Reader::Sysctl,
            sysctl,
        ),
        (
            format!("/etc/tmpfiles.d/60-hugepages-{name}.conf"),
            Reader::Tmpfiles,
            tmpfiles,
        ),
        (
            format!("/etc/default/grub.d/60-hugepages-{name}.cfg"),
            Reader::CommandLine,
            boot,
        ),
    ];
    let files = files.into_iter().filter(|(_, _, lines)| !lines.is_empty());
    files
        .map(|(path, reader, lines)| File::new(path, reader, lines))
        .collect()
}

/// An argument of the kernel, in a file of update-grub(8).
fn argument(argument: &str) -> String {
    format!("GRUB_CMDLINE_LINUX=\"$GRUB_CMDLINE_LINUX {argument}\"")
}

/// A mount of hugetlbfs for a page size that systemd does not mount by itself.
pub(super) fn mount(page: PageSize) -> File {
    let lines = vec![
        Line::new("[Unit]", ""),
        Line::new(
            "DefaultDependencies=no",
            "The mount is there before services start.",
        ),
        Line::new("Before=sysinit.target", ""),
        Line::new("[Mount]", ""),
        Line::new(
            "What=hugetlbfs",
            "systemd mounts /dev/hugepages for the default page size alone.",
        ),
        Line::new(format!("Where=/dev/hugepages{page}"), ""),
        Line::new("Type=hugetlbfs", ""),
        Line::new(
            format!("Options=pagesize={page},mode=0755"),
            "Only root makes files: give the group of the program by gid=N,mode=1770.",
        ),
        Line::new("[Install]", ""),
        Line::new("WantedBy=sysinit.target", ""),
    ];
    File::new(
        format!("/etc/systemd/system/dev-hugepages{page}.mount"),
        Reader::Systemd,
        lines,
    )
}

/// The drop-in of the workload's unit, where it needs one.
pub(super) fn of_unit(unit: &str, workload: &Workload) -> Option<File> {
    let mut lines = vec![Line::new("[Service]", "")];
    if let Some(why) = workload.memlock {
        lines.push(Line::new("LimitMEMLOCK=infinity", why));
    }
    if let Some(Line { line, why }) = &workload.environment {
        lines.push(Line::new(format!("Environment=\"{line}\""), why));
    }
    let path = format!("/etc/systemd/system/{unit}.d/hugepages.conf");
    (lines.len() > 1).then(|| File::new(path, Reader::Systemd, lines))
}

/// A pod with one instance.
pub(super) fn of_pod(plan: &Plan, workload: &Workload, private: Bytes) -> File {
    let (name, page) = (workload.name, workload.page);
    let mut lines: Vec<Line> = ["apiVersion: v1", "kind: Pod", "metadata:"]
        .map(|line| Line::new(line, ""))
        .into();
    lines.push(Line::new(format!("  name: {name}"), ""));
    if workload.kind == Kind::Thp {
        let why = "jumbo's admission policy covers labelled pods (docs/kubernetes.md).";
        lines.push(Line::new("  labels:", ""));
        lines.push(Line::new("    jumbo.dev/memory: default", why));
    }
    lines.push(Line::new("spec:", ""));
    lines.push(Line::new("  containers:", ""));
    lines.push(Line::new(format!("  - name: {name}"), ""));
    lines.push(Line::new(
        format!("    image: {name}"),
        "The image of your workload.",
    ));
    if let Some(Line { line, why }) = &workload.environment
        && let Some((name, value)) = line.split_once('=')
    {
        lines.push(Line::new("    env:", ""));
        lines.push(Line::new(format!("    - name: {name}"), ""));
        lines.push(Line::new(format!("      value: \"{value}\""), why));
    }
    lines.push(Line::new("    resources:", ""));
    lines.push(Line::new("      limits:", ""));
    let mib = |bytes: Bytes| bytes.0.div_ceil(1 << 20);
    if workload.kind == Kind::Thp {
        let why = "THPs count as ordinary memory, so all memory is in this limit.";
        let memory = private + plan.instance;
        lines.push(Line::new(format!("        memory: {}Mi", mib(memory)), why));
    } else {
        let unit = match page.bytes() >> 30 {
            0 => format!("{}Mi", page.bytes() >> 20),
            gib => format!("{gib}Gi"),
        };
        let why = format!(
            "{} pages. The request is the same: Kubernetes does not overcommit huge pages. The node has \
             them in its pool before kubelet starts, or after `systemctl restart kubelet`.",
            plan.instance.whole_pages(page)
        );
        let line = format!("        hugepages-{unit}: {}Mi", mib(plan.instance));
        lines.push(Line::new(line, why));
        let why =
            "Memory outside huge pages (--private); Kubernetes demands cpu or memory beside them.";
        lines.push(Line::new(
            format!("        memory: {}Mi", mib(private)),
            why,
        ));
        if workload.bound {
            let why =
                "hugetlbfs for programs that map files; MAP_HUGETLB and memfd need no volume.";
            lines.push(Line::new("    volumeMounts:", why));
            lines.push(Line::new(
                "    - {name: hugepages, mountPath: /dev/hugepages}",
                "",
            ));
            lines.push(Line::new("  volumes:", ""));
            lines.push(Line::new("  - name: hugepages", ""));
            lines.push(Line::new(
                format!("    emptyDir: {{medium: HugePages-{unit}}}"),
                "",
            ));
        }
    }
    File::new(format!("{name}.yaml"), Reader::Kubernetes, lines)
}
