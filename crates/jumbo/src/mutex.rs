//! Locks that no panic poisons: [`lock`].

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, poisoned or not: no code panics with a lock held.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
