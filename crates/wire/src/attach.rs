//! How an accelerator runtime and an engine meet: the conversation on a local socket.
//!
//! A *runtime* is a process that runs the kernels of one (service, accelerator), or of several services that an
//! accelerator serves best from one process. It is connected to the engine by
//! one Unix socket of type `SOCK_SEQPACKET`: at the path of an accelerator with `launch = "external"`,
//! or inherited from the engine that started it.
//!
//! ```text
//! runtime                                         engine
//!    | Hello: versions, what it runs, for whom       |   who is it (SO_PEERCRED), is there a place for it
//!    |---------------------------------------------->|
//!    |        Offer: region, bell, kernel, parameters|   or Refuse: one sentence
//!    |<----------------------------------------------|
//!    | maps, checks, starts its blocks               |
//!    | Ready: generation, blocks                     |   requests flow, in the region alone
//!    |---------------------------------------------->|
//!    |     beats in the region (AcceleratorWords::heartbeat), watches the engine's beat
//!    |                                 Stop: drain_ms|
//!    |<----------------------------------------------|
//!    | Bye: reason, one sentence                     |   also at any other time
//!    |---------------------------------------------->|
//! ```
//!
//! Several services come as *Together*, which says how many offers follow it; they live and end together. The
//! runtime is ready once for all of them, and says so with the first offer's generation and the blocks of all.
//!
//! The connection's end is the runtime's end, for both sides. An offer comes with two descriptors: the
//! region (a sealed memfd) and the bell that wakes the runtime (an end of a stream socket on which every
//! ring is a byte). A runtime that the engine started gets a third one if its kernel is in a file: a sealed copy of that
//! file, which is what it runs. A runtime that sleeps says so in `AcceleratorWords::parked`; the engine never sleeps
//! while a request is with it, so it needs no bell.
//!
//! A *generation* is one life of a (service, accelerator): every offer has a region of its own, and nothing that is
//! written into the region of an earlier generation reaches anybody.
//!
//! Messages begin with magic u64, version u32 and code u32; numbers are little endian, a text is its
//! length (u16) and UTF-8. A message has exactly the length that its fields make. The text of a refusal
//! is readable by every version. Sentences are for terminals and logs: control characters in them are read as
//! `?`.

/// First eight bytes of every message: "SERVALAT".
pub const MAGIC: u64 = u64::from_le_bytes(*b"SERVALAT");
/// Version of the conversation.
pub const VERSION: u32 = 1;
/// Most bytes of a message of either side.
pub const MESSAGE_BYTES_MAX: usize = 4096;
/// Descriptors that come with every offer: region, bell. Behind them may be a copy of the kernel file.
pub const DESCRIPTORS: usize = 2;
/// Most services of one runtime.
pub const TOGETHER_MAX: u32 = 64;
/// Longest name of a service, an accelerator or a kind, in bytes.
pub const NAME_BYTES_MAX: usize = 64;
/// Longest kernel as a configuration names it (a path, perhaps), in bytes.
pub const KERNEL_BYTES_MAX: usize = 1024;
/// Most parameters of a kernel, and the longest name of one in bytes; those of the region ABI.
pub const PARAMS_MAX: usize = 32;
/// See [`PARAMS_MAX`].
pub const PARAM_NAME_BYTES_MAX: usize = 23;
/// Longest sentence of a refusal or a goodbye, in bytes.
pub const TEXT_BYTES_MAX: usize = 480;

/// Codes of the messages: [`FromRuntime::Hello`] …
pub const HELLO: u32 = 1;
/// [`FromEngine::Offer`] …
pub const OFFER: u32 = 2;
/// [`FromEngine::Refuse`] …
pub const REFUSE: u32 = 3;
/// [`FromRuntime::Ready`] …
pub const READY: u32 = 4;
/// [`FromEngine::Stop`] …
pub const STOP: u32 = 5;
/// [`FromRuntime::Bye`] …
pub const BYE: u32 = 6;
/// [`FromEngine::Together`].
pub const TOGETHER: u32 = 7;

