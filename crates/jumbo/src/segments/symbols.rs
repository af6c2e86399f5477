//! The symbols of text that was moved onto a copy of a process's own, which has no file: [`moved`], for the maps that
//! `perf` reads.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use object::elf;
use object::read::elf::{FileHeader as _, Sym as _};

use super::elf::{Header, LE, Object};
use super::{Error, Sizes};
use crate::kernel::file_id::FileId;
use crate::kernel::smaps::Mapping;
use crate::kernel::{Root, aside, mounts};

/// A function, where it is in the process.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Symbol {
    /// Its first address.
    pub start: u64,
    /// Its size in bytes.
    pub size: u64,
    /// Its name, as the linker knows it.
    pub name: String,
}

/// A segment that was moved, and what is in it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Moved {
    /// The file that it is of.
    pub path: PathBuf,
    /// Its functions, by ascending address. None where the file is stripped.
    pub symbols: Vec<Symbol>,
}

/// The text of `pid` that is anonymous memory where a file's segment belongs, with the symbols of the file.
///
/// # Errors
/// [`Error::Kernel`]: no such process, or one that this user may not look into. Files that cannot be read are left out.
pub fn moved(root: &Root, pid: u32) -> Result<Vec<Moved>, Error> {
    let base = Sizes::read(root)?.base.bytes();
    let maps = aside::maps(root, pid)?;
    let mounts = mounts::by_device(root)?;
    let is_moved = |mapping: &Mapping<'_>| {
        let nameless = mapping.path.is_empty() || mapping.path.starts_with("[anon:jumbo text ");
        mapping.execute && !mapping.write && !mapping.shared && mapping.inode == 0 && nameless
    };
    let moved: Vec<(u64, u64)> = (maps.mappings().filter(is_moved))
        .map(|mapping| (mapping.start, mapping.end))
        .collect();
    let mut found = BTreeMap::new();
    // Where the beginning of a file is mapped, the rest of it was.
    let first = |mapping: &Mapping<'_>| {
        mapping.offset == 0 && mapping.inode != 0 && mapping.path.starts_with('/')
    };
    for mapping in maps.mappings().filter(first) {
        let answers = mounts
            .get(&mapping.device)
            .is_some_and(|kind| !mounts::may_not_answer(kind));
        if moved.is_empty() || !answers || found.contains_key(mapping.path) {
            continue;
        }
        let path = Path::new(mapping.path);
        let Some(data) = read(path, &mapping) else {
            continue;
        };
        if let Some(symbols) = of_file(&data, mapping.start, base, &moved) {
            let path = path.to_owned();
            found.insert(mapping.path.to_owned(), Moved { path, symbols });
        }
    }
    Ok(found.into_values().collect())
}

/// The file behind a mapping, unless another one has its name by now.
fn read(path: &Path, mapping: &Mapping<'_>) -> Option<Vec<u8>> {
    let file = super::open(path).ok()?;
    let is_same = FileId::of(&file).ok()? == FileId::from(mapping);
    let mut data = Vec::new();
    std::io::Read::read_to_end(&mut &file, &mut data).ok()?;
    is_same.then_some(data)
}

/// The functions of a file that is loaded from `start` on, in those of its segments that were moved; `None` where none was.
fn of_file(data: &[u8], start: u64, base: u64, moved: &[(u64, u64)]) -> Option<Vec<Symbol>> {
    let object = Object::read(data).ok()?;
    let first = object.segments.iter().find(|segment| segment.offset == 0)?;
    let load = start.wrapping_sub(first.address);
    let ranges: Vec<_> = (object.segments.iter().filter(|segment| segment.execute))
        .map(|segment| {
            let begin = load.wrapping_add(segment.address);
            (
                begin / base * base,
                (begin + segment.file_size.0).next_multiple_of(base),
            )
        })
        .filter(|range| moved.contains(range))
        .collect();
    if ranges.is_empty() {
        return None;
    }
    let mut symbols = functions(data).unwrap_or_default();
    for symbol in &mut symbols {
        symbol.start = load.wrapping_add(symbol.start);
    }
    let is_inside = |symbol: &Symbol| {
        ranges
            .iter()
            .any(|(begin, end)| (*begin..*end).contains(&symbol.start))
    };
    symbols.retain(is_inside);
    symbols.sort_by_key(|symbol| symbol.start);
    symbols.dedup_by_key(|symbol| symbol.start);
    Some(symbols)
}

/// The functions of a file's symbol table, or of the dynamic one where it is stripped.
fn functions(data: &[u8]) -> object::read::Result<Vec<Symbol>> {
    let header = Header::parse(data)?;
    let sections = header.sections(LE, data)?;
    let mut table = sections.symbols(LE, data, elf::SHT_SYMTAB)?;
    if table.is_empty() {
        table = sections.symbols(LE, data, elf::SHT_DYNSYM)?;
    }
    let mut found = Vec::new();
    for symbol in table
        .iter()
        .filter(|symbol| symbol.st_type() == elf::STT_FUNC)
    {
        if symbol.st_value(LE) == 0 {
            continue;
        }
        let name = table.symbol_name(LE, symbol)?;
        found.push(Symbol {
            start: symbol.st_value(LE),
            size: symbol.st_size(LE).max(1),
            name: String::from_utf8_lossy(name).into_owned(),
        });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_programs_functions_are_found_where_they_are() {
        let data = std::fs::read("/proc/self/exe").unwrap();
        let object = Object::read(&*data).unwrap();
        let text = object
            .segments
            .iter()
            .find(|segment| segment.execute)
            .unwrap();
        let load = 0x7000_0000_0000;
        let begin = load + text.address;
        let moved = [(
            begin / 4096 * 4096,
            (begin + text.file_size.0).next_multiple_of(4096),
        )];
        let symbols = of_file(&data, load, 4096, &moved).unwrap();
        let named = |symbol: &&Symbol| symbol.name.contains("this_programs_functions_are_found");
        let found = symbols.iter().find(named).unwrap();
        assert!(found.start >= moved[0].0 && found.start + found.size <= moved[0].1);
        assert_eq!(of_file(&data, load, 4096, &[(0, 4096)]), None);
    }
}
