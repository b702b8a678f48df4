//! Digests of several streams at a time: MD5 and SHA-256, block by block.
//!
//! One stream keeps a core waiting: each step of MD5 needs the one before it, and so does each of
//! the SHA instructions. Streams of their own have no such order, so several of them take one pass:
//! 16 streams in the lanes of AVX-512, 8 of MD5 in those of AVX2, or two interleaved ones with the
//! SHA instructions. What the processor has is asked once, at run time. A padding, a length and an
//! end are the caller's: these functions see whole blocks of 64 bytes.
//!
//! Which way is used was measured (`crates/sys/examples/digest_rate.rs`). MD5: lanes from two
//! streams on, those of AVX-512 from nine on. SHA-256, where the processor has the SHA instructions:
//! one stream or two, and the lanes of AVX-512 from twelve on. Elsewhere aws-lc computes SHA-256.
//! Against one stream of OpenSSL (2.1 GB/s on an EPYC with both), two streams have 1.3 times the rate,
//! and 16 have 2.8 times; a stream alone has 0.9 times.

#[cfg(target_arch = "x86_64")]
mod lanes;
mod md5;
#[cfg(target_arch = "x86_64")]
mod sha256;

use std::sync::OnceLock;

/// Bytes of a block.
pub const BLOCK_BYTES: usize = 64;
/// Most lanes of any way.
pub const LANES_MAX: usize = 16;
/// The state of MD5 before the first block.
pub const MD5_START: [u32; 4] = [0x6745_2301, 0xefcd_ab89, 0x98ba_dcfe, 0x1032_5476];
/// The state of SHA-256 before the first block.
pub const SHA256_START: [u32; 8] = [
    0x6a09_e667,
    0xbb67_ae85,
    0x3c6e_f372,
    0xa54f_f53a,
    0x510e_527f,
    0x9b05_688c,
    0x1f83_d9ab,
    0x5be0_cd19,
];

/// A stream of a pass: its state, and blocks that follow.
#[derive(Debug)]
pub struct Run<'r, const WORDS: usize> {
    /// Is changed.
    pub state: &'r mut [u32; WORDS],
    /// A multiple of [`BLOCK_BYTES`]; what is longer is left out.
    pub blocks: &'r [u8],
}

/// States of lanes, word by word.
type States<const WORDS: usize> = [[u32; LANES_MAX]; WORDS];

/// A way to compute a digest.
#[derive(Clone, Copy)]
pub struct Way<const WORDS: usize> {
    name: &'static str,
    /// Streams of a pass.
    lanes: usize,
    /// Fewer streams than these are faster in another way.
    least: usize,
    /// That way, if there is one; otherwise one by one.
    fewer: Option<fn(&mut [Run<'_, WORDS>])>,
    /// The blocks of one stream.
    one: fn(&mut [u32; WORDS], &[u8]),
    /// Blocks from each of the places, for all lanes. `None`: there is no such pass.
    many: Option<Pass<WORDS>>,
}

/// Each place has this many blocks, and the processor has what the pass needs.
type Pass<const WORDS: usize> = unsafe fn(&mut States<WORDS>, &mut [*const u8; LANES_MAX], usize);

impl<const WORDS: usize> std::fmt::Debug for Way<WORDS> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({} lanes)", self.name, self.lanes)
    }
}

impl<const WORDS: usize> Way<WORDS> {
    /// Its name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Streams of a pass; 1: there are no passes over several.
    pub fn lanes(&self) -> usize {
        self.lanes
    }

