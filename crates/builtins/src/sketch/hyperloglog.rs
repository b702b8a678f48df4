//! HyperLogLog: estimates how many different items there were (Flajolet et al., 2007), with the improved estimator of Otmar Ertl ("New
//! cardinality estimation algorithms for HyperLogLog sketches", arXiv:1702.01284, 2017, algorithm 6), which needs no tables and no ranges. With m
//! registers the standard error is about 1.04 / sqrt(m).
//!
//! An item's hash chooses one of the 2^precision registers by its first bits; the register keeps the greatest position of the first one-bit
//! of the rest. Sketches with the same [`Settings`] are merged by the maximum of each register: the result is the sketch of all items of both.

use super::Instructions;
use super::OtherState;
use super::hash::{murmur3_32, murmur3_128};
use super::words::{Hash as _, Words, raise};

/// Least and greatest precision.
pub const PRECISION_MIN: u8 = 4;
/// See [`PRECISION_MIN`].
pub const PRECISION_MAX: u8 = 18;

/// A sketch's state begins with this, a version, the precision, the bits of hashes, the bytes of items, and the seed.
const MAGIC: &[u8; 4] = b"SHLL";
const VERSION: u8 = 1;
const HEADER_BYTES: usize = 12;

/// Bytes of words for each register until the least register is looked for again.
const FLOOR_BYTES: usize = 16;

/// What items are, and how they are hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The number of registers is 2 to the power of this.
    pub precision: u8,
    /// Hashes have 64 bits, else 32.
    pub wide: bool,
    /// Items are words of 4 or 8 bytes, least significant byte first; 0: texts of any length.
    pub item_bytes: u8,
    /// Seed of the hash.
    pub seed: u32,
}

impl Settings {
    fn header(self) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        header[..4].copy_from_slice(MAGIC);
        let bits = if self.wide { 64 } else { 32 };
        header[4..8].copy_from_slice(&[VERSION, self.precision, bits, self.item_bytes]);
        header[8..].copy_from_slice(&self.seed.to_le_bytes());
        header
    }

    fn hash_bits(self) -> u32 {
        if self.wide { 64 } else { 32 }
    }
}

/// See the module's text.
#[derive(Clone)]
pub struct HyperLogLog {
    settings: Settings,
    words: Words,
    instructions: Instructions,
    registers: Vec<u8>,
    /// No register is less than this.
    floor: u8,
    /// Bytes of words since it was determined.
    unchecked: usize,
}

impl HyperLogLog {
    /// A sketch without items. `settings.precision` is from [`PRECISION_MIN`] to [`PRECISION_MAX`].
    pub fn new(settings: Settings, instructions: Instructions) -> Self {
        assert!((PRECISION_MIN..=PRECISION_MAX).contains(&settings.precision));
        let Settings { precision, wide, item_bytes, seed } = settings;
        let registers = vec![0; 1 << precision];
        Self {
            settings,
            words: Words::new(precision, wide, item_bytes, seed),
            instructions,
            registers,
            floor: 0,
            unchecked: 0,
        }
    }

    /// Its settings.
    pub fn settings(&self) -> Settings {
        self.settings
    }

    /// Forgets all items.
    pub fn clear(&mut self) {
        self.registers.fill(0);
        self.floor = 0;
    }

    /// Adds one item, a text.
    pub fn add(&mut self, item: &[u8]) {
        let precision = self.settings.precision.into();
        let place = if self.settings.wide {
            murmur3_128(item, self.settings.seed).0.place(precision)
        } else {
            murmur3_32(item, self.settings.seed).place(precision)
        };
        raise(&mut self.registers, place);
    }

    /// Adds each whole word of `bytes`.
    pub fn add_words(&mut self, bytes: &[u8]) {
        self.instructions.add(self.words, bytes, &mut self.registers, self.floor);
        self.unchecked += bytes.len();
        if self.unchecked >= FLOOR_BYTES * self.registers.len() {
            self.unchecked = 0;
            let least = self.registers.iter().copied().min().unwrap_or(0);
            self.floor = least + u8::from(mutants::on("floor_too_high"));
        }
    }

    /// The registers.
    pub fn registers(&self) -> &[u8] {
        &self.registers
    }

    /// Adds the items of another sketch with the same settings: what [`Self::state`] returned.
    pub fn merge(&mut self, state: &[u8]) -> Result<(), OtherState> {
        let registers = state.strip_prefix(&self.settings.header()).ok_or(OtherState)?;
        let rank_max = (self.settings.hash_bits() - u32::from(self.settings.precision) + 1) as u8;
        let fits = registers.len() == self.registers.len();
        if !fits || registers.iter().any(|rank| *rank > rank_max) {
            return Err(OtherState);
        }
        let pairs = self.registers.iter_mut().zip(registers);
        let sum = mutants::on("merge_by_sum");
        pairs.for_each(|(one, other)| {
            *one = if sum { (*one + *other).min(rank_max) } else { (*one).max(*other) };
        });
        Ok(())
    }

    /// Settings and registers.
    pub fn state(&self) -> Vec<u8> {
        [&self.settings.header()[..], &self.registers].concat()
    }

    /// How many different items there were.
    pub fn estimate(&self) -> f64 {
        let m = self.registers.len() as f64;
        // Registers by value: 0 to q + 1.
        let q = (self.settings.hash_bits() - u32::from(self.settings.precision)) as usize;
        let mut counts = [0u32; 64];
        self.registers.iter().for_each(|rank| counts[usize::from(*rank)] += 1);
        let mut z = m * tau(1.0 - f64::from(counts[q + 1]) / m);
        for count in counts[1..=q].iter().rev() {
            z = 0.5 * (z + f64::from(*count));
        }
        z += m * sigma(f64::from(counts[0]) / m);
        // The constant of the estimator is that of many registers. The one for m of them (Flajolet et al., figure 3) holds when few are zero.
        let few = 1.0 + 1.079 / m * (1.0 - f64::from(counts[0]) / m);
        let hashes = m * m / (2.0 * std::f64::consts::LN_2 * z * few);
        if self.settings.wide {
            return hashes;
        }
        // Different items have the same hash.
        let all = (1u64 << 32) as f64;
        -all * (-(hashes / all).min(1.0 - 1e-6)).ln_1p()
    }
}

/// x + the sum over k >= 1 of x^(2^k) 2^(k-1).
fn sigma(mut x: f64) -> f64 {
    if x == 1.0 {
        return f64::INFINITY;
    }
    let (mut z, mut y) = (x, 1.0);
    loop {
        x *= x;
        let before = z;
        z += x * y;
        y += y;
        if z == before {
            return z;
        }
    }
}

/// (1 - x - the sum over k >= 1 of (1 - x^(2^-k))^2 2^-k) / 3.
fn tau(mut x: f64) -> f64 {
    if x == 0.0 || x == 1.0 {
        return 0.0;
    }
    let (mut z, mut y) = (1.0 - x, 1.0);
    loop {
        x = x.sqrt();
        let before = z;
        y *= 0.5;
        z -= (1.0 - x) * (1.0 - x) * y;
        if z == before {
            return z / 3.0;
        }
    }
}
