//! The cost of a message on the engine's turn without a network: a `Nic` that delivers batches of 64-byte
//! datagrams and takes the replies, with echo blocks on the worker's own core.
//!
//! `cargo run --release -p serval-accel --example turn [seconds per figure] [mqueues] [batch] [column] [bytes]`
//!
//! Columns: datagrams of one client each (`single`); batches of 64 datagrams of one client (`train`), as
//! receive offload delivers them; the same as bundles (`bundle`); as bundles that are received in place (`in-place`); where the engine
//! chooses (`auto`, and `auto-single` for one client each); one shared-memory client on the same thread, its part included
//! (`memory`), and its requests as bundles (`memory-bundle`). In `far` the blocks of that client's requests stand for a GPU: the replies are written between
//! two turns, which alone are timed, and the lines of replies and requests are in no processor's
//! cache. `far-train` is the same for GRO batches, whose messages do not overlap.
//! `shed` is the cost of a datagram for which no mqueue has credit, since no block answers.
//! Nanoseconds per message, the fastest tenth of many short measurements.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use accel::Kernel;
use accel::cpu::{Options, WorkerBlocks};
use engine::accelerator::Blocks;
use engine::metrics::Metrics;
use engine::topology::{
    Accelerator, AcceleratorKind, Bundles, CpuPlacement, EngineSettings, Limits, Listen, Polling,
    Rings, STACK_KIB, Service, Topology,
};
use engine::{
    Attachment, BlockEnds, ControlMessage, Fabric, ServiceInstall, ShmPeer, Switch, Worker,
};
use mqueue::memory::Mapping;
use mqueue::{Consumer, Head, HeapMapping, MappedMemory, Producer, Region, Words, abi};
use wire::nic::{
    Close, Datagram, Event, Nic, NicError, PortIndex, Read, RxBatch, SendOutcome, StreamKey,
    Transport, TxBatch, Written,
};

const BYTES: usize = 64;
/// Bytes of a slot that a message uses, in units of 16 bytes.
const SLOT_BYTES: u64 = (32 + BYTES as u64).div_ceil(12) * 16;
const TRAIN: usize = 64;
const SLOTS: u32 = 64;
/// Slots of the shared-memory client, which has several batches in flight in `far`.
const CLIENT_SLOTS: u32 = 1024;

/// Delivers `batch` datagrams whenever all earlier ones are answered, or in every turn.
struct Echo {
    batch: usize,
    bytes: usize,
    train: bool,
    in_place: bool,
    every_turn: bool,
    sent: u64,
    answered: u64,
    checksum: u64,
}

impl Echo {
    fn new(batch: usize, train: bool) -> Self {
        Self {
            batch,
            bytes: BYTES,
            train,
            in_place: false,
            every_turn: false,
            sent: 0,
            answered: 0,
            checksum: 0,
        }
    }
}

impl Nic for Echo {
    type Socket = ();
    type Port = ();

    fn poll(&mut self, _: u64, events: &mut Vec<Event>) {
        events.clear();
        events.push(Event::Datagrams(0));
    }

    fn recv(&mut self, _: PortIndex, batch: &mut RxBatch) -> bool {
        batch.items.clear();
        batch.overflowed = 0;
        if self.sent != self.answered && !self.every_turn {
            return false;
        }
        let slot_bytes = batch.bytes.len() / 64;
        let lent = if self.in_place { batch.use_lent(64) } else { 0 };
        let bytes = self.bytes;
        for i in 0..self.batch {
            let (client, offset) = match self.train {
                true => (i / TRAIN, i / TRAIN * slot_bytes + i % TRAIN * bytes),
                false => (i, i % 64 * slot_bytes + i / 64 * bytes),
            };
            batch.items.push(Datagram {
                peer: SocketAddr::from(([127, 0, 0, 1], 1000 + client as u16)),
                local: None,
                offset: offset as u32,
                len: bytes as u32,
                truncated: false,
                followed_by: if self.train {
                    (TRAIN - 1 - i % TRAIN).min(self.batch - 1 - i) as u8
                } else {
                    0
                },
            });
            let number = (self.sent + i as u64).to_le_bytes();
            if client >= lent {
                batch.bytes[offset..offset + 8].copy_from_slice(&number);
            } else {
                let cells = &batch.lent_to(client)[i % TRAIN * bytes..];
                number.iter().zip(cells).for_each(|(b, cell)| cell.store(*b, Ordering::Relaxed));
            }
        }
        self.sent += self.batch as u64;
        false
    }

