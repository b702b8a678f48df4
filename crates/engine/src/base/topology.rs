//! The topology: services with their ports, accelerators and backends, as typed values.
//!
//! The crate `server` makes a [`Topology`] from a configuration file; tests and the simulator create one directly.
//! [`Topology::check`] rejects invalid ones and names the field, so that a caller with a file can point at the line.
//! Everything else (regions, workers, ports) is derived from it.

mod accelerator;
mod check;
mod streams;
mod tenant;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use mqueue::abi::{
    BACKENDS_MAX, BLOCKS_MAX, Bundle, DEPTH_MAX, INLINE_BYTES_MAX, MESSAGE_BYTES_MAX, POOL_ALIGN,
    TransferCommand, TransferDone, protocol,
};
use mqueue::{MqueuePlan, PoolPlan, RegionPlan, RingPlan};
use wire::admission::KeyRange;
use wire::framing::Framing;
use wire::matching::MatchId;
use wire::nic::{Transport, UDP_PAYLOAD_MAX};

pub use wire::attach::ParamValue;

pub use self::accelerator::{
    Accelerator, AcceleratorKind, CpuPlacement, DeviceSpec, HANG_MS, HANG_MS_MAX, HANG_MS_MIN,
    HEARTBEAT_MS, HEARTBEAT_MS_MAX, HEARTBEAT_MS_MIN, Launch, SPIN_US, STACK_KIB, STACK_KIB_MAX,
    STACK_KIB_MIN,
};
pub use self::check::TopologyError;
pub use self::streams::CHUNK_BYTES;

/// Interval in which a worker looks at sources that do not wake it, in nanoseconds.
pub(crate) const POLL_NS: u64 = 1_000_000;
pub use self::tenant::{Confinement, DEFAULT_TENANT, NAMESPACES, TENANTS_MAX, Tenant, WEIGHT_MAX};
use crate::base::commands::{COMMANDS_IN_FLIGHT, STAGING_BYTES};

/// Maximum number of workers of an engine.
pub const WORKERS_MAX: usize = 64;
/// Approximate size of an arena of a shared-memory client.
const CLIENT_ARENA_BYTES: u64 = 32 << 20;
/// Maximum size of a default arena, unless four messages need more.
const USUAL_ARENA_BYTES: u64 = 256 << 10;
/// Smallest and largest size of a worker's pool for bundles.
const POOL_BYTES_MIN: u64 = 256 << 10;
const POOL_BYTES_MAX: u64 = 8 << 20;
/// Maximum `upstream_flows`.
pub const UPSTREAM_FLOWS_MAX: u32 = 65_536;
/// Default `max_message_bytes` of a proxy: any datagram, and any item of a memcached server with its default limit.
pub const PROXY_MESSAGE_BYTES: u32 = (1 << 20) + (64 << 10);
/// Longest [`Service::error_reply`].
pub const ERROR_REPLY_BYTES_MAX: usize = 255;
/// Maximum number of sockets for requests to a backend at a time, with one socket per request, on one worker.
const REQUEST_SOCKETS_MAX: u32 = 1024;

/// Everything that an engine runs.
#[derive(Clone, Debug)]
pub struct Topology {
    /// Workers and polling.
    pub engine: EngineSettings,
    /// Admission limits.
    pub limits: Limits,
    /// The accelerators that services name.
    pub accelerators: Vec<Accelerator>,
    /// The services.
    pub services: Vec<Service>,
    /// Tenants with settings. Any other that a service names has weight 1 and no limits.
    pub tenants: Vec<Tenant>,
}

