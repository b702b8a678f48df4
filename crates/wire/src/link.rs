//! The protocol of a link: a TCP connection between an engine and an accelerator on another machine, over which the
//! rings of one region are mirrored. Without I/O and without cryptography.
//!
//! The engine's side connects. Both sides prove that they know the same secret, and send nothing else before:
//!
//! ```text
//! engine                                        accelerator
//!    | Hello: nonce, key                             |
//!    |---------------------------------------------->|
//!    |                         Challenge: nonce, key |   or Refuse: one sentence, at any step
//!    |<----------------------------------------------|
//!    | Proof: MAC of both messages                   |
//!    |---------------------------------------------->|
//!    |    Welcome: MAC of both messages and the proof|
//!    |<----------------------------------------------|
//! ```
//!
//! The keys are ephemeral X25519 keys. A greeting is magic u64, version u32, code u16, length of the body u16, body.
//! The text of a refusal can be read by every version.
//!
//! Afterwards both sides send *records*: the length of the rest (u32), then frames encrypted with AES-256-GCM, whose
//! additional data is the length and whose nonce is the number of the record. A frame may begin in one record and end
//! in a later one. [`Frame`] describes the frames. All numbers are little endian.
//!
//! The engine sends an offer of the [attach protocol](crate::attach) and a [`Shape`], before them the digest of the kernel's file if the
//! kernel is in one; the accelerator answers with Ready or Bye. From then on every ring has the same geometry on both sides and contains the same messages in the same
//! order. A slot is released in the producer's region only when it was released in the consumer's, so a peer that sends
//! a message for which no slot is free breaks the protocol. Either side ends the link with Bye.

use crate::attach;

/// First eight bytes of every greeting: "SERVALLK".
pub const MAGIC: u64 = u64::from_le_bytes(*b"SERVALLK");
/// Version of the protocol: raised with every change of greetings, records or frames. Since version 2 there is the digest of a
/// kernel's file.
pub const VERSION: u32 = 2;
/// Bytes of a greeting without its body.
pub const GREETING_HEAD_BYTES: usize = 16;
/// Longest body of a greeting.
pub const GREETING_BODY_BYTES_MAX: usize = 512;
/// Bytes of nonces, public keys and MACs.
pub const PROOF_BYTES: usize = 32;
/// Longest plain text of a record.
pub const RECORD_BYTES_MAX: usize = 65_536;
/// Bytes that encryption adds to a record.
pub const TAG_BYTES: usize = 16;
/// Bytes of the digest of a kernel's file.
pub const DIGEST_BYTES: usize = 32;
/// Most kinds of mqueues of a block: the server mqueue and one for each backend.
pub const MQUEUES_OF_BLOCK_MAX: usize = 64;
/// Longest payload of a message; that of the region ABI.
pub const PAYLOAD_BYTES_MAX: usize = 8 << 20;

const HELLO: u16 = 1;
const CHALLENGE: u16 = 2;
const PROOF: u16 = 3;
const WELCOME: u16 = 4;
const REFUSE: u16 = 5;

/// Why bytes are not part of this protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// Of another protocol.
    #[error("the other side does not speak Serval's link protocol")]
    Foreign,
    /// Another version.
    #[error(
        "the other side speaks version {0} of the link protocol, this one {VERSION}: use matching builds"
    )]
    Version(u32),
    /// An invalid field.
    #[error("invalid message of the link protocol: {0}")]
    Impossible(&'static str),
}

/// A message before the link is authenticated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Greeting {
    /// Of the engine: nonce and public key.
    Hello([u8; PROOF_BYTES], [u8; PROOF_BYTES]),
    /// Of the accelerator: nonce and public key.
    Challenge([u8; PROOF_BYTES], [u8; PROOF_BYTES]),
    /// Of the engine: its MAC.
    Proof([u8; PROOF_BYTES]),
    /// Of the accelerator: its MAC.
    Welcome([u8; PROOF_BYTES]),
    /// The reason, one sentence.
    Refuse(String),
}

