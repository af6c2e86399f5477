//! `jumbo plan`: computes pools, settings and files from the sizes of a workload, with a reason for
//! each line.
//!
//! - [`sizing`]: [`Workload`] and the arithmetic. One module per workload makes it from arguments,
//!   [`process`] from a running program.
//! - `crate::planned`: files with a reason for each line. [`show`]: the text output.
//!
//! Invariant: it writes nothing but its output.

mod custom;
mod dpdk;
mod jvm;
mod mysql;
mod postgres;
mod process;
mod qemu;
mod redis;
mod show;
mod sizing;

use std::num::NonZeroU32;
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use jumbo::units::{Bytes, NodeId, PageSize, Pages};
use jumbo_host::host_pools::{boot, is_gigantic};
use jumbo_host::kernel::memory::Memory;
use jumbo_host::kernel::{Root, base_page, hugetlb, hvo};
use jumbo_sys::files::nodes;
use jumbo_sys::proc::kib;
use serde::Serialize;

use crate::knobs::usage;
use crate::planned::{ConfigReader, FileLine, PlannedFile, Values, all, fill};
use crate::value::{one_process, positive, size_with_unit, whole};
use crate::view;

use sizing::{PageKind, PlannedMapping, PlannedPool, Workload};

/// Compute the huge pages of a workload, and print the lines that set them up
///
/// From sizes, or from a program that runs: the pages of each pool and node, the memory that is
/// left, and the lines for sysctl.d, the kernel command line, systemd, the program and Kubernetes,
/// with a reason for each. It changes nothing.
#[derive(Debug, clap::Args)]
#[command(subcommand_negates_reqs = true, subcommand_value_name = "WORKLOAD")]
#[command(subcommand_help_heading = "Workloads")]
#[command(after_help = "Examples:
  jumbo plan postgres --shared-buffers 200G --nodes 2
  jumbo plan qemu --memory 64G --host-memory 512G
  jumbo plan jvm --heap 8G --count 20 --for kubernetes
  jumbo plan --pid $(pidof -s postgres)
  jumbo plan postgres --shared-buffers 8G --for sysctl |
    sudo tee /etc/sysctl.d/60-hugepages-postgres.conf

Exit status: 0 done; 1 failed, or the plan does not fit the host and is printed all the same; \
2 wrong usage.")]
pub(crate) struct Args {
    #[command(subcommand)]
    workload: Option<WorkloadArgs>,

    /// Read the sizes of this process instead: its mappings and its command line
    #[arg(long, value_name = "PID|NAME", required = true)]
    pid: Option<String>,

    #[command(flatten)]
    options: CommonOptions,
}

#[derive(Debug, clap::Subcommand)]
enum WorkloadArgs {
    Postgres(postgres::Args),
    Redis(redis::Args),
    Mysql(mysql::Args),
    Jvm(jvm::Args),
    Qemu(qemu::Args),
    Dpdk(dpdk::Args),
    Custom(custom::Args),
}

/// Options of all workloads.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Common options")]
struct CommonOptions {
    /// Instances on the host, each with the memory of the plan
    #[arg(long, value_name = "N", global = true, default_value = "1",
        value_parser = positive::<NonZeroU32>)]
    count: NonZeroU32,

    /// Nodes that share the memory, numbered from 0 [default: those of this host; qemu and dpdk: 1]
    #[arg(long, value_name = "N", global = true,
        value_parser = clap::value_parser!(u32).range(1..=1024))]
    nodes: Option<u32>,

    /// The size of the pages [default: 2M; qemu and dpdk: 1G where the memory is a multiple]
    #[arg(long, value_name = "SIZE", global = true)]
    page_size: Option<PageSize>,

    /// Pages beyond the need, in percent
    #[arg(long, value_name = "PERCENT", global = true, default_value = "0",
        value_parser = whole::<u16>)]
    headroom: u16,

    /// Memory of an instance outside huge pages [default: 1G; with --pid what it has]
    #[arg(long, value_name = "SIZE", value_parser = size_with_unit, global = true)]
    private: Option<Bytes>,

    /// Plan for another host with so much memory, equally on each node
    #[arg(long, value_name = "SIZE", value_parser = size_with_unit, global = true)]
    host_memory: Option<Bytes>,

    /// The systemd unit of the program
    #[arg(long, value_name = "UNIT", global = true, value_parser = crate::unit::unit)]
    unit: Option<String>,

    /// Print these files alone. May be repeated
    #[arg(
        long = "for",
        value_name = "READER",
        global = true,
        value_enum,
        value_delimiter = ','
    )]
    readers: Vec<ConfigReader>,

    /// Print JSON, with all files
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct HugePagePlan {
    workload: &'static str,
    kind: PageKind,
    /// Source of the sizes.
    source: String,
    count: u32,
    page_size: PageSize,
    /// Mappings of an instance; for qemu and dpdk on each node.
    regions: Vec<PlannedMapping>,
    /// Huge pages of an instance, on all nodes.
    instance: Bytes,
    /// Pools of the host, by node; empty for THPs.
    pools: Vec<PlannedPool>,
    /// Huge pages of all instances.
    memory: Bytes,
    /// Page descriptors that HVO frees.
    vmemmap_saved: Bytes,
    /// Memory of an instance outside huge pages.
    private: Bytes,
    host_memory: Bytes,
    /// Remaining memory of the host.
    rest: Bytes,
    /// Reason why the plan does not fit.
    short: Option<String>,
    notes: Vec<String>,
    steps: Vec<FileLine>,
    files: Vec<PlannedFile>,
    /// Pages too large for the page allocator, to be allocated at boot.
    #[serde(skip)]
    gigantic: bool,
    /// Page size of vm.nr_hugepages.
    #[serde(skip)]
    default_page: PageSize,
}

