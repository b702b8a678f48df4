//! Which functions there are, and how instances of them are made.

mod pin;

use std::borrow::Cow;
use std::fmt;
use std::io::{self, Read};
use std::sync::Arc;

use crate::builtin::{
    CountMinFunction, Deliver, Echo, Generator, HyperLogLogFunction, Passthrough, PeerAddress,
    Threshold, coap_auth_memory, coap_auths, memcached_cache_memory, memcached_caches,
    rate_limiter_memory, rate_limiters,
};
use crate::chain::OnFailure;
use crate::dictionary::Dictionary;
use crate::function::{Failure, Function, Merge, Register};
use crate::state::StateKind;

pub use pin::Pin;

/// Functions of one service, at most.
pub const FUNCTIONS_MAX: usize = 16;
/// Longest name of a function in a chain, in bytes.
pub const NAME_BYTES_MAX: usize = 64;
/// Longest module, in bytes.
pub const MODULE_BYTES_MAX: u64 = 8 << 20;

/// Reads a module, of at most [`MODULE_BYTES_MAX`].
pub fn read_module(file: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(MODULE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MODULE_BYTES_MAX {
        let why = format!("it has more than {MODULE_BYTES_MAX} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
    }
    Ok(bytes)
}
/// Deadline of a call by default and at most, in microseconds. A worker that shares its core with others is often interrupted for
/// several milliseconds.
pub const DEADLINE_US: u64 = 50_000;
/// See [`DEADLINE_US`].
pub const DEADLINE_US_MAX: u64 = 1_000_000;
/// Memory of an instance of a module by default and at most, in MiB.
pub const MEMORY_MIB: u32 = 4;
/// Default of `dictionary_kib`.
pub const DICTIONARY_KIB: u32 = 64;
/// See [`MEMORY_MIB`].
pub const MEMORY_MIB_MAX: u32 = 1024;
/// The directory of functions, by default.
pub const DIRECTORY: &str = "/var/lib/serval/functions";
/// The end of the name of a module's file.
pub const MODULE_SUFFIX: &str = ".wasm";

/// The value of a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Param {
    /// The value of a setting.
    Integer(u64),
    /// A text, or the path of a file.
    Text(String),
}

impl From<u64> for Param {
    fn from(value: u64) -> Self {
        Self::Integer(value)
    }
}

impl From<&str> for Param {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl fmt::Display for Param {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Integer(value) => write!(f, "{value}"),
            Self::Text(text) => write!(f, "{text:?}"),
        }
    }
}

impl Param {
    /// The value as a text: digits without quotes are one as well.
    fn text(&self) -> Cow<'_, str> {
        match self {
            Self::Integer(value) => value.to_string().into(),
            Self::Text(text) => text.into(),
        }
    }
}

/// A function as a configuration describes it: `[[service.function]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// Its name in the chain of its service.
    pub name: String,
    /// A built-in function, the path of a WebAssembly module, which ends in `.wasm`, or a module of the directory of functions ([`Pin`]).
    pub function: String,
    /// Values of its parameters by name; the others have their defaults.
    pub params: Vec<(String, Param)>,
    /// What becomes of its messages while it does not work.
    pub on_failure: OnFailure,
    /// How long a call for a batch may take, in microseconds.
    pub deadline_us: u64,
    /// Memory of an instance of a module, in MiB.
    pub memory_mib: u32,
    /// The dictionary that it shares with the functions of its owner that name the same one.
    pub dictionary: Option<String>,
    /// The size of that, in KiB.
    pub dictionary_kib: u32,
}

/// Instances of a module that a worker may have: the one that works, and two in reserve.
pub(crate) const INSTANCES: usize = 3;
/// Default of `memory_mib` of a cache.
pub(crate) const CACHE_MEMORY_MIB: u64 = 16;

impl Spec {
    /// A function with every optional field at its default.
    pub fn new(name: &str, function: &str) -> Self {
        Self {
            name: name.to_owned(),
            function: function.to_owned(),
            params: Vec::new(),
            on_failure: OnFailure::Closed,
            deadline_us: DEADLINE_US,
            memory_mib: MEMORY_MIB,
            dictionary: None,
            dictionary_kib: DICTIONARY_KIB,
        }
    }

