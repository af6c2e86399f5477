import sys

import numpy
import pandas

size = int(sys.argv[1])
random = numpy.random.default_rng(1)
left = pandas.DataFrame({"key": random.integers(0, size, size), "value": random.random(size)})
right = pandas.DataFrame({"key": random.permutation(size), "other": random.random(size)})
joined = left.merge(right, on="key")
grouped = joined.groupby(joined.key % 10007).agg({"value": "sum", "other": "mean"})
print(len(joined), round(float(grouped.value.sum()), 3), joined.sort_values("other").key.iloc[size // 2])
