import sys

import polars

size = int(sys.argv[1])
row = polars.int_range(size, eager=True).alias("row")
left = polars.DataFrame(row).with_columns((polars.col("row") * 2654435761 % size).alias("key"))
right = polars.DataFrame(row).with_columns((polars.col("row") * 40503 % 1000).alias("value"))
joined = left.join(right, left_on="key", right_on="row").sort("value", "row")
print(joined.group_by(polars.col("key") % 10007).agg(polars.col("value").sum())["value"].sum(), joined["row"][size // 2])