    fn send(&mut self, _: PortIndex, batch: &mut TxBatch) -> SendOutcome {
        let sent = batch.waiting_datagrams();
        for item in batch.waiting() {
            let payloads = match item.lent_at {
                None => batch.bytes()[item.offset as usize..][..item.bytes()].as_ptr(),
                Some(at) => batch.lent(at, item.bytes()).as_ptr().cast(),
            };
            for number in 0..usize::from(item.count) {
                let payload = payloads.wrapping_add(number * item.len as usize);
                // SAFETY: inside the payloads; each has at least 8 bytes, and its block is on this thread.
                let number: [u8; 8] = unsafe { payload.cast::<[u8; 8]>().read() };
                self.checksum = self.checksum.wrapping_add(u64::from_le_bytes(number));
            }
        }
        batch.advance(sent);
        self.answered += sent as u64;
        SendOutcome { sent, ..SendOutcome::default() }
    }

    fn accept(&mut self, _: PortIndex) -> Option<((), SocketAddr)> {
        None
    }
    fn adopt(&mut self, (): (), _: StreamKey) -> Result<(), NicError> {
        Ok(())
    }
    fn connect(&mut self, _: SocketAddr, _: Transport, _: StreamKey) -> Result<(), NicError> {
        Ok(())
    }
    fn read(&mut self, _: StreamKey, _: &mut [u8]) -> Read {
        Read::Empty
    }
    fn write(&mut self, _: StreamKey, _: &[u8]) -> Written {
        Written::Full
    }
    fn shutdown(&mut self, _: StreamKey) {}
    fn close(&mut self, _: StreamKey, _: Close) {}
    fn add_port(&mut self, _: PortIndex, (): ()) -> Result<(), NicError> {
        Ok(())
    }
    fn stop_port(&mut self, _: PortIndex) {}
    fn pause_port(&mut self, _: PortIndex, _: bool) {}
    fn close_port(&mut self, _: PortIndex) {}
    fn stop_listening(&mut self) {}
}

/// Acts as the GPU: echo on the accelerator's ends of all mqueues, with its writes flushed from the caches.
struct Far {
    ends: Vec<(Consumer<MappedMemory>, Producer<MappedMemory>)>,
    /// Slots of the RX and TX rings.
    entries: Vec<[abi::RingEntry; 2]>,
    mapping: Arc<HeapMapping>,
}

impl Far {
    fn answer(&mut self) {
        let mut message = [0; BYTES];
        let flush_slot = |entry: &abi::RingEntry, number: u64| {
            let slot = number % u64::from(entry.depth) * u64::from(entry.slot_stride);
            for line in (0..SLOT_BYTES).step_by(64) {
                flush(&self.mapping, entry.slots_offset + slot + line);
            }
        };
        for ((rx, tx), [asked, answers]) in self.ends.iter_mut().zip(&self.entries) {
            while let Some(header) = rx.peek().expect("sound rings") {
                assert!(rx.copy_out(&header, &mut message[..header.len as usize]));
                flush_slot(asked, rx.consumed());
                rx.advance();
                let number = tx.committed();
                let head = Head { token: header.token, kind: header.kind, ..Head::default() };
                tx.push(head, &message).expect("room for a batch");
                flush_slot(answers, number);
            }
            if rx.release() {
                tx.publish();
                flush(&self.mapping, answers.head_offset);
            }
        }
    }
}

/// Evicts a line from the caches.
fn flush(mapping: &HeapMapping, at: u64) {
    assert!(at < mapping.len_bytes() as u64);
    #[cfg(target_arch = "x86_64")]
    // SAFETY: an address inside the mapping; memory is not modified.
    unsafe {
        std::arch::x86_64::_mm_clflush(mapping.base().add(at as usize));
    }
}

/// The engine's view of blocks on the other side of a bus.
struct FarBlocks {
    words: Words<MappedMemory>,
    mqueues: Box<[u32]>,
}

