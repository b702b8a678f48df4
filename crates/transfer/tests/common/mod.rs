//! Seals and opens streams, and computes digests, with other implementations than those of the crate under test.
// Not every test program uses all of it.
#![allow(dead_code)]

use aes_gcm::aead::{Aead as _, KeyInit as _};
use aes_gcm::{Aes256Gcm, Nonce};
use ctr::cipher::{KeyIvInit as _, StreamCipher as _};
use hkdf::Hkdf;
use sha2::Sha256;

/// Returns the plain bytes, or `None` if the stream is not a whole, unchanged one.
pub(crate) fn open(key: &[u8; 32], stream: &[u8]) -> Option<Vec<u8>> {
    let (header, mut rest) = stream.split_at_checked(48)?;
    if &header[..8] != b"SERVSEAL" || header[8..12] != [1, 0, 1, 0] {
        return None;
    }
    let record = u32::from_le_bytes(header[12..16].try_into().unwrap()) as usize;
    let cipher = Aes256Gcm::new(&stream_key(key, header).into());
    let mut plain = Vec::new();
    for number in 0u64.. {
        let last = rest.len() <= record;
        let (sealed, later) = rest.split_at(record.min(rest.len()));
        let mut nonce = [0; 12];
        nonce[3] = last.into();
        nonce[4..].copy_from_slice(&number.to_be_bytes());
        plain.extend(cipher.decrypt(Nonce::from_slice(&nonce), sealed).ok()?);
        rest = later;
        if last {
            break;
        }
    }
    Some(plain)
}

/// The plain bytes of whole records at the begin of a stream of AES-256-GCM.
pub(crate) fn open_begin(key: &[u8; 32], begin: &[u8]) -> Vec<u8> {
    let (header, records) = begin.split_at(begin.len().min(48));
    let mut plain = Vec::new();
    for (number, record) in records.chunks(65_536).enumerate() {
        let cipher = Aes256Gcm::new(&stream_key(key, header).into());
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&(number as u64).to_be_bytes());
        plain.extend(cipher.decrypt(Nonce::from_slice(&nonce), record).expect("a whole record"));
    }
    plain
}

fn stream_key(key: &[u8; 32], header: &[u8]) -> [u8; 32] {
    let mut stream_key = [0; 32];
    Hkdf::<Sha256>::new(Some(&header[16..]), key).expand(&header[..16], &mut stream_key).unwrap();
    stream_key
}

fn header(cipher: u8, record: u32, salt: u8) -> Vec<u8> {
    let start = [&b"SERVSEAL"[..], &[1, 0, cipher, 0], &record.to_le_bytes()].concat();
    [start, vec![salt; 32]].concat()
}

/// A stream of AES-256-GCM.
pub(crate) fn seal(key: &[u8; 32], plain: &[u8]) -> Vec<u8> {
    let mut stream = header(1, 65_536, 7);
    let cipher = Aes256Gcm::new(&stream_key(key, &stream).into());
    let records: Vec<&[u8]> = plain.chunks(65_520).collect();
    let records = if records.is_empty() { vec![&[][..]] } else { records };
    for (number, record) in records.iter().enumerate() {
        let mut nonce = [0; 12];
        nonce[3] = (number + 1 == records.len()).into();
        nonce[4..].copy_from_slice(&(number as u64).to_be_bytes());
        stream.extend(cipher.encrypt(Nonce::from_slice(&nonce), *record).unwrap());
    }
    stream
}

/// A stream of AES-256-CTR.
pub(crate) fn seal_ctr(key: &[u8; 32], plain: &[u8]) -> Vec<u8> {
    let mut stream = header(2, 0, 9);
    let mut cipher = ctr_cipher(key, &stream);
    let mut sealed = plain.to_vec();
    cipher.apply_keystream(&mut sealed);
    stream.extend(sealed);
    stream
}

/// The plain bytes of a stream of AES-256-CTR.
pub(crate) fn open_ctr(key: &[u8; 32], stream: &[u8]) -> Option<Vec<u8>> {
    let (header, sealed) = stream.split_at_checked(48)?;
    if &header[..8] != b"SERVSEAL" || header[8..16] != [1, 0, 2, 0, 0, 0, 0, 0] {
        return None;
    }
    let mut plain = sealed.to_vec();
    ctr_cipher(key, header).apply_keystream(&mut plain);
    Some(plain)
}

fn ctr_cipher(key: &[u8; 32], header: &[u8]) -> ctr::Ctr128BE<aes::Aes256> {
    ctr::Ctr128BE::new(&stream_key(key, header).into(), &[0; 16].into())
}

/// The digest, by other implementations.
pub(crate) fn digest_of(kind: transfer::DigestKind, bytes: &[u8]) -> Vec<u8> {
    use sha2::Digest as _;
    use transfer::DigestKind;
    match kind {
        DigestKind::Md5 => md5::Md5::digest(bytes).to_vec(),
        DigestKind::Sha256 => sha2::Sha256::digest(bytes).to_vec(),
        DigestKind::Crc32c => crc32c::crc32c(bytes).to_be_bytes().to_vec(),
        DigestKind::Sha1 => sha1::Sha1::digest(bytes).to_vec(),
    }
}