/// `[engine]`: the workers.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineSettings {
    /// Workers, in [1, [`WORKERS_MAX`]].
    pub workers: usize,
    /// Cores to pin the workers to, one each; empty: not pinned.
    pub cores: Vec<usize>,
    /// What a worker without work does.
    pub polling: Polling,
    /// How long draining may take, in milliseconds.
    pub drain_ms: u64,
    /// The directory of functions.
    pub functions: PathBuf,
    /// Who may sign modules of the directory: public keys of ed25519.
    pub function_keys: Vec<[u8; 32]>,
    /// Whether modules of the directory without such a signature are used.
    pub unsigned_functions: bool,
    /// The longest deadline of a call of a function whose user is not the operator, in microseconds.
    pub user_deadline_us: u64,
    /// The part of a worker's time that such functions may take on a chain, in percent.
    pub user_function_percent: u32,
}

impl Default for EngineSettings {
    fn default() -> Self {
        Self {
            workers: 1,
            cores: Vec::new(),
            polling: Polling::Adaptive,
            drain_ms: 3000,
            functions: onpath::spec::DIRECTORY.into(),
            function_keys: Vec::new(),
            unsigned_functions: false,
            user_deadline_us: 1000,
            user_function_percent: 50,
        }
    }
}

/// What a worker without work does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polling {
    /// Spins forever.
    Spin,
    /// Spins for a while, then sleeps until an event. Never sleeps while a request is outstanding.
    Adaptive,
    /// Sleeps as soon as there is no work and no request is outstanding.
    Block,
}

/// `[limits]`: limits on the resources of clients.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// Open TCP connections of the whole engine.
    pub connections: u32,
    /// Requests in flight per TCP connection.
    pub pipelined: u32,
    /// A connection without a complete message for this long is closed, in milliseconds; see [`Service::idle_ms`].
    pub idle_ms: u64,
    /// A connection that accepts no byte of a waiting reply for this long is closed, in milliseconds.
    pub slow_client_ms: u64,
    /// Largest region, in MiB.
    pub region_mib: u64,
    /// Largest reply / request ratio to a UDP source; 0 unlimited. `None`: 3 off loopback, else 0.
    pub udp_reply_ratio: Option<u32>,
    /// Whether datagrams from source ports below 1024 are served. `None`: on loopback only.
    pub udp_privileged_sources: Option<bool>,
    /// Early replies of ordered connections kept per worker, in bytes.
    pub early_reply_bytes: usize,
    /// GRO batches of at least this many bytes are received in the pool.
    pub in_place_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 16_384,
            pipelined: 64,
            idle_ms: 60_000,
            slow_client_ms: 5_000,
            region_mib: 2_048,
            udp_reply_ratio: None,
            udp_privileged_sources: None,
            early_reply_bytes: 64 << 20,
            in_place_bytes: 8192,
        }
    }
}

