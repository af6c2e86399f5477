"""Memory on huge pages: private arrays, files, and arrays that processes share.

Arrays export buffers and DLPack: `numpy.asarray(array)` and `torch.from_dlpack(array)` copy nothing.
"""

from ._jumbo import Array, SharedArray, Status, __version__, empty, memmap, status

__all__ = ["Array", "SharedArray", "Status", "empty", "memmap", "status"]
