// SPDX-License-Identifier: Apache-2.0
//! One run at a time: Python's threads wait for their turn without the GIL, and Ctrl-C ends the wait.

use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, ThreadId},
    time::Duration,
};

use pyo3::{exceptions::PyRuntimeError, prelude::*};

/// How often a thread that waits looks for a signal.
const SIGNALS: Duration = Duration::from_millis(50);

/// Whose turn it is.
#[derive(Default)]
pub struct Turn {
    holder: Mutex<Option<ThreadId>>,
    freed: Condvar,
}

/// Somebody's turn; over when it is dropped.
pub struct Held<'a>(&'a Turn);

/// A lock whose holder panicked is as good as any: what it guards is replaced as a whole.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Turn {
    /// Whether the calling thread has the turn.
    pub fn mine(&self) -> bool {
        *lock(&self.holder) == Some(thread::current().id())
    }

    /// Waits for the turn.
    ///
    /// # Errors
    /// `RuntimeError` if the calling thread has it already; whatever a signal's handler raises.
    pub fn take(&self, py: Python<'_>) -> PyResult<Held<'_>> {
        let me = thread::current().id();
        if self.mine() {
            let what = "this model is in the middle of a run of this thread; a callback cannot start another one on it";
            return Err(PyRuntimeError::new_err(what));
        }
        loop {
            let taken = py.detach(|| {
                let mut holder = lock(&self.holder);
                if holder.is_some() {
                    holder =
                        self.freed.wait_timeout(holder, SIGNALS).unwrap_or_else(PoisonError::into_inner).0;
                }
                if holder.is_none() {
                    *holder = Some(me);
                }
                *holder == Some(me)
            });
            if taken {
                return Ok(Held(self));
            }
            py.check_signals()?;
        }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        *lock(&self.0.holder) = None;
        self.0.freed.notify_one();
    }
}
