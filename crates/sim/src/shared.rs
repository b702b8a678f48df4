//! Parts of a run that the engine and the models share.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a shared part of the run. A panic inside the engine must not hide behind a second one.
pub fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
