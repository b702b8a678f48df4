//! Stream sockets of blocks, through a real server: TCP peers, and an accelerator of this test whose blocks echo streams.

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use common::{PATIENCE, address, eventually, start, tcp_client, topology, topology_on};
use engine::topology::{
    Accelerator, AcceleratorKind, CpuPlacement, DeviceSpec, HEARTBEAT_MS, Launch, Service,
    SocketAt, SocketSpec, Topology,
};
use mqueue::abi::{SocketMessage, kind, reason, socket_event, socket_op, status, stop};
use mqueue::{ByteReader, ByteWriter, Consumer, Head, MappedMemory, Producer, Region, Words};
use runtime::{AttachRequest, Device, Failure, Job};
use server::Server;
use sockets::End;

/// What the blocks of this test do.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Does {
    /// Accept from socket 0 and echo.
    Echo,
    /// Connect to socket 1 for each connection to socket 0, and pass bytes on in both directions.
    Relay,
    /// Accept, read nothing, never close.
    Idle,
    /// Echo, and before each command send others that it may not give.
    Forge,
    /// Answer the first bytes with [`ANSWER_BYTES`], and close.
    Hasty,
}

/// They fit into a ring of 256 KiB.
const ANSWER_BYTES: usize = 200_000;

/// A slot as the block sees it.
struct Stream {
    rx: ByteReader<MappedMemory>,
    tx: ByteWriter<MappedMemory>,
    /// Its lease; 0: none.
    generation: u32,
    /// Bytes read since the last notification.
    read: u64,
    /// The slot whose bytes go out here.
    partner: Option<usize>,
    shut: bool,
}

/// One block.
struct Block {
    does: Does,
    words: Words<MappedMemory>,
    events: Consumer<MappedMemory>,
    commands: Producer<MappedMemory>,
    streams: Vec<Stream>,
    /// Accepted, and not connected on yet.
    waiting: Option<usize>,
}

const ACCEPT: u64 = 1;
const CONNECT: u64 = 2;

impl Block {
    fn command(&mut self, token: u64, op: u32, slot: usize, value: u32) {
        let generation = self.streams.get(slot).map_or(0, |stream| stream.generation);
        let slot = slot as u32;
        if self.does == Does::Forge {
            // A slot that does not exist, a lease that is over or has never been, a command that does not exist.
            let forged = |op, slot, generation| SocketMessage { op, slot, generation, value: 0 };
            self.send(0, forged(socket_op::NOTIFY, u32::MAX, generation));
            self.send(0, forged(socket_op::CLOSE, 0, u32::MAX));
            self.send(0, forged(socket_op::CLOSE, 3, 0));
            self.send(0, forged(99, 0, generation));
        }
        self.send(token, SocketMessage { op, slot, generation, value });
    }

    fn send(&mut self, token: u64, message: SocketMessage) {
        let head = Head { token, tag: 0, kind: kind::MESSAGE, status: status::OK };
        while self.commands.push(head, &message.to_bytes()).is_err() {
            if self.words.stop() == stop::NOW {
                return;
            }
            thread::yield_now();
        }
        self.commands.publish();
    }

    fn run(mut self) {
        self.command(ACCEPT, socket_op::ACCEPT, usize::MAX, 0);
        while self.words.stop() != stop::NOW {
            let mut idle = true;
            while let Ok(Some(header)) = self.events.peek() {
                let mut bytes = [0; size_of::<SocketMessage>()];
                assert!(self.events.copy_out(&header, &mut bytes));
                self.events.advance();
                self.events.release();
                self.take(header.token, SocketMessage::from_bytes(bytes));
                idle = false;
            }
            for slot in 0..self.streams.len() {
                idle &= !self.serve(slot);
            }
            if idle {
                thread::sleep(Duration::from_micros(50));
            }
        }
    }

