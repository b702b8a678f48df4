//! A tap: records the traffic of a worker's network in a file for tcpdump and Wireshark.
//!
//! A [`Tap`] is a NIC that wraps a NIC. It copies every datagram, and every read and write of a stream, with
//! synthetic headers (`tap/packet.rs`) into a chunk of memory; full chunks go to one writer thread through a
//! bounded channel and come back empty. A worker never waits: when no chunk is free, packets are
//! counted as dropped and not copied. A tap costs a turn a copy and a checksum of its payloads, and
//! a clock read per batch. Without a tap the engine runs on the NIC itself and pays nothing.
//!
//! The file is a pcap file (draft-ietf-opsawg-pcap) with nanosecond times (magic 0xa1b23c4d) and raw IP
//! packets (LINKTYPE_RAW). Outgoing packets are recorded when they are handed to the host kernel; datagrams
//! that are held back for a GSO batch are recorded at the first attempt. The local address of a connection to
//! a backend is not known: it is recorded as 0.0.0.0 with a port derived from the stream's key. Shared-memory
//! ports have no packets.

mod packet;

use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use wire::nic::{
    Close, Event, LentStream, Nic, NicCounters, NicError, PortIndex, Read, RxBatch, SendOutcome,
    StreamKey, Transport, TxBatch, Written,
};

use crate::socket_nic::{AcceptedSocket, OpenPort};
use crate::time::realtime_ns;
use packet::{ACK, FIN, HEADERS_MAX, Headers, PSH, RST, SEGMENT_BYTES_MAX, SYN};

/// Bytes per chunk, and chunks per tap: how much a worker can record while the file is slow.
const CHUNK_BYTES: usize = 256 << 10;
const CHUNKS: usize = 16;
/// Polls after which a partially filled chunk is handed over.
const POLLS_MAX: u32 = 4096;
const FILE_HEADER_BYTES: u64 = 24;
const RECORD_HEADER_BYTES: usize = 16;
const MAGIC_NANOSECONDS: u32 = 0xa1b2_3c4d;
const LINKTYPE_RAW: u32 = 101;
/// Longest packet recorded, in bytes (the maximum that readers accept).
pub const SNAP_BYTES_MAX: u32 = 262_144;

/// What to record, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TapOptions {
    /// The file; an existing one is overwritten.
    pub path: PathBuf,
    /// Bytes kept of each packet, headers included, in [64, [`SNAP_BYTES_MAX`]].
    pub snap_bytes: u32,
    /// Maximum size of the file; later packets are counted and not recorded.
    pub limit_bytes: u64,
}

/// The result of a tap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TapReport {
    /// Packets in the file.
    pub packets: u64,
    /// Packets not recorded because the file was too slow or reached its limit.
    pub dropped: u64,
    /// Bytes of the file.
    pub bytes: u64,
    /// The first write error; all later packets were dropped.
    pub error: Option<String>,
}

/// Records for the file; the writer returns the memory to the recorder.
struct Chunk {
    bytes: Vec<u8>,
    packets: u64,
    home: Sender<Self>,
}

enum Order {
    Write(Chunk),
    Stop,
}

#[derive(Debug, Default)]
struct Shared {
    dropped: AtomicU64,
    /// Recording has stopped.
    closed: AtomicBool,
    report: Mutex<TapReport>,
}

/// The file shared by the taps of all workers.
#[derive(Debug)]
pub struct TapFile {
    orders: SyncSender<Order>,
    shared: Arc<Shared>,
    snap_bytes: usize,
    thread: JoinHandle<()>,
}

impl TapFile {
    /// Creates the file and starts its writer.
    pub fn create(options: &TapOptions) -> io::Result<Self> {
        let snap_bytes = options.snap_bytes.clamp(64, SNAP_BYTES_MAX);
        let mut file = BufWriter::new(File::create(&options.path)?);
        file.write_all(&file_header(snap_bytes))?;
        file.flush()?;
        let (orders, inbox) = mpsc::sync_channel(1024);
        let shared = Arc::<Shared>::default();
        let writer = Writer { file, inbox, shared: shared.clone(), limit: options.limit_bytes };
        let builder = std::thread::Builder::new().name("serval-tap".into());
        let thread = builder.spawn(move || writer.run())?;
        Ok(Self { orders, shared, snap_bytes: snap_bytes as usize, thread })
    }

