//! `jumbo bench files`: a data file that a program maps and reads, in base pages of the page cache and
//! in huge folios (`jumbo files prime`).
//!
//! The file is warm on both sides: all of it is in the page cache, and has been read by this machine's
//! processors (in a virtual machine the first touch of what a device wrote costs extra). On the base
//! side it came in page by page, as a program that reads at random leaves it. Each sample proves by
//! smaps how the file was mapped.

use std::cell::Cell;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use jumbo::units::Bytes;
use jumbo_host::kernel::Root;
use jumbo_host::kernel::smaps::Smaps;
use jumbo_host::segments::prime::prime;
use jumbo_host::segments::running::Running;
use rustix::fs::{Advice, fadvise};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use tempfile::NamedTempFile;

use crate::figures::{Figures, figures, ms, with};
use crate::group::{self, Group, rows};
use crate::launch::Launch;
use crate::memory::{check_available, own_usage, preload_figure};
use crate::table::Table;
use crate::task::{FileTask, Task};
use crate::work::Worker;
use crate::{Error, Settings, claim, interrupt};

/// Minimum size: the TLB would cover a large part of a smaller file.
pub const MIN_SIZE: Bytes = Bytes(64 << 20);

/// Reads at random for each base page of the file: the passes dominate with fewer.
const READS_PER_PAGE: u64 = 32;

const BASE_PAGE: usize = 4096;
const CHUNK: usize = 1 << 20;

/// Measures the table, with a file of `size` bytes in the folder for temporary files.
///
/// # Errors
/// [`Error`]; [`Error::Claim`] where the file system has no huge folios.
pub fn measure(settings: &Settings, size: Bytes) -> Result<Table, Error> {
    let size = Bytes(size.0 / CHUNK as u64 * CHUNK as u64);
    check_available(Bytes(size.0 * 2))?;
    let table = Table::new("files", format!("a file of {size}"), settings)?;
    settings.progress.set_message("writing the file");
    let file = DataFile::make(size)?;
    let task = FileTask {
        path: file.file.path().to_owned(),
        reads: size.0 / BASE_PAGE as u64 * READS_PER_PAGE,
    };
    let worker = || Worker::new(Launch::Plain, Task::File(task.clone()));
    let (base_worker, huge_worker) = (worker(), worker());
    let mut group = Group::new(settings, "reads");
    let base = group.prepared(
        "in base pages",
        || file.in_base_pages(),
        move || base_worker.sample(settings, &[claim::exactly("file_huge_bytes", 0)]),
    );
    let huge = group.prepared(
        "primed",
        || file.in_huge_folios(),
        || {
            let claims = [claim::nearly_all("file_huge_bytes", size)];
            let figures = huge_worker.sample(settings, &claims)?;
            Ok(with(figures, [("prime_ms", ms(file.primed.get()))]))
        },
    );
    let (pass, gather) = ("a read in each base page", "reads at random");
    rows! { group;
        "pass_aa" => pass, "pass_ms", base / base;
        "pass" => pass, "pass_ms", base / huge;
        "faults" => "faults of that", "touch_faults", base / huge;
        "gather_aa" => gather, "gather_ms", base / base;
        "gather" => gather, "gather_ms", base / huge;
    }
    group.value("prime", "prime_ms", huge);
    group::measure(settings, table, vec![group])
}

/// # Errors
/// [`Error::Interrupted`]: the file is removed on the way.
fn go_on() -> Result<(), Error> {
    interrupt::asked().map_or(Ok(()), |signal| Err(Error::Interrupted(signal)))
}

struct DataFile {
    file: NamedTempFile,
    size: Bytes,
    /// Time of the last priming.
    primed: Cell<Duration>,
}

