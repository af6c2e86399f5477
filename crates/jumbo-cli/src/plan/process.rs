//! `jumbo plan --pid`: the memory of a running program, as a workload.
//!
//! The executable's name identifies the program. A reader process reads the mappings: a target that
//! blocks this read (mmap lock) blocks the reader, for one second, and not this process.

use anyhow::{Context as _, anyhow, bail};
use jumbo::units::{Bytes, PageSize};
use jumbo_host::kernel::{FileError, Root, base_page, task};
use jumbo_host::status::{self, Kind as MemoryKind};

use super::sizing::{PageKind, PlannedMapping, Workload};
use super::{jvm, postgres, qemu, redis};

/// Memory of a process, by the possible kind of huge page.
#[derive(Debug, Default)]
struct ProcessMemory {
    /// Mappings of hugetlb pages, with their page sizes.
    hugetlb: Vec<(PageSize, PlannedMapping)>,
    /// Largest shared mapping, of any page size.
    shared: Bytes,
    /// Resident anonymous memory.
    anonymous: Bytes,
    /// Resident memory on base pages or THPs, except shared memory.
    private: Bytes,
}

fn read(root: &Root, pid: u32) -> Result<ProcessMemory, FileError> {
    let mut memory = ProcessMemory::default();
    let base = base_page(root);
    status::observer(root)?.each(pid, |kind, mapping| {
        let page = mapping.kernel_page_size.unwrap_or(base);
        let (size, is_shared) = (mapping.size(), kind == MemoryKind::Shared);
        if page > base {
            let region = PlannedMapping::new(format!("mapping at {:x}", mapping.start), size);
            memory.hugetlb.push((page, region));
        } else if !is_shared {
            memory.private += mapping.rss;
        }
        memory.anonymous += mapping.anonymous;
        if is_shared {
            memory.shared = memory.shared.max(size);
        }
    })?;
    Ok(memory)
}

/// Size after the last `option`, as in `-Xmx8g`, `-m 4G`, `-m size=4G,...`. A bare number is in
/// `unit`.
fn size(arguments: &[String], option: &str, unit: u64) -> Option<Bytes> {
    let value = |(at, argument): (usize, &String)| {
        let value = argument.strip_prefix(option)?;
        let value = match value {
            "" => arguments.get(at + 1)?,
            value => value,
        };
        let value = value.split(',').next()?;
        let value = value.strip_prefix("size=").unwrap_or(value);
        let bytes: Bytes = value.parse().ok()?;
        let is_bare = value.ends_with(|c: char| c.is_ascii_digit());
        Some(Bytes(bytes.0.saturating_mul(if is_bare {
            unit
        } else {
            1
        })))
    };
    arguments.iter().enumerate().filter_map(value).next_back()
}

/// Workload of `pid`, and its resident memory outside huge pages.
pub(super) fn workload(
    root: &Root,
    pid: u32,
    page: Option<PageSize>,
    nodes: u32,
) -> anyhow::Result<(Workload, Bytes)> {
    let name = task::name(root, pid).map_err(|error| match error.is_missing() {
        true => {
            anyhow!("there is no process {pid}\nhint: `pidof NAME` prints the number of a program")
        }
        false => error.into(),
    })?;
    let exe = std::fs::read_link(root.path(format!("proc/{pid}/exe"))).unwrap_or_default();
    let exe = exe.file_name().unwrap_or_default().to_string_lossy();
    // By the file, or by the task's name: Debian's redis-server is a link to another file.
    let file = exe.strip_suffix(" (deleted)").unwrap_or(&exe);
    let is = |known: &[&str]| known.contains(&file) || known.contains(&name.as_str());
    let memory = read(root, pid).map_err(|error| match error.is_denied() {
        true => anyhow!("{error}\nhint: that takes the user of {name}, or root"),
        false => error.into(),
    })?;
    if memory.hugetlb.is_empty() && memory.private == Bytes(0) {
        bail!("{name} ({pid}) has no memory of its own: it is a kernel thread or a zombie");
    }
    let arguments = task::arguments(root, pid)?;
    let page = page.or(memory.hugetlb.first().map(|(size, _)| *size));
    let mut workload = if is(&["postgres"]) {
        let args = postgres::Args {
            measured: Some(memory.shared),
            ..postgres::Args::default()
        };
        args.workload(page)?
    } else if is(&["redis-server", "valkey-server"]) {
        redis::Args {
            data_set: memory.anonymous,
        }
        .workload(page)
    } else if is(&["java"]) {
        let heap = size(&arguments, "-Xmx", 1).or_else(|| size(&arguments, "-XX:MaxHeapSize=", 1));
        let heap =
            heap.context("the command line has no -Xmx\nhint: `jumbo plan jvm --heap SIZE`")?;
        let code = size(&arguments, "-XX:ReservedCodeCacheSize=", 1);
        let args = jvm::Args {
            heap,
            code_cache: code.unwrap_or(Bytes(240 << 20)),
            java: String::from("17"),
            thp: arguments
                .iter()
                .any(|argument| argument == "-XX:+UseTransparentHugePages"),
        };
        args.workload(page)
    } else if file.starts_with("qemu-") || name.starts_with("qemu-") {
        let ram = size(&arguments, "-m", 1 << 20);
        let memory =
            ram.context("the command line has no -m\nhint: `jumbo plan qemu --memory SIZE`")?;
        qemu::Args { memory }.workload(page, nodes)?
    } else {
        other(is(&["mariadbd", "mysqld"]), &memory, page)?
    };
    // Existing mappings of hugetlb pages are exact.
    let regions = memory.hugetlb.into_iter().map(|(_, region)| region);
    let regions: Vec<_> = regions.collect();
    if !regions.is_empty() && !workload.bound {
        workload.regions = regions;
        workload.source = String::from("the mappings of hugetlb pages that it has");
    } else if workload.source == "as given" {
        workload.source = format!("the memory and command line of {name} ({pid})");
    }
    Ok((workload, memory.private))
}

/// Workload of MariaDB, MySQL or an unknown program: its hugetlb pages if it has any, else THPs.
fn other(
    is_mysql: bool,
    memory: &ProcessMemory,
    page: Option<PageSize>,
) -> anyhow::Result<Workload> {
    let (known, kind) = match memory.hugetlb.is_empty() {
        true if is_mysql => bail!(
            "the mappings of the server do not tell its buffer pool\n\
             hint: `jumbo plan mysql --buffer-pool SIZE`, with innodb_buffer_pool_size"
        ),
        true => ("custom", PageKind::Thp),
        false if is_mysql => ("mysql", PageKind::Mapped),
        false => ("custom", PageKind::Mapped),
    };
    let region = PlannedMapping::new("anonymous memory", memory.anonymous);
    let mut workload = Workload::new(known, kind, page, vec![region]);
    if kind == PageKind::Thp && memory.shared >= Bytes(workload.page.bytes()) {
        workload.notes = vec![format!(
            "it maps {} of shared memory too: `jumbo thp set shmem=within_size` gives that THPs",
            memory.shared
        )];
    }
    Ok(workload)
}
