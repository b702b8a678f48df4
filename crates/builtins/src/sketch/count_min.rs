//! Count-min with a list of the most frequent items: how often each item occurred, in bounded memory (Cormode and Muthukrishnan, 2005), and
//! which occurred most often (a heap over the estimates).
//!
//! An estimate is never too small. Of N items, one is too large by more than e N / width with a probability of at most e^-depth. An update
//! is conservative (Estan and Varghese, 2002): it raises only counters that would make the estimate too small.
//!
//! Sketches with the same [`Settings`] are merged by the sum of each counter: the bounds hold for all items of both. The list of the merged sketch is
//! the most frequent ones of both lists.

use std::collections::HashMap;

use super::OtherState;
use super::hash::{finish64, murmur3_128};

/// The least and the greatest width.
pub const WIDTH_MIN: u32 = 16;
/// See [`WIDTH_MIN`].
pub const WIDTH_MAX: u32 = 1 << 20;
/// The greatest depth.
pub const DEPTH_MAX: u32 = 8;
/// Items of the list, at most.
pub const TOP_MAX: u32 = 256;
/// Bytes of an item that are kept in the list, at most.
pub const ITEM_BYTES_MAX: usize = 32;

/// Memory of an item of the list, with its place in a map that is at most half full.
pub const TOP_BYTES: u64 = (size_of::<Frequent>() + 4 * size_of::<(u64, u32)>()) as u64;

const MAGIC: &[u8; 4] = b"SCMS";
const VERSION: u8 = 1;
const HEADER_BYTES: usize = 24;
/// An entry of the list in a state: hash, length, bytes.
const ENTRY_BYTES: usize = 8 + 8 + ITEM_BYTES_MAX;

/// The size of a sketch, and its hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Counters in a row: a power of two.
    pub width: u32,
    /// Rows.
    pub depth: u32,
    /// Items of the list.
    pub top: u32,
    /// Seed of the hash.
    pub seed: u32,
}

impl Settings {
    fn header(self) -> [u8; 20] {
        let mut header = [0; 20];
        header[..4].copy_from_slice(MAGIC);
        header[4] = VERSION;
        // The length of the list may differ.
        let words = [self.width, self.depth, self.seed];
        for (word, bytes) in words.iter().zip(header[8..].chunks_exact_mut(4)) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        header
    }
}

/// An item of the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frequent {
    hash: u64,
    /// How often it occurred, as estimated when it did last.
    pub count: u64,
    len: u8,
    bytes: [u8; ITEM_BYTES_MAX],
}

impl Frequent {
    /// Its first bytes, up to [`ITEM_BYTES_MAX`].
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len.into()]
    }
}

/// The most frequent items: a heap by count, the least first, and the place of each in it.
#[derive(Clone)]
struct Top {
    heap: Vec<Frequent>,
    places: HashMap<u64, u32>,
    max: usize,
}

impl Top {
    fn new(max: usize) -> Self {
        // Nothing grows later: a map that is at most half full reuses the places of removed entries.
        Self { heap: Vec::with_capacity(max), places: HashMap::with_capacity(2 * max), max }
    }

    fn clear(&mut self) {
        self.heap.clear();
        self.places.clear();
    }

    #[inline]
    fn offer(&mut self, hash: u64, count: u64, item: &[u8]) {
        if self.heap.len() == self.max && self.heap.first().is_none_or(|least| count < least.count)
        {
            return;
        }
        if let Some(place) = self.places.get(&hash) {
            let place = *place as usize;
            self.heap[place].count = count;
            return self.sink(place);
        }
        let kept = item.len().min(ITEM_BYTES_MAX);
        let mut bytes = [0; ITEM_BYTES_MAX];
        bytes[..kept].copy_from_slice(&item[..kept]);
        let new = Frequent { hash, count, len: kept as u8, bytes };
        if self.heap.len() < self.max {
            self.heap.push(new);
            self.places.insert(hash, self.heap.len() as u32 - 1);
            self.rise(self.heap.len() - 1);
        } else if count > self.heap[0].count {
            self.places.remove(&self.heap[0].hash);
            self.heap[0] = new;
            self.places.insert(hash, 0);
            self.sink(0);
        }
    }

    fn swap(&mut self, one: usize, other: usize) {
        self.heap.swap(one, other);
        for place in [one, other] {
            self.places.insert(self.heap[place].hash, place as u32);
        }
    }

    fn rise(&mut self, mut place: usize) {
        while place > 0 {
            let parent = (place - 1) / 2;
            if self.heap[parent].count <= self.heap[place].count {
                return;
            }
            self.swap(parent, place);
            place = parent;
        }
    }

    fn sink(&mut self, mut place: usize) {
        loop {
            let children = [2 * place + 1, 2 * place + 2].into_iter();
            let children = children.filter(|child| *child < self.heap.len());
            let Some(least) = children.min_by_key(|child| self.heap[*child].count) else { return };
            if self.heap[place].count <= self.heap[least].count {
                return;
            }
            self.swap(least, place);
            place = least;
        }
    }
}