/// `[[service]]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Service {
    /// Name in metrics and messages.
    pub name: String,
    /// Where clients connect.
    pub listen: Vec<Listen>,
    /// Paths where shared-memory clients connect.
    pub memory_ports: Vec<PathBuf>,
    /// How TCP messages are delimited.
    pub framing: Framing,
    /// Indices into [`Topology::accelerators`]; the service has mqueues on each.
    pub accelerators: Vec<usize>,
    /// Per-accelerator settings, in the same order; empty: none.
    pub shares: Vec<Share>,
    /// Kernel: a built-in name or a path to a kernel library.
    pub kernel: String,
    /// Parameters given to the kernel.
    pub params: Vec<(String, ParamValue)>,
    /// Server mqueues (blocks) on each accelerator, in [1, BLOCKS_MAX].
    pub mqueues: u32,
    /// Slots of each ring; a power of two in [1, DEPTH_MAX].
    pub slots: u32,
    /// Arena of each ring with messages over 1.5 KiB, at least four longest messages; 0: as many of the longest
    /// messages as there are slots, in at most 256 KiB.
    pub arena_bytes: u64,
    /// Longest request.
    pub max_message_bytes: u32,
    /// Longest reply.
    pub max_reply_bytes: u32,
    /// Whether requests get replies.
    pub replies: Replies,
    /// Whether replies on one TCP connection keep request order.
    pub ordered: bool,
    /// How a request is assigned to an mqueue.
    pub dispatch: Dispatch,
    /// Requests without a reply for this long are dropped, in milliseconds.
    pub request_timeout_ms: u64,
    /// By accelerator: a block outside the workers that works on one message for longer hangs, in milliseconds; at
    /// least `request_timeout_ms`. Empty: [`HANG_MS`], or `request_timeout_ms` where that is more.
    pub hang_ms: Vec<u64>,
    /// New requests are shed while the oldest waits longer than this, in microseconds; 0 never.
    pub queue_us_max: u64,
    /// The service's own [`Limits::idle_ms`] for its TCP connections, and for the flows of a proxy over UDP.
    pub idle_ms: Option<u64>,
    /// The payload of the reply to a request that is refused or dropped, where the framing has no error replies: at most
    /// [`ERROR_REPLY_BYTES_MAX`] bytes. Empty: the connection ends instead.
    pub error_reply: Vec<u8>,
    /// Tenant that owns the service.
    pub tenant: String,
    /// Client mqueues of every block.
    pub backends: Vec<Backend>,
    /// Ring protocol of the server mqueues.
    pub rings: Rings,
    /// Which requests travel as bundles, on accelerators that take them.
    pub bundles: Bundles,
    /// The server behind a proxy. A proxy has no kernel, no accelerators and no backends.
    pub upstream: Option<SocketAddr>,
    /// Most client flows of a proxy over UDP on each worker, in [1, [`UPSTREAM_FLOWS_MAX`]].
    pub upstream_flows: u32,
    /// Begin what goes to the server behind a proxy with the client's address ([`wire::proxy_protocol`]).
    pub proxy_protocol: bool,
    /// Functions on the path of its messages, in the order of its chain.
    pub functions: Vec<onpath::Spec>,
    /// Users, by number, that may attach functions to it besides the operator.
    pub function_users: Vec<u32>,
    /// What its blocks may listen at and connect to with stream sockets; at most [`SOCKET_SPECS_MAX`].
    pub sockets: Vec<SocketSpec>,
    /// Sockets of each block, in [1, SOCKETS_MAX].
    pub sockets_per_block: u32,
    /// Size of the ring of each socket and direction: a power of two in [[`SOCKET_BYTES_MIN`], [`SOCKET_BYTES_MAX`]].
    pub socket_bytes: u64,
    /// What transfers of its blocks may use; at most [`FILE_SPECS_MAX`].
    pub files: Vec<FileSpec>,
}

/// Most entries of [`Service::files`].
pub const FILE_SPECS_MAX: usize = 16;
/// Smallest [`Backend::memory_bytes`] of a backend that does transfers.
pub const MEMORY_BYTES_MIN: u64 = 4096;
/// Largest [`Backend::memory_bytes`].
pub const MEMORY_BYTES_MAX: u64 = 64 << 20;

/// `[[service.file]]`: a file or a peer that transfers of blocks may use, which they name by its index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSpec {
    /// Where.
    pub at: FileAt,
    /// The file with the key with which streams to it are sealed, and streams from it are opened.
    pub key: Option<PathBuf>,
}

/// What a transfer of a block may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileAt {
    /// A regular file.
    File {
        /// Its path.
        path: PathBuf,
        /// What transfers may do with it.
        access: FileAccess,
    },
    /// Each transfer makes a connection of its own to this address.
    Connection(SocketAt),
}

/// What transfers may do with a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileAccess {
    /// Read it.
    Read,
    /// Read and write it.
    Write,
    /// The same; it is created if it does not exist.
    Create,
}

impl FileSpec {
    /// A file, without a key.
    pub fn file(path: impl Into<PathBuf>, access: FileAccess) -> Self {
        Self { at: FileAt::File { path: path.into(), access }, key: None }
    }

    /// A peer, without a key.
    pub fn connection(at: impl Into<SocketAt>) -> Self {
        Self { at: FileAt::Connection(at.into()), key: None }
    }

