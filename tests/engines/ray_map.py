"""A map over NumPy arrays of the object store on four Ray workers, which keep their results."""

import logging
import os
import time

import numpy as np
import ray
from common import environment, say, warm

ARRAYS, LENGTH = 16, 4_000_000


@ray.remote
class Worker:
    def __init__(self):
        self.kept = []

    def pid(self):
        return os.getpid()

    def make(self, seed):
        return np.random.default_rng(seed).random(LENGTH)

    def map(self, array):
        ordered = np.sort(array)
        self.kept.append(np.sqrt(ordered) * 2 + array)
        return float(self.kept[-1].sum())


def main():
    ray.init(
        num_cpus=4,
        object_store_memory=800 << 20,
        include_dashboard=False,
        logging_level=logging.ERROR,
        # Also plain: for a runtime environment Ray starts a worker by another program, which takes CPU time.
        runtime_env={"env_vars": environment() | {"RAY_MAP": "1"}},
    )
    workers = [Worker.remote() for _ in range(4)]
    pids = ray.get([worker.pid.remote() for worker in workers])
    warm()
    start = time.monotonic()
    arrays = [workers[i % 4].make.remote(i) for i in range(ARRAYS)]
    sums = ray.get([workers[i % 4].map.remote(arrays[(i + 1) % ARRAYS]) for i in range(ARRAYS)])
    seconds = time.monotonic() - start
    say(seconds, pids, [round(number, 3) for number in sums])
    ray.shutdown()


if __name__ == "__main__":
    main()
