//! What one instance keeps, in memory that is reserved once: values, and in a part of the memory keys that the server does not have.
//!
//! Keys and values lie in blocks of [`BLOCK_BYTES`], chained for longer ones. An entry is found by the hash of its key. When there is no
//! room, entries are evicted in the order of SIEVE (Zhang et al., NSDI 2024): a hand goes over the entries from the oldest to the newest,
//! skips those that were served since it last came by, and evicts the first other one. Clients can ask without end for keys that are not there: these
//! make room for each other, and never take that of a value.

use std::collections::TryReserveError;

use super::epochs::Words;

/// Bytes of a block.
const BLOCK_BYTES: usize = 64;
/// An entry for so many blocks.
const BLOCKS_PER_ENTRY: usize = 2;
/// … of keys without a value.
const BLOCKS_PER_ABSENT: usize = 1;
/// The part of the memory for keys without a value.
const ABSENT_PART: usize = 16;
/// The part of the memory that one value may take.
const VALUE_PART: usize = 8;
const NIL: u32 = u32::MAX;

/// What is known of a value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct About {
    /// What it was filled under.
    pub(super) words: Words,
    /// When its question was forwarded.
    pub(super) asked_ns: u64,
    /// It is not served from then on.
    pub(super) until_ns: u64,
    pub(super) cas: u64,
    pub(super) flags: u32,
    /// The server keeps its key as it is, not in base64.
    pub(super) plain: bool,
    /// The server does not have the key.
    pub(super) absent: bool,
}

/// What a hit reads: a line of the processor's cache.
#[derive(Clone, Copy, Default)]
#[repr(align(64))]
struct Entry {
    words: Words,
    asked_ns: u64,
    until_ns: u64,
    cas: u64,
    flags: u32,
    /// The lower half of the hash: the bucket is chosen by it.
    hash: u32,
    value_len: u32,
    first: u32,
    /// In its bucket, or the next free one.
    next: u32,
    key_len: u8,
    plain: bool,
    absent: bool,
    served: bool,
}

const _: () = assert!(size_of::<Entry>() == 64);

/// The entries that arrived before and after one.
#[derive(Clone, Copy, Default)]
struct Neighbours {
    older: u32,
    newer: u32,
}

/// Where something is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    at: u32,
    absent: bool,
}

/// See the module's text.
pub(super) struct Store {
    values: Table,
    absent: Table,
}

impl Store {
    /// With at most this much memory, with all that it needs.
    pub(super) fn new(memory_bytes: usize) -> Result<Self, TryReserveError> {
        let of_absent = memory_bytes / ABSENT_PART;
        Ok(Self {
            values: Table::new(memory_bytes - of_absent, BLOCKS_PER_ENTRY)?,
            absent: Table::new(of_absent, BLOCKS_PER_ABSENT)?,
        })
    }

    /// Entries, and bytes of their keys and values.
    pub(super) fn used(&self) -> (usize, usize) {
        let Self { values, absent } = self;
        (values.len + absent.len, values.bytes + absent.bytes)
    }

    /// Where a key is.
    #[inline]
    pub(super) fn find(&self, hash: u64, key: &[u8]) -> Option<Place> {
        if let Some(at) = self.values.find(hash, key) {
            return Some(Place { at, absent: false });
        }
        if self.absent.len == 0 {
            return None;
        }
        self.absent.find(hash, key).map(|at| Place { at, absent: true })
    }

    /// Reads what [`Self::find`] will read for each of these hashes, as a preparation. Returns nothing that matters.
    pub(super) fn touch(&self, hashes: &[u64], places: &mut Vec<u32>) -> u8 {
        self.values.touch(hashes, places)
    }

    fn table(&self, place: Place) -> &Table {
        if place.absent { &self.absent } else { &self.values }
    }

    fn table_mut(&mut self, place: Place) -> &mut Table {
        if place.absent { &mut self.absent } else { &mut self.values }
    }

    /// What is known of a value, and its length.
    #[inline]
    pub(super) fn about(&self, place: Place) -> (About, usize) {
        self.table(place).about(place.at)
    }

    /// The value is served.
    #[inline]
    pub(super) fn copy_value(&mut self, place: Place, into: &mut [u8]) {
        self.table_mut(place).copy_value(place.at, into);
    }

