//! The fuzz targets: one function for each input that an untrusted party can write, from bytes to a
//! check of the properties that must hold for all inputs. A panic is a finding.
//!
//! | target | untrusted party | properties |
//! |---|---|---|
//! | `framing_request`, `framing_response` | a client, a backend | no panic, bounded buffers, the same messages however the stream is cut, encoded messages are decoded |
//! | `region` | the process that formatted the joined memory | refused, or its rings access only what the directory gives them |
//! | `ring` | the peer at the other end of a ring | at worst errors; no access outside the ring; every loop ends |
//! | `worker` | a shared-memory client and an accelerator, any word of their regions | no panic; every accepted request has one outcome or is outstanding |
//! | `sockets` | a kernel with sockets, any word of its region, and the peers of its connections | no panic; the network is used by its contract; every byte and every connection is counted once, and ends with its peer |
//! | `collective` | another rank of a collective | a message has one encoding, or is refused; a call notices a wrong header, ends, and reads no byte of the next one |
//! | `config` | a file, an environment, flags | no panic; every error has a position inside the text; an accepted configuration passes the engine's own check |
//! | `metrics_request` | a client of the metrics port | decided once, whatever the chunks; no request without its end |
//! | `control` | a process at the control socket, or a false engine that answers | a request is decoded as encoded, or refused in a short line; no answer contains terminal control sequences |
//! | `function` | a module on the path of messages, its whole memory and its file | descriptors, registers and the manifest are read inside the memory or the file, or refused in a short line |
//! | `memcached_cache` | clients and the server of the function `memcached-cache` | no panic; hits are whole answers; what is forwarded is one command |
//! | `coap` | a CoAP client, and the holder of a key who signs a token | refused or understood inside the datagram; nothing passes without a signature |
//! | `attach` | a process at an accelerator's socket, or a false engine | a message has one encoding, or is refused |
//! | `handshake` | a process at a shared-memory port, or a false engine | decoded as encoded, or refused |
//! | `link` | a stranger at the listener of a remote accelerator, or an authenticated side of a link | the same messages however the stream is cut; each has one encoding, or is refused |
//! | `expand` | a peer that sends compressed data to be expanded | no more than the limits comes out; the same bytes, or a reason, however the data is cut |
//! | `sealed` | a peer that sends a sealed stream to be opened | nothing that was not sealed with the key opens; the same bytes or the same reason however the stream is cut |
//! | `transfer` | a process at the socket for transfers, or a false engine that answers | a request and an answer have one encoding, or are refused; no answer contains terminal control sequences |
//!
//! The targets are coverage-guided (libFuzzer) and need only the stable compiler:
//! `cargo xtask fuzz SECONDS` builds them, runs each over its corpus and then for that long; `make test` runs each over
//! its corpus (`xtask/tests/corpus.rs`);
//! `cargo xtask fuzz --planted` checks that each finds a bug that is planted for it.
//!
//! There are no targets for data that untrusted parties cannot write: hand-over envelopes (private memory of one process), the
//! command line (its author already runs the program), the tap's file (written, never read).

#![forbid(unsafe_code)]

pub mod attach;
pub mod coap;
pub mod collective;
pub mod config;
pub mod control;
pub mod framing;
pub mod function;
pub mod handshake;
pub mod link;
pub mod memcached_cache;
pub mod metrics;
pub mod rings;
pub mod sockets;
pub mod transfer;
pub mod worker;

/// The function of each target.
pub const TARGETS: &[(&str, fn(&[u8]))] = &[
    ("attach", attach::message),
    ("coap", coap::message),
    ("collective", collective::message),
    ("config", config::text),
    ("control", control::message),
    ("expand", transfer::compressed),
    ("framing_request", framing::request),
    ("framing_response", framing::response),
    ("function", function::memory),
    ("handshake", handshake::message),
    ("link", link::stream),
    ("memcached_cache", memcached_cache::messages),
    ("metrics_request", metrics::request),
    ("region", rings::region),
    ("ring", rings::ring),
    ("sealed", transfer::sealed),
    ("sockets", sockets::memory),
    ("transfer", transfer::message),
    ("worker", worker::memory),
];
