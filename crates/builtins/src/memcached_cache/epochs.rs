//! What the instances of one cache share: for each slot of keys how often it was written, and how many writes are in progress.
//!
//! A key belongs to the slot that its hash chooses; keys that share one invalidate each other, which costs only hits. A word holds an
//! *epoch* (upper 40 bits) and the number of writes that are *pending* (lower 24 bits). [`Epochs::begin`] adds one to both before a write is
//! forwarded; [`Epochs::end`] adds one to the epoch and takes one from the pending writes, after the server's reply and before it is
//! released. The words outlive everything that the instances evict.
//!
//! *Why nothing overwritten is served.* An entry holds the words of its slot and of all keys ([`Words`]) as they were when the
//! question that filled it was about to be forwarded, and only if nothing was pending. It is served while both words are the same. Take a
//! write of its key. (1) It began before that question, and had ended: the server did it before it answered the question, which the
//! answer shows. (2) It began before and had not ended: then it was pending, and there is no entry. (3) It begins
//! later: the word differs from then on, also if it begins before the answer arrives. In case 3 a client that learns of the write, by its
//! reply or by reading its value, does so after the write was forwarded, so after [`Epochs::begin`]; the message that tells it
//! orders the read-modify-write (release) before the load of a later hit (acquire), on any worker. A word repeats after 2^40 epochs.
//!
//! *All keys* have a word of their own, for `flush_all`, for writes whose keys are not known, and for instances that do not see the
//! messages of their worker: one that is not attached yet, is detached or has failed counts as a pending write. *The floor* is a time:
//! entries whose question was forwarded up to then are not served. A `flush_all` with a delay has a *window*; when it begins the floor
//! rises to its end.

// Of the standard library, or loom's where crates/mqueue-loom includes this file.
use super::atomic::{AtomicU64, Ordering};

/// Bits of the pending writes in a word.
const PENDING_BITS: u32 = 24;
pub(super) const PENDING_MASK: u64 = (1 << PENDING_BITS) - 1;
const EPOCH: u64 = 1 << PENDING_BITS;
/// Flushes with a delay that are known at a time. More than these take effect at once, and until their end.
pub(super) const WINDOWS: usize = 8;
const NEVER: u64 = u64::MAX;

/// What an entry was filled under.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Words {
    slot: u64,
    whole: u64,
}

/// What a write changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    /// The keys of a slot.
    Slot(u32),
    /// Any key.
    Whole,
}

struct Window {
    begin_ns: AtomicU64,
    end_ns: AtomicU64,
}

/// See the module's text.
pub(super) struct Epochs {
    pub(super) slots: Box<[AtomicU64]>,
    whole: AtomicU64,
    floor_ns: AtomicU64,
    /// The first window begins then.
    next_window_ns: AtomicU64,
    windows: [Window; WINDOWS],
}

impl Epochs {
    /// With 2^`bits` slots.
    pub(super) fn new(bits: u32) -> Self {
        Self {
            slots: (0..1u64 << bits).map(|_| AtomicU64::new(0)).collect(),
            whole: AtomicU64::new(0),
            floor_ns: AtomicU64::new(0),
            next_window_ns: AtomicU64::new(NEVER),
            windows: std::array::from_fn(|_| Window {
                begin_ns: AtomicU64::new(NEVER),
                end_ns: AtomicU64::new(0),
            }),
        }
    }

    /// The slot of a key with this hash.
    #[inline]
    pub(super) fn slot_of(&self, hash: u64) -> u32 {
        (hash >> 32) as u32 & (self.slots.len() - 1) as u32
    }

    fn word(&self, scope: Scope) -> &AtomicU64 {
        match scope {
            Scope::Slot(slot) => &self.slots[slot as usize],
            Scope::Whole => &self.whole,
        }
    }

    /// A write is about to be forwarded.
    pub(super) fn begin(&self, scope: Scope) {
        if !mutants::on("cache_write_unseen") {
            // EDGE EPOCHS (release half): a message that tells of the write comes after this.
            self.word(scope).fetch_add(EPOCH + 1, Ordering::AcqRel);
        }
    }