impl Greeting {
    /// Encodes the message; a text that is too long is truncated.
    pub fn encode(&self) -> Vec<u8> {
        let (code, body) = match self {
            Self::Hello(nonce, key) => (HELLO, [*nonce, *key].concat()),
            Self::Challenge(nonce, key) => (CHALLENGE, [*nonce, *key].concat()),
            Self::Proof(mac) => (PROOF, mac.to_vec()),
            Self::Welcome(mac) => (WELCOME, mac.to_vec()),
            Self::Refuse(text) => {
                (REFUSE, { attach::truncated(text, GREETING_BODY_BYTES_MAX).as_bytes().to_vec() })
            }
        };
        let mut bytes = Vec::with_capacity(GREETING_HEAD_BYTES + body.len());
        bytes.extend_from_slice(&MAGIC.to_le_bytes());
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&code.to_le_bytes());
        bytes.extend_from_slice(&(body.len() as u16).to_le_bytes());
        bytes.extend_from_slice(&body);
        bytes
    }

    /// Decodes the first greeting in `bytes` and returns its length; `None`: it is not complete yet. Bytes of
    /// another protocol or version are refused as soon as they can be recognised.
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, LinkError> {
        let magic = MAGIC.to_le_bytes();
        let known = bytes.len().min(magic.len());
        if bytes[..known] != magic[..known] {
            return Err(LinkError::Foreign);
        }
        let Some((head, rest)) = bytes.split_first_chunk::<GREETING_HEAD_BYTES>() else {
            return Ok(None);
        };
        let mut fields = Fields(&head[8..]);
        let (version, code) = (fields.u32()?, fields.u16()?);
        let len = usize::from(fields.u16()?);
        if version != VERSION && code != REFUSE {
            return Err(LinkError::Version(version));
        }
        if len > GREETING_BODY_BYTES_MAX {
            return Err(LinkError::Impossible("a greeting is too long"));
        }
        let Some(body) = rest.get(..len) else { return Ok(None) };
        let mut fields = Fields(body);
        let greeting = match code {
            HELLO => Self::Hello(fields.proof()?, fields.proof()?),
            CHALLENGE => Self::Challenge(fields.proof()?, fields.proof()?),
            PROOF => Self::Proof(fields.proof()?),
            WELCOME => Self::Welcome(fields.proof()?),
            REFUSE => {
                let text = attach::plain(&String::from_utf8_lossy(body));
                return Ok(Some((Self::Refuse(text), GREETING_HEAD_BYTES + len)));
            }
            _ => return Err(LinkError::Impossible("an unknown greeting")),
        };
        fields.end()?;
        Ok(Some((greeting, GREETING_HEAD_BYTES + len)))
    }
}

/// The header of a message of a ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MessageHead {
    /// Number of the mqueue: block number times mqueues of a block, plus the number in the block.
    pub mqueue: u32,
    /// As in the slot's header.
    pub token: u64,
    /// As in the slot's header.
    pub tag: u64,
    /// As in the slot's header; 0: the header in the ring was invalid.
    pub kind: u8,
    /// As in the slot's header.
    pub status: u8,
}

/// The message format of one ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingShape {
    /// The protocol in the region.
    pub protocol: u8,
    /// Longest payload.
    pub message_bytes_max: u32,
    /// Bytes of the arena.
    pub arena_bytes: u64,
}

/// One mqueue of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MqueueShape {
    /// Slots of each ring.
    pub depth: u32,
    /// The RX and the TX ring.
    pub rings: [RingShape; 2],
}

/// The rings of a region whose blocks have the same mqueues. Neither side believes the numbers: they are checked as a
/// plan of a region is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Number of blocks.
    pub blocks: u32,
    /// The server mqueue, then the client mqueues; in [1, [`MQUEUES_OF_BLOCK_MAX`]].
    pub mqueues: Vec<MqueueShape>,
}

