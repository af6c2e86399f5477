#!/usr/bin/env bash
# NumPy: NUMPY_MADVISE_HUGEPAGE=1, the default, advises some arrays: not zeros of 1.26, no resized array of either.
#
# Versions: numpy 1.26.4 and 2.3.5 (wheels of PyPI, CPython 3.11), THP mode `madvise`, seen on Linux 6.18.
# Expected: as the documentation of the global state says, NumPy "will use huge pages for large arrays":
#   from 4 MiB on, however the array came to be.
# Happens: numpy.empty, ones and arange are advised. numpy.zeros is not in 1.26 (its calloc is not), but is
#   in 2.3. ndarray.resize from small to large is advised in neither: its realloc is not.
# Matters: zeros is the most common way to make a large array. A comparison of two versions of NumPy can
#   measure their page sizes, and an array loses or lacks huge pages by how it was made.
# Source: numpy.org, "Global state" (NUMPY_MADVISE_HUGEPAGE); seen.
set -euo pipefail

# shellcheck source=findings/common
. "$(dirname "${BASH_SOURCE[0]}")/common"

need python3
[[ $(cat /sys/kernel/mm/transparent_hugepage/enabled) == *'[madvise]'* ]] || skip "the THP mode of this host is not madvise"
python3 -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || skip "python3 is not 3.11"

cat >"$folder/arrays.py" <<'PYTHON'
import re
import numpy

MANY = 16 << 20
kept = []

def advised(array):
    """Tells whether the mapping in the middle of an array is advised, and has huge pages."""
    address = array.ctypes.data + array.nbytes // 2
    inside, huge = False, 0
    for line in open("/proc/self/smaps"):
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            huge = int(line.split()[1])
        elif inside and line.startswith("VmFlags:"):
            return ("advised" if " hg" in line else "not advised") + (", huge" if huge else ", no huge pages")

def show(name, array):
    array[:] = 1
    kept.append(array)  # freed memory would be used again, with the advice it has
    print(numpy.__version__, name, advised(array))

show("empty", numpy.empty(MANY, "u1"))
show("zeros", numpy.zeros(MANY, "u1"))
show("ones", numpy.ones(MANY, "u1"))
grown = numpy.empty(100, "u1")
grown.resize(MANY, refcheck=False)
show("resize", grown)
PYTHON
for version in 1.26.4 2.3.5; do
    python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps --no-cache-dir \
        --only-binary :all: --target "$folder/$version" "numpy==$version" || skip "pip installs no numpy $version"
done
for version in 1.26.4 2.3.5; do
    env -u NUMPY_MADVISE_HUGEPAGE PYTHONPATH="$folder/$version" PYTHONDONTWRITEBYTECODE=1 python3 "$folder/arrays.py"
done | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
1.26.4 empty advised, huge
1.26.4 zeros not advised, no huge pages
1.26.4 ones advised, huge
1.26.4 resize not advised, no huge pages
2.3.5 empty advised, huge
2.3.5 zeros advised, huge
2.3.5 ones advised, huge
2.3.5 resize not advised, no huge pages
SEEN
