//! Lets only those CoAP requests (RFC 7252) pass that have a valid token: NICA's CoAP authentication (USENIX ATC '19), for any layout.
//!
//! A request's payload is a CBOR map with the key "token", whose value is a JSON Web Token signed with HS256. The keys are in a file, one for each
//! tenant. The signature is checked before anything of the body is read. Acknowledgements and resets pass, since they ask for nothing;
//! pings are answered here.

mod message;
mod seen;
mod token;

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use wire::DropReason;
use wire::nic::UDP_PAYLOAD_MAX;

use crate::instances::Memory;
use message::{ACKNOWLEDGEMENT, CONFIRMABLE, RESET};
pub use message::{Message, token_of, value_of};
use onpath::Messages;
use onpath::Spec;
use onpath::{Direction, Failure, Function, Merge, Register};
pub use seen::{Seen, Use};
pub use token::{Accepted, Keys, Refused, Times, verify};

/// 4.01 Unauthorized.
const UNAUTHORIZED: u8 = 0x81;
const SECONDS_MAX: u64 = 1 << 32;
/// With `once`, no token may be valid for longer, in seconds: see [`Seen`].
const REMEMBERED_S_MAX: u64 = 8_000_000;

/// Seconds since 1970.
pub type Clock = Arc<dyn Fn() -> u64 + Send + Sync>;

const REGISTERS: [(&str, Merge); COUNTERS + 3] = [
    ("passed", Merge::Sum),
    ("acknowledgements", Merge::Sum),
    ("pings", Merge::Sum),
    ("malformed", Merge::Sum),
    ("no_token", Merge::Sum),
    ("bad_token", Merge::Sum),
    ("bad_algorithm", Merge::Sum),
    ("unknown_key", Merge::Sum),
    ("bad_signature", Merge::Sum),
    ("expired", Merge::Sum),
    ("early", Merge::Sum),
    ("stale", Merge::Sum),
    ("replayed", Merge::Sum),
    ("crowded", Merge::Sum),
    ("window_s", Merge::Setting),
    ("leeway_s", Merge::Setting),
    ("once", Merge::Setting),
];
const COUNTERS: usize = 14;
const AT_WINDOW: usize = COUNTERS;
const AT_LEEWAY: usize = COUNTERS + 1;

/// What becomes of a message, by the register that counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Counted {
    Passed,
    Acknowledgement,
    Ping,
    Malformed,
    NoToken,
    BadToken,
    BadAlgorithm,
    UnknownKey,
    BadSignature,
    Expired,
    Early,
    Stale,
    Replayed,
    Crowded,
}

impl From<Refused> for Counted {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Malformed => Self::BadToken,
            Refused::Algorithm => Self::BadAlgorithm,
            Refused::UnknownKey => Self::UnknownKey,
            Refused::Signature => Self::BadSignature,
            Refused::Expired => Self::Expired,
            Refused::Early => Self::Early,
            Refused::Stale => Self::Stale,
        }
    }
}

/// What the instances of all workers share.
pub struct Shared {
    seen: Seen,
    hasher: RandomState,
    clock: Clock,
}

impl Shared {
    /// With this clock.
    pub fn new(clock: Clock) -> Arc<Self> {
        Arc::new(Self { seen: Seen::default(), hasher: RandomState::new(), clock })
    }
}

/// The instances of one function.
pub(crate) fn coap_auths() -> crate::instances::Instances {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let shared = Shared::new(Arc::new(now));
    Arc::new(move || Box::new(CoapAuth::new(shared.clone())))
}

/// The tokens that were used. A setting that was written may have had another value before, so the table counts always.
pub(crate) fn memory(_: &Spec) -> Memory {
    Memory::of_all(seen::BYTES)
}

/// See the module's text.
pub struct CoapAuth {
    keys: Keys,
    tenant: Option<Vec<u8>>,
    answers: bool,
    /// What goes on is the value of "payload" alone.
    forwards_payload: bool,
    /// Memory for it.
    body: Vec<u8>,
    window_s: u64,
    leeway_s: u64,
    once: bool,
    counted: [u64; COUNTERS],
    shared: Arc<Shared>,
    registers: Vec<Register>,
}

impl CoapAuth {
    /// An instance without keys: it refuses everything.
    pub fn new(shared: Arc<Shared>) -> Self {
        Self {
            keys: Keys::default(),
            tenant: None,
            answers: false,
            forwards_payload: false,
            body: Vec::new(),
            window_s: 0,
            leeway_s: 60,
            once: false,
            counted: [0; COUNTERS],
            shared,
            registers: Register::list(&REGISTERS),
        }
    }

    /// What becomes of a request.
    fn check(&self, messages: &Messages, index: usize, request: &Message<'_>, now: u64) -> Counted {
        let Some(token) = token_of(request.payload) else { return Counted::NoToken };
        let times = Times { now, leeway: self.leeway_s, window: self.window_s };
        let accepted = match verify(token, &self.keys, times) {
            Ok(accepted) => accepted,
            Err(refused) => return refused.into(),
        };
        if !self.once {
            return Counted::Passed;
        }
        let remembered = |until: &u64| until.saturating_sub(now) <= REMEMBERED_S_MAX;
        let Some(until) = accepted.until.filter(remembered) else { return Counted::Stale };
        let (first, _) = accepted.signature.split_first_chunk().expect("it has 32 bytes");
        // A retransmission is the same message (RFC 7252, section 4.2).
        let user = (messages.request(index).origin, messages.bytes(index));
        let user = self.shared.hasher.hash_one(user);
        match self.shared.seen.note(u64::from_le_bytes(*first), user, now, until) {
            Use::First | Use::Again => Counted::Passed,
            Use::Replay => Counted::Replayed,
            Use::Crowded => Counted::Crowded,
        }
    }