    /// Whether it is a module.
    pub fn is_module(&self) -> bool {
        self.function.ends_with(MODULE_SUFFIX) || self.pin().is_some()
    }

    /// The memory of its instances.
    fn memory(&self) -> Memory {
        if self.is_module() {
            return Memory::of_worker((u64::from(self.memory_mib) << 20) * INSTANCES as u64);
        }
        builtin(&self.function).map_or(Memory::NONE, |builtin| (builtin.memory)(self))
    }

    /// The value of a setting of a built-in function, or its default.
    pub(crate) fn setting(&self, name: &str, default: u64) -> u64 {
        let given = self.params.iter().rev().find(|(of, _)| of == name);
        match given {
            Some((_, Param::Integer(value))) => *value,
            _ => default,
        }
    }

    /// What all instances may use, on this number of workers, with the dictionary.
    pub fn memory_on(&self, workers: usize) -> u64 {
        let dictionary =
            self.dictionary.as_ref().map_or(0, |_| u64::from(self.dictionary_kib) << 10);
        let Memory { of_worker, of_all } = self.memory();
        // Settings may have any value until the function has refused them.
        of_worker.saturating_mul(workers as u64).saturating_add(of_all).saturating_add(dictionary)
    }

    /// Its name in the directory of functions, if it is there.
    pub fn pin(&self) -> Option<Pin> {
        self.function.parse().ok()
    }

    /// The name of the parameter that is the path of a file.
    pub fn file_param(&self) -> Option<&'static str> {
        Some(builtin(&self.function)?.file?.0)
    }

    /// The path of the file whose content [`Code::open`] needs. That of a module in the directory of functions is found there.
    pub fn file(&self) -> Option<Cow<'_, str>> {
        if self.pin().is_some() {
            return None;
        }
        if self.is_module() {
            return Some(self.function.as_str().into());
        }
        let file = self.file_param()?;
        Some(self.params.iter().find(|(name, _)| name == file)?.1.text())
    }

    /// The path of a file with keys, which no other user should have access to.
    pub fn secret_file(&self) -> Option<Cow<'_, str>> {
        self.file().filter(|_| self.file_param() == Some("keys"))
    }
}

/// Whether a function can have this name: 1 to 64 letters, digits, `_` and `-`. The first one is no `-`: commands would take the name for an option.
pub fn is_name(name: &str) -> bool {
    let letter = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    (1..=NAME_BYTES_MAX).contains(&name.len()) && name.chars().all(letter) && !name.starts_with('-')
}

/// Makes the instances of one attached function, which may share something.
pub type Instances = Arc<dyn Fn() -> Box<dyn Function> + Send + Sync>;

/// Instances that share nothing.
fn alone<F: Function + Default + 'static>() -> Instances {
    Arc::new(|| Box::new(F::default()))
}

/// A function that is part of the program.
#[derive(Clone, Copy, Debug)]
pub struct Builtin {
    /// Its name.
    pub name: &'static str,
    /// What it does, one sentence.
    pub summary: &'static str,
    /// Its settings, with their meaning.
    pub settings: &'static [(&'static str, &'static str)],
    /// Its parameters that are texts, with their meaning.
    pub texts: &'static [(&'static str, &'static str)],
    /// Its parameter that is the path of a file, with its meaning. It must be given.
    pub file: Option<(&'static str, &'static str)>,
    /// What it takes with these parameters.
    memory: fn(&Spec) -> Memory,
    instances: fn() -> Instances,
}

/// Memory of a function that counts against its tenant's, in bytes. What is the same for every function, some kilobytes, does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    /// That of each worker.
    pub(crate) of_worker: u64,
    /// What all workers share.
    pub(crate) of_all: u64,
}

impl Memory {
    pub(crate) const NONE: Self = Self { of_worker: 0, of_all: 0 };

    pub(crate) fn of_worker(bytes: u64) -> Self {
        Self { of_worker: bytes, of_all: 0 }
    }

    pub(crate) fn of_all(bytes: u64) -> Self {
        Self { of_worker: 0, of_all: bytes }
    }
}

