//! Stages: which there are and in which order, digests, and keys.

use std::fmt;
use std::io::{self, Read};

use aws_lc_rs::digest;
use sys::digests::{
    BLOCK_BYTES, MD5_START, Run, SHA256_START, Way, md5_ways, sha256_is_fast_alone, sha256_ways,
};
use zeroize::{Zeroize as _, Zeroizing};

use crate::stages::compress::{Compression, ExpandLimits, Format};
use crate::stages::kernel::{CONTEXT_BYTES, KERNEL_MEMORY_BYTES, KernelSource};
use crate::stages::seal::RECORD_BYTES;
use crate::stages::search::{SearchKind, SearchSpec};

/// A digest algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DigestKind {
    /// MD5 (RFC 1321): for protocols that name objects by it, not against attackers.
    Md5,
    /// SHA-256 (FIPS 180-4).
    Sha256,
    /// CRC32C (RFC 3720, appendix B.4): against accidents.
    Crc32c,
    /// SHA-1 (FIPS 180-4): for protocols that name objects by it, not against attackers.
    Sha1,
}

impl DigestKind {
    /// Every algorithm.
    pub const ALL: [Self; 4] = [Self::Md5, Self::Sha256, Self::Crc32c, Self::Sha1];

    /// Its name in options and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Md5 => "md5",
            Self::Sha256 => "sha256",
            Self::Crc32c => "crc32c",
            Self::Sha1 => "sha1",
        }
    }

    /// Bytes of its value.
    pub fn value_bytes(self) -> usize {
        match self {
            Self::Md5 => 16,
            Self::Sha256 => 32,
            Self::Crc32c => 4,
            Self::Sha1 => 20,
        }
    }

    /// The algorithm of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Whether the digests of two ranges say that of both in a row.
    pub(crate) fn can_be_joined(self) -> bool {
        self == Self::Crc32c
    }
}

/// A digest: 16 (MD5), 20 (SHA-1), 32 (SHA-256) or 4 (CRC32C, big-endian) bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct DigestValue {
    kind: DigestKind,
    bytes: [u8; 32],
}

impl DigestValue {
    fn new(kind: DigestKind, value: &[u8]) -> Self {
        let mut bytes = [0; 32];
        bytes[..value.len()].copy_from_slice(value);
        Self { kind, bytes }
    }

    /// The digest of a message: the value, then zeros.
    pub(crate) fn decode(kind: DigestKind, bytes: [u8; 32]) -> Option<Self> {
        let value = Self { kind, bytes };
        let len = value.bytes().len();
        bytes[len..].iter().all(|byte| *byte == 0).then_some(value)
    }

    /// The digest of two ranges in a row, the second one of which has this many bytes.
    pub(crate) fn joined(first: &Self, second: &Self, bytes: u64) -> Self {
        debug_assert!(first.kind == second.kind && first.kind.can_be_joined());
        let word = |value: &Self| {
            u32::from_be_bytes([value.bytes[0], value.bytes[1], value.bytes[2], value.bytes[3]])
        };
        let joined = crc32c::crc32c_combine(word(first), word(second), bytes as usize);
        Self::new(first.kind, &joined.to_be_bytes())
    }

    /// The algorithm.
    pub fn kind(&self) -> DigestKind {
        self.kind
    }

    /// The value.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.kind.value_bytes()]
    }
}

/// In hexadecimal.
impl fmt::Display for DigestValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.bytes().iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for DigestValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{self}", self.kind.name())
    }
}

/// A cipher of a sealed stream; see [`crate::stages::seal`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cipher {
    /// AES-256-GCM in records: a stream that was changed or cut off does not open.
    Aes256Gcm,
    /// AES-256-CTR: hides the bytes, but does not notice when they are changed.
    Aes256Ctr,
}

impl Cipher {
    /// Every cipher.
    pub const ALL: [Self; 2] = [Self::Aes256Gcm, Self::Aes256Ctr];

    /// Its name in options and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Aes256Gcm => "aes-256-gcm",
            Self::Aes256Ctr => "aes-256-ctr",
        }
    }

    /// The cipher of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|cipher| cipher.name() == name)
    }
}

/// Stages of a transfer.
pub const STAGES_MAX: usize = 8;

/// What a stage does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StageKind {
    /// A digest of the bytes that pass.
    Digest(DigestKind),
    /// Looks for a text, or for lines.
    Search(SearchKind),
    /// Decrypts a sealed stream.
    Open(Cipher),
    /// Expands compressed data.
    Expand(Format),
    /// What a kernel of an accelerator makes of the bytes.
    Kernel,
    /// Compresses.
    Compress(Format),
    /// Encrypts.
    Seal(Cipher),
    /// Encrypts with AES-256-CTR on an accelerator.
    SealOn,
}