    /// Keeps a value, or that there is none, in the place of what was kept of its key. Returns how many others were evicted; `None`: it is too
    /// long.
    pub(super) fn insert(
        &mut self,
        hash: u64,
        key: &[u8],
        value: &[u8],
        about: &About,
    ) -> Option<u64> {
        if let Some(former) = self.find(hash, key) {
            self.remove(former);
        }
        let table = if about.absent { &mut self.absent } else { &mut self.values };
        table.insert(hash, key, value, about)
    }

    /// Forgets a key.
    pub(super) fn remove(&mut self, place: Place) {
        self.table_mut(place).remove(place.at);
    }
}

/// Entries of one kind.
struct Table {
    buckets: Vec<u32>,
    entries: Vec<Entry>,
    /// Of each entry.
    order: Vec<Neighbours>,
    free_entry: u32,
    blocks: Vec<u8>,
    /// Behind each block: the next one of its chain, or the next free one.
    chain: Vec<u32>,
    free_block: u32,
    free_blocks: usize,
    oldest: u32,
    newest: u32,
    hand: u32,
    len: usize,
    bytes: usize,
}

/// A list of these, or an error where `collect` would end the process.
fn filled<T>(values: impl ExactSizeIterator<Item = T>) -> Result<Vec<T>, TryReserveError> {
    let mut list = Vec::new();
    list.try_reserve_exact(values.len())?;
    list.extend(values);
    Ok(list)
}

impl Table {
    /// With at most this much memory, with all that it needs. It is written once here, so that no page is missing later.
    fn new(memory_bytes: usize, blocks_per_entry: usize) -> Result<Self, TryReserveError> {
        let cost = blocks_per_entry * (BLOCK_BYTES + size_of::<u32>())
            + size_of::<Entry>()
            + size_of::<Neighbours>()
            + 2 * size_of::<u32>();
        let entries = (memory_bytes / cost).max(VALUE_PART);
        let blocks = blocks_per_entry * entries;
        // At most as many buckets as fit.
        let buckets = (entries + entries / 2).next_power_of_two();
        let buckets = if buckets > 2 * entries { buckets / 2 } else { buckets };
        // Half a hash chooses one.
        let buckets = buckets.min(1 << 31);
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(blocks * BLOCK_BYTES)?;
        bytes.resize(blocks * BLOCK_BYTES, 0);
        let after = |at: usize, count: usize| if at + 1 < count { at as u32 + 1 } else { NIL };
        let entry = |at| Entry { next: after(at, entries), ..Entry::default() };
        Ok(Self {
            buckets: filled((0..buckets).map(|_| NIL))?,
            entries: filled((0..entries).map(entry))?,
            order: filled((0..entries).map(|_| Neighbours::default()))?,
            free_entry: 0,
            blocks: bytes,
            chain: filled((0..blocks).map(|at| after(at, blocks)))?,
            free_block: 0,
            free_blocks: blocks,
            oldest: NIL,
            newest: NIL,
            hand: NIL,
            len: 0,
            bytes: 0,
        })
    }

    #[inline]
    fn bucket(&self, hash: u64) -> usize {
        hash as usize & (self.buckets.len() - 1)
    }

    /// The entry of a key.
    #[inline]
    fn find(&self, hash: u64, key: &[u8]) -> Option<u32> {
        let mut at = self.buckets[self.bucket(hash)];
        while at != NIL {
            let entry = &self.entries[at as usize];
            if entry.hash == hash as u32 && self.has_key(entry, key) {
                return Some(at);
            }
            at = entry.next;
        }
        None
    }

    /// Reads what [`Self::find`] will read for each of these hashes, step by step for all of them: the processor then waits for the memory of many
    /// at once. `places` is memory for that. Returns nothing that matters.
    fn touch(&self, hashes: &[u64], places: &mut Vec<u32>) -> u8 {
        places.clear();
        places.extend(hashes.iter().map(|hash| self.buckets[self.bucket(*hash)]));
        for place in places.iter_mut() {
            *place = self.entries.get(*place as usize).map_or(NIL, |entry| entry.first);
        }
        places.iter().fold(0, |sum, block| {
            sum ^ self.blocks.get((*block as usize).wrapping_mul(BLOCK_BYTES)).unwrap_or(&0)
        })
    }

