"""An aggregation on two Spark executors of 1 GiB, each a JVM of its own."""

import os
import subprocess
import sys
import time

from common import environment, say, warm
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

ROWS, GROUPS = 6_000_000, 1_000_000


def executors():
    found = subprocess.run(["pgrep", "-f", "CoarseGrainedExecutorBackend"], stdout=subprocess.PIPE)
    return {int(pid) for pid in found.stdout.split()}


def main():
    before = executors()
    session = SparkSession.builder.master("local-cluster[2,1,1024]").appName("sum")
    config = {"spark.executorEnv." + name: value for name, value in environment().items()}
    if sys.argv[1].endswith("thp"):
        config["spark.executor.extraJavaOptions"] = "-XX:+UseTransparentHugePages"
    config |= {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "8"}
    for name, value in config.items():
        session = session.config(name, value)
    session = session.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    session.range(1000).groupBy((f.col("id") % 7).alias("key")).count().collect()
    warm()
    start = time.monotonic()
    rows = session.range(ROWS, numPartitions=8).select(
        (f.hash("id") % GROUPS).alias("key"), f.sin("id").alias("number")
    )
    rows = rows.cache()
    groups = rows.groupBy("key").agg(f.sum("number").alias("sum"), f.count("*").alias("count"))
    found = groups.agg(f.count("*"), f.sum("count"), f.max("count")).collect()[0]
    ordered = rows.orderBy("number").select(f.sum("key")).collect()[0]
    seconds = time.monotonic() - start
    say(seconds, executors() - before, [*found, *ordered])
    session.stop()


if __name__ == "__main__":
    main()