/// What is sent over an authenticated link: length of the body u32, code u8, kind u8, status u8, zero u8, body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    /// A message of the attach protocol. Body: the message.
    Attach(&'a [u8]),
    /// Follows an offer. Body: the shape of the region.
    Shape(Shape),
    /// A message of a ring. Body: mqueue u32, token u64, tag u64, payload.
    Message(MessageHead, &'a [u8]),
    /// The receiver of an mqueue's messages has released this many of them. Body: mqueue u32, count u64.
    Released(u32, u64),
    /// The engine's stop word. Body: u32.
    Stop(u32),
    /// A heartbeat: a number that the receiver sends back if it is the accelerator's side. Body: u64.
    Beat(u64),
    /// Precedes an offer whose kernel is in a file. Body: the SHA-256 digest of the file.
    Kernel([u8; DIGEST_BYTES]),
}

const ATTACH: u8 = 1;
const SHAPE: u8 = 2;
const MESSAGE: u8 = 3;
const RELEASED: u8 = 4;
const STOP: u8 = 5;
const BEAT: u8 = 6;
const KERNEL: u8 = 7;

/// Bytes of a frame before its body.
pub const FRAME_HEAD_BYTES: usize = 8;
/// Bytes of a message frame before the payload.
pub const MESSAGE_HEAD_BYTES: usize = FRAME_HEAD_BYTES + MESSAGE_FIELDS_BYTES;
const MESSAGE_FIELDS_BYTES: usize = 20;

fn frame_head(into: &mut Vec<u8>, code: u8, len: usize) {
    into.extend_from_slice(&(len as u32).to_le_bytes());
    into.extend_from_slice(&[code, 0, 0, 0]);
}

/// Appends the frame of a message with a payload of `len` bytes, which the caller fills.
pub fn begin_message<'a>(into: &'a mut Vec<u8>, head: &MessageHead, len: usize) -> &'a mut [u8] {
    into.extend_from_slice(&((MESSAGE_FIELDS_BYTES + len) as u32).to_le_bytes());
    into.extend_from_slice(&[MESSAGE, head.kind, head.status, 0]);
    into.extend_from_slice(&head.mqueue.to_le_bytes());
    into.extend_from_slice(&head.token.to_le_bytes());
    into.extend_from_slice(&head.tag.to_le_bytes());
    let at = into.len();
    into.resize(at + len, 0);
    &mut into[at..]
}

impl<'a> Frame<'a> {
    /// Appends the frame.
    pub fn encode(&self, into: &mut Vec<u8>) {
        match self {
            Self::Attach(message) => {
                frame_head(into, ATTACH, message.len());
                into.extend_from_slice(message);
            }
            Self::Shape(shape) => {
                frame_head(into, SHAPE, 8 + 36 * shape.mqueues.len());
                for word in [shape.blocks, shape.mqueues.len() as u32] {
                    into.extend_from_slice(&word.to_le_bytes());
                }
                for mqueue in &shape.mqueues {
                    into.extend_from_slice(&mqueue.depth.to_le_bytes());
                    for ring in &mqueue.rings {
                        into.extend_from_slice(&u32::from(ring.protocol).to_le_bytes());
                        into.extend_from_slice(&ring.message_bytes_max.to_le_bytes());
                        into.extend_from_slice(&ring.arena_bytes.to_le_bytes());
                    }
                }
            }
            Self::Message(head, payload) => {
                begin_message(into, head, payload.len()).copy_from_slice(payload);
            }
            Self::Released(mqueue, count) => {
                frame_head(into, RELEASED, 12);
                into.extend_from_slice(&mqueue.to_le_bytes());
                into.extend_from_slice(&count.to_le_bytes());
            }
            Self::Stop(stop) => {
                frame_head(into, STOP, 4);
                into.extend_from_slice(&stop.to_le_bytes());
            }
            Self::Beat(heartbeat) => {
                frame_head(into, BEAT, 8);
                into.extend_from_slice(&heartbeat.to_le_bytes());
            }
            Self::Kernel(digest) => {
                frame_head(into, KERNEL, DIGEST_BYTES);
                into.extend_from_slice(digest);
            }
        }
    }

