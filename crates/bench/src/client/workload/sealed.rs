//! Sealed numbers for `examples/10_secure_multiply`, whose `sealed.h` has the messages.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use aes_gcm::aead::AeadInPlace as _;
use aes_gcm::{Aes256Gcm, KeyInit as _, Nonce, Tag};

use super::Workload;

const NONCE_BYTES: usize = 12;
const TAG_BYTES: usize = 16;
const PRODUCT_BYTES: usize = 8;
/// Senders that a server distinguishes.
const SENDERS: u32 = 1024;
/// In the number of a sender: the nonce of an answer.
const ANSWERS: u32 = 0x8000_0000;

/// Two numbers in a request; the correct answer is their product. Both travel encrypted and authenticated.
pub struct Sealed {
    cipher: Aes256Gcm,
    sender: u32,
    /// Counter of request 0. A server answers each counter of a sender once.
    first: u64,
}

impl Sealed {
    /// Length of a request.
    pub const REQUEST_BYTES: usize = NONCE_BYTES + 2 * 4 + TAG_BYTES;
    /// Length of an answer.
    pub const REPLY_BYTES: usize = NONCE_BYTES + PRODUCT_BYTES + TAG_BYTES;
    /// The key of measurements, that of `benches/secure/bench.key`.
    pub const KEY: [u8; 32] = {
        let mut key = [0; 32];
        let mut at = 0;
        while at < key.len() {
            key[at] = at as u8;
            at += 1;
        }
        key
    };

    /// A sender of its own, whose counters begin at the clock: no server has seen them.
    pub fn new() -> Self {
        Self::with_key(Self::KEY)
    }

    /// The same with another key.
    pub fn with_key(key: [u8; 32]) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            cipher: Aes256Gcm::new(&key.into()),
            sender: NEXT.fetch_add(1, Ordering::Relaxed) % SENDERS,
            first: since.as_nanos() as u64,
        }
    }

    fn nonce(&self, index: u64, direction: u32) -> [u8; NONCE_BYTES] {
        let mut nonce = [0; NONCE_BYTES];
        nonce[..4].copy_from_slice(&(self.sender | direction).to_le_bytes());
        nonce[4..].copy_from_slice(&self.first.wrapping_add(index).to_le_bytes());
        nonce
    }

    fn numbers(index: u64) -> [u32; 2] {
        let mixed = index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        [mixed as u32, (mixed >> 32) as u32]
    }
}

impl Default for Sealed {
    fn default() -> Self {
        Self::new()
    }
}

impl Workload for Sealed {
    fn request(&mut self, index: u64, into: &mut Vec<u8>) {
        let nonce = self.nonce(index, 0);
        let mut text = [0; 8];
        for (number, at) in Self::numbers(index).iter().zip(text.chunks_exact_mut(4)) {
            at.copy_from_slice(&number.to_le_bytes());
        }
        let sealed =
            self.cipher.encrypt_in_place_detached(Nonce::from_slice(&nonce), b"", &mut text);
        into.extend_from_slice(&nonce);
        into.extend_from_slice(&text);
        into.extend_from_slice(&sealed.expect("a message of 8 bytes can be sealed"));
    }

    fn accepts(&mut self, index: u64, reply: &[u8]) -> bool {
        let nonce = self.nonce(index, ANSWERS);
        if reply.len() != Self::REPLY_BYTES || reply[..NONCE_BYTES] != nonce {
            return false;
        }
        let (text, tag) = reply[NONCE_BYTES..].split_at(PRODUCT_BYTES);
        let mut product = [0; PRODUCT_BYTES];
        product.copy_from_slice(text);
        let (nonce, tag) = (Nonce::from_slice(&nonce), Tag::from_slice(tag));
        let opened = self.cipher.decrypt_in_place_detached(nonce, b"", &mut product, tag);
        let [a, b] = Self::numbers(index);
        opened.is_ok() && u64::from_le_bytes(product) == u64::from(a) * u64::from(b)
    }

    fn has_identity(&self) -> bool {
        true
    }

    fn identify(&self, reply: &[u8]) -> Option<u64> {
        let counter = reply.get(4..)?.first_chunk()?;
        Some(u64::from_le_bytes(*counter).wrapping_sub(self.first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The answer of a server with the key.
    fn answer(sealed: &Sealed, request: &[u8]) -> Vec<u8> {
        let (nonce, rest) = request.split_at(NONCE_BYTES);
        let (text, tag) = rest.split_at(8);
        let mut text = text.to_vec();
        let (nonce_in, tag) = (Nonce::from_slice(nonce), Tag::from_slice(tag));
        sealed.cipher.decrypt_in_place_detached(nonce_in, b"", &mut text, tag).unwrap();
        let number = |at: usize| u64::from(u32::from_le_bytes(*text[at..].first_chunk().unwrap()));
        let mut product = (number(0) * number(4)).to_le_bytes();
        let mut nonce = nonce.to_vec();
        nonce[3] |= 0x80;
        let tag =
            sealed.cipher.encrypt_in_place_detached(Nonce::from_slice(&nonce), b"", &mut product);
        [&nonce[..], &product, &tag.unwrap()].concat()
    }

    #[test]
    fn the_answer_is_the_sealed_product_and_identifies_the_request() {
        let mut sealed = Sealed::new();
        for index in [0, 1, 7, 1 << 40] {
            let mut request = Vec::new();
            sealed.request(index, &mut request);
            assert_eq!(request.len(), Sealed::REQUEST_BYTES);
            let mut reply = answer(&sealed, &request);
            super::super::tests::identity_survives(&mut sealed, index, &reply);
            assert!(!sealed.accepts(index, &request), "a request is no answer");
            for at in 0..reply.len() {
                reply[at] ^= 1;
                assert!(!sealed.accepts(index, &reply), "byte {at} was changed");
                reply[at] ^= 1;
            }
        }
    }

    #[test]
    fn no_two_senders_of_a_process_share_a_nonce() {
        let (a, b) = (Sealed::new(), Sealed::new());
        assert_ne!(a.nonce(0, 0), b.nonce(0, 0));
        assert_ne!(a.nonce(0, 0), a.nonce(0, ANSWERS));
    }
}