    fn has_key(&self, entry: &Entry, key: &[u8]) -> bool {
        if usize::from(entry.key_len) != key.len() {
            return false;
        }
        let mut block = entry.first;
        key.chunks(BLOCK_BYTES).all(|part| {
            let begin = block as usize * BLOCK_BYTES;
            block = self.chain[block as usize];
            self.blocks[begin..][..part.len()] == *part
        })
    }

    #[inline]
    fn about(&self, entry: u32) -> (About, usize) {
        let Entry { words, asked_ns, until_ns, cas, flags, plain, absent, value_len, .. } =
            self.entries[entry as usize];
        (About { words, asked_ns, until_ns, cas, flags, plain, absent }, value_len as usize)
    }

    #[inline]
    fn copy_value(&mut self, entry: u32, into: &mut [u8]) {
        let entry = &mut self.entries[entry as usize];
        entry.served = true;
        let mut skip = usize::from(entry.key_len);
        let (mut block, mut at) = (entry.first, 0);
        while at < into.len() {
            let part = &self.blocks[block as usize * BLOCK_BYTES..][..BLOCK_BYTES];
            block = self.chain[block as usize];
            if skip >= BLOCK_BYTES {
                skip -= BLOCK_BYTES;
                continue;
            }
            let part = &part[skip..];
            skip = 0;
            let count = part.len().min(into.len() - at);
            into[at..at + count].copy_from_slice(&part[..count]);
            at += count;
        }
    }

    /// Keeps a value of a key that has no entry. Returns how many others were evicted; `None`: it is too long.
    fn insert(&mut self, hash: u64, key: &[u8], value: &[u8], about: &About) -> Option<u64> {
        let needed = (key.len() + value.len()).div_ceil(BLOCK_BYTES);
        let key_len = u8::try_from(key.len()).ok()?;
        if needed > self.chain.len() / VALUE_PART {
            return None;
        }
        let mut evicted = 0;
        while self.free_entry == NIL || self.free_blocks < needed {
            self.evict();
            evicted += 1;
        }
        let first = self.write(key, value);
        let at = self.free_entry;
        let bucket = self.bucket(hash);
        let (next, older) = (self.buckets[bucket], self.newest);
        let entry = &mut self.entries[at as usize];
        self.free_entry = entry.next;
        let value_len = value.len() as u32;
        let About { words, asked_ns, until_ns, cas, flags, plain, absent } = *about;
        *entry = Entry {
            words,
            asked_ns,
            until_ns,
            cas,
            flags,
            hash: hash as u32,
            value_len,
            first,
            next,
            key_len,
            plain,
            absent,
            served: false,
        };
        self.order[at as usize] = Neighbours { older, newer: NIL };
        self.buckets[bucket] = at;
        match older {
            NIL => self.oldest = at,
            older => self.order[older as usize].newer = at,
        }
        self.newest = at;
        self.len += 1;
        self.bytes += key.len() + value.len();
        Some(evicted)
    }

    /// Writes both into free blocks, of which there are enough; returns the first.
    fn write(&mut self, key: &[u8], value: &[u8]) -> u32 {
        let (mut key, mut value) = (key, value);
        let first = self.free_block;
        let mut last = NIL;
        while !key.is_empty() || !value.is_empty() {
            let block = self.free_block;
            let into = &mut self.blocks[block as usize * BLOCK_BYTES..][..BLOCK_BYTES];
            let of_key = key.len().min(BLOCK_BYTES);
            let of_value = value.len().min(BLOCK_BYTES - of_key);
            into[..of_key].copy_from_slice(&key[..of_key]);
            into[of_key..of_key + of_value].copy_from_slice(&value[..of_value]);
            (key, value) = (&key[of_key..], &value[of_value..]);
            self.free_block = self.chain[block as usize];
            self.free_blocks -= 1;
            last = block;
        }
        if last != NIL {
            self.chain[last as usize] = NIL;
        }
        first
    }

    fn evict(&mut self) {
        let mut at = if self.hand == NIL { self.oldest } else { self.hand };
        loop {
            let entry = &mut self.entries[at as usize];
            if !std::mem::take(&mut entry.served) {
                break;
            }
            let Neighbours { newer, .. } = self.order[at as usize];
            at = if newer == NIL { self.oldest } else { newer };
        }
        self.hand = at;
        // Moves the hand on.
        self.remove(at);
    }

