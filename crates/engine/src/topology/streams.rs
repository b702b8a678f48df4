//! Proxies that pass byte streams on.

use wire::framing::Delimits;

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

    /// Whether it is a proxy that passes the bytes of TCP connections on, without messages in them.
    pub fn relays_streams(&self) -> bool {
        self.upstream.is_some() && self.framing.delimits() == Delimits::Nothing
    }
}