    /// The reply to a write has come, whatever it says, and is about to be released; or the server cannot do it any more.
    pub(super) fn end(&self, scope: Scope) {
        let step = if mutants::on("cache_write_unseen") { EPOCH } else { EPOCH - 1 };
        // EDGE EPOCHS (release half): what the server has answered, and the window of a flush, come before this.
        self.word(scope).fetch_add(step, Ordering::AcqRel);
    }

    /// Reads the words of these hashes, as a preparation. Returns nothing that matters.
    pub(super) fn touch(&self, hashes: &[u64]) -> u64 {
        let word = |hash: &u64| self.slots[self.slot_of(*hash) as usize].load(Ordering::Relaxed);
        hashes.iter().fold(0, |sum, hash| sum ^ word(hash))
    }

    /// What an entry of this slot is valid under at present; `None` while a write is pending.
    #[inline]
    pub(super) fn words(&self, slot: u32) -> Option<Words> {
        let words = self.load(slot);
        let pending = (words.slot | words.whole) & PENDING_MASK;
        (pending == 0 || mutants::on("cache_fill_while_pending")).then_some(words)
    }

    #[inline]
    fn load(&self, slot: u32) -> Words {
        // EDGE EPOCHS (acquire half)
        let whole = self.whole.load(Ordering::Acquire);
        Words { slot: self.slots[slot as usize].load(Ordering::Acquire), whole }
    }

    /// Whether an entry may be served whose question was forwarded at `asked_ns` under these words.
    #[inline]
    pub(super) fn is_valid(&self, slot: u32, words: &Words, asked_ns: u64) -> bool {
        // The floor rises before the flush ends, so a load after that of the word sees it.
        self.load(slot) == *words && asked_ns > self.floor_ns.load(Ordering::Acquire)
    }

    /// Entries whose question was forwarded up to this time are not served.
    pub(super) fn raise_floor(&self, to_ns: u64) {
        self.floor_ns.fetch_max(to_ns, Ordering::AcqRel);
    }

    /// At some time in here the server forgets all keys.
    pub(super) fn add_window(&self, now_ns: u64, begin_ns: u64, end_ns: u64) {
        if begin_ns <= now_ns {
            return self.raise_floor(end_ns);
        }
        for window in &self.windows {
            let free = window.begin_ns.compare_exchange(
                NEVER,
                NEVER - 1,
                Ordering::AcqRel,
                Ordering::Acquire,
            );
            if free.is_ok() {
                window.end_ns.store(end_ns, Ordering::Release);
                window.begin_ns.store(begin_ns, Ordering::Release);
                self.next_window_ns.fetch_min(begin_ns, Ordering::AcqRel);
                return;
            }
        }
        self.raise_floor(end_ns);
    }

    /// Opens the windows that have begun.
    #[inline]
    pub(super) fn open_windows(&self, now_ns: u64) {
        if now_ns >= self.next_window_ns.load(Ordering::Acquire) {
            self.open_begun(now_ns);
        }
    }

    #[cold]
    fn open_begun(&self, now_ns: u64) {
        let next_ns = self.next_window_ns.load(Ordering::Acquire);
        for window in &self.windows {
            let begin_ns = window.begin_ns.load(Ordering::Acquire);
            if begin_ns <= now_ns {
                self.raise_floor(window.end_ns.load(Ordering::Acquire));
                // Not the one that was added since.
                let _ = window.begin_ns.compare_exchange(
                    begin_ns,
                    NEVER,
                    Ordering::AcqRel,
                    Ordering::Acquire,
                );
            }
        }
        // Who does not look sees a time in the future, and so the floor. A window that is added meanwhile is found below, or lowers
        // the time after this.
        let _ = self.next_window_ns.compare_exchange(
            next_ns,
            NEVER,
            Ordering::AcqRel,
            Ordering::Acquire,
        );
        for window in &self.windows {
            let begin_ns = window.begin_ns.load(Ordering::Acquire);
            if begin_ns < NEVER - 1 {
                self.next_window_ns.fetch_min(begin_ns, Ordering::AcqRel);
            }
        }
    }
}
