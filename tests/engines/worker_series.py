"""A new worker each second, as a pre-forking server or a batch system has them: it fills 300 MiB and ends."""

import json
import os
import statistics
import subprocess
import sys
import time

from common import environment, memory, warm

WORKERS, ROWS = 20, 2_400_000


def work():
    table = {key: f"value {key}" for key in range(ROWS)}
    total = sum(map(len, table.values()))
    print(json.dumps([total, memory(os.getpid())]))


def main():
    covered = os.environ | environment()
    warm()
    seconds, results, workers = [], set(), []
    begin = time.monotonic()
    for number in range(WORKERS):
        time.sleep(max(0, begin + number - time.monotonic()))
        start = time.monotonic()
        run = subprocess.run([sys.executable, __file__], capture_output=True, env=covered, check=True)
        seconds.append(time.monotonic() - start)
        result, worker = json.loads(run.stdout)
        results.add(result)
        workers.append(worker)
    print(json.dumps({"seconds": statistics.median(seconds), "result": sorted(results), "workers": workers}))


if __name__ == "__main__":
    main() if sys.argv[1:] else work()
