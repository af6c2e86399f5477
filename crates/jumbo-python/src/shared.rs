//! The array that processes share: [`SharedArray`].
//!
//! Without a name it is a memfd with a sealed length, which ends with its last process. With one it
//! is a file of shm_open(3), which stays until `unlink`.
//!
//! Its memory is allocated when it is made, on huge pages where there are some: a lack is an
//! exception, not a signal at the touch.
#![expect(unsafe_code, reason = "maps files that other processes have")]

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd, RawFd};

use jumbo::shmem::{Blocks, Error, Region};
use jumbo::units::Bytes;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyTuple, PyType};
use rustix::fs::{FallocateFlags, Mode, fallocate, ftruncate};
use rustix::shm::{self, OFlags};

use crate::array::{Array, Layout, Memory};
use crate::dtype::{self, Dtype};
use crate::{failed, room};

/// An array that processes share, by its name or its descriptor.
#[pyclass(extends = Array, frozen, module = "jumbo")]
#[derive(Debug)]
pub(crate) struct SharedArray {
    #[pyo3(get)]
    name: Option<String>,
}

fn io_error(error: Error) -> io::Error {
    match error {
        Error::Call { errno, .. } => errno.into(),
        other => io::Error::other(other.to_string()),
    }
}

/// Makes a region, with its memory.
fn make(length: usize, name: Option<&str>) -> io::Result<Region> {
    // Until it is allocated, no other thread counts on the memory.
    let _claim = room(length)?;
    let length = length.max(1) as u64;
    let Some(name) = name else {
        let mut region = Region::builder(Bytes(length)).build().map_err(io_error)?;
        region.seal().map_err(io_error)?;
        allocate(&region)?;
        return Ok(region);
    };
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR;
    let file = shm::open(name, flags, Mode::RUSR | Mode::WUSR)?;
    let sized = || {
        ftruncate(&file, length)?;
        // SAFETY: the documentation forbids others to shorten the file.
        let region = unsafe { Region::attach(file.try_clone()?) }.map_err(io_error)?;
        allocate(&region)?;
        Ok(region)
    };
    sized().inspect_err(|_| {
        let _ = shm::unlink(name);
    })
}

/// Allocates all memory of a region, on huge pages where there are some.
fn allocate(region: &Region) -> io::Result<()> {
    match region.collapse(Blocks::All) {
        // A kernel before Linux 6.1, or one that has this memory in base pages only.
        Ok(_) | Err(Error::Call { .. }) => {}
        Err(error) => return Err(io_error(error)),
    }
    // SAFETY: the call adds pages, and neither truncates nor punches holes.
    let file = unsafe { region.file() };
    let all = || fallocate(file, FallocateFlags::empty(), 0, region.size().0);
    rustix::io::retry_on_intr(all).map_err(io::Error::from)
}

fn shared(region: Region, layout: Layout, name: Option<String>) -> PyClassInitializer<SharedArray> {
    let base = Array::new(Memory::Shared(Box::new(region)), layout, 0);
    PyClassInitializer::from(base).add_subclass(SharedArray { name })
}

fn attach<'py>(
    py: Python<'py>,
    file: io::Result<OwnedFd>,
    what: &str,
    shape: Option<&Bound<'py, PyAny>>,
    dtype: Option<&Bound<'py, PyAny>>,
    name: Option<String>,
) -> PyResult<Bound<'py, SharedArray>> {
    // SAFETY: the promise of the caller, which the documentation states.
    let region = file.and_then(|file| unsafe { Region::attach(file) }.map_err(io_error));
    let region = region.map_err(|error| failed(what, error))?;
    let length = usize::try_from(region.size().0).unwrap_or(usize::MAX);
    let dtype = Dtype::of(dtype, dtype::FLOAT64)?;
    let layout = Layout::within(shape, dtype, length, 0)?;
    Bound::new(py, shared(region, layout, name))
}

