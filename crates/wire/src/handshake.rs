//! The handshake between a shared-memory client and an engine: one message each way over a local socket.
//!
//! The client connects to the port's path (a Unix socket of type `SOCK_SEQPACKET`) and sends a [`Hello`]. The engine
//! answers with an [`Answer`]: either three descriptors and the limits of the client, or the reason of the refusal in
//! one sentence. The descriptors are, in this order, the client's region (a sealed memfd), the bell that wakes the
//! engine (an eventfd, rung by adding to it) and the bell that wakes the client (an end of a stream socket on which
//! every ring is a byte; non-blocking). Afterwards the socket is unused: its end is the end of the connection, for
//! both sides. An engine that disconnects the client sends the reason before, in the format of a refusal.
//!
//! Numbers are little endian. A different version is refused; the text of a refusal can be read by every version.
//!
//! ```text
//! Hello   0 magic u64 | 8 version u32 | 12 region ABI version u32 | 16 depth u32 | 20 zero u32
//! Answer  0 magic u64 | 8 version u32 | 12 code u32 | 16 depth u32 | 20 request bytes max u32
//!         | 24 reply bytes max u32 | 28 flags u32 | 32 text, to the end of the message
//! ```

/// First eight bytes of every message: "SERVALSM".
pub const MAGIC: u64 = u64::from_le_bytes(*b"SERVALSM");
/// Version of the handshake and of the content of the rings. A new [`crate::DropReason`] does not need a new version:
/// clients know reasons by stable codes.
pub const VERSION: u32 = 3;
/// Bytes of a [`Hello`].
pub const HELLO_BYTES: usize = 24;
/// Maximum length of an [`Answer`].
pub const ANSWER_BYTES_MAX: usize = 512;
/// Descriptors of an answer that accepts: region, engine's bell, client's bell.
pub const DESCRIPTORS: usize = 3;
/// Slots of a client's rings if it requests 0.
pub const DEPTH_DEFAULT: u32 = 1024;

const TEXT_AT: usize = 32;
const ACCEPTED: u32 = 0;
const REFUSED: u32 = 1;
/// Every request gets an outcome.
const FLAG_ANSWERS: u32 = 1;

/// The request of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The client's [`VERSION`].
    pub version: u32,
    /// Version of the region layout that it supports.
    pub abi_version: u32,
    /// Requested slots of each ring, 0 for [`DEPTH_DEFAULT`]. The client gets the next power of two, or less if
    /// messages are long.
    pub depth: u32,
}

/// The answer of the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Accepted; sent with the descriptors.
    Accepted(Terms),
    /// Refused, with the reason.
    Refused(String),
}

/// The limits of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Slots of each ring; also the maximum number of requests in flight.
    pub depth: u32,
    /// Longest request in bytes.
    pub request_bytes_max: u32,
    /// Longest reply in bytes.
    pub reply_bytes_max: u32,
    /// Whether requests get outcomes: a reply, or the reason of the loss.
    pub answers: bool,
}

/// Why bytes are not a message of the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// Too short, or of another protocol.
    #[error("the other side does not speak Serval's shared-memory handshake")]
    Foreign,
    /// Another version.
    #[error(
        "the other side speaks version {0} of the shared-memory handshake, this one {VERSION}: use matching builds"
    )]
    Version(u32),
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn begins(bytes: &[u8], least: usize) -> bool {
    bytes.len() >= least && bytes[..8] == MAGIC.to_le_bytes()
}

impl Hello {
    /// Encodes the message.
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.version.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.abi_version.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.depth.to_le_bytes());
        bytes
    }

    /// Decodes a message of this version.
    pub fn decode(bytes: &[u8]) -> Result<Self, HandshakeError> {
        // A later version may be longer; it is refused because of its version.
        if !begins(bytes, HELLO_BYTES) {
            return Err(HandshakeError::Foreign);
        }
        let hello = Self {
            version: u32_at(bytes, 8),
            abi_version: u32_at(bytes, 12),
            depth: u32_at(bytes, 16),
        };
        match (hello.version, bytes.len()) {
            (VERSION, HELLO_BYTES) => Ok(hello),
            (VERSION, _) => Err(HandshakeError::Foreign),
            (version, _) => Err(HandshakeError::Version(version)),
        }
    }
}

