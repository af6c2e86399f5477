"""Tests of the module `jumbo` as its wheel has it: `python check.py`, with NumPy."""

import contextlib
import gc
import mmap
import multiprocessing
import os
import pickle
import platform
import resource
import sys
import tempfile
import threading
import unittest
import weakref

import jumbo
import numpy

MIB = 1 << 20
KERNEL = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])


def has_thp():
    with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
        return "[never]" not in file.read() and KERNEL >= (6, 7)


def add_one(array, step):
    """In a process of its own: bytes of others are there, and its own are seen by others."""
    view = numpy.asarray(array)
    step.wait()
    view[os.getpid() % view.size] += 0
    with array_lock(array):
        view[0] += 1
    assert view[-1] == 7, view[-1]
    step.wait()
    # Until the parent has measured.
    step.wait()


@contextlib.contextmanager
def array_lock(array):
    import fcntl

    fcntl.lockf(array.fileno(), fcntl.LOCK_EX)
    yield
    fcntl.lockf(array.fileno(), fcntl.LOCK_UN)


def total(array):
    return int(numpy.asarray(array).sum())


def smaps(pid, field, of="jumbo"):
    """Bytes of a field, summed over the mappings of a file whose name has `of`."""
    found, is_own = 0, False
    with open(f"/proc/{pid}/smaps") as file:
        for line in file:
            name, *words = line.split()
            if not name.endswith(":"):
                is_own = of in line
            elif is_own and name == f"{field}:":
                found += int(words[0]) << 10
    return found


