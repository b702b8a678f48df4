//! HyperLogLog: estimates how many different items there were (Flajolet et al., 2007), with the improved estimator of Otmar Ertl ("New
//! cardinality estimation algorithms for HyperLogLog sketches", arXiv:1702.01284, 2017, algorithm 6), which needs no tables and no ranges. With m
//! registers the standard error is about 1.04 / sqrt(m).
//!
//! An item's hash chooses one of the 2^precision registers by its first bits; the register keeps the greatest position of the first one-bit
//! of the rest. Sketches with the same [`Settings`] are merged by the maximum of each register: the result is the sketch of all items of both.

use super::Instructions;
use super::hash::{
    FINISH64_KEPT, finish32, finish64, finish64_last, murmur3_32, murmur3_128, word32,
};

/// Least and greatest precision.
pub const PRECISION_MIN: u8 = 4;
/// See [`PRECISION_MIN`].
pub const PRECISION_MAX: u8 = 18;

/// A sketch's state begins with this, a version, the precision, the bits of hashes, the bytes of items, and the seed.
const MAGIC: &[u8; 4] = b"SHLL";
const VERSION: u8 = 1;
const HEADER_BYTES: usize = 12;

/// Words whose hashes are calculated together.
const BLOCK: usize = 32;

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

/// Words of a message as items: hashes and registers.
#[derive(Clone, Copy)]
pub(super) struct Words {
    precision: u32,
    wide: bool,
    eight: bool,
    /// What 64-bit hashes begin with, or the seed.
    key: u64,
}

impl Words {
    fn new(settings: Settings) -> Self {
        let Settings { precision, wide, item_bytes, seed } = settings;
        let eight = item_bytes == 8;
        let salt = u64::from(seed) | u64::from(item_bytes) << 32;
        let key = if wide { finish64(salt) } else { seed.into() };
        Self { precision: precision.into(), wide, eight, key }
    }

    /// How to find the words that may change a register, if none is less than `floor` and that makes a difference.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "vector code uses it"))]
    pub(super) fn wanted(self, floor: u8) -> Option<Wanted> {
        let Self { precision, wide, eight, key } = self;
        let known = precision + u32::from(floor);
        let is_one = wide && eight && floor > 0 && known <= FINISH64_KEPT;
        let zeros = ((1 << floor) - 1) << (64 - known.min(FINISH64_KEPT));
        is_one.then_some(Wanted { precision, key, zeros })
    }

    /// Adds all whole words.
    #[inline(always)]
    pub(super) fn add(self, bytes: &[u8], registers: &mut [u8], floor: u8) {
        match (self.eight, self.wide) {
            (true, true) => add_all(bytes, registers, self.precision, floor, |word: &[u8; 8]| {
                finish64(u64::from_le_bytes(*word).wrapping_add(self.key))
            }),
            (false, true) => add_all(bytes, registers, self.precision, floor, |word: &[u8; 4]| {
                finish64(u64::from(u32::from_le_bytes(*word)).wrapping_add(self.key))
            }),
            (true, false) => add_all(bytes, registers, self.precision, floor, |word: &[u8; 8]| {
                let both = u64::from_le_bytes(*word);
                let low = word32(self.key as u32, both as u32);
                finish32(word32(low, (both >> 32) as u32) ^ 8)
            }),
            (false, false) => add_all(bytes, registers, self.precision, floor, |word: &[u8; 4]| {
                finish32(word32(self.key as u32, u32::from_le_bytes(*word)) ^ 4)
            }),
        }
    }
}

/// Words of eight bytes with 64-bit hashes, of which only those are wanted that may change a register: see [`Words::wanted`].
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "vector code uses it"))]
pub(super) struct Wanted {
    precision: u32,
    /// What hashes begin with.
    pub(super) key: u64,
    /// The bits that are zero in the hash of a wanted word. They are the same before the last step of the hash, which changes only the others.
    pub(super) zeros: u64,
}