    /// Wraps a worker's NIC in a tap; `addresses` are those of its ports, in order.
    pub fn attach<N: Nic<Socket = AcceptedSocket>>(
        &self,
        nic: N,
        addresses: Vec<SocketAddr>,
    ) -> Tap<N> {
        let (home, free) = mpsc::channel();
        for _ in 0..CHUNKS {
            let bytes = Vec::with_capacity(CHUNK_BYTES);
            let chunk = Chunk { bytes, packets: 0, home: home.clone() };
            home.send(chunk).expect("its receiver is here");
        }
        let recorder = Recorder {
            chunk: None,
            free,
            orders: self.orders.clone(),
            shared: self.shared.clone(),
            snap_bytes: self.snap_bytes,
            dropped: 0,
            polls: 0,
        };
        Tap { nic, recorder, addresses, flows: Vec::new() }
    }

    /// Writes what the taps have handed over and closes the file. Taps should have been dropped: records that
    /// they still hold are lost.
    pub fn finish(self) -> TapReport {
        // Sending fails only if the writer has ended, and then its report is final.
        let _ = self.orders.send(Order::Stop);
        let _ = self.thread.join();
        let report = self.shared.report.lock().unwrap_or_else(PoisonError::into_inner);
        TapReport { dropped: self.shared.dropped.load(Ordering::Relaxed), ..report.clone() }
    }
}

fn file_header(snap_bytes: u32) -> [u8; FILE_HEADER_BYTES as usize] {
    let mut header = [0; FILE_HEADER_BYTES as usize];
    header[..4].copy_from_slice(&MAGIC_NANOSECONDS.to_ne_bytes());
    header[4..6].copy_from_slice(&2u16.to_ne_bytes());
    header[6..8].copy_from_slice(&4u16.to_ne_bytes());
    header[16..20].copy_from_slice(&snap_bytes.to_ne_bytes());
    header[20..].copy_from_slice(&LINKTYPE_RAW.to_ne_bytes());
    header
}

/// The writer thread.
struct Writer {
    file: BufWriter<File>,
    inbox: Receiver<Order>,
    shared: Arc<Shared>,
    limit: u64,
}

impl Writer {
    fn run(mut self) {
        let mut report = TapReport { bytes: FILE_HEADER_BYTES, ..TapReport::default() };
        while let Ok(Order::Write(mut chunk)) = self.inbox.recv() {
            let len = chunk.bytes.len() as u64;
            let closed = self.shared.closed.load(Ordering::Relaxed);
            if closed || report.bytes + len > self.limit {
                self.shared.closed.store(true, Ordering::Relaxed);
                self.shared.dropped.fetch_add(chunk.packets, Ordering::Relaxed);
            } else if let Err(error) = self.file.write_all(&chunk.bytes) {
                self.give_up(&mut report, &error, chunk.packets);
            } else {
                report.packets += chunk.packets;
                report.bytes += len;
            }
            chunk.bytes.clear();
            chunk.packets = 0;
            let home = chunk.home.clone();
            // If the tap was dropped, the memory is freed.
            let _ = home.send(chunk);
        }
        if let Err(error) = self.file.flush() {
            self.give_up(&mut report, &error, 0);
        }
        *self.shared.report.lock().unwrap_or_else(PoisonError::into_inner) = report;
    }

