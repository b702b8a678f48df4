//! What functions of a service can see, and on which workers.

use wire::framing::Delimits;
use wire::nic::Transport;

use super::Service;

/// The longest chunk of a byte stream that a proxy passes on, which functions see as one message.
pub const CHUNK_BYTES: usize = 64 << 10;

impl Service {
    /// How long its messages are, for functions.
    pub fn message_sizes(&self) -> onpath::Sizes {
        let chunk = if self.relays_streams() { CHUNK_BYTES } else { 0 };
        onpath::Sizes {
            message_bytes: chunk.max(self.max_message_bytes as usize),
            reply_bytes: chunk.max(self.max_reply_bytes as usize),
        }
    }

    /// Whether its requests reach the worker that has the state of its functions. The connection of a client to a server belongs to the worker that
    /// has the client's.
    pub fn hands_over_for_functions(&self) -> bool {
        let streams = self.listen.iter().any(|listen| listen.transport == Transport::Tcp);
        self.upstream.is_none() || !streams
    }

    /// Whether it is a proxy that passes the bytes of TCP connections on, without messages in them.
    pub fn relays_streams(&self) -> bool {
        self.upstream.is_some() && self.framing.delimits() == Delimits::Nothing
    }
}