    /// Decodes the first frame in `bytes` and returns its length; `None`: it is not complete yet. A length that no
    /// such frame can have is refused before its body has arrived.
    pub fn decode(bytes: &'a [u8]) -> Result<Option<(Self, usize)>, LinkError> {
        let Some((head, rest)) = bytes.split_first_chunk::<FRAME_HEAD_BYTES>() else {
            return Ok(None);
        };
        let [a, b, c, d, code, kind, status, zero] = *head;
        let len = u32::from_le_bytes([a, b, c, d]) as usize;
        let allowed = match code {
            ATTACH => 1..=attach::MESSAGE_BYTES_MAX,
            SHAPE => 8 + 36..=8 + 36 * MQUEUES_OF_BLOCK_MAX,
            MESSAGE => MESSAGE_FIELDS_BYTES..=MESSAGE_FIELDS_BYTES + PAYLOAD_BYTES_MAX,
            RELEASED => 12..=12,
            STOP => 4..=4,
            BEAT => 8..=8,
            KERNEL => DIGEST_BYTES..=DIGEST_BYTES,
            _ => return Err(LinkError::Impossible("an unknown frame")),
        };
        if !allowed.contains(&len) {
            return Err(LinkError::Impossible("a frame of an impossible length"));
        }
        if zero != 0 || (code != MESSAGE && (kind, status) != (0, 0)) {
            return Err(LinkError::Impossible("a reserved byte is not zero"));
        }
        let Some(body) = rest.get(..len) else { return Ok(None) };
        let mut fields = Fields(body);
        let frame = match code {
            ATTACH => Self::Attach(body),
            SHAPE => Self::Shape(fields.shape()?),
            MESSAGE => {
                let (mqueue, token, tag) = (fields.u32()?, fields.u64()?, fields.u64()?);
                Self::Message(MessageHead { mqueue, token, tag, kind, status }, fields.0)
            }
            RELEASED => Self::Released(fields.u32()?, fields.u64()?),
            STOP => Self::Stop(fields.u32()?),
            KERNEL => Self::Kernel(fields.take()?),
            _ => Self::Beat(fields.u64()?),
        };
        Ok(Some((frame, FRAME_HEAD_BYTES + len)))
    }
}

/// The length of the first record in `bytes`, which includes the length itself; `None`: it has not arrived.
pub fn record_bytes(bytes: &[u8]) -> Result<Option<usize>, LinkError> {
    let Some((len, _)) = bytes.split_first_chunk::<4>() else { return Ok(None) };
    let len = u32::from_le_bytes(*len) as usize;
    if !(TAG_BYTES + 1..=TAG_BYTES + RECORD_BYTES_MAX).contains(&len) {
        return Err(LinkError::Impossible("a record of an impossible length"));
    }
    Ok(Some(4 + len))
}

