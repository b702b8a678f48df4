//! A dictionary that functions of one owner share, on all workers, and that outlives them when they are replaced.
//!
//! Its memory is fixed when it is made: no entry allocates, and when it is full a new key is refused. It is divided into parts, each with a lock that is
//! held for one copy of a key and a value; two workers rarely want the same part. The places of keys follow from a
//! secret that each dictionary has: clients choose keys, and could choose those of one place. It is cleared when nothing uses it any more.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The longest key and the longest value.
pub const KEY_BYTES_MAX: usize = 64;
/// See [`KEY_BYTES_MAX`].
pub const VALUE_BYTES_MAX: usize = 192;
/// The smallest and the largest dictionary, in KiB.
pub const KIB_MIN: u32 = 16;
/// See [`KIB_MIN`].
pub const KIB_MAX: u32 = 64 << 10;
const PARTS: usize = 16;

/// A place for an entry.
#[derive(Clone, Copy)]
struct Entry {
    /// The length of the key and one more; 0: no entry.
    key_len: u8,
    value_len: u8,
    key: [u8; KEY_BYTES_MAX],
    value: [u8; VALUE_BYTES_MAX],
}

const FREE: Entry =
    Entry { key_len: 0, value_len: 0, key: [0; KEY_BYTES_MAX], value: [0; VALUE_BYTES_MAX] };

impl Entry {
    fn is_free(&self) -> bool {
        self.key_len == 0
    }

    fn key(&self) -> &[u8] {
        &self.key[..usize::from(self.key_len).saturating_sub(1)]
    }

    fn value(&self) -> &[u8] {
        &self.value[..usize::from(self.value_len)]
    }
}

/// A part: an open-addressed table with linear probing, at most seven eighths full.
struct Part {
    entries: Box<[Entry]>,
    used: usize,
}

/// Why a value is not stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// There is no room for another key.
    Full,
    /// The key is longer than [`KEY_BYTES_MAX`], or the value than [`VALUE_BYTES_MAX`].
    TooLong,
}

/// See the module's text.
pub struct Dictionary {
    parts: Box<[Mutex<Part>]>,
    secret: RandomState,
    kib: u32,
    refused: AtomicU64,
}

impl Dictionary {
    /// An empty one of this size, which is at least [`KIB_MIN`].
    pub fn new(kib: u32) -> Self {
        let bytes = (kib.clamp(KIB_MIN, KIB_MAX) as usize) << 10;
        let each = (bytes / size_of::<Entry>() / PARTS).max(2);
        let part = || Mutex::new(Part { entries: vec![FREE; each].into(), used: 0 });
        let parts = (0..PARTS).map(|_| part()).collect();
        Self { parts, secret: RandomState::new(), kib, refused: AtomicU64::new(0) }
    }

    /// Its size.
    pub fn kib(&self) -> u32 {
        self.kib
    }

    /// Entries, and bytes of their keys and values.
    pub fn used(&self) -> (u64, u64) {
        let (mut entries, mut bytes) = (0, 0);
        for part in &self.parts {
            let part = lock(part);
            entries += part.used as u64;
            let used = part.entries.iter().filter(|entry| !entry.is_free());
            bytes += used.map(|e| (e.key().len() + e.value().len()) as u64).sum::<u64>();
        }
        (entries, bytes)
    }

    /// How many values were refused.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Shows the value of a key.
    pub fn get<R>(&self, key: &[u8], show: impl FnOnce(&[u8]) -> R) -> Option<R> {
        let (part, hash) = self.part(key)?;
        let part = lock(part);
        let place = part.find(key, hash).ok()?;
        Some(show(part.entries[place].value()))
    }

    /// Stores a value.
    pub fn set(&self, key: &[u8], value: &[u8]) -> Result<(), Refusal> {
        let refuse = |refusal| {
            self.refused.fetch_add(1, Ordering::Relaxed);
            Err(refusal)
        };
        let Some((part, hash)) = self.part(key) else { return refuse(Refusal::TooLong) };
        if value.len() > VALUE_BYTES_MAX {
            return refuse(Refusal::TooLong);
        }
        let mut part = lock(part);
        let place = match part.find(key, hash) {
            Ok(place) => place,
            Err(Some(place)) if part.used < part.entries.len() / 8 * 7 + 1 => {
                part.used += 1;
                place
            }
            Err(_) => return refuse(Refusal::Full),
        };
        let entry = &mut part.entries[place];
        *entry = FREE;
        (entry.key_len, entry.value_len) = (key.len() as u8 + 1, value.len() as u8);
        entry.key[..key.len()].copy_from_slice(key);
        entry.value[..value.len()].copy_from_slice(value);
        Ok(())
    }

    /// Removes a key; whether it was there. Its bytes are cleared.
    pub fn delete(&self, key: &[u8]) -> bool {
        let Some((part, hash)) = self.part(key) else { return false };
        let mut part = lock(part);
        let Ok(place) = part.find(key, hash) else { return false };
        part.remove(place, |key| self.hash(key).1);
        true
    }

    fn part(&self, key: &[u8]) -> Option<(&Mutex<Part>, u64)> {
        (key.len() <= KEY_BYTES_MAX).then(|| {
            let (part, hash) = self.hash(key);
            (&self.parts[part], hash)
        })
    }

    /// The part of a key, and its hash within that part.
    fn hash(&self, key: &[u8]) -> (usize, u64) {
        let hash = self.secret.hash_one(key);
        (hash as usize % PARTS, hash / PARTS as u64)
    }
}