    fn take(&mut self, token: u64, message: SocketMessage) {
        if message.op != socket_event::DONE {
            return;
        }
        let slot = message.slot as usize;
        if message.value != u32::from(status::OK) {
            // The peer could not be reached.
            let accepted = self.waiting.take().expect("a connection waits for its partner");
            self.close(accepted, 1);
            return self.command(ACCEPT, socket_op::ACCEPT, usize::MAX, 0);
        }
        let stream = &mut self.streams[slot];
        stream.rx.forget();
        stream.tx.forget();
        (stream.generation, stream.read, stream.shut) = (message.generation, 0, false);
        stream.partner = Some(slot);
        match (self.does, token) {
            (Does::Relay, ACCEPT) => {
                self.waiting = Some(slot);
                return self.command(CONNECT, socket_op::CONNECT, usize::MAX, 1);
            }
            (Does::Relay, _) => {
                let accepted = self.waiting.take().expect("a connection waits for its partner");
                self.streams[slot].partner = Some(accepted);
                self.streams[accepted].partner = Some(slot);
            }
            _ => {}
        }
        self.command(ACCEPT, socket_op::ACCEPT, usize::MAX, 0);
    }

    fn close(&mut self, slot: usize, reset: u32) {
        self.command(0, socket_op::CLOSE, slot, reset);
        self.streams[slot].generation = 0;
    }

    fn answer_and_close(&mut self, slot: usize) -> bool {
        let stream = &mut self.streams[slot];
        let got = stream.rx.read(&mut [0; 100]).unwrap();
        if got > 0 {
            assert_eq!(stream.tx.write(&[], &pattern(ANSWER_BYTES)), Ok(ANSWER_BYTES));
            self.close(slot, 0);
        }
        got > 0
    }

    /// Passes on what a slot received; returns whether there was anything.
    fn serve(&mut self, slot: usize) -> bool {
        if self.streams[slot].generation == 0 || self.does == Does::Idle {
            return false;
        }
        let Some(to) = self.streams[slot].partner else { return false };
        if self.waiting == Some(slot) {
            return false;
        }
        if self.streams[to].tx.reader_end() != 0 {
            if self.streams[to].generation != 0 {
                self.close(to, 1);
            }
            if self.streams[slot].generation != 0 {
                self.close(slot, 1);
            }
            return true;
        }
        if self.does == Does::Hasty {
            return self.answer_and_close(slot);
        }
        let room = self.streams[to].tx.room().unwrap();
        let mut bytes = vec![0; room.min(10_000)];
        let count = self.streams[slot].rx.read(&mut bytes).unwrap();
        if count > 0 {
            assert_eq!(self.streams[to].tx.write(&[], &bytes[..count]), Ok(count));
            self.command(0, socket_op::NOTIFY, to, 0);
            self.streams[slot].read += count as u64;
            if self.streams[slot].read >= self.streams[slot].rx.capacity() / 2 {
                self.streams[slot].read = 0;
                self.command(0, socket_op::NOTIFY, slot, 0);
            }
            return true;
        }
        if self.streams[slot].rx.ended().unwrap().is_none() || self.streams[to].shut {
            return false;
        }
        self.streams[to].shut = true;
        self.streams[to].tx.set_end(status::CLOSED.into());
        self.command(0, socket_op::NOTIFY, to, 0);
        // Both directions have ended.
        if self.streams[slot].shut {
            self.close(slot, 0);
            if to != slot {
                self.close(to, 0);
            }
        }
        true
    }
}

/// The accelerator of this test: a thread for each block.
struct Streamer {
    does: Does,
    blocks: Vec<JoinHandle<()>>,
    words: Option<Words<MappedMemory>>,
}

impl Device for Streamer {
    fn kind(&self) -> &str {
        "streamer"
    }

    fn start(&mut self, jobs: &[Job]) -> Result<(), Failure> {
        let [job] = jobs else { panic!("one service at a time") };
        let mut region = Region::join(MappedMemory::new(job.memory.clone())).unwrap();
        for block in 0..job.blocks {
            let mqueue = *region.mqueues_of(block).last().unwrap();
            let (events, commands) = region.accelerator_ends(mqueue);
            let streams = region.block_streams(block).into_iter().map(|(rx, tx)| Stream {
                rx,
                tx,
                generation: 0,
                read: 0,
                partner: None,
                shut: false,
            });
            let block = Block {
                does: self.does,
                words: job.words.clone(),
                events,
                commands,
                streams: streams.collect(),
                waiting: None,
            };
            self.blocks.push(thread::spawn(move || block.run()));
        }
        self.words = Some(job.words.clone());
        Ok(())
    }

    fn health(&mut self) -> Result<(), Failure> {
        Ok(())
    }

    fn ended(&mut self) -> bool {
        self.blocks.iter().all(JoinHandle::is_finished)
    }

