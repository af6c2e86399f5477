//! The pool's side.

use jumbo::pool::{Error, Folio, Page, Pool, Reservation, Subpool};
use jumbo::units::{Order, Pages};

use super::{Answer, Op, QUOTA, Side, text};

/// A subpool that ends before its pool.
struct Part<'p> {
    subpool: *mut Subpool<'p>,
    min: u64,
}

impl<'p> Part<'p> {
    fn new(pool: &'p Pool, min: u64) -> Result<Self, Error> {
        let subpool = pool.subpool(Some(Pages(QUOTA)), Pages(min))?;
        let subpool = Box::into_raw(Box::new(subpool));
        Ok(Self { subpool, min })
    }

    fn get(&self) -> &'p Subpool<'p> {
        // SAFETY: `Ours` drops the pages and reservations of a subpool before the subpool.
        unsafe { &*self.subpool }
    }
}

impl Drop for Part<'_> {
    fn drop(&mut self) {
        // SAFETY: `new` made it, and nothing refers to it any more: see `get`.
        drop(unsafe { Box::from_raw(self.subpool) });
    }
}

/// A page of a pool, and what its user wrote.
pub(super) struct Held<'p> {
    /// `None`: a page that is split.
    page: Option<Page<'p>>,
    /// Of a split page its number.
    mark: u64,
    is_of_subpool: bool,
}

/// Pages that are set aside.
pub(super) struct Promised<'p> {
    left: Reservation<'p>,
    is_of_subpool: bool,
    /// Of a private mapping: the pages that were used, which go with it.
    private: Option<Vec<Held<'p>>>,
}

/// A pool.
pub(super) struct Ours<'p> {
    pub(super) pool: &'p Pool,
    pub(super) used: Vec<Held<'p>>,
    pub(super) reserved: Vec<Promised<'p>>,
    /// With what their users wrote.
    pub(super) folios: Vec<(Folio<'p>, u64)>,
    subpool: Option<Part<'p>>,
    marks: u64,
}

impl<'p> Ours<'p> {
    pub(super) fn new(pool: &'p Pool) -> Self {
        Self {
            pool,
            used: Vec::new(),
            reserved: Vec::new(),
            folios: Vec::new(),
            subpool: Part::new(pool, 0).ok(),
            marks: 0,
        }
    }

    fn hold(&mut self, mut page: Page<'p>, is_of_subpool: bool) -> Held<'p> {
        self.marks += 1;
        let mark = self.marks;
        page.bytes_mut()[..8].copy_from_slice(&mark.to_ne_bytes());
        Held {
            page: Some(page),
            mark,
            is_of_subpool,
        }
    }

    /// Carries an operation out, and says what it is to one who knows no folios.
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
                    is_of_subpool: false,
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

    /// Whether an operation gives a page back that the subpool's minimum keeps, while the pool has surplus.
    pub(super) fn keeps_of_surplus(&self, op: Op) -> bool {
        let gives = match op {
            Op::Give(at) if !self.used.is_empty() => self.used[at % self.used.len()].is_of_subpool,
            Op::Renew(_) => self.used.iter().any(|held| held.is_of_subpool),
            _ => false,
        };
        let least = self.subpool.as_ref().is_some_and(|part| part.min > 0);
        gives && least && self.pool.counters().surplus > Pages(0)
    }

    fn give(held: Held<'_>) -> Result<(), String> {
        let page = held.page.as_ref().ok_or("a split page was given")?;
        if page.bytes()[..8] == held.mark.to_ne_bytes() {
            return Ok(());
        }
        Err("a page holds something else".to_owned())
    }

    fn promise(
        &mut self,
        left: Result<Reservation<'p>, Error>,
        is_of_subpool: bool,
        private: bool,
    ) -> Answer {
        let promised = left.map(|left| Promised {
            left,
            is_of_subpool,
            private: private.then(Vec::new),
        });
        Some(text(promised.map(|promised| self.reserved.push(promised))))
    }
}

impl Side for Ours<'_> {
    fn step(&mut self, op: Op) -> Result<Answer, String> {
        let subpool = self.subpool.as_ref().map(Part::get);
        Ok(match (op, subpool) {
            (Op::Take, _) => {
                let taken = self.pool.take().map(|page| {
                    let held = self.hold(page, false);
                    self.used.push(held);
                });
                Some(text(taken))
            }
            (Op::TakeOf, Some(subpool)) => {
                let taken = subpool.take().map(|page| {
                    let held = self.hold(page, true);
                    self.used.push(held);
                });
                Some(text(taken))
            }
            (Op::Reserve(pages @ 1..), _) => {
                self.promise(self.pool.reserve(Pages(pages)), false, false)
            }
            (Op::ReservePrivate(pages), _) => {
                self.promise(self.pool.reserve(Pages(pages)), false, true)
            }
            (Op::ReserveOf(pages @ 1..), Some(subpool)) => {
                self.promise(subpool.reserve(Pages(pages)), true, false)
            }
            (Op::Give(at), _) if !self.used.is_empty() => {
                Self::give(self.used.swap_remove(at % self.used.len()))?;
                None
            }
            (Op::Use(at), _) if !self.reserved.is_empty() => {
                let at = at % self.reserved.len();
                let is_of_subpool = self.reserved[at].is_of_subpool;
                if let Some(page) = self.reserved[at].left.take() {
                    let held = self.hold(page, is_of_subpool);
                    match &mut self.reserved[at].private {
                        Some(pages) => pages.push(held),
                        None => self.used.push(held),
                    }
                }
                None
            }
            (Op::End(at), _) if !self.reserved.is_empty() => {
                let promised = self.reserved.swap_remove(at % self.reserved.len());
                for held in promised.private.into_iter().flatten() {
                    Self::give(held)?;
                }
                None
            }
            (Op::Renew(min), _) => {
                self.used.retain(|held| !held.is_of_subpool);
                self.reserved.retain(|promised| !promised.is_of_subpool);
                self.subpool = None;
                let part = Part::new(self.pool, min);
                Some(text(part.map(|part| self.subpool = Some(part))))
            }
            (Op::Resize(pages), _) => {
                self.pool.resize(Pages(pages));
                None
            }
            (Op::Overcommit(pages), _) => {
                self.pool.set_overcommit(Pages(pages));
                None
            }
            _ => None,
        })
    }

    fn counters(&self) -> Result<([u64; 4], u64), String> {
        crate::books::check(self.pool);
        let counters = self.pool.counters();
        let all = [
            counters.total,
            counters.free,
            counters.reserved,
            counters.surplus,
        ];
        let subpool = self.subpool.as_ref().map(Part::get);
        let charged = subpool.map_or(0, |subpool| subpool.charged().0);
        Ok((all.map(|pages| pages.0), charged))
    }
}