impl Answer {
    /// Encodes the message; a text that is too long is truncated.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; TEXT_AT];
        bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        match self {
            Self::Accepted(terms) => {
                let flags = if terms.answers { FLAG_ANSWERS } else { 0 };
                let words =
                    [ACCEPTED, terms.depth, terms.request_bytes_max, terms.reply_bytes_max, flags];
                for (index, word) in words.into_iter().enumerate() {
                    bytes[12 + 4 * index..][..4].copy_from_slice(&word.to_le_bytes());
                }
            }
            Self::Refused(text) => {
                bytes[12..16].copy_from_slice(&REFUSED.to_le_bytes());
                let most = ANSWER_BYTES_MAX - TEXT_AT;
                let end = (0..=text.len().min(most)).rev().find(|at| text.is_char_boundary(*at));
                bytes.extend_from_slice(&text.as_bytes()[..end.unwrap_or(0)]);
            }
        }
        bytes
    }

    /// Decodes a message.
    pub fn decode(bytes: &[u8]) -> Result<Self, HandshakeError> {
        if !begins(bytes, TEXT_AT) {
            return Err(HandshakeError::Foreign);
        }
        let version = u32_at(bytes, 8);
        match u32_at(bytes, 12) {
            ACCEPTED if version == VERSION => Ok(Self::Accepted(Terms {
                depth: u32_at(bytes, 16),
                request_bytes_max: u32_at(bytes, 20),
                reply_bytes_max: u32_at(bytes, 24),
                answers: u32_at(bytes, 28) & FLAG_ANSWERS != 0,
            })),
            REFUSED => Ok(Self::Refused(String::from_utf8_lossy(&bytes[TEXT_AT..]).into_owned())),
            _ if version != VERSION => Err(HandshakeError::Version(version)),
            _ => Err(HandshakeError::Foreign),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_round_trip() {
        let hello = Hello { version: VERSION, abi_version: 7, depth: 256 };
        assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
        let terms =
            Terms { depth: 64, request_bytes_max: 1, reply_bytes_max: u32::MAX, answers: true };
        for answers in [false, true] {
            let answer = Answer::Accepted(Terms { answers, ..terms });
            assert_eq!(Answer::decode(&answer.encode()), Ok(answer));
        }
        let answer = Answer::Refused("no room: raise limits.connections".into());
        assert_eq!(Answer::decode(&answer.encode()), Ok(answer));
    }

    #[test]
    fn a_long_refusal_is_truncated_between_characters() {
        let bytes = Answer::Refused("a".to_owned() + &"\u{e9}".repeat(400)).encode();
        assert!(bytes.len() <= ANSWER_BYTES_MAX);
        let Ok(Answer::Refused(text)) = Answer::decode(&bytes) else { panic!("a refusal") };
        assert!(text.ends_with('\u{e9}') && text.len() > 400);
    }

    #[test]
    fn other_protocols_and_versions_are_distinguished() {
        let mut hello = Hello { version: VERSION, abi_version: 1, depth: 0 }.encode();
        assert_eq!(Hello::decode(&hello[..23]), Err(HandshakeError::Foreign));
        assert_eq!(Hello::decode(b""), Err(HandshakeError::Foreign));
        assert_eq!(Hello::decode(&[&hello[..], b"x"].concat()), Err(HandshakeError::Foreign));
        hello[8] = 9;
        assert_eq!(Hello::decode(&hello), Err(HandshakeError::Version(9)));
        hello[0] = b'x';
        assert_eq!(Hello::decode(&hello), Err(HandshakeError::Foreign));

        let refused = Answer::Refused("old".into());
        let mut bytes = refused.encode();
        bytes[8] = 9;
        assert_eq!(Answer::decode(&bytes), Ok(refused), "every version reads a refusal");
        bytes[12] = 0;
        assert_eq!(Answer::decode(&bytes), Err(HandshakeError::Version(9)));
        assert_eq!(Answer::decode(&bytes[..31]), Err(HandshakeError::Foreign));
    }
}
