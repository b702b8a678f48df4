//! EPOCHS: what a cache has kept is not served once a client can know that it was overwritten, whichever workers saw the write, filled the
//! entry and serve it. The code is that of the function `memcached-cache`.

use super::orders::{self as atomic, Relaxed};
use super::*;

#[expect(
    dead_code,
    reason = "what prepares a batch, and the choice of a slot, have no part in the order"
)]
#[path = "../../../builtins/src/memcached_cache/epochs.rs"]
mod table;

use table::{Epochs, Scope, Words};

/// A server with one value, and what clients tell each other.
struct World {
    epochs: Epochs,
    value: AtomicU64,
    told: AtomicU64,
}

impl World {
    fn new(relaxed: Relaxed) -> Rc<Self> {
        atomic::begin(relaxed);
        let (value, told) = (AtomicU64::new(0), AtomicU64::new(0));
        Rc::new(Self { epochs: Epochs::new(0), value, told })
    }

    /// A question: what the server says, and under which words that may be kept.
    fn ask(&self) -> (Option<Words>, u64) {
        let words = self.epochs.words(0);
        (words, self.value.load(Ordering::Relaxed))
    }

    /// Whether what was kept is served.
    fn serves(&self, words: Option<Words>) -> bool {
        words.is_some_and(|words| self.epochs.is_valid(0, &words, 1))
    }
}

/// A write of one worker, a fill and a hit of another.
fn a_write(scope: Scope, relaxed: Relaxed) -> impl Fn() + Sync + Send {
    move || {
        let world = World::new(relaxed);
        let writer = world.clone();
        let writes = thread::spawn(move || {
            writer.epochs.begin(scope);
            writer.value.store(1, Ordering::Relaxed);
            writer.epochs.end(scope);
            writer.told.store(1, Ordering::Release);
        });
        let (words, value) = world.ask();
        if world.told.load(Ordering::Acquire) == 1 && world.serves(words) {
            assert_eq!(value, 1, "an overwritten value is served");
        }
        writes.join().unwrap();
        let (words, value) = world.ask();
        assert!(world.serves(words) && value == 1, "the table is as before");
    }
}

/// The client that learns of the write reads the new value, before the write is answered.
fn a_write_that_is_read(relaxed: Relaxed) -> impl Fn() + Sync + Send {
    move || {
        let world = World::new(relaxed);
        let writer = world.clone();
        let writes = thread::spawn(move || {
            writer.epochs.begin(Scope::Slot(0));
            writer.value.store(1, Ordering::Relaxed);
            // Another client reads it at the server, and tells of it.
            writer.told.store(1, Ordering::Release);
            writer.epochs.end(Scope::Slot(0));
        });
        let (words, value) = world.ask();
        if world.told.load(Ordering::Acquire) == 1 && world.serves(words) {
            assert_eq!(value, 1, "an overwritten value is served");
        }
        writes.join().unwrap();
    }
}

/// A flush at time 10 to 20, which the server has confirmed before: who has seen its end does not serve at 12 what was asked for at 8, also
/// while another worker opens the window.
fn a_flush(relaxed: Relaxed) -> impl Fn() + Sync + Send {
    move || {
        let world = World::new(relaxed);
        let before = world.epochs.words(0);
        let (flusher, opener) = (world.clone(), world.clone());
        let flushes = thread::spawn(move || {
            flusher.epochs.add_window(0, 10, 20);
            flusher.epochs.begin(Scope::Whole);
            flusher.epochs.end(Scope::Whole);
        });
        let opens = thread::spawn(move || opener.epochs.open_windows(12));
        let words = world.epochs.words(0);
        if let Some(words) = words.filter(|words| Some(*words) != before) {
            world.epochs.open_windows(12);
            assert!(!world.epochs.is_valid(0, &words, 8), "a flush is missed");
        }
        flushes.join().unwrap();
        opens.join().unwrap();
        world.epochs.open_windows(12);
        let words = world.epochs.words(0).expect("nothing is pending");
        assert!(!world.epochs.is_valid(0, &words, 20), "a flush is missed");
        assert!(world.epochs.is_valid(0, &words, 21), "it ends");
    }
}

holds! {
    a_fill_beside_a_write: a_write(Scope::Slot(0), Relaxed::Nothing);
    a_fill_beside_a_write_of_all_keys: a_write(Scope::Whole, Relaxed::Nothing);
    a_fill_beside_a_write_that_is_read: a_write_that_is_read(Relaxed::Nothing);
    a_fill_beside_a_flush: a_flush(Relaxed::Nothing);
}

fails! {
    epochs_without_release: a_write(Scope::Slot(0), Relaxed::Stores), "an overwritten value is served";
    epochs_without_acquire: a_write(Scope::Slot(0), Relaxed::Loads), "an overwritten value is served";
    epochs_of_all_without_release: a_write(Scope::Whole, Relaxed::Stores), "an overwritten value is served";
    epochs_of_all_without_acquire: a_write(Scope::Whole, Relaxed::Loads), "an overwritten value is served";
    flush_without_release: a_flush(Relaxed::Stores), "a flush is missed";
    flush_without_acquire: a_flush(Relaxed::Loads), "a flush is missed";
}