/// What a runtime says.
#[derive(Clone, Debug, PartialEq)]
pub enum FromRuntime {
    /// First: who it is.
    Hello(Hello),
    /// After an offer: its blocks run.
    Ready(Ready),
    /// Last: why it ends.
    Bye(Bye),
}

/// What an engine says.
#[derive(Clone, Debug, PartialEq)]
pub enum FromEngine {
    /// So many offers follow, for one runtime; in [1, [`TOGETHER_MAX`]].
    Together(u32),
    /// A place for the runtime; the descriptors come along.
    Offer(Offer),
    /// No, because.
    Refuse(String),
    /// Answer what has been received, then end.
    Stop {
        /// How long that may take, in milliseconds.
        drain_ms: u32,
    },
}

/// Who a runtime is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Version of the region layout that it understands.
    pub abi_version: u32,
    /// Its process id as it sees it itself, for messages to people.
    pub process: u32,
    /// What its kernels run on, such as `cpu`.
    pub kind: String,
    /// The service it wants to run the kernels of; empty: any that needs a runtime.
    pub service: String,
    /// The only kernel it has, as configurations name it; empty: whichever it is asked for.
    pub kernel: String,
}

/// A place for a runtime.
#[derive(Clone, Debug, PartialEq)]
pub struct Offer {
    /// The life that begins, from 1.
    pub generation: u64,
    /// Bytes of the region.
    pub region_bytes: u64,
    /// Blocks that the region is for.
    pub blocks: u32,
    /// A runtime that does not beat for this long is lost, in milliseconds; it should beat four times as often.
    pub heartbeat_ms: u32,
    /// The service.
    pub service: String,
    /// The accelerator.
    pub accelerator: String,
    /// The kernel, as the configuration names it: a built-in name, or the path of a library.
    pub kernel: String,
    /// What the kernel is given.
    pub params: Vec<(String, f64)>,
}

/// The blocks run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// The life that was offered, the first one of several.
    pub generation: u64,
    /// Blocks, those of all offers, that have got to their first receive.
    pub blocks: u32,
}

/// Why a runtime ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bye {
    /// One of the region ABI's reasons.
    pub reason: u64,
    /// One sentence for people; may be empty.
    pub text: String,
}

/// Why bytes are no message of this conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    /// Too short, or of somebody else.
    #[error("the other side does not speak Serval's attach protocol")]
    Foreign,
    /// Another version.
    #[error(
        "the other side speaks version {0} of the attach protocol, this one {VERSION}: use matching builds"
    )]
    Version(u32),
    /// A field that cannot be.
    #[error("a message of the attach protocol is impossible: {0}")]
    Impossible(&'static str),
}

impl FromRuntime {
    /// The message; texts that are too long are cut.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Hello(hello) => Writer::new(HELLO)
                .u32(hello.abi_version)
                .u32(hello.process)
                .text(&hello.kind, NAME_BYTES_MAX)
                .text(&hello.service, NAME_BYTES_MAX)
                .text(&hello.kernel, KERNEL_BYTES_MAX),
            Self::Ready(ready) => Writer::new(READY).u64(ready.generation).u32(ready.blocks),
            Self::Bye(bye) => Writer::new(BYE).u64(bye.reason).text(&bye.text, TEXT_BYTES_MAX),
        }
        .0
    }

    /// Reads one of this version.
    pub fn decode(bytes: &[u8]) -> Result<Self, AttachError> {
        let (code, mut body) = Reader::open(bytes)?;
        let message = match code {
            HELLO => Self::Hello(Hello {
                abi_version: body.u32()?,
                process: body.u32()?,
                kind: body.text(NAME_BYTES_MAX)?,
                service: body.text(NAME_BYTES_MAX)?,
                kernel: body.text(KERNEL_BYTES_MAX)?,
            }),
            READY => Self::Ready(Ready { generation: body.u64()?, blocks: body.u32()? }),
            BYE => Self::Bye(Bye { reason: body.u64()?, text: plain(&body.text(TEXT_BYTES_MAX)?) }),
            _ => return Err(AttachError::Impossible("a runtime does not say this")),
        };
        body.end(message)
    }
}