    /// Whether bytes may go to it.
    pub fn is_writable(&self) -> bool {
        !matches!(self.at, FileAt::File { access: FileAccess::Read, .. })
    }
}

/// Most entries of [`Service::sockets`].
pub const SOCKET_SPECS_MAX: usize = 16;
/// Smallest [`Service::socket_bytes`].
pub const SOCKET_BYTES_MIN: u64 = 4096;
/// Largest [`Service::socket_bytes`].
pub const SOCKET_BYTES_MAX: u64 = 16 << 20;

/// `[[service.socket]]`: an address of which blocks may make stream sockets, which they name by its index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketSpec {
    /// What blocks do there.
    pub role: SocketRole,
    /// Where.
    pub at: SocketAt,
    /// A connection without a byte in either direction for this long is reset; 0: never.
    pub idle_ms: u64,
}

/// What blocks do at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketRole {
    /// They accept the connections that arrive.
    Listen,
    /// They connect to it.
    Connect,
}

/// The address of a stream socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SocketAt {
    /// TCP.
    Tcp(SocketAddr),
    /// The path of a Unix socket.
    Unix(PathBuf),
}

impl SocketSpec {
    /// Blocks accept the connections that arrive here.
    pub fn listen(at: impl Into<SocketAt>) -> Self {
        Self { role: SocketRole::Listen, at: at.into(), idle_ms: 0 }
    }

    /// Blocks connect to it.
    pub fn connect(at: impl Into<SocketAt>) -> Self {
        Self { role: SocketRole::Connect, at: at.into(), idle_ms: 0 }
    }

    /// Whether blocks accept connections.
    pub fn listens(&self) -> bool {
        self.role == SocketRole::Listen
    }
}

impl<A: Into<SocketAddr>> From<A> for SocketAt {
    fn from(address: A) -> Self {
        Self::Tcp(address.into())
    }
}

impl Service {
    /// A service with every optional field at its default.
    pub fn new(name: &str, listen: Vec<Listen>, kernel: &str) -> Self {
        Self {
            name: name.to_owned(),
            listen,
            memory_ports: Vec::new(),
            framing: Framing::Raw,
            accelerators: vec![0],
            shares: Vec::new(),
            kernel: kernel.to_owned(),
            params: Vec::new(),
            mqueues: 4,
            slots: 64,
            arena_bytes: 0,
            max_message_bytes: 1024,
            max_reply_bytes: 1024,
            replies: Replies::One,
            ordered: true,
            dispatch: Dispatch::RoundRobin,
            request_timeout_ms: 1000,
            hang_ms: Vec::new(),
            queue_us_max: 0,
            idle_ms: None,
            error_reply: Vec::new(),
            tenant: DEFAULT_TENANT.to_owned(),
            backends: Vec::new(),
            rings: Rings::Auto,
            bundles: Bundles::Never,
            upstream: None,
            upstream_flows: 4096,
            proxy_protocol: false,
            functions: Vec::new(),
            function_users: Vec::new(),
            sockets: Vec::new(),
            sockets_per_block: 4,
            socket_bytes: 64 << 10,
            files: Vec::new(),
        }
    }

    /// A proxy in front of the server at `upstream`, with every optional field at its default.
    pub fn proxy(name: &str, listen: Vec<Listen>, upstream: SocketAddr) -> Self {
        let proxy = Self {
            accelerators: Vec::new(),
            upstream: Some(upstream),
            ..Self::new(name, listen, "")
        };
        Self {
            max_message_bytes: PROXY_MESSAGE_BYTES,
            max_reply_bytes: PROXY_MESSAGE_BYTES,
            ..proxy
        }
    }
}

/// Settings of a service for one of its accelerators, which replace those of the service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// See [`Service::mqueues`].
    pub mqueues: u32,
    /// See [`Service::kernel`].
    pub kernel: String,
    /// See [`Service::rings`].
    pub rings: Rings,
}

