//! Pool side of the comparison.

use jumbo::pool::{Error, Folio, Page, Pool, Reservation};
use jumbo::units::{Order, Pages};

use super::{Answer, Op, Side, text};

/// A page of a pool, with its contents.
pub(super) struct Held<'p> {
    /// `None` for a split page.
    page: Option<Page<'p>>,
    /// Contents; the page number for a split page.
    mark: u64,
}

/// Reserved pages.
pub(super) struct Promised<'p> {
    left: Reservation<'p>,
    /// Used pages of a private mapping, which are freed with it.
    private: Option<Vec<Held<'p>>>,
}

/// State of the pool side.
pub(super) struct Ours<'p> {
    pub(super) pool: &'p Pool,
    pub(super) used: Vec<Held<'p>>,
    pub(super) reserved: Vec<Promised<'p>>,
    /// Folios with their contents.
    pub(super) folios: Vec<(Folio<'p>, u64)>,
    marks: u64,
}

impl<'p> Ours<'p> {
    pub(super) fn new(pool: &'p Pool) -> Self {
        Self {
            pool,
            used: Vec::new(),
            reserved: Vec::new(),
            folios: Vec::new(),
            marks: 0,
        }
    }

    fn hold(&mut self, mut page: Page<'p>) -> Held<'p> {
        self.marks += 1;
        let mark = self.marks;
        page.bytes_mut()[..8].copy_from_slice(&mark.to_ne_bytes());
        Held {
            page: Some(page),
            mark,
        }
    }

    /// Executes an operation, and returns its equivalent without folios.
    pub(super) fn plainly(&mut self, op: Op) -> Result<(Answer, Op), String> {
        let split = self.pool.split().pages;
        match op {
            Op::Folio(order) => {
                let mut folio = match self.pool.take_folio(Order(order)) {
                    Ok(folio) => folio,
                    Err(error) => return Ok((Some(Err(error.to_string())), Op::Take)),
                };
                self.marks += 1;
                folio.bytes_mut()[..8].copy_from_slice(&self.marks.to_ne_bytes());
                let page = self.page_of(&mut folio);
                self.folios.push((folio, self.marks));
                if self.pool.split().pages == split {
                    return Ok((None, Op::Nothing));
                }
                self.used.push(Held {
                    page: None,
                    mark: page,
                });
                Ok((Some(Ok(())), Op::Take))
            }
            Op::GiveFolio(at) if !self.folios.is_empty() => {
                let (mut folio, mark) = self.folios.swap_remove(at % self.folios.len());
                if folio.bytes()[..8] != mark.to_ne_bytes() {
                    return Err("a folio holds something else".to_owned());
                }
                let page = self.page_of(&mut folio);
                drop(folio);
                if self.pool.split().pages == split {
                    return Ok((None, Op::Nothing));
                }
                let is_it = |held: &Held<'_>| held.page.is_none() && held.mark == page;
                let at = self.used.iter().position(is_it);
                let at = at.ok_or("a page was split that was not taken")?;
                self.used.swap_remove(at);
                Ok((None, Op::Give(at)))
            }
            Op::GiveFolio(_) => Ok((None, Op::Nothing)),
            Op::Give(at)
                if !self.used.is_empty() && self.used[at % self.used.len()].page.is_none() =>
            {
                Ok((None, Op::Nothing))
            }
            op => Ok((self.step(op)?, op)),
        }
    }

    fn page_of(&self, folio: &mut Folio<'_>) -> u64 {
        folio.as_ptr().addr().get() as u64 / self.pool.page_size().bytes()
    }

    fn give(held: Held<'_>) -> Result<(), String> {
        let page = held.page.as_ref().ok_or("a split page was given")?;
        if page.bytes()[..8] == held.mark.to_ne_bytes() {
            return Ok(());
        }
        Err("a page holds something else".to_owned())
    }

    fn promise(&mut self, left: Result<Reservation<'p>, Error>, private: bool) -> Answer {
        let promised = left.map(|left| Promised {
            left,
            private: private.then(Vec::new),
        });
        Some(text(promised.map(|promised| self.reserved.push(promised))))
    }
}

impl Side for Ours<'_> {
    fn step(&mut self, op: Op) -> Result<Answer, String> {
        Ok(match op {
            Op::Take => {
                let taken = self.pool.take().map(|page| {
                    let held = self.hold(page);
                    self.used.push(held);
                });
                Some(text(taken))
            }
            Op::Reserve(pages @ 1..) => self.promise(self.pool.reserve(Pages(pages)), false),
            Op::ReservePrivate(pages) => self.promise(self.pool.reserve(Pages(pages)), true),
            Op::Give(at) if !self.used.is_empty() => {
                Self::give(self.used.swap_remove(at % self.used.len()))?;
                None
            }
            Op::Use(at) if !self.reserved.is_empty() => {
                let at = at % self.reserved.len();
                if let Some(page) = self.reserved[at].left.take() {
                    let held = self.hold(page);
                    match &mut self.reserved[at].private {
                        Some(pages) => pages.push(held),
                        None => self.used.push(held),
                    }
                }
                None
            }
            Op::End(at) if !self.reserved.is_empty() => {
                let promised = self.reserved.swap_remove(at % self.reserved.len());
                for held in promised.private.into_iter().flatten() {
                    Self::give(held)?;
                }
                None
            }
            Op::Resize(pages) => {
                self.pool.resize(Pages(pages));
                None
            }
            Op::Overcommit(pages) => {
                self.pool.set_overcommit(Pages(pages));
                None
            }
            _ => None,
        })
    }

    fn counters(&self) -> [u64; 4] {
        crate::books::check(self.pool);
        let counters = self.pool.counters();
        let all = [
            counters.total,
            counters.free,
            counters.reserved,
            counters.surplus,
        ];
        all.map(|pages| pages.0)
    }
}
