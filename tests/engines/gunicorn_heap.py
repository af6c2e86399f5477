"""Four gunicorn workers with a table of Python objects each, built after or before the fork."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from common import environment, say, warm

WORKERS, REQUESTS = 4, 400


def application(environ, start_response):
    part = int(environ["PATH_INFO"].strip("/")) % 1000
    answer = " ".join(table[key] for key in range(part, ROWS, 1000))
    start_response("200 OK", [("Content-Length", str(len(answer))), ("Worker", str(os.getpid()))])
    return [answer.encode()]


def get(port, part):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", f"/{part}")
    answer = connection.getresponse()
    return int(answer.headers["Worker"]), len(answer.read())


def main():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    warm()
    options = ["--preload"] if sys.argv[1].endswith("preload") else []
    command = [Path(sys.executable).with_name("gunicorn"), f"--workers={WORKERS}", f"--bind=127.0.0.1:{port}"]
    command += ["--log-level=error", *options, "gunicorn_heap:application"]
    here = Path(__file__).parent
    start = time.monotonic()
    with subprocess.Popen(command, cwd=here, env=os.environ | environment()) as server:
        try:
            pids = set()
            while len(pids) < WORKERS and time.monotonic() < start + 60:
                try:
                    pids.add(get(port, 0)[0])
                except OSError:
                    time.sleep(0.02)
            total = sum(get(port, part)[1] for part in range(REQUESTS))
            say(time.monotonic() - start, pids, total)
        finally:
            server.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    main()
else:
    ROWS = 1_000_000
    table = {key: f"value {key}" for key in range(ROWS)}