/// Of functions that keep some counters and nothing else.
fn no_memory(_: &Spec) -> Memory {
    Memory::NONE
}

/// Every built-in function.
pub const BUILTINS: &[Builtin] = &[
    Builtin {
        name: "coap-auth",
        summary: "lets only CoAP requests pass whose payload is a CBOR map with a valid JSON Web Token, signed with HS256, as \"token\"",
        settings: &[
            (
                "window_s",
                "how long ago tokens may have been issued (`iat`), in seconds; 0: any time (0)",
            ),
            ("leeway_s", "by how much clocks may differ, in seconds (60)"),
            (
                "once",
                "1: only one message may use a token, and retransmissions of it; needs `window_s` (0)",
            ),
        ],
        texts: &[
            (
                "tenant",
                "the name of the only key that is used; otherwise `kid` of the token names it (all keys of the file)",
            ),
            (
                "refuse",
                "`\"drop\"`: requests that do not pass are dropped; `\"answer\"`: they are answered with 4.01 (`\"drop\"`)",
            ),
            (
                "forward",
                "what goes on: `\"message\"`, or `\"payload\"`: the value of \"payload\" alone, for kernels that do not speak CoAP (`\"message\"`)",
            ),
        ],
        file: Some((
            "keys",
            "the file of keys: a name and a key of 32 to 512 bytes in base64url on each line",
        )),
        memory: coap_auth_memory,
        instances: coap_auths,
    },
    Builtin {
        name: "count-min",
        summary: "counts how often each item occurs in requests, and lists the most frequent ones. A count may be too large, by \
                  2.7 of `width` items with a probability of e^-depth at most. Everything passes",
        settings: &[
            ("width", "counters in a row, a power of two: 16 to 1 048 576 (4096)"),
            ("depth", "rows: 1 to 8 (4)"),
            ("top", "items of the list: 0 to 256 (32)"),
            ("offset", "where the item begins in a request, in bytes (0)"),
            ("length", "bytes of the item; 0: to the end (0)"),
            ("seed", "seed of the hash (0)"),
        ],
        texts: &[],
        file: None,
        memory: CountMinFunction::memory,
        instances: alone::<CountMinFunction>,
    },
    Builtin {
        name: "deliver",
        summary: "puts every request into the ring of the application that made it (`custom_ring_create` in serval/ik.h); without a ring \
                  requests are dropped as `ring_full`",
        settings: &[],
        texts: &[],
        file: None,
        memory: no_memory,
        instances: alone::<Deliver>,
    },
    Builtin {
        name: "echo",
        summary: "answers each request with its own bytes",
        settings: &[],
        texts: &[],
        file: None,
        memory: no_memory,
        instances: alone::<Echo>,
    },
    Builtin {
        name: "generator",
        summary: "answers each request with a message that it makes: a 64-bit number that counts up, most significant byte first, \
                  then one byte again and again",
        settings: &[("length", "bytes of the message: 0 to 2048 (64)"), ("byte", "the byte (46)")],
        texts: &[],
        file: None,
        memory: no_memory,
        instances: alone::<Generator>,
    },
    Builtin {
        name: "hyperloglog",
        summary: "estimates how many different items requests have had, with a standard error of 1.04 / sqrt(2^precision). \
                  Everything passes",
        settings: &[
            ("precision", "the sketch has 2^precision bytes: 4 to 18 (14)"),
            ("hash_bits", "32 or 64 (64)"),
            (
                "item_bytes",
                "0: a request is one item; 4 or 8: each whole word of this length is one (0)",
            ),
            ("offset", "where items begin in a request, in bytes (0)"),
            ("length", "bytes of a request that are items, from `offset` on; 0: all (0)"),
            ("seed", "seed of the hash (3 131 961 357)"),
        ],
        texts: &[],
        file: None,
        memory: HyperLogLogFunction::memory,
        instances: alone::<HyperLogLogFunction>,
    },
    Builtin {
        name: "memcached-cache",
        summary: "answers `get` and `gets` in front of a memcached, and never with what was overwritten",
        settings: &[
            ("memory_mib", "memory for values on each worker, in MiB: 1 to 4096 (16)"),
            (
                "age_ms",
                "for how long a value is served at most, in milliseconds; 0: as long as the server says (60 000)",
            ),
            (
                "sample",
                "one hit in this number is forwarded, so that the server knows that the key is in use; 0: none (64)",
            ),
            (
                "grace_ms",
                "for how long a key is not served from the cache if it is not known whether the server has done a write, in \
              milliseconds (2000)",
            ),
            ("udp_writes", "0: datagrams that may change keys are dropped (1)"),
            (
                "absent_ms",
                "for how long it is served that the server does not have a key, in milliseconds; 0: not at all (0)",
            ),
        ],
        texts: &[],
        file: None,
        memory: memcached_cache_memory,
        instances: memcached_caches,
    },
    Builtin {
        name: "passthrough",
        summary: "lets every message pass, and counts it",
        settings: &[],
        texts: &[],
        file: None,
        memory: no_memory,
        instances: alone::<Passthrough>,
    },
    Builtin {
        name: "peer-address",
        summary: "puts 32 bytes in front of each request: the address, port and family of its client, for kernels ([kernels.md](kernels.md#where-a-request-comes-from))",
        settings: &[],
        texts: &[],
        file: None,
        memory: no_memory,
        instances: alone::<PeerAddress>,
    },
    Builtin {
        name: "rate-limiter",
        summary: "drops requests above a rate, with all workers together",
        settings: &[
            ("rate", "requests a second: 1 to 1 000 000 000 (1000)"),
            ("burst", "requests at once after a pause: 1 to 4 294 967 296 (100)"),
            ("offset", "where the range of `by = \"range\"` begins in a request, in bytes (0)"),
            ("length", "bytes of the range; 0: to the end (0)"),
        ],
        texts: &[(
            "by",
            "whose requests have the rate: `\"service\"` all together; `\"client\"` those of each address (of IPv6 its first 64 bits), of \
             other clients than datagrams those of each connection; `\"range\"` those with the same bytes there (`\"service\"`)",
        )],
        file: None,
        memory: rate_limiter_memory,
        instances: rate_limiters,
    },
    Builtin {
        name: "threshold",
        summary: "drops requests whose number is outside of limits, and keeps statistics. The number is a 32-bit unsigned \
                  integer, most significant byte first",
        settings: &[
            ("offset", "where the number begins in a request, in bytes (14)"),
            ("low", "least number that passes (0)"),
            ("high", "greatest number that passes (4 294 967 295)"),
        ],
        texts: &[],
        file: None,
        memory: no_memory,
        instances: alone::<Threshold>,
    },
];