impl StageKind {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Digest(kind) => kind.name(),
            Self::Search(SearchKind::Text) => "search-text",
            Self::Search(SearchKind::Lines) => "search-lines",
            Self::Open(Cipher::Aes256Gcm) => "open-aes-256-gcm",
            Self::Open(Cipher::Aes256Ctr) => "open-aes-256-ctr",
            Self::Expand(Format::Gzip) => "expand-gzip",
            Self::Expand(Format::Zstd) => "expand-zstd",
            Self::Kernel => "kernel",
            Self::Compress(format) => format.name(),
            Self::Seal(cipher) => cipher.name(),
            Self::SealOn => "aes-256-ctr-kernel",
        }
    }

    /// Stages that change the bytes have ascending ranks.
    fn rank(self) -> Option<u8> {
        match self {
            Self::Digest(_) | Self::Search(_) => None,
            Self::Open(_) => Some(1),
            Self::Expand(_) => Some(2),
            Self::Kernel => Some(3),
            Self::Compress(_) => Some(4),
            Self::Seal(_) | Self::SealOn => Some(5),
        }
    }
}

/// A stage as its caller describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StageSpec {
    /// A digest of the bytes that pass.
    Digest(DigestKind),
    /// Looks for a text, or for lines.
    Search(SearchSpec),
    /// Decrypts a stream that was sealed with this cipher and key.
    Open(Cipher, Key),
    /// Expands compressed data, up to these limits.
    Expand(Format, ExpandLimits),
    /// Compresses.
    Compress(Compression),
    /// What a kernel makes of the bytes, piece by piece; each piece comes with this context. Only of an engine in this process.
    Kernel(KernelSource, [u8; CONTEXT_BYTES]),
    /// Encrypts with this key.
    Seal(Cipher, Key),
    /// Encrypts with AES-256-CTR and this key by a kernel such as `aes256_ctr`. Only of an engine in this process.
    SealOn(KernelSource, Key),
}

impl StageSpec {
    /// What it does.
    pub fn kind(&self) -> StageKind {
        match self {
            Self::Digest(kind) => StageKind::Digest(*kind),
            Self::Search(search) => StageKind::Search(search.kind),
            Self::Open(cipher, _) => StageKind::Open(*cipher),
            Self::Expand(format, _) => StageKind::Expand(*format),
            Self::Compress(how) => StageKind::Compress(how.format()),
            Self::Kernel(..) => StageKind::Kernel,
            Self::Seal(cipher, _) => StageKind::Seal(*cipher),
            Self::SealOn(..) => StageKind::SealOn,
        }
    }

    /// Whether other bytes come out than went in.
    pub(crate) fn transforms(&self) -> bool {
        self.kind().rank().is_some()
    }

    /// Memory that it has at most, without chunks.
    pub(crate) fn memory_bytes(&self) -> u64 {
        match self {
            Self::Digest(_) => 1 << 10,
            Self::Search(search) => search.memory_bytes(),
            // A record, in a vector that grows by doubling.
            Self::Open(..) | Self::Seal(..) => 2 * RECORD_BYTES as u64,
            Self::Expand(format, _) => format.expand_bytes(),
            Self::Compress(how) => how.memory_bytes(),
            Self::Kernel(..) | Self::SealOn(..) => KERNEL_MEMORY_BYTES,
        }
    }
}

/// Why these stages cannot follow one another, in one sentence. Commands built by [`crate::Source`] have a right order by type.
pub fn check_order(stages: &[StageSpec]) -> Result<(), String> {
    if stages.len() > STAGES_MAX {
        return Err(format!("there are {} stages, and {STAGES_MAX} is the limit", stages.len()));
    }
    // The last stage that changed the bytes.
    let mut changed: Option<StageKind> = None;
    for (at, stage) in stages.iter().map(StageSpec::kind).enumerate() {
        let before = stages[at.saturating_sub(1)].kind();
        let falls = |changed: &StageKind| stage.rank().is_some() && stage.rank() <= changed.rank();
        let why = match (changed, stage) {
            (Some(StageKind::Seal(_) | StageKind::SealOn), _) => {
                "only the sink can follow a seal: move the other stage before it"
            }
            (_, StageKind::Open(_)) if at > 0 => {
                "only the source can precede an opening: move it to the first place"
            }
            (Some(StageKind::Compress(_)), StageKind::Search(_)) => {
                "compressed bytes have no text: move the search before the compression"
            }
            (Some(changed), _) if falls(&changed) => {
                "bytes are expanded once at most, then go to a kernel once at most, then are compressed once at most"
            }
            _ => {
                changed = stage.rank().map(|_| stage).or(changed);
                continue;
            }
        };
        let (before, after) = (before.name(), stage.name());
        return Err(format!("`{after}` cannot follow `{before}`: {why}"));
    }
    Ok(())
}

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
    sha256_ways()[0].run(&mut sha256);
}