def frames(pid, of="jumbo"):
    """Page frames of these mappings, from pagemap; None without privilege."""
    found = set()
    with open(f"/proc/{pid}/maps") as file, open(f"/proc/{pid}/pagemap", "rb") as pagemap:
        for line in file:
            if of in line and " rw-s " in line:
                start, end = (int(at, 16) // mmap.PAGESIZE for at in line.split()[0].split("-"))
                pagemap.seek(start * 8)
                entries = numpy.frombuffer(pagemap.read((end - start) * 8), "u8")
                entries = entries[entries >> 63 == 1] & ((1 << 55) - 1)
                found.update(entries.tolist())
    return found if found != {0} else None


class Arrays(unittest.TestCase):
    def test_is_an_array_of_numpy(self):
        for dtype in ["bool", "i1", "uint8", "<i2", "u2", "int32", "u4", "i8", "uint64", "f2", "f4", "f8", "c8", "complex128"]:
            for shape in [(), 0, 3, (2, 3), (4, 0, 5), [1] * 6]:
                with self.subTest(dtype=dtype, shape=shape):
                    array, like = jumbo.empty(shape, dtype), numpy.zeros(shape, dtype)
                    for view in (numpy.asarray(array), numpy.from_dlpack(array)):
                        self.assertEqual((view.dtype, view.shape), (like.dtype, like.shape))
                        self.assertTrue(view.flags.writeable and view.flags.c_contiguous)
                        self.assertTrue((view == like).all())
                    self.assertEqual((array.shape, array.dtype), (like.shape, like.dtype.name))
                    self.assertEqual(array.nbytes, like.nbytes)
                    interface = array.__array_interface__
                    self.assertEqual(interface["typestr"], like.__array_interface__["typestr"])

    def test_dtypes_by_type(self):
        for dtype in [float, int, bool, complex, numpy.float32, numpy.uint8, numpy.bool_, numpy.dtype("i2")]:
            self.assertEqual(numpy.asarray(jumbo.empty(1, dtype)).dtype, numpy.dtype(dtype))
        self.assertEqual(jumbo.empty(2).dtype, "float64")
        for dtype in ["f16", ">f8", numpy.dtype(">i4"), "", object, 5, "datetime64[s]", "U3"]:
            with self.assertRaises(TypeError, msg=dtype):
                jumbo.empty(1, dtype)

    def test_bad_shapes(self):
        for shape in [-1, (3, -2), 1 << 62, (1 << 40, 1 << 40), (1 << 61, 0, 1 << 40), [1] * 65, 1 << 63, -(1 << 70)]:
            with self.assertRaises((ValueError, OverflowError), msg=shape):
                jumbo.empty(shape)
            with self.assertRaises((ValueError, OverflowError), msg=shape):
                jumbo.SharedArray(shape)
        for shape in [None, "x", 1.5, (1, "x"), {}]:
            with self.assertRaises(TypeError, msg=shape):
                jumbo.empty(shape if shape != {} else object())

    def test_memory_that_cannot_be_had(self):
        for make in [
            lambda: jumbo.empty(1 << 59),
            lambda: jumbo.empty(1 << 45, "u1", populate=True),
            lambda: jumbo.SharedArray(1 << 45, "u1"),
            lambda: jumbo.SharedArray(1 << 45, "u1", name="jumbo-check-large"),
        ]:
            with self.assertRaises(MemoryError):
                make()
        self.assertFalse(os.path.exists("/dev/shm/jumbo-check-large"))

    def test_address_space_limit(self):
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (jumbo.status().mapped + 64 * MIB, before[1]))
        try:
            for make in (jumbo.empty, jumbo.SharedArray):
                with self.assertRaises(MemoryError):
                    make(256 * MIB, "u1")
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)

    def test_closed(self):
        array = jumbo.empty(1000)
        view = memoryview(array)
        with self.assertRaises(BufferError):
            array.close()
        capsule = array.__dlpack__()
        view.release()
        with self.assertRaises(BufferError):
            array.close()
        del capsule
        array.close()
        array.close()
        self.assertTrue(array.closed and "closed" in repr(array))
        for use in [
            lambda: memoryview(array),
            lambda: numpy.asarray(array),
            lambda: array.__array_interface__,
            lambda: array.huge,
            lambda: array.readonly,
            lambda: array.method,
            lambda: array.__dlpack__(),
            lambda: array.__dlpack__(max_version=(1, 0)),
        ]:
            self.assertRaises(ValueError, use)
        with jumbo.SharedArray(5) as shared:
            pass
        self.assertRaises(ValueError, shared.fileno)
        self.assertRaises(ValueError, pickle.dumps, shared)

    def test_buffers_outlive_the_array(self):
        for export in (numpy.asarray, numpy.from_dlpack, memoryview):
            array = jumbo.empty(8 * MIB, "u1")
            is_alive = weakref.ref(array)
            view = export(array)
            view[5] = 5
            del array
            gc.collect()
            self.assertIsNotNone(is_alive())
            view[-1] = view[5]
            self.assertEqual(view[-1], 5)
            del view
            gc.collect()
            self.assertIsNone(is_alive())

    def test_memory_is_freed(self):
        before = jumbo.status().mapped
        for _ in range(100):
            numpy.asarray(jumbo.empty(64 * MIB, "u1"))[0] = 1
            numpy.from_dlpack(jumbo.SharedArray(MIB, "u1"))[0] = 1
        self.assertLess(jumbo.status().mapped, before + 64 * MIB)

    def test_buffer_requests(self):
        array = jumbo.empty((2, 3), "i4")
        view = memoryview(array)
        self.assertEqual((view.shape, view.strides, view.format), ((2, 3), (12, 4), "i"))
        # A request without a shape, as of hashlib and files.
        self.assertEqual(bytes(array), bytes(24))
        with open(os.devnull, "wb") as null:
            self.assertEqual(null.write(array), 24)
        with self.assertRaises(BufferError):
            array.__dlpack__(copy=True)
        with self.assertRaises(BufferError):
            array.__dlpack__(dl_device=(2, 0))
        self.assertEqual(array.__dlpack_device__(), (1, 0))

    def test_private_memory_is_not_pickled(self):
        self.assertRaises(TypeError, pickle.dumps, jumbo.empty(1))

    @unittest.skipUnless(has_thp(), "needs transparent huge pages, and Linux 6.7 to count them")
    def test_memory_is_huge(self):
        for populate in (False, True):
            array = jumbo.empty(256 * MIB, "u1", populate=populate)
            numpy.asarray(array)[:] = 1
            # The ends may lie outside of whole huge pages.
            self.assertGreaterEqual(array.huge, 252 * MIB)
        self.assertGreaterEqual(jumbo.status().huge, 252 * MIB)
        shared = jumbo.SharedArray(64 * MIB, "u1")
        self.assertGreaterEqual(shared.huge, 60 * MIB)

    def test_fork_copies_private_memory(self):
        array, shared = jumbo.empty(8 * MIB, "u1"), jumbo.SharedArray(8 * MIB, "u1")
        own, both = numpy.asarray(array), numpy.asarray(shared)
        own[:], both[:] = 1, 1
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(Exception):
                own[:] += 1
                both[:] += 1
                fine = own[-1] == 2 and both[-1] == 2
                del own, both
                array.close()
                shared.close()
                status = 0 if fine else 2
            os._exit(status)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.assertTrue((own == 1).all() and (both == 2).all())

    def test_threads(self):
        array = jumbo.empty(MIB, "u1")
        failures = []

        def use():
            for _ in range(2000):
                try:
                    memoryview(array)[3] = 1
                except ValueError:
                    return
                except Exception as failure:
                    failures.append(failure)

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        while not array.closed:
            with contextlib.suppress(BufferError):
                array.close()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])


