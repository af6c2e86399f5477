//! Memory with a shape: [`Array`], which exports buffers.
#![expect(unsafe_code, reason = "fills the structure of the buffer protocol")]

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use jumbo::file::Map;
use jumbo::gather::OwnedMapping;
use jumbo::shmem::Region;
use jumbo::status::Mapped;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::dtype::Dtype;
use crate::{dlpack, failed};

/// Dimensions of a buffer: PyBUF_MAX_NDIM.
const MAX_DIMENSIONS: usize = 64;

/// Owner of the bytes.
#[derive(Debug)]
pub(crate) enum Memory {
    Private(OwnedMapping),
    Shared(Box<Region>),
    File(Map),
}

impl Memory {
    /// Returns the address and length of all bytes. An empty file has a dangling address.
    fn range(&self) -> PyResult<(*const u8, usize)> {
        Ok(match self {
            Self::Private(memory) => (memory.as_ptr(), memory.len()),
            Self::File(map) => (map.as_ptr(), map.len()),
            Self::Shared(region) => {
                let length = usize::try_from(region.size().0).unwrap_or(0);
                let bytes = region.bytes(0..0);
                let bytes = bytes.map_err(|error| PyBufferError::new_err(error.to_string()))?;
                (bytes.as_ptr().cast(), length)
            }
        })
    }
}

/// Elements in C order.
#[derive(Debug)]
pub(crate) struct Layout {
    pub(crate) dtype: &'static Dtype,
    pub(crate) shape: Box<[isize]>,
    /// In elements.
    pub(crate) strides: Box<[isize]>,
    strides_bytes: Box<[isize]>,
    pub(crate) bytes: usize,
}

impl Layout {
    /// Reads a shape, an int or a sequence of ints.
    ///
    /// # Errors
    /// TypeError for another kind; OverflowError, ValueError for a negative or huge one.
    pub(crate) fn new(shape: &Bound<'_, PyAny>, dtype: &'static Dtype) -> PyResult<Self> {
        let shape: Box<[isize]> = match shape.extract::<isize>() {
            Ok(length) => [length].into(),
            // The error of a single number says more than that of a sequence.
            Err(error) if shape.len().is_err() => return Err(error),
            Err(_) => shape.extract::<Vec<isize>>()?.into(),
        };
        Self::of(shape, dtype)
    }

    fn of(shape: Box<[isize]>, dtype: &'static Dtype) -> PyResult<Self> {
        let invalid = |why| PyValueError::new_err(format!("shape {shape:?} {why}"));
        if shape.iter().any(|length| *length < 0) {
            return Err(invalid("has a negative dimension"));
        }
        if shape.len() > MAX_DIMENSIONS {
            return Err(invalid("has more than 64 dimensions"));
        }
        let mut strides: Box<[isize]> = shape.clone();
        // A dimension of 0 makes the others no smaller: their strides must fit too.
        let mut stride = Some(1_isize);
        for (to, length) in strides.iter_mut().zip(&shape).rev() {
            *to = stride.unwrap_or(0);
            stride = stride.and_then(|stride| stride.checked_mul((*length).max(1)));
        }
        let size = dtype.bytes.cast_signed();
        let bytes = stride.and_then(|elements| elements.checked_mul(size));
        let bytes = bytes.ok_or_else(|| invalid("has more bytes than addresses"))?;
        let strides_bytes = strides.iter().map(|stride| stride * size).collect();
        let bytes = match shape.contains(&0) {
            true => 0,
            false => bytes.cast_unsigned(),
        };
        Ok(Self {
            dtype,
            shape,
            strides,
            strides_bytes,
            bytes,
        })
    }

    /// Returns the layout in memory of `length` bytes, from `offset` on. Without a shape: all of
    /// it, in one dimension.
    ///
    /// # Errors
    /// Those of [`Layout::new`]; ValueError beyond the memory, or for a part of an element.
    pub(crate) fn within(
        shape: Option<&Bound<'_, PyAny>>,
        dtype: &'static Dtype,
        length: usize,
        offset: usize,
    ) -> PyResult<Self> {
        let beyond = |bytes: usize| {
            let message = format!("{bytes} bytes at offset {offset} of {length}");
            PyValueError::new_err(message)
        };
        let rest = length.checked_sub(offset).ok_or_else(|| beyond(0))?;
        let layout = match shape {
            Some(shape) => Self::new(shape, dtype)?,
            None => Self::of([(rest / dtype.bytes).cast_signed()].into(), dtype)?,
        };
        match layout.bytes {
            bytes if bytes > rest => Err(beyond(bytes)),
            bytes if shape.is_none() && bytes != rest => Err(PyValueError::new_err(format!(
                "{rest} bytes are no whole elements of {} bytes: give a dtype or shape",
                dtype.bytes
            ))),
            _ => Ok(layout),
        }
    }
}

/// An array in C order, whose memory is private, shared, or a file.
#[pyclass(frozen, subclass, weakref, module = "jumbo")]
#[derive(Debug)]
pub(crate) struct Array {
    state: Mutex<State>,
    pub(crate) layout: Layout,
    offset: usize,
}

#[derive(Debug)]
struct State {
    /// `None` after a close.
    memory: Option<Memory>,
    /// Buffers and capsules that are in use.
    exports: usize,
}

impl State {
    fn memory(&self) -> PyResult<&Memory> {
        let closed = || PyValueError::new_err("the array is closed");
        self.memory.as_ref().ok_or_else(closed)
    }
}

