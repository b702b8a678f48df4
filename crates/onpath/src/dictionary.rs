//! A dictionary that functions of one owner share, on all workers, and that outlives them when they are replaced.
//!
//! Its memory is fixed when it is made: no entry allocates, and when it is full a new key is refused. Readers take no lock, and a metrics page
//! reads two counters (`dictionary/table.rs`). The places of keys follow from a secret that each dictionary has: clients choose keys, and could choose
//! those of one place. It is cleared when nothing uses it any more.

mod table;

use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

use self::table::{Bytes, Table, Unstored};

/// What `table` uses.
mod atomic {
    pub(super) use std::hint::spin_loop;
    pub(super) use std::sync::atomic::{AtomicU64, Ordering};
}

/// The longest key and the longest value.
pub const KEY_BYTES_MAX: usize = 64;
/// See [`KEY_BYTES_MAX`].
pub const VALUE_BYTES_MAX: usize = 192;
/// The smallest and the largest dictionary, in KiB.
pub const KIB_MIN: u32 = 16;
/// See [`KIB_MIN`].
pub const KIB_MAX: u32 = 64 << 10;

const WORD_BYTES: usize = 8;
const KEY_WORDS: usize = KEY_BYTES_MAX / WORD_BYTES;
const VALUE_WORDS: usize = VALUE_BYTES_MAX / WORD_BYTES;
type Entries = Table<{ 1 + KEY_WORDS + VALUE_WORDS }>;
/// Workers that may write to a full dictionary at the same moment without waiting for each other.
const SPARE: usize = 16;
/// How often a writer looks whether another one is done: some 0.1 ms.
const PATIENCE: u32 = 4096;

/// Why a value is not stored, or a key not removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// There is no room for another key.
    Full,
    /// The key is longer than [`KEY_BYTES_MAX`], or the value than [`VALUE_BYTES_MAX`].
    TooLong,
    /// A writer of another worker was interrupted between two steps, at the same place.
    Busy,
}

impl From<Unstored> for Refusal {
    fn from(why: Unstored) -> Self {
        match why {
            Unstored::Full => Self::Full,
            Unstored::Busy => Self::Busy,
        }
    }
}

/// Bytes as words.
struct Words<const COUNT: usize> {
    words: [u64; COUNT],
    len: u8,
}

impl<const COUNT: usize> Words<COUNT> {
    /// `None`: they are too long.
    fn of(bytes: &[u8]) -> Option<Self> {
        if bytes.len() > COUNT * WORD_BYTES {
            return None;
        }
        let mut words = [0; COUNT];
        for (word, part) in words.iter_mut().zip(bytes.chunks(WORD_BYTES)) {
            let mut whole = [0; WORD_BYTES];
            whole[..part.len()].copy_from_slice(part);
            *word = u64::from_le_bytes(whole);
        }
        Some(Self { words, len: u8::try_from(bytes.len()).ok()? })
    }

    fn bytes(&self) -> Bytes<'_> {
        let count = usize::from(self.len).div_ceil(WORD_BYTES);
        Bytes { words: &self.words[..count], len: self.len }
    }
}

/// See the module's text.
pub struct Dictionary {
    entries: Entries,
    secret: RandomState,
    kib: u32,
    refused: AtomicU64,
}

impl Dictionary {
    /// An empty one of this size, which is at least [`KIB_MIN`].
    pub fn new(kib: u32) -> Self {
        let bytes = (kib.clamp(KIB_MIN, KIB_MAX) as usize) << 10;
        let keys = (bytes / Entries::ENTRY_BYTES).saturating_sub(SPARE).max(1);
        let entries = Table::new(keys, SPARE, PATIENCE);
        Self { entries, secret: RandomState::new(), kib, refused: AtomicU64::new(0) }
    }

    /// Its size.
    pub fn kib(&self) -> u32 {
        self.kib
    }

    /// Entries, and bytes of their keys and values.
    pub fn used(&self) -> (u64, u64) {
        self.entries.used()
    }

    /// How many calls were refused.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Shows the value of a key.
    pub fn get<R>(&self, key: &[u8], show: impl FnOnce(&[u8]) -> R) -> Option<R> {
        let words = Words::<KEY_WORDS>::of(key)?;
        let mut value = [0; VALUE_WORDS];
        let len = self.entries.get(self.hash(key), &words.bytes(), &mut value)?;
        let mut bytes = [0; VALUE_BYTES_MAX];
        for (into, word) in bytes.chunks_exact_mut(WORD_BYTES).zip(value) {
            into.copy_from_slice(&word.to_le_bytes());
        }
        Some(show(&bytes[..len.min(VALUE_BYTES_MAX)]))
    }

    /// Stores a value.
    pub fn set(&self, key: &[u8], value: &[u8]) -> Result<(), Refusal> {
        let words = (Words::<KEY_WORDS>::of(key), Words::<VALUE_WORDS>::of(value));
        let (Some(of_key), Some(of_value)) = words else { return self.refuse(Refusal::TooLong) };
        let set = self.entries.set(self.hash(key), &of_key.bytes(), &of_value.bytes());
        set.or_else(|why| self.refuse(why.into()))
    }

