//! The programs of `jumbo bench programs`: [`PROGRAMS`].
//!
//! In what is run, in shell scripts and in files these words are replaced: SIZE, how much there is to do; FOLDER, one of its own
//! for each program; BIN, the folder of the first program that is needed; PYTHON, the interpreter; AS, what becomes another user
//! than root; USER, who we are.

/// A program, what it is to do, and what that needs.
pub(super) struct Entry {
    pub(super) key: &'static str,
    pub(super) what: &'static str,
    /// What installs it.
    pub(super) install: &'static str,
    /// Programs, and modules of Python as `python:NAME`.
    pub(super) needs: &'static [&'static str],
    /// How much there is to do, and how much where it shall be over soon.
    pub(super) size: [u32; 2],
    pub(super) files: &'static [(&'static str, &'static str)],
    /// What a shell does once, before anything is measured.
    pub(super) once: &'static str,
    pub(super) run: &'static [&'static str],
    pub(super) serves: Option<Serves>,
}

/// What a server is measured by: scripts.
pub(super) struct Serves {
    pub(super) ready: &'static str,
    pub(super) setup: &'static str,
    pub(super) load: &'static str,
    /// The load says what counts.
    pub(super) says: bool,
}

/// What most of them have not.
pub(super) const NOTHING: Entry = Entry {
    key: "",
    what: "",
    install: "",
    needs: &[],
    size: [0, 0],
    files: &[],
    once: "",
    run: &[],
    serves: None,
};

const INITDB: &str = "chmod 777 FOLDER && AS BIN/initdb -D FOLDER/data --auth=trust --no-sync --locale=C -U postgres";

const POSTGRES: [&str; 18] = [
    "AS",
    "BIN/postgres",
    "-D",
    "FOLDER/data",
    "-k",
    "FOLDER",
    "-c",
    "listen_addresses=",
    "-c",
    "fsync=off",
    "-c",
    "work_mem=1GB",
    "-c",
    "shared_buffers=256MB",
    "-c",
    "jit=off",
    "-c",
    "max_parallel_workers_per_gather=0",
];

const PSQL_READY: &str = "BIN/psql -h FOLDER -U postgres -qAtc 'select 1'";

const REDIS: [&str; 9] = [
    "redis-server",
    "--port",
    "0",
    "--unixsocket",
    "FOLDER/socket",
    "--save",
    "",
    "--dir",
    "FOLDER",
];

/// A server that still loads what another left answers, and exits with 0.
const REDIS_READY: &str = "redis-cli -s FOLDER/socket ping | grep -q PONG";

const REDIS_FILL: &str = "redis-benchmark -s FOLDER/socket -q -P 64 -r SIZE -n SIZE set key:__rand_int__ \
    a_value_of_some_hundred_bytes_that_is_as_long_as_many_values_are_which_are_kept_in_a_cache_of_this_kind_and_a_little_longer_still";

