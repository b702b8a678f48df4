//! What the fuzz targets run: one function for each thing that strangers can write, from bytes to a
//! check of what must hold for all of them. A panic is a finding.
//!
//! | target | the stranger | what must hold |
//! |---|---|---|
//! | `framing_request`, `framing_response` | a client, a backend | no panic, bounded buffers, the same messages however the stream is cut, what is written is read |
//! | `region` | whoever formatted the memory that is joined | refused, or its rings touch only what the directory gives them |
//! | `ring` | the peer at the other end of a ring | errors at most; nothing outside the ring is touched; every loop ends |
//! | `worker` | a shared-memory client and an accelerator, any word of their regions | no panic; every request that was taken has one outcome or is outstanding |
//! | `config` | a file, an environment, flags | no panic; every mistake has a place inside the text; what is accepted passes the engine's own check |
//! | `metrics_request` | whoever reaches the metrics port | decided once, whatever the chunks; no request without its end |
//! | `control` | a process at the control socket, or a false engine that answers | a request is read as written, or refused in a short line; no answer steers a terminal |
//! | `attach` | a process at an accelerator's socket, or a false engine | a message has one form, or is refused |
//! | `handshake` | a process at a shared-memory port, or a false engine | read as written, or refused |
//!
//! The targets are coverage-guided (libFuzzer) and need nothing but the stable compiler:
//! `cargo xtask fuzz SECONDS` builds them, runs each over its corpus and then for that long; `make test` runs each over
//! its corpus (`xtask/tests/corpus.rs`);
//! `cargo xtask fuzz --planted` shows that each finds a bug that is planted for it.
//!
//! Not here, because no stranger writes them: hand-over envelopes (private memory of one process), the command
//! line (whoever gives it runs the program), the tap's file (written, never read).

pub mod attach;
pub mod config;
pub mod control;
pub mod framing;
pub mod handshake;
pub mod metrics;
pub mod rings;
pub mod worker;

/// What each target runs on an input.
pub const TARGETS: &[(&str, fn(&[u8]))] = &[
    ("attach", attach::message),
    ("config", config::text),
    ("control", control::message),
    ("framing_request", framing::request),
    ("framing_response", framing::response),
    ("handshake", handshake::message),
    ("metrics_request", metrics::request),
    ("region", rings::region),
    ("ring", rings::ring),
    ("worker", worker::memory),
];