    /// Removes a key; whether it was there. Its bytes are cleared.
    pub fn delete(&self, key: &[u8]) -> Result<bool, Refusal> {
        let Some(words) = Words::<KEY_WORDS>::of(key) else { return Ok(false) };
        let deleted = self.entries.delete(self.hash(key), &words.bytes());
        deleted.or_else(|why| self.refuse(why.into()))
    }

    fn refuse<T>(&self, why: Refusal) -> Result<T, Refusal> {
        self.refused.fetch_add(1, Ordering::Relaxed);
        Err(why)
    }

    fn hash(&self, key: &[u8]) -> u64 {
        self.secret.hash_one(key)
    }
}

impl Drop for Dictionary {
    fn drop(&mut self) {
        self.entries.clear();
        // So that clearing is not left out as without effect.
        std::hint::black_box(&mut self.entries);
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
                            Err(Refusal::Busy) => prop_assert!(false, "nothing else writes"),
                            Err(Refusal::Full) => {
                                prop_assert!(!model.contains_key(&key), "a value can be replaced");
                                refused += 1;
                            }
                        }
                    }
                    1 => prop_assert_eq!(dictionary.delete(&key), Ok(model.remove(&key).is_some())),
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
        let places = (64 << 10) / Entries::ENTRY_BYTES;
        assert!((places / 2..=places).contains(&stored.len()), "{} of {places}", stored.len());
        assert!(dictionary.refused() > 0);
        assert!(stored.iter().all(|key| dictionary.delete(&key.to_le_bytes()) == Ok(true)));
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
        let write = |key: &[u8], value: &[u8]| {
            // Another worker may be interrupted in the middle.
            while dictionary.set(key, value) == Err(Refusal::Busy) {
                std::thread::yield_now();
            }
        };
        std::thread::scope(|scope| {
            for worker in 0..4_u32 {
                let (dictionary, write) = (&dictionary, &write);
                scope.spawn(move || {
                    for round in 0..2000_u32 {
                        let key = (worker * 10_000 + round % 500).to_le_bytes();
                        write(&key, &round.to_le_bytes());
                        let right = dictionary.get(&key, |value| value == round.to_le_bytes());
                        assert_eq!(right, Some(true));
                        // Of all: whole or absent.
                        dictionary
                            .get(b"all", |value| assert!(value.iter().all(|b| *b == value[0])));
                        if round % 16 == 15 {
                            let deleted = dictionary.delete(b"all");
                            assert!(matches!(deleted, Ok(_) | Err(Refusal::Busy)));
                        }
                        write(b"all", &[worker as u8; 100]);
                    }
                });
            }
        });
        assert_eq!(dictionary.used(), (4 * 500 + 1, 4 * 500 * 8 + 103));
    }

    #[test]
    fn a_writer_waits_for_a_free_entry() {
        let words = |bytes: &[u8]| Words::<KEY_WORDS>::of(bytes).unwrap();
        let (key, value) = (words(b"key"), words(b"value"));
        let set = |entries: &Entries| entries.set(1, &key.bytes(), &value.bytes());
        let impatient = Entries::new(1, 1, 3);
        (0..2).for_each(|_| assert!(impatient.take_free().is_some()));
        assert_eq!(set(&impatient), Err(Unstored::Busy));
        let entries = Entries::new(1, 1, u32::MAX);
        let (one, _other) = (entries.take_free().unwrap(), entries.take_free().unwrap());
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| set(&entries));
            std::thread::yield_now();
            entries.give_free(one);
            assert_eq!(writer.join().unwrap(), Ok(()));
        });
    }

    #[test]
    fn a_small_one_with_many_writers_loses_no_entry() {
        const WRITERS: u32 = 4;
        let dictionary = Dictionary::new(KIB_MIN);
        let places = |dictionary: &Dictionary| {
            let stored =
                (0..4096_u32).filter(|key| dictionary.set(&key.to_le_bytes(), b"v").is_ok());
            let stored: Vec<u32> = stored.collect();
            assert!(stored.iter().all(|key| dictionary.delete(&key.to_le_bytes()) == Ok(true)));
            stored.len()
        };
        let before = places(&dictionary);
        std::thread::scope(|scope| {
            for worker in 0..WRITERS {
                let dictionary = &dictionary;
                scope.spawn(move || {
                    for round in 0..20_000_u32 {
                        // The same keys from all of them, more than there is room for.
                        let key = (round.wrapping_mul(2_654_435_761) >> 24).to_le_bytes();
                        let _ = match round % 3 {
                            0 => dictionary.delete(&key).map(drop),
                            _ => dictionary.set(&key, &[worker as u8; 40]),
                        };
                        dictionary.get(&key, |value| {
                            assert!(value.len() == 40 && value.iter().all(|b| *b == value[0]));
                        });
                    }
                });
            }
        });
        for key in 0..256_u32 {
            dictionary.delete(&key.to_le_bytes()).unwrap();
        }
        assert_eq!(dictionary.used(), (0, 0));
        assert_eq!(places(&dictionary), before);
    }
}
