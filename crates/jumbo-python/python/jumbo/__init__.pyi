"""Memory on huge pages: private arrays, files, and arrays that processes share."""

from collections.abc import Sequence
from os import PathLike
from typing import Any, final

from typing_extensions import Buffer

__all__ = ["Array", "SharedArray", "Status", "empty", "memmap", "status"]
__version__: str

# A name ("float64"), a type string ("<f8"), a type of Python or NumPy, or a NumPy dtype. None is
# float64, in `memmap` uint8.
_DType = Any
_Shape = int | Sequence[int]

class Array(Buffer):
    """An array in C order, from `empty` or `memmap`.

    It exports buffers and DLPack capsules, and has no arithmetic: use `numpy.asarray(array)`. Its
    memory lives until the last of them ends, also without the array. A child of fork(2) has a
    private copy; of a file the same bytes.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str:
        """NumPy's name of the element type."""
    @property
    def nbytes(self) -> int: ...
    @property
    def readonly(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    @property
    def huge(self) -> int:
        """Bytes that this process maps by huge pages now. Linux 6.7; OSError before."""
    @property
    def method(self) -> str | None:
        """How a file came onto its pages; None for other memory."""
    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule of DLPack 1.0; of 0.8 without `max_version`.

        BufferError: read-only memory without `max_version`, another device, or `copy=True`.
        """
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def close(self) -> None:
        """Frees the memory. BufferError while a buffer or capsule is in use.

        Afterwards everything that needs the memory raises ValueError.
        """
    def __enter__(self) -> Array: ...
    def __exit__(self, *exception: object) -> None: ...

@final
class SharedArray(Array):
    """An array of zeroes that processes share: one copy.

    Its memory is allocated when it is made, on huge pages where there are some (Linux 6.1). A pickle
    has the name, or without one the descriptor, which `multiprocessing` passes; a child of fork(2)
    shares the array too.

    Without a name it ends with the last process that has it, and no process can shorten it. With a
    name, of shm_open(3), it stays until `unlink`; a process that shortens the file (/dev/shm/NAME)
    kills those that touch the rest.
    """

    def __new__(cls, shape: _Shape, dtype: _DType = None, *, name: str | None = None) -> SharedArray:
        """MemoryError: no memory. FileExistsError: the name is in use. OSError: no name of
        shm_open(3), /dev/shm is full."""
    @classmethod
    def attach(
        cls, source: str | int, shape: _Shape | None = None, dtype: _DType = None
    ) -> SharedArray:
        """The array of a name, or of a descriptor from `fileno`, which stays the caller's.

        Without a shape it has all elements, in one dimension. ValueError: the memory is smaller.
        FileNotFoundError, PermissionError, other OSErrors: no such array.
        """
    @property
    def name(self) -> str | None: ...
    def fileno(self) -> int:
        """The descriptor, which the array closes. No holder shortens its file."""
    def unlink(self) -> None:
        """Removes the name; arrays keep the memory. ValueError without a name."""
    def __enter__(self) -> SharedArray: ...

@final
class Status:
    """Memory of this process, in bytes."""

    @property
    def mapped(self) -> int:
        """Mapped, resident or not."""
    @property
    def resident(self) -> int:
        """Resident, hugetlb included."""
    @property
    def huge(self) -> int:
        """Resident in huge pages that a PMD or more maps."""
    @property
    def unknown(self) -> int:
        """Resident, and perhaps in huge pages that base pages map: only root can read that."""

def empty(shape: _Shape, dtype: _DType = None, *, populate: bool = False) -> Array:
    """A private array of zeroes on huge pages, where the kernel has them (MADV_HUGEPAGE).

    `populate` makes it resident now, by several threads (Linux 5.14); a lack of memory is then a
    MemoryError. Else each page comes with its touch, as for `numpy.empty`.

    ValueError, OverflowError: a negative or huge shape. TypeError: an unknown dtype. MemoryError.
    """

def memmap(
    file: str | PathLike[str],
    dtype: _DType = None,
    shape: _Shape | None = None,
    *,
    offset: int = 0,
    populate: bool = False,
    copy: bool = False,
) -> Array:
    """A file as a read-only array, from byte `offset` on; without a shape all of it.

    Mapped, it costs no memory beyond the page cache, and is huge on xfs from Linux 5.18, on ext4
    from 6.16; `populate` reads all of it now. No process may write to the file or shorten it
    meanwhile: a read behind the end kills the process. With `copy` it is read into huge pages of
    this process, by several threads.

    ValueError: no regular file, or too short for the shape. OSError, MemoryError.
    """

def status() -> Status:
    """The memory of this process, from /proc/self/smaps."""
