//! A worker between two hostile peers: a shared-memory client and an accelerator, which may write any word of their
//! regions at any time. The real turn runs; its counters must balance after every turn.

use std::net::SocketAddr;
use std::sync::{Arc, mpsc};

use engine::accelerator::Blocks;
use engine::metrics::Metrics;
use engine::topology::Topology;
use engine::{
    Attachment, BlockEnds, ControlMessage, Fabric, ServiceInstall, ShmClient, ShmPeer, Switch,
    Worker,
};
use mqueue::memory::{Memory, Ordering};
use mqueue::{Consumer, Head, HeapMapping, MappedMemory, Producer, Region, RegionPlan, abi};
use wire::nic::{
    Close, Event, Nic, NicError, PortIndex, Read, RxBatch, SendOutcome, StreamKey, Transport,
    TxBatch, Written,
};

use crate::config::topology;
use crate::rings::{Choose, Tape};

const SERVICE: &str = "schema = 1
[[service]]
name = \"echo\"
listen = [\"shm:///fuzz\"]
kernel = \"echo\"
accelerator = \"acc0\"
mqueues = 2
slots = 8
max_message_bytes = 256
";

/// Operations of one input.
const OPERATIONS_MAX: usize = 2000;

/// Applies the input to a worker with one client and two blocks.
pub fn memory(input: &[u8]) {
    let mut tape = Tape::new(input);
    let mut scene = Scene::new();
    let mut now_ns = 0;
    for _ in 0..OPERATIONS_MAX {
        if tape.is_empty() {
            break;
        }
        match tape.below(9) {
            0 => scribble(&scene.client.memory, &mut tape),
            1 => scribble(&scene.accelerator, &mut tape),
            2 => scene.client.send(&mut tape),
            3 => scene.client.take(),
            4 => scene.answer(&mut tape),
            5 => scene.replace_client(),
            _ => {
                now_ns += [1000, 1_000_000, 5_000_000_000][tape.below(3) as usize];
                scene.worker.wait(0);
                scene.worker.turn(now_ns);
                scene.check();
            }
        }
    }
}

/// A peer overwrites a word.
pub(crate) fn scribble(memory: &MappedMemory, tape: &mut Tape<'_>) {
    let at = 8 * tape.below(memory.len_bytes() / 8);
    let near = memory.load(at, Ordering::Relaxed);
    memory.store(at, tape.hostile(near), Ordering::Relaxed);
}

pub(crate) type Ends = (Consumer<MappedMemory>, Producer<MappedMemory>);

struct Scene {
    topology: Topology,
    worker: Worker<Nowhere>,
    metrics: Metrics,
    fabric: Arc<Fabric<ControlMessage<(), ()>>>,
    accelerator: MappedMemory,
    blocks: Vec<Ends>,
    client: Client,
    ids: u64,
}

/// A client's side of its region.
struct Client {
    memory: MappedMemory,
    ends: Ends,
}

pub(crate) fn region(
    plan: &RegionPlan,
) -> (MappedMemory, Region<MappedMemory>, Region<MappedMemory>) {
    let memory = HeapMapping::memory(plan.bytes().expect("a small region") as usize);
    let near = Region::format(memory.clone(), plan).expect("memory of the planned size");
    let far = Region::join(memory.clone()).expect("just formatted");
    (memory, near, far)
}

impl Scene {
    fn new() -> Self {
        let topology = topology(SERVICE);
        let service = &topology.services[0];
        let (accelerator, mut near, mut far) =
            region(&service.region_plan(0, &topology.accelerators[0].kind, 1, 1));
        let blocks = 0..service.mqueues;
        let ends = blocks.clone().map(|block| BlockEnds::take(&mut near, block));
        let attachment = Attachment {
            pool: None,
            ends: ends.collect(),
            blocks: Box::new(Elsewhere { mqueues: service.mqueues }),
        };
        let blocks = blocks.map(|block| far.accelerator_ends(block)).collect();
        let fabric = Fabric::new(vec![Box::new(|| {})], 1);
        let metrics = Metrics::new(1, [service.name.clone()]);
        let mut worker = Worker::new(0, Nowhere, &topology.limits, &metrics, fabric.clone());
        let counters = &metrics.services()[0];
        let install = ServiceInstall::for_workers(0, service, counters, vec![vec![attachment]]);
        for install in install {
            fabric.post(0, ControlMessage::Install(Box::new(install), mpsc::channel().0));
        }
        let switch = Switch::new(topology.limits.clone(), topology.engine.polling);
        fabric.post(0, ControlMessage::Switch(Arc::new(switch), mpsc::channel().0));
        worker.turn(0);
        let client = admit(&topology, &fabric, 1);
        Self { topology, worker, metrics, fabric, accelerator, blocks, client, ids: 1 }
    }

    /// The client's process dies, and another client connects.
    fn replace_client(&mut self) {
        self.fabric.post(0, ControlMessage::ShmGone(self.ids));
        self.ids += 1;
        self.client = admit(&self.topology, &self.fabric, self.ids);
    }

    /// A block takes a request and answers it, possibly with another token.
    fn answer(&mut self, tape: &mut Tape<'_>) {
        let block = tape.below(self.blocks.len() as u64) as usize;
        let (requests, replies) = &mut self.blocks[block];
        let Ok(Some(header)) = requests.peek() else { return };
        requests.advance();
        requests.release();
        let token = if tape.below(8) == 0 { tape.hostile(header.token) } else { header.token };
        let head = Head { token, kind: abi::kind::MESSAGE, ..Head::default() };
        let len = (header.len as usize).min(256);
        // A corrupted ring accepts nothing.
        let _ = replies.push(head, &[7; 256][..len]);
        replies.publish();
    }

    /// Every received request has an outcome, or is outstanding.
    fn check(&self) {
        let counted = self.metrics.service(0);
        let ended = counted.replied + counted.consumed + counted.dropped_requests();
        assert_eq!(counted.received, ended + self.worker.outstanding_of(0), "the books");
    }
}

fn admit(topology: &Topology, fabric: &Fabric<ControlMessage<(), ()>>, id: u64) -> Client {
    let plan = topology.services[0].client_region_plan(4);
    let (memory, mut near, mut far) = region(&plan);
    let (replies, requests) = near.engine_ends(0);
    let worker = fabric.assign_shm_client();
    let words = near.words();
    let depth = plan.rings[0].depth;
    let peer = Box::new(SilentPeer);
    let client = ShmClient { id, service: 0, depth, replies, requests, words, peer };
    fabric.post(worker, ControlMessage::ShmAttached(Box::new(client)));
    Client { memory, ends: far.accelerator_ends(0) }
}

impl Client {
    fn send(&mut self, tape: &mut Tape<'_>) {
        let head = Head { tag: tape.below(256), kind: abi::kind::MESSAGE, ..Head::default() };
        let len = tape.below(257) as usize;
        let _ = self.ends.1.push(head, &[9; 256][..len]);
        self.ends.1.publish();
    }

    fn take(&mut self) {
        while matches!(self.ends.0.peek(), Ok(Some(_))) {
            self.ends.0.advance();
        }
        self.ends.0.release();
    }
}

struct SilentPeer;

impl ShmPeer for SilentPeer {
    fn wake(&self) {}
}

/// Blocks that may always have replies.
pub(crate) struct Elsewhere {
    pub(crate) mqueues: u32,
}

impl Blocks for Elsewhere {
    fn drive(&mut self, _now_ns: u64, _rang: &[u32], touched: &mut Vec<u32>) {
        touched.extend(0..self.mqueues);
    }

    fn wake_at(&self) -> u64 {
        u64::MAX
    }

    fn runs_off_thread(&self) -> bool {
        true
    }

    fn ended(&mut self, _into: &mut Vec<(u32, u64)>) {}
}

/// A network without peers.
struct Nowhere;

impl Nic for Nowhere {
    type Socket = ();
    type Port = ();

    fn poll(&mut self, _sleep_ns: u64, events: &mut Vec<Event>) {
        events.clear();
    }

    fn recv(&mut self, _port: PortIndex, batch: &mut RxBatch) -> bool {
        batch.items.clear();
        false
    }

    fn send(&mut self, _port: PortIndex, _batch: &mut TxBatch) -> SendOutcome {
        SendOutcome::default()
    }

    fn accept(&mut self, _port: PortIndex) -> Option<((), SocketAddr)> {
        None
    }

    fn adopt(&mut self, _socket: (), _key: StreamKey) -> Result<(), NicError> {
        Err(NicError::Exhausted)
    }

    fn connect(
        &mut self,
        _to: SocketAddr,
        _transport: Transport,
        _key: StreamKey,
    ) -> Result<(), NicError> {
        Err(NicError::Exhausted)
    }

    fn read(&mut self, _key: StreamKey, _into: &mut [u8]) -> Read {
        Read::Empty
    }

    fn write(&mut self, _key: StreamKey, _bytes: &[u8]) -> Written {
        Written::Full
    }

    fn shutdown(&mut self, _: StreamKey) {}

    fn close(&mut self, _key: StreamKey, _how: Close) {}

    fn stop_listening(&mut self) {}

    fn add_port(&mut self, _port: PortIndex, _socket: ()) -> Result<(), NicError> {
        Err(NicError::Exhausted)
    }

    fn stop_port(&mut self, _port: PortIndex) {}

    fn pause_port(&mut self, _port: PortIndex, _held: bool) {}

    fn close_port(&mut self, _port: PortIndex) {}
}