    fn stop(&mut self, _timeout: Duration) -> Result<(), Failure> {
        let Some(words) = self.words.take() else { return Ok(()) };
        words.set_stop(stop::NOW);
        for block in self.blocks.drain(..) {
            if block.join().is_err() {
                return Err(Failure { reason: reason::CONTRACT, text: "a block panicked".into() });
            }
        }
        Ok(())
    }
}

/// A server with a service of sockets, and its accelerator.
struct Scene {
    server: Option<Server>,
    cancel: Arc<AtomicBool>,
    runtime: Option<JoinHandle<()>>,
    folder: PathBuf,
}

impl Scene {
    fn new(name: &str, does: Does, change: impl FnOnce(&mut Topology)) -> Self {
        let folder = folder_of(name);
        let attach = folder.join("attach");
        let mut service = Service::new("streams", Vec::new(), "streams");
        service.sockets = vec![SocketSpec::listen(([127, 0, 0, 1], 0))];
        (service.mqueues, service.socket_bytes) = (2, 16 << 10);
        let mut wanted = topology(vec![service]);
        wanted.accelerators[0] = Accelerator {
            name: "own".into(),
            kind: AcceleratorKind::Process {
                launch: Launch::External { attach: attach.clone() },
                heartbeat_ms: 60_000.max(HEARTBEAT_MS),
                device: DeviceSpec::host(),
            },
        };
        change(&mut wanted);
        let server = start(wanted);
        let cancel = Arc::new(AtomicBool::new(false));
        let over = cancel.clone();
        let runtime = thread::spawn(move || {
            let mut device = Streamer { does, blocks: Vec::new(), words: None };
            let request = AttachRequest::default();
            // It ends with the server.
            let _ = runtime::attach(&attach, &request, &mut device, false, &over);
        });
        Self { server: Some(server), cancel, runtime: Some(runtime), folder }
    }

    fn server(&self) -> &Server {
        self.server.as_ref().unwrap()
    }

    fn client(&self) -> TcpStream {
        tcp_client(address(self.server(), 0))
    }

    fn ends(&self, end: End) -> u64 {
        self.server().metrics().service(0).socket_ends[end as usize]
    }

    /// The sockets opened and not closed.
    fn open(&self) -> u64 {
        let counted = self.server().metrics().service(0);
        counted.sockets_opened - counted.sockets_closed
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        drop(self.server.take());
        self.cancel.store(true, Ordering::Relaxed);
        if let Some(runtime) = self.runtime.take() {
            let ended = runtime.join();
            assert!(ended.is_ok() || thread::panicking());
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// A new folder.
fn folder_of(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("serval-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n * 7 + n / 251) as u8).collect()
}

/// Sends bytes, ends its direction, and reads to the end.
fn echoed(stream: TcpStream, bytes: &[u8]) -> Vec<u8> {
    let mut reader = stream.try_clone().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut stream = &stream;
            stream.write_all(bytes).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
        });
        let mut got = Vec::new();
        reader.read_to_end(&mut got).unwrap();
        got
    })
}

#[test]
fn blocks_echo_streams_of_any_length_and_the_books_balance() {
    let scene = Scene::new("echo", Does::Echo, |_| {});
    let mut total = 0;
    for len in [1, 7, 4096, 100_000, 1_000_003] {
        let bytes = pattern(len);
        assert!(echoed(scene.client(), &bytes) == bytes, "{len} bytes");
        total += len as u64;
    }
    eventually("all sockets are closed and counted", || {
        let counted = scene.server().metrics().service(0);
        scene.open() == 0 && counted.socket_sent_bytes == total
    });
    let counted = scene.server().metrics().service(0);
    assert_eq!(counted.socket_received_bytes, total);
    assert_eq!(counted.socket_read_bytes + counted.socket_unread_bytes, total);
    assert_eq!(counted.socket_unread_bytes, 0);
    assert_eq!((counted.socket_written_bytes, counted.socket_unsent_bytes), (total, 0));
    assert_eq!(scene.ends(End::Closed), 5);
    assert_eq!(counted.socket_bad_commands, 0);
}

/// A server with a built-in kernel on host cores.
fn builtin(kernel: &str, placement: CpuPlacement, change: impl FnOnce(&mut Topology)) -> Server {
    let mut service = Service::new("streams", Vec::new(), kernel);
    service.sockets = vec![SocketSpec::listen(([127, 0, 0, 1], 0))];
    let mut wanted = topology_on(placement, vec![service]);
    change(&mut wanted);
    start(wanted)
}