/// See the module's text.
#[derive(Clone)]
pub struct CountMin {
    settings: Settings,
    counters: Vec<u64>,
    top: Top,
}

impl CountMin {
    /// A sketch without items. The width is a power of two from [`WIDTH_MIN`] to [`WIDTH_MAX`], the depth up to [`DEPTH_MAX`], the list up to
    /// [`TOP_MAX`].
    pub fn new(settings: Settings) -> Self {
        let Settings { width, depth, top, .. } = settings;
        assert!(width.is_power_of_two() && (WIDTH_MIN..=WIDTH_MAX).contains(&width));
        assert!((1..=DEPTH_MAX).contains(&depth) && top <= TOP_MAX);
        let counters = vec![0; width as usize * depth as usize];
        Self { settings, counters, top: Top::new(top as usize) }
    }

    /// Its settings.
    pub fn settings(&self) -> Settings {
        self.settings
    }

    /// Forgets all items.
    pub fn clear(&mut self) {
        self.counters.fill(0);
        self.top.clear();
    }

    /// The counters of a hash, one in each row: two halves of the hash make all rows (Kirsch and Mitzenmacher, 2006).
    #[inline]
    fn places(&self, hash: u64) -> impl Iterator<Item = usize> + use<> {
        let width = self.settings.width as usize;
        let step = finish64(hash) | 1;
        (0..self.settings.depth as usize).map(move |row| {
            let spread = hash.wrapping_add(step.wrapping_mul(row as u64)) >> 32;
            row * width + (spread as usize & (width - 1))
        })
    }

    /// Adds one occurrence of an item. Returns how often it has occurred, at least.
    pub fn add(&mut self, item: &[u8]) -> u64 {
        let (hash, _) = murmur3_128(item, self.settings.seed);
        let least = self.places(hash).map(|place| self.counters[place]).min().unwrap_or(0);
        let count = least.saturating_add(1);
        for place in self.places(hash) {
            let counter = &mut self.counters[place];
            *counter = (*counter).max(count);
        }
        self.top.offer(hash, count, item);
        count
    }

    /// How often an item has occurred, or more often.
    pub fn estimate(&self, item: &[u8]) -> u64 {
        self.of_hash(murmur3_128(item, self.settings.seed).0)
    }

    fn of_hash(&self, hash: u64) -> u64 {
        self.places(hash).map(|place| self.counters[place]).min().unwrap_or(0)
    }

    /// The most frequent items, the most frequent first.
    pub fn top(&self) -> Vec<Frequent> {
        let mut top = self.top.heap.clone();
        top.sort_by_key(|item| (std::cmp::Reverse(item.count), item.hash));
        top
    }

    /// Settings, list and counters.
    pub fn state(&self) -> Vec<u8> {
        let mut state = Vec::with_capacity(
            HEADER_BYTES + self.top.heap.len() * ENTRY_BYTES + self.counters.len() * 8,
        );
        state.extend(self.settings.header());
        state.extend((self.top.heap.len() as u32).to_le_bytes());
        for item in self.top() {
            state.extend(item.hash.to_le_bytes());
            state.extend(u64::from(item.len).to_le_bytes());
            state.extend(item.bytes);
        }
        state.extend(self.counters.iter().flat_map(|counter| counter.to_le_bytes()));
        state
    }

    /// Adds the items of another sketch with the same settings: what [`Self::state`] returned.
    pub fn merge(&mut self, state: &[u8]) -> Result<(), OtherState> {
        let rest = state.strip_prefix(&self.settings.header()).ok_or(OtherState)?;
        let (listed, rest) = rest.split_first_chunk::<4>().ok_or(OtherState)?;
        let listed = u32::from_le_bytes(*listed).min(TOP_MAX + 1) as usize;
        let counters = self.counters.len() * 8;
        if listed > TOP_MAX as usize || rest.len() != listed * ENTRY_BYTES + counters {
            return Err(OtherState);
        }
        let (entries, counters) = rest.split_at(listed * ENTRY_BYTES);
        let (entries, _) = entries.as_chunks::<ENTRY_BYTES>();
        let word = |bytes: &[u8]| bytes.first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
        if entries.iter().any(|entry| word(&entry[8..]) > ITEM_BYTES_MAX as u64) {
            return Err(OtherState);
        }
        for (counter, other) in self.counters.iter_mut().zip(counters.as_chunks::<8>().0) {
            *counter = counter.saturating_add(u64::from_le_bytes(*other));
        }
        // By the merged counters.
        let own = std::mem::replace(&mut self.top, Top::new(self.settings.top as usize));
        let own = own.heap.iter().map(|item| (item.hash, item.len.into(), item.bytes));
        let others = entries.iter().map(|entry| {
            let mut bytes = [0; ITEM_BYTES_MAX];
            bytes.copy_from_slice(&entry[16..]);
            (word(entry), word(&entry[8..]) as usize, bytes)
        });
        for (hash, len, bytes) in own.chain(others).collect::<Vec<_>>() {
            let count = self.of_hash(hash);
            self.top.offer(hash, count, &bytes[..len]);
        }
        Ok(())
    }
}
