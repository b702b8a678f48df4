//! `--corrupt`: one byte of what a server answers is changed, and the demo's own check has to find it.

use std::sync::atomic::{AtomicBool, Ordering};

use bench::client::Workload;
use bench::client::workload::Lookups;

/// A workload whose next reply is changed before it is checked, if `is_due`; that is cleared.
pub(super) struct Spoiled<'a> {
    pub(super) inner: &'a mut dyn Workload,
    pub(super) is_due: &'a AtomicBool,
}

impl Workload for Spoiled<'_> {
    fn request(&mut self, index: u64, into: &mut Vec<u8>) {
        self.inner.request(index, into);
    }

    fn accepts(&mut self, index: u64, reply: &[u8]) -> bool {
        if !self.is_due.swap(false, Ordering::Relaxed) {
            return self.inner.accepts(index, reply);
        }
        let mut spoiled = reply.to_vec();
        if let Some(first) = spoiled.first_mut() {
            *first ^= 0x80;
        }
        self.inner.accepts(index, &spoiled)
    }

    fn has_identity(&self) -> bool {
        self.inner.has_identity()
    }

    fn identify(&self, reply: &[u8]) -> Option<u64> {
        self.inner.identify(reply)
    }

    fn replies_differ(&self) -> bool {
        self.inner.replies_differ()
    }

    fn lookups(&self) -> Lookups {
        self.inner.lookups()
    }
}