    /// Takes the blocks of all streams.
    pub fn run(&self, runs: &mut [Run<'_, WORDS>]) {
        let one = |run: &mut Run<'_, WORDS>| {
            let whole = run.blocks.len() / BLOCK_BYTES * BLOCK_BYTES;
            (self.one)(run.state, &run.blocks[..whole]);
            run.blocks = &[];
        };
        let Some(pass) = self.many else { return runs.iter_mut().for_each(one) };
        // Long ones first: lanes are rarely empty then.
        runs.sort_unstable_by_key(|run| std::cmp::Reverse(run.blocks.len()));
        let mut next = 0;
        // The streams of the lanes that are in use, the first ones.
        let (mut of, mut used) = ([0; LANES_MAX], 0);
        loop {
            while used < self.lanes && next < runs.len() {
                if runs[next].blocks.len() >= BLOCK_BYTES {
                    of[used] = next;
                    used += 1;
                }
                next += 1;
            }
            if used < self.least {
                if let (Some(fewer), 2..) = (self.fewer, used) {
                    return fewer(runs);
                }
                return of[..used].iter().for_each(|at| one(&mut runs[*at]));
            }
            let left = |at: &usize| runs[*at].blocks.len() / BLOCK_BYTES;
            let blocks = of[..used].iter().map(left).min().expect("a pass has streams");
            let mut states = [[0; LANES_MAX]; WORDS];
            // A lane without a stream repeats another one.
            let mut places = [runs[of[0]].blocks.as_ptr(); LANES_MAX];
            for (lane, at) in of[..used].iter().enumerate() {
                places[lane] = runs[*at].blocks.as_ptr();
                (0..WORDS).for_each(|word| states[word][lane] = runs[*at].state[word]);
            }
            // SAFETY: each place is in a stream that has this many blocks, and ways are made only for processors that have them.
            unsafe { pass(&mut states, &mut places, blocks) };
            let mut kept = 0;
            for lane in 0..used {
                let run = &mut runs[of[lane]];
                (0..WORDS).for_each(|word| run.state[word] = states[word][lane]);
                run.blocks = &run.blocks[blocks * BLOCK_BYTES..];
                if run.blocks.len() >= BLOCK_BYTES {
                    of[kept] = of[lane];
                    kept += 1;
                }
            }
            used = kept;
        }
    }
}

/// The ways of MD5 that this processor has, the best one first.
pub fn md5_ways() -> &'static [Way<4>] {
    static WAYS: OnceLock<Vec<Way<4>>> = OnceLock::new();
    WAYS.get_or_init(|| {
        let scalar =
            Way { name: "scalar", lanes: 1, least: 1, fewer: None, one: md5::scalar, many: None };
        #[cfg_attr(not(target_arch = "x86_64"), expect(unused_mut, reason = "there are no lanes"))]
        let mut ways = vec![scalar];
        #[cfg(target_arch = "x86_64")]
        {
            let many = Some(lanes::md5_avx2 as Pass<4>);
            let avx2 = Way { name: "AVX2", lanes: 8, least: 2, many, ..scalar };
            if lanes::has_avx2() {
                ways.insert(0, avx2);
            }
            if lanes::has_avx2() && lanes::has_avx512() {
                let fewer: fn(&mut [Run<'_, 4>]) = |runs| md5_ways()[1].run(runs);
                let many = Some(lanes::md5_avx512 as Pass<4>);
                let (lanes, least, fewer) = (16, 9, Some(fewer));
                ways.insert(0, Way { name: "AVX-512", lanes, least, fewer, many, ..scalar });
            }
        }
        ways
    })
}

/// The ways of SHA-256 that this processor has, the best one first. Empty without the SHA
/// instructions: other libraries have better code for one stream then.
pub fn sha256_ways() -> &'static [Way<8>] {
    static WAYS: OnceLock<Vec<Way<8>>> = OnceLock::new();
    WAYS.get_or_init(|| {
        #[cfg_attr(not(target_arch = "x86_64"), allow(unused_mut))]
        let mut ways = Vec::new();
        #[cfg(target_arch = "x86_64")]
        if sha256::has_instructions() {
            let (one, many) = (sha256::with_instructions, Some(sha256::pair as Pass<8>));
            let pair = Way { name: "SHA instructions", lanes: 2, least: 2, fewer: None, one, many };
            if lanes::has_avx512() {
                let fewer: fn(&mut [Run<'_, 8>]) = |runs| sha256_ways()[1].run(runs);
                let (fewer, many) = (Some(fewer), Some(lanes::sha256_avx512 as Pass<8>));
                ways.push(Way { name: "AVX-512", lanes: 16, least: 12, fewer, many, ..pair });
            }
            ways.push(pair);
        }
        ways
    })
}