fn placements() -> [CpuPlacement; 2] {
    [CpuPlacement::Worker, CpuPlacement::Threads { threads: 2, cores: Vec::new() }]
}

#[test]
fn the_echo_kernel_serves_many_connections_on_every_placement() {
    for placement in placements() {
        let server = builtin("stream_echo", placement, |_| {});
        thread::scope(|scope| {
            for client in 0..24 {
                let stream = tcp_client(address(&server, 0));
                scope.spawn(move || {
                    let bytes = pattern(1 + 9973 * client);
                    assert!(echoed(stream, &bytes) == bytes, "client {client}");
                });
            }
        });
        eventually("all are closed", || {
            server.metrics().service(0).socket_ends[End::Closed as usize] == 24
        });
        let total: usize = (0..24).map(|client| 1 + 9973 * client).sum();
        eventually("all bytes are counted", || {
            server.metrics().service(0).socket_sent_bytes == total as u64
        });
        let counted = server.metrics().service(0);
        assert_eq!(counted.socket_received_bytes, total as u64);
        assert_eq!((counted.socket_unread_bytes, counted.socket_unsent_bytes), (0, 0));
    }
}

#[test]
fn an_idle_connection_does_not_keep_others_from_being_accepted() {
    let thread = CpuPlacement::Threads { threads: 1, cores: Vec::new() };
    for placement in [CpuPlacement::Worker, thread] {
        let server = builtin("stream_echo", placement, |topology| {
            topology.services[0].mqueues = 1;
        });
        let mut first = tcp_client(address(&server, 0));
        first.write_all(b"a").unwrap();
        first.read_exact(&mut [0]).unwrap();
        // The block waits for bytes of the first one.
        let mut second = tcp_client(address(&server, 0));
        second.write_all(b"b").unwrap();
        second.read_exact(&mut [0]).unwrap();
        first.write_all(b"c").unwrap();
        first.read_exact(&mut [0]).unwrap();
    }
}

