//! Counters with one writer, and the order in which they are read (edge BOOKS).
//!
//! A counter is a word that its owner loads, adds to and stores. There is no read-modify-write and no line that two
//! threads write. Readers on other threads see each counter grow, at different instants.
//!
//! That is not enough for accounts. A reader that loads *received* and then *ended*, while both grow, finds more ends than
//! beginnings. So ends have a type of their own: [`EndCounter`] stores with release order and loads with acquire order. A
//! thread that counts an end has counted its beginning before, or has taken the message over from the thread that did. A
//! reader that reads every end counter of all threads first, and the counters of beginnings afterwards, therefore
//! finds at least as many beginnings as ends, at any instant.
//!
//! Both are generic over the atomic word, so that loom runs this very code.

use std::sync::atomic::{AtomicU64, Ordering};

/// An atomic word of 64 bits that one thread writes.
pub trait Atomic {
    /// What its owner stored last; for the owner.
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

/// A counter with one writer of what ends something that another counter counted before.
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
        // EDGE BOOKS (release half): who sees these ends sees their beginnings.
        self.0.store(self.0.own() + n, Ordering::Release);
    }

    /// Adds one; only the owning thread may.
    #[inline]
    pub fn one(&self) {
        self.add(1);
    }

    /// Reads; beginnings are read afterwards.
    #[inline]
    pub fn value(&self) -> u64 {
        // EDGE BOOKS (acquire half)
        self.0.load(Ordering::Acquire)
    }
}