impl FromEngine {
    /// The message; texts that are too long are cut, parameters beyond [`PARAMS_MAX`] left out.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Offer(offer) => {
                let mut message = Writer::new(OFFER)
                    .u64(offer.generation)
                    .u64(offer.region_bytes)
                    .u32(offer.blocks)
                    .u32(offer.heartbeat_ms)
                    .text(&offer.service, NAME_BYTES_MAX)
                    .text(&offer.accelerator, NAME_BYTES_MAX)
                    .text(&offer.kernel, KERNEL_BYTES_MAX)
                    .u32(offer.params.len().min(PARAMS_MAX) as u32);
                for (name, value) in offer.params.iter().take(PARAMS_MAX) {
                    message = message.text(name, PARAM_NAME_BYTES_MAX).u64(value.to_bits());
                }
                message
            }
            Self::Refuse(text) => {
                let mut message = Writer::new(REFUSE);
                message.0.extend_from_slice(cut(text, TEXT_BYTES_MAX).as_bytes());
                message
            }
            Self::Together(count) => Writer::new(TOGETHER).u32(*count),
            Self::Stop { drain_ms } => Writer::new(STOP).u32(*drain_ms),
        }
        .0
    }

    /// Reads one of this version, or a refusal of any.
    pub fn decode(bytes: &[u8]) -> Result<Self, AttachError> {
        let (code, mut body) = match Reader::open(bytes) {
            Err(AttachError::Version(_)) if Reader::code(bytes) == REFUSE => {
                (REFUSE, Reader(&bytes[HEAD_BYTES..]))
            }
            other => other?,
        };
        let message = match code {
            REFUSE => return Ok(Self::Refuse(plain(&String::from_utf8_lossy(body.0)))),
            STOP => Self::Stop { drain_ms: body.u32()? },
            TOGETHER => match body.u32()? {
                count @ 1..=TOGETHER_MAX => Self::Together(count),
                _ => return Err(AttachError::Impossible("so many services are never together")),
            },
            OFFER => Self::Offer(Offer {
                generation: body.u64()?,
                region_bytes: body.u64()?,
                blocks: body.u32()?,
                heartbeat_ms: body.u32()?,
                service: body.text(NAME_BYTES_MAX)?,
                accelerator: body.text(NAME_BYTES_MAX)?,
                kernel: body.text(KERNEL_BYTES_MAX)?,
                params: body.params()?,
            }),
            _ => return Err(AttachError::Impossible("an engine does not say this")),
        };
        body.end(message)
    }
}

/// Magic, version, code.
const HEAD_BYTES: usize = 16;

struct Writer(Vec<u8>);

impl Writer {
    fn new(code: u32) -> Self {
        Self(Vec::with_capacity(256)).u64(MAGIC).u32(VERSION).u32(code)
    }

    fn u32(mut self, value: u32) -> Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    fn u64(mut self, value: u64) -> Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    fn text(mut self, text: &str, most: usize) -> Self {
        let text = cut(text, most);
        self.0.extend_from_slice(&(text.len() as u16).to_le_bytes());
        self.0.extend_from_slice(text.as_bytes());
        self
    }
}

/// As much of a text as fits, in whole characters.
fn cut(text: &str, most: usize) -> &str {
    let end = (0..=text.len().min(most)).rev().find(|at| text.is_char_boundary(*at));
    &text[..end.unwrap_or(0)]
}

