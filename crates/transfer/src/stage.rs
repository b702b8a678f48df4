//! Digests and keys.

use std::fmt;
use std::io::{self, Read};

use aws_lc_rs::digest;
use md5::{Digest as _, Md5};
use zeroize::{Zeroize as _, Zeroizing};

/// A digest algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DigestKind {
    /// MD5 (RFC 1321): for protocols that name objects by it, not against attackers.
    Md5,
    /// SHA-256 (FIPS 180-4).
    Sha256,
    /// CRC32C (RFC 3720, appendix B.4): against accidents.
    Crc32c,
}

impl DigestKind {
    /// Every algorithm.
    pub const ALL: [Self; 3] = [Self::Md5, Self::Sha256, Self::Crc32c];

    /// Its name in options and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Md5 => "md5",
            Self::Sha256 => "sha256",
            Self::Crc32c => "crc32c",
        }
    }

    /// The algorithm of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// The digest of the bytes of a transfer: 16 (MD5), 32 (SHA-256) or 4 (CRC32C, big-endian) bytes.
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

    /// The algorithm.
    pub fn kind(&self) -> DigestKind {
        self.kind
    }

    /// The value.
    pub fn bytes(&self) -> &[u8] {
        let len = match self.kind {
            DigestKind::Md5 => 16,
            DigestKind::Sha256 => 32,
            DigestKind::Crc32c => 4,
        };
        &self.bytes[..len]
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

/// A digest that is being computed.
pub(crate) enum Digester {
    Md5(Md5),
    Sha256(digest::Context),
    Crc32c(u32),
}

impl Digester {
    pub(crate) fn new(kind: DigestKind) -> Self {
        match kind {
            DigestKind::Md5 => Self::Md5(Md5::new()),
            DigestKind::Sha256 => Self::Sha256(digest::Context::new(&digest::SHA256)),
            DigestKind::Crc32c => Self::Crc32c(0),
        }
    }

    pub(crate) fn kind(&self) -> DigestKind {
        match self {
            Self::Md5(_) => DigestKind::Md5,
            Self::Sha256(_) => DigestKind::Sha256,
            Self::Crc32c(_) => DigestKind::Crc32c,
        }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Md5(state) => state.update(bytes),
            Self::Sha256(state) => state.update(bytes),
            Self::Crc32c(state) => *state = crc32c::crc32c_append(*state, bytes),
        }
    }

    pub(crate) fn finish(self) -> DigestValue {
        let kind = self.kind();
        match self {
            Self::Md5(state) => DigestValue::new(kind, &state.finalize()),
            Self::Sha256(state) => DigestValue::new(kind, state.finish().as_ref()),
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

    /// A key file: 32 bytes, or 64 hexadecimal digits with or without an end of line.
    pub fn parse(file: &[u8]) -> Option<Self> {
        if let Ok(bytes) = file.try_into() {
            return Some(Self::copy(bytes));
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
