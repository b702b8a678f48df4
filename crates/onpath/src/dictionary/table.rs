//! The entries of a dictionary, in memory that all workers share: readers take no lock, and a writer that is interrupted delays no reader.
//!
//! Entries with the same hash are a *chain*. Its *head* is a word with the number of the first entry, a *version*, and a bit that one writer
//! holds at a time. A writer takes a free entry, fills it, puts it into the chain in one step, and takes the former entry of the key out in the same
//! step. Then it stores the head with the next version, and only after that it clears the former entry and frees it.
//!
//! *Readers* load the head, walk the chain, copy what they find, and load the head again. With the same version nothing that was in the chain has
//! been cleared or used again meanwhile: what was copied is one value that the key had. Otherwise they begin again. While a writer
//! holds the bit the chain is whole at each moment, so readers need not wait for it. A reader begins again only after a write of its chain has
//! ended meanwhile: there is no bound but the pace of the writers, each of which takes longer than a look at the chain.
//!
//! *Writers* of one chain wait for each other, for as long as copies of two entries take, and so do those that find no free entry. One that has
//! tried [`Table::patience`] times gives up: the other one was interrupted.
//!
//! *Why a reader that sees a changed entry sees another version.* All words are stored with release order and loaded with acquire order. An entry
//! changes after it was freed, and it is freed after the new version was stored, by the same thread or by one whose free entry it took
//! (the list of free entries is changed by read-modify-writes with both orders). So the reader's second load of the head comes after the
//! store of the version. A version repeats after 2^32 writes of one chain.

// Of the standard library, or loom's where crates/mqueue-loom includes this file.
use super::atomic::{AtomicU64, Ordering, spin_loop};

/// Entries of a chain, so that no call looks at more.
const CHAIN_MAX: usize = 16;
const LOCKED: u64 = 1 << 31;
const INDEX_MASK: u64 = LOCKED - 1;
/// The number of no entry.
const NIL: u64 = INDEX_MASK;
const VERSION: u64 = 1 << 32;
const WORD_BYTES: usize = 8;

/// Why something is not stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unstored {
    /// There is no room for another key.
    Full,
    /// Another writer was interrupted.
    Busy,
}

/// Bytes as words, and how many bytes they are.
#[derive(Clone, Copy)]
pub(super) struct Bytes<'a> {
    pub(super) words: &'a [u64],
    pub(super) len: u8,
}

/// The lengths, the words of the key, the words of the value, and no others: a free entry is all zero.
struct Entry<const WORDS: usize> {
    next: AtomicU64,
    words: [AtomicU64; WORDS],
}

/// Lengths of a key and a value as a word, which is not 0.
fn lengths(key: u8, value: u8) -> u64 {
    (u64::from(key) + 1) | u64::from(value) << 16
}

fn key_len(lengths: u64) -> usize {
    ((lengths & 0xffff) as usize).saturating_sub(1)
}

fn value_len(lengths: u64) -> usize {
    (lengths >> 16 & 0xff) as usize
}

impl<const WORDS: usize> Entry<WORDS> {
    /// The lengths, if it is of this key.
    fn of(&self, key: &Bytes) -> Option<u64> {
        let lengths = self.words[0].load(Ordering::Acquire);
        let has = key_len(lengths) == usize::from(key.len) && lengths != 0;
        let mut words = self.words[1..].iter().zip(key.words);
        let same = has && words.all(|(word, of)| word.load(Ordering::Acquire) == *of);
        same.then_some(lengths)
    }

    fn fill(&self, key: &Bytes, value: &Bytes) {
        let words = self.words[1..].iter().zip(key.words.iter().chain(value.words));
        words.for_each(|(word, of)| word.store(*of, Ordering::Release));
        self.words[0].store(lengths(key.len, value.len), Ordering::Release);
    }

    /// Bytes of the key and the value.
    fn clear(&self) -> usize {
        let lengths = self.words[0].load(Ordering::Acquire);
        let (key, value) = (key_len(lengths), value_len(lengths));
        let used = 1 + key.div_ceil(WORD_BYTES) + value.div_ceil(WORD_BYTES);
        // EDGE DICTIONARY (release half): the version was stored before.
        self.words.iter().take(used).for_each(|word| word.store(0, Ordering::Release));
        key + value
    }
}