impl Blocks for FarBlocks {
    fn drive(&mut self, _: u64, _: &[u32], touched: &mut Vec<u32>) {
        self.words.tx_waiting_among(&self.mqueues, touched);
    }
    fn wake_at(&self) -> u64 {
        u64::MAX
    }
    fn runs_off_thread(&self) -> bool {
        true
    }
    fn ended(&mut self, _: &mut Vec<(u32, u64)>) {}
}

struct Rig {
    worker: Worker<Echo>,
    fabric: Arc<Fabric<ControlMessage<(), ()>>>,
    service: Service,
    far: Option<Far>,
}

fn rig(mqueues: u32, nic: Echo, far: bool, bundles: Bundles) -> Rig {
    let address = SocketAddr::from(([127, 0, 0, 1], 9000));
    let transport = Transport::Udp;
    let mut service = Service::new("echo", vec![Listen { transport, address }], "echo");
    service.mqueues = mqueues;
    service.slots = SLOTS;
    service.bundles = bundles;
    service.rings = if far { Rings::Granule } else { Rings::Auto };
    let placement = CpuPlacement::Worker;
    let topology = Topology {
        engine: EngineSettings { polling: Polling::Spin, ..EngineSettings::default() },
        limits: Limits::default(),
        accelerators: vec![Accelerator {
            name: "cpu".into(),
            kind: AcceleratorKind::Cpu { placement, stack_kib: STACK_KIB },
        }],
        services: vec![service],
        tenants: Vec::new(),
    };
    topology.check().expect("a sound topology");
    let plan = topology.services[0].region_plan(0, &topology.accelerators[0].kind, 1, 1);
    let mapping = Arc::new(HeapMapping::new(plan.bytes().expect("a sound plan") as usize));
    let memory = MappedMemory::new(mapping.clone());
    let mut region = Region::format(memory.clone(), &plan).expect("a sound plan");
    let pool = engine::take_pools(&mut region, 1).pop().flatten();
    let own: Vec<u32> = (0..mqueues).collect();
    let ends = own.iter().map(|block| BlockEnds::take(&mut region, *block)).collect();
    let (blocks, far): (Box<dyn Blocks>, _) = if far {
        let mut region = Region::join(memory).expect("just formatted");
        let entries = region.entries().as_chunks::<2>().0.to_vec();
        let ends = own.iter().map(|block| region.accelerator_ends(*block)).collect();
        let far = Far { ends, entries, mapping };
        (Box::new(FarBlocks { words: region.words(), mqueues: own.into() }), Some(far))
    } else {
        let kernel = Kernel::builtin("echo").expect("echo is built in");
        let blocks = WorkerBlocks::start(memory, kernel, &[], &own, &Options::default());
        (Box::new(blocks.expect("it starts")), None)
    };
    let metrics = Metrics::new(1, ["echo".to_owned()]);
    let fabric = Fabric::new(vec![Box::new(|| ())], 1);
    let mut worker = Worker::new(0, nic, &topology.limits, &metrics, fabric.clone());
    let attachments = vec![vec![Attachment { blocks, ends, pool }]];
    let counters = &metrics.services()[0];
    let installs = ServiceInstall::for_workers(0, &topology.services[0], counters, attachments);
    let (installed, answer) = mpsc::channel();
    for mut install in installs {
        install.add_port(0, (Listen { transport, address }, None), &topology.limits, ());
        fabric.post(0, ControlMessage::Install(Box::new(install), installed.clone()));
    }
    let switch = Switch::new(topology.limits.clone(), topology.engine.polling);
    fabric.post(0, ControlMessage::Switch(Arc::new(switch), mpsc::channel().0));
    worker.turn(0);
    answer.recv().expect("it answers").expect("it installs");
    let service = topology.services.into_iter().next().expect("there is one");
    Rig { worker, fabric, service, far }
}

/// A shared-memory client that sends a batch and reads the replies.
struct ShmClient {
    requests: Producer<MappedMemory>,
    replies: Consumer<MappedMemory>,
    sent: u64,
    answered: u64,
}

struct Silent;

impl ShmPeer for Silent {
    fn wake(&self) {}
}