    fn decide_one(&mut self, messages: &mut Messages, index: usize, now: u64) {
        let Some(message) = Message::parse(messages.bytes(index)) else {
            self.counted[Counted::Malformed as usize] += 1;
            return messages.drop(index, DropReason::FunctionDrop);
        };
        let counted = match (message.code, message.kind) {
            (0, ACKNOWLEDGEMENT | RESET) => Counted::Acknowledgement,
            (0, CONFIRMABLE) => Counted::Ping,
            _ if message.is_request() => self.check(messages, index, &message, now),
            _ => Counted::Malformed,
        };
        let mut counted = counted;
        if self.forwards_payload && matches!(counted, Counted::Passed | Counted::Acknowledgement) {
            let body = match counted {
                Counted::Passed => value_of(message.payload, b"payload"),
                // It asks for nothing.
                _ => None,
            };
            self.body.clear();
            self.body.extend_from_slice(body.unwrap_or_default());
            counted = if body.is_some() { counted } else { Counted::Malformed };
        }
        self.counted[counted as usize] += 1;
        let id = message.id.to_be_bytes();
        match counted {
            Counted::Passed if self.forwards_payload => {
                messages.rewrite(index, &self.body);
            }
            Counted::Passed | Counted::Acknowledgement => {}
            Counted::Ping => messages.reply(index, &[0x70, 0, id[0], id[1]]),
            _ if self.answers && message.is_request() => {
                // An acknowledgement with the response, or a response of its own.
                let kind = if message.kind == CONFIRMABLE { 0x60 } else { 0x50 };
                let token = message.token;
                let mut reply = [0; 12];
                reply[..4].copy_from_slice(&[kind | token.len() as u8, UNAUTHORIZED, id[0], id[1]]);
                let len = 4 + token.len();
                reply[4..len].copy_from_slice(token);
                messages.reply(index, &reply[..len]);
            }
            _ => messages.drop(index, DropReason::FunctionDrop),
        }
    }
}

impl Function for CoapAuth {
    fn decide(&mut self, direction: Direction, messages: &mut Messages) -> Result<(), Failure> {
        if direction == Direction::Requests {
            let now = (self.shared.clock)();
            for index in 0..messages.len() {
                if messages.is_open(index) {
                    self.decide_one(messages, index, now);
                }
            }
        }
        Ok(())
    }

    fn configure(&mut self, param: &str, value: &[u8]) -> Result<(), Failure> {
        match (param, value) {
            ("tenant", name) => self.tenant = Some(name.to_vec()),
            ("refuse", b"drop") => self.answers = false,
            ("refuse", b"answer") => self.answers = true,
            ("forward", b"message") => self.forwards_payload = false,
            ("forward", b"payload") => {
                self.forwards_payload = true;
                self.body.reserve(UDP_PAYLOAD_MAX);
            }
            ("forward", _) => {
                return Err(Failure("it is \"message\" or \"payload\"".to_owned()));
            }
            ("refuse", _) => return Err(Failure("it is \"drop\" or \"answer\"".to_owned())),
            (_, file) => {
                self.keys = Keys::parse(file).map_err(Failure)?;
                if let Some(tenant) = &self.tenant
                    && !self.keys.keep_only(tenant)
                {
                    return Err(Failure("it has no key of the tenant".to_owned()));
                }
            }
        }
        Ok(())
    }

    fn ready(&mut self) -> Result<(), Failure> {
        // A token may be issued up to `leeway_s` from now.
        let valid_s = self.window_s + 2 * self.leeway_s;
        if self.once && (self.window_s == 0 || valid_s > REMEMBERED_S_MAX) {
            return Err(Failure(format!(
                "once = 1 needs window_s, which says for how long a token is remembered: set it so that window_s + 2 * leeway_s is at \
                 most {REMEMBERED_S_MAX}"
            )));
        }
        Ok(())
    }

    fn registers(&self) -> &[Register] {
        &self.registers
    }

    fn read(&mut self) -> Result<Vec<u64>, Failure> {
        let settings = [self.window_s, self.leeway_s, self.once.into()];
        Ok([&self.counted[..], &settings].concat())
    }

    fn reset(&mut self) -> Result<(), Failure> {
        self.counted = [0; COUNTERS];
        Ok(())
    }

    fn write(&mut self, register: usize, value: u64) -> Result<(), Failure> {
        let max = if matches!(register, AT_WINDOW | AT_LEEWAY) { SECONDS_MAX } else { 1 };
        if value > max {
            return Err(Failure(format!("{} is at most {max}", REGISTERS[register].0)));
        }
        match register {
            AT_WINDOW => self.window_s = value,
            AT_LEEWAY => self.leeway_s = value,
            _ => self.once = value == 1,
        }
        if self.once {
            self.shared.seen.reserve();
        }
        Ok(())
    }
}
