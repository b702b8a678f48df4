//! UDP ports that no socket of this process may have for a time.
//!
//! The host kernel gives the port of a closed socket to any other one. If a server still has a request of the closed socket, its
//! answer would reach the new socket, whose peer is the same server. So such a port is *reserved* until no answer is expected
//! any more. The ports of a machine are common to all workers, hence the one table.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// By port: until when it is reserved, in nanoseconds since [`START`].
static RESERVED: [AtomicU64; 1 << 16] = [const { AtomicU64::new(0) }; 1 << 16];
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

fn now_ns() -> u64 {
    START.elapsed().as_nanos() as u64
}

/// No socket gets this port for `ns` nanoseconds. Its socket is still open.
pub(super) fn reserve(port: u16, ns: u64) {
    // The closing of the socket orders this before the next socket with the port, on any worker.
    RESERVED[usize::from(port)].store(now_ns().saturating_add(ns), Ordering::Release);
}

/// Whether a port must not be used yet.
pub(super) fn is_reserved(port: u16) -> bool {
    match RESERVED[usize::from(port)].load(Ordering::Acquire) {
        0 => false,
        until_ns => now_ns() < until_ns,
    }
}
