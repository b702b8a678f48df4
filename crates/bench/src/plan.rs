//! The plan of a measurement.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use wire::framing::{Delimits, Framing, SOCKPERF_HEADER_BYTES};
use wire::nic::UDP_PAYLOAD_MAX;

use crate::client::workload::{
    Coap, Custom, Digit, Digits, Faces, KeySpace, Memcached, Pictures, Sealed, Sockperf, Vectors,
};
use crate::client::{BURST_WINDOW_MAX, Echo, WINDOW_MAX, Workload};
use crate::function::KernelFunction;
use crate::target::{MESSAGE_BYTES_MAX, Target, TargetError};

/// Requests that arrive at the same time, at most.
const BATCH_MAX: usize = 1024;

/// One measurement. [`Plan::new`] has defaults for everything but the target.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The server.
    pub target: Target,
    /// The kind of client; `None` is T3 for a shared-memory port, else T0.
    pub class: Option<Class>,
    /// When requests are sent.
    pub mode: Mode,
    /// Requests that arrive at the same time (open loop) or are sent together (closed loop; 1: as many as there is room for),
    /// in [1, 1024]. More than one: class T2 over UDP.
    pub batch: usize,
    /// The workload, with its checks.
    pub work: Work,
    /// TCP: framing of requests; `None`: depends on the workload ([`Plan::framing`]).
    pub framing: Option<Framing>,
    /// Connections or sockets that the requests in flight share. `None`: TCP 4; UDP one socket for every request in
    /// flight, or the number of [`Plan::sockets`] if that is not possible.
    pub connections: Option<usize>,
    /// Warm-up at the start, not measured.
    pub warmup: Duration,
    /// Measured time.
    pub duration: Duration,
    /// A request is lost when its reply takes longer; `None` is 1 s, and 100 ms in an open loop over UDP.
    pub timeout: Option<Duration>,
    /// The cores of the client, one thread on each, which share window or rate and never yield their core; empty: one
    /// thread, not pinned. A run that cannot use them is void.
    pub cores: Vec<usize>,
    /// A process whose CPU time is that of the server.
    pub server_pid: Option<u32>,
    /// The server's metrics, `http://HOST:PORT/metrics`, from which the workers' busy time is read.
    pub metrics: Option<String>,
    /// The share of the time, in [0, 1], that others may take from the client; more makes the run void.
    pub stolen_max: f64,
    /// Ends the run early when set, which makes it void.
    pub cancel: Arc<AtomicBool>,
}

impl Plan {
    /// A closed loop of one 64-byte echo at a time, half a second of warm-up, 2 s of measurement.
    pub fn new(target: Target) -> Self {
        Self {
            target,
            class: None,
            mode: Mode::Closed { window: 1 },
            batch: 1,
            work: Work::Echo { bytes: 64 },
            framing: None,
            connections: None,
            warmup: Duration::from_millis(500),
            duration: Duration::from_secs(2),
            timeout: None,
            cores: Vec::new(),
            server_pid: None,
            metrics: None,
            stolen_max: 0.05,
            cancel: Arc::default(),
        }
    }

    /// The kind of client.
    pub fn class(&self) -> Class {
        let shared_memory = matches!(self.target, Target::Shm(_));
        self.class.unwrap_or(if shared_memory { Class::T3 } else { Class::T0 })
    }

    /// Requests in flight of a closed loop.
    pub fn window(&self) -> Option<usize> {
        match self.mode {
            Mode::Closed { window } => Some(window),
            Mode::Open { .. } => None,
        }
    }

    /// Time-out of requests.
    pub fn timeout(&self) -> Duration {
        let udp = matches!(self.target, Target::Udp(_));
        self.timeout.unwrap_or(match self.mode {
            Mode::Open { .. } if udp => Duration::from_millis(100),
            _ => Duration::from_secs(1),
        })
    }

    /// Framing of requests on TCP.
    pub fn framing(&self) -> Framing {
        let long = |bytes: usize| bytes > usize::from(u16::MAX);
        self.framing.unwrap_or(match &self.work {
            Work::Echo { bytes } if long(*bytes) => Framing::LengthU32,
            Work::Custom(custom) if long(custom.payload.len()) => Framing::LengthU32,
            Work::Echo { .. } | Work::Custom(_) => Framing::LengthU16,
            Work::Sockperf { .. } => Framing::Sockperf,
            work if work.is_memcached() => Framing::Memcached,
            _ => Framing::Fixed(self.work.request_bytes() as u32),
        })
    }

