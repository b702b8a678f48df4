//! Puts the address of its client in front of each request, for kernels: they get bytes, and nothing but bytes.
//!
//! | bytes | what |
//! |---|---|
//! | 0 to 15 | the address in network byte order; of IPv4 the first four bytes, then zeros |
//! | 16, 17 | the port, least significant byte first |
//! | 18, 19 | the family: 4 or 6; 0: unknown, as over shared memory, or if the connection has ended |
//! | 20 to 31 | zeros |
//! | from 32 on | the request |

use std::net::SocketAddr;

use wire::DropReason;

use onpath::Messages;
use onpath::{Direction, Failure, Function};

/// Bytes in front of each request; a multiple of 16, so that the request is aligned as it would be without them.
pub const PEER_BYTES: usize = 32;

/// See the module's text. It has no registers.
#[derive(Default)]
pub struct PeerAddress;

impl Function for PeerAddress {
    fn decide(&mut self, direction: Direction, messages: &mut Messages) -> Result<(), Failure> {
        if direction == Direction::Replies {
            return Ok(());
        }
        for index in 0..messages.len() {
            if !messages.is_open(index) {
                continue;
            }
            let len = PEER_BYTES + messages.bytes(index).len();
            if len > messages.written_max() {
                messages.drop(index, DropReason::TooLong);
                continue;
            }
            let head = head(messages.peer(index));
            messages.rewrite_with(index, len, |request, into| {
                into[..PEER_BYTES].copy_from_slice(&head);
                into[PEER_BYTES..].copy_from_slice(request);
            });
        }
        Ok(())
    }
}

fn head(peer: Option<SocketAddr>) -> [u8; PEER_BYTES] {
    let mut head = [0; PEER_BYTES];
    let Some(peer) = peer else { return head };
    match peer {
        SocketAddr::V4(peer) => head[..4].copy_from_slice(&peer.ip().octets()),
        SocketAddr::V6(peer) => head[..16].copy_from_slice(&peer.ip().octets()),
    }
    head[16..18].copy_from_slice(&peer.port().to_le_bytes());
    head[18] = if peer.is_ipv4() { 4 } else { 6 };
    head
}