class Files(unittest.TestCase):
    def setUp(self):
        self.file = tempfile.NamedTemporaryFile()
        self.data = numpy.arange(3 * MIB, dtype="<u4")
        self.file.write(self.data.tobytes())
        self.file.flush()

    def test_has_the_bytes(self):
        for options in [{}, {"populate": True}, {"copy": True}]:
            array = jumbo.memmap(self.file.name, "u4", **options)
            view = numpy.asarray(array)
            self.assertTrue((view == self.data).all())
            self.assertFalse(view.flags.writeable)
            self.assertTrue(array.readonly and array.method)
            self.assertEqual("copied" in array.method, "copy" in options)
            if KERNEL >= (6, 7):
                self.assertLessEqual(array.huge, array.nbytes)
        part = jumbo.memmap(self.file.name, "u4", (2, 5), offset=8)
        self.assertTrue((numpy.asarray(part).ravel() == self.data[2:12]).all())
        self.assertTrue((numpy.from_dlpack(part).ravel() == self.data[2:12]).all())
        odd = numpy.asarray(jumbo.memmap(self.file.name, "u2", 3, offset=3))
        self.assertEqual(odd.tobytes(), self.data.tobytes()[3:9])

    def test_is_read_only(self):
        array = jumbo.memmap(self.file.name)
        with self.assertRaises((TypeError, ValueError)):
            memoryview(array)[0] = 1
        with self.assertRaises((BufferError, TypeError)), open(self.file.name, "rb") as file:
            file.readinto(array)
        with self.assertRaises(BufferError):
            array.__dlpack__()
        with self.assertRaises(ValueError):
            numpy.from_dlpack(array)[0] = 1

    def test_bad_input(self):
        with tempfile.NamedTemporaryFile() as empty:
            self.assertEqual(jumbo.memmap(empty.name).shape, (0,))
            self.assertEqual(bytes(jumbo.memmap(empty.name, copy=True)), b"")
            self.assertEqual(jumbo.memmap(empty.name).huge, 0)
            self.assertRaises(ValueError, jumbo.memmap, empty.name, "u1", 1)
        for arguments in [("u4", -1), ("u4", 3 * MIB + 1), ("u4", 1 << 62), ("u1", None, 13 * MIB)]:
            offset = arguments[2] if len(arguments) > 2 else 0
            with self.assertRaises(ValueError, msg=arguments):
                jumbo.memmap(self.file.name, *arguments[:2], offset=offset)
        # Half an element.
        self.assertRaises(ValueError, jumbo.memmap, self.file.name, "u4", offset=2)
        self.assertRaises(OverflowError, jumbo.memmap, self.file.name, offset=-1)
        self.assertRaises(FileNotFoundError, jumbo.memmap, "/nowhere")
        for path in ("/", os.devnull):
            self.assertRaises((ValueError, OSError), jumbo.memmap, path)
        self.assertRaises(TypeError, jumbo.memmap, 5)