impl Wanted {
    /// Raises the register of a hash without its last step.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "vector code uses it"))]
    pub(super) fn raise(self, begun: u64, registers: &mut [u8]) {
        raise(registers, finish64_last(begun).place(self.precision));
    }
}

/// A hash of 32 or 64 bits.
trait Hash: Copy + Default {
    /// The register, and the value that it has at least.
    fn place(self, precision: u32) -> (u32, u8);

    /// Whether that value is above `floor`.
    fn is_above(self, precision: u32, floor: u8) -> bool;
}

impl Hash for u64 {
    #[inline(always)]
    fn place(self, precision: u32) -> (u32, u8) {
        // The added bit limits the rank of a hash without a one-bit.
        let rest = self << precision | 1 << (precision - 1);
        ((self >> (64 - precision)) as u32, rest.leading_zeros() as u8 + 1)
    }

    #[inline(always)]
    fn is_above(self, precision: u32, floor: u8) -> bool {
        self << precision | 1 << (precision - 1) <= Self::MAX >> floor
    }
}

impl Hash for u32 {
    #[inline(always)]
    fn place(self, precision: u32) -> (u32, u8) {
        let rest = self << precision | 1 << (precision - 1);
        (self >> (32 - precision), rest.leading_zeros() as u8 + 1)
    }

    #[inline(always)]
    fn is_above(self, precision: u32, floor: u8) -> bool {
        self << precision | 1 << (precision - 1) <= Self::MAX >> floor
    }
}

#[inline(always)]
fn add_all<const N: usize, H: Hash>(
    bytes: &[u8],
    registers: &mut [u8],
    precision: u32,
    floor: u8,
    hash: impl Fn(&[u8; N]) -> H,
) {
    let (words, _) = bytes.as_chunks::<N>();
    let (blocks, rest) = words.as_chunks::<BLOCK>();
    for block in blocks {
        add_block(block, registers, precision, floor, &hash);
    }
    for word in rest {
        raise(registers, hash(word).place(precision));
    }
}

/// First loops without memory accesses that depend on data, which are vectorised, then one with them: for those words only whose rank is above
/// that of all registers.
#[inline(always)]
fn add_block<const N: usize, H: Hash>(
    block: &[[u8; N]; BLOCK],
    registers: &mut [u8],
    precision: u32,
    floor: u8,
    hash: impl Fn(&[u8; N]) -> H,
) {
    let mut hashes = [H::default(); BLOCK];
    let mut flags = [0u8; BLOCK];
    for ((kept, flag), word) in hashes.iter_mut().zip(&mut flags).zip(block) {
        *kept = hash(word);
        *flag = kept.is_above(precision, floor).into();
    }
    if floor == 0 {
        return hashes.iter().for_each(|hash| raise(registers, hash.place(precision)));
    }
    // A bit for each flag: the product moves those of eight bytes into the highest one.
    let mut above = 0u32;
    for (n, eight) in flags.as_chunks::<8>().0.iter().enumerate() {
        let bits = u64::from_le_bytes(*eight).wrapping_mul(0x0102_0408_1020_4080) >> 56;
        above |= (bits as u32) << (8 * n);
    }
    while above != 0 {
        raise(registers, hashes[above.trailing_zeros() as usize].place(precision));
        above &= above - 1;
    }
}

#[inline(always)]
fn raise(registers: &mut [u8], (index, rank): (u32, u8)) {
    let register = &mut registers[index as usize];
    if rank > *register {
        *register = rank;
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

/// Why a state cannot be merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it is no state of a sketch with the same settings")]
pub struct OtherState;

impl HyperLogLog {
    /// A sketch without items. `settings.precision` is from [`PRECISION_MIN`] to [`PRECISION_MAX`].
    pub fn new(settings: Settings, instructions: Instructions) -> Self {
        assert!((PRECISION_MIN..=PRECISION_MAX).contains(&settings.precision));
        let registers = vec![0; 1 << settings.precision];
        Self {
            settings,
            words: Words::new(settings),
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
