//! BOOKS: a reader that loads the counters of ends first finds their beginnings, whichever thread counted them.

use std::sync::atomic::AtomicU64 as AtomicOfOwner;

use mqueue::count::{Atomic, Counter, EndCounter};

use super::*;

/// What is made relaxed.
#[derive(Clone, Copy, PartialEq)]
enum Relaxed {
    Nothing,
    Stores,
    Loads,
}

struct Cell {
    word: AtomicU64,
    /// What its owner stored last. (A load by the owner would hide the loads of others from loom, which looks no further
    /// back than the last access when it decides what the owner's next store may be exchanged with.)
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

/// What one worker counts.
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

/// Reads all ends, then all beginnings, as a scrape does.
fn scrape(books: &[Books; 2]) {
    let ended: u64 = books.iter().map(|worker| worker.ended.value()).sum();
    let received: u64 = books.iter().map(|worker| worker.received.value()).sum();
    assert!(received >= ended, "more ends than beginnings");
}

/// One worker receives two requests and ends them.
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

/// One worker receives a request and hands it over; the other one ends it.
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
    books_without_release: one_worker(Relaxed::Stores), "more ends than beginnings";
    books_without_acquire: one_worker(Relaxed::Loads), "more ends than beginnings";
    books_of_two_without_release: two_workers(Relaxed::Stores), "more ends than beginnings";
    books_of_two_without_acquire: two_workers(Relaxed::Loads), "more ends than beginnings";
}
