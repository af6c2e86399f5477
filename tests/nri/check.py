"""Fills a heap of 200 MiB and more, and prints the share of it on huge pages, libraries, and
the environment: a line each, and one for each variable."""

import os

blocks = [bytes(100 + i % 800) for i in range(400000)]
rollup = dict(line.split(":", 1) for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
resident, huge = (int(rollup[key].split()[0]) for key in ("Anonymous", "AnonHugePages"))
assert resident > 200 << 10
libraries = {line.split("/")[-1].strip() for line in open("/proc/self/maps") if "/opt/" in line or "libjumbo" in line}
print(huge * 100 // resident)
print(*sorted(libraries))
for name, value in os.environ.items():
    print(f"{name}={value}")
