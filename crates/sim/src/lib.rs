//! Serval's deterministic simulator.
//!
//! The engine takes time, randomness, the network and the accelerators as inputs. Here they are
//! models: a virtual clock, a network that loses, reorders and truncates
//! ([`net`], [`nic`]), accelerators that answer late, twice, wrongly or not at all
//! ([`accelerator`]), clients and backends ([`client`], [`backend`]). The engine itself is the real
//! one: [`world`] calls [`engine::Worker::turn`] instead of a thread.
//!
//! One number, the seed, determines everything: the services, the clients, the faults and
//! the schedule ([`plan`]). [`run::simulate`] runs a seed and checks the engine's
//! promises after every step ([`ledger`], [`world`]). A seed that fails does so in every run, and is
//! reduced as long as it does ([`case`]); `serval-sim` runs many of them ([`campaign`]).
//!
//! # Faults
//!
//! Each kind of fault has a name ([`fault`]); a run counts how often each occurred. The checks, by short
//! names: *sum*, the accounting identity after every step, and no request left once all is quiet;
//! *cause*, no loss without a cause in the plan; *content*, replies go to the clients that
//! sent the requests, once, in order, unchanged ([`ledger`] for datagrams, [`stream_client`] for streams); *crossed*,
//! the engine's counters match what crossed its boundary; *bytes*, the books of the bytes of sockets after every step, and no
//! connection left once all is quiet; *credit*, all credit is returned once all is quiet;
//! *others*, a service beside the faulty one loses nothing except by its own faults; *life*, after the
//! faults have stopped a new request at every port is served ([`plan`] decides in which runs).
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
//! | `late-event` | `nic.rs` | sum, everything is read eventually |
//! | `exhausted` | `nic.rs`: accept, adopt, connect | sum, cause: `connection_limit` |
//! | `junk` | `client.rs` | content: kernels see exactly the bytes that came |
//! | `long-request` | `client.rs` | cause: `too_long` |
//! | `unframable` | `stream_client.rs` asks, `accelerator.rs` does | content, cause: `reply_unframable` |
//! | `bytewise` | `stream_client.rs` | content |
//! | `deaf` | `stream_client.rs` | credit, cause: `slow_client` |
//! | `bogus` | `stream_client.rs` | content: an error report in its place |
//! | `half-close` | `stream_client.rs` | content: earlier requests are answered |
//! | `reset` | `stream_client.rs` | sum, cause: `client_gone` |
//! | `vanish` | `stream_client.rs` | sum, cause: `client_gone` |
//! | `nonsense` | `stream_client.rs` | cause: `bad_framing`; replies before it arrive |
//! | `cut` | `stream_client.rs` | content, cause: `bad_framing` |
//! | `twice` | `misbehaviour.rs` | content: the second is `stale_token` |
//! | `late` | `accelerator.rs` | sum: `request_timeout`, then `stale_token` |
//! | `swallow` | `accelerator.rs` | sum, credit: `request_timeout` |
//! | `reject` | `accelerator.rs` | sum: `kernel_drop`, `bad_length`, `reply_too_long` |
//! | `forge` | `misbehaviour.rs` | content: no client gets anything |
//! | `steal` | `misbehaviour.rs` | content: no client gets anything |
//! | `bundle-forge` | `bundle_block.rs` | content: no client gets anything; cause: `bad_message` |
//! | `bad-kind` | `misbehaviour.rs` | cause: `bad_message` |
//! | `bad-header` | `misbehaviour.rs` | cause: `bad_message`, `mqueue_dead` |
//! | `unwanted` | `accelerator.rs` | crossed: nothing leaves |
//! | `stall` | `accelerator.rs` | sum, credit, others |
//! | `die` | `accelerator.rs` | sum, credit: `mqueue_dead`, `no_accelerator` |
//! | `scribble` | `misbehaviour.rs`: heads, tails, slots, arenas | sum, credit, others, no panic |
//! | `restart` | `world/generations.rs`: the old blocks keep writing | sum, credit; content: no old reply reaches a client |
//! | `hold` | `world/generations.rs`: a service is paused, then the accelerator generation ends or continues | sum, credit, others |
//! | `replay` | `misbehaviour.rs` | content: no client gets anything |
//! | `wide-scribble` | `misbehaviour.rs`: any word of the region | sum, credit, others, no panic |
//! | `false-alarm` | `accelerator.rs` | sum |
//! | `socket-forge` | `socket_block.rs` | bytes, others |
//! | `socket-scribble` | `socket_block.rs`: positions and ends | bytes, others, no panic |
//! | `socket-reset` | `socket_block.rs` | bytes |
//! | `socket-close` | `socket_block.rs`: a block closes a connection before its peer has sent everything | the peer reads what was sent, then the end; its input is dropped |
//! | `socket-cancel` | `socket_block.rs`: a block gives up an accept or a connect | it is completed once; no connection is left of it |
//! | `socket-leave` | `socket_peer.rs` | bytes |
//! | `socket-deaf` | `socket_peer.rs` | bytes; content: all bytes return when it reads again |
//! | `socket-reachability` | `socket_peer.rs`, `net.rs` | bytes; no attempt is left |
//! | `link-short` | `link.rs` | content; sum: every message of a link arrives once, all slots return |
//! | `link-stall` | `link.rs` | sum, credit; the link does not break |
//! | `link-cut` | `link.rs` | sum, cause: `accelerator_lost`; life: the accelerator comes back |
//! | `link-damage` | `link.rs` | the same; content: nothing damaged arrives |
//! | `link-silence` | `link.rs` | sum, cause: `accelerator_lost`; life: the accelerator comes back |
//! | `backend-late` | `backend.rs` | each request has one answer: `backend_late` |
//! | `backend-hang` | `backend.rs` | each request has one answer |
//! | `backend-close` | `backend.rs` | each request has one answer |
//! | `backend-cut` | `backend.rs` | each request has one answer, the right one or none |
//! | `backend-garbage` | `backend.rs` | each request has one answer: `backend_protocol` |
//! | `backend-unasked` | `backend.rs` | each request has one answer: `backend_unasked`, `backend_mismatch`; with a key it is the right one |
//! | `backend-swap` | `backend.rs` | each request has one answer: `backend_mismatch`; with a key it is the right one |
//! | `backend-long` | `backend.rs` | each request has one answer: `backend_too_long` |
//! | `backend-reachability` | `backend.rs`, `net.rs` | each request has one answer |
//! | `memory-deaf` | `shm_client.rs` | content: every request taken has one outcome |
//! | `memory-leave` | `shm_client.rs` | sum, cause: `client_gone` |
//! | `memory-kind` | `shm_client.rs` | cause: `bad_framing`; no other client is affected |
//! | `memory-scribble` | `shm_client.rs`: any word of its region | no panic; no other client is affected |
//! | `reload` | `run.rs`, `world/change.rs`: after any turn, worker by worker | sum, credit, others |
//! | `cut-reload` | `run.rs`: the engine drains before clients disconnected by a reload have left | sum, others |
//! | `late-message` | `run.rs`, `world/change.rs`: after any turn, also between the steps of a change | all of them: it is ignored |
//! | `pause` | `run.rs` | sum, cause |
//! | `early-drain` | `run.rs`, after any turn, worker by worker | sum: nothing is in flight after the end |
//! | `ring-wrap` | `plan.rs`, first counts of rings | all of them |
//!
//! Transfers that kernels ask for are not part of plans: [`transfers`] has their faults, and `tests/transfers.rs` the checks.
#![forbid(unsafe_code)]

pub mod accelerator;
pub mod backend;
pub mod behaviour;
mod bundle_block;
pub mod campaign;
pub mod case;
mod causes;
pub mod client;
mod conn;
pub mod fault;
mod fault_removal;
pub mod ledger;
#[cfg(not(target_family = "wasm"))]
pub mod link;
#[cfg(target_family = "wasm")]
#[path = "link_absent.rs"]
pub mod link;
pub mod message;
pub mod net;
pub mod nic;
pub mod plan;
mod probe;
pub mod rng;
pub mod run;
pub mod shared;
pub mod shm_client;
pub mod socket_block;
mod socket_books;
pub mod socket_peer;
pub mod stream_client;
pub mod trace;
pub mod transfers;
pub mod world;

pub use conn::{ConnId, client_address};