impl Builtin {
    /// The names of all parameters.
    fn params(&self) -> impl Iterator<Item = &'static str> {
        self.settings.iter().chain(self.texts).chain(&self.file).map(|(name, _)| *name)
    }
}

/// The built-in function of this name.
pub fn builtin(name: &str) -> Option<&'static Builtin> {
    BUILTINS.iter().find(|builtin| builtin.name == name)
}

/// Why a function cannot be used. One sentence each.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LibraryError {
    /// No built-in function has this name, and it is no module's file.
    #[error(
        "there is no built-in function {0:?}: use {names}, the path of a WebAssembly module, which ends in .wasm, or NAME@sha256:DIGEST",
        names = names()
    )]
    Unknown(String),
    /// A parameter that the function does not have.
    #[error("the function {function:?} has no parameter {param:?}: {right}")]
    NoParam {
        /// The function.
        function: String,
        /// The parameter.
        param: String,
        /// What it has.
        right: String,
    },
    /// A value that a parameter cannot have.
    #[error("the function {function:?} does not take {param} = {value}: {why}")]
    WrongParam {
        /// The function.
        function: String,
        /// The parameter.
        param: String,
        /// The value.
        value: Param,
        /// What the function says.
        why: Failure,
    },
    /// Parameters that do not fit together, or that there is no memory for.
    #[error("the function {function:?} does not take its parameters: {why}")]
    WrongParams {
        /// The function.
        function: String,
        /// What the function says.
        why: Failure,
    },
    /// The path of its file is missing.
    #[error("the function {function:?} needs the parameter {param:?}: {what}")]
    NoFile {
        /// The function.
        function: String,
        /// The parameter.
        param: &'static str,
        /// Its meaning.
        what: &'static str,
    },
    /// The file cannot be used.
    #[error("the function {function:?} cannot use the file of {param:?}: {why}")]
    File {
        /// The function.
        function: String,
        /// The parameter.
        param: &'static str,
        /// What the function says.
        why: Failure,
    },
    /// The file is no module that can be a function.
    #[error("the module {file} cannot be used: {why}")]
    Module {
        /// The file.
        file: String,
        /// What is wrong and what would be right.
        why: String,
    },
    /// Several workers would each have a part of its state.
    #[error(
        "the state of {function} is `{state}`, as its manifest says, and each of {workers} workers would have a part of it on the path to a backend or through a proxy over TCP: set engine.workers = 1"
    )]
    Workers {
        /// The function.
        function: String,
        /// What the manifest says.
        state: StateKind,
        /// The workers of the engine.
        workers: usize,
    },
    /// The program was built without the host of modules.
    #[error(
        "the module {0} cannot be used: this program was built without WebAssembly (feature `wasm`)"
    )]
    NoHost(String),
}