impl ShmClient {
    fn new(Rig { fabric, service, .. }: &Rig) -> Self {
        let plan = service.client_region_plan(CLIENT_SLOTS);
        let memory = HeapMapping::memory(plan.bytes().expect("a sound plan") as usize);
        let mut region = Region::format(memory.clone(), &plan).expect("a sound plan");
        let (replies, requests) = region.engine_ends(0);
        let depth = plan.rings[0].depth;
        let (words, peer) = (region.words(), Box::new(Silent));
        let worker = fabric.assign_shm_client();
        let engine_side =
            engine::ShmClient { id: 1, service: 0, depth, replies, requests, words, peer };
        fabric.post(worker, ControlMessage::ShmAttached(Box::new(engine_side)));
        let mut region = Region::join(memory).expect("just formatted");
        let (replies, requests) = region.accelerator_ends(0);
        Self { requests, replies, sent: 0, answered: 0 }
    }

    fn send(&mut self, batch: usize) {
        let mut message = [0x5a; BYTES];
        for _ in 0..batch {
            message[..8].copy_from_slice(&self.sent.to_le_bytes());
            let head = Head { tag: self.sent, kind: abi::kind::MESSAGE, ..Head::default() };
            self.requests.push(head, &message).expect("room for a batch");
            self.sent += 1;
        }
        self.requests.publish();
    }

    fn receive(&mut self) {
        let mut message = [0; BYTES];
        while let Some(header) = self.replies.peek().expect("sound rings") {
            assert!(self.replies.copy_out(&header, &mut message[..header.len as usize]));
            assert_eq!(message[..8], header.tag.to_le_bytes());
            self.replies.advance();
            self.answered += 1;
        }
        self.replies.release();
    }
}

fn memory_nanoseconds_per_message(
    mqueues: u32,
    batch: usize,
    bundles: Bundles,
    time: Duration,
) -> f64 {
    let mut rig = rig(mqueues, Echo::new(0, false), false, bundles);
    let mut client = ShmClient::new(&rig);
    let worker = &mut rig.worker;
    let turns = 10_000usize.div_ceil(batch);
    let mut measured = Vec::new();
    let begin = Instant::now();
    let mut now_ns = 1;
    while begin.elapsed() < time {
        let (start, before) = (Instant::now(), client.answered);
        for _ in 0..turns {
            if client.answered == client.sent {
                client.send(batch);
            }
            now_ns += 1000;
            worker.turn(now_ns);
            worker.wait(0);
            client.receive();
        }
        let answered = client.answered - before;
        measured.push(start.elapsed().as_nanos() as f64 / answered.max(1) as f64);
    }
    measured.sort_by(f64::total_cmp);
    measured[measured.len() / 10]
}

/// One batch of requests in and one of replies out per turn: of a shared-memory client, or in batches of datagrams.
fn far_nanoseconds_per_message(mqueues: u32, batch: usize, train: bool, time: Duration) -> f64 {
    let mut rig =
        rig(mqueues, Echo::new(if train { batch } else { 0 }, train), true, Bundles::Never);
    let mut client = ShmClient::new(&rig);
    let mut far = rig.far.take().expect("asked for");
    let turns = 1_000usize.div_ceil(batch);
    let mut measured = Vec::new();
    let begin = Instant::now();
    let mut now_ns = 1;
    while begin.elapsed() < time {
        let before = client.answered + rig.worker.nic().answered;
        let mut spent = Duration::ZERO;
        for _ in 0..turns {
            if !train && client.sent - client.answered < 2 * batch as u64 {
                client.send(batch);
            }
            now_ns += 1000;
            let start = Instant::now();
            rig.worker.turn(now_ns);
            spent += start.elapsed();
            rig.worker.wait(0);
            client.receive();
            far.answer();
        }
        let answered = client.answered + rig.worker.nic().answered - before;
        measured.push(spent.as_nanos() as f64 / answered.max(1) as f64);
    }
    measured.sort_by(f64::total_cmp);
    measured[measured.len() / 10]
}

