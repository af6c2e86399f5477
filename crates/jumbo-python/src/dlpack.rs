//! DLPack capsules of an array: [`capsule`].
//!
//! The layouts are those of `dlpack.h` 1.0, and the names those of the Python specification
//! (<https://dmlc.github.io/dlpack/latest/python_spec.html>): a consumer renames the capsule, and
//! calls the deleter later; a capsule that keeps its name does so at its end.
#![expect(unsafe_code, reason = "a C interface of pointers")]

use std::ffi::{CStr, c_void};

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::array::Array;

/// kDLCPU, and its only device.
pub(crate) const CPU: (i32, i32) = (1, 0);
/// DLPACK_FLAG_BITMASK_READ_ONLY.
const READ_ONLY: u64 = 1;

/// DLTensor.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    dimensions: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

type Deleter<T> = unsafe extern "C" fn(*mut T);

/// DLManagedTensor. The context is the array, which has the shape and the memory.
#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Deleter<Self>,
}

/// DLManagedTensorVersioned.
#[repr(C)]
struct ManagedVersioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Deleter<Self>,
    flags: u64,
    tensor: Tensor,
}

trait Carrier: Sized {
    const NAME: &'static CStr;

    fn new(tensor: Tensor, context: *mut c_void, flags: u64) -> Self;

    fn context(&self) -> *mut c_void;
}

impl Carrier for Managed {
    const NAME: &'static CStr = c"dltensor";

    fn new(tensor: Tensor, context: *mut c_void, _flags: u64) -> Self {
        Self {
            tensor,
            context,
            deleter: delete::<Self>,
        }
    }

    fn context(&self) -> *mut c_void {
        self.context
    }
}

impl Carrier for ManagedVersioned {
    const NAME: &'static CStr = c"dltensor_versioned";

    fn new(tensor: Tensor, context: *mut c_void, flags: u64) -> Self {
        Self {
            major: 1,
            minor: 0,
            context,
            deleter: delete::<Self>,
            flags,
            tensor,
        }
    }

    fn context(&self) -> *mut c_void {
        self.context
    }
}

/// Returns a capsule of an array, with a version if the consumer knows them.
///
/// # Errors
/// ValueError: closed. BufferError: a read-only array without a version, which cannot say so.
pub(crate) fn capsule<'py>(
    array: Bound<'py, Array>,
    is_versioned: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let is_readonly = array.get().readonly()?;
    match is_versioned {
        true => make::<ManagedVersioned>(array, u64::from(is_readonly) * READ_ONLY),
        false if is_readonly => Err(PyBufferError::new_err(
            "the array is read-only, and DLPack before 1.0 cannot say so",
        )),
        false => make::<Managed>(array, 0),
    }
}

fn make<T: Carrier>(array: Bound<'_, Array>, flags: u64) -> PyResult<Bound<'_, PyAny>> {
    let py = array.py();
    let layout = &array.get().layout;
    let tensor = Tensor {
        data: array.get().export()?,
        device_type: CPU.0,
        device_id: CPU.1,
        dimensions: i32::try_from(layout.shape.len())?,
        code: layout.dtype.dlpack,
        bits: u8::try_from(layout.dtype.bytes * 8)?,
        lanes: 1,
        // An isize is an i64 on the targets of jumbo. Consumers do not write there.
        shape: layout.shape.as_ptr().cast_mut().cast(),
        strides: layout.strides.as_ptr().cast_mut().cast(),
        byte_offset: 0,
    };
    let managed = Box::into_raw(Box::new(T::new(tensor, array.into_ptr().cast(), flags)));
    // SAFETY: the name is static, and the capsule owns the pointer.
    unsafe {
        let capsule = ffi::PyCapsule_New(managed.cast(), T::NAME.as_ptr(), Some(destroy::<T>));
        Bound::from_owned_ptr_or_err(py, capsule).inspect_err(|_| delete(managed))
    }
}

/// Ends a tensor. After the end of Python nothing is left to release.
///
/// # Safety
/// Called once, with a pointer of [`make`].
unsafe extern "C" fn delete<T: Carrier>(managed: *mut T) {
    // SAFETY: the caller's promise.
    let managed = unsafe { Box::from_raw(managed) };
    Python::try_attach(|py| {
        // SAFETY: the context owns one reference to an array.
        let array = unsafe { Bound::from_owned_ptr(py, managed.context().cast()) };
        if let Ok(array) = array.cast::<Array>() {
            array.get().release();
        }
    });
}

/// # Safety
/// Called by the capsule at its end.
unsafe extern "C" fn destroy<T: Carrier>(capsule: *mut ffi::PyObject) {
    // SAFETY: a capsule that has the name still owns its pointer.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, T::NAME.as_ptr()) == 1 {
            delete::<T>(ffi::PyCapsule_GetPointer(capsule, T::NAME.as_ptr()).cast());
        }
    }
}
