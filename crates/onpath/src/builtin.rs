//! Functions that are part of the program.

pub mod coap_auth;
mod count_min;
mod deliver;
mod echo;
mod generator;
mod hyperloglog;
mod memcached_cache;
mod passthrough;
mod peer_address;
mod rate_limiter;
mod threshold;

pub(crate) use coap_auth::{coap_auths, memory as coap_auth_memory};
pub use count_min::CountMinFunction;
pub use deliver::Deliver;
pub use echo::Echo;
pub use generator::Generator;
pub use hyperloglog::HyperLogLogFunction;
pub use memcached_cache::MemcachedCache;
pub(crate) use memcached_cache::{instances as memcached_caches, memory as memcached_cache_memory};
pub use passthrough::Passthrough;
pub use peer_address::{PEER_BYTES, PeerAddress};
pub(crate) use rate_limiter::{rate_limiter_memory, rate_limiters};
pub use threshold::Threshold;

/// The bytes of a message that a function looks at: `length` bytes from `offset` on, or all from there on if `length` is 0. `None`: the message
/// is too short to have them.
fn range(message: &[u8], offset: usize, length: usize) -> Option<&[u8]> {
    let rest = message.get(offset..)?;
    if length == 0 { Some(rest) } else { rest.get(..length) }
}
