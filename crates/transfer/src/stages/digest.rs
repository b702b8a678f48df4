//! Digests that are being computed.

use aws_lc_rs::digest;
use sys::digests::{BLOCK_BYTES, MD5_START, Run, SHA256_START, Way, md5_ways, sha256_ways};

use crate::command::stage::{DigestKind, DigestValue};

/// A digest that is being computed.
pub(crate) enum Digester {
    Md5(Blocks<4>),
    Sha256(Blocks<8>),
    Sha(DigestKind, digest::Context),
    Crc32c(u32),
}

/// A digest of blocks, which can take them beside other streams: see [`sys::digests`].
pub(crate) struct Blocks<const WORDS: usize> {
    state: [u32; WORDS],
    /// The begin of a block whose rest has not come.
    begun: [u8; BLOCK_BYTES],
    bytes: u64,
}

impl<const WORDS: usize> Blocks<WORDS> {
    fn new(start: [u32; WORDS]) -> Self {
        Self { state: start, begun: [0; BLOCK_BYTES], bytes: 0 }
    }

    /// Takes bytes, but for whole blocks in a row, which the result says.
    fn take<'r>(&'r mut self, bytes: &'r [u8], way: &Way<WORDS>) -> Run<'r, WORDS> {
        let have = (self.bytes % BLOCK_BYTES as u64) as usize;
        self.bytes += bytes.len() as u64;
        let mut rest = bytes;
        if have > 0 {
            let (fresh, later) = rest.split_at(rest.len().min(BLOCK_BYTES - have));
            self.begun[have..have + fresh.len()].copy_from_slice(fresh);
            rest = later;
            if have + fresh.len() < BLOCK_BYTES {
                return Run { state: &mut self.state, blocks: &[] };
            }
            way.run(&mut [Run { state: &mut self.state, blocks: &self.begun }]);
        }
        let (blocks, begun) = rest.split_at(rest.len() / BLOCK_BYTES * BLOCK_BYTES);
        self.begun[..begun.len()].copy_from_slice(begun);
        Run { state: &mut self.state, blocks }
    }

    /// The padding of both algorithms: a one, zeros, and the length in bits.
    fn finish(mut self, way: &Way<WORDS>, length: fn(u64) -> [u8; 8]) -> [u32; WORDS] {
        let bits = self.bytes.wrapping_mul(8);
        let have = (self.bytes % BLOCK_BYTES as u64) as usize;
        let zeros = (2 * BLOCK_BYTES - 9 - have) % BLOCK_BYTES;
        let mut padding = [0; 2 * BLOCK_BYTES];
        padding[0] = 0x80;
        padding[1 + zeros..9 + zeros].copy_from_slice(&length(bits));
        let mut run = self.take(&padding[..9 + zeros], way);
        way.run(std::slice::from_mut(&mut run));
        self.state
    }
}

/// Shows bytes to digests, several at a time.
pub(crate) fn update_together<'u>(updates: impl Iterator<Item = (&'u mut Digester, &'u [u8])>) {
    let (mut md5, mut sha256) = (Vec::new(), Vec::new());
    for (digester, bytes) in updates {
        match digester {
            Digester::Md5(blocks) => md5.push(blocks.take(bytes, &md5_ways()[0])),
            Digester::Sha256(blocks) => sha256.push(blocks.take(bytes, &sha256_ways()[0])),
            Digester::Sha(_, state) => state.update(bytes),
            Digester::Crc32c(state) => *state = crc32c::crc32c_append(*state, bytes),
        }
    }
    md5_ways()[0].run(&mut md5);
    if let Some(way) = sha256_ways().first() {
        way.run(&mut sha256);
    }
}

impl Digester {
    pub(crate) fn new(kind: DigestKind) -> Self {
        match kind {
            DigestKind::Md5 => Self::Md5(Blocks::new(MD5_START)),
            DigestKind::Sha256 if !sha256_ways().is_empty() => {
                Self::Sha256(Blocks::new(SHA256_START))
            }
            DigestKind::Sha256 => Self::Sha(kind, digest::Context::new(&digest::SHA256)),
            DigestKind::Sha1 => {
                Self::Sha(kind, digest::Context::new(&digest::SHA1_FOR_LEGACY_USE_ONLY))
            }
            DigestKind::Crc32c => Self::Crc32c(0),
        }
    }

    pub(crate) fn kind(&self) -> DigestKind {
        match self {
            Self::Md5(_) => DigestKind::Md5,
            Self::Sha256(_) => DigestKind::Sha256,
            Self::Sha(kind, _) => *kind,
            Self::Crc32c(_) => DigestKind::Crc32c,
        }
    }

    /// Whether [`update_together`] takes it.
    pub(crate) fn takes_blocks(&self) -> bool {
        matches!(self, Self::Md5(_) | Self::Sha256(_))
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        update_together(std::iter::once((self, bytes)));
    }

    pub(crate) fn finish(self) -> DigestValue {
        let kind = self.kind();
        match self {
            Self::Md5(blocks) => {
                let state = blocks.finish(&md5_ways()[0], u64::to_le_bytes);
                DigestValue::new(kind, state.map(u32::to_le_bytes).as_flattened())
            }
            Self::Sha256(blocks) => {
                let state = blocks.finish(&sha256_ways()[0], u64::to_be_bytes);
                DigestValue::new(kind, state.map(u32::to_be_bytes).as_flattened())
            }
            Self::Sha(_, state) => DigestValue::new(kind, state.finish().as_ref()),
            Self::Crc32c(state) => DigestValue::new(kind, &state.to_be_bytes()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn digest_of(kind: DigestKind, parts: &[&[u8]]) -> String {
        let mut digester = Digester::new(kind);
        parts.iter().for_each(|part| digester.update(part));
        digester.finish().to_string()
    }

    /// RFC 1321, FIPS 180-4 and RFC 3720 give these values.
    #[test]
    fn digests_have_their_published_values() {
        assert_eq!(digest_of(DigestKind::Md5, &[b"a", b"bc"]), "900150983cd24fb0d6963f7d28e17f72");
        let sha = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(digest_of(DigestKind::Sha256, &[b"ab", b"c"]), sha);
        assert_eq!(digest_of(DigestKind::Crc32c, &[&[0; 16], &[0; 16]]), "8a9136aa");
        let sha = "a9993e364706816aba3e25717850c26c9cd0d89d";
        assert_eq!(digest_of(DigestKind::Sha1, &[b"abc"]), sha);
        for kind in DigestKind::ALL {
            assert_eq!(DigestKind::named(kind.name()), Some(kind));
            assert_eq!(digest_of(kind, &[]).len(), 2 * kind.value_bytes());
        }
    }

    proptest! {
        #[test]
        fn crc32c_of_ranges_is_that_of_all(ranges in vec(vec(any::<u8>(), 0..300), 1..8)) {
            let digest = |bytes: &[u8]| {
                let mut digester = Digester::new(DigestKind::Crc32c);
                digester.update(bytes);
                digester.finish()
            };
            let mut all = digest(&[]);
            for range in &ranges {
                all = DigestValue::joined(&all, &digest(range), range.len() as u64);
            }
            prop_assert_eq!(all, digest(&ranges.concat()));
        }
    }
}
