//! Generated ELF files, for layouts that no linker here makes.

#![allow(clippy::cast_possible_truncation, reason = "the files are small")]

use super::elf::Segment;
use crate::units::Bytes;

/// Returns a segment, with flags as readelf(1) prints them.
pub(super) fn segment(
    flags: &str,
    address: u64,
    offset: u64,
    size: u64,
    memory: u64,
    align: u64,
) -> Segment {
    Segment {
        offset,
        address,
        file_size: Bytes(size),
        memory_size: Bytes(memory),
        align,
        read: flags.contains('R'),
        write: flags.contains('W'),
        execute: flags.contains('E'),
    }
}

/// Returns a file with these PT_LOADs and varied bytes, a PT_NOTE in the last segment, a section
/// for each segment, one outside of all, and the section headers at the end.
pub(super) fn file(kind: u16, loads: &[Segment]) -> Vec<u8> {
    let end = loads
        .iter()
        .map(|load| load.offset + load.file_size.0)
        .max()
        .unwrap_or(0);
    let end = end.next_multiple_of(8);
    let mut file: Vec<u8> = (0..end + 64)
        .map(|at: u64| (at ^ (at >> 8) ^ (at >> 17)) as u8)
        .collect();
    let mut programs: Vec<[u64; 8]> = Vec::new();
    let flags =
        |s: &Segment| u64::from(s.execute) | u64::from(s.write) << 1 | u64::from(s.read) << 2;
    for s in loads {
        programs.push([
            1,
            flags(s),
            s.offset,
            s.address,
            s.address,
            s.file_size.0,
            s.memory_size.0,
            s.align,
        ]);
    }
    if let Some(last) = loads.last().filter(|last| last.file_size.0 >= 16) {
        programs.push([4, 4, last.offset, last.address, last.address, 16, 16, 4]);
        file[last.offset as usize..][..16].copy_from_slice(b"\x01\0\0\0\0\0\0\0\x09\0\0\0A\0\0\0");
    }
    // PT_GNU_STACK, without content.
    programs.push([0x6474_e551, 6, 0, 0, 0, 0, 0, 16]);
    let mut sections: Vec<[u64; 5]> = vec![[0; 5]];
    let own = |s: &Segment| [1, 2, s.address, s.offset, s.file_size.0];
    sections.extend(
        loads
            .iter()
            .filter(|s| s.file_size.0 > 0 && s.offset > 0)
            .map(own),
    );
    sections.push([1, 0, 0, end, 64]);
    let mut put = |at: usize, bytes: &[u8]| {
        file.resize(file.len().max(at + bytes.len()), 0);
        file[at..at + bytes.len()].copy_from_slice(bytes);
    };
    put(0, b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    put(16, &[kind.to_le_bytes(), 62u16.to_le_bytes()].concat());
    put(20, &1u32.to_le_bytes());
    put(24, &[0u64, 64, end + 64].map(u64::to_le_bytes).concat());
    let counts = [64, 56, programs.len(), 64, sections.len(), 0].map(|n| (n as u16).to_le_bytes());
    put(48, &[&[0; 4], counts.as_flattened()].concat());
    for (index, [kind, flags, rest @ ..]) in programs.iter().enumerate() {
        let at = 64 + 56 * index;
        put(
            at,
            &[*kind as u32, *flags as u32].map(u32::to_le_bytes).concat(),
        );
        put(at + 8, rest.map(u64::to_le_bytes).as_flattened());
    }
    for (index, [kind, rest @ ..]) in sections.iter().enumerate() {
        let at = end as usize + 64 + 64 * index;
        put(at, &[0, *kind as u32].map(u32::to_le_bytes).concat());
        put(at + 8, rest.map(u64::to_le_bytes).as_flattened());
        put(at + 40, &[0; 24]);
    }
    file
}