    /// Framing of replies on TCP: replies of `raw` and `fixed` services have no delimiter.
    pub fn reply_framing(&self) -> Framing {
        let framing = self.framing();
        match framing.delimits() {
            Delimits::Both => framing,
            _ => Framing::Fixed(self.work.reply_bytes() as u32),
        }
    }

    /// UDP sockets that the requests in flight share, if so: one per 64 datagrams in flight, at most 4 per client; 16
    /// in an open loop.
    pub fn sockets(&self) -> usize {
        self.connections.unwrap_or(match self.window() {
            Some(window) => (window / 64).clamp(self.clients(), 4 * self.clients()),
            None => 16.max(self.clients()),
        })
    }

    /// The number of the client's threads.
    pub fn clients(&self) -> usize {
        self.cores.len().max(1)
    }

    /// Rejects contradictions.
    pub fn check(&self) -> Result<(), PlanError> {
        let over_udp = matches!(self.target, Target::Udp(_));
        match self.work {
            Work::Memcached { udp: true, .. } if !over_udp => {
                return Err(PlanError::MemcachedOverUdp(self.work.clone()));
            }
            Work::Memcached { udp: false, .. } | Work::FacesDatabase
                if !matches!(self.target, Target::Tcp(_))
                    || self.framing() != Framing::Memcached =>
            {
                return Err(PlanError::MemcachedOverTcp(self.work.clone()));
            }
            _ => {}
        }
        let shares = self.class() == Class::T2 || self.connections.is_some();
        match (&self.target, self.class()) {
            (Target::Tcp(_), Class::T2) => return Err(PlanError::BurstOverTcp),
            (Target::Udp(_) | Target::Tcp(_), Class::T3)
            | (Target::Shm(_), Class::T0 | Class::T2) => return Err(PlanError::SharedMemory),
            (Target::Udp(_), _) if self.work.request_bytes() > UDP_PAYLOAD_MAX => {
                return Err(PlanError::Datagram(self.work.request_bytes()));
            }
            _ => {}
        }
        if self.batch != 1 && self.class() != Class::T2 {
            return Err(PlanError::BatchClass);
        }
        if self.work.key_space().is_some_and(|keys| !keys.is_sound()) {
            return Err(PlanError::Keys);
        }
        // Replies of `raw` and `fixed` services have no delimiter.
        if let (Work::Custom(custom), Target::Tcp(_)) = (&self.work, &self.target)
            && custom.reply_bytes().is_none()
            && self.framing().delimits() != Delimits::Both
        {
            return Err(PlanError::ReplyBytes(self.framing()));
        }
        let window_max = match &self.target {
            Target::Udp(_) if shares => BURST_WINDOW_MAX,
            _ => WINDOW_MAX,
        };
        match self.mode {
            Mode::Closed { window } if !(1..=window_max).contains(&window) => {
                return Err(PlanError::Window(window, window_max));
            }
            _ if !(1..=BATCH_MAX).contains(&self.batch) => {
                return Err(PlanError::Batch(self.batch));
            }
            Mode::Open { rate } if !(rate.is_finite() && (1.0..=1e9).contains(&rate)) => {
                return Err(PlanError::Rate(rate));
            }
            _ => {}
        }
        if let (Some(n), Some(window)) = (self.connections, self.window())
            && !(1..=window).contains(&n)
        {
            return Err(PlanError::Connections(n, window));
        }
        let shared = [self.window(), self.connections].into_iter().flatten().min();
        if let Some(shared) = shared.filter(|shared| *shared < self.clients()) {
            return Err(PlanError::Clients(self.clients(), shared));
        }
        let one_each = self.connections.is_none_or(|n| self.window() == Some(n));
        let udp = matches!(self.target, Target::Udp(_));
        if udp && self.class() == Class::T0 && !one_each && !self.work.has_identity() {
            return Err(PlanError::NoIdentity(self.work.clone()));
        }
        if self.duration.is_zero() {
            return Err(PlanError::Duration);
        }
        Ok(())
    }
}