/// One listening address of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listen {
    /// UDP or TCP.
    pub transport: Transport,
    /// Address; port 0 lets the host kernel choose.
    pub address: SocketAddr,
}

impl Listen {
    /// Whether the host kernel refuses a second socket: the addresses are equal, or one is the unspecified address of
    /// the same family and has the other's port. (IPv6 sockets take no IPv4: `sys/src/socket_nic/listen.rs`.)
    pub fn collides(&self, other: &Self) -> bool {
        let (one, two) = (self.address, other.address);
        one.port() != 0
            && (self.transport, one.port()) == (other.transport, two.port())
            && one.is_ipv4() == two.is_ipv4()
            && (one.ip() == two.ip() || one.ip().is_unspecified() || two.ip().is_unspecified())
    }
}

/// Number of replies per request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replies {
    /// One; a missing one is counted as a drop.
    One,
    /// None: requests are consumed.
    None,
}

/// How a request is assigned to an mqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dispatch {
    /// Each mqueue in turn: in runs when a burst is large and kernels are fast; skipping mqueues above their fair share when kernels are slow.
    RoundRobin,
    /// The mqueue with the fewest requests outstanding.
    LeastLoaded,
    /// By the client's address: a flow always reaches the same mqueue.
    FlowHash,
    /// By bytes of the message: a key always reaches the same mqueue, from any client.
    KeyHash(KeyRange),
}

/// Ring protocol of the server mqueues. Client mqueues and rings with arenas use `doorbell`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rings {
    /// The best protocol for the accelerator: `doorbell` for cpu; configurations select `granule` for GPUs.
    Auto,
    /// `doorbell`.
    Doorbell,
    /// `granule` with 16-byte units where the processor has them, else 8-byte units.
    Granule,
    /// `granule` with 8-byte units.
    Granule8,
    /// As `Auto`; a configuration also sets [`Service::bundles`].
    Bundle,
}

/// Which requests travel as bundles: runs of consecutive requests of one client and one length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bundles {
    /// None.
    Never,
    /// Those that the engine chooses for each burst, by its length, what is unanswered and how fast kernels are.
    Auto,
    /// All of two or more.
    Always,
}

/// `[[service.backend]]`: a client mqueue for every server mqueue.
#[derive(Clone, Debug, PartialEq)]
pub struct Backend {
    /// Name in metrics and messages.
    pub name: String,
    /// UDP or TCP.
    pub transport: Transport,
    /// Its address.
    pub address: SocketAddr,
    /// How messages are delimited (TCP).
    pub framing: Framing,
    /// TCP connections per worker.
    pub connections: u32,
    /// Time-out of an answer, in milliseconds.
    pub timeout_ms: u64,
    /// Requests in flight per TCP connection. (UDP: one per client mqueue.)
    pub in_flight: u32,
    /// Longest request and answer in bytes.
    pub max_message_bytes: u32,
    /// Memory of each block that transfers may name, in [[`MEMORY_BYTES_MIN`], [`MEMORY_BYTES_MAX`]]: the backend does transfers. 0: it is a server.
    pub memory_bytes: u64,
    /// Position of the id that requests and answers share; not with framing `memcached`, which has its own matching.
    pub matching: Option<MatchId>,
    /// What requests share.
    pub sockets: Sockets,
    /// The functions on the path between kernels and it, in their order.
    pub functions: Vec<onpath::Spec>,
}

/// What the requests to a backend share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sockets {
    /// Connections (TCP), or a socket for each client mqueue (UDP), that stay open.
    Persistent,
    /// Nothing: each request has its own connection or datagram socket.
    PerRequest,
}

impl Backend {
    /// A backend with every optional field at its default.
    pub fn new(name: &str, transport: Transport, address: SocketAddr, framing: Framing) -> Self {
        Self {
            name: name.to_owned(),
            transport,
            address,
            framing,
            connections: 1,
            timeout_ms: 100,
            in_flight: 256,
            max_message_bytes: 2048,
            memory_bytes: 0,
            matching: None,
            sockets: Sockets::Persistent,
            functions: Vec::new(),
        }
    }

