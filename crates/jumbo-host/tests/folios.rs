//! Folio sizes on the real kernel, which needs root.

use std::time::{Duration, Instant};

use jumbo::gather::OwnedMapping;
use jumbo::units::Bytes;
use jumbo_host::kernel::folios::Folios;
use jumbo_host::kernel::{Root, base_page, thp};
use jumbo_host::status::Kind;
use jumbo_host::status::process::Observer;
use jumbo_sys::collapse;
use rustix::io::Errno;

/// Reports that a test cannot run here. With `JUMBO_TEST_STRICT=1` that is a failure.
fn skip(name: &str, reason: impl std::fmt::Display) {
    assert!(
        std::env::var_os("JUMBO_TEST_STRICT").is_none_or(|value| value != "1"),
        "SKIP {name}: {reason} (JUMBO_TEST_STRICT=1)"
    );
    eprintln!("SKIP {name}: {reason}");
}

#[test]
fn collapsed_memory_is_seen_in_folios_of_the_pmd_size() {
    const NAME: &str = "collapsed_memory_is_seen_in_folios_of_the_pmd_size";
    let (root, pid) = (Root::host(), std::process::id());
    let (base, pmd) = (base_page(&root), thp::pmd_size(&root).unwrap());
    let mut folios = match Folios::open(&root, base, pmd) {
        Ok(folios) => folios,
        Err(error) => return skip(NAME, error),
    };
    let mut memory = OwnedMapping::new(Bytes(2 * pmd.bytes())).unwrap();
    let size = memory.len() / 2;
    let lead = memory.as_ptr().addr().next_multiple_of(size) - memory.as_ptr().addr();
    memory[lead] = 1;
    let address = memory.as_ptr().addr() + lead;
    let (start, end) = (address as u64, (address + size) as u64);
    let one_page = folios.sizes(pid, start, end).unwrap();
    // EAGAIN: the page is busy, retry.
    let asked = Instant::now();
    let answer = loop {
        match collapse(address, size) {
            Err(Errno::AGAIN) if asked.elapsed() < Duration::from_secs(30) => {}
            answer => break answer,
        }
    };
    if let Err(error) = answer {
        return skip(NAME, format!("MADV_COLLAPSE: {error}"));
    }
    let collapsed = folios.sizes(pid, start, end).unwrap();
    assert_eq!(
        one_page.values().copied().sum::<Bytes>(),
        Bytes(base.bytes())
    );
    assert_eq!(collapsed, [(pmd, Bytes(pmd.bytes()))].into());

    let observer = Observer::new(&root).unwrap();
    let exact = observer
        .usage_with_folios(pid, &mut folios)
        .unwrap()
        .kind(Kind::Heap);
    assert!(exact.huge.0 >= pmd.bytes());
    assert_eq!(
        exact.folios.values().copied().sum::<Bytes>() + exact.unknown,
        exact.bytes
    );
}