/// The kind of client; see the [crate].
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Class {
    /// Ordinary kernel sockets
    #[value(name = "T0", alias = "t0")]
    T0,
    /// Batches of datagrams through kernel sockets (GSO, GRO)
    #[value(name = "T2", alias = "t2")]
    T2,
    /// A ring in memory shared with the engine
    #[value(name = "T3", alias = "t3")]
    T3,
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::T0 => "T0",
            Self::T2 => "T2",
            Self::T3 => "T3",
        })
    }
}

/// When requests are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mode {
    /// This many are in flight; each reply is followed by the next request.
    Closed {
        /// Requests in flight.
        window: usize,
    },
    /// At random times (a Poisson process), independent of the server.
    Open {
        /// Requests per second.
        rate: f64,
    },
}

/// A workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// Messages that are echoed.
    Echo {
        /// Their length.
        bytes: usize,
    },
    /// sockperf's ping-pong messages.
    Sockperf {
        /// Their length, header included.
        bytes: usize,
    },
    /// Numbers that are multiplied by 3.
    Scale {
        /// How many in a message.
        numbers: usize,
    },
    /// Handwritten digits; answers are compared with those of the built-in kernel.
    Lenet,
    /// The same; each request ends with its number, and so does its reply.
    NumberedLenet,
    /// Faces, against the built-in pictures in the service's database.
    Faces,
    /// The same without questions about unknown labels.
    FacesKnown,
    /// Gets and sets of a memcached.
    Memcached {
        /// Length of a value.
        value_bytes: usize,
        /// Percentage of gets.
        gets_percent: u8,
        /// In UDP frames.
        udp: bool,
        /// Other keys than some thousand that are equally popular.
        keys: Option<KeySpace>,
    },
    /// The requests of a service of the workload `faces` to its memcached.
    FacesDatabase,
    /// Sealed numbers for `examples/10_secure_multiply`, with the key of measurements.
    SecureMultiply,
    /// CoAP requests with a token.
    Coap {
        /// Whether their signatures are wrong.
        forged: bool,
    },
    /// A message of the user.
    Custom(Arc<Custom>),
}

/// Default percentage of gets of a memcached workload.
const GETS_PERCENT: u8 = 90;

impl Work {
    /// Length of a request.
    pub fn request_bytes(&self) -> usize {
        match *self {
            Self::Echo { bytes } => bytes,
            Self::Sockperf { bytes } => bytes.max(SOCKPERF_HEADER_BYTES),
            Self::Scale { numbers } => 4 * numbers,
            Self::Custom(ref custom) => custom.payload.len(),
            Self::Lenet => Digits::PICTURE_BYTES,
            Self::NumberedLenet => Digits::PICTURE_BYTES + Digits::NUMBER_BYTES,
            Self::Faces | Self::FacesKnown => Faces::REQUEST_BYTES,
            Self::Memcached { value_bytes, .. } => Memcached::message_bytes(value_bytes),
            Self::FacesDatabase => Memcached::message_bytes(Faces::PICTURE_BYTES),
            Self::SecureMultiply => Sealed::REQUEST_BYTES,
            Self::Coap { .. } => Coap::REQUEST_BYTES,
        }
    }

    /// Length of a reply; the maximum if it is not known.
    pub fn reply_bytes(&self) -> usize {
        match self {
            Self::Custom(custom) => custom.reply_bytes().unwrap_or(MESSAGE_BYTES_MAX),
            Self::Lenet => Digits::REPLY_BYTES,
            Self::NumberedLenet => Digits::REPLY_BYTES + Digits::NUMBER_BYTES,
            Self::Faces | Self::FacesKnown => Faces::REPLY_BYTES,
            Self::SecureMultiply => Sealed::REPLY_BYTES,
            _ => self.request_bytes(),
        }
    }

    /// Whether the server is a memcached.
    pub(super) fn is_memcached(&self) -> bool {
        matches!(self, Self::Memcached { .. } | Self::FacesDatabase)
    }

    /// The keys of a memcached's load, if they are not the default ones.
    pub(super) fn key_space(&self) -> Option<KeySpace> {
        match self {
            Self::Memcached { keys, .. } => *keys,
            _ => None,
        }
    }

