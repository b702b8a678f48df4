//! A worker between a hostile kernel with sockets and the peers of its connections. The kernel sends any command, and may write any word of
//! its region at any time; peers come, send, read and leave when the input says. The real turn runs on a network that refuses to be used
//! against its contract.

use std::sync::mpsc;

use engine::metrics::Metrics;
use engine::{Attachment, BlockEnds, ControlMessage, Fabric, ServiceInstall, Switch, Worker};
use mqueue::abi::stream_word::{HEAD, HEAD_END, TAIL, TAIL_END};
use mqueue::abi::{self, SocketMessage, socket_event};
use mqueue::memory::{Memory, Ordering};
use mqueue::{ByteReader, ByteWriter, Head, MappedMemory};

use crate::config::topology;
use crate::rings::{Choose, Tape};
use crate::worker::{Elsewhere, Ends, region, scribble};

mod network;

use network::Network;

const SERVICE: &str = "schema = 1
[[service]]
name = \"streams\"
kernel = \"stream_echo\"
accelerator = \"acc0\"
mqueues = 2
sockets_per_block = 3
socket_bytes = 4096
[[service.socket]]
name = \"clients\"
listen = \"tcp://127.0.0.1:7000\"
[[service.socket]]
name = \"server\"
connect = \"tcp://127.0.0.1:7001\"
";

/// Operations of one input.
const OPERATIONS_MAX: usize = 2000;
/// The longest piece that a block or a peer moves at once.
const PIECE_BYTES_MAX: u64 = 5000;

/// Applies the input to a worker with two blocks.
pub fn memory(input: &[u8]) {
    let mut tape = Tape::new(input);
    let mut scene = Scene::new();
    for _ in 0..OPERATIONS_MAX {
        if tape.is_empty() {
            break;
        }
        let block = tape.below(2) as usize;
        match tape.below(12) {
            0..3 => scene.blocks[block].command(&mut tape),
            3 => scene.blocks[block].take_events(),
            4 => scene.blocks[block].use_stream(&mut tape),
            5 => scene.scribble(block, &mut tape),
            6..9 => scene.worker.nic().happen(&mut tape),
            _ => {
                let pause_ns = [1000, 1_000_000, 5_000_000_000][tape.below(3) as usize];
                scene.turn(pause_ns);
            }
        }
    }
    scene.end();
}

struct Scene {
    worker: Worker<Network>,
    metrics: Metrics,
    memory: MappedMemory,
    blocks: Vec<Block>,
    now_ns: u64,
}

impl Scene {
    fn new() -> Self {
        let topology = topology(SERVICE);
        let service = &topology.services[0];
        let plan = service.region_plan(0, &topology.accelerators[0].kind, 1, 1);
        let (memory, mut near, mut far) = region(&plan);
        let blocks = 0..service.mqueues;
        let ends = blocks.clone().map(|block| BlockEnds::take(&mut near, block)).collect();
        let drive = Elsewhere { mqueues: far.mqueue_count() };
        let attachment = Attachment { ends, blocks: Box::new(drive), pool: None };
        let blocks = blocks.map(|block| Block::new(&mut far, block)).collect();
        let fabric = Fabric::new(vec![Box::new(|| {})], 1);
        let metrics = Metrics::new(1, [service.name.clone()]);
        let network = Network::default();
        let mut worker = Worker::new(0, network, &topology.limits, &metrics, fabric.clone());
        let counters = &metrics.services()[0];
        let installs = ServiceInstall::for_workers(0, service, counters, vec![vec![attachment]]);
        for mut install in installs {
            for (port, listen) in (0..).zip(service.ports()) {
                install.add_port(port, listen, &topology.limits, ());
            }
            fabric.post(0, ControlMessage::Install(Box::new(install), mpsc::channel().0));
        }
        let switch = Switch::new(topology.limits.clone(), topology.engine.polling);
        fabric.post(0, ControlMessage::Switch(switch.into(), mpsc::channel().0));
        worker.turn(0);
        Self { worker, metrics, memory, blocks, now_ns: 0 }
    }

    /// A block overwrites a word of a stream ring, or any word.
    fn scribble(&mut self, block: usize, tape: &mut Tape<'_>) {
        let words = &self.blocks[block].words;
        match tape.below(words.len() as u64 + 1) as usize {
            at if at < words.len() => {
                let near = self.memory.load(words[at], Ordering::Relaxed);
                self.memory.store(words[at], tape.hostile(near), Ordering::Relaxed);
            }
            _ => scribble(&self.memory, tape),
        }
    }

    fn turn(&mut self, pause_ns: u64) {
        self.now_ns += pause_ns;
        self.worker.wait(0);
        self.worker.turn(self.now_ns);
        self.check();
    }

