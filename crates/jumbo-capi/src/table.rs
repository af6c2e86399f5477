//! Handles: [`Table`], slots with a generation.
//!
//! A handle is the number of its slot and the generation of its value. The end of a value raises
//! the generation, so an old handle never reaches a later value in the same slot.

use std::sync::{Arc, PoisonError, RwLock};

use rustix::io::Errno;

use crate::failure::{Failure, Outcome};

/// Values of one kind, by handle.
#[derive(Debug)]
pub(crate) struct Table<T> {
    slots: RwLock<Vec<Slot<T>>>,
    /// In messages.
    kind: &'static str,
}

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    value: Option<Arc<T>>,
}

impl<T> Table<T> {
    pub(crate) const fn new(kind: &'static str) -> Self {
        let slots = RwLock::new(Vec::new());
        Self { slots, kind }
    }

    /// Adds a value, and returns its handle, which is not 0.
    ///
    /// # Errors
    /// EMFILE: 2^32 slots.
    pub(crate) fn insert(&self, value: T) -> Outcome<u64> {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        // A generation is used once: a slot whose generations are used up stays empty.
        let free = |slot: &Slot<T>| slot.value.is_none() && slot.generation < u32::MAX;
        let at = slots.iter().position(free).unwrap_or_else(|| {
            slots.push(Slot {
                generation: 0,
                value: None,
            });
            slots.len() - 1
        });
        let full = || Failure::new(Errno::MFILE, format!("too many {}s", self.kind));
        let number = u32::try_from(at).map_err(|_| full())?;
        let slot = slots.get_mut(at).ok_or_else(full)?;
        slot.generation += 1;
        slot.value = Some(Arc::new(value));
        Ok(u64::from(slot.generation) << 32 | u64::from(number))
    }

    /// Returns the value of a handle.
    ///
    /// # Errors
    /// EBADF.
    pub(crate) fn get(&self, handle: u64) -> Outcome<Arc<T>> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        let slot = slots.get(number(handle));
        let value = slot.filter(|slot| slot.is_of(handle));
        value
            .and_then(|slot| slot.value.clone())
            .ok_or_else(|| self.bad(handle))
    }

    /// Ends a handle if `may` permits. Calls that use the value at the time keep it until they
    /// return.
    ///
    /// # Errors
    /// EBADF, and those of `may`.
    pub(crate) fn remove(&self, handle: u64, may: impl FnOnce(&T) -> Outcome<()>) -> Outcome<()> {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let slot = slots.get_mut(number(handle));
        let slot = slot.filter(|slot| slot.is_of(handle));
        let value = slot.map(|slot| &mut slot.value);
        let Some(value @ Some(_)) = value else {
            return Err(self.bad(handle));
        };
        value.as_deref().map_or(Ok(()), may)?;
        let ended = value.take();
        // Its drop may take long.
        drop(slots);
        drop(ended);
        Ok(())
    }

    fn bad(&self, handle: u64) -> Failure {
        let message = match handle {
            0 => format!("no {} has the handle 0", self.kind),
            _ => format!("the {} of this handle is closed, or never was", self.kind),
        };
        Failure::new(Errno::BADF, message)
    }
}

impl<T> Slot<T> {
    fn is_of(&self, handle: u64) -> bool {
        u64::from(self.generation) == handle >> 32
    }
}

fn number(handle: u64) -> usize {
    usize::try_from(handle & u64::from(u32::MAX)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_handle_is_bad_for_ever() {
        let table = Table::new("number");
        let bad = |handle| table.get(handle).unwrap_err().errno == libc::EBADF;
        let first = table.insert(1).unwrap();
        assert_eq!(*table.get(first).unwrap(), 1);
        table.remove(first, |_| Ok(())).unwrap();
        let second = table.insert(2).unwrap();
        assert!(first != second && bad(first) && bad(0) && bad(u64::MAX));
        assert!(table.remove(first, |_| Ok(())).is_err());
        let busy = |_: &i32| Err(Failure::new(Errno::BUSY, "busy"));
        assert_eq!(table.remove(second, busy).unwrap_err().errno, libc::EBUSY);
        assert_eq!(*table.get(second).unwrap(), 2);
    }

    #[test]
    fn a_slot_whose_generations_are_used_up_is_not_used_again() {
        let table = Table::new("number");
        let first = table.insert(1).unwrap();
        table.slots.write().unwrap()[0].generation = u32::MAX;
        table
            .remove(first | u64::from(u32::MAX) << 32, |_| Ok(()))
            .unwrap();
        assert_eq!(table.insert(2).unwrap(), 1 << 32 | 1);
    }
}