    /// Whether replies identify their request.
    pub fn has_identity(&self) -> bool {
        match *self {
            Self::Echo { bytes } => Echo::new(bytes).has_identity(),
            Self::Scale { numbers } => Vectors::new(numbers).has_identity(),
            Self::Sockperf { .. }
            | Self::NumberedLenet
            | Self::SecureMultiply
            | Self::Coap { .. } => true,
            Self::Lenet
            | Self::Faces
            | Self::FacesKnown
            | Self::FacesDatabase
            | Self::Custom(_) => false,
            Self::Memcached { udp, .. } => udp,
        }
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Echo { bytes } => write!(f, "echo:{bytes}"),
            Self::Sockperf { bytes } => write!(f, "sockperf:{bytes}"),
            Self::Scale { numbers } => write!(f, "scale:{numbers}"),
            Self::Lenet => f.write_str("lenet"),
            Self::NumberedLenet => f.write_str("lenet-numbered"),
            Self::Faces => f.write_str("faces"),
            Self::FacesKnown => f.write_str("faces-known"),
            Self::Memcached { value_bytes, gets_percent, udp, keys } => {
                let name = if *udp { "memcached-udp" } else { "memcached" };
                write!(f, "{name}:{value_bytes}:{gets_percent}")?;
                let Some(KeySpace { keys, exponent_thousandths, stored }) = keys else {
                    return Ok(());
                };
                write!(f, " of {keys} keys")?;
                if *exponent_thousandths > 0 {
                    write!(f, ", Zipf {}", f64::from(*exponent_thousandths) / 1e3)?;
                }
                stored.map_or(Ok(()), |stored| write!(f, ", {stored} of them stored before"))
            }
            Self::FacesDatabase => f.write_str("faces-database"),
            Self::SecureMultiply => f.write_str("secure-multiply"),
            Self::Coap { forged: false } => f.write_str("coap"),
            Self::Coap { forged: true } => f.write_str("coap-forged"),
            Self::Custom(custom) => write!(f, "a payload of {} bytes", custom.payload.len()),
        }
    }
}

impl FromStr for Work {
    type Err = PlanError;

    fn from_str(text: &str) -> Result<Self, PlanError> {
        let wrong = || PlanError::Work(text.to_owned());
        // `memcached:BYTES:GETS`.
        let (text, gets) = match text.rsplit_once(':') {
            Some((rest, gets)) if rest.starts_with("memcached") && rest.contains(':') => {
                (rest, Some(gets))
            }
            _ => (text, None),
        };
        let gets_percent =
            gets.map_or(Ok(GETS_PERCENT), |gets| gets.parse().map_err(|_| wrong()))?;
        let (name, size) = match text.split_once(':') {
            None => (text, None),
            Some((name, size)) => (name, Some(size.parse::<usize>().map_err(|_| wrong())?)),
        };
        // Messages cannot be longer than those of a service.
        if size.is_some_and(|size| size > MESSAGE_BYTES_MAX) {
            return Err(wrong());
        }
        match (name, size) {
            ("echo", size) => Ok(Self::Echo { bytes: size.unwrap_or(64) }),
            ("sockperf", size) => Ok(Self::Sockperf { bytes: size.unwrap_or(64) }),
            ("scale", size) => Ok(Self::Scale { numbers: size.unwrap_or(Vectors::NUMBERS) }),
            ("lenet", None) => Ok(Self::Lenet),
            ("lenet-numbered", None) => Ok(Self::NumberedLenet),
            ("faces", None) => Ok(Self::Faces),
            ("faces-known", None) => Ok(Self::FacesKnown),
            ("memcached" | "memcached-udp", size) => {
                let value_bytes = size.unwrap_or(1024);
                let sound = value_bytes <= Memcached::VALUE_BYTES_MAX && gets_percent <= 100;
                let udp = name == "memcached-udp";
                let found = Self::Memcached { value_bytes, gets_percent, udp, keys: None };
                sound.then_some(found).ok_or_else(wrong)
            }
            ("faces-database", None) => Ok(Self::FacesDatabase),
            ("secure-multiply", None) => Ok(Self::SecureMultiply),
            ("coap", None) => Ok(Self::Coap { forged: false }),
            ("coap-forged", None) => Ok(Self::Coap { forged: true }),
            _ => Err(wrong()),
        }
    }
}