    fn give_up(&self, report: &mut TapReport, error: &io::Error, packets: u64) {
        let text = match error.kind() {
            io::ErrorKind::FileTooLarge => {
                "it has reached the limit of a file's size (`ulimit -f`, LimitFSIZE= of a unit)"
                    .into()
            }
            io::ErrorKind::StorageFull => "the disk is full".into(),
            _ => error.to_string(),
        };
        report.error.get_or_insert(text);
        self.shared.closed.store(true, Ordering::Relaxed);
        self.shared.dropped.fetch_add(packets, Ordering::Relaxed);
    }
}

/// The worker's end of the channel.
struct Recorder {
    chunk: Option<Chunk>,
    free: Receiver<Chunk>,
    orders: SyncSender<Order>,
    shared: Arc<Shared>,
    snap_bytes: usize,
    dropped: u64,
    polls: u32,
}

impl Recorder {
    /// Records one packet, at `now_ns` since 1970.
    fn record(
        &mut self,
        now_ns: u64,
        (source, target): (SocketAddr, SocketAddr),
        transport: packet::Transport,
        payload: &[u8],
    ) {
        let room = RECORD_HEADER_BYTES + (HEADERS_MAX + payload.len()).min(self.snap_bytes);
        if self.shared.closed.load(Ordering::Relaxed) || !self.make_room(room) {
            self.dropped += 1;
            self.shared.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let chunk = self.chunk.as_mut().expect("there is room");
        let headers = Headers::new(source, target, transport, payload);
        let whole = headers.bytes().len() + payload.len();
        let kept = whole.min(self.snap_bytes);
        let times = [now_ns / 1_000_000_000, now_ns % 1_000_000_000, kept as u64, whole as u64];
        for word in times {
            chunk.bytes.extend_from_slice(&(word as u32).to_ne_bytes());
        }
        let header_bytes = &headers.bytes()[..headers.bytes().len().min(kept)];
        chunk.bytes.extend_from_slice(header_bytes);
        chunk.bytes.extend_from_slice(&payload[..kept - header_bytes.len()]);
        chunk.packets += 1;
    }

    /// Ensures a chunk with room for `len` bytes, which is at most an empty chunk's size.
    fn make_room(&mut self, len: usize) -> bool {
        if self.chunk.as_ref().is_some_and(|c| c.bytes.len() + len > CHUNK_BYTES) {
            self.hand_over();
        }
        if self.chunk.is_none() {
            self.chunk = self.free.try_recv().ok();
        }
        self.chunk.is_some()
    }

    fn hand_over(&mut self) {
        self.polls = 0;
        let Some(chunk) = self.chunk.take_if(|chunk| chunk.packets > 0) else { return };
        let packets = chunk.packets;
        if self.orders.try_send(Order::Write(chunk)).is_err() {
            self.dropped += packets;
            self.shared.dropped.fetch_add(packets, Ordering::Relaxed);
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.hand_over();
    }
}

/// The state from which a stream's packets are synthesised.
#[derive(Clone, Copy, Debug)]
struct Flow {
    transport: Transport,
    local: SocketAddr,
    peer: SocketAddr,
    /// An outgoing connection that is not established yet.
    connecting: bool,
    /// Next sequence numbers of this side and of the peer.
    ours: u32,
    theirs: u32,
}

/// The sender of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum From {
    Here,
    Peer,
}

/// A NIC that records its traffic. See the module's text.
pub struct Tap<N> {
    nic: N,
    recorder: Recorder,
    addresses: Vec<SocketAddr>,
    flows: Vec<Option<Flow>>,
}

impl<N> Tap<N> {
    fn open_flow(&mut self, key: StreamKey, flow: Flow) {
        let key = key as usize;
        if self.flows.len() <= key {
            self.flows.resize(key + 1, None);
        }
        self.flows[key] = Some(flow);
    }

