//! The listening addresses of a worker.

use std::net::SocketAddr;

use wire::nic::{Transport, TxBatch};

use crate::endpoint::sources::lowest_source;
use crate::topology::Limits;

/// Datagrams and bytes that wait for one `send`.
const TX_ITEMS: usize = 1024;
const TX_BYTES: usize = 1 << 20;
/// The service of a port that is not there.
pub(crate) const NO_SERVICE: u16 = u16::MAX;

/// One listening address on this worker.
pub(crate) struct Port {
    /// Slot of its service.
    pub(crate) service: u16,
    pub(crate) transport: Transport,
    pub(crate) number: u16,
    pub(crate) address: SocketAddr,
    pub(crate) on_loopback: bool,
    /// Largest reply / request ratio; 0 unlimited.
    pub(crate) reply_ratio: u32,
    /// Datagrams from lower source ports are dropped.
    pub(crate) lowest_source: u16,
    pub(crate) ready: bool,
    /// Not read: its service is not switched on yet, is paused, or leaves.
    pub(crate) paused: bool,
    pub(crate) tx: TxBatch,
    /// Since when the host kernel takes no datagram; 0 when it does.
    pub(crate) full_since_ns: u64,
    /// Since when replies wait for more to their clients; 0 when none does.
    pub(crate) kept_since_ns: u64,
    /// How many did when the last ones left: they are the first in `tx`.
    pub(crate) kept: usize,
    /// The last turn in which the host kernel had no room: it is not asked again in that turn, by whoever else has replies.
    pub(crate) refused_in: u64,
}

impl Port {
    pub(crate) fn new(
        service: u16,
        transport: Transport,
        address: SocketAddr,
        limits: &Limits,
    ) -> Self {
        let udp = transport == Transport::Udp;
        let on_loopback = address.ip().is_loopback();
        Self {
            service,
            transport,
            number: address.port(),
            address,
            on_loopback,
            reply_ratio: reply_ratio(limits, on_loopback),
            lowest_source: lowest_source(limits, on_loopback),
            ready: false,
            paused: false,
            tx: TxBatch::new(if udp { TX_ITEMS } else { 0 }, if udp { TX_BYTES } else { 0 }),
            full_since_ns: 0,
            kept_since_ns: 0,
            kept: 0,
            refused_in: u64::MAX,
        }
    }

    /// The place of a port that is not there.
    pub(crate) fn vacant() -> Self {
        let nowhere = SocketAddr::from(([127, 0, 0, 1], 0));
        let port = Self::new(NO_SERVICE, Transport::Tcp, nowhere, &Limits::default());
        Self { paused: true, ..port }
    }
}

pub(crate) fn reply_ratio(limits: &Limits, on_loopback: bool) -> u32 {
    limits.udp_reply_ratio.unwrap_or(if on_loopback { 0 } else { 3 })
}