fn product(stream: &mut TcpStream, n: usize, a: &[f32], b: &[f32]) -> Vec<f32> {
    let mut request = (n as u32).to_le_bytes().to_vec();
    request.extend(a.iter().chain(b).flat_map(|number| number.to_le_bytes()));
    let mut writer = stream.try_clone().unwrap();
    let mut answer = vec![0; 4 * n * n];
    thread::scope(|scope| {
        scope.spawn(move || writer.write_all(&request).unwrap());
        stream.read_exact(&mut answer).unwrap();
    });
    answer.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

#[test]
fn the_product_kernel_multiplies_matrices_of_every_size() {
    for placement in placements() {
        let server = builtin("matmul", placement, |topology| topology.services[0].mqueues = 2);
        let mut stream = tcp_client(address(&server, 0));
        for n in [1, 2, 31, 32, 33, 64, 100] {
            // Small whole numbers: every sum is exact.
            let a: Vec<f32> = (0..n * n).map(|i| (i % 7) as f32 - 3.0).collect();
            let b: Vec<f32> = (0..n * n).map(|i| (i % 5) as f32 - 2.0).collect();
            let c = product(&mut stream, n, &a, &b);
            for i in 0..n {
                for j in 0..n {
                    let sum: f32 = (0..n).map(|k| a[i * n + k] * b[k * n + j]).sum();
                    assert_eq!(c[i * n + j], sum, "n {n}, row {i}, column {j}");
                }
            }
        }
        // Another size ends the connection.
        stream.write_all(&513u32.to_le_bytes()).unwrap();
        assert!(stream.read(&mut [0]).map_or(true, |count| count == 0));
        drop(server);
    }
}

#[test]
fn more_clients_than_sockets_wait_and_are_served() {
    let scene = Scene::new("crowd", Does::Echo, |topology| {
        topology.services[0].sockets_per_block = 2;
    });
    thread::scope(|scope| {
        for client in 0..16 {
            let stream = scene.client();
            scope.spawn(move || {
                let bytes = pattern(20_000 + client);
                assert!(echoed(stream, &bytes) == bytes, "client {client}");
            });
        }
    });
    eventually("all are closed", || scene.ends(End::Closed) == 16);
}

#[test]
fn several_workers_share_a_listener() {
    let scene = Scene::new("workers", Does::Echo, |topology| topology.engine.workers = 2);
    let metrics = scene.server().metrics();
    let opened = |worker: usize| metrics.services()[0].counted_by(worker).sockets_opened;
    // The host kernel chooses a worker by the port of the client.
    let mut clients = 0;
    while clients < 20 || (0..2).any(|worker| opened(worker) == 0) {
        assert!(clients < 500, "{} and {} connections", opened(0), opened(1));
        let bytes = pattern(10_000);
        assert!(echoed(scene.client(), &bytes) == bytes);
        clients += 1;
    }
    eventually("all are closed", || scene.ends(End::Closed) == clients);
}

#[test]
fn a_block_connects_out_and_relays() {
    let peer = TcpListener::bind("127.0.0.1:0").unwrap();
    let at: SocketAddr = peer.local_addr().unwrap();
    let scene = Scene::new("relay", Does::Relay, |topology| {
        topology.services[0].sockets.push(SocketSpec::connect(at));
    });
    let server = thread::spawn(move || {
        let (mut stream, _) = peer.accept().unwrap();
        let mut got = Vec::new();
        stream.read_to_end(&mut got).unwrap();
        got.reverse();
        stream.write_all(&got).unwrap();
        // Later ones are refused.
    });
    let bytes = pattern(50_000);
    let mut wanted = bytes.clone();
    wanted.reverse();
    assert!(echoed(scene.client(), &bytes) == wanted);
    server.join().unwrap();
    eventually("both are closed", || scene.ends(End::Closed) == 2);
    let mut refused = scene.client();
    assert!(refused.read(&mut [0]).map_or(true, |count| count == 0), "it is reset");
    assert!(scene.ends(End::Refused) >= 1);
}

/// Both sides of a relay are Unix sockets; the listener has the file of a dead process in its way.
#[test]
fn peers_may_be_unix_sockets() {
    let folder = folder_of("unix-peers");
    let (front, back) = (folder.join("front"), folder.join("back"));
    drop(UnixListener::bind(&front).unwrap());
    let peer = UnixListener::bind(&back).unwrap();
    let scene = Scene::new("unix", Does::Relay, |topology| {
        topology.engine.workers = 2;
        let at = [front.clone(), back.clone()].map(SocketAt::Unix);
        let [front, back] = at;
        topology.services[0].sockets = vec![SocketSpec::listen(front), SocketSpec::connect(back)];
    });
    assert_eq!(std::fs::metadata(&front).unwrap().permissions().mode() & 0o777, 0o600);
    let bytes = pattern(300_000);
    let server = thread::spawn(move || {
        for _ in 0..4 {
            let (mut stream, _) = peer.accept().unwrap();
            let mut got = Vec::new();
            stream.read_to_end(&mut got).unwrap();
            got.reverse();
            stream.write_all(&got).unwrap();
        }
    });
    let wanted: Vec<u8> = bytes.iter().rev().copied().collect();
    for _ in 0..4 {
        let stream = UnixStream::connect(&front).unwrap();
        let mut reader = stream.try_clone().unwrap();
        let mut got = Vec::new();
        thread::scope(|scope| {
            scope.spawn(|| {
                (&stream).write_all(&bytes).unwrap();
                stream.shutdown(Shutdown::Write).unwrap();
            });
            reader.read_to_end(&mut got).unwrap();
        });
        assert!(got == wanted, "{} bytes", got.len());
    }
    server.join().unwrap();
    eventually("all are closed", || scene.ends(End::Closed) == 8);
    // The peer is gone: its file is there, and no one listens.
    let mut refused = UnixStream::connect(&front).unwrap();
    assert!(refused.read(&mut [0]).map_or(true, |count| count == 0), "it is reset");
    eventually("it is refused", || scene.ends(End::Refused) == 1);
    drop(scene);
    assert!(!front.exists(), "the file of the listener is removed");
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_unix_socket_that_is_taken_is_refused() {
    let folder = folder_of("unix-taken");
    let path = folder.join("taken");
    let _other = UnixListener::bind(&path).unwrap();
    let mut service = Service::new("streams", Vec::new(), "stream_echo");
    service.sockets = vec![SocketSpec::listen(SocketAt::Unix(path.clone()))];
    let Err(error) = Server::start(topology(vec![service])) else { panic!("it is taken") };
    assert!(error.to_string().contains("another process listens there"), "{error}");
    assert!(path.exists());
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_peer_that_resets_frees_its_socket() {
    let scene = Scene::new("reset", Does::Echo, |topology| {
        topology.services[0].sockets_per_block = 1;
        topology.services[0].mqueues = 1;
    });
    for _ in 0..3 {
        let mut stream = scene.client();
        stream.write_all(b"x").unwrap();
        stream.read_exact(&mut [0]).unwrap();
        // Unread bytes make the close a reset.
        stream.write_all(&pattern(100_000)).unwrap();
        thread::sleep(Duration::from_millis(1));
        drop(stream);
    }
    assert!(echoed(scene.client(), b"still there") == b"still there");
    eventually("all are closed", || scene.open() == 0);
}

/// A client that sends and never reads fills the rings of its connection only. Its block goes on with the others.
#[test]
fn a_client_that_stops_reading_delays_no_other() {
    let scene = Scene::new("deaf", Does::Echo, |topology| topology.services[0].mqueues = 1);
    let mut deaf = scene.client();
    deaf.set_nonblocking(true).unwrap();
    let mut sent = 0;
    eventually("everything on the way is full", || {
        let counted = scene.server().metrics().service(0);
        let before = sent;
        while let Ok(count) = deaf.write(&[7; 1 << 16]) {
            sent += count as u64;
        }
        // It takes a few looks before the block and the engine have done what they could.
        before == sent && counted.socket_received_bytes > counted.socket_sent_bytes
    });
    for len in [1, 50_000] {
        let bytes = pattern(len);
        assert!(echoed(scene.client(), &bytes) == bytes, "{len} bytes");
    }
    eventually("it alone is still there", || scene.ends(End::Closed) == 2 && scene.open() == 1);
    drop(deaf);
    eventually("it is over", || scene.open() == 0);
    assert!(echoed(scene.client(), b"still there") == b"still there");
}

/// Commands for sockets that are closed, of others, or do not exist have no effect but a count.
#[test]
fn forged_commands_are_counted_and_hurt_no_connection() {
    let scene = Scene::new("forge", Does::Forge, |topology| topology.engine.workers = 2);
    for len in [1, 10_000, 100_000] {
        let bytes = pattern(len);
        assert!(echoed(scene.client(), &bytes) == bytes, "{len} bytes");
    }
    eventually("all are closed in order", || scene.ends(End::Closed) == 3 && scene.open() == 0);
    let counted = scene.server().metrics().service(0);
    // Each command of a block comes with four others: at least one accept, a notification and a close for each connection.
    assert!(counted.socket_bad_commands >= 3 * 3 * 4, "{}", counted.socket_bad_commands);
    assert_eq!(counted.socket_ends.iter().sum::<u64>(), 3);
}

#[test]
fn a_connection_without_bytes_ends_after_its_time() {
    let scene = Scene::new("quiet", Does::Echo, |topology| {
        topology.services[0].sockets[0].idle_ms = 200;
    });
    let mut stream = scene.client();
    stream.write_all(b"x").unwrap();
    stream.read_exact(&mut [0]).unwrap();
    assert!(stream.read(&mut [0]).is_err(), "it is reset");
    eventually("it is counted", || scene.ends(End::Idle) == 1 && scene.open() == 0);
}

/// A server whose blocks answer early and close.
fn hasty(name: &str, slow_client_ms: u64) -> Scene {
    Scene::new(name, Does::Hasty, |topology| {
        topology.services[0].socket_bytes = 256 << 10;
        topology.limits.slow_client_ms = slow_client_ms;
    })
}

/// The client sends 8 MiB before it reads. Input after the close would be answered with a reset, which destroys the answer.
#[test]
fn a_peer_that_still_sends_reads_the_whole_answer() {
    let scene = hasty("early-answer", 60_000);
    for round in 1..=3 {
        let mut stream = scene.client();
        stream.write_all(&pattern(8 << 20)).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        assert!(answer == pattern(ANSWER_BYTES), "{} bytes", answer.len());
        drop(stream);
        eventually("it is closed in order", || scene.ends(End::Closed) == round);
    }
    let counted = scene.server().metrics().service(0);
    assert!(counted.socket_unread_bytes > 3 * (7 << 20), "{}", counted.socket_unread_bytes);
    assert_eq!(counted.socket_sent_bytes, 3 * ANSWER_BYTES as u64);
}

#[test]
fn a_peer_that_sends_without_end_is_reset_after_its_time() {
    let scene = hasty("endless", 300);
    let mut stream = scene.client();
    let ended = loop {
        if let Err(error) = stream.write(&[7; 1 << 16]) {
            break error;
        }
    };
    assert_ne!(ended.kind(), std::io::ErrorKind::WouldBlock, "{ended}");
    eventually("it is counted", || scene.ends(End::UnreadInput) == 1 && scene.open() == 0);
}

/// Stops the server of a scene on a thread of its own; returns whether all that was accepted was answered.
fn stop(scene: &mut Scene) -> JoinHandle<bool> {
    let server = scene.server.take().unwrap();
    thread::spawn(move || server.shutdown().is_clean())
}

/// Whether a thread has ended within the limit of these tests.
fn ends_in_time(thread: JoinHandle<bool>) -> bool {
    eventually("the server stops long before its drain time is over", || thread.is_finished());
    thread.join().unwrap()
}

/// Longer than these tests wait for anything.
const LONG_DRAIN_MS: u64 = 600_000;

#[test]
fn an_idle_connection_does_not_delay_a_stop() {
    for (name, does) in [("idle-echo", Does::Echo), ("idle-relay", Does::Relay)] {
        let far = TcpListener::bind("127.0.0.1:0").unwrap();
        let connect = SocketSpec::connect(far.local_addr().unwrap());
        let echo = thread::spawn(move || {
            // The connection of the relay; the echo needs none.
            if does == Does::Relay {
                let (mut stream, _) = far.accept().unwrap();
                let mut back = stream.try_clone().unwrap();
                std::io::copy(&mut stream, &mut back).unwrap();
            }
        });
        let mut scene = Scene::new(name, does, |topology| {
            topology.engine.drain_ms = LONG_DRAIN_MS;
            topology.services[0].sockets.push(connect);
        });
        let mut used = scene.client();
        used.write_all(b"keep alive").unwrap();
        used.read_exact(&mut [0; 10]).unwrap();
        assert!(ends_in_time(stop(&mut scene)), "{name}");
        assert_eq!(used.read(&mut [0]).unwrap(), 0, "{name}: it ends in order");
        echo.join().unwrap();
    }
}

#[test]
fn the_builtin_kernels_let_idle_connections_go() {
    for placement in placements() {
        let change = |topology: &mut Topology| topology.engine.drain_ms = LONG_DRAIN_MS;
        let server = builtin("stream_echo", placement, change);
        let mut idle = tcp_client(address(&server, 0));
        idle.write_all(b"x").unwrap();
        idle.read_exact(&mut [0]).unwrap();
        let never_used = tcp_client(address(&server, 0));
        eventually("both are open", || server.metrics().service(0).sockets_opened == 2);
        let stopping = thread::spawn(move || server.shutdown().is_clean());
        assert!(ends_in_time(stopping));
        for mut stream in [idle, never_used] {
            assert_eq!(stream.read(&mut [0]).unwrap(), 0, "it ends in order");
        }
    }
}

#[test]
fn what_was_sent_before_a_stop_is_answered_though_the_connection_was_idle() {
    let mut scene = Scene::new("idle-last", Does::Echo, |topology| {
        topology.engine.drain_ms = LONG_DRAIN_MS;
    });
    let mut stream = scene.client();
    eventually("it is accepted", || scene.open() == 1);
    // At least as long as a connection is silent that is idle.
    thread::sleep(Duration::from_millis(200));
    // More than the rings hold, so that most of it is in sockets when the server stops.
    let bytes = pattern(64 << 10);
    stream.write_all(&bytes).unwrap();
    let stopping = stop(&mut scene);
    let mut back = Vec::new();
    stream.read_to_end(&mut back).unwrap();
    assert!(back == bytes, "{} bytes came back", back.len());
    assert!(ends_in_time(stopping));
}

#[test]
fn a_server_that_stops_resets_what_is_open_within_its_drain_time() {
    let mut scene = Scene::new("drain", Does::Idle, |topology| topology.engine.drain_ms = 100);
    let mut stream = scene.client();
    stream.write_all(b"no one reads this").unwrap();
    eventually("it is accepted", || scene.open() == 1);
    let began = Instant::now();
    drop(scene.server.take());
    assert!(began.elapsed() < PATIENCE);
    let end = stream.read(&mut [0]);
    assert!(end.is_err() || end.is_ok_and(|count| count == 0), "the connection has ended");
}