    /// A TCP segment without payload, or a message of a stream.
    fn tell(&mut self, key: StreamKey, from: From, flags: u8, payload: &[u8]) {
        let Some(Some(flow)) = self.flows.get_mut(key as usize) else { return };
        let now_ns = realtime_ns();
        let addresses = match from {
            From::Here => (flow.local, flow.peer),
            From::Peer => (flow.peer, flow.local),
        };
        if flow.transport == Transport::Udp {
            if flags == 0 {
                self.recorder.record(now_ns, addresses, packet::Transport::Udp, payload);
            }
            return;
        }
        if flags == 0 && payload.is_empty() {
            return;
        }
        let mut rest = payload;
        loop {
            let (segment, later) = rest.split_at(rest.len().min(SEGMENT_BYTES_MAX));
            rest = later;
            let push = if segment.is_empty() { 0 } else { PSH };
            let (sequence, acknowledged) = match from {
                From::Here => (flow.ours, flow.theirs),
                From::Peer => (flow.theirs, flow.ours),
            };
            let first = flags == SYN;
            let flags = flags | push | if first { 0 } else { ACK };
            let acknowledged = if first { 0 } else { acknowledged };
            let segment_of = packet::Transport::Tcp { flags, sequence, acknowledged };
            self.recorder.record(now_ns, addresses, segment_of, segment);
            let counts = segment.len() as u32 + u32::from(flags & (SYN | FIN) != 0);
            match from {
                From::Here => flow.ours = flow.ours.wrapping_add(counts),
                From::Peer => flow.theirs = flow.theirs.wrapping_add(counts),
            }
            if rest.is_empty() {
                return;
            }
        }
    }

    fn established(&mut self, key: StreamKey) {
        let Some(Some(flow)) = self.flows.get_mut(key as usize) else { return };
        if std::mem::take(&mut flow.connecting) {
            self.tell(key, From::Peer, SYN | ACK, b"");
            self.tell(key, From::Here, ACK, b"");
        }
    }
}

impl<N: Nic<Socket = AcceptedSocket, Port = OpenPort>> Nic for Tap<N> {
    type Socket = AcceptedSocket;
    type Port = OpenPort;

    fn poll(&mut self, sleep_ns: u64, events: &mut Vec<Event>) {
        self.recorder.polls += 1;
        if sleep_ns > 0 || self.recorder.polls >= POLLS_MAX {
            self.recorder.hand_over();
        }
        self.nic.poll(sleep_ns, events);
        for event in events {
            match *event {
                Event::Writable(key) => self.established(key),
                Event::Failed(key) => self.tell(key, From::Peer, RST, b""),
                Event::Datagrams(_) | Event::Connections(_) | Event::Readable(_) => {}
            }
        }
    }

    fn rx_batch(&self) -> RxBatch {
        self.nic.rx_batch()
    }

    fn recv(&mut self, port: PortIndex, batch: &mut RxBatch) -> bool {
        let more = self.nic.recv(port, batch);
        // What is recorded is what is taken in.
        batch.detach();
        if !batch.items.is_empty() {
            let now_ns = realtime_ns();
            let bound = self.addresses[usize::from(port)];
            for datagram in &batch.items {
                let local = SocketAddr::new(datagram.local.unwrap_or(bound.ip()), bound.port());
                let addresses = (datagram.peer, local);
                let payload = batch.payload(datagram);
                self.recorder.record(now_ns, addresses, packet::Transport::Udp, payload);
            }
        }
        more
    }

    fn send(&mut self, port: PortIndex, batch: &mut TxBatch) -> SendOutcome {
        let now_ns = realtime_ns();
        let bound = self.addresses[usize::from(port)];
        // What is recorded is what leaves.
        batch.detach();
        let unseen = batch.see();
        let unseen = batch.waiting()[unseen].iter().flat_map(|item| batch.datagrams_of(item));
        for (datagram, payload) in unseen {
            let local = SocketAddr::new(datagram.local.unwrap_or(bound.ip()), bound.port());
            let addresses = (local, datagram.peer);
            self.recorder.record(now_ns, addresses, packet::Transport::Udp, payload);
        }
        self.nic.send(port, batch)
    }

    fn accept(&mut self, port: PortIndex) -> Option<(AcceptedSocket, SocketAddr)> {
        self.nic.accept(port)
    }