fn names() -> String {
    let names: Vec<_> = BUILTINS.iter().map(|builtin| builtin.name).collect();
    names.join(", ")
}

/// What instances of a function are made of.
#[derive(Clone)]
pub enum Code {
    /// A built-in function, and the content of its file.
    Builtin(&'static Builtin, Arc<[u8]>, Instances),
    /// A compiled module.
    #[cfg(feature = "wasm")]
    Module(crate::wasm::Module),
}

/// How long messages are.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Longest request, in bytes.
    pub message_bytes: usize,
    /// Longest reply, in bytes.
    pub reply_bytes: usize,
}

impl Code {
    /// The code of a function. `content` is that of its file ([`Spec::file`]), or nothing. Compiling a module takes long: call this where no
    /// message waits.
    pub fn open(spec: &Spec, content: &[u8]) -> Result<Self, LibraryError> {
        Self::open_until(spec, content, &|| false)
    }

    /// The same; it gives up compiling a module when `stop` says that it is no longer wanted.
    pub fn open_until(
        spec: &Spec,
        content: &[u8],
        stop: &dyn Fn() -> bool,
    ) -> Result<Self, LibraryError> {
        if let Some(builtin) = builtin(&spec.function) {
            return Ok(Self::Builtin(builtin, content.into(), (builtin.instances)()));
        }
        if !spec.is_module() {
            return Err(LibraryError::Unknown(spec.function.clone()));
        }
        #[cfg(feature = "wasm")]
        {
            let file = || spec.function.clone();
            let module = crate::wasm::Module::compile_until(content, stop);
            module.map(Self::Module).map_err(|why| LibraryError::Module { file: file(), why })
        }
        #[cfg(not(feature = "wasm"))]
        {
            let _ = (content, stop);
            Err(LibraryError::NoHost(spec.function.clone()))
        }
    }

    /// The memory that it takes besides that of its instances, in bytes.
    pub fn code_bytes(&self) -> u64 {
        match self {
            Self::Builtin(..) => 0,
            #[cfg(feature = "wasm")]
            Self::Module(module) => module.code_bytes(),
        }
    }

    /// The same code for another function: what a function's instances share is not shared with it.
    #[must_use]
    pub fn apart(&self) -> Self {
        match self {
            Self::Builtin(builtin, content, _) => {
                Self::Builtin(builtin, content.clone(), (builtin.instances)())
            }
            #[cfg(feature = "wasm")]
            Self::Module(module) => Self::Module(module.apart()),
        }
    }

    /// How its state belongs together.
    pub fn state(&self) -> StateKind {
        match self {
            Self::Builtin(..) => StateKind::Mergeable,
            #[cfg(feature = "wasm")]
            Self::Module(module) => module.manifest().map(|m| m.state).unwrap_or_default(),
        }
    }

    /// Whether this number of workers keeps its state together, see [`StateKind::fits`].
    pub fn check_workers(
        &self,
        spec: &Spec,
        workers: usize,
        hands_over: bool,
    ) -> Result<(), LibraryError> {
        let (state, function) = (self.state(), spec.function.clone());
        match state.fits(workers, hands_over) {
            true => Ok(()),
            false => Err(LibraryError::Workers { function, state, workers }),
        }
    }