impl DataFile {
    fn make(size: Bytes) -> Result<Self, Error> {
        let folder = std::env::temp_dir();
        let failed = |error| Error::Program(folder.display().to_string(), error);
        let mut file = NamedTempFile::new().map_err(failed)?;
        let mut chunk = vec![0; CHUNK];
        for _ in 0..size.0 / CHUNK as u64 {
            go_on()?;
            fastrand::fill(&mut chunk);
            file.write_all(&chunk).map_err(failed)?;
        }
        file.as_file().sync_all().map_err(failed)?;
        let primed = Cell::default();
        Ok(Self { file, size, primed })
    }

    /// Reads all of it with calls of so many bytes.
    fn read(&self, bytes: usize) -> Result<(), Error> {
        let mut buffer = vec![0; bytes];
        for at in (0..self.size.0).step_by(bytes) {
            go_on()?;
            self.file.as_file().read_exact_at(&mut buffer, at)?;
        }
        Ok(())
    }

    fn in_base_pages(&self) -> Result<Bytes, Error> {
        let file = self.file.as_file();
        fadvise(file, 0, None, Advice::DontNeed)?;
        // Without readahead.
        fadvise(file, 0, None, Advice::Random)?;
        self.read(BASE_PAGE)?;
        fadvise(file, 0, None, Advice::Normal)?;
        Ok(Bytes(0))
    }

    fn in_huge_folios(&self) -> Result<Bytes, Error> {
        const HINT: &str = "set TMPDIR to a folder of xfs, or of ext4 on Linux 6.16 or later";
        let root = Root::host();
        fadvise(self.file.as_file(), 0, None, Advice::DontNeed)?;
        let running = Running::read(&root)?;
        let clock = Instant::now();
        let primed = prime(&root, self.file.path(), &running, false, &mut |_, _| {})?;
        self.primed.set(clock.elapsed());
        if let Some(why) = primed
            .why_not
            .filter(|_| primed.huge.0 * 10 < primed.whole.0 * 9)
        {
            return Err(Error::claim(why, HINT));
        }
        self.read(CHUNK)?;
        Ok(Bytes(0))
    }
}

/// [`Task::File`]: times and faults of the reads, and how the file was mapped.
pub(crate) fn read(task: &FileTask) -> Result<Figures, Error> {
    let file = std::fs::File::open(&task.path)?;
    let size = usize::try_from(file.metadata()?.len()).unwrap_or(0);
    // SAFETY: a new mapping, at an address of the kernel's choice.
    let start = unsafe {
        mmap(
            null_mut(),
            size,
            ProtFlags::READ,
            MapFlags::SHARED,
            &file,
            0,
        )
    };
    let start = start
        .map_err(|error| Error::Map(error.into()))?
        .cast::<u8>();
    let word = |at: usize| {
        debug_assert!(at + size_of::<u64>() <= size);
        // SAFETY: within the mapping of a file that nobody shortens, and aligned.
        unsafe { start.add(at).cast::<u64>().read_volatile() }
    };
    let faults = || own_usage().map(|usage| (usage.ru_minflt + usage.ru_majflt) as f64);
    let (before, clock) = (faults()?, Instant::now());
    let mut sum = (0..size / BASE_PAGE).fold(0_u64, |sum, page| sum ^ word(page * BASE_PAGE));
    let (pass, touch_faults) = (clock.elapsed(), faults()? - before);
    let mut random = fastrand::Rng::with_seed(1);
    let clock = Instant::now();
    for _ in 0..task.reads {
        sum ^= word(random.usize(..size / size_of::<u64>()) * size_of::<u64>());
    }
    let gathered = clock.elapsed();
    std::hint::black_box(sum);
    let smaps = Smaps::read(&Root::host(), std::process::id())?;
    let address = start.addr() as u64;
    let mapping = smaps.mappings().find(|mapping| mapping.start == address);
    let mapping = mapping.unwrap_or_default();
    Ok(figures([
        ("pass_ms", ms(pass)),
        ("touch_faults", touch_faults),
        ("gather_ms", ms(gathered)),
        ("resident_bytes", mapping.rss.0 as f64),
        ("file_huge_bytes", mapping.file_pmd_mapped.0 as f64),
        preload_figure()?,
    ]))
}