impl Drop for Dictionary {
    fn drop(&mut self) {
        for part in &mut self.parts {
            let part = part.get_mut().unwrap_or_else(PoisonError::into_inner);
            part.entries.fill(FREE);
            // So that clearing is not left out as without effect.
            std::hint::black_box(&mut part.entries);
        }
    }
}

fn lock(part: &Mutex<Part>) -> MutexGuard<'_, Part> {
    part.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Part {
    /// The place of a key, or the one where it would be; `None`: there is no place.
    fn find(&self, key: &[u8], hash: u64) -> Result<usize, Option<usize>> {
        let count = self.entries.len();
        let first = (hash % count as u64) as usize;
        for place in (first..count).chain(0..first) {
            let entry = &self.entries[place];
            if entry.is_free() {
                return Err(Some(place));
            }
            if entry.key() == key {
                return Ok(place);
            }
        }
        Err(None)
    }

    /// Frees a place, and moves those behind it that were only there because it was taken.
    fn remove(&mut self, mut free: usize, hash: impl Fn(&[u8]) -> u64) {
        let count = self.entries.len();
        let mut at = free;
        loop {
            at = (at + 1) % count;
            if at == free || self.entries[at].is_free() {
                break;
            }
            let home = (hash(self.entries[at].key()) % count as u64) as usize;
            // How far it is from where it should be, and how far the free place is before it.
            if (at + count - home) % count >= (at + count - free) % count {
                self.entries[free] = self.entries[at];
                free = at;
            }
        }
        self.entries[free] = FREE;
        self.used -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn key_of(number: u8) -> Vec<u8> {
        vec![number; usize::from(number % 66)]
    }

    proptest! {
        #[test]
        fn it_is_a_map_with_a_limit(
            steps in prop::collection::vec((0..3_u8, any::<u8>(), 0..200_usize), 0..2000),
        ) {
            let dictionary = Dictionary::new(KIB_MIN);
            let mut model: HashMap<Vec<u8>, Vec<u8>> = HashMap::new();
            let mut refused = 0;
            for (step, number, len) in steps {
                let key = key_of(number);
                match step {
                    0 => {
                        let value = vec![number ^ len as u8; len];
                        match dictionary.set(&key, &value) {
                            Ok(()) => _ = model.insert(key, value),
                            Err(Refusal::TooLong) => {
                                prop_assert!(key.len() > KEY_BYTES_MAX || len > VALUE_BYTES_MAX);
                                refused += 1;
                            }
                            Err(Refusal::Full) => {
                                prop_assert!(!model.contains_key(&key), "a value can be replaced");
                                refused += 1;
                            }
                        }
                    }
                    1 => prop_assert_eq!(dictionary.delete(&key), model.remove(&key).is_some()),
                    _ => {
                        let found = dictionary.get(&key, <[u8]>::to_vec);
                        prop_assert_eq!(found.as_ref(), model.get(&key));
                    }
                }
            }
            let bytes: usize = model.iter().map(|(key, value)| key.len() + value.len()).sum();
            prop_assert_eq!(dictionary.used(), (model.len() as u64, bytes as u64));
            prop_assert_eq!(dictionary.refused(), refused);
            for (key, value) in &model {
                prop_assert_eq!(dictionary.get(key, |found| found == value), Some(true));
            }
        }
    }

    #[test]
    fn it_is_full_at_its_size_and_has_room_again() {
        let dictionary = Dictionary::new(64);
        let stored = (0..4096_u32).filter(|key| dictionary.set(&key.to_le_bytes(), b"v").is_ok());
        let stored: Vec<u32> = stored.collect();
        let places = (64 << 10) / size_of::<Entry>();
        assert!((places / 2..=places).contains(&stored.len()), "{} of {places}", stored.len());
        assert!(dictionary.refused() > 0);
        assert!(stored.iter().all(|key| dictionary.delete(&key.to_le_bytes())));
        assert_eq!(dictionary.used(), (0, 0));
        assert_eq!(dictionary.set(b"again", b""), Ok(()));
        assert_eq!(dictionary.get(b"again", |value| value.len()), Some(0));
    }

    #[test]
    fn each_has_places_of_its_own_for_the_same_keys() {
        let [one, other] = [(); 2].map(|()| Dictionary::new(KIB_MAX));
        let differs = |key: u32| one.hash(&key.to_le_bytes()) != other.hash(&key.to_le_bytes());
        assert!((0..64).all(differs));
    }

    #[test]
    fn workers_share_it() {
        let dictionary = Dictionary::new(KIB_MAX);
        std::thread::scope(|scope| {
            for worker in 0..4_u32 {
                let dictionary = &dictionary;
                scope.spawn(move || {
                    for round in 0..2000_u32 {
                        let key = (worker * 10_000 + round % 500).to_le_bytes();
                        dictionary.set(&key, &round.to_le_bytes()).unwrap();
                        let right = dictionary.get(&key, |value| value == round.to_le_bytes());
                        assert_eq!(right, Some(true));
                        // Of all: whole or absent.
                        dictionary
                            .get(b"all", |value| assert!(value.iter().all(|b| *b == value[0])));
                        dictionary.set(b"all", &[worker as u8; 100]).unwrap();
                    }
                });
            }
        });
        assert_eq!(dictionary.used().0, 4 * 500 + 1);
    }
}