/// A sentence of the other side as people may see it: it neither steers a terminal nor begins a line of a log.
fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// What is left of a message.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Code and body of a message of this version.
    fn open(bytes: &'a [u8]) -> Result<(u32, Self), AttachError> {
        let mut reader = Self(bytes);
        if bytes.len() < HEAD_BYTES || reader.u64()? != MAGIC {
            return Err(AttachError::Foreign);
        }
        match (reader.u32()?, bytes.len() <= MESSAGE_BYTES_MAX) {
            (VERSION, true) => Ok((reader.u32()?, reader)),
            (VERSION, false) => Err(AttachError::Impossible("longer than any message")),
            (version, _) => Err(AttachError::Version(version)),
        }
    }

    /// The code of a message that has one.
    fn code(bytes: &[u8]) -> u32 {
        Reader(&bytes[HEAD_BYTES - 4..]).u32().unwrap_or(0)
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], AttachError> {
        let (taken, rest) =
            self.0.split_at_checked(count).ok_or(AttachError::Impossible("it ends too early"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn u16(&mut self) -> Result<u16, AttachError> {
        Ok(u16::from_le_bytes(self.take(2)?.try_into().expect("2 bytes")))
    }

    fn u32(&mut self) -> Result<u32, AttachError> {
        Ok(u32::from_le_bytes(self.take(4)?.try_into().expect("4 bytes")))
    }

    fn u64(&mut self) -> Result<u64, AttachError> {
        Ok(u64::from_le_bytes(self.take(8)?.try_into().expect("8 bytes")))
    }

    fn text(&mut self, most: usize) -> Result<String, AttachError> {
        let len = usize::from(self.u16()?);
        if len > most {
            return Err(AttachError::Impossible("a text is too long"));
        }
        let text = std::str::from_utf8(self.take(len)?);
        Ok(text.map_err(|_| AttachError::Impossible("a text is not UTF-8"))?.to_owned())
    }

    fn params(&mut self) -> Result<Vec<(String, f64)>, AttachError> {
        let count = self.u32()? as usize;
        if count > PARAMS_MAX {
            return Err(AttachError::Impossible("too many parameters"));
        }
        let mut params = Vec::with_capacity(count);
        for _ in 0..count {
            params.push((self.text(PARAM_NAME_BYTES_MAX)?, f64::from_bits(self.u64()?)));
        }
        Ok(params)
    }

    fn end<T>(self, message: T) -> Result<T, AttachError> {
        if self.0.is_empty() {
            Ok(message)
        } else {
            Err(AttachError::Impossible("it goes on after its end"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer() -> Offer {
        Offer {
            generation: u64::MAX,
            region_bytes: 1 << 33,
            blocks: 240,
            heartbeat_ms: 2000,
            service: "digits".into(),
            accelerator: "acc0".into(),
            kernel: "/srv/kernels.so:lenet".into(),
            params: vec![("threshold".into(), 0.5), ("microseconds".into(), -1e300)],
        }
    }

    fn from_runtime() -> Vec<FromRuntime> {
        let hello = Hello {
            abi_version: 2,
            process: 77,
            kind: "cpu".into(),
            service: String::new(),
            kernel: "echo".into(),
        };
        vec![
            FromRuntime::Hello(hello),
            FromRuntime::Ready(Ready { generation: 9, blocks: 4096 }),
            FromRuntime::Bye(Bye { reason: 6, text: "a block hangs".into() }),
        ]
    }

    fn from_engine() -> Vec<FromEngine> {
        vec![
            FromEngine::Offer(offer()),
            FromEngine::Refuse("no service needs a runtime".into()),
            FromEngine::Stop { drain_ms: 3000 },
            FromEngine::Together(2),
        ]
    }

    #[test]
    fn messages_survive() {
        for message in from_runtime() {
            assert_eq!(FromRuntime::decode(&message.encode()), Ok(message));
        }
        for message in from_engine() {
            assert_eq!(FromEngine::decode(&message.encode()), Ok(message));
        }
    }

    #[test]
    fn the_longest_message_fits() {
        let long = |bytes| "x".repeat(bytes);
        let offer = Offer {
            service: long(NAME_BYTES_MAX),
            accelerator: long(NAME_BYTES_MAX),
            kernel: long(KERNEL_BYTES_MAX),
            params: vec![(long(PARAM_NAME_BYTES_MAX), 1.0); PARAMS_MAX],
            ..offer()
        };
        let message = FromEngine::Offer(offer);
        assert!(message.encode().len() <= MESSAGE_BYTES_MAX);
        assert_eq!(FromEngine::decode(&message.encode()), Ok(message));
    }

    #[test]
    fn every_other_length_is_refused() {
        for message in from_runtime() {
            let bytes = message.encode();
            for len in 0..bytes.len() {
                assert!(FromRuntime::decode(&bytes[..len]).is_err(), "{message:?} cut to {len}");
            }
            let longer = [&bytes[..], b"x"].concat();
            assert!(FromRuntime::decode(&longer).is_err(), "{message:?} and more");
        }
        for message in from_engine() {
            let bytes = message.encode();
            let refusal = matches!(message, FromEngine::Refuse(_));
            for len in 0..bytes.len() {
                let found = FromEngine::decode(&bytes[..len]);
                assert_eq!(found.is_ok(), refusal && len >= HEAD_BYTES, "{message:?} cut to {len}");
            }
            let longer = [&bytes[..], &[b'x'; MESSAGE_BYTES_MAX]].concat();
            assert!(FromEngine::decode(&longer).is_err(), "{message:?} and more");
        }
    }

    #[test]
    fn texts_and_counts_have_limits() {
        let bye = FromRuntime::Bye(Bye { reason: 1, text: "\u{e9}".repeat(400) });
        let Ok(FromRuntime::Bye(Bye { text, .. })) = FromRuntime::decode(&bye.encode()) else {
            panic!("a goodbye")
        };
        assert_eq!(text, "\u{e9}".repeat(TEXT_BYTES_MAX / 2), "cut between characters");
        let refusal = FromEngine::Refuse("a".to_owned() + &"\u{e9}".repeat(400)).encode();
        let Ok(FromEngine::Refuse(text)) = FromEngine::decode(&refusal) else {
            panic!("a refusal")
        };
        assert!(text.ends_with('\u{e9}') && text.len() <= TEXT_BYTES_MAX);

        let mut hello = from_runtime()[0].encode();
        hello[24] = 65;
        let found = FromRuntime::decode(&hello);
        assert_eq!(found, Err(AttachError::Impossible("a text is too long")));
        let mut hello = from_runtime()[0].encode();
        hello[26] = 0xff;
        let found = FromRuntime::decode(&hello);
        assert_eq!(found, Err(AttachError::Impossible("a text is not UTF-8")));
        let many = Offer { params: vec![("p".into(), 0.0); PARAMS_MAX + 9], ..offer() };
        let found = FromEngine::decode(&FromEngine::Offer(many).encode());
        assert!(matches!(found, Ok(FromEngine::Offer(o)) if o.params.len() == PARAMS_MAX));
        let mut none = FromEngine::Offer(Offer { params: Vec::new(), ..offer() }).encode();
        let at = none.len() - 4;
        none[at] = PARAMS_MAX as u8 + 1;
        let found = FromEngine::decode(&none);
        assert_eq!(found, Err(AttachError::Impossible("too many parameters")));
        for count in [0, TOGETHER_MAX + 1] {
            let found = FromEngine::decode(&FromEngine::Together(count).encode());
            assert!(matches!(found, Err(AttachError::Impossible(_))), "{count}");
        }
    }

    #[test]
    fn sentences_steer_no_terminal() {
        let text = "a\nb\r\u{1b}[2Jc\u{9b}\0d \u{e9}";
        let plain = "a?b??[2Jc??d \u{e9}";
        let bye = FromRuntime::Bye(Bye { reason: 1, text: text.into() });
        let found = FromRuntime::decode(&bye.encode());
        assert_eq!(found, Ok(FromRuntime::Bye(Bye { reason: 1, text: plain.into() })));
        let found = FromEngine::decode(&FromEngine::Refuse(text.into()).encode());
        assert_eq!(found, Ok(FromEngine::Refuse(plain.into())));
    }

    #[test]
    fn strangers_other_versions_and_the_wrong_side_are_told_apart() {
        let mut hello = from_runtime()[0].encode();
        assert!(matches!(FromEngine::decode(&hello), Err(AttachError::Impossible(_))));
        hello[8] = 9;
        assert_eq!(FromRuntime::decode(&hello), Err(AttachError::Version(9)));
        hello[0] = b'x';
        assert_eq!(FromRuntime::decode(&hello), Err(AttachError::Foreign));
        assert_eq!(FromRuntime::decode(b""), Err(AttachError::Foreign));
        let mut refusal = from_engine()[1].encode();
        refusal[8] = 9;
        assert_eq!(
            FromEngine::decode(&refusal),
            Ok(from_engine().remove(1)),
            "every version reads it"
        );
        let mut stop = from_engine()[2].encode();
        stop[8] = 9;
        assert_eq!(FromEngine::decode(&stop), Err(AttachError::Version(9)));
    }
}