/// The rest of a body.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], LinkError> {
        let (taken, rest) =
            self.0.split_first_chunk::<N>().ok_or(LinkError::Impossible("it is too short"))?;
        self.0 = rest;
        Ok(*taken)
    }

    fn u16(&mut self) -> Result<u16, LinkError> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, LinkError> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, LinkError> {
        self.take().map(u64::from_le_bytes)
    }

    fn proof(&mut self) -> Result<[u8; PROOF_BYTES], LinkError> {
        self.take()
    }

    fn shape(&mut self) -> Result<Shape, LinkError> {
        let (blocks, count) = (self.u32()?, self.u32()? as usize);
        if self.0.len() != 36 * count {
            return Err(LinkError::Impossible("the number of mqueues"));
        }
        let mut mqueues = Vec::with_capacity(count);
        for _ in 0..count {
            let depth = self.u32()?;
            let mut ring = || {
                let protocol = self.u32()?;
                let protocol =
                    protocol.try_into().map_err(|_| LinkError::Impossible("a ring's protocol"))?;
                let (message_bytes_max, arena_bytes) = (self.u32()?, self.u64()?);
                Ok(RingShape { protocol, message_bytes_max, arena_bytes })
            };
            mqueues.push(MqueueShape { depth, rings: [ring()?, ring()?] });
        }
        Ok(Shape { blocks, mqueues })
    }

    fn end(self) -> Result<(), LinkError> {
        if self.0.is_empty() { Ok(()) } else { Err(LinkError::Impossible("it is too long")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shape() -> impl Strategy<Value = Shape> {
        let ring = (any::<u8>(), any::<u32>(), any::<u64>()).prop_map(
            |(protocol, message_bytes_max, arena_bytes)| RingShape {
                protocol,
                message_bytes_max,
                arena_bytes,
            },
        );
        let mqueue = (any::<u32>(), [ring.clone(), ring])
            .prop_map(|(depth, rings)| MqueueShape { depth, rings });
        (any::<u32>(), prop::collection::vec(mqueue, 1..=MQUEUES_OF_BLOCK_MAX))
            .prop_map(|(blocks, mqueues)| Shape { blocks, mqueues })
    }

    proptest! {
        #[test]
        fn frames_survive_any_split(
            shape in shape(),
            payload in prop::collection::vec(any::<u8>(), 0..300),
            numbers in any::<(u32, u64, u64, u8, u8)>(),
            cut in any::<prop::sample::Index>(),
        ) {
            let (mqueue, token, tag, kind, status) = numbers;
            let head = MessageHead { mqueue, token, tag, kind, status };
            let frames = [
                Frame::Attach(b"offer"),
                Frame::Shape(shape),
                Frame::Message(head, &payload),
                Frame::Released(mqueue, token),
                Frame::Stop(mqueue),
                Frame::Beat(tag),
                Frame::Kernel([kind; DIGEST_BYTES]),
            ];
            let mut bytes = Vec::new();
            frames.iter().for_each(|frame| frame.encode(&mut bytes));
            let arrived = cut.index(bytes.len() + 1);
            let (mut at, mut found) = (0, 0);
            for end in [arrived, bytes.len()] {
                while let Some((frame, len)) = Frame::decode(&bytes[at..end]).unwrap() {
                    prop_assert_eq!(&frame, &frames[found]);
                    at += len;
                    found += 1;
                }
            }
            prop_assert_eq!((at, found), (bytes.len(), frames.len()));
        }

        #[test]
        fn any_bytes_are_an_error_or_a_prefix(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Greeting::decode(&bytes);
            let _ = record_bytes(&bytes);
            if let Ok(Some((_, len))) = Frame::decode(&bytes) {
                prop_assert!(len <= bytes.len());
            }
        }
    }

    #[test]
    fn greetings_of_others_are_recognised_by_their_first_bytes() {
        assert_eq!(Greeting::decode(b"GET / HTTP"), Err(LinkError::Foreign));
        assert_eq!(Greeting::decode(b"SERVAL"), Ok(None));
        let mut other = Greeting::Hello([1; 32], [2; 32]).encode();
        other[8] = 7;
        assert_eq!(Greeting::decode(&other[..16]), Err(LinkError::Version(7)));
        let mut refusal = Greeting::Refuse("no\nway".into()).encode();
        refusal[8] = 7;
        let refused = Greeting::Refuse("no?way".into());
        assert_eq!(Greeting::decode(&refusal), Ok(Some((refused, refusal.len()))));
    }

    /// A build that does not know a frame takes it for damage, so both sides must have learnt of it before.
    #[test]
    fn another_frame_is_another_version() {
        let is_known = |code: &u8| {
            let mut bytes = Vec::new();
            frame_head(&mut bytes, *code, 0);
            Frame::decode(&bytes) != Err(LinkError::Impossible("an unknown frame"))
        };
        let known: Vec<u8> = (0..=u8::MAX).filter(is_known).collect();
        assert_eq!((VERSION, known), (2, (ATTACH..=KERNEL).collect()), "raise VERSION");
    }

    #[test]
    fn lengths_that_nothing_can_have_are_refused_before_the_body_arrives() {
        for (code, len) in [(MESSAGE, 19), (MESSAGE, 20 + (8 << 20) + 1), (RELEASED, 13), (9, 0)] {
            let mut bytes = Vec::new();
            frame_head(&mut bytes, code, len);
            assert!(Frame::decode(&bytes).is_err(), "{code} {len}");
        }
        for len in [TAG_BYTES, TAG_BYTES + RECORD_BYTES_MAX + 1] {
            assert!(record_bytes(&(len as u32).to_le_bytes()).is_err());
        }
    }
}
