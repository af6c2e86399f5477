import sys

import duckdb

size = int(sys.argv[1])
base = duckdb.connect(":memory:", config={"threads": 2})
base.execute(f"create table a as select i, i * 2654435761 % {size} as key from range({size}) t(i)")
base.execute(f"create table b as select i as key, i * 40503 % 1000 as value from range({size}) t(i)")
query = "select count(*), sum(value), count(distinct a.i % 100000) from a join b using (key)"
print(base.execute(query).fetchall(), base.execute("select i from a order by key, i limit 1 offset 1000").fetchall())
