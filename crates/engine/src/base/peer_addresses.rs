//! The addresses of connected clients, for functions and kernels that ask for them.
//!
//! Each worker notes where its connections come from, when they come. Every worker may look: a request may be with another one than its
//! connection. Messages of clients that nothing asks about cost nothing here.
//!
//! A note has six words, each with the connection's generation. Only the owner of the connection writes them. A reader that got the client's
//! message through a ring finds at least the words of its connection; if the key has another connection meanwhile, or gets one just now, the generation of a word
//! differs, and there is no address. So no order among the words is needed.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Connections whose notes are allocated together.
const CHUNK: usize = 256;
/// Connections for which there is room at the start, in bytes 768 KiB: those that come and go allocate nothing.
const ROOM: usize = 16_384;
/// More than a worker can have: the limit of `limits.connections`.
const CONNECTIONS_MAX: usize = 1 << 20;
/// The low half of a word is data, the other one the generation.
const DATA_BITS: u32 = 32;
const DATA: u64 = (1 << DATA_BITS) - 1;

/// The address from its low end on, the scope, and port and family.
type Note = [AtomicU64; 6];

/// Those of one worker, by key.
pub(crate) struct PeerAddresses(Box<[OnceLock<Box<[Note]>>]>);

impl Default for PeerAddresses {
    fn default() -> Self {
        let chunk = |at| match at < ROOM / CHUNK {
            true => OnceLock::from(new_chunk()),
            false => OnceLock::new(),
        };
        Self((0..CONNECTIONS_MAX / CHUNK).map(chunk).collect())
    }
}

impl PeerAddresses {
    /// A connection with this key comes from an address.
    pub(crate) fn set(&self, key: u32, generation: u32, peer: SocketAddr) {
        let Some(chunk) = self.0.get(key as usize / CHUNK) else { return };
        let chunk = chunk.get_or_init(new_chunk);
        let (address, family, scope) = match peer {
            SocketAddr::V4(peer) => (u128::from(peer.ip().to_bits()), 4_u32, 0),
            SocketAddr::V6(peer) => (peer.ip().to_bits(), 6, peer.scope_id()),
        };
        let part = |at: u32| (address >> (32 * at)) as u32;
        let rest = u32::from(peer.port()) << 16 | family;
        let data = [part(0), part(1), part(2), part(3), scope, rest];
        for (word, data) in chunk[key as usize % CHUNK].iter().zip(data) {
            word.store(tag(generation) | u64::from(data), Ordering::Relaxed);
        }
    }

    pub(crate) fn get(&self, key: u32, generation: u32) -> Option<SocketAddr> {
        let chunk = self.0.get(key as usize / CHUNK)?.get()?;
        let words = chunk[key as usize % CHUNK].each_ref().map(|word| word.load(Ordering::Relaxed));
        if words.iter().any(|word| word & !DATA != tag(generation)) {
            return None;
        }
        let [parts @ .., scope, rest] = words.map(|word| word as u32);
        let port = (rest >> 16) as u16;
        match rest as u16 {
            4 => Some((Ipv4Addr::from_bits(parts[0]), port).into()),
            6 => {
                let address = parts.iter().rev().fold(0, |sum, part| sum << 32 | u128::from(*part));
                Some(SocketAddrV6::new(Ipv6Addr::from_bits(address), port, 0, scope).into())
            }
            _ => None,
        }
    }
}

fn new_chunk() -> Box<[Note]> {
    (0..CHUNK).map(|_| Note::default()).collect()
}

fn tag(generation: u32) -> u64 {
    u64::from(generation) << DATA_BITS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_has_its_own_address_until_the_key_has_another() {
        let book = PeerAddresses::default();
        let addresses = [
            "192.0.2.7:80",
            "255.255.255.255:65535",
            "[2001:db8:1:2:3:4:5:6]:443",
            "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535",
            "[fe80::1%4294967295]:1",
            "0.0.0.0:0",
        ];
        let mut generation = 1;
        for key in [0, 255, 256, 100_000, CONNECTIONS_MAX as u32 - 1] {
            assert_eq!(book.get(key, 1), None);
            for text in addresses {
                let address: SocketAddr = text.parse().unwrap();
                generation += 2;
                book.set(key, generation, address);
                assert_eq!(book.get(key, generation), Some(address));
                assert_eq!(book.get(key, generation - 2), None, "the one before");
                assert_eq!(book.get(key, generation + 2), None);
                // Whatever of it has changed: a key is used again more than 65 536 times.
                for bit in 0..32 {
                    assert_eq!(book.get(key, generation ^ 1 << bit), None, "bit {bit}");
                }
            }
        }
        // A key that no worker has.
        book.set(CONNECTIONS_MAX as u32, 1, "192.0.2.7:80".parse().unwrap());
        assert_eq!(book.get(CONNECTIONS_MAX as u32, 1), None);
        assert_eq!(book.get(u32::MAX, 1), None);
    }

    /// A word of the next connection among those of this one: the address is neither.
    #[test]
    fn a_note_that_is_being_written_is_none() {
        let book = PeerAddresses::default();
        book.set(7, 1, "192.0.2.7:80".parse().unwrap());
        for word in 0..6 {
            let other = PeerAddresses::default();
            other.set(7, 3, "[2001:db8::9]:81".parse().unwrap());
            let note = |book: &PeerAddresses| {
                book.0[0].get().unwrap()[7].each_ref().map(|word| word.load(Ordering::Relaxed))
            };
            let mixed = PeerAddresses::default();
            mixed.set(7, 1, "192.0.2.7:80".parse().unwrap());
            mixed.0[0].get().unwrap()[7][word].store(note(&other)[word], Ordering::Relaxed);
            assert_eq!((mixed.get(7, 1), mixed.get(7, 3)), (None, None));
        }
    }
}
