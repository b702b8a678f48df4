//! The built-in functions, and what they need.

use std::borrow::Cow;

use onpath::Spec;
use onpath::spec::INSTANCES;

use crate::coap_auth::{coap_auths, memory as coap_auth_memory};
use crate::count_min::CountMinFunction;
use crate::deliver::Deliver;
use crate::echo::Echo;
use crate::generator::Generator;
use crate::hyperloglog::HyperLogLogFunction;
use crate::instances::{Instances, Memory, alone, no_memory};
use crate::memcached_cache::{instances as memcached_caches, memory as memcached_cache_memory};
use crate::passthrough::Passthrough;
use crate::peer_address::PeerAddress;
use crate::rate_limiter::{rate_limiter_memory, rate_limiters};
use crate::threshold::Threshold;

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
    pub(crate) instances: fn() -> Instances,
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
    pub(crate) fn params(&self) -> impl Iterator<Item = &'static str> {
        self.settings.iter().chain(self.texts).chain(&self.file).map(|(name, _)| *name)
    }
}

/// The built-in function of this name.
pub fn builtin(name: &str) -> Option<&'static Builtin> {
    BUILTINS.iter().find(|builtin| builtin.name == name)
}

/// The memory of a function's instances.
fn memory(spec: &Spec) -> Memory {
    if spec.is_module() {
        return Memory::of_worker((u64::from(spec.memory_mib) << 20) * INSTANCES as u64);
    }
    builtin(&spec.function).map_or(Memory::NONE, |builtin| (builtin.memory)(spec))
}

/// What all instances of a function may use, on this number of workers, with the dictionary.
pub fn memory_on(spec: &Spec, workers: usize) -> u64 {
    let dictionary = spec.dictionary.as_ref().map_or(0, |_| u64::from(spec.dictionary_kib) << 10);
    let Memory { of_worker, of_all } = memory(spec);
    // Settings may have any value until the function has refused them.
    of_worker.saturating_mul(workers as u64).saturating_add(of_all).saturating_add(dictionary)
}

/// The name of the parameter that is the path of a file.
pub fn file_param(spec: &Spec) -> Option<&'static str> {
    Some(builtin(&spec.function)?.file?.0)
}

/// The path of the file whose content [`Code::open`](crate::Code::open) needs. That of a module in the directory of functions is found there.
pub fn file_of(spec: &Spec) -> Option<Cow<'_, str>> {
    if spec.pin().is_some() {
        return None;
    }
    if spec.is_module() {
        return Some(spec.function.as_str().into());
    }
    let file = file_param(spec)?;
    Some(spec.params.iter().find(|(name, _)| name == file)?.1.text())
}

/// The path of a file with keys, which no other user should have access to.
pub fn secret_file(spec: &Spec) -> Option<Cow<'_, str>> {
    file_of(spec).filter(|_| file_param(spec) == Some("keys"))
}
