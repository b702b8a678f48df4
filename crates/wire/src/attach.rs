//! The attach protocol between an accelerator runtime and an engine, over a local socket.
//!
//! A *runtime* is a process that runs the kernels of one (service, accelerator), or of several services that should
//! share a process on their accelerator. It is connected to the engine by one Unix socket of type `SOCK_SEQPACKET`:
//! at the path of an accelerator with `launch = "external"`, or inherited from the engine that started it.
//!
//! ```text
//! runtime                                         engine
//!    | Hello: versions, kind, service, kernel        |   checks the peer (SO_PEERCRED), chooses a slot
//!    |---------------------------------------------->|
//!    |        Offer: region, bell, kernel, parameters|   or Refuse: one sentence
//!    |<----------------------------------------------|
//!    | maps, checks, starts its blocks               |
//!    | Ready: generation, blocks                     |   requests are exchanged through the region
//!    |---------------------------------------------->|
//!    |  writes its heartbeat (AcceleratorWords::heartbeat), monitors the engine's
//!    |                                 Stop: drain_ms|
//!    |<----------------------------------------------|
//!    | Bye: reason, one sentence                     |   also at any other time
//!    |---------------------------------------------->|
//! ```
//!
//! Several services are offered as *Together*, which contains the number of offers that follow it; they start and end
//! together. The runtime sends one Ready for all of them, with the first offer's generation and the total number of
//! blocks.
//!
//! The end of the connection is the end of the runtime, for both sides. An offer is sent with two descriptors: the
//! region (a sealed memfd) and the bell that wakes the runtime (an end of a stream socket on which every ring is a
//! byte). A runtime that the engine started gets a third one if its kernel is in a file: a sealed copy of that file,
//! which it runs. A runtime that sleeps sets `AcceleratorWords::parked`; the engine never sleeps while the runtime
//! has a request, so it needs no bell.
//!
//! Every *generation* of a (service, accelerator) has its own region in its offer; writes into the region of an
//! earlier generation have no effect.
//!
//! Messages begin with magic u64, version u32 and code u32; numbers are little endian, a text is its length (u16) and
//! UTF-8. A parameter is its name, then the bits of a number, or [`PARAM_TEXT`] and a text. The length of a message is exactly that of its
//! fields. The text of a refusal can be read by every version.
//! Sentences are for terminals and logs: control characters in them are replaced by `?`.

/// First eight bytes of every message: "SERVALAT".
pub const MAGIC: u64 = u64::from_le_bytes(*b"SERVALAT");
/// Version of the protocol.
pub const VERSION: u32 = 1;
/// Maximum length of a message in either direction.
pub const MESSAGE_BYTES_MAX: usize = 16_384;
/// Descriptors of every offer: region, bell. They may be followed by a copy of the kernel file.
pub const DESCRIPTORS: usize = 2;
/// Maximum number of services of one runtime.
pub const TOGETHER_MAX: u32 = 64;
/// Longest name of a service, an accelerator or a kind, in bytes.
pub const NAME_BYTES_MAX: usize = 64;
/// Maximum length of a kernel in the notation of the configuration (possibly a path), in bytes.
pub const KERNEL_BYTES_MAX: usize = 1024;
/// Maximum number of parameters of a kernel, and of bytes of a parameter's name; those of the region ABI.
pub const PARAMS_MAX: usize = 32;
/// See [`PARAMS_MAX`].
pub const PARAM_NAME_BYTES_MAX: usize = 23;
/// Longest text of a parameter, in bytes; that of the region ABI.
pub const PARAM_TEXT_BYTES_MAX: usize = 255;
/// What precedes a text in the place of a number: the bits of no finite one.
pub const PARAM_TEXT: u64 = 0xfffc << 48;
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

/// A message of a runtime.
#[derive(Clone, Debug, PartialEq)]
pub enum FromRuntime {
    /// First: its identity.
    Hello(Hello),
    /// After an offer: its blocks run.
    Ready(Ready),
    /// Last: the reason of its end.
    Bye(Bye),
}

/// A message of an engine.
#[derive(Clone, Debug, PartialEq)]
pub enum FromEngine {
    /// Number of offers that follow, for one runtime; in [1, [`TOGETHER_MAX`]].
    Together(u32),
    /// A runtime slot; sent with the descriptors.
    Offer(Offer),
    /// A refusal, with the reason.
    Refuse(String),
    /// Answer the received requests, then end.
    Stop {
        /// Time limit for that, in milliseconds.
        drain_ms: u32,
    },
}