    fn adopt(&mut self, socket: AcceptedSocket, key: StreamKey) -> Result<(), NicError> {
        let addresses = socket.addresses();
        self.nic.adopt(socket, key)?;
        // A connection that has already ended has no addresses and is not recorded.
        if let Ok((local, peer)) = addresses {
            let transport = Transport::Tcp;
            let flow = Flow { transport, local, peer, connecting: false, ours: 0, theirs: 0 };
            self.open_flow(key, flow);
            self.tell(key, From::Peer, SYN, b"");
            self.tell(key, From::Here, SYN | ACK, b"");
            self.tell(key, From::Peer, ACK, b"");
        }
        Ok(())
    }

    fn connect(
        &mut self,
        to: SocketAddr,
        transport: Transport,
        key: StreamKey,
    ) -> Result<(), NicError> {
        self.nic.connect(to, transport, key)?;
        let port = 49_152 + (key % 16_384) as u16;
        let local = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), port);
        let connecting = transport == Transport::Tcp;
        self.open_flow(key, Flow { transport, local, peer: to, connecting, ours: 0, theirs: 0 });
        if connecting {
            self.tell(key, From::Here, SYN, b"");
        }
        Ok(())
    }

    /// Unix sockets have no packets: they are not recorded.
    fn connect_local(&mut self, path: &Path, key: StreamKey) -> Result<(), NicError> {
        self.nic.connect_local(path, key)
    }

    fn read(&mut self, key: StreamKey, into: &mut [u8]) -> Read {
        let read = self.nic.read(key, into);
        match read {
            Read::Bytes(len) => self.tell(key, From::Peer, 0, &into[..len]),
            Read::Closed => self.tell(key, From::Peer, FIN, b""),
            Read::Broken => self.tell(key, From::Peer, RST, b""),
            Read::Empty => {}
        }
        read
    }

    fn write(&mut self, key: StreamKey, bytes: &[u8]) -> Written {
        let written = self.nic.write(key, bytes);
        if let Written::Bytes(len) = written {
            self.tell(key, From::Here, 0, &bytes[..len]);
        }
        written
    }

    fn stream_addresses(&self, key: StreamKey) -> Option<(SocketAddr, SocketAddr)> {
        self.nic.stream_addresses(key)
    }

    fn keep_alive(&mut self, key: StreamKey) {
        self.nic.keep_alive(key);
    }

    fn shutdown(&mut self, key: StreamKey) {
        self.tell(key, From::Here, FIN, b"");
        self.nic.shutdown(key);
    }

    /// What others write is not seen here.
    fn lend(&mut self, key: StreamKey) -> Option<LentStream> {
        self.nic.lend(key)
    }

    fn close(&mut self, key: StreamKey, how: Close) {
        let flags = match how {
            Close::Graceful => FIN,
            Close::Reset | Close::ReservePort { .. } => RST,
        };
        self.tell(key, From::Here, flags, b"");
        if let Some(flow) = self.flows.get_mut(key as usize) {
            *flow = None;
        }
        self.nic.close(key, how);
    }

    fn add_port(&mut self, index: PortIndex, port: OpenPort) -> Result<(), NicError> {
        let (place, address) = (usize::from(index), port.address());
        self.nic.add_port(index, port)?;
        if self.addresses.len() <= place {
            self.addresses.resize(place + 1, address);
        }
        self.addresses[place] = address;
        Ok(())
    }

    fn stop_port(&mut self, index: PortIndex) {
        self.nic.stop_port(index);
    }

    fn pause_port(&mut self, index: PortIndex, paused: bool) {
        self.nic.pause_port(index, paused);
    }

    fn close_port(&mut self, index: PortIndex) {
        self.nic.close_port(index);
    }

    fn stop_listening(&mut self) {
        self.nic.stop_listening();
    }

    fn counters(&self) -> NicCounters {
        NicCounters { tap_dropped: self.recorder.dropped, ..self.nic.counters() }
    }
}