impl Digester {
    pub(crate) fn new(kind: DigestKind) -> Self {
        match kind {
            DigestKind::Md5 => Self::Md5(Blocks::new(MD5_START)),
            DigestKind::Sha256 if sha256_is_fast_alone() => Self::Sha256(Blocks::new(SHA256_START)),
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

/// Longest key file.
const KEY_FILE_BYTES_MAX: usize = 80;

/// A key of 32 bytes. Its value is not shown, and its memory is overwritten when it is dropped.
#[derive(PartialEq, Eq)]
pub struct Key(Box<Zeroizing<[u8; 32]>>);

impl Key {
    /// The key with these bytes.
    pub fn new(mut bytes: [u8; 32]) -> Self {
        let key = Self::copy(&bytes);
        bytes.zeroize();
        key
    }

    fn copy(bytes: &[u8; 32]) -> Self {
        // Filled in its place: a value that moves leaves a copy.
        let mut key = Box::<Zeroizing<[u8; 32]>>::default();
        key.copy_from_slice(bytes);
        Self(key)
    }

    /// Reads a key file. `None`: it is not one.
    pub fn read(mut file: impl Read) -> io::Result<Option<Self>> {
        let mut bytes = Zeroizing::new([0; KEY_FILE_BYTES_MAX + 1]);
        let mut len = 0;
        while len < bytes.len() {
            match file.read(&mut bytes[len..]) {
                Ok(0) => break,
                Ok(read) => len += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Self::parse(&bytes[..len]))
    }

    /// The key with these bytes, if there are 32.
    pub fn of(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self::copy)
    }

    /// A key file: 32 bytes, or 64 hexadecimal digits with or without an end of line.
    pub fn parse(file: &[u8]) -> Option<Self> {
        if let Some(key) = Self::of(file) {
            return Some(key);
        }
        let text = std::str::from_utf8(file).ok()?.trim_end();
        if text.len() != 64 || !text.is_ascii() {
            return None;
        }
        let mut key = Self::copy(&[0; 32]);
        for (byte, at) in key.0.iter_mut().zip((0..64).step_by(2)) {
            *byte = u8::from_str_radix(&text[at..at + 2], 16).ok()?;
        }
        Some(key)
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl Clone for Key {
    fn clone(&self) -> Self {
        Self::copy(&self.0)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
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

    #[test]
    fn stages_have_one_order() {
        let key = || Key::new([0; 32]);
        let (md5, open) =
            (StageSpec::Digest(DigestKind::Md5), StageSpec::Open(Cipher::Aes256Gcm, key()));
        let expand = StageSpec::Expand(Format::Gzip, ExpandLimits::default());
        let (zip, seal) =
            (StageSpec::Compress(Format::Zstd.into()), StageSpec::Seal(Cipher::Aes256Ctr, key()));
        let search = SearchSpec { kind: SearchKind::Text, pattern: vec![b'a'], offsets: 0 };
        let search = StageSpec::Search(search);
        let all = [&open, &md5, &expand, &search, &zip, &md5, &seal];
        let refused = |stages: &[&StageSpec]| {
            check_order(&stages.iter().copied().cloned().collect::<Vec<_>>())
                .err()
                .unwrap_or_default()
        };
        // Any part of the right order is right.
        for chosen in 0..1 << all.len() {
            let part = (0..all.len()).filter(|at| chosen >> at & 1 == 1).map(|at| all[at]);
            assert_eq!(refused(&part.collect::<Vec<_>>()), "");
        }
        let opening =
            "`open-aes-256-gcm` cannot follow `md5`: only the source can precede an opening";
        assert!(refused(&[&md5, &open]).starts_with(opening));
        let sealed = "`md5` cannot follow `aes-256-ctr`: only the sink can follow a seal";
        assert!(refused(&[&zip, &seal, &md5]).starts_with(sealed));
        let once = "bytes are expanded once at most, then go to a kernel once at most, then are compressed once at most";
        let packed = "`search-text` cannot follow `gzip`: compressed bytes have no text";
        assert!(refused(&[&StageSpec::Compress(Format::Gzip.into()), &search]).starts_with(packed));
        for (stages, names) in [
            ([&zip, &md5, &expand], "`expand-gzip` cannot follow `md5`"),
            ([&md5, &expand, &expand], "`expand-gzip` cannot follow `expand-gzip`"),
            ([&md5, &zip, &zip], "`zstd` cannot follow `zstd`"),
        ] {
            assert_eq!(refused(&stages), format!("{names}: {once}"));
        }
        assert_eq!(refused(&[&md5; 9]), "there are 9 stages, and 8 is the limit");
    }

    #[test]
    fn a_key_file_is_binary_or_hexadecimal() {
        let hex = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
        let key = Key::parse(format!("{hex}\n").as_bytes()).unwrap();
        assert_eq!(key.bytes()[1], 0x11);
        assert_eq!(Key::parse(key.bytes()), Some(key.clone()));
        assert_eq!(Key::read(&key.bytes()[..]).unwrap(), Some(key.clone()));
        assert_eq!(Key::read(std::io::repeat(b'0')).unwrap(), None, "it is not read to its end");
        for wrong in [&b"short"[..], &[b'g'; 64], &[0xff; 64], "é".repeat(32).as_bytes()] {
            assert_eq!(Key::parse(wrong), None);
        }
        assert_eq!(format!("{key:?}"), "Key(..)");
    }
}
