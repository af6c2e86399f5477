//! Every system call of this module, made once on memory of its own: [`rehearse`].
#![expect(unsafe_code, reason = "maps and gives up memory of its own")]

use core::ptr;

use rustix::io::Result;
use rustix::mm::{self, Advice, MapFlags, ProtFlags};

use super::unmap::{MAY_BE_HUGE, discard, unmap};
use super::{Mode, Settings, drain, memory, start};

/// Enough for several threads to have something to do.
const LENGTH: usize = 8 << 20;

/// Frees memory in every way that this module knows. For a process that may end by it: one that runs under
/// a seccomp filter of which it is not known what it allows, and that has nothing else to do.
///
/// True where none of the ways was refused; where one was, frees are the kernel's, as ever.
///
/// # Errors
/// The errno of mmap(2) or madvise(2), before anything was tried.
pub fn rehearse() -> Result<bool> {
    let mut done = true;
    for mode in [Mode::Sync, Mode::Background] {
        start(Settings {
            mode,
            threads: 2,
            least: LENGTH / MAY_BE_HUGE,
            small_pages: false,
        });
        let address = touched()?;
        // SAFETY: the memory is ours, and nothing points into it.
        done &= unsafe { discard(address, LENGTH) } == Some(Ok(()));
        // What was dropped is not there any more, and would be left to the kernel.
        fill(address);
        // SAFETY: as above.
        if !unsafe { unmap(address, LENGTH) } {
            done = false;
            // SAFETY: as above.
            unsafe { memory::unmap(address, LENGTH)? };
        }
    }
    drain();
    super::end_workers();
    Ok(done)
}

/// Memory on base pages, all of it resident.
fn touched() -> Result<usize> {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, where the kernel likes, replaces none.
    unsafe {
        let memory = mm::mmap_anonymous(ptr::null_mut(), LENGTH, prot, MapFlags::PRIVATE)?;
        // Refused where the kernel has no huge pages.
        let _ = mm::madvise(memory, LENGTH, Advice::LinuxNoHugepage);
        fill(memory.expose_provenance());
        Ok(memory.expose_provenance())
    }
}

fn fill(address: usize) {
    let memory = ptr::with_exposed_provenance_mut::<u8>(address);
    // SAFETY: all of it is mapped, writable and ours.
    unsafe { ptr::write_bytes(memory, 1, LENGTH) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_way_ends_well() {
        assert_eq!(super::rehearse(), Ok(true));
    }
}