/// All of them, in the order of the table.
pub(super) const PROGRAMS: [Entry; 18] = [
    Entry {
        key: "hashmap",
        what: "C++: strings in an unordered_map",
        install: "g++",
        needs: &["g++"],
        size: [4_000_000, 400_000],
        files: &[("hashmap.cpp", include_str!("work/hashmap.cpp"))],
        once: "g++ -O2 -o FOLDER/hashmap FOLDER/hashmap.cpp",
        run: &["FOLDER/hashmap", "SIZE"],
        ..NOTHING
    },
    Entry {
        key: "graph",
        what: "C++: shortest paths in a graph",
        install: "g++",
        needs: &["g++"],
        size: [1_000_000, 100_000],
        files: &[("graph.cpp", include_str!("work/graph.cpp"))],
        once: "g++ -O2 -std=c++17 -o FOLDER/graph FOLDER/graph.cpp",
        run: &["FOLDER/graph", "SIZE"],
        ..NOTHING
    },
    Entry {
        key: "python",
        what: "CPython: dictionaries",
        install: "python3",
        needs: &["python3"],
        size: [2_000_000, 200_000],
        files: &[("dictionary.py", include_str!("work/dictionary.py"))],
        run: &["PYTHON", "FOLDER/dictionary.py", "SIZE"],
        ..NOTHING
    },
    Entry {
        key: "pandas",
        what: "pandas: join, group, sort",
        install: "pip install pandas",
        needs: &["python3", "python:pandas"],
        size: [5_000_000, 500_000],
        files: &[("frame.py", include_str!("work/frame.py"))],
        run: &["PYTHON", "FOLDER/frame.py", "SIZE"],
        ..NOTHING
    },
    Entry {
        key: "polars",
        what: "polars: join, group, sort",
        install: "pip install polars",
        needs: &["python3", "python:polars"],
        size: [20_000_000, 2_000_000],
        files: &[("columns.py", include_str!("work/columns.py"))],
        run: &["PYTHON", "FOLDER/columns.py", "SIZE"],
        ..NOTHING
    },
    Entry {
        key: "duckdb",
        what: "DuckDB: join, group, sort",
        install: "pip install duckdb",
        needs: &["python3", "python:duckdb"],
        size: [20_000_000, 2_000_000],
        files: &[("duck.py", include_str!("work/duck.py"))],
        run: &["PYTHON", "FOLDER/duck.py", "SIZE"],
        ..NOTHING
    },
    Entry {
        key: "pg_join",
        what: "PostgreSQL: a hash join",
        install: "postgresql",
        needs: &["initdb", "setpriv"],
        size: [2_000_000, 200_000],
        once: INITDB,
        run: &POSTGRES,
        serves: Some(Serves {
            ready: PSQL_READY,
            setup: "BIN/psql -h FOLDER -U postgres -qAtc \"create table if not exists a as select i, i::text || ' text' t \
                    from generate_series(1, SIZE) i\" && BIN/psql -h FOLDER -U postgres -qAtc 'analyze a'",
            load: "for i in 1 2 3; do BIN/psql -h FOLDER -U postgres -qAtc 'set enable_mergejoin = off; \
                   select count(*), max(x.t) from a x join a y using (i)'; done",
            says: false,
        }),
        ..NOTHING
    },
    Entry {
        key: "pgbench",
        what: "PostgreSQL: pgbench, reads",
        install: "postgresql",
        needs: &["initdb", "pgbench", "setpriv"],
        size: [20_000, 2_000],
        once: INITDB,
        run: &POSTGRES,
        serves: Some(Serves {
            ready: PSQL_READY,
            setup: "test -e FOLDER/filled || { BIN/pgbench -h FOLDER -U postgres -i -q -s 10 postgres && touch FOLDER/filled; }",
            load: "BIN/pgbench -h FOLDER -U postgres -n -S -c 2 -t SIZE postgres",
            says: false,
        }),
        ..NOTHING
    },
    Entry {
        key: "redis_get",
        what: "Redis: GET of random keys",
        install: "redis-server redis-tools",
        needs: &["redis-server", "redis-benchmark"],
        size: [1_000_000, 100_000],
        run: &REDIS,
        serves: Some(Serves {
            ready: REDIS_READY,
            setup: REDIS_FILL,
            load: "redis-benchmark -s FOLDER/socket -q -P 16 -r SIZE -n SIZE get key:__rand_int__",
            says: false,
        }),
        ..NOTHING
    },
    Entry {
        key: "redis_fork",
        what: "Redis: the fork of BGSAVE",
        install: "redis-server redis-tools",
        needs: &["redis-server", "redis-benchmark"],
        size: [1_500_000, 150_000],
        run: &REDIS,
        serves: Some(Serves {
            ready: REDIS_READY,
            setup: REDIS_FILL,
            load: "for i in 1 2 3; do redis-cli -s FOLDER/socket bgsave > FOLDER/out; \
                   while redis-cli -s FOLDER/socket info persistence | grep -q in_progress:1; do sleep 0.02; done; \
                   redis-cli -s FOLDER/socket info stats | tr -d '\\r' | awk -F: '/latest_fork_usec/ { print $2 / 1000 }'; \
                   done | sort -n | sed -n 2p; rm -f FOLDER/dump.rdb",
            says: true,
        }),
        ..NOTHING
    },
    Entry {
        key: "mariadb",
        what: "MariaDB: group and join",
        install: "mariadb-server",
        needs: &["mariadbd", "mariadb-install-db", "mariadb"],
        size: [1_000_000, 100_000],
        once: "mariadb-install-db --no-defaults --datadir=FOLDER/data --user=$(id -un) --skip-test-db \
               --auth-root-authentication-method=normal",
        run: &[
            "mariadbd",
            "--no-defaults",
            "--datadir=FOLDER/data",
            "--socket=FOLDER/socket",
            "--pid-file=FOLDER/pid",
            "--skip-networking",
            "--skip-grant-tables",
            "--user=USER",
            "--innodb-buffer-pool-size=512M",
            "--innodb-flush-log-at-trx-commit=0",
            "--tmp-table-size=512M",
            "--max-heap-table-size=512M",
        ],
        serves: Some(Serves {
            ready: "mariadb --no-defaults -S FOLDER/socket -e 'select 1'",
            setup: "mariadb --no-defaults -S FOLDER/socket -e \"create database if not exists b; use b; \
                    create table if not exists t (k int primary key, v char(60)); \
                    insert ignore into t select seq, concat(seq, ' text') from seq_1_to_SIZE\"",
            load: "mariadb --no-defaults -S FOLDER/socket b -e \"select count(*), max(c) from (select k % 200000 g, count(*) c, \
                   max(v) m from t group by g) s; select count(*) from t x join t y on y.k = x.k * 7919 % SIZE\"",
            says: false,
        }),
        ..NOTHING
    },
    Entry {
        key: "gxx",
        what: "g++: a large file",
        install: "g++",
        needs: &["g++"],
        size: [12, 1],
        files: &[("source.cpp", include_str!("work/source.cpp"))],
        run: &[
            "g++",
            "-O2",
            "-std=c++17",
            "-S",
            "-o",
            "/dev/null",
            "FOLDER/source.cpp",
        ],
        ..NOTHING
    },
    Entry {
        key: "java",
        what: "OpenJDK, G1: a HashMap",
        install: "openjdk-17-jdk-headless",
        needs: &["java", "javac"],
        size: [1_500_000, 150_000],
        files: &[("Main.java", include_str!("work/Main.java"))],
        once: "javac -d FOLDER FOLDER/Main.java",
        run: &[
            "java",
            "-XX:+UseG1GC",
            "-Xmx2g",
            "-cp",
            "FOLDER",
            "Main",
            "SIZE",
        ],
        ..NOTHING
    },
    Entry {
        key: "node",
        what: "Node: objects and buffers",
        install: "nodejs",
        needs: &["node"],
        size: [1_000_000, 100_000],
        files: &[("objects.js", include_str!("work/objects.js"))],
        run: &["node", "FOLDER/objects.js", "SIZE"],
        ..NOTHING
    },
    Entry {
        key: "sqlite",
        what: "SQLite in memory: index and join",
        install: "sqlite3",
        needs: &["sqlite3"],
        size: [1_500_000, 150_000],
        files: &[("tables.sql", include_str!("work/tables.sql"))],
        run: &["sqlite3", ":memory:", ".read FOLDER/tables.sql"],
        ..NOTHING
    },
    Entry {
        key: "sort",
        what: "sort: random lines",
        install: "coreutils gawk",
        needs: &["sort", "awk"],
        size: [3_000_000, 300_000],
        once: "awk 'BEGIN { srand(1); for (i = 0; i < SIZE; i++) print int(rand() * 2147483647), \"and some text\" }' > FOLDER/lines",
        run: &[
            "sort",
            "--parallel=2",
            "-S",
            "1G",
            "-o",
            "/dev/null",
            "FOLDER/lines",
        ],
        ..NOTHING
    },
    Entry {
        key: "zstd",
        what: "zstd: level 15, a long window",
        install: "zstd gawk",
        needs: &["zstd", "awk"],
        size: [1_500_000, 30_000],
        once: "awk 'BEGIN { srand(1); for (i = 0; i < SIZE; i++) print int(rand() * 99999), \"and some text\", i }' > FOLDER/lines",
        run: &[
            "zstd",
            "-q",
            "-15",
            "--long=27",
            "-T1",
            "-c",
            "FOLDER/lines",
        ],
        ..NOTHING
    },
    Entry {
        key: "ffmpeg",
        what: "ffmpeg: x264 of a test picture",
        install: "ffmpeg",
        needs: &["ffmpeg"],
        size: [8, 1],
        run: &[
            "ffmpeg",
            "-v",
            "error",
            "-nostdin",
            "-f",
            "lavfi",
            "-i",
            "testsrc2=size=1280x720:rate=30:duration=SIZE",
            "-c:v",
            "libx264",
            "-preset",
            "fast",
            "-threads",
            "2",
            "-f",
            "null",
            "-",
        ],
        ..NOTHING
    },
];
