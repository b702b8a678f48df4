//! The built-in functions on the path of messages, and how instances of functions are made.
//!
//! Each function is one file, with one row in the table of `table.rs`. Nothing here allocates or locks while messages pass; time is an argument.
#![deny(unsafe_code)]

pub mod coap_auth;
mod code;
mod count_min;
mod deliver;
mod echo;
mod generator;
mod hyperloglog;
mod instances;
mod memcached_cache;
mod passthrough;
mod peer_address;
mod rate_limiter;
pub mod sketch;
mod table;
mod threshold;

pub use code::{Code, LibraryError, read_module};
pub use count_min::CountMinFunction;
pub use deliver::Deliver;
pub use echo::Echo;
pub use generator::Generator;
pub use hyperloglog::HyperLogLogFunction;
pub use instances::Instances;
pub use memcached_cache::MemcachedCache;
pub use passthrough::Passthrough;
pub use peer_address::{PEER_BYTES, PeerAddress};
pub use table::{BUILTINS, Builtin, builtin, file_of, file_param, memory_on, secret_file};
pub use threshold::Threshold;
