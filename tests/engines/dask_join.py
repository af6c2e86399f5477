"""A join of two tables on four Dask workers, which hold about 2 GiB together."""

import sys
import tempfile
import time

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
from common import environment, say, warm
from distributed import Client, LocalCluster, wait

PARTS, ROWS, KEYS = 8, 400_000, 1_600_000


def table(part, seed):
    random = np.random.default_rng([seed, part])
    columns = {"key": random.integers(0, KEYS, ROWS), "number": random.random(ROWS)}
    columns |= {f"other{i}": random.random(ROWS) for i in range(3)}
    columns["name"] = [f"name {i}" for i in columns["key"]]
    return pd.DataFrame(columns)


def main():
    config = {"distributed.nanny.pre-spawn-environ." + n: v for n, v in environment().items()}
    if sys.argv[1].endswith("untrimmed"):
        config["distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_"] = None
    dask.config.set(config)
    with tempfile.TemporaryDirectory() as folder, LocalCluster(
        n_workers=4, threads_per_worker=1, memory_limit=0, dashboard_address=None, local_directory=folder
    ) as cluster, Client(cluster) as client:
        client.run(lambda: (pd.DataFrame({"a": [1]}).merge(pd.DataFrame({"a": [1]})), None)[1])
        warm()
        start = time.monotonic()
        left = dd.from_map(table, range(PARTS), seed=1).persist()
        right = dd.from_map(table, range(PARTS), seed=2).persist()
        joined = left.merge(right, on="key").persist()
        wait(joined)
        result = joined[["number_x", "number_y"]].sum().compute()
        seconds = time.monotonic() - start
        pids = client.run(lambda dask_worker: __import__("os").getpid()).values()
        say(seconds, pids, [len(joined), *map(lambda x: round(x, 3), result)])


if __name__ == "__main__":
    main()