struct TargetHost {
    nodes: u32,
    memory: Bytes,
    by_node: Vec<Bytes>,
    base: PageSize,
    default_page: PageSize,
    gigantic: bool,
    hvo: bool,
}

impl TargetHost {
    fn read(root: &Root, options: &CommonOptions, workload: &Workload) -> anyhow::Result<Self> {
        let page = workload.page;
        if let Some(memory) = options.host_memory {
            let nodes = options.nodes.unwrap_or(1);
            return Ok(Self {
                nodes,
                memory,
                by_node: vec![Bytes(memory.0 / u64::from(nodes)); nodes as usize],
                base: PageSize::SIZE_4K,
                default_page: PageSize::SIZE_2M,
                gigantic: page >= PageSize::SIZE_1G,
                hvo: true,
            });
        }
        let here = nodes(root)?;
        let count = u32::try_from(here.len()).unwrap_or(1).max(1);
        let wanted = options
            .nodes
            .unwrap_or(if workload.bound { 1 } else { count });
        if wanted > count {
            bail!(
                "this host has {count} of {wanted} nodes\nhint: --host-memory SIZE plans for another host"
            );
        }
        if workload.kind != PageKind::Thp {
            crate::pool::pool(root, page)?;
        }
        let memory = Memory::read(root)?.total;
        let of_node = |node: &NodeId| node_memory(root, *node);
        let by_node = match wanted {
            1 => vec![memory],
            _ => here
                .iter()
                .take(wanted as usize)
                .map(of_node)
                .collect::<anyhow::Result<_>>()?,
        };
        Ok(Self {
            nodes: wanted,
            memory,
            by_node,
            base: base_page(root),
            default_page: hugetlb::default_size(root)?.unwrap_or(PageSize::SIZE_2M),
            gigantic: is_gigantic(root, page),
            hvo: hvo::is_on(root)?.is_some(),
        })
    }
}

/// Parses `Node 0 MemTotal: 1234 kB`.
fn node_memory(root: &Root, node: NodeId) -> anyhow::Result<Bytes> {
    let path = format!("sys/devices/system/node/node{node}/meminfo");
    let text = root.read(&path)?;
    let total = text
        .lines()
        .find_map(|line| line.split_once("MemTotal:")?.1.trim().into());
    total
        .and_then(|value| kib(value.as_bytes()))
        .with_context(|| format!("/{path} has no MemTotal"))
}

/// ID of a group, given by name or number.
fn group(text: &str) -> anyhow::Result<u32> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    let groups = std::fs::read_to_string("/etc/group").context("cannot read /etc/group")?;
    let of = |line: &str| {
        let mut fields = line.split(':');
        (fields.next() == Some(text))
            .then(|| fields.nth(1)?.parse().ok())
            .flatten()
    };
    groups.lines().find_map(of).with_context(|| {
        format!(
            "no group is `{text}` in /etc/group\n\
             hint: --group takes the number that it has on the other host"
        )
    })
}

