#!/usr/bin/env bash
# jemalloc in wheels: each has a name of its own for MALLOC_CONF, and none obeys MALLOC_CONF.
#
# Versions: wheels of PyPI for CPython 3.11: polars 1.33.1, duckdb 1.4.1, pyarrow 21.0.0.
# Expected: MALLOC_CONF=thp:always (jemalloc(3), "the environment variable MALLOC_CONF") reaches each jemalloc of the
#   process; with stats_print:true each prints its statistics at exit.
# Happens: the wheels prefix jemalloc's symbols, and with them the variable: _RJEM_MALLOC_CONF for polars,
#   DUCKDB_JE_MALLOC_CONF for duckdb, JE_ARROW_MALLOC_CONF for pyarrow (which uses mimalloc unless told
#   otherwise). The plain name is ignored in silence, wrong options included.
# Matters: a data pipeline with these three needs three variables to get huge pages from their allocators, and a test
#   with the plain one compares a setting with itself.
# Source: jemalloc's INSTALL, --with-jemalloc-prefix; seen.
set -euo pipefail

# shellcheck source=findings/common
. "$(dirname "${BASH_SOURCE[0]}")/common"

need python3
python3 -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || skip "python3 is not 3.11"
wheels=(polars==1.33.1 duckdb==1.4.1 pyarrow==21.0.0)
python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps --no-cache-dir --no-compile \
    --only-binary :all: --target "$folder/wheels" "${wheels[@]}" || skip "pip does not install all of: ${wheels[*]}"

declare -A use=(
    [polars]='import polars; polars.Series([1, 2, 3]).sum()'
    [duckdb]='import duckdb; duckdb.sql("select 1").fetchall()'
    [pyarrow]='import pyarrow; pyarrow.allocate_buffer(1 << 20, memory_pool=pyarrow.jemalloc_memory_pool())'
)
for name in MALLOC_CONF _RJEM_MALLOC_CONF DUCKDB_JE_MALLOC_CONF JE_ARROW_MALLOC_CONF; do
    printf '%s=stats_print:true is obeyed by:' "$name"
    for wheel in polars duckdb pyarrow; do
        env "$name=stats_print:true" PYTHONPATH="$folder/wheels" PYTHONDONTWRITEBYTECODE=1 python3 -c "${use[$wheel]}" \
            >"$folder/printed" 2>&1
        ! grep -q 'Begin jemalloc statistics' "$folder/printed" || printf ' %s' "$wheel"
    done
    echo
done | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
MALLOC_CONF=stats_print:true is obeyed by:
_RJEM_MALLOC_CONF=stats_print:true is obeyed by: polars
DUCKDB_JE_MALLOC_CONF=stats_print:true is obeyed by: duckdb
JE_ARROW_MALLOC_CONF=stats_print:true is obeyed by: pyarrow
SEEN
