//! Counters with one writer, and the order in which they are read (edge BOOKS).
//!
//! A counter is a word that its owner loads, adds to and stores. There is no read-modify-write and no line that two
//! threads write. Readers on other threads see each counter grow, at different instants.
//!
//! That is not enough for accounting. A reader that loads *received* and then *ended*, while both grow, finds more outcomes than
//! messages. So outcomes have a type of their own: [`EndCounter`] stores with release order and loads with acquire order. A
//! thread that counts an outcome has counted the message before, or has taken it over from the thread that did. A
//! reader that reads the outcome counters of all threads first, and the received counters afterwards, therefore
//! finds at least as many messages as outcomes, at any time.
//!
//! Both are generic over the atomic word, so that loom runs this very code.

use std::sync::atomic::{AtomicU64, Ordering};

/// An atomic word of 64 bits that one thread writes.
pub trait Atomic {
    /// The value its owner stored last; for the owner.
    fn own(&self) -> u64;
    /// As [`AtomicU64::load`].
    fn load(&self, order: Ordering) -> u64;
    /// As [`AtomicU64::store`].
    fn store(&self, value: u64, order: Ordering);
}

impl Atomic for AtomicU64 {
    #[inline]
    fn own(&self) -> u64 {
        self.load(Ordering::Relaxed)
    }

    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }

    #[inline]
    fn store(&self, value: u64, order: Ordering) {
        self.store(value, order);
    }
}

/// A counter with one writer. It orders nothing.
#[derive(Debug, Default)]
pub struct Counter<A = AtomicU64>(A);

impl<A: Atomic> Counter<A> {
    /// Counts in this word.
    pub fn over(word: A) -> Self {
        Self(word)
    }

    /// Adds; only the owning thread may.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.own() + n, Ordering::Relaxed);
    }

    /// Adds one; only the owning thread may.
    #[inline]
    pub fn one(&self) {
        self.add(1);
    }

    /// Overwrites (for gauges); only the owning thread may.
    #[inline]
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// Reads.
    #[inline]
    pub fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A counter with one writer of the outcomes of messages that another counter counted before.
#[derive(Debug, Default)]
pub struct EndCounter<A = AtomicU64>(A);

impl<A: Atomic> EndCounter<A> {
    /// Counts in this word.
    pub fn over(word: A) -> Self {
        Self(word)
    }

    /// Adds; only the owning thread may.
    #[inline]
    pub fn add(&self, n: u64) {
        // EDGE BOOKS (release half): a reader that sees these outcomes sees their messages.
        self.0.store(self.0.own() + n, Ordering::Release);
    }

    /// Adds one; only the owning thread may.
    #[inline]
    pub fn one(&self) {
        self.add(1);
    }

    /// Reads; received counters are read afterwards.
    #[inline]
    pub fn value(&self) -> u64 {
        // EDGE BOOKS (acquire half)
        self.0.load(Ordering::Acquire)
    }
}