    /// A backend that does transfers, with memory of this size for each block.
    pub fn transfers(name: &str, memory_bytes: u64) -> Self {
        let nowhere = (std::net::Ipv4Addr::UNSPECIFIED, 0).into();
        let messages = size_of::<TransferCommand>().max(size_of::<TransferDone>()) as u32;
        Self {
            timeout_ms: 30_000,
            in_flight: 4,
            max_message_bytes: messages,
            memory_bytes,
            ..Self::new(name, Transport::Tcp, nowhere, Framing::Raw)
        }
    }

    /// Whether it does transfers, and is no server.
    pub fn does_transfers(&self) -> bool {
        self.memory_bytes > 0
    }
}

impl Topology {
    /// Every listening address with the index of its service, in port order.
    pub fn ports(&self) -> impl Iterator<Item = (usize, Listen)> + '_ {
        let services = self.services.iter().enumerate();
        services.flat_map(|(index, s)| s.ports().map(move |(listen, _)| (index, listen)))
    }

    /// Every path of shared-memory clients with the index of its service.
    pub fn memory_ports(&self) -> impl Iterator<Item = (usize, &Path)> + '_ {
        let services = self.services.iter().enumerate();
        services
            .flat_map(|(index, s)| s.memory_ports.iter().map(move |path| (index, path.as_path())))
    }

    /// Every Unix socket where connections for blocks arrive, with the index of its service.
    pub fn unix_ports(&self) -> impl Iterator<Item = (usize, &Path)> + '_ {
        let services = self.services.iter().enumerate();
        services.flat_map(|(index, s)| s.unix_ports().map(move |(path, _)| (index, path)))
    }
}

