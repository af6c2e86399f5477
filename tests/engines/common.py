"""Common parts of the workloads: environment of covered workers, memory of processes."""

import json
import mmap
import os
import subprocess
import sys

MIB = 1 << 20


def environment():
    """Returns the environment that covers workers, for the side in the first argument."""
    if not sys.argv[1].startswith("covered"):
        return {}
    command = [os.environ.get("JUMBO_COMMAND", "jumbo"), "run", "--print-env", "--json"]
    command += ["--" + word for word in sys.argv[1].split() if "=" in word]
    return json.loads(subprocess.check_output(command))


def warm():
    """Makes the hypervisor back the memory that the timed part will touch."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    mmap.mmap(-1, 3 << 30, flags=flags).close()


def fields(path):
    with open(path) as file:
        lines = (line.split() for line in file if ":" in line)
        return {line[0]: int(line[1]) / 1024 for line in lines if line[-1] == "kB"}


def memory(pid):
    """Returns the memory of a process in MiB, and its CPU seconds."""
    now = fields(f"/proc/{pid}/smaps_rollup")
    with open(f"/proc/{pid}/maps") as maps:
        covered = "libjumbo_preload" in maps.read()
    with open(f"/proc/{pid}/stat") as stat:
        times = stat.read().rpartition(")")[2].split()[11:13]
    return {
        "pid": pid,
        "covered": covered,
        "pss": now["Pss:"],
        "peak": fields(f"/proc/{pid}/status")["VmHWM:"],
        "anonymous": now["Anonymous:"],
        "huge": now["AnonHugePages:"],
        "cpu": sum(map(int, times)) / os.sysconf("SC_CLK_TCK"),
    }


def say(seconds, pids, result):
    """Prints one sample."""
    workers = [memory(pid) for pid in sorted(pids)]
    print(json.dumps({"seconds": seconds, "result": result, "workers": workers}), flush=True)
