"""Two ranks of Open MPI, each with two grids of 128 MiB: mpi_stencil.c."""

import subprocess
import tempfile
from pathlib import Path

from common import environment, say, warm


def main():
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "stencil"
        source = Path(__file__).with_name("mpi_stencil.c")
        subprocess.run(["mpicc", "-O2", "-o", program, source], check=True)
        variables = [word for item in environment().items() for word in ("-x", "=".join(item))]
        warm()
        mpirun = ["mpirun", "-n", "2", "--allow-run-as-root", "--oversubscribe", *variables, program]
        with subprocess.Popen(mpirun, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
            seconds, total, *pids = run.stdout.readline().split()
            say(float(seconds), map(int, pids), total)
            run.communicate("\n")


if __name__ == "__main__":
    main()
