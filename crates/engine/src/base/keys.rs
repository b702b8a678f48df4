//! The owners of a worker's streams: TCP connections of clients, or sockets to backends and upstream servers.
//!
//! Keys of clients' connections come first, followed by those of the other sockets.

use wire::nic::StreamKey;

/// A socket of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotId {
    pub(crate) service: u16,
    pub(crate) slot: u16,
    pub(crate) block: u32,
}

/// The owner of a stream key.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StreamOwner {
    /// A client's connection.
    Connection,
    /// A TCP connection to a backend.
    Backend { service: u16, pool: u16, number: u16 },
    /// A client mqueue's UDP socket.
    Mqueue { service: u16, client: u32 },
    /// The socket of a proxy's client flow.
    Flow { service: u16, flow: u32 },
    /// The connection to an upstream server that belongs to a client's connection.
    Upstream { service: u16, client: u32 },
    /// The connection of a block's socket.
    Socket(SlotId),
}

/// The keys of one worker.
pub(crate) struct StreamKeys {
    /// The first key that does not belong to a connection.
    first: StreamKey,
    owners: Vec<StreamOwner>,
    /// Free places in `owners`.
    free: Vec<u32>,
}

impl StreamKeys {
    pub(crate) fn new(connections_max: u32) -> Self {
        Self { first: connections_max, owners: Vec::new(), free: Vec::new() }
    }

    #[inline]
    pub(crate) fn owner(&self, key: StreamKey) -> StreamOwner {
        match key.checked_sub(self.first) {
            None => StreamOwner::Connection,
            Some(place) => self.owners[place as usize],
        }
    }

    /// A key for the socket of a backend or an upstream server.
    pub(crate) fn issue(&mut self, owner: StreamOwner) -> StreamKey {
        let place = self.free.pop().unwrap_or_else(|| {
            self.owners.push(StreamOwner::Connection);
            self.owners.len() as u32 - 1
        });
        self.owners[place as usize] = owner;
        self.first + place
    }

    /// The connection to an upstream server belongs to another version of its service.
    pub(crate) fn set_upstream(&mut self, key: StreamKey, to: u16) {
        if let StreamOwner::Upstream { service, .. } = &mut self.owners[(key - self.first) as usize]
        {
            *service = to;
        }
    }

    /// Returns a key.
    pub(crate) fn free(&mut self, key: StreamKey) {
        let place = key - self.first;
        self.owners[place as usize] = StreamOwner::Connection;
        self.free.push(place);
    }
}