fn shed_nanoseconds_per_message(mqueues: u32, batch: usize, time: Duration) -> f64 {
    let nic = Echo { every_turn: true, ..Echo::new(batch, false) };
    let mut rig = rig(mqueues, nic, true, Bundles::Never);
    let turns = 10_000usize.div_ceil(batch);
    let mut measured = Vec::new();
    let mut now_ns = 1;
    let mut turn = || {
        now_ns += 1000;
        rig.worker.turn(now_ns);
        rig.worker.wait(0);
    };
    // Until all credit is gone.
    (0..=(mqueues * SLOTS) as usize / batch).for_each(|_| turn());
    let begin = Instant::now();
    while begin.elapsed() < time {
        let start = Instant::now();
        (0..turns).for_each(|_| turn());
        measured.push(start.elapsed().as_nanos() as f64 / (turns * batch) as f64);
    }
    measured.sort_by(f64::total_cmp);
    measured[measured.len() / 10]
}

fn nanoseconds_per_message(
    mqueues: u32,
    batch: usize,
    (train, bundles): (bool, Bundles),
    (in_place, bytes): (bool, usize),
    time: Duration,
) -> f64 {
    let nic = Echo { in_place, bytes, ..Echo::new(batch, train) };
    let mut worker = rig(mqueues, nic, false, bundles).worker;
    let turns = 10_000usize.div_ceil(batch);
    let mut measured = Vec::new();
    let begin = Instant::now();
    let mut now_ns = 1;
    loop {
        let (start, before) = (Instant::now(), worker.nic().answered);
        for _ in 0..turns {
            now_ns += 1000;
            worker.turn(now_ns);
            worker.wait(0);
        }
        let answered = worker.nic().answered - before;
        measured.push(start.elapsed().as_nanos() as f64 / answered.max(1) as f64);
        if begin.elapsed() >= time {
            break;
        }
    }
    for _ in 0..batch {
        worker.turn(now_ns);
        worker.wait(0);
        if worker.nic().sent == worker.nic().answered {
            break;
        }
    }
    let nic = worker.nic();
    let handed_in = (0..nic.sent).fold(0, u64::wrapping_add);
    assert_eq!(nic.checksum, handed_in, "each message comes back once");
    measured.sort_by(f64::total_cmp);
    measured[measured.len() / 10]
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let seconds = arguments.next().map_or(0.3, |s| s.parse().expect("seconds"));
    let mqueues = arguments.next().map(|s| vec![s.parse().expect("mqueues")]);
    let batches = arguments.next().map(|s| vec![s.parse().expect("batch")]);
    let column = arguments.next();
    let bytes = arguments.next().map_or(BYTES, |s| s.parse().expect("bytes"));
    let time = Duration::from_secs_f64(seconds);
    let wanted = |name: &str| column.as_deref().is_none_or(|column| column == name);
    println!("mqueues  batch  ns/msg");
    for mqueues in mqueues.unwrap_or(vec![1, 28, 240]) {
        for batch in batches.clone().unwrap_or(vec![1, 64, 256]) {
            if batch > (mqueues * SLOTS).min(CLIENT_SLOTS / 4) as usize {
                // Messages without credit would never be answered, and without a slot they cannot be sent.
                continue;
            }
            print!("{mqueues:7}  {batch:5}");
            let columns = [
                "single",
                "auto-single",
                "train",
                "bundle",
                "in-place",
                "auto",
                "memory",
                "memory-bundle",
                "far",
                "far-train",
                "shed",
            ];
            for name in columns.into_iter().filter(|name| wanted(name)) {
                let far = |train| far_nanoseconds_per_message(mqueues, batch, train, time);
                let ns = match name {
                    "memory" => {
                        memory_nanoseconds_per_message(mqueues, batch, Bundles::Never, time)
                    }
                    "memory-bundle" => {
                        memory_nanoseconds_per_message(mqueues, batch, Bundles::Always, time)
                    }
                    "far" => far(false),
                    "far-train" => far(true),
                    "shed" => shed_nanoseconds_per_message(mqueues, batch, time),
                    "bundle" | "in-place" => {
                        let how = (name == "in-place", bytes);
                        nanoseconds_per_message(mqueues, batch, (true, Bundles::Always), how, time)
                    }
                    "auto" | "auto-single" => {
                        let how = (name == "auto", Bundles::Auto);
                        nanoseconds_per_message(mqueues, batch, how, (false, bytes), time)
                    }
                    _ => {
                        let how = (name == "train", Bundles::Never);
                        nanoseconds_per_message(mqueues, batch, how, (false, bytes), time)
                    }
                };
                print!("  {name} {ns:6.1}");
            }
            println!();
        }
    }
}
