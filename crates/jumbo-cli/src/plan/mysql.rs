//! `jumbo plan mysql`: the buffer pool and the caches beside it.

use jumbo::units::{Bytes, PageSize, Pages};

use crate::value::size_with_unit;

use super::sizing::{PageKind, PlannedMapping, Workload};
use crate::planned::all;

/// Plan the buffer pool of MariaDB or MySQL
///
/// MariaDB maps its buffer pool, two log buffers and the caches of MyISAM and Aria with huge pages.
/// The caches count by their default of 128 MiB each, unless the options say otherwise.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo plan mysql --buffer-pool 64G
  jumbo plan mysql --server mysql --buffer-pool 64G --group mysql")]
pub(super) struct Args {
    /// innodb_buffer_pool_size
    #[arg(long, value_name = "SIZE", value_parser = size_with_unit)]
    pub(super) buffer_pool: Bytes,

    /// innodb_log_buffer_size
    #[arg(long, value_name = "SIZE", value_parser = size_with_unit, default_value = "16M")]
    pub(super) log_buffer: Bytes,

    /// key_buffer_size, the cache of MyISAM
    #[arg(long, value_name = "SIZE", value_parser = size_with_unit, default_value = "128M")]
    pub(super) key_buffer: Bytes,

    /// aria_pagecache_buffer_size
    #[arg(long, value_name = "SIZE", value_parser = size_with_unit, default_value = "128M")]
    pub(super) aria_cache: Bytes,

    /// The server: their support of huge pages differs
    #[arg(long, value_enum, default_value_t = MysqlServer::Mariadb)]
    pub(super) server: MysqlServer,

    /// The group that mysqld runs as, by name or number, for --server mysql
    #[arg(long, value_name = "GROUP", default_value = "mysql")]
    pub(super) group: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum MysqlServer {
    /// MariaDB 10.11 and later: mmap(2)
    Mariadb,
    /// MySQL 8: shmget(2), in chunks of innodb_buffer_pool_chunk_size
    Mysql,
}

/// MySQL's default innodb_buffer_pool_chunk_size. The buffer pool is a multiple of it.
const CHUNK_BYTES: u64 = 128 << 20;
const INNODB_PAGE_BYTES: u64 = 16 << 10;
/// Descriptor of a page in a chunk of MySQL 8 (`buf_block_t`), rounded up.
const DESCRIPTOR_BYTES: u64 = 512;

impl Args {
    pub(super) fn workload(&self, page: Option<PageSize>) -> anyhow::Result<Workload> {
        let page = page.unwrap_or(PageSize::SIZE_2M);
        let (kind, regions) = match self.server {
            MysqlServer::Mariadb => {
                // The settings include blocks of 1 KiB and 8 KiB and their records of 214 and 266
                // bytes (init_key_cache, init_pagecache). Only the blocks are on huge pages.
                let blocks = |cache: Bytes, block: u64, record: u64| {
                    Bytes(cache.0 / (block + record) * block)
                };
                let regions = [
                    ("buffer pool", self.buffer_pool),
                    ("log buffer", self.log_buffer),
                    ("second log buffer", self.log_buffer),
                    ("MyISAM's key cache", blocks(self.key_buffer, 1 << 10, 214)),
                    ("Aria's page cache", blocks(self.aria_cache, 8 << 10, 266)),
                ];
                (
                    PageKind::Mapped,
                    regions
                        .map(|(name, size)| PlannedMapping::new(name, size))
                        .into(),
                )
            }
            MysqlServer::Mysql => {
                let chunks = self.buffer_pool.0.div_ceil(CHUNK_BYTES).max(1);
                // Each chunk with its descriptors has pages of its own.
                let chunk = Bytes(CHUNK_BYTES + CHUNK_BYTES / INNODB_PAGE_BYTES * DESCRIPTOR_BYTES);
                let pages = PlannedMapping::new("chunk", chunk).pages(page).0;
                let all = Pages(pages.saturating_mul(chunks)).bytes(page);
                (
                    PageKind::Sysv,
                    vec![PlannedMapping::new(format!("{chunks} chunks"), all)],
                )
            }
        };
        let mut workload = Workload::new("mysql", kind, page, regions);
        workload.template = include_str!("templates/mysql.txt");
        let mib = |size: Bytes| all([size.0 >> 20]);
        workload.values = vec![("buffer_pool", mib(self.buffer_pool))];
        if self.server == MysqlServer::Mariadb {
            workload.unit = "mariadb.service".into();
            workload.source = String::from("the settings, by the rules of MariaDB 10.11");
            workload.values.extend([
                ("log_buffer", mib(self.log_buffer)),
                ("key_buffer", mib(self.key_buffer)),
                ("aria_cache", mib(self.aria_cache)),
            ]);
        } else {
            workload.source =
                String::from("the settings, by the rules of MySQL 8: an upper bound, not measured");
            workload.group = Some(super::group(&self.group)?);
            let memlock = "shmget(2) with SHM_HUGETLB locks memory where the group does not match.";
            workload.values.extend([
                ("chunk", mib(Bytes(CHUNK_BYTES))),
                ("memlock", all([memlock])),
            ]);
        }
        Ok(workload)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Measured with MariaDB 10.11.19 under large-pages.
    #[test]
    fn mariadb_has_the_measured_pages() {
        for (pool, log, pages) in [(512, 16, 387), (1024, 64, 691)] {
            let args = Args {
                buffer_pool: Bytes(pool << 20),
                log_buffer: Bytes(log << 20),
                key_buffer: Bytes(128 << 20),
                aria_cache: Bytes(128 << 20),
                server: MysqlServer::Mariadb,
                group: String::new(),
            };
            assert_eq!(args.workload(None).unwrap().pages().0, pages);
        }
    }
}
