//! The kernel's own pool made larger for a [`super::Hugetlb`] source, where there is the privilege: [`Plan`],
//! and [`Grown`], which undoes it.
//!
//! A plan writes nothing. It says what would be written and what speaks against it: huge pages come out of
//! free blocks, a zone of movable memory is the safest place for them, and a host without free blocks of
//! that size has to move memory first.

use serde::Serialize;

use crate::kernel::hugetlb::{self, Pool};
use crate::kernel::memory::Zone;
use crate::kernel::{FileError, Root, base_page};
use crate::units::{NodeId, PageSize, Pages};

/// What it takes for `unused` pages of the kernel's pool to be there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// The size of the pages.
    pub size: PageSize,
    /// Persistent pages now.
    pub from: Pages,
    /// Persistent pages then.
    pub to: Pages,
    /// Where whole free blocks for them are.
    pub zones: Vec<Room>,
}

/// What a zone's free blocks hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Room {
    /// The node.
    pub node: NodeId,
    /// `DMA32`, `Normal`, `Movable`.
    pub zone: String,
    /// Pages of the size in free blocks; `None` where a page is larger than the largest block.
    pub pages: Option<Pages>,
}

/// Why a plan could not be made or carried out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GrowthError {
    /// A kernel file could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The kernel has no pool of that size.
    #[error("the kernel has no pool of {0} pages")]
    NoPool(PageSize),
}

/// A kernel pool that was made larger; dropping it makes it smaller again by as much.
#[derive(Debug)]
pub struct Grown {
    root: Root,
    size: PageSize,
    /// How many pages came, which may be fewer than were planned.
    got: Pages,
    undone: bool,
}

fn read(root: &Root, size: PageSize) -> Result<Pool, GrowthError> {
    let pools = hugetlb::pools(root)?.unwrap_or_default();
    let pool = pools.into_iter().find(|pool| pool.size == size);
    pool.ok_or(GrowthError::NoPool(size))
}

fn write(root: &Root, size: PageSize, pages: Pages) -> Result<(), GrowthError> {
    let file = format!(
        "sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages",
        size.kib()
    );
    let path = root.path(file);
    std::fs::write(&path, pages.to_string()).map_err(|source| {
        GrowthError::File(FileError::Io {
            operation: "write",
            path,
            source,
        })
    })
}

impl Plan {
    /// What it takes for `unused` pages to be there that nobody uses and nobody was promised; `None` where they
    /// are there already, or overcommit allows for what is missing.
    ///
    /// # Errors
    /// [`GrowthError`].
    pub fn new(root: &Root, size: PageSize, unused: Pages) -> Result<Option<Self>, GrowthError> {
        let pool = read(root, size)?;
        let missing = unused.0.saturating_sub(pool.unused().0);
        if missing <= pool.may_grow_by().0 {
            return Ok(None);
        }
        let base = base_page(root);
        let room = |zone: Zone| Room {
            pages: zone.whole(size, base),
            node: zone.node,
            zone: zone.name,
        };
        Ok(Some(Self {
            size,
            from: pool.persistent(),
            to: Pages(pool.persistent().0 + missing),
            zones: Zone::read_all(root)?.into_iter().map(room).collect(),
        }))
    }

    /// How many pages there are to be more.
    pub fn pages(&self) -> Pages {
        Pages(self.to.0.saturating_sub(self.from.0))
    }

    /// What speaks against it, for a person to read before.
    pub fn doubts(&self) -> Vec<String> {
        let mut doubts = Vec::new();
        let known: Option<u64> = self.zones.iter().map(|room| room.pages.map(|n| n.0)).sum();
        match known {
            Some(pages) if pages < self.pages().0 => doubts.push(format!(
                "free blocks hold {pages} of {} pages; for the rest the kernel has to move memory, and may fail",
                self.pages()
            )),
            None => doubts.push(format!(
                "a page of {} is larger than the largest free block; the kernel has to clear a range for each",
                self.size
            )),
            Some(_) => {}
        }
        let movable = self.zones.iter().filter(|room| room.zone == "Movable");
        let movable: u64 = movable.filter_map(|room| room.pages).map(|n| n.0).sum();
        if movable < self.pages().0 {
            doubts.push(format!(
                "movable memory (ZONE_MOVABLE) has blocks for {movable} pages; the others come out of memory that \
                 can be pinned, where pages are hard to form again once they were given back"
            ));
        }
        doubts
    }

    /// Carries it out, reads back what came of it, and keeps what came.
    ///
    /// # Errors
    /// [`GrowthError::File`] where the knob is refused: it takes root.
    pub fn apply(&self, root: &Root) -> Result<Grown, GrowthError> {
        let before = read(root, self.size)?.persistent();
        write(root, self.size, Pages(before.0 + self.pages().0))?;
        // From here on it is undone, whatever happens; until it is read back, as if all of them had come.
        let mut grown = Grown {
            root: root.clone(),
            size: self.size,
            got: self.pages(),
            undone: false,
        };
        let after = read(root, self.size)?.persistent();
        grown.got = Pages(after.0.saturating_sub(before.0));
        Ok(grown)
    }
}

impl Grown {
    /// How many pages came. Fewer than planned: memory is too fragmented, or there is too little.
    pub fn got(&self) -> Pages {
        self.got
    }

    /// Makes the pool smaller by as much as it was made larger, whatever else happened to it since. Pages that are in
    /// use become surplus and go when they are given back.
    ///
    /// # Errors
    /// [`GrowthError`]; dropping tries once more.
    pub fn undo(mut self) -> Result<(), GrowthError> {
        self.put_back()
    }

    fn put_back(&mut self) -> Result<(), GrowthError> {
        if self.undone || self.got.0 == 0 {
            return Ok(());
        }
        let now = read(&self.root, self.size)?.persistent();
        write(
            &self.root,
            self.size,
            Pages(now.0.saturating_sub(self.got.0)),
        )?;
        self.undone = true;
        Ok(())
    }
}

impl Drop for Grown {
    fn drop(&mut self) {
        let _ = self.put_back();
    }
}