    /// Every byte is counted once, and every connection.
    fn check(&mut self) {
        let counted = self.metrics.service(0);
        let [(mut received, to_blocks), (mut sent, from_blocks)] = self.worker.socket_bytes_of(0);
        received.taken += counted.socket_received_bytes;
        received.delivered += counted.socket_read_bytes;
        received.dropped += counted.socket_unread_bytes;
        sent.taken += counted.socket_written_bytes;
        sent.delivered += counted.socket_sent_bytes;
        sent.dropped += counted.socket_unsent_bytes;
        assert_eq!(received.outstanding(), to_blocks, "bytes to blocks: {received:?}");
        assert_eq!(sent.outstanding(), from_blocks, "bytes from blocks: {sent:?}");
        let network = self.worker.nic();
        assert_eq!(received.taken, network.given, "bytes that peers sent");
        assert_eq!(sent.delivered, network.taken, "bytes that peers got");
        let open = counted.sockets_opened - counted.sockets_closed;
        assert_eq!(open, network.established(), "connections");
    }

    /// All peers reset their connections: none is left.
    fn end(mut self) {
        self.worker.nic().reset_all();
        // Commands that waited may open others.
        self.worker.nic().is_closed = true;
        for _ in 0..2 {
            self.turn(1000);
            self.worker.nic().reset_all();
        }
        self.turn(1_000_000);
        assert_eq!(self.worker.nic().connections(), 0, "connections are left");
    }
}

/// The kernel's side of one block.
struct Block {
    mqueue: Ends,
    streams: Vec<(ByteReader<MappedMemory>, ByteWriter<MappedMemory>)>,
    /// The words of its stream rings.
    words: Vec<u64>,
    /// By slot.
    leases: Vec<u32>,
}

impl Block {
    fn new(region: &mut mqueue::Region<MappedMemory>, block: u32) -> Self {
        let rings = region.streams_of(block).iter().flatten();
        let of_ring = |at: u64| [HEAD, HEAD_END, TAIL, TAIL_END].map(|word| at + word);
        let words = rings.flat_map(|ring| of_ring(ring.offset)).collect();
        let number = *region.mqueues_of(block).last().expect("the socket mqueue is the last");
        let mqueue = region.accelerator_ends(number);
        let streams = region.block_streams(block);
        let leases = vec![0; streams.len()];
        Self { mqueue, streams, words, leases }
    }

    /// Writes a command: one of those that it may give, or any.
    fn command(&mut self, tape: &mut Tape<'_>) {
        let (op, slot, value) = (tape.below(6), tape.below(4), tape.below(3) as u32);
        let lease = self.leases.get(slot as usize).copied().unwrap_or(0);
        let mut message =
            SocketMessage { op: op as u32, slot: slot as u32, generation: lease, value };
        let mut len = size_of::<SocketMessage>();
        match tape.below(16) {
            0 => message.slot = tape.hostile(slot) as u32,
            1 => message.generation = tape.hostile(lease.into()) as u32,
            2 => message.value = tape.hostile(value.into()) as u32,
            3 => message.op = tape.hostile(op) as u32,
            4 => len = tape.below(len as u64) as usize,
            _ => {}
        }
        let head = Head { token: tape.below(256), kind: abi::kind::MESSAGE, ..Head::default() };
        // A full ring, or one that it has overwritten, takes nothing.
        let _ = self.mqueue.1.push(head, &message.to_bytes()[..len]);
        self.mqueue.1.publish();
    }

    /// Reads what the engine has sent.
    fn take_events(&mut self) {
        while let Ok(Some(header)) = self.mqueue.0.peek() {
            let mut bytes = [0; size_of::<SocketMessage>()];
            let is_whole = header.len as usize == bytes.len();
            if is_whole && self.mqueue.0.copy_out(&header, &mut bytes) {
                self.take_event(SocketMessage::from_bytes(bytes));
            }
            self.mqueue.0.advance();
        }
        self.mqueue.0.release();
    }

    fn take_event(&mut self, message: SocketMessage) {
        let is_lease = message.op == socket_event::DONE && message.generation > 0;
        if is_lease && let Some(lease) = self.leases.get_mut(message.slot as usize) {
            *lease = message.generation;
            let (recv, send) = &mut self.streams[message.slot as usize];
            recv.forget();
            send.forget();
        }
    }

    /// Reads, writes, or ends a stream, whether its slot is leased or not.
    fn use_stream(&mut self, tape: &mut Tape<'_>) {
        let slot = tape.below(self.streams.len() as u64) as usize;
        let (recv, send) = &mut self.streams[slot];
        let mut bytes = vec![7; tape.below(PIECE_BYTES_MAX) as usize];
        // What it has overwritten is an error here, too.
        let _ = match tape.below(5) {
            0 | 1 => recv.read(&mut bytes),
            2 | 3 => send.write(&[], &bytes),
            _ => {
                send.set_end(abi::status::CLOSED.into());
                Ok(0)
            }
        };
    }
}
