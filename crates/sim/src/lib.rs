//! Serval's deterministic simulator.
//!
//! The engine is written so that time, randomness, the network and the accelerators come in from
//! outside. Here they are models: a virtual clock, a network that loses, reorders and cuts
//! ([`net`], [`nic`]), accelerators that answer late, twice, wrongly or not at all
//! ([`accelerator`]), clients and backends ([`client`], [`backend`]). The engine itself is the real
//! one: [`engine::Worker::turn`] is called by [`world`] instead of by a thread.
//!
//! One number, the seed, decides everything: which services there are, who talks to whom, what goes
//! wrong and who runs when ([`plan`]). [`run::simulate`] runs a seed and holds the engine to its
//! promises after every step ([`ledger`], [`world`]). A seed that fails, fails again, and is made
//! smaller as long as it does ([`case`]); `serval-sim` runs many of them ([`campaign`]).
//!
//! # What goes wrong
//!
//! Each kind of fault has a name ([`fault`]); a run counts how often each struck. The checks, by short
//! names: *sum*, the accounting identity after every step, and no request left when all is quiet;
//! *cause*, no loss without something in the plan that explains it; *content*, replies go to those who
//! asked, once, in order, unchanged ([`ledger`] for datagrams, [`stream_client`] for streams); *crossed*,
//! the engine's counters are what crossed its edges; *credit*, all credit is home when all is quiet;
//! *others*, a service beside the misbehaving one loses nothing but by its own faults; *life*, once the
//! faults have stopped a fresh request at every port is served ([`plan`] decides in which runs).
//!
//! | fault | injected in | checked by |
//! |---|---|---|
//! | `lose` | `net.rs`, both directions | sum, content |
//! | `duplicate` | `net.rs`, both directions | content: at most one reply for each copy received |
//! | `reorder` | `net.rs`, delays that differ | content |
//! | `corrupt` | `net.rs`, towards the engine | content: kernels see exactly the bytes that came |
//! | `truncate` | `net.rs` | crossed: every cut datagram is counted |
//! | `own-source` | `client.rs` | crossed: every such datagram is counted, nothing leaves for it |
//! | `socket-full` | `net.rs`, a short receive buffer | crossed: every overflow is counted |
//! | `refuse-send` | `nic.rs` | sum, cause: `send_failed` |
//! | `full-send` | `nic.rs` | sum, credit |
//! | `short-read` | `nic.rs` | content, sum |
//! | `short-write` | `nic.rs` | content: no reply is cut or repeated |
//! | `small-pipe` | `net.rs`, `nic.rs` | content, cause: `slow_client` |
//! | `reset-destroys` | `net.rs` | sum: `client_gone` |
//! | `spurious` | `nic.rs` | sum |
//! | `late-event` | `nic.rs` | sum, everything is read in the end |
//! | `exhausted` | `nic.rs`: accept, adopt, connect | sum, cause: `connection_limit` |
//! | `junk` | `client.rs` | content: kernels see exactly the bytes that came |
//! | `long-request` | `client.rs` | cause: `too_long` |
//! | `unframable` | `stream_client.rs` asks, `accelerator.rs` does | content, cause: `reply_unframable` |
//! | `bytewise` | `stream_client.rs` | content |
//! | `deaf` | `stream_client.rs` | credit, cause: `slow_client` |
//! | `bogus` | `stream_client.rs` | content: an error report in its place |
//! | `half-close` | `stream_client.rs` | content: what was asked before is answered |
//! | `reset` | `stream_client.rs` | sum, cause: `client_gone` |
//! | `vanish` | `stream_client.rs` | sum, cause: `client_gone` |
//! | `nonsense` | `stream_client.rs` | cause: `bad_framing`; replies before it arrive |
//! | `cut` | `stream_client.rs` | content, cause: `bad_framing` |
//! | `twice` | `accelerator.rs` | content: the second is `stale_token` |
//! | `late` | `accelerator.rs` | sum: `request_timeout`, then `stale_token` |
//! | `swallow` | `accelerator.rs` | sum, credit: `request_timeout` |
//! | `reject` | `accelerator.rs` | sum: `kernel_drop`, `bad_length`, `reply_too_long` |
//! | `forge` | `accelerator.rs` | content: nobody gets anything |
//! | `steal` | `accelerator.rs` | content: nobody gets anything |
//! | `bad-kind` | `accelerator.rs` | cause: `bad_message` |
//! | `bad-header` | `accelerator.rs` | cause: `bad_message`, `mqueue_dead` |
//! | `unwanted` | `accelerator.rs` | crossed: nothing leaves |
//! | `stall` | `accelerator.rs` | sum, credit, others |
//! | `die` | `accelerator.rs` | sum, credit: `mqueue_dead`, `no_accelerator` |
//! | `scribble` | `accelerator.rs`: heads, tails, slots, arenas | sum, credit, others, no panic |
//! | `restart` | `lives.rs`: the old blocks go on writing | sum, credit; content: nothing old reaches anybody |
//! | `hold` | `lives.rs`: a service is held, then its life ends or goes on | sum, credit, others |
//! | `replay` | `accelerator.rs` | content: nobody gets anything |
//! | `wide-scribble` | `accelerator.rs`: any word of the region | sum, credit, others, no panic |
//! | `false-alarm` | `accelerator.rs` | sum |
//! | `backend-late` | `backend.rs` | each question has one answer: `backend_late` |
//! | `backend-hang` | `backend.rs` | each question has one answer |
//! | `backend-close` | `backend.rs` | each question has one answer |
//! | `backend-cut` | `backend.rs` | each question has one answer, the right one or none |
//! | `backend-garbage` | `backend.rs` | each question has one answer: `backend_protocol` |
//! | `backend-unasked` | `backend.rs` | each question has one answer: `backend_unasked`, `backend_mismatch`; with a key it is the right one |
//! | `backend-swap` | `backend.rs` | each question has one answer: `backend_mismatch`; with a key it is the right one |
//! | `backend-long` | `backend.rs` | each question has one answer: `backend_too_long` |
//! | `backend-door` | `backend.rs`, `net.rs` | each question has one answer |
//! | `memory-deaf` | `memory_client.rs` | content: every request taken has one outcome |
//! | `memory-leave` | `memory_client.rs` | sum, cause: `client_gone` |
//! | `memory-kind` | `memory_client.rs` | cause: `bad_framing`; nobody else notices |
//! | `memory-scribble` | `memory_client.rs`: any word of its region | no panic; nobody else notices |
//! | `reload` | `run.rs`, `change.rs`: after any turn, worker by worker | sum, credit, others |
//! | `cut-reload` | `run.rs`: the engine drains before what a reload sent off has left | sum, others |
//! | `pause` | `run.rs` | sum, cause |
//! | `early-drain` | `run.rs`, after any turn, worker by worker | sum: nothing is under way after the end |
//! | `ring-wrap` | `plan.rs`, first counts of rings | all of them |
#![forbid(unsafe_code)]

pub mod accelerator;
pub mod backend;
pub mod campaign;
pub mod case;
mod causes;
pub mod change;
pub mod client;
mod conn;
pub mod fault;
mod healing;
pub mod ledger;
pub mod lives;
pub mod memory_client;
pub mod message;
pub mod net;
pub mod nic;
pub mod plan;
mod probe;
pub mod rng;
pub mod run;
pub mod stream_client;
pub mod trace;
pub mod world;

pub use conn::ConnId;
