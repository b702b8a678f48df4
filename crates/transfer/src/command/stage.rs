//! The stages of a command, and their order.

use std::fmt;

use mqueue::codes;

use super::compression::{Compression, ExpandLimits, Format};
use super::kernel::KernelSource;
use super::key::Key;
use super::limits::{
    CACHE_BYTES_MAX, CONTEXT_BYTES, KERNEL_MEMORY_BYTES, LINE_BYTES_MAX, PROGRAM_BYTES_MAX,
    RECORD_BYTES, STAGES_MAX,
};

/// The text, its begin, and the offsets.
const SMALL_BYTES: u64 = 64 << 10;

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

    /// The number in the protocol and in commands of kernels.
    pub fn number(self) -> u8 {
        match self {
            Self::Md5 => codes::digest::MD5,
            Self::Sha256 => codes::digest::SHA256,
            Self::Crc32c => codes::digest::CRC32C,
            Self::Sha1 => codes::digest::SHA1,
        }
    }

    /// The algorithm with this number.
    pub fn numbered(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.number() == number)
    }

    /// The name in options and messages.
    pub fn name(self) -> &'static str {
        codes::digest::TABLE.name(self.number())
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
    pub(crate) fn new(kind: DigestKind, value: &[u8]) -> Self {
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

/// What a search looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SearchKind {
    /// Occurrences of a text.
    Text,
    /// Lines that match an expression.
    Lines,
}

impl SearchKind {
    /// Every kind.
    pub const ALL: [Self; 2] = [Self::Text, Self::Lines];

    /// The number in the protocol.
    pub fn number(self) -> u8 {
        match self {
            Self::Text => codes::search::TEXT,
            Self::Lines => codes::search::LINES,
        }
    }

    /// The kind with this number.
    pub fn numbered(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.number() == number)
    }
}

/// A search as its caller describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SearchSpec {
    /// What it looks at.
    pub kind: SearchKind,
    /// The text or the expression.
    pub pattern: Vec<u8>,
    /// Offsets that are reported, of the first ones that are found; at most `OFFSETS_MAX`.
    pub offsets: u16,
}

impl SearchSpec {
    /// Memory of the search at most: a line, in a vector that grows by doubling, and the compiled expression.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let of_lines = 2 * LINE_BYTES_MAX + PROGRAM_BYTES_MAX + CACHE_BYTES_MAX;
        match self.kind {
            SearchKind::Text => SMALL_BYTES,
            SearchKind::Lines => of_lines as u64 + SMALL_BYTES,
        }
    }
}

/// What a search has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// How many.
    pub count: u64,
    /// Where the first ones begin: the first byte of an occurrence, or of a line.
    pub offsets: Vec<u64>,
    /// Of a range that is searched beside others.
    pub(crate) edges: Option<Box<Edges>>,
}

/// What a range has at its ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Edges {
    /// The end of a line, with the byte that ends it unless the stream ends; or the bytes in which an occurrence may end.
    pub(crate) head: Vec<u8>,
    /// The begin of a line or an occurrence, and where that is.
    pub(crate) tail: Vec<u8>,
    pub(crate) tail_at: u64,
}

impl Found {
    pub(crate) fn add(&mut self, at: u64, offsets_max: u16) {
        self.count += 1;
        if self.offsets.len() < usize::from(offsets_max) {
            self.offsets.push(at);
        }
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

    /// The number in the protocol.
    pub fn number(self) -> u8 {
        match self {
            Self::Aes256Gcm => codes::cipher::AES_256_GCM,
            Self::Aes256Ctr => codes::cipher::AES_256_CTR,
        }
    }

    /// The cipher with this number.
    pub fn numbered(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|cipher| cipher.number() == number)
    }

    /// The name in options and messages.
    pub fn name(self) -> &'static str {
        codes::cipher::TABLE.name(self.number())
    }

    /// The cipher of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|cipher| cipher.name() == name)
    }
}

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

/// Stages of this process, whose names other processes see in lists: no program asks for them.
const OF_ENGINE: u8 = 7;
const KERNEL: [u8; 2] = [OF_ENGINE, 1];
const SEAL_ON: [u8; 2] = [OF_ENGINE, 2];

impl StageKind {
    /// The numbers in the protocol: what it does, and with what.
    pub(crate) fn codes(self) -> [u8; 2] {
        match self {
            Self::Digest(kind) => [codes::stage::DIGEST, kind.number()],
            Self::Open(cipher) => [codes::stage::OPEN, cipher.number()],
            Self::Seal(cipher) => [codes::stage::SEAL, cipher.number()],
            Self::Compress(format) => [codes::stage::COMPRESS, format.number()],
            Self::Expand(format) => [codes::stage::EXPAND, format.number()],
            Self::Search(kind) => [codes::stage::SEARCH, kind.number()],
            Self::Kernel => KERNEL,
            Self::SealOn => SEAL_ON,
        }
    }

    /// The kind with these numbers.
    pub(crate) fn coded(numbers: [u8; 2]) -> Option<Self> {
        let [kind, option] = numbers;
        match kind {
            codes::stage::DIGEST => DigestKind::numbered(option).map(Self::Digest),
            codes::stage::OPEN => Cipher::numbered(option).map(Self::Open),
            codes::stage::SEAL => Cipher::numbered(option).map(Self::Seal),
            codes::stage::COMPRESS => Format::numbered(option).map(Self::Compress),
            codes::stage::EXPAND => Format::numbered(option).map(Self::Expand),
            codes::stage::SEARCH => SearchKind::numbered(option).map(Self::Search),
            _ if numbers == KERNEL => Some(Self::Kernel),
            _ if numbers == SEAL_ON => Some(Self::SealOn),
            _ => None,
        }
    }

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

#[cfg(test)]
mod tests {
    use super::*;

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
}
