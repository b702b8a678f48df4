//! Opens sealed streams with other implementations of AES-GCM and HKDF than the crate under test.

use aes_gcm::aead::{Aead as _, KeyInit as _};
use aes_gcm::{Aes256Gcm, Nonce};
use hkdf::Hkdf;
use sha2::Sha256;

/// Returns the plain bytes, or `None` if the stream is not a whole, unchanged one.
pub(crate) fn open(key: &[u8; 32], stream: &[u8]) -> Option<Vec<u8>> {
    let (header, mut rest) = stream.split_at_checked(48)?;
    if &header[..8] != b"SERVSEAL" || header[8..12] != [1, 0, 1, 0] {
        return None;
    }
    let record = u32::from_le_bytes(header[12..16].try_into().unwrap()) as usize;
    let mut stream_key = [0; 32];
    Hkdf::<Sha256>::new(Some(&header[16..]), key).expand(&header[..16], &mut stream_key).unwrap();
    let cipher = Aes256Gcm::new(&stream_key.into());
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