    fn remove(&mut self, at: u32) {
        let Entry { hash, value_len, first, next, key_len, .. } = self.entries[at as usize];
        let Neighbours { older, newer } = self.order[at as usize];
        let bucket = self.bucket(hash.into());
        if self.buckets[bucket] == at {
            self.buckets[bucket] = next;
        } else {
            let mut before = self.buckets[bucket];
            while self.entries[before as usize].next != at {
                before = self.entries[before as usize].next;
            }
            self.entries[before as usize].next = next;
        }
        match older {
            NIL => self.oldest = newer,
            older => self.order[older as usize].newer = newer,
        }
        match newer {
            NIL => self.newest = older,
            newer => self.order[newer as usize].older = older,
        }
        if self.hand == at {
            self.hand = newer;
        }
        self.free_chain(first);
        self.entries[at as usize].next = self.free_entry;
        self.free_entry = at;
        self.len -= 1;
        self.bytes -= usize::from(key_len) + value_len as usize;
    }

    fn free_chain(&mut self, first: u32) {
        let mut block = first;
        while block != NIL {
            let next = self.chain[block as usize];
            self.chain[block as usize] = self.free_block;
            self.free_block = block;
            self.free_blocks += 1;
            block = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, VecDeque};

    use super::*;

    fn hash(key: &[u8]) -> u64 {
        key.iter().fold(7, |hash: u64, byte| hash.wrapping_mul(31) ^ u64::from(*byte)) % 64
    }

    fn value_of(store: &mut Store, key: &[u8]) -> Option<Vec<u8>> {
        let entry = store.find(hash(key), key)?;
        let mut value = vec![0; store.about(entry).1];
        store.copy_value(entry, &mut value);
        Some(value)
    }

    /// Deterministic numbers.
    struct Numbers(u64);

    impl Numbers {
        fn below(&mut self, bound: u64) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0 % bound
        }
    }

    #[test]
    fn what_is_found_is_what_was_last_kept_and_memory_is_never_lost() {
        let mut store = Store::new(64 << 10).unwrap();
        let (entries, blocks) = (store.values.entries.len(), store.values.chain.len());
        let mut kept: HashMap<Vec<u8>, Vec<u8>> = HashMap::new();
        let mut numbers = Numbers(1);
        let (mut evicted, mut found) = (0, 0);
        for round in 0..20_000 {
            let key = vec![b'k'; 1 + numbers.below(250) as usize];
            let value = vec![round as u8; numbers.below(900) as usize];
            match numbers.below(4) {
                0 => {
                    if let Some(entry) = store.find(hash(&key), &key) {
                        store.remove(entry);
                    }
                    kept.remove(&key);
                }
                1 => {
                    let about = About { cas: round, ..About::default() };
                    match store.insert(hash(&key), &key, &value, &about) {
                        Some(count) => _ = (evicted += count, kept.insert(key, value)),
                        None => _ = kept.remove(&key),
                    }
                }
                _ => {
                    if let Some(value) = value_of(&mut store, &key) {
                        assert_eq!(kept.get(&key), Some(&value));
                        found += 1;
                    }
                }
            }
        }
        assert!(evicted > 100 && found > 100, "{evicted} {found}");
        let (len, bytes) = store.used();
        let there: Vec<_> =
            kept.iter().filter(|(key, _)| store.find(hash(key), key).is_some()).collect();
        assert_eq!(there.len(), len);
        assert_eq!(there.iter().map(|(k, v)| k.len() + v.len()).sum::<usize>(), bytes);
        let Store { mut values, absent } = store;
        while values.oldest != NIL {
            values.remove(values.oldest);
        }
        assert_eq!((values.len, values.bytes, values.free_blocks), (0, 0, blocks));
        assert_eq!(absent.len, 0);
        let mut free = 0;
        let mut at = values.free_entry;
        while at != NIL {
            (free, at) = (free + 1, values.entries[at as usize].next);
        }
        assert_eq!(free, entries);
    }