/// The identity of a runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Version of the region layout that it supports.
    pub abi_version: u32,
    /// Its process id in its own namespace, for messages.
    pub process: u32,
    /// The kind of its processor, such as `cpu`.
    pub kind: String,
    /// The service whose kernels it wants to run; empty: any without a runtime.
    pub service: String,
    /// The only kernel it has, in the notation of configurations; empty: any.
    pub kernel: String,
}

/// A runtime slot that is offered.
#[derive(Clone, Debug, PartialEq)]
pub struct Offer {
    /// Number of the generation, from 1.
    pub generation: u64,
    /// Bytes of the region.
    pub region_bytes: u64,
    /// Blocks of the region.
    pub blocks: u32,
    /// A runtime without a heartbeat for this long is lost, in milliseconds; it should send heartbeats four times as
    /// often.
    pub heartbeat_ms: u32,
    /// The service.
    pub service: String,
    /// The accelerator.
    pub accelerator: String,
    /// The kernel, in the notation of the configuration: a built-in name, or the path of a library.
    pub kernel: String,
    /// Parameters of the kernel.
    pub params: Vec<(String, ParamValue)>,
}

/// The value of a parameter of a kernel.
#[derive(Clone, Debug, PartialEq)]
pub enum ParamValue {
    /// A finite number.
    Number(f64),
    /// A text of at most [`PARAM_TEXT_BYTES_MAX`] bytes, none of them zero.
    Text(String),
}

impl From<f64> for ParamValue {
    fn from(number: f64) -> Self {
        Self::Number(number)
    }
}

impl From<&str> for ParamValue {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

/// The blocks run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// The offered generation; that of the first offer if there are several.
    pub generation: u64,
    /// Number of blocks, over all offers, that have reached their first receive.
    pub blocks: u32,
}

/// Why a runtime ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bye {
    /// One of the region ABI's reasons.
    pub reason: u64,
    /// One sentence for the log; may be empty.
    pub text: String,
}

/// Why bytes are not a message of this protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    /// Too short, or of another protocol.
    #[error("the other side does not speak Serval's attach protocol")]
    Foreign,
    /// Another version.
    #[error(
        "the other side speaks version {0} of the attach protocol, this one {VERSION}: use matching builds"
    )]
    Version(u32),
    /// An invalid field.
    #[error("invalid message of the attach protocol: {0}")]
    Impossible(&'static str),
}

impl FromRuntime {
    /// Encodes the message; texts that are too long are truncated.
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

    /// Decodes a message of this version.
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
            _ => return Err(AttachError::Impossible("not a message of a runtime")),
        };
        body.end(message)
    }
}

impl FromEngine {
    /// Encodes the message; texts that are too long are truncated, parameters beyond [`PARAMS_MAX`] are omitted.
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
                    message = message.text(name, PARAM_NAME_BYTES_MAX);
                    message = match value {
                        ParamValue::Number(number) => message.u64(number.to_bits()),
                        ParamValue::Text(text) => {
                            message.u64(PARAM_TEXT).text(text, PARAM_TEXT_BYTES_MAX)
                        }
                    };
                }
                message
            }
            Self::Refuse(text) => {
                let mut message = Writer::new(REFUSE);
                message.0.extend_from_slice(truncated(text, TEXT_BYTES_MAX).as_bytes());
                message
            }
            Self::Together(count) => Writer::new(TOGETHER).u32(*count),
            Self::Stop { drain_ms } => Writer::new(STOP).u32(*drain_ms),
        }
        .0
    }

    /// Decodes a message of this version, or a refusal of any version.
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
                _ => return Err(AttachError::Impossible("too many services in one process")),
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
            _ => return Err(AttachError::Impossible("not a message of an engine")),
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
        let text = truncated(text, most);
        self.0.extend_from_slice(&(text.len() as u16).to_le_bytes());
        self.0.extend_from_slice(text.as_bytes());
        self
    }
}

/// As much of a text as fits, in whole characters.
pub(crate) fn truncated(text: &str, most: usize) -> &str {
    let end = (0..=text.len().min(most)).rev().find(|at| text.is_char_boundary(*at));
    &text[..end.unwrap_or(0)]
}

