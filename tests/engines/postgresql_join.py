"""A hash join of PostgreSQL in one backend, with a work_mem that holds its table."""

import os
import subprocess
import tempfile
import time
from pathlib import Path

from common import environment, say, warm

TABLES = """CREATE UNLOGGED TABLE a AS SELECT i AS k, i * 0.5 AS v FROM generate_series(1, 2000000) i;
CREATE UNLOGGED TABLE b AS SELECT i * 2 AS k, md5(i::text) AS t FROM generate_series(1, 2000000) i;
ANALYZE;"""
JOIN = "SELECT count(*), sum(v), max(t), pg_backend_pid() FROM a JOIN b USING (k) WHERE length(t) > v - v;\n"


def main():
    as_user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    tools = max(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name))
    with tempfile.TemporaryDirectory() as folder:
        if as_user:
            subprocess.run(["chown", "postgres", folder], check=True)
        data = f"{folder}/data"
        options = f"-c listen_addresses= -c unix_socket_directories={folder} -c shared_buffers=512MB -c work_mem=1GB"
        options += " -c max_parallel_workers_per_gather=0 -c hash_mem_multiplier=1 -c jit=off -c fsync=off"
        run = dict(check=True, stdout=subprocess.DEVNULL, cwd="/", env=os.environ | environment())
        subprocess.run([*as_user, tools / "initdb", "-D", data, "-A", "trust"], **run)
        server = [*as_user, tools / "pg_ctl", "-D", data, "-l", f"{folder}/log", "-w"]
        subprocess.run([*server, "-o", options, "start"], **run)
        psql = [*as_user, "psql", "-XqAt", "-h", folder, "-d", "postgres"]
        try:
            subprocess.run([*psql, "-c", TABLES], **run)
            warm()
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/", bufsize=1)
            with subprocess.Popen(psql, **pipes) as session:
                start = time.monotonic()
                for _ in range(3):
                    session.stdin.write(JOIN)
                    *result, pid = session.stdout.readline().strip().split("|")
                say(time.monotonic() - start, [int(pid)], result)
        finally:
            subprocess.run([*server, "-m", "immediate", "stop"], **run)


if __name__ == "__main__":
    main()
