"""Four processes on one array: `python shared.py [MIB]`, with the page frames of all as root."""

import array
import mmap
import multiprocessing
import os
import sys

import jumbo


def work(shared, lock, step):
    bytes_of = memoryview(shared)
    with lock:
        bytes_of[0] += 1
    # All of it is mapped.
    assert sum(bytes_of[:: mmap.PAGESIZE]) > 0
    step.wait()
    step.wait()


def pss(pid):
    """Proportional share of the array, in bytes."""
    found, is_array = 0, False
    with open(f"/proc/{pid}/smaps") as file:
        for line in file:
            is_array = "memfd:jumbo" in line or (is_array and "-" not in line.split()[0])
            if is_array and line.startswith("Pss:"):
                found += int(line.split()[1]) << 10
    return found


def frames(pid):
    """Numbers of the page frames of the array; {0} without privilege."""
    found = set()
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/pagemap", "rb") as pagemap:
        for line in (line for line in maps if "memfd:jumbo" in line):
            start, end = (int(at, 16) // mmap.PAGESIZE for at in line.split()[0].split("-"))
            pagemap.seek(start * 8)
            entries = array.array("Q", pagemap.read((end - start) * 8))
            found.update(entry & (1 << 55) - 1 for entry in entries if entry >> 63)
    return found


def main(mib=1024):
    context = multiprocessing.get_context("spawn")
    lock, step = context.Lock(), context.Barrier(5)
    shared = jumbo.SharedArray(mib << 20, "uint8")
    print(f"{shared}: {shared.huge >> 20} MiB of {mib} on huge pages")
    processes = [context.Process(target=work, args=(shared, lock, step)) for _ in range(4)]
    for process in processes:
        process.start()
    step.wait()
    pids = [process.pid for process in processes]
    print("Pss of the four:", ", ".join(f"{pss(pid) >> 20}" for pid in pids), "MiB")
    if os.geteuid() == 0:
        each = [frames(pid) for pid in pids]
        together = len(set().union(*each)) * mmap.PAGESIZE >> 20
        print("frames of each:", ", ".join(str(len(one)) for one in each), f"; of all: {together} MiB")
    step.wait()
    print("written by four processes:", memoryview(shared)[0])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
