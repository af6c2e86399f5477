"""Fills a heap of more than 200 MiB, and prints its huge share, libraries, and the environment: a line each,
and one for each variable.

Under jumbo the memory has 30 s to become huge: what was filled before it was advised is collapsed in the background."""

import os
import time


def share():
    rollup = dict(line.split(":", 1) for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
    heap, huge = (int(rollup[key].split()[0]) for key in ("Anonymous", "AnonHugePages"))
    assert heap > 200 << 10
    return huge * 100 // heap


blocks = [bytes(100 + i % 800) for i in range(400000)]
libraries = {line.split("/")[-1].strip() for line in open("/proc/self/maps") if "/opt/" in line or "libjumbo" in line}
end = time.monotonic() + 30
while "libjumbo_preload.so" in libraries and share() < 90 and time.monotonic() < end:
    time.sleep(0.1)
print(share())
print(*sorted(libraries))
for name, value in os.environ.items():
    print(f"{name}={value}")