class Shared(unittest.TestCase):
    def check_four_processes(self, array, method):
        context = multiprocessing.get_context(method)
        step = context.Barrier(5)
        view = numpy.asarray(array)
        view[:] = 7
        view[0] = 0
        processes = [context.Process(target=add_one, args=(array, step)) for _ in range(4)]
        for process in processes:
            process.start()
        step.wait(60)
        step.wait(60)
        of = array.name or "memfd:jumbo"
        pids = [process.pid for process in processes]
        own = frames(os.getpid(), of)
        others = [frames(pid, of) for pid in pids]
        shares = sum(smaps(pid, "Pss", of) for pid in [*pids, os.getpid()])
        step.wait(60)
        for process in processes:
            process.join(60)
            self.assertEqual(process.exitcode, 0)
        self.assertEqual(view[0], 4)
        # One copy: the shares of all processes are one array, and the frames the same.
        self.assertLessEqual(shares, array.nbytes + 5 * 2 * MIB)
        self.assertGreater(shares, array.nbytes // 2)
        if own is not None:
            self.assertEqual(len(own) * mmap.PAGESIZE, array.nbytes)
            for other in others:
                self.assertTrue(other and other <= own)
        return shares

    def test_four_processes_have_one_copy(self):
        for method in ("spawn", "fork", "forkserver"):
            with self.subTest(method=method):
                self.check_four_processes(jumbo.SharedArray(64 * MIB, "u1"), method)

    def test_four_processes_have_one_copy_by_name(self):
        name = f"jumbo-check-{os.getpid()}"
        array = jumbo.SharedArray(16 * MIB, "u1", name=name)
        try:
            self.check_four_processes(array, "spawn")
        finally:
            array.unlink()
        self.assertFalse(os.path.exists(f"/dev/shm/{name}"))

    def test_tasks_of_a_pool(self):
        array = jumbo.SharedArray(1000, "i8")
        numpy.asarray(array)[:] = 3
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            self.assertEqual(pool.map(total, [array] * 5), [3000] * 5)

    def test_names(self):
        name = f"jumbo-check-{os.getpid()}"
        array = jumbo.SharedArray((4, 4), "i4", name=name)
        self.assertEqual(os.stat(f"/dev/shm/{name}").st_mode & 0o777, 0o600)
        self.assertRaises(FileExistsError, jumbo.SharedArray, 1, name=name)
        numpy.asarray(array)[1, 1] = 9
        copy = pickle.loads(pickle.dumps(array))
        self.assertEqual((copy.name, copy.shape, copy.dtype), (name, (4, 4), "int32"))
        array.close()
        array.unlink()
        self.assertRaises(FileNotFoundError, array.unlink)
        self.assertRaises(FileNotFoundError, jumbo.SharedArray.attach, name)
        self.assertEqual(numpy.asarray(copy)[1, 1], 9)
        odd = jumbo.SharedArray(10, "u1", name=name)
        with self.assertRaisesRegex(ValueError, "no whole elements of 8 bytes"):
            jumbo.SharedArray.attach(name)
        odd.unlink()
        self.assertRaises(ValueError, jumbo.SharedArray(1).unlink)
        for bad in ["", "a/b", "..", "x" * 300, "a\0b"]:
            with self.assertRaises((OSError, ValueError), msg=bad):
                jumbo.SharedArray(1, name=bad)
            with self.assertRaises((OSError, ValueError), msg=bad):
                jumbo.SharedArray.attach(bad)

    def test_descriptors(self):
        array = jumbo.SharedArray((3, 5), "f4")
        numpy.asarray(array)[:] = 2
        other = jumbo.SharedArray.attach(array.fileno(), dtype="f4", shape=(5, 3))
        self.assertNotEqual(other.fileno(), array.fileno())
        array.close()
        self.assertEqual(float(numpy.asarray(other).sum()), 30)
        # The length is sealed: no holder can make a touch fatal.
        self.assertRaises(PermissionError, os.truncate, other.fileno(), 0)
        self.assertRaises(ValueError, jumbo.SharedArray.attach, other.fileno(), 1 << 40)
        self.assertRaises(ValueError, jumbo.SharedArray.attach, other.fileno(), -1)
        for bad in (-1, 1 << 20):
            self.assertRaises((OSError, ValueError), jumbo.SharedArray.attach, bad)
        self.assertRaises((TypeError, OverflowError), jumbo.SharedArray.attach, 1 << 40)
        self.assertRaises(TypeError, jumbo.SharedArray.attach, None)
        with open(os.devnull) as null:
            self.assertRaises(OSError, jumbo.SharedArray.attach, null.fileno())

    def test_empty(self):
        self.assertEqual(numpy.asarray(jumbo.SharedArray((0, 3))).shape, (0, 3))

    @unittest.skipUnless(os.geteuid() == 0 and has_thp(), "needs root, for the mount, and huge pages")
    def test_a_full_mount_is_an_error(self):
        child = os.fork()
        if child == 0:
            import ctypes

            libc = ctypes.CDLL(None, use_errno=True)
            mounted = libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None)
            mounted = mounted or libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, b"size=16m")
            if mounted != 0:
                os._exit(3)
            try:
                jumbo.SharedArray(64 * MIB, "u1", name="large")
            except OSError:
                left = os.listdir("/dev/shm")
                fits = numpy.asarray(jumbo.SharedArray(12 * MIB, "u1", name="small"))
                fits[:] = 1
                os._exit(0 if left == [] else 1)
            os._exit(2)
        self.assertEqual(os.waitpid(child, 0)[1], 0)


class Module(unittest.TestCase):
    def test_status(self):
        status = jumbo.status()
        self.assertTrue(0 < status.resident <= status.mapped and status.huge <= status.resident)
        self.assertIn(f"huge={status.huge}", repr(status))

    def test_the_stubs_have_all_names(self):
        folder = os.path.dirname(jumbo.__file__)
        self.assertTrue(os.path.exists(os.path.join(folder, "py.typed")))
        with open(os.path.join(folder, "__init__.pyi")) as file:
            stubs = file.read()
        for name in jumbo.__all__:
            self.assertIn(name, stubs)
            members = vars(getattr(jumbo, name)) if isinstance(getattr(jumbo, name), type) else ()
            for member in members:
                if not member.startswith("_") or member.startswith("__dlpack"):
                    self.assertIn(f"def {member}(", stubs, f"{name}.{member}")


if __name__ == "__main__":
    sys.exit(unittest.main())
