//! A worker's part of a region: the ends of its blocks' mqueues, and the table that maps mqueues of the region to
//! those of the service share. The table is built once, when the rings are installed; the message path only reads it.

use mqueue::{ByteReader, ByteWriter, Consumer, MappedMemory, Pool, Producer, Region, Role};

use crate::base::accelerator::Blocks;
use crate::base::transfers::Transfers;

/// The engine's ends of one mqueue.
pub struct MqueueEnds {
    /// Number of the mqueue in its region.
    pub mqueue: u32,
    /// Engine to block.
    pub rx: Producer<MappedMemory>,
    /// Block to engine.
    pub tx: Consumer<MappedMemory>,
    /// The block's memory that transfers may name: offset in the region, and size.
    pub staging: (u64, u64),
    /// Of a client mqueue to a backend that does transfers: who does them.
    pub transfers: Option<Box<dyn Transfers>>,
}

/// The engine's ends of the sockets of one block.
pub struct SocketEnds {
    /// The socket mqueue: completions and events to the block, commands from it.
    pub mqueue: MqueueEnds,
    /// Of each slot: bytes to the block, and from it.
    pub streams: Vec<(ByteWriter<MappedMemory>, ByteReader<MappedMemory>)>,
}

/// The engine's ends of the rings of one block.
pub struct BlockEnds {
    /// Index of the block in its region.
    pub block: u32,
    /// The server mqueue.
    pub server: MqueueEnds,
    /// The client mqueues, in the order of the service's backends.
    pub clients: Vec<MqueueEnds>,
    /// Of a service with sockets.
    pub sockets: Option<SocketEnds>,
}

impl BlockEnds {
    /// Takes the ends of a block's rings from its region. Panics if they were taken before.
    pub fn take(region: &mut Region<MappedMemory>, block: u32) -> Self {
        let mqueues = region.mqueues_of(block).to_vec();
        let (mut server, mut clients, mut sockets) = (None, Vec::new(), None);
        for mqueue in mqueues {
            let (rx, tx) = region.engine_ends(mqueue);
            let [_, entry] = region.rings_of(mqueue);
            let staging = (entry.staging_offset, entry.staging_bytes);
            let ends = MqueueEnds { mqueue, rx, tx, staging, transfers: None };
            match region.role(mqueue).1 {
                Role::Server => server = Some(ends),
                Role::Client(_) => clients.push(ends),
                Role::Sockets => {
                    let streams = region.engine_streams(block);
                    sockets = Some(SocketEnds { mqueue: ends, streams });
                }
            }
        }
        let server = server.expect("every block has a server mqueue");
        Self { block, server, clients, sockets }
    }

    /// Their numbers in the region: the server mqueue's, then those of the client mqueues, then the socket mqueue's.
    pub fn mqueues(&self) -> impl Iterator<Item = u32> + '_ {
        let sockets = self.sockets.iter().map(|sockets| &sockets.mqueue);
        let others = self.clients.iter().chain(sockets);
        std::iter::once(&self.server).chain(others).map(|ends| ends.mqueue)
    }
}

/// The ends of the rings of one block that are no server mqueue.
pub(crate) struct OtherEnds {
    /// Number of the block's server mqueue in the service share.
    pub(crate) server: u32,
    /// The client mqueues that no endpoint has taken, with the numbers of their backends.
    clients: Vec<(u16, MqueueEnds)>,
    /// See [`BlockEnds`].
    pub(crate) sockets: Option<SocketEnds>,
}

impl OtherEnds {
    /// Of the block with this server mqueue.
    pub(crate) fn new(server: u32, clients: Vec<MqueueEnds>, sockets: Option<SocketEnds>) -> Self {
        Self { server, clients: (0..).zip(clients).collect(), sockets }
    }

    /// Takes the client mqueues of these backends, in the order of the backends. Those of others stay
    /// for their endpoint.
    pub(crate) fn take_clients(&mut self, backends: &[u16]) -> Vec<MqueueEnds> {
        let taken = self.clients.extract_if(.., |(backend, _)| backends.contains(backend));
        taken.map(|(_, ends)| ends).collect()
    }
}

/// One worker's share of one accelerator for one service.
pub struct Attachment {
    /// The blocks that this worker owns.
    pub blocks: Box<dyn Blocks>,
    /// The ends of their rings, in block order.
    pub ends: Vec<BlockEnds>,
    /// The worker's pool, if bundles can go through the rings.
    pub pool: Option<Box<Pool<MappedMemory>>>,
}

/// Takes the pool of each worker from a region whose mqueues carry bundles.
pub fn take_pools(
    region: &mut Region<MappedMemory>,
    workers: usize,
) -> Vec<Option<Box<Pool<MappedMemory>>>> {
    let servers = (0..region.block_count()).map(|block| region.mqueues_of(block)[0]);
    let carry = servers.into_iter().all(|mqueue| region.carries_bundles(mqueue));
    let pools = if carry { region.pools().len() } else { 0 };
    (0..workers)
        .map(|worker| (worker < pools).then(|| Box::new(region.engine_pool(worker as u32))))
        .collect()
}

/// The mqueue of a service share that an mqueue of a region is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShareMqueue {
    /// A server mqueue.
    Server(u32),
    /// One with this role, of the block with this server mqueue: an endpoint has it.
    Other(Role, u32),
    /// Owned by another worker.
    Foreign,
}

/// Maps the mqueues of the region, if the blocks' server mqueues have numbers from `first` on.
pub(super) fn share_mqueues(ends: &[BlockEnds], first: u32) -> Box<[ShareMqueue]> {
    let mut table = Vec::new();
    let mut enter = |mqueue: u32, is: ShareMqueue| {
        let place = mqueue as usize;
        table.resize(table.len().max(place + 1), ShareMqueue::Foreign);
        table[place] = is;
    };
    for (server, ends) in (first..).zip(ends) {
        enter(ends.server.mqueue, ShareMqueue::Server(server));
        if let Some(sockets) = &ends.sockets {
            enter(sockets.mqueue.mqueue, ShareMqueue::Other(Role::Sockets, server));
        }
        for (client, ends) in (0..).zip(&ends.clients) {
            enter(ends.mqueue, ShareMqueue::Other(Role::Client(client), server));
        }
    }
    table.into_boxed_slice()
}