/// Where a key is in its chain.
struct Found {
    /// The entry before it, if there is one.
    before: u64,
    /// The entry; none if the key is not there.
    at: u64,
    /// Entries that were looked at.
    count: usize,
}

/// See the module's text.
pub(super) struct Table<const WORDS: usize> {
    heads: Box<[AtomicU64]>,
    entries: Box<[Entry<WORDS>]>,
    free: AtomicU64,
    /// Keys that it may have: the other entries are for writers between two steps.
    keys_max: u64,
    keys: AtomicU64,
    bytes: AtomicU64,
    /// How often a writer looks whether another one is done.
    patience: u32,
}

impl<const WORDS: usize> Table<WORDS> {
    /// Bytes that an entry needs, with all that belongs to it.
    pub(super) const ENTRY_BYTES: usize = size_of::<Entry<WORDS>>() + 2 * size_of::<AtomicU64>();

    /// For `keys` keys, with `spare` entries for as many writers at the same time.
    pub(super) fn new(keys: usize, spare: usize, patience: u32) -> Self {
        let count = keys + spare;
        let entry = |at: usize| Entry {
            next: AtomicU64::new(if at + 1 < count { at as u64 + 1 } else { NIL }),
            words: std::array::from_fn(|_| AtomicU64::new(0)),
        };
        // Fewer than twice as many as entries.
        let heads = count.next_power_of_two();
        Self {
            heads: (0..heads).map(|_| AtomicU64::new(NIL)).collect(),
            entries: (0..count).map(entry).collect(),
            free: AtomicU64::new(0),
            keys_max: keys as u64,
            keys: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            patience,
        }
    }

