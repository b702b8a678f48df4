//! Words of a message as items of a HyperLogLog: their hashes, and the registers that they raise.

use super::hash::{FINISH64_KEPT, finish32, finish64, finish64_last, word32};

/// Words whose hashes are calculated together.
const BLOCK: usize = 32;

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
    /// Words of `item_bytes`, 4 or 8, with hashes of 64 bits if `wide`, else of 32.
    pub(super) fn new(precision: u8, wide: bool, item_bytes: u8, seed: u32) -> Self {
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
pub(super) trait Hash: Copy + Default {
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
pub(super) fn raise(registers: &mut [u8], (index, rank): (u32, u8)) {
    let register = &mut registers[index as usize];
    if rank > *register {
        *register = rank;
    }
}