/// A received sentence for output: it cannot control a terminal or start a new line of a log.
pub(crate) fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// The rest of a message.
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
            self.0.split_at_checked(count).ok_or(AttachError::Impossible("it is too short"))?;
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

    fn params(&mut self) -> Result<Vec<(String, ParamValue)>, AttachError> {
        let count = self.u32()? as usize;
        if count > PARAMS_MAX {
            return Err(AttachError::Impossible("too many parameters"));
        }
        let mut params = Vec::with_capacity(count);
        for _ in 0..count {
            let name = self.text(PARAM_NAME_BYTES_MAX)?;
            let value = match self.u64()? {
                PARAM_TEXT => ParamValue::Text(self.text(PARAM_TEXT_BYTES_MAX)?),
                bits => ParamValue::Number(f64::from_bits(bits)),
            };
            params.push((name, value));
        }
        Ok(params)
    }

    fn end<T>(self, message: T) -> Result<T, AttachError> {
        if self.0.is_empty() { Ok(message) } else { Err(AttachError::Impossible("it is too long")) }
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
            params: vec![
                ("threshold".into(), 0.5.into()),
                ("microseconds".into(), (-1e300).into()),
                ("model".into(), "a text".into()),
            ],
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
    fn messages_round_trip() {
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
        let text = ParamValue::Text(long(PARAM_TEXT_BYTES_MAX));
        let offer = Offer {
            service: long(NAME_BYTES_MAX),
            accelerator: long(NAME_BYTES_MAX),
            kernel: long(KERNEL_BYTES_MAX),
            params: vec![(long(PARAM_NAME_BYTES_MAX), text); PARAMS_MAX],
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
                assert!(
                    FromRuntime::decode(&bytes[..len]).is_err(),
                    "{message:?} truncated to {len}"
                );
            }
            let longer = [&bytes[..], b"x"].concat();
            assert!(FromRuntime::decode(&longer).is_err(), "{message:?} and more");
        }
        for message in from_engine() {
            let bytes = message.encode();
            let refusal = matches!(message, FromEngine::Refuse(_));
            for len in 0..bytes.len() {
                let found = FromEngine::decode(&bytes[..len]);
                assert_eq!(
                    found.is_ok(),
                    refusal && len >= HEAD_BYTES,
                    "{message:?} truncated to {len}"
                );
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
        assert_eq!(text, "\u{e9}".repeat(TEXT_BYTES_MAX / 2), "truncated between characters");
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
        let many = Offer { params: vec![("p".into(), 0.0.into()); PARAMS_MAX + 9], ..offer() };
        let found = FromEngine::decode(&FromEngine::Offer(many).encode());
        assert!(matches!(found, Ok(FromEngine::Offer(o)) if o.params.len() == PARAMS_MAX));
        let mut none = FromEngine::Offer(Offer { params: Vec::new(), ..offer() }).encode();
        let at = none.len() - 4;
        none[at] = PARAMS_MAX as u8 + 1;
        let found = FromEngine::decode(&none);
        assert_eq!(found, Err(AttachError::Impossible("too many parameters")));
        let long = ParamValue::Text("\u{e9}".repeat(200));
        let long = Offer { params: vec![("p".into(), long)], ..offer() };
        let mut long = FromEngine::Offer(long).encode();
        let Ok(FromEngine::Offer(found)) = FromEngine::decode(&long) else { panic!("an offer") };
        let cut = ParamValue::Text("\u{e9}".repeat(PARAM_TEXT_BYTES_MAX / 2));
        assert_eq!(found.params[0].1, cut, "truncated between characters");
        let at = long.len() - (PARAM_TEXT_BYTES_MAX - 1) - 1;
        long[at] = 1;
        let found = FromEngine::decode(&long);
        assert_eq!(found, Err(AttachError::Impossible("a text is too long")));
        for count in [0, TOGETHER_MAX + 1] {
            let found = FromEngine::decode(&FromEngine::Together(count).encode());
            assert!(matches!(found, Err(AttachError::Impossible(_))), "{count}");
        }
    }

    #[test]
    fn sentences_cannot_control_a_terminal() {
        let text = "a\nb\r\u{1b}[2Jc\u{9b}\0d \u{e9}";
        let plain = "a?b??[2Jc??d \u{e9}";
        let bye = FromRuntime::Bye(Bye { reason: 1, text: text.into() });
        let found = FromRuntime::decode(&bye.encode());
        assert_eq!(found, Ok(FromRuntime::Bye(Bye { reason: 1, text: plain.into() })));
        let found = FromEngine::decode(&FromEngine::Refuse(text.into()).encode());
        assert_eq!(found, Ok(FromEngine::Refuse(plain.into())));
    }

    #[test]
    fn other_protocols_versions_and_the_wrong_side_are_distinguished() {
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
