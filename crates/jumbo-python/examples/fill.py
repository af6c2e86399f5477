"""Time and page faults of 1 GiB that is filled: `python fill.py [MIB] [ROUNDS]`, ways in turn.

NumPy advises huge pages too, unless NUMPY_MADVISE_HUGEPAGE=0: `numpy, base pages` is without.
"""

import resource
import statistics
import subprocess
import sys
import time

WAYS = {
    "numpy.empty": "numpy.empty(SIZE, 'u1')",
    "numpy.empty, base pages": "numpy.empty(SIZE, 'u1')",
    "jumbo.empty": "jumbo.empty(SIZE, 'u1')",
    "jumbo.empty, populate": "jumbo.empty(SIZE, 'u1', populate=True)",
}


def measure(way, mib):
    """In a process of its own. The memory was in use just before: in a virtual machine the first
    touch of memory that the host took back would be measured instead."""
    import jumbo
    import numpy

    jumbo.empty(2 * mib << 20, "u1", populate=True).close()
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
    array = eval(WAYS[way], {"numpy": numpy, "jumbo": jumbo, "SIZE": mib << 20})
    numpy.asarray(array).fill(1)
    seconds = time.perf_counter() - start
    print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


def main(mib=1024, rounds=5):
    results = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, found in results.items():
            advice = {"NUMPY_MADVISE_HUGEPAGE": "0" if "base" in way else "1"}
            words = [sys.executable, __file__, "--measure", way, str(mib)]
            output = subprocess.run(words, env=advice, check=True, capture_output=True, text=True)
            seconds, faults = output.stdout.split()
            found.append((float(seconds), int(faults)))
    for way, found in results.items():
        seconds, faults = zip(*found)
        middle = f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"
        print(f"{way:24} {middle}, {statistics.median(faults):.0f} faults")


if sys.argv[1:2] == ["--measure"]:
    measure(sys.argv[2], int(sys.argv[3]))
else:
    main(*map(int, sys.argv[1:]))