impl Array {
    pub(crate) fn new(memory: Memory, layout: Layout, offset: usize) -> Self {
        let state = Mutex::new(State {
            memory: Some(memory),
            exports: 0,
        });
        Self {
            state,
            layout,
            offset,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls a function with the memory.
    ///
    /// # Errors
    /// ValueError: closed.
    pub(crate) fn with<T>(&self, body: impl FnOnce(&Memory) -> PyResult<T>) -> PyResult<T> {
        body(self.lock().memory()?)
    }

    /// Returns the address of the first element, which is valid until [`Array::release`].
    ///
    /// # Errors
    /// ValueError: closed.
    pub(crate) fn export(&self) -> PyResult<*mut c_void> {
        let mut state = self.lock();
        let (address, _) = state.memory()?.range()?;
        state.exports += 1;
        // The layout lies within the memory.
        Ok(address.wrapping_add(self.offset).cast_mut().cast())
    }

    pub(crate) fn release(&self) {
        self.lock().exports -= 1;
    }
}

#[pymethods]
impl Array {
    /// # Safety
    /// Of the buffer protocol: `view` is a structure to fill.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let array = slf.get();
        let has = |wanted: c_int| flags & wanted == wanted;
        // SAFETY: the caller's promise. The protocol wants it null after a failure.
        unsafe { (*view).obj = ptr::null_mut() };
        let is_readonly = array.readonly()?;
        if is_readonly && has(ffi::PyBUF_WRITABLE) {
            return Err(PyBufferError::new_err("the array is read-only"));
        }
        let Layout {
            dtype,
            shape,
            strides_bytes,
            bytes,
            ..
        } = &array.layout;
        if has(ffi::PyBUF_F_CONTIGUOUS) && !has(ffi::PyBUF_ANY_CONTIGUOUS) && shape.len() > 1 {
            return Err(PyBufferError::new_err("the array is in C order"));
        }
        let part = |wanted, at: *const isize| match has(wanted) {
            true => at.cast_mut(),
            false => ptr::null_mut(),
        };
        let buffer = ffi::Py_buffer {
            buf: array.export()?,
            len: bytes.cast_signed(),
            itemsize: dtype.bytes.cast_signed(),
            readonly: c_int::from(is_readonly),
            ndim: match has(ffi::PyBUF_ND) {
                true => c_int::try_from(shape.len())?,
                false => 1,
            },
            format: match has(ffi::PyBUF_FORMAT) {
                true => dtype.format.as_ptr().cast_mut(),
                false => ptr::null_mut(),
            },
            shape: part(ffi::PyBUF_ND, shape.as_ptr()),
            strides: part(ffi::PyBUF_STRIDES, strides_bytes.as_ptr()),
            suboffsets: ptr::null_mut(),
            internal: ptr::null_mut(),
            obj: slf.into_ptr(),
        };
        // SAFETY: the caller's promise. `obj` keeps the array, which has all that is pointed to.
        unsafe { view.write(buffer) };
        Ok(())
    }

    /// # Safety
    /// Of the buffer protocol: once for each buffer.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.release();
    }

    /// Without `data`: readers take the buffer, so that it counts as an export.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        // NumPy ignores the error of the buffer.
        self.with(|_| Ok(()))?;
        let dictionary = PyDict::new(py);
        let order = match self.layout.dtype.bytes {
            1 => '|',
            _ => '<',
        };
        dictionary.set_item("version", 3)?;
        dictionary.set_item("shape", self.shape(py)?)?;
        dictionary.set_item("typestr", format!("{order}{}", self.layout.dtype.code))?;
        Ok(dictionary)
    }

    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        slf: Bound<'py, Self>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if stream.is_some() || dl_device.is_some_and(|device| device != dlpack::CPU) {
            return Err(PyBufferError::new_err("the array is in memory of the CPU"));
        }
        if copy == Some(true) {
            return Err(PyBufferError::new_err("the array is not copied"));
        }
        dlpack::capsule(slf, max_version.is_some_and(|(major, _)| major >= 1))
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::CPU
    }

    #[getter]
    pub(crate) fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &*self.layout.shape)
    }

    #[getter]
    pub(crate) fn dtype(&self) -> &'static str {
        self.layout.dtype.name
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.layout.bytes
    }

    #[getter]
    pub(crate) fn readonly(&self) -> PyResult<bool> {
        self.with(|memory| Ok(matches!(memory, Memory::File(_))))
    }

    #[getter]
    fn closed(&self) -> bool {
        self.lock().memory.is_none()
    }

    #[getter]
    fn huge(&self) -> PyResult<u64> {
        let (address, length) = self.with(Memory::range)?;
        if length == 0 {
            return Ok(0);
        }
        let end = address.addr() + length.next_multiple_of(rustix::param::page_size());
        let mapped = Mapped::of(address.addr()..end);
        Ok(mapped
            .map_err(|error| failed("PAGEMAP_SCAN", error))?
            .huge
            .0)
    }

    /// How a file came onto its pages; `None` for other memory.
    #[getter]
    fn method(&self) -> PyResult<Option<String>> {
        self.with(|memory| {
            Ok(match memory {
                Memory::File(map) => Some(map.method().to_string()),
                _ => None,
            })
        })
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let mut state = self.lock();
        if state.exports > 0 {
            let message = format!("{} buffers of the array are in use", state.exports);
            return Err(PyBufferError::new_err(message));
        }
        let memory = state.memory.take();
        drop(state);
        py.detach(|| drop(memory));
        Ok(())
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        let array = slf.get();
        let closed = match array.closed() {
            true => ", closed",
            false => "",
        };
        let (kind, shape) = (slf.get_type().name()?, array.shape(slf.py())?);
        Ok(format!("<jumbo.{kind} {shape} {}{closed}>", array.dtype()))
    }
}