    #[test]
    fn keys_without_a_value_make_room_for_each_other_and_never_take_that_of_a_value() {
        let mut store = Store::new(256 << 10).unwrap();
        let (values, most) = (store.values.entries.len(), store.absent.entries.len());
        let absent = About { absent: true, ..About::default() };
        let key = |at: usize| (at as u32).to_le_bytes();
        let find = |store: &Store, at: usize| store.find(at as u64, &key(at));
        for at in 0..values {
            assert_eq!(store.insert(at as u64, &key(at), b"value", &About::default()), Some(0));
        }
        // One that clients ask for again and again, and a scan of others.
        let (often, scan) = (values, values + 1..values + 1 + 10 * most);
        store.insert(often as u64, &key(often), b"", &absent).unwrap();
        for at in scan.clone() {
            assert!(store.insert(at as u64, &key(at), b"", &absent).is_some());
            let place = find(&store, often).expect("it is in use");
            store.copy_value(place, &mut []);
        }
        assert_eq!(store.used().0, values + most);
        assert!((0..values).all(|at| find(&store, at).is_some()), "all values are there");
        let last = scan.end - 1;
        assert!(find(&store, last).is_some_and(|place| store.about(place).0.absent));
        assert_eq!(find(&store, scan.start), None, "the first ones have made room");
        // A key is a value or absent.
        store.insert(last as u64, &key(last), b"value", &About::default()).unwrap();
        assert!(find(&store, last).is_some_and(|place| !store.about(place).0.absent));
        store.insert(last as u64, &key(last), b"", &absent).unwrap();
        assert!(find(&store, last).is_some_and(|place| store.about(place).0.absent));
        assert_eq!(store.used().0, values - 1 + most);
    }

    #[test]
    fn a_value_of_an_eighth_of_the_memory_is_too_long() {
        let mut store = Store::new(16 << 10).unwrap();
        let most = store.values.chain.len() / VALUE_PART * BLOCK_BYTES - 1;
        assert!(store.insert(1, b"k", &vec![1; most], &About::default()).is_some());
        assert!(store.insert(1, b"k", &vec![1; most + 64], &About::default()).is_none());
        assert!(store.find(1, b"k").is_none(), "the former value is gone");
    }

    #[test]
    fn the_memory_is_what_was_given() {
        for memory in [64 << 10, 1 << 20, 5_000_000] {
            let store = Store::new(memory).unwrap();
            let used = |of: &Table| {
                let entries = of.buckets.len() * 4 + of.entries.len() * size_of::<Entry>();
                let order = of.order.len() * size_of::<Neighbours>();
                entries + order + of.blocks.len() + of.chain.len() * 4
            };
            let used = used(&store.values) + used(&store.absent);
            assert!(used <= memory && 10 * used > 8 * memory, "{used} of {memory}");
        }
    }

    /// One key in 16 fits; requests follow a Zipf distribution with exponent 0.9.
    #[test]
    fn memory_that_there_is_not_is_an_error() {
        assert!(Store::new(1 << 56).is_err());
    }

    #[test]
    fn as_many_are_found_as_with_the_least_recently_used_order() {
        const KEYS: usize = 16_384;
        let mut store = Store::new((KEYS / 16) * 248).unwrap();
        let room = store.values.entries.len().min(store.values.chain.len());
        let mut weights = Vec::with_capacity(KEYS);
        let mut sum = 0.0;
        for rank in 1..=KEYS {
            sum += 1.0 / (rank as f64).powf(0.9);
            weights.push(sum);
        }
        let mut lru: VecDeque<usize> = VecDeque::new();
        let mut numbers = Numbers(99);
        let (mut hits, mut lru_hits) = (0, 0);
        for round in 0..60_000 {
            let draw = numbers.below(1 << 32) as f64 / (1u64 << 32) as f64 * sum;
            let rank = weights.partition_point(|weight| *weight < draw).min(KEYS - 1);
            let key = rank.to_le_bytes();
            let hash = (rank as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let counts = u32::from(round >= 20_000);
            if let Some(entry) = store.find(hash, &key) {
                store.copy_value(entry, &mut [0; 16]);
                hits += counts;
            } else {
                store.insert(hash, &key, &[0; 16], &About::default());
            }
            if let Some(at) = lru.iter().rposition(|kept| *kept == rank) {
                lru.remove(at);
                lru_hits += counts;
            } else if lru.len() == room {
                lru.pop_front();
            }
            lru.push_back(rank);
        }
        assert!(lru_hits > 10_000 && hits * 100 >= lru_hits * 95, "{hits} and {lru_hits}");
    }
}