/// The array that a process got by a pickle: a descriptor of multiprocessing.
#[pyfunction]
pub(crate) fn _receive<'py>(
    descriptor: &Bound<'py, PyAny>,
    shape: &Bound<'py, PyAny>,
    dtype: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, SharedArray>> {
    let number: RawFd = descriptor.call_method0("detach")?.extract()?;
    let py = descriptor.py();
    let class = py.get_type::<SharedArray>();
    let made = SharedArray::attach(
        &class,
        number.into_pyobject(py)?.as_any(),
        Some(shape),
        Some(dtype),
    );
    py.import("os")?.call_method1("close", (number,))?;
    made
}

#[pymethods]
impl SharedArray {
    #[new]
    #[pyo3(signature = (shape, dtype = None, *, name = None))]
    fn new(
        py: Python<'_>,
        shape: &Bound<'_, PyAny>,
        dtype: Option<&Bound<'_, PyAny>>,
        name: Option<String>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let layout = Layout::new(shape, Dtype::of(dtype, dtype::FLOAT64)?)?;
        let made = py.detach(|| make(layout.bytes, name.as_deref()));
        let what = || {
            format!(
                "{} shared bytes {}",
                layout.bytes,
                name.as_deref().unwrap_or("")
            )
        };
        let region = made.map_err(|error| failed(what().trim_end(), error))?;
        Ok(shared(region, layout, name))
    }

    #[classmethod]
    #[pyo3(signature = (source, shape = None, dtype = None))]
    fn attach<'py>(
        class: &Bound<'py, PyType>,
        source: &Bound<'py, PyAny>,
        shape: Option<&Bound<'py, PyAny>>,
        dtype: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, Self>> {
        let py = class.py();
        if let Ok(name) = source.extract::<String>() {
            let file = shm::open(&*name, OFlags::RDWR, Mode::empty()).map_err(io::Error::from);
            return attach(py, file, &name.clone(), shape, dtype, Some(name));
        }
        let number: RawFd = source.extract()?;
        if number < 0 {
            return Err(PyValueError::new_err(format!("descriptor {number}")));
        }
        // SAFETY: of this call alone, and fcntl(2) says whether it is open.
        let theirs = unsafe { BorrowedFd::borrow_raw(number) };
        let own = rustix::io::fcntl_dupfd_cloexec(theirs, 0).map_err(io::Error::from);
        attach(py, own, &format!("descriptor {number}"), shape, dtype, None)
    }

    /// The descriptor, which ends with the array.
    fn fileno(slf: &Bound<'_, Self>) -> PyResult<RawFd> {
        slf.as_super().get().with(|memory| match memory {
            // SAFETY: the promise of the caller, which the documentation states.
            Memory::Shared(region) => Ok(unsafe { region.file() }.as_raw_fd()),
            _ => Err(PyValueError::new_err("no descriptor")),
        })
    }

    /// Removes the name. The memory stays while arrays have it.
    fn unlink(&self) -> PyResult<()> {
        let Some(name) = &self.name else {
            return Err(PyValueError::new_err("the array has no name"));
        };
        shm::unlink(&**name).map_err(|errno| {
            let message = format!("{name}: {errno}");
            PyOSError::new_err((errno.raw_os_error(), message))
        })
    }

    /// Pickles the name; without one the descriptor, which multiprocessing passes.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyTuple>> {
        let (py, array) = (slf.py(), slf.as_super().get());
        let (shape, dtype) = (array.shape(py)?, array.dtype());
        let number = Self::fileno(slf)?;
        if let Some(name) = &slf.get().name {
            let attach = slf.get_type().getattr("attach")?;
            return (attach, (name, shape, dtype)).into_pyobject(py);
        }
        let reduction = py.import("multiprocessing.reduction")?;
        let descriptor = reduction.call_method1("DupFd", (number,))?;
        let receive = py.import("jumbo._jumbo")?.getattr("_receive")?;
        (receive, (descriptor, shape, dtype)).into_pyobject(py)
    }
}