impl Service {
    /// Its ports: where requests arrive, then where connections for its blocks arrive, with the index of the socket. Without
    /// [Unix sockets](Self::unix_ports).
    pub fn ports(&self) -> impl Iterator<Item = (Listen, Option<u16>)> + '_ {
        let sockets = self.listeners().filter_map(|(at, socket)| match at {
            SocketAt::Tcp(address) => {
                Some((Listen { transport: Transport::Tcp, address: *address }, Some(socket)))
            }
            SocketAt::Unix(_) => None,
        });
        self.listen.iter().map(|listen| (*listen, None)).chain(sockets)
    }

    /// The Unix sockets where connections for its blocks arrive, with the index of the socket.
    pub fn unix_ports(&self) -> impl Iterator<Item = (&Path, u16)> + '_ {
        self.listeners().filter_map(|(at, socket)| match at {
            SocketAt::Unix(path) => Some((path.as_path(), socket)),
            SocketAt::Tcp(_) => None,
        })
    }

    fn listeners(&self) -> impl Iterator<Item = (&SocketAt, u16)> + '_ {
        let all = self.sockets.iter().zip(0..);
        all.filter(|(spec, _)| spec.listens()).map(|(spec, socket)| (&spec.at, socket))
    }

    /// Its mqueues (blocks) on the accelerator at this index of its list.
    pub fn mqueues_on(&self, place: usize) -> u32 {
        self.shares.get(place).map_or(self.mqueues, |share| share.mqueues)
    }

    /// The kernel on the accelerator at this index of its list.
    pub fn kernel_on(&self, place: usize) -> &str {
        self.shares.get(place).map_or(&self.kernel, |share| &share.kernel)
    }

    /// See [`Service::hang_ms`].
    pub fn hang_ms_on(&self, place: usize) -> u64 {
        let given = self.hang_ms.get(place).copied();
        given.unwrap_or(HANG_MS.max(self.request_timeout_ms))
    }

    /// The same service with a share for each of its accelerators.
    pub fn share_out(&mut self) {
        if self.shares.is_empty() {
            let Self { mqueues, kernel, rings, .. } = self;
            let share = Share { mqueues: *mqueues, kernel: kernel.clone(), rings: *rings };
            self.shares = vec![share; self.accelerators.len()];
        }
    }

    /// Its mqueues on all accelerators together.
    pub fn mqueues_total(&self) -> u64 {
        (0..self.accelerators.len()).map(|place| u64::from(self.mqueues_on(place))).sum()
    }

    /// A `doorbell` ring for messages of up to `max` bytes.
    fn ring(&self, max: u32) -> RingPlan {
        let usual = arena_for(self.slots, max).min(USUAL_ARENA_BYTES);
        RingPlan::doorbell(max, if self.arena_bytes > 0 { self.arena_bytes } else { usual })
    }

    /// The number of longest messages that `arena_bytes` has room for, if that is less than the slots of a ring for
    /// messages of up to `max` bytes, and the `arena_bytes` that has room for all.
    pub fn short_arena(&self, max: u32) -> Option<(u64, u64)> {
        let (arena, whole) = (self.ring(max).arena_bytes, arena_for(self.slots, max));
        let fit = arena / u64::from(max.next_multiple_of(8));
        (arena > 0 && fit < u64::from(self.slots)).then_some((fit, whole))
    }

    fn server_ring(&self, place: usize, max: u32) -> RingPlan {
        // The descriptor of a bundle is never in an arena.
        let least = if self.bundles == Bundles::Never { 0 } else { size_of::<Bundle>() as u32 };
        let ring = self.ring(max.max(least));
        let granule = match self.shares.get(place).map_or(self.rings, |share| share.rings) {
            Rings::Auto | Rings::Bundle | Rings::Doorbell => return ring,
            Rings::Granule if mqueue::memory::unit16_is_atomic() => protocol::GRANULE16,
            Rings::Granule | Rings::Granule8 => protocol::GRANULE8,
        };
        if ring.arena_bytes > 0 { ring } else { RingPlan { protocol: granule, ..ring } }
    }

    /// The mqueues of each block on the accelerator at this index: the server mqueue, then those of the backends.
    pub fn mqueue_plans(&self, place: usize) -> Vec<MqueuePlan> {
        let server = MqueuePlan {
            depth: self.slots,
            rx: self.server_ring(place, self.max_message_bytes),
            tx: self.server_ring(place, self.max_reply_bytes),
        };
        let client = |backend: &Backend| {
            let ring = self.ring(backend.max_message_bytes);
            MqueuePlan { depth: self.slots, rx: ring, tx: ring }
        };
        let mut mqueues = vec![server];
        mqueues.extend(self.backends.iter().map(client));
        mqueues
    }

    /// The region of one generation of an accelerator of this kind, which is at this index of the service's list.
    /// Regions of runtimes have command rings; those of blocks that take bundles have a pool for each worker.
    pub fn region_plan(
        &self,
        place: usize,
        kind: &AcceleratorKind,
        generation: u64,
        workers: usize,
    ) -> RegionPlan {
        let mut plan =
            RegionPlan::of_blocks(self.mqueues_on(place), &self.mqueue_plans(place), generation);
        let has_pools = workers <= mqueue::abi::POOLS_MAX as usize;
        if self.may_bundle() && kind.takes_bundles() && has_pools {
            plan = plan.with_pools(workers as u32, self.pool_bytes(place, workers));
        }
        for (backend, spec) in (0..).zip(&self.backends) {
            plan = plan.with_memory(backend, spec.memory_bytes);
        }
        if !self.sockets.is_empty() {
            // Commands in flight: an accept for each socket, and two for each slot.
            let commands = 2 * self.sockets_per_block + self.sockets.len() as u32 + 8;
            let depth = commands.next_power_of_two();
            plan = plan.with_sockets(self.sockets_per_block, self.socket_bytes, depth);
        }
        match kind {
            AcceleratorKind::Cpu { .. } => plan,
            AcceleratorKind::Process { .. } => {
                plan.with_commands(COMMANDS_IN_FLIGHT, STAGING_BYTES)
            }
        }
    }

    /// Whether messages may go as bundles: a proxy has no blocks, a key is in the bytes of each message, and messages without replies have no tokens.
    pub(crate) fn may_bundle(&self) -> bool {
        let plain = self.replies == Replies::One && !matches!(self.dispatch, Dispatch::KeyHash(_));
        plain && self.upstream.is_none() && self.bundles != Bundles::Never
    }

    /// Size of a worker's pool: room for what its mqueues on an accelerator can have in flight in bundles of a few messages, as long as that is not much.
    fn pool_bytes(&self, place: usize, workers: usize) -> u64 {
        let message = u64::from(self.max_message_bytes) + u64::from(self.max_reply_bytes);
        let mqueues = u64::from(self.mqueues_on(place)).div_ceil(workers.max(1) as u64);
        let bytes = (2 * mqueues * u64::from(self.slots)).saturating_mul(message);
        bytes.clamp(POOL_BYTES_MIN, POOL_BYTES_MAX).next_multiple_of(POOL_ALIGN)
    }

    /// The region of one shared-memory client that requests `depth` slots: one mqueue, in which the client has the
    /// accelerator's role. A ring with messages over 1.5 KiB gets fewer slots, so that it and its arena stay small,
    /// and an arena with room for as many of the longest messages as it has slots.
    pub fn client_region_plan(&self, depth: u32) -> RegionPlan {
        let longest = self.max_message_bytes.max(self.max_reply_bytes);
        let fit = CLIENT_ARENA_BYTES / u64::from(longest.max(INLINE_BYTES_MAX));
        let most = (fit.max(2) as u32).min(DEPTH_MAX).next_power_of_two();
        let depth = depth.clamp(1, DEPTH_MAX).next_power_of_two().min(most);
        let ring = |bytes: u32| RingPlan::doorbell(bytes, arena_for(depth, bytes));
        let (rx, tx) = (ring(self.max_reply_bytes), ring(self.max_message_bytes));
        RegionPlan::of_blocks(1, &[MqueuePlan { depth, rx, tx }], 1)
    }

    /// The sizes that make up a region that is too large.
    fn region_arithmetic(&self, place: usize, plan: &RegionPlan, region_mib: u64) -> String {
        let ring = |max: u32, ring: RingPlan| {
            let slot = 32 + u64::from(max.min(INLINE_BYTES_MAX));
            if ring.arena_bytes > 0 {
                format!("{} slots x about {slot} B + arena {} B", self.slots, ring.arena_bytes)
            } else {
                format!("{} slots x about {slot} B", self.slots)
            }
        };
        let mut parts = vec![
            ring(self.max_message_bytes, self.server_ring(place, self.max_message_bytes)),
            ring(self.max_reply_bytes, self.server_ring(place, self.max_reply_bytes)),
        ];
        for backend in &self.backends {
            let plan = self.ring(backend.max_message_bytes);
            parts.push(format!("2 x ({})", ring(backend.max_message_bytes, plan)));
        }
        let pools = plan.pools.map_or(String::new(), |PoolPlan { workers, bytes }| {
            format!(" + {workers} x pool of {bytes} B")
        });
        let bytes = plan.bytes().expect("the caller has laid it out");
        format!(
            "{} mqueues x ({}){pools} need {} MiB, more than limits.region_mib = {region_mib}; \
             use fewer mqueues or slots, smaller messages or arena_bytes, or raise region_mib",
            self.mqueues_on(place),
            parts.join(" + "),
            bytes.div_ceil(1 << 20)
        )
    }
}

/// The arena with room for as many messages of up to `max` bytes as there are slots. A message that would cross its
/// end starts at the beginning instead: up to one message per lap is unused.
fn arena_for(slots: u32, max: u32) -> u64 {
    u64::from(max.next_multiple_of(8)) * (u64::from(slots) + 2)
}