pub(crate) fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let (root, options) = (Root::host(), &args.options);
    let (page, parts) = (options.page_size, options.nodes.unwrap_or(1));
    let mut measured = None;
    let workload = match (&args.workload, &args.pid) {
        (Some(_), Some(_)) => usage("WORKLOAD and --pid exclude each other\nhint: leave one away"),
        (Some(WorkloadArgs::Postgres(args)), _) => args.workload(page)?,
        (Some(WorkloadArgs::Redis(args)), _) => args.workload(page),
        (Some(WorkloadArgs::Mysql(args)), _) => args.workload(page)?,
        (Some(WorkloadArgs::Jvm(args)), _) => args.workload(page),
        (Some(WorkloadArgs::Qemu(args)), _) => args.workload(page, parts)?,
        (Some(WorkloadArgs::Dpdk(args)), _) => args.workload(page, parts),
        (Some(WorkloadArgs::Custom(args)), _) => args.workload(page)?,
        (None, Some(pid)) => {
            let (workload, private) =
                process::workload(&root, one_process(&root, pid)?, page, parts)?;
            measured = Some(private);
            workload
        }
        (None, None) => usage("there is neither a WORKLOAD nor --pid"),
    };
    if workload.kind == PageKind::Thp && page.is_some() {
        usage("THPs have the size of a PMD\nhint: --page-size is for pools: leave it away");
    }
    let private = options.private.or(measured).unwrap_or(Bytes(1 << 30));
    let target = TargetHost::read(&root, options, &workload)?;
    let mut plan = HugePagePlan::new(workload, private, &target, options);
    if options.host_memory.is_none() {
        plan.notes
            .extend(pages_of_others(&root, plan.page_size).filter(|_| !plan.pools.is_empty()));
    }
    if !options.readers.is_empty() && !options.json {
        show::files(&plan, &options.readers)?;
    } else {
        view::page(options.json, &plan, show::show)?;
        if !options.json {
            let all = |reader: &&ConfigReader| **reader != ConfigReader::Kubernetes;
            let all: Vec<_> = <ConfigReader as clap::ValueEnum>::value_variants()
                .iter()
                .filter(all)
                .copied()
                .collect();
            show::files(&plan, &all)?;
        }
    }
    match &plan.short {
        None => Ok(ExitCode::SUCCESS),
        Some(why) => bail!("{why}\nhint: smaller sizes, or --host-memory SIZE for another host"),
    }
}

/// Note on pages that other programs use: the total of the pool must include them.
fn pages_of_others(root: &Root, page: PageSize) -> Option<String> {
    let pools = hugetlb::pools(root).ok()??;
    let pool = pools.into_iter().find(|pool| pool.size == page)?;
    let taken = Pages(pool.used().0 + pool.reserved.0);
    (taken > Pages(0)).then(|| {
        format!("{taken} pages of {page} are in use or reserved on this host now: add them, unless this workload has them")
    })
}

impl HugePagePlan {
    fn new(
        workload: Workload,
        private: Bytes,
        target: &TargetHost,
        options: &CommonOptions,
    ) -> Self {
        let count = options.count.get();
        let page = workload.page;
        let pools = workload.pools(count.into(), target.nodes, options.headroom.into());
        let memory: Bytes = pools.iter().map(|pool| pool.memory).sum();
        let pages: u64 = pools
            .iter()
            .fold(0, |sum, pool| sum.saturating_add(pool.pages.0));
        let parts = if workload.bound { target.nodes } else { 1 };
        let instance = Pages(workload.pages().0.saturating_mul(parts.into())).bytes(page);
        let is_pooled = workload.kind != PageKind::Thp;
        let hvo = is_pooled && target.hvo;
        let saved = if hvo {
            hvo::freed(page, target.base).0
        } else {
            0
        };
        let all_private = private.0.saturating_mul(count.into());
        let need = memory + Bytes(all_private);
        let short = match pools
            .iter()
            .zip(&target.by_node)
            .find(|(pool, has)| pool.memory >= **has)
        {
            Some((pool, has)) if pool.node.is_some() => Some(format!(
                "the plan does not fit: {} of huge pages on a node of {has}",
                pool.memory
            )),
            _ if need > target.memory => Some(format!(
                "the plan does not fit: {memory} of huge pages and {} beside them on a host of {}",
                Bytes(all_private),
                target.memory
            )),
            _ => None,
        };
        let mut plan = Self {
            workload: workload.name,
            kind: workload.kind,
            source: workload.source.clone(),
            count,
            page_size: page,
            regions: workload.regions.clone(),
            instance,
            pools: if is_pooled { pools } else { Vec::new() },
            memory,
            vmemmap_saved: Bytes(pages.saturating_mul(saved)),
            private,
            host_memory: target.memory,
            rest: Bytes(target.memory.0.saturating_sub(need.0)),
            short,
            notes: workload.notes.clone(),
            steps: Vec::new(),
            files: Vec::new(),
            gigantic: target.gigantic,
            default_page: target.default_page,
        };
        if plan.pools.len() > 1 && !workload.bound {
            plan.notes.push(String::from(
                "pages are of the node whose thread touches them first, or of the other where its pool is empty; \
                 `numactl --interleave=all` before the program spreads them",
            ));
        }
        let unit = options.unit.as_deref().unwrap_or(&workload.unit);
        let mut values = plan.values(&workload, unit);
        let (host, start) = (
            include_str!("templates/host.txt"),
            include_str!("templates/start.txt"),
        );
        plan.files = fill(&[host, workload.template, start].concat(), &values);
        let reads = |reader| {
            all(plan
                .files
                .iter()
                .any(|file| file.reader == reader)
                .then_some(""))
        };
        values.extend([
            ("command_line", reads(ConfigReader::CommandLine)),
            ("sysctl", reads(ConfigReader::Sysctl)),
            ("tmpfiles", reads(ConfigReader::Tmpfiles)),
        ]);
        let steps = fill(include_str!("templates/steps.txt"), &values);
        plan.steps = steps.into_iter().flat_map(|steps| steps.lines).collect();
        plan
    }