    /// An instance, with the parameters of `spec` and a dictionary of its own if it names one.
    pub fn instance(&self, spec: &Spec, sizes: Sizes) -> Result<Box<dyn Function>, LibraryError> {
        let own = spec.dictionary.as_ref();
        let own = own.map(|_| Arc::new(Dictionary::new(spec.dictionary_kib)));
        self.instance_with(spec, sizes, own)
    }

    /// The same with this dictionary.
    pub fn instance_with(
        &self,
        spec: &Spec,
        sizes: Sizes,
        dictionary: Option<Arc<Dictionary>>,
    ) -> Result<Box<dyn Function>, LibraryError> {
        let mut function = self.make(spec, sizes, dictionary.clone())?;
        if let Some(dictionary) = dictionary {
            function.use_dictionary(dictionary);
        }
        for (param, value) in &spec.params {
            self.set(&mut *function, &spec.function, param, value)?;
        }
        if let Self::Builtin(Builtin { file: Some((param, what)), .. }, content, _) = self {
            let function_name = || spec.function.clone();
            if spec.file().is_none() {
                return Err(LibraryError::NoFile { function: function_name(), param, what });
            }
            function.configure(param, content).map_err(|why| LibraryError::File {
                function: function_name(),
                param,
                why,
            })?;
        }
        let wrong = |why| LibraryError::WrongParams { function: spec.function.clone(), why };
        function.ready().map_err(wrong)?;
        Ok(function)
    }

    /// Gives a function the value of a parameter. The one that is a file gets its content otherwise.
    fn set(
        &self,
        function: &mut dyn Function,
        name: &str,
        param: &str,
        value: &Param,
    ) -> Result<(), LibraryError> {
        let builtin = match self {
            Self::Builtin(builtin, ..) => Some(*builtin),
            #[cfg(feature = "wasm")]
            Self::Module(_) => None,
        };
        let wrong = |why| LibraryError::WrongParam {
            function: name.to_owned(),
            param: param.to_owned(),
            value: value.clone(),
            why,
        };
        if let Some(builtin) = builtin {
            if builtin.file.is_some_and(|(file, _)| file == param) {
                return Ok(());
            }
            if builtin.texts.iter().any(|(text, _)| *text == param) {
                return function.configure(param, value.text().as_bytes()).map_err(wrong);
            }
        }
        let is_setting = |register: &&Register| register.merge == Merge::Setting;
        let found = function.registers().iter().position(|r| is_setting(&r) && &*r.name == param);
        let Some(register) = found else {
            let settings = function.registers().iter().filter(is_setting).map(|r| &*r.name);
            let params: Vec<&str> = match builtin {
                Some(builtin) => builtin.params().collect(),
                None => settings.collect(),
            };
            let right = match params.as_slice() {
                [] => "it has none".to_owned(),
                params => format!("it has {}", params.join(", ")),
            };
            let (function, param) = (name.to_owned(), param.to_owned());
            return Err(LibraryError::NoParam { function, param, right });
        };
        let Param::Integer(integer) = value else {
            return Err(wrong(Failure("it is an integer".to_owned())));
        };
        function.write(register, *integer).map_err(wrong)
    }

    fn make(
        &self,
        spec: &Spec,
        sizes: Sizes,
        dictionary: Option<Arc<Dictionary>>,
    ) -> Result<Box<dyn Function>, LibraryError> {
        match self {
            Self::Builtin(_, _, instances) => {
                let _ = (spec, sizes, dictionary);
                Ok(instances())
            }
            #[cfg(feature = "wasm")]
            Self::Module(module) => {
                let limits = crate::wasm::Limits {
                    memory_bytes: (spec.memory_mib as usize) << 20,
                    deadline_us: spec.deadline_us,
                    sizes,
                };
                let file = || spec.function.clone();
                match module.instance(limits, dictionary) {
                    Ok(instance) => Ok(Box::new(instance)),
                    Err(why) => Err(LibraryError::Module { file: file(), why }),
                }
            }
        }
    }
}