/// The data of a workload, from which several can be created.
pub(super) enum Material {
    Simple(Work),
    Digits { digits: Vec<Digit<'static>>, expected: Vec<Vec<u8>>, is_numbered: bool },
    Faces(Pictures<'static>),
    FacesKnown(Pictures<'static>),
    FacesDatabase(Pictures<'static>),
    Custom(Arc<Custom>),
}

impl Material {
    pub(super) fn new(work: &Work) -> Result<Self, String> {
        match work {
            Work::Lenet | Work::NumberedLenet => {
                let digits = Digit::held_out();
                let is_numbered = *work == Work::NumberedLenet;
                let (message, reply) = (Digits::PICTURE_BYTES as u32, Digits::REPLY_BYTES as u32);
                let kernel = KernelFunction::open("lenet", &[], message, reply);
                let mut kernel = kernel.map_err(|error| error.to_string())?;
                let mut expected = Vec::with_capacity(digits.len());
                for digit in &digits {
                    let mut reply = Vec::new();
                    let called = kernel.call(digit.picture, &mut reply);
                    called.map_err(|error| format!("the built-in kernel lenet: {error}"))?;
                    expected.push(reply);
                }
                Ok(Self::Digits { digits, expected, is_numbered })
            }
            Work::Faces => Ok(Self::Faces(Pictures::built_in())),
            Work::FacesKnown => Ok(Self::FacesKnown(Pictures::built_in())),
            Work::FacesDatabase => Ok(Self::FacesDatabase(Pictures::built_in())),
            Work::Custom(custom) => Ok(Self::Custom(custom.clone())),
            work => Ok(Self::Simple(work.clone())),
        }
    }

    pub(super) fn workload(&self) -> Box<dyn Workload + '_> {
        match self {
            Self::Simple(Work::Sockperf { bytes }) => Box::new(Sockperf::new(*bytes)),
            Self::Simple(Work::Scale { numbers }) => Box::new(Vectors::new(*numbers)),
            Self::Simple(Work::SecureMultiply) => Box::new(Sealed::new()),
            Self::Simple(work @ Work::Memcached { .. }) => Box::new(memcached(work)),
            Self::Simple(Work::Coap { forged }) => Box::new(Coap::new(*forged)),
            Self::Simple(work) => Box::new(Echo::new(work.request_bytes())),
            Self::Digits { digits, expected, is_numbered: false } => {
                Box::new(Digits::new(digits, Some(expected)))
            }
            Self::Digits { digits, expected, is_numbered: true } => {
                Box::new(Digits::new(digits, Some(expected)).numbered())
            }
            Self::Faces(pictures) => Box::new(Faces::new(&pictures.people)),
            Self::FacesKnown(pictures) => Box::new(Faces::known(&pictures.people)),
            Self::FacesDatabase(pictures) => Box::new(Memcached::faces(&pictures.people)),
            Self::Custom(custom) => Box::new(&**custom),
        }
    }

    /// The workload whose values are stored before the run.
    pub(super) fn stores(&self) -> Option<Memcached<'_>> {
        match self {
            Self::Simple(work @ Work::Memcached { .. }) => Some(memcached(work)),
            Self::FacesDatabase(pictures) => Some(Memcached::faces(&pictures.people)),
            _ => None,
        }
    }
}

/// The requests of the workload `memcached` or `memcached-udp`.
fn memcached(work: &Work) -> Memcached<'static> {
    let Work::Memcached { value_bytes, gets_percent, udp, keys } = work else {
        unreachable!("it is asked for this workload alone");
    };
    let workload = Memcached::new(*value_bytes, *gets_percent).over(*keys);
    if *udp { workload.framed() } else { workload }
}

/// Why a plan is invalid.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// Not a URL of a server.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// No such workload.
    #[error(
        "`{0}` is not a workload: write echo:BYTES, sockperf:BYTES, scale:NUMBERS, lenet, faces, memcached:BYTES:GETS (values of BYTES bytes, at most 1000000; GETS gets per 100 requests), memcached-udp:BYTES:GETS, faces-database, secure-multiply, coap or coap-forged"
    )]
    Work(String),
    /// memcached needs TCP connections.
    #[error(
        "the workload `{0}` is memcached's text protocol over TCP: give a tcp:// server, and no other framing"
    )]
    MemcachedOverTcp(Work),
    /// It needs datagrams.
    #[error("the workload `{0}` is memcached's protocol in UDP frames: give a udp:// server")]
    MemcachedOverUdp(Work),
    /// Shared memory has its own class.
    #[error("class T3 is the one of shm:// servers, and the only one they have")]
    SharedMemory,
    /// T2 needs datagrams.
    #[error("class T2 sends batches of datagrams: give a udp:// server, or leave the class out")]
    BurstOverTcp,
    /// Does not fit a datagram.
    #[error(
        "a message of {0} bytes does not fit a datagram: at most {UDP_PAYLOAD_MAX} do, or use tcp://"
    )]
    Datagram(usize),
    /// The window is outside its range.
    #[error("a window of {0} is not possible here: it must be in [1, {1}]")]
    Window(usize, usize),
    /// The batch is outside its range.
    #[error("{0} requests cannot arrive at the same time: it must be in [1, {BATCH_MAX}]")]
    Batch(usize),
    /// Only clients of class T2 send batches.
    #[error("requests are sent in batches only by clients of class T2: give --class T2")]
    BatchClass,
    /// The keys are outside their range.
    #[error(
        "keys are 1 to {max}, with an exponent of 0 to {exponent}, and at most all of them are stored before",
        max = KeySpace::KEYS_MAX,
        exponent = KeySpace::EXPONENT_MAX / 1000
    )]
    Keys,
    /// The rate is outside its range.
    #[error("a rate of {0} requests a second is not possible: it must be in [1, 1e9]")]
    Rate(f64),
    /// Too few requests for the connections.
    #[error("{0} connections cannot share a window of {1}: use 1 to {1}")]
    Connections(usize, usize),
    /// Too few requests or connections for the clients.
    #[error(
        "clients on {0} cores cannot share {1}: give each at least one request in flight and one connection"
    )]
    Clients(usize, usize),
    /// Replies on one socket cannot be matched.
    #[error(
        "replies of `{0}` do not say which request they answer, so that every request in flight needs a socket of its own: leave the number of connections out"
    )]
    NoIdentity(Work),
    /// The end of a reply is not known.
    #[error(
        "framing {0} does not say where a reply ends: say how long replies are with --expect any:BYTES, or which reply is right with --expect FILE"
    )]
    ReplyBytes(Framing),
    /// Nothing would be measured.
    #[error("a duration of 0 measures nothing: give the seconds to measure, such as 2s")]
    Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(target: &str, work: &str) -> Plan {
        Plan { work: work.parse().unwrap(), ..Plan::new(target.parse().unwrap()) }
    }

    #[test]
    fn targets_and_workloads_round_trip() {
        for text in ["udp://127.0.0.1:9000", "tcp://[::1]:9000", "shm:///run/digits"] {
            assert_eq!(text.parse::<Target>().unwrap().to_string(), text);
        }
        for text in
            ["127.0.0.1:9000", "udp://127.0.0.1", "udp://127.0.0.1:0", "http://127.0.0.1:80", ""]
        {
            assert!(matches!(text.parse::<Target>(), Err(TargetError { .. })), "{text}");
        }
        let works = [
            "echo:64",
            "echo:0",
            "sockperf:14",
            "scale:8",
            "lenet",
            "faces",
            "faces-known",
            "coap",
        ];
        for text in works.into_iter().chain([
            "memcached:0:0",
            "memcached-udp:100:95",
            "faces-database",
            "coap-forged",
        ]) {
            assert_eq!(text.parse::<Work>().unwrap().to_string(), text);
        }
        assert_eq!("echo".parse(), Ok(Work::Echo { bytes: 64 }));
        let memcached = |value_bytes| {
            Ok(Work::Memcached { value_bytes, gets_percent: 90, udp: false, keys: None })
        };
        assert_eq!("memcached".parse(), memcached(1024));
        assert_eq!("memcached:7".parse(), memcached(7));
        for text in [
            "echo:",
            "echo:x",
            "echo:-1",
            "lenet:3",
            "spin",
            "",
            "echo:99999999999999999999",
            "memcached:64:101",
            "memcached:64:",
            "memcached:64:9:9",
            "memcached:1000001",
            "faces-database:3",
            "echo:9000000",
        ] {
            assert!(matches!(text.parse::<Work>(), Err(PlanError::Work(_))), "{text}");
        }
    }

    #[test]
    fn a_key_space_is_shown_and_checked() {
        let with = |keys, exponent_thousandths, stored| {
            let space = KeySpace { keys, exponent_thousandths, stored };
            Plan {
                work: Work::Memcached {
                    value_bytes: 16,
                    gets_percent: 90,
                    udp: false,
                    keys: Some(space),
                },
                ..plan("tcp://127.0.0.1:1", "memcached")
            }
        };
        let zipf = with(32_000_000, 900, Some(2_000_000));
        assert_eq!(
            zipf.work.to_string(),
            "memcached:16:90 of 32000000 keys, Zipf 0.9, 2000000 of them stored before"
        );
        assert_eq!(with(5, 0, None).work.to_string(), "memcached:16:90 of 5 keys");
        assert_eq!(zipf.check(), Ok(()));
        for wrong in
            [with(0, 0, None), with(1 << 30, 0, None), with(9, 5001, None), with(9, 0, Some(10))]
        {
            assert_eq!(wrong.check(), Err(PlanError::Keys), "{}", wrong.work);
        }
    }

    #[test]
    fn the_default_framing_depends_on_the_workload() {
        let framings = |work| {
            let plan = plan("tcp://127.0.0.1:1", work);
            (plan.framing().to_string(), plan.reply_framing().to_string())
        };
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        assert_eq!(framings("echo:64"), pair("length:u16", "length:u16"));
        assert_eq!(framings("echo:70000"), pair("length:u32", "length:u32"));
        assert_eq!(framings("sockperf:64"), pair("sockperf", "sockperf"));
        assert_eq!(framings("scale:64"), pair("fixed:256", "fixed:256"));
        assert_eq!(framings("lenet"), pair("fixed:784", "fixed:44"));
        assert_eq!(framings("faces"), pair("fixed:1036", "fixed:8"));
        assert_eq!(framings("memcached"), pair("memcached", "memcached"));
    }

    #[test]
    fn contradictions_are_refused() {
        let closed = |window| Mode::Closed { window };
        let cases = [
            (Plan { class: Some(Class::T2), ..plan("tcp://127.0.0.1:1", "echo") }, "udp:// server"),
            (
                Plan { class: Some(Class::T3), ..plan("udp://127.0.0.1:1", "echo") },
                "shm:// servers",
            ),
            (Plan { class: Some(Class::T0), ..plan("shm:///run/a", "echo") }, "shm:// servers"),
            (plan("udp://127.0.0.1:1", "memcached"), "give a tcp:// server"),
            (plan("tcp://127.0.0.1:1", "memcached-udp:16:100"), "give a udp:// server"),
            (
                Plan { framing: Some(Framing::Raw), ..plan("tcp://127.0.0.1:1", "memcached") },
                "no other framing",
            ),
            (plan("udp://127.0.0.1:1", "echo:65508"), "does not fit a datagram"),
            (Plan { mode: closed(0), ..plan("udp://127.0.0.1:1", "echo") }, "[1, 4096]"),
            (Plan { mode: closed(5000), ..plan("tcp://127.0.0.1:1", "echo") }, "[1, 4096]"),
            (
                Plan {
                    mode: closed(65_537),
                    class: Some(Class::T2),
                    ..plan("udp://127.0.0.1:1", "echo")
                },
                "[1, 65536]",
            ),
            (
                Plan { mode: Mode::Open { rate: 0.0 }, ..plan("udp://127.0.0.1:1", "echo") },
                "[1, 1e9]",
            ),
            (Plan { connections: Some(2), ..plan("tcp://127.0.0.1:1", "echo") }, "use 1 to 1"),
            (
                Plan {
                    connections: Some(2),
                    mode: closed(4),
                    ..plan("udp://127.0.0.1:1", "lenet")
                },
                "socket of its own",
            ),
            (
                Plan { cores: vec![0, 1], ..plan("udp://127.0.0.1:1", "echo") },
                "2 cores cannot share 1",
            ),
            (
                Plan { duration: Duration::ZERO, ..plan("udp://127.0.0.1:1", "echo") },
                "measures nothing",
            ),
        ];
        for (plan, part) in cases {
            let error = plan.check().unwrap_err().to_string();
            assert!(error.contains(part), "{part}: {error}");
        }
        for works in [
            Plan { class: Some(Class::T2), mode: closed(4), ..plan("udp://127.0.0.1:1", "lenet") },
            Plan { connections: Some(4), mode: closed(4), ..plan("udp://127.0.0.1:1", "lenet") },
            Plan { connections: Some(2), mode: closed(4), ..plan("udp://127.0.0.1:1", "echo") },
            Plan { mode: Mode::Open { rate: 1e5 }, ..plan("udp://127.0.0.1:1", "lenet") },
        ] {
            assert_eq!(works.check(), Ok(()), "{works:?}");
        }
    }
}