    /// Keys, and bytes of keys and values.
    pub(super) fn used(&self) -> (u64, u64) {
        (self.keys.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }

    fn head(&self, hash: u64) -> &AtomicU64 {
        &self.heads[hash as usize & (self.heads.len() - 1)]
    }

    /// Copies the value of a key; its length.
    pub(super) fn get(&self, hash: u64, key: &Bytes, value: &mut [u64]) -> Option<usize> {
        let head = self.head(hash);
        loop {
            // EDGE DICTIONARY (acquire half)
            let before = head.load(Ordering::Acquire);
            let found = self.read(before, key, value);
            if head.load(Ordering::Acquire) & !LOCKED == before & !LOCKED {
                return found;
            }
            spin_loop();
        }
    }

    /// What is read means something only if the head has not changed.
    fn read(&self, head: u64, key: &Bytes, value: &mut [u64]) -> Option<usize> {
        let mut at = head & INDEX_MASK;
        for _ in 0..CHAIN_MAX {
            let entry = self.entries.get(at as usize)?;
            if let Some(lengths) = entry.of(key) {
                let len = value_len(lengths);
                let words = entry.words.get(1 + key.words.len()..).unwrap_or_default();
                for (into, word) in value.iter_mut().zip(words).take(len.div_ceil(WORD_BYTES)) {
                    *into = word.load(Ordering::Acquire);
                }
                return Some(len);
            }
            at = entry.next.load(Ordering::Acquire);
        }
        None
    }

    /// Stores a value.
    pub(super) fn set(&self, hash: u64, key: &Bytes, value: &Bytes) -> Result<(), Unstored> {
        let Some(new) = self.take_free() else { return Err(Unstored::Busy) };
        self.entries[new as usize].fill(key, value);
        let head = self.head(hash);
        let Some(locked) = self.lock(head) else {
            self.give_free(new);
            return Err(Unstored::Busy);
        };
        let Found { before, at, count } = self.find(locked, key);
        let is_new = at == NIL;
        if is_new && (count >= CHAIN_MAX || !self.take_key()) {
            head.store(locked & !LOCKED, Ordering::Release);
            self.give_free(new);
            return Err(Unstored::Full);
        }
        let added = u64::from(key.len) + u64::from(value.len);
        self.bytes.fetch_add(added, Ordering::Relaxed);
        let next = if is_new { locked & INDEX_MASK } else { self.next_of(at) };
        self.entries[new as usize].next.store(next, Ordering::Release);
        self.link(head, locked, if is_new { NIL } else { before }, new);
        if !is_new {
            self.forget(at);
        }
        Ok(())
    }

    /// Removes a key, and clears its bytes; whether it was there.
    pub(super) fn delete(&self, hash: u64, key: &Bytes) -> Result<bool, Unstored> {
        let head = self.head(hash);
        let Some(locked) = self.lock(head) else { return Err(Unstored::Busy) };
        let Found { before, at, .. } = self.find(locked, key);
        if at == NIL {
            head.store(locked & !LOCKED, Ordering::Release);
            return Ok(false);
        }
        self.link(head, locked, before, self.next_of(at));
        self.forget(at);
        self.keys.fetch_sub(1, Ordering::Relaxed);
        Ok(true)
    }

    /// The head, of which this thread has the bit then.
    fn lock(&self, head: &AtomicU64) -> Option<u64> {
        for _ in 0..self.patience {
            let word = head.load(Ordering::Relaxed);
            let locked = word | LOCKED;
            if word & LOCKED == 0
                && head.compare_exchange(word, locked, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                return Some(locked);
            }
            spin_loop();
        }
        None
    }

    fn next_of(&self, at: u64) -> u64 {
        self.entries[at as usize].next.load(Ordering::Acquire)
    }

    /// By the writer that holds the bit.
    fn find(&self, head: u64, key: &Bytes) -> Found {
        let mut found = Found { before: NIL, at: head & INDEX_MASK, count: 0 };
        while let Some(entry) = self.entries.get(found.at as usize)
            && entry.of(key).is_none()
        {
            (found.before, found.at) = (found.at, entry.next.load(Ordering::Acquire));
            found.count += 1;
        }
        found
    }

    /// Puts an entry behind `before`, or in front, ends the version and gives the bit back.
    fn link(&self, head: &AtomicU64, locked: u64, before: u64, entry: u64) {
        let mut first = locked & INDEX_MASK;
        match before {
            NIL => first = entry,
            before => self.entries[before as usize].next.store(entry, Ordering::Release),
        }
        let version = locked & !(LOCKED | INDEX_MASK);
        head.store(version.wrapping_add(VERSION) | first, Ordering::Release);
    }

    fn take_key(&self) -> bool {
        let has_room = self.keys.fetch_add(1, Ordering::Relaxed) < self.keys_max;
        if !has_room {
            self.keys.fetch_sub(1, Ordering::Relaxed);
        }
        has_room
    }

    /// An entry that was in a chain.
    fn forget(&self, at: u64) {
        let removed = self.give_free(at);
        self.bytes.fetch_sub(removed as u64, Ordering::Relaxed);
    }

    /// A free entry. If there is none, more writers than there are spare entries are between two steps: one of them gives its entry back.
    pub(super) fn take_free(&self) -> Option<u64> {
        let mut patience = self.patience;
        loop {
            let free = self.free.load(Ordering::Acquire);
            let at = free & INDEX_MASK;
            let Some(entry) = self.entries.get(at as usize) else {
                patience = patience.checked_sub(1)?;
                spin_loop();
                continue;
            };
            if self.change_free(free, entry.next.load(Ordering::Acquire)) {
                return Some(at);
            }
        }
    }

    /// Clears an entry and puts it into the list. Returns the bytes of its key and value.
    pub(super) fn give_free(&self, at: u64) -> usize {
        let entry = &self.entries[at as usize];
        let removed = entry.clear();
        loop {
            let free = self.free.load(Ordering::Acquire);
            entry.next.store(free & INDEX_MASK, Ordering::Release);
            if self.change_free(free, at) {
                return removed;
            }
        }
    }

    fn change_free(&self, free: u64, first: u64) -> bool {
        let next = (free & !INDEX_MASK & !LOCKED).wrapping_add(VERSION) | first & INDEX_MASK;
        let changed =
            self.free.compare_exchange(free, next, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if !changed {
            spin_loop();
        }
        changed
    }

    /// Clears everything; nothing uses it any more.
    pub(super) fn clear(&mut self) {
        self.entries.iter().for_each(|entry| {
            entry.words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        });
    }
}
