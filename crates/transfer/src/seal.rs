//! Sealing: AES-256-GCM in records.
//!
//! ```text
//! stream: header (48 bytes), record, record, ..., last record
//! header: "SERVSEAL" | version u16 = 1 | cipher u16 = 1 (AES-256-GCM) | record bytes u32 = 65536 | salt (32 bytes)
//! record: ciphertext (65520 bytes; the last record 0 to 65520) | tag (16 bytes)
//! ```
//!
//! Integers are little-endian. The salt is random and new for every stream. The key of the stream is
//! HKDF-SHA256 (RFC 5869) of the caller's key, with the salt as salt and the first 16 bytes of the header as info, 32 bytes long. The nonce
//! of record *n* (from 0) is 12 bytes: three zeros, 1 for the last record or else 0, and *n* as big-endian u64.
//! There is no additional data.
//!
//! *Nonces are never reused.* A stream key belongs to one salt, a random 256-bit number, and each record of a stream has a
//! number of its own. The construction is that of RFC 8188 with the last-record flag of STREAM (Hoang et al., CRYPTO 2015):
//! records that are changed, reordered, dropped or repeated, and a stream that was cut off, do not open.
//! At most 2^32 records (256 TiB) are sealed in a stream.

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use aws_lc_rs::hkdf::{HKDF_SHA256, Salt};

use crate::error::TransferError;
use crate::stage::Key;

/// Bytes of the header.
pub const HEADER_BYTES: usize = 48;
/// Bytes of a record that is not the last one.
pub const RECORD_BYTES: usize = 64 << 10;
/// Bytes of a tag.
pub const TAG_BYTES: usize = 16;
/// Plain bytes of a record that is not the last one.
pub const PAYLOAD_BYTES: usize = RECORD_BYTES - TAG_BYTES;
/// Records of a stream.
const RECORDS_MAX: u64 = 1 << 32;
/// The part of the header before the salt.
const FIXED_BYTES: usize = 16;

/// Seals one stream.
pub struct Sealer {
    key: LessSafeKey,
    header: [u8; HEADER_BYTES],
    records: u64,
}

impl Sealer {
    /// A stream of its own, with a new salt.
    pub fn new(key: &Key) -> Result<Self, TransferError> {
        let mut salt = [0; HEADER_BYTES - FIXED_BYTES];
        let random = aws_lc_rs::rand::fill(&mut salt);
        // EIO: the host kernel's random numbers are not available.
        random.map_err(|_| TransferError::Host { what: "getrandom", errno: 5 })?;
        Ok(Self::with_salt(key, &salt))
    }

    /// A salt must never be used twice with one key.
    fn with_salt(key: &Key, salt: &[u8; HEADER_BYTES - FIXED_BYTES]) -> Self {
        let mut header = [0; HEADER_BYTES];
        header[..8].copy_from_slice(b"SERVSEAL");
        header[8..10].copy_from_slice(&1u16.to_le_bytes());
        header[10..12].copy_from_slice(&1u16.to_le_bytes());
        header[12..16].copy_from_slice(&(RECORD_BYTES as u32).to_le_bytes());
        header[FIXED_BYTES..].copy_from_slice(salt);
        let extracted = Salt::new(HKDF_SHA256, salt).extract(key.bytes());
        let info = [&header[..FIXED_BYTES]];
        let expanded = extracted.expand(&info, &AES_256_GCM).expect("32 bytes are short enough");
        let key = LessSafeKey::new(UnboundKey::from(expanded));
        Self { key, header, records: 0 }
    }

    /// What precedes the first record.
    pub fn header(&self) -> &[u8; HEADER_BYTES] {
        &self.header
    }

    /// Encrypts a record in place: `record` is the plain bytes and room for the tag. All records but the last have
    /// [`RECORD_BYTES`].
    pub fn seal(&mut self, record: &mut [u8], last: bool) -> Result<(), TransferError> {
        if self.records >= RECORDS_MAX {
            return Err(TransferError::Range);
        }
        debug_assert!(last || record.len() == RECORD_BYTES);
        let (payload, room) = record.split_at_mut(record.len() - TAG_BYTES);
        let nonce = Nonce::assume_unique_for_key(nonce(self.records, last));
        self.records += 1;
        let sealed = self.key.seal_in_place_separate_tag(nonce, Aad::empty(), payload);
        // Fails only for records that are longer than a GiB.
        let tag = sealed.map_err(|_| TransferError::Range)?;
        room.copy_from_slice(tag.as_ref());
        Ok(())
    }
}

fn nonce(record: u64, last: bool) -> [u8; 12] {
    let mut nonce = [0; 12];
    nonce[3] = last.into();
    nonce[4..].copy_from_slice(&record.to_be_bytes());
    nonce
}
