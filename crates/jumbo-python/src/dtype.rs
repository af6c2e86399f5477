//! Element types: [`Dtype`], by NumPy's names.

use std::ffi::CStr;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyType;

/// An element type in the vocabularies of its readers.
#[derive(Debug)]
pub(crate) struct Dtype {
    /// NumPy's name.
    pub(crate) name: &'static str,
    /// The array interface's type string, without its byte order.
    pub(crate) code: &'static str,
    /// Format of the buffer protocol: the module `struct`, and PEP 3118.
    pub(crate) format: &'static CStr,
    /// DLPack's type code: DLDataTypeCode.
    pub(crate) dlpack: u8,
    pub(crate) bytes: usize,
}

const fn dtype(
    name: &'static str,
    code: &'static str,
    format: &'static CStr,
    dlpack: u8,
    bytes: usize,
) -> Dtype {
    Dtype {
        name,
        code,
        format,
        dlpack,
        bytes,
    }
}

pub(crate) const UINT8: &str = "uint8";
pub(crate) const FLOAT64: &str = "float64";

static ALL: [Dtype; 14] = [
    dtype("bool", "b1", c"?", 6, 1),
    dtype("int8", "i1", c"b", 0, 1),
    dtype(UINT8, "u1", c"B", 1, 1),
    dtype("int16", "i2", c"h", 0, 2),
    dtype("uint16", "u2", c"H", 1, 2),
    dtype("int32", "i4", c"i", 0, 4),
    dtype("uint32", "u4", c"I", 1, 4),
    // `l` is NumPy's int64 on 64-bit Linux; `q` has the same bytes and another name.
    dtype("int64", "i8", c"l", 0, 8),
    dtype("uint64", "u8", c"L", 1, 8),
    dtype("float16", "f2", c"e", 2, 2),
    dtype("float32", "f4", c"f", 2, 4),
    dtype(FLOAT64, "f8", c"d", 2, 8),
    dtype("complex64", "c8", c"Zf", 5, 8),
    dtype("complex128", "c16", c"Zd", 5, 16),
];

impl Dtype {
    /// Reads an element type: a name, a type string, a type of Python or NumPy, or a NumPy dtype.
    ///
    /// # Errors
    /// TypeError: another one, or big-endian.
    pub(crate) fn of(wanted: Option<&Bound<'_, PyAny>>, default: &str) -> PyResult<&'static Self> {
        let name = match wanted {
            None => default.to_owned(),
            Some(wanted) if wanted.is_instance_of::<PyType>() => {
                wanted.getattr("__name__")?.extract()?
            }
            Some(wanted) => {
                let code = wanted.getattr("str");
                let name = code.and_then(|code| code.extract());
                name.unwrap_or(wanted.str()?.to_string())
            }
        };
        let native = name.trim_start_matches(['<', '=', '|']);
        let native = match native {
            "float" => FLOAT64,
            "int" => "int64",
            "complex" => "complex128",
            "bool_" => "bool",
            native => native,
        };
        let mut all = ALL.iter();
        let found = all.find(|dtype| dtype.name == native || dtype.code == native);
        found.ok_or_else(|| {
            let names = ALL.iter().map(|dtype| dtype.name).collect::<Vec<_>>();
            PyTypeError::new_err(format!(
                "no dtype {name}\nhint: one of {}",
                names.join(", ")
            ))
        })
    }
}