    fn values(&self, workload: &Workload, unit: &str) -> Values {
        let (page, pools) = (self.page_size, &self.pools[..]);
        let is_thp = workload.kind == PageKind::Thp;
        let in_sysctl = pools.len() == 1 && page == self.default_page && !self.gigantic;
        let in_files = !self.gigantic && !in_sysctl && !is_thp;
        let saves = self.vmemmap_saved > Bytes(0);
        let when = |is: bool| all(is.then_some(""));
        let of_pools = |value: &dyn Fn(&PlannedPool) -> String| {
            all(pools.iter().filter(|_| in_files).map(value))
        };
        let nodes: Vec<_> = pools.iter().map(|pool| (pool.node, pool.pages)).collect();
        let at_boot = self.gigantic && !nodes.is_empty();
        let by_node = if nodes.len() > 1 {
            " NODE:PAGES needs Linux 5.16."
        } else {
            ""
        };
        let mib = |bytes: Bytes| all([bytes.0.div_ceil(1 << 20)]);
        let pod_page = match page.bytes() >> 30 {
            0 => format!("{}Mi", page.bytes() >> 20),
            gib => format!("{gib}Gi"),
        };
        let has_drop_in = |(name, _): &(&str, _)| ["memlock", "options"].contains(name);
        let has_drop_in = workload.values.iter().any(has_drop_in);
        let total: u64 = pools.iter().map(|pool| pool.pages.0).sum();
        let own = [
            ("name", all([workload.name])),
            ("page", all([page])),
            ("page_mib", all([page.bytes() >> 20])),
            ("default_page", all([self.default_page])),
            ("thp", when(is_thp)),
            ("pooled", when(!is_thp)),
            ("bound", when(workload.bound)),
            ("group", all(workload.group)),
            ("saved", all([self.vmemmap_saved])),
            ("hvo_file", all([hvo::FILE])),
            ("hvo_at_boot", when(saves && self.gigantic)),
            ("hvo_in_sysctl", when(saves && in_sysctl)),
            ("hvo_in_tmpfiles", when(saves && in_files)),
            ("total", all([total])),
            ("in_sysctl", when(in_sysctl)),
            ("whole_pool", when(pools.len() == 1)),
            (
                "pool_file",
                of_pools(&|pool| hugetlb::file(page, pool.node, "nr_hugepages")),
            ),
            ("pool_pages", of_pools(&|pool| pool.pages.to_string())),
            ("pool_memory", of_pools(&|pool| pool.memory.to_string())),
            ("pool_node", all(pools.iter().filter_map(|pool| pool.node))),
            ("by_node", all([by_node])),
            (
                "at_boot",
                all(at_boot.then(|| boot::command_line(page, &nodes))),
            ),
            (
                "tried",
                all((pools.len() == 1 && !self.gigantic).then_some(total)),
            ),
            (
                "mount",
                all((workload.bound && page > PageSize::SIZE_2M).then_some(page)),
            ),
            ("drop_in", all(has_drop_in.then_some(unit))),
            ("pod_page", all([pod_page])),
            ("pod_pages", all([self.instance.whole_pages(page)])),
            ("pod_huge", mib(self.instance)),
            (
                "pod_memory",
                mib(if is_thp {
                    self.private + self.instance
                } else {
                    self.private
                }),
            ),
        ];
        own.into_iter()
            .chain(workload.values.iter().cloned())
            .collect()
    }
}
