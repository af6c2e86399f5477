//! The library `jumbo` for Python: the module `jumbo`, of which this is `jumbo._jumbo`.
//!
//! - `array`: memory with a shape and the buffer protocol. `dlpack`: its DLPack capsules.
//! - `shared`: the array that processes share. `dtype`: element types.
//!
//! `packaging/wheel` puts the module into the wheel of the command. `python/jumbo/__init__.pyi` has
//! the types.
//!
//! Invariant: the memory of an array lives while a buffer or a capsule of it does.

mod array;
mod dlpack;
mod dtype;
mod shared;

use std::fs::File;
use std::io;
use std::path::PathBuf;

use jumbo::Root;
use jumbo::file::Map;
use jumbo::gather::OwnedMapping;
use jumbo::populate::{Access, populate};
use jumbo::status::process::usage;
use jumbo::units::Bytes;
use jumbo_inside::pool::{Claim, Room};
use pyo3::exceptions::{PyMemoryError, PyOSError, PyValueError};
use pyo3::prelude::*;
use rustix::io::Errno;

use array::{Array, Layout, Memory};
use dtype::Dtype;

/// Returns the exception of a failure: MemoryError, or the OSError of the errno.
fn failed(what: &str, error: io::Error) -> PyErr {
    let message = format!("{what}: {error}");
    match error.raw_os_error() {
        Some(_) if error.kind() == io::ErrorKind::OutOfMemory => PyMemoryError::new_err(format!(
            "{message}\nhint: free memory, or raise the limit of the control group or RLIMIT_AS"
        )),
        Some(errno) => PyOSError::new_err((errno, message)),
        None if error.kind() == io::ErrorKind::InvalidInput => PyValueError::new_err(message),
        None => PyOSError::new_err(message),
    }
}

/// Claims memory of the host and the control group, which would kill the process at the touch.
///
/// # Errors
/// ENOMEM.
fn room(length: usize) -> io::Result<Claim<'static>> {
    static ROOM: Room = Room::new(64 << 20);
    let claim = ROOM.claim(length);
    claim.ok_or_else(|| io::Error::from_raw_os_error(Errno::NOMEM.raw_os_error()))
}

/// Makes the whole of some memory resident, by several threads.
fn make_resident(address: usize, length: usize) -> io::Result<()> {
    let _claim = room(length)?;
    match populate(address, length, Access::Write, 0) {
        // A kernel before Linux 5.14: the touches do it.
        Ok(_) | Err(Errno::INVAL) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

#[pyfunction]
#[pyo3(signature = (shape, dtype = None, *, populate = false))]
fn empty(
    py: Python<'_>,
    shape: &Bound<'_, PyAny>,
    dtype: Option<&Bound<'_, PyAny>>,
    populate: bool,
) -> PyResult<Array> {
    let layout = Layout::new(shape, Dtype::of(dtype, dtype::FLOAT64)?)?;
    let length = layout.bytes;
    let made = py.detach(|| {
        let mut memory = OwnedMapping::new(Bytes(length.max(1) as u64))?;
        // A kernel without THP refuses.
        let _ = memory.advise_huge();
        if populate {
            make_resident(memory.as_ptr().addr(), memory.len())?;
        }
        Ok(memory)
    });
    let memory = made.map_err(|error| failed(&format!("{length} bytes"), error))?;
    Ok(Array::new(Memory::Private(memory), layout, 0))
}

#[pyfunction]
#[pyo3(signature = (file, dtype = None, shape = None, *, offset = 0, populate = false, copy = false))]
fn memmap(
    py: Python<'_>,
    file: PathBuf,
    dtype: Option<&Bound<'_, PyAny>>,
    shape: Option<&Bound<'_, PyAny>>,
    offset: usize,
    populate: bool,
    copy: bool,
) -> PyResult<Array> {
    let dtype = Dtype::of(dtype, dtype::UINT8)?;
    let map = py.detach(|| {
        let opened = File::open(&file)?;
        match copy {
            true => Map::copy(&opened, 0),
            #[expect(unsafe_code, reason = "maps a file")]
            // SAFETY: the promise of the caller, which the documentation states.
            false => unsafe { Map::open(&opened, populate) },
        }
    });
    let map = map.map_err(|error| failed(&file.display().to_string(), error))?;
    let layout = Layout::within(shape, dtype, map.len(), offset)?;
    Ok(Array::new(Memory::File(map), layout, offset))
}

/// Memory of this process, in bytes.
#[pyclass(frozen, get_all, module = "jumbo")]
struct Status {
    mapped: u64,
    resident: u64,
    huge: u64,
    unknown: u64,
}

#[pymethods]
impl Status {
    fn __repr__(&self) -> String {
        let Self {
            mapped,
            resident,
            huge,
            unknown,
        } = self;
        format!("Status(mapped={mapped}, resident={resident}, huge={huge}, unknown={unknown})")
    }
}

#[pyfunction]
fn status(py: Python<'_>) -> PyResult<Status> {
    let total = py.detach(|| usage(&Root::host(), std::process::id()));
    let total = total
        .map_err(|error| PyOSError::new_err(error.to_string()))?
        .total();
    Ok(Status {
        mapped: total.mapped.0,
        resident: total.bytes.0,
        huge: total.huge.0,
        unknown: total.unknown.0,
    })
}

#[pymodule]
fn _jumbo(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<Array>()?;
    module.add_class::<shared::SharedArray>()?;
    module.add_class::<Status>()?;
    module.add_function(wrap_pyfunction!(empty, module)?)?;
    module.add_function(wrap_pyfunction!(memmap, module)?)?;
    module.add_function(wrap_pyfunction!(shared::_receive, module)?)?;
    module.add_function(wrap_pyfunction!(status, module)?)
}
