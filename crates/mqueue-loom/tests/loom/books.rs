//! BOOKS: a reader that loads the outcome counters before the received counters never sees an outcome without its message,
//! whichever thread counted it.

use std::sync::atomic::AtomicU64 as AtomicOfOwner;

use mqueue::count::{Atomic, Counter, EndCounter};

use super::*;

/// The accesses that are made relaxed.
#[derive(Clone, Copy, PartialEq)]
enum Relaxed {
    Nothing,
    Stores,
    Loads,
}

struct Cell {
    word: AtomicU64,
    /// The value its owner stored last. (A load by the owner would hide other threads' loads from loom, which only considers
    /// accesses since the last one when it decides which values the owner's next store may race with.)
    own: AtomicOfOwner,
    relaxed: Relaxed,
}

impl Atomic for Cell {
    fn own(&self) -> u64 {
        self.own.load(Ordering::Relaxed)
    }

    fn load(&self, order: Ordering) -> u64 {
        let weak = self.relaxed == Relaxed::Loads;
        self.word.load(if weak { Ordering::Relaxed } else { order })
    }

    fn store(&self, value: u64, order: Ordering) {
        self.own.store(value, Ordering::Relaxed);
        let weak = self.relaxed == Relaxed::Stores;
        self.word.store(value, if weak { Ordering::Relaxed } else { order });
    }
}

/// One worker's counters.
struct Books {
    received: Counter<Cell>,
    ended: EndCounter<Cell>,
}

impl Books {
    fn new(relaxed: Relaxed) -> Self {
        let cell = || Cell { word: AtomicU64::new(0), own: AtomicOfOwner::new(0), relaxed };
        Self { received: Counter::over(cell()), ended: EndCounter::over(cell()) }
    }
}

/// Reads all outcome counters, then all received counters, as a scrape does.
fn scrape(books: &[Books; 2]) {
    let ended: u64 = books.iter().map(|worker| worker.ended.value()).sum();
    let received: u64 = books.iter().map(|worker| worker.received.value()).sum();
    assert!(received >= ended, "more outcomes than messages");
}

/// One worker receives two requests and completes them.
fn one_worker(relaxed: Relaxed) -> impl Fn() + Sync + Send {
    move || {
        let books = Rc::new([Books::new(relaxed), Books::new(relaxed)]);
        let of_worker = books.clone();
        let worker = thread::spawn(move || {
            for _ in 0..2 {
                of_worker[0].received.one();
                of_worker[0].ended.one();
            }
        });
        scrape(&books);
        worker.join().unwrap();
    }
}

/// One worker receives a request and hands it over; the other one completes it.
fn two_workers(relaxed: Relaxed) -> impl Fn() + Sync + Send {
    move || {
        let books = Rc::new([Books::new(relaxed), Books::new(relaxed)]);
        let handed_over = Rc::new(AtomicU64::new(0));
        let (first, its_ring) = (books.clone(), handed_over.clone());
        let receiver = thread::spawn(move || {
            first[0].received.one();
            // The ring's edge HANDOVER.
            its_ring.store(1, Ordering::Release);
        });
        let second = books.clone();
        let ender = thread::spawn(move || {
            if handed_over.load(Ordering::Acquire) == 1 {
                second[1].ended.one();
            }
        });
        scrape(&books);
        receiver.join().unwrap();
        ender.join().unwrap();
    }
}

holds! {
    beginnings_before_ends: one_worker(Relaxed::Nothing);
    beginnings_before_ends_of_another_worker: two_workers(Relaxed::Nothing);
}

fails! {
    books_without_release: one_worker(Relaxed::Stores), "more outcomes than messages";
    books_without_acquire: one_worker(Relaxed::Loads), "more outcomes than messages";
    books_of_two_without_release: two_workers(Relaxed::Stores), "more outcomes than messages";
    books_of_two_without_acquire: two_workers(Relaxed::Loads), "more outcomes than messages";
}
