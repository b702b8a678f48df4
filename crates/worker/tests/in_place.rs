//! Bundles over real sockets: GRO batches are received in the pool, and replies leave from there. Where the host kernel merges no
//! datagrams they arrive one by one, and everything else is the same.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use engine::accelerator::Blocks;
use engine::metrics::Metrics;
use engine::topology::{
    Accelerator, AcceleratorKind, Bundles, CpuPlacement, EngineSettings, Limits, Listen, Polling,
    Rings, STACK_KIB, Service, Topology,
};
use engine::{Attachment, BlockEnds, ControlMessage, Fabric, ServiceInstall, Switch, Worker};
use mqueue::abi::{Bundle, BundleReply, PoolEntry, kind};
use mqueue::memory::Memory;
use mqueue::{BundleReplies, Consumer, Head, HeapMapping, MappedMemory, Producer, Region, Words};
use sys::{OpenPort, PortSpec, SocketNic, SocketOptions};
use wire::nic::{Nic, RxBatch, Transport, TxBatch};

const PATIENCE: Duration = Duration::from_secs(60);
const MQUEUES: u32 = 8;
const LEN: usize = 784;
const BATCH: usize = 64;
const BATCHES: usize = 3;

/// The engine's view of blocks that this test plays.
struct PlayedBlocks {
    words: Words<MappedMemory>,
    mqueues: Box<[u32]>,
}

impl Blocks for PlayedBlocks {
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

/// The accelerator: all blocks of the service.
struct Played {
    ends: Vec<(Consumer<MappedMemory>, Producer<MappedMemory>)>,
    memory: MappedMemory,
    pools: Vec<PoolEntry>,
    /// Every completion is published twice.
    twice: bool,
    bundles: u64,
    in_place: u64,
}

/// What a block answers.
fn reply_to(message: &[u8]) -> Vec<u8> {
    message.iter().map(|byte| byte ^ 0x55).collect()
}

impl Played {
    /// Answers what waits at some of the blocks.
    fn answer(&mut self, blocks: impl Iterator<Item = usize>) {
        for block in blocks {
            let (rx, tx) = &mut self.ends[block];
            while let Some(header) = rx.peek().expect("sound rings") {
                if header.kind == kind::BUNDLE {
                    let bundle = rx.bundle(&header).expect("a bundle").expect("a whole one");
                    let Bundle { offset, reply_offset, stride, count, .. } = bundle;
                    let checked = bundle.check(header.token, &self.pools, 1024).expect("valid");
                    let mut replies = BundleReplies::new(&checked);
                    for i in 0..count {
                        let mut message = vec![0; checked.len(i) as usize];
                        checked.copy_out(&self.memory, i, &mut message);
                        let reply = reply_to(&message);
                        if !replies.continues(i, reply.len() as u32) {
                            replies.publish(tx).expect("room");
                        }
                        assert!(replies.write(&self.memory, i, &reply));
                    }
                    replies.publish(tx).expect("room");
                    if self.twice {
                        let (len, answered) = (checked.len(0), u64::MAX >> (64 - count));
                        let stride = len.next_multiple_of(16);
                        let again = BundleReply { answered, offset: reply_offset, len, stride };
                        tx.push_bundle_reply(header.token, &again).expect("room");
                    }
                    self.bundles += 1;
                    // The replies to messages that were copied are behind them.
                    let behind = offset + u64::from(count * stride).next_multiple_of(64);
                    self.in_place += u64::from(reply_offset != behind);
                } else {
                    let mut message = vec![0; header.len as usize];
                    assert!(rx.copy_out(&header, &mut message));
                    let head = Head { token: header.token, kind: kind::MESSAGE, ..Head::default() };
                    tx.push(head, &reply_to(&message)).expect("room");
                }
                rx.advance();
            }
            rx.release();
            tx.publish();
        }
    }
}

struct Rig {
    worker: Worker<SocketNic>,
    address: SocketAddr,
    played: Played,
    metrics: Metrics,
    turns: usize,
    _fabric: Arc<Fabric<ControlMessage<<SocketNic as Nic>::Socket, OpenPort>>>,
}

fn rig(twice: bool) -> Rig {
    let spec = PortSpec { transport: Transport::Udp, address: ([127, 0, 0, 1], 0).into() };
    let options = SocketOptions::default();
    let port = OpenPort::open_all(spec, 1, &options).expect("a port").remove(0);
    let address = port.address();
    let listen = Listen { transport: Transport::Udp, address };
    let mut service = Service::new("echo", vec![listen], "echo");
    (service.mqueues, service.slots) = (MQUEUES, 64);
    (service.bundles, service.rings) = (Bundles::Always, Rings::Doorbell);
    (service.max_message_bytes, service.max_reply_bytes) = (1024, 1024);
    let topology = Topology {
        engine: EngineSettings { polling: Polling::Spin, ..EngineSettings::default() },
        limits: Limits::default(),
        accelerators: vec![Accelerator {
            name: "cpu".into(),
            kind: AcceleratorKind::Cpu { placement: CpuPlacement::Worker, stack_kib: STACK_KIB },
        }],
        services: vec![service],
        tenants: Vec::new(),
    };
    topology.check().expect("a sound topology");
    let plan = topology.services[0].region_plan(0, &topology.accelerators[0].kind, 1, 1);
    let memory = HeapMapping::memory(plan.bytes().expect("a sound plan") as usize);
    let mut region = Region::format(memory.clone(), &plan).expect("a sound plan");
    let pool = engine::take_pools(&mut region, 1).pop().flatten();
    assert!(pool.is_some(), "its rings carry bundles");
    let own: Vec<u32> = (0..MQUEUES).collect();
    let ends = own.iter().map(|block| BlockEnds::take(&mut region, *block)).collect();
    let mut region = Region::join(memory.clone()).expect("just formatted");
    let blocks = Box::new(PlayedBlocks { words: region.words(), mqueues: own.clone().into() });
    let played = Played {
        ends: own.iter().map(|block| region.accelerator_ends(*block)).collect(),
        pools: region.pools().to_vec(),
        memory,
        twice,
        bundles: 0,
        in_place: 0,
    };
    let nic = SocketNic::open(&[], options).expect("sockets");
    let metrics = Metrics::new(1, ["echo".to_owned()]);
    let fabric = Fabric::new(vec![Box::new(|| ())], 1);
    let mut worker = Worker::new(0, nic, &topology.limits, &metrics, fabric.clone());
    let attachments = vec![vec![Attachment { blocks, ends, pool }]];
    let counters = &metrics.services()[0];
    let mut installs = ServiceInstall::for_workers(0, &topology.services[0], counters, attachments);
    let (installed, answer) = mpsc::channel();
    let mut install = installs.remove(0);
    install.add_port(0, (listen, None), &topology.limits, port);
    fabric.post(0, ControlMessage::Install(Box::new(install), installed));
    let switch = Switch::new(topology.limits.clone(), topology.engine.polling);
    fabric.post(0, ControlMessage::Switch(Arc::new(switch), mpsc::channel().0));
    worker.turn(1);
    answer.recv().expect("it answers").expect("it installs");
    Rig { worker, address, played, metrics, turns: 0, _fabric: fabric }
}

impl Rig {
    fn turn(&mut self) {
        // By the engine's clock a turn takes a microsecond, so that no request times out on a busy machine.
        self.turns += 1;
        self.worker.turn(1000 * self.turns as u64);
        self.worker.wait(0);
        // Half of the blocks are slow, others each time.
        let slow = self.turns % 2;
        self.played.answer((0..MQUEUES as usize).filter(|block| block % 2 == slow));
    }

    /// Waits until nothing is in flight, and the pool is whole.
    fn settle(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while self.worker.outstanding_of(0) > 0 || self.worker.bundles_of(0) != (0, 0, 0) {
            self.turn();
            let (outstanding, bundles) = (self.worker.outstanding_of(0), self.worker.bundles_of(0));
            assert!(Instant::now() < deadline, "{outstanding} in flight, {bundles:?} in use");
        }
    }
}

/// A client that sends GSO batches, whose messages begin with its name and a number.
struct Client {
    nic: SocketNic,
    name: u8,
    sent: u32,
    awaited: HashSet<u32>,
    tx: TxBatch,
    rx: RxBatch,
}

impl Client {
    fn new(name: u8) -> Self {
        let any = PortSpec { transport: Transport::Udp, address: ([127, 0, 0, 1], 0).into() };
        Self {
            nic: SocketNic::open(&[any], SocketOptions::default()).expect("a socket"),
            name,
            sent: 0,
            awaited: HashSet::new(),
            tx: TxBatch::new(16, 1 << 20),
            rx: RxBatch::new(64, 65_536),
        }
    }

    fn message(name: u8, number: u32, len: usize) -> Vec<u8> {
        let mut message: Vec<u8> =
            (0..len).map(|at| (at * 7 + number as usize) as u8 ^ name).collect();
        message[0] = name;
        message[1..5].copy_from_slice(&number.to_le_bytes());
        message
    }

    /// Sends GSO batches; the last message of each may be shorter.
    fn send(&mut self, to: SocketAddr, batches: usize, last_len: usize) {
        for _ in 0..batches {
            let numbers = self.sent..self.sent + BATCH as u32;
            self.sent = numbers.end;
            self.awaited.extend(numbers.clone());
            let message = |number| Self::message(self.name, number, LEN);
            let bytes: Vec<_> = numbers.clone().skip(1).flat_map(message).collect();
            self.tx.push_many((to, None), (LEN, BATCH - 1), false, |into| {
                into.copy_from_slice(&bytes);
            });
            let last = Self::message(self.name, numbers.start, last_len);
            self.tx.push(to, None, last_len, |into| into.copy_from_slice(&last));
        }
        let sent = self.nic.send(0, &mut self.tx).sent;
        assert_eq!(sent, batches * BATCH);
    }

    /// Reads replies; `exact`: they are what the blocks answer.
    fn receive(&mut self, exact: bool, lens: &[usize]) -> usize {
        self.nic.recv(0, &mut self.rx);
        for item in &self.rx.items {
            let reply = self.rx.payload(item);
            assert!(lens.contains(&reply.len()), "{} bytes", reply.len());
            if exact {
                let message = reply_to(reply);
                let number = u32::from_le_bytes(message[1..5].try_into().expect("4 bytes"));
                assert_eq!(message, Self::message(self.name, number, reply.len()));
                assert!(self.awaited.remove(&number), "each request is answered once");
            }
        }
        self.rx.items.len()
    }
}

/// Whether the host kernel merges datagrams over loopback.
fn merges() -> bool {
    let any = PortSpec { transport: Transport::Udp, address: ([127, 0, 0, 1], 0).into() };
    let mut nic = SocketNic::open(&[any], SocketOptions::default()).expect("a socket");
    let to = nic.local_addresses()[0];
    let mut client = Client::new(0);
    client.send(to, 1, LEN);
    let deadline = Instant::now() + PATIENCE;
    loop {
        nic.recv(0, &mut client.rx);
        if let Some(first) = client.rx.items.first() {
            return first.followed_by > 0;
        }
        assert!(Instant::now() < deadline, "nothing arrived");
    }
}

/// Serves clients for this many rounds, and until some bundles came in place. Returns the number of requests.
fn serve(rig: &mut Rig, rounds: usize) -> u64 {
    let mut clients = [1, 2].map(Client::new);
    let merges = merges();
    let (mut round, patience) = (0, Instant::now() + PATIENCE);
    // Where turns without datagrams were many, the next batch is copied.
    while round < rounds || (merges && rig.played.in_place < 20) {
        assert!(Instant::now() < patience, "{} came in place", rig.played.in_place);
        let last_len = if round % 3 == 0 { LEN / 2 } else { LEN };
        for client in &mut clients {
            client.send(rig.address, BATCHES, last_len);
        }
        let deadline = Instant::now() + PATIENCE;
        while clients.iter().any(|client| !client.awaited.is_empty()) {
            rig.turn();
            for client in &mut clients {
                client.receive(true, &[LEN, last_len]);
            }
            let awaited: Vec<_> = clients.iter().map(|client| client.awaited.len()).collect();
            assert!(Instant::now() < deadline, "{awaited:?} are not answered");
        }
        round += 1;
    }
    rig.settle();
    assert!(rig.played.bundles > 0);
    assert!(merges || rig.played.in_place == 0, "nothing was merged");
    (round * clients.len() * BATCHES * BATCH) as u64
}

#[test]
fn messages_arrive_in_the_pool_and_replies_leave_from_there() {
    let mut rig = rig(false);
    let sent = serve(&mut rig, 20);
    let snapshot = rig.metrics.services()[0].snapshot();
    assert_eq!((snapshot.received, snapshot.replied), (sent, sent));
}

#[test]
fn a_block_that_answers_twice_harms_nobody() {
    let mut rig = rig(true);
    serve(&mut rig, 10);
}

/// The accelerator writes all over the pool while messages arrive there and replies leave: it changes only what its own replies are.
#[test]
fn a_pool_that_is_rewritten_all_the_time_changes_no_length_and_no_address() {
    let mut rig = rig(true);
    let mut clients = [1, 2].map(Client::new);
    let stop = AtomicBool::new(false);
    let (memory, pools) = (rig.played.memory.clone(), rig.played.pools.clone());
    let (mut sent, mut received) = ([0; 2], [0; 2]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut value = 0u64;
            while !stop.load(Ordering::Relaxed) {
                for pool in &pools {
                    for at in (pool.offset..pool.offset + pool.bytes).step_by(8) {
                        value = value.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        memory.store(at, value, Ordering::Relaxed);
                    }
                }
                std::thread::yield_now();
            }
        });
        let deadline = Instant::now() + PATIENCE;
        for _ in 0..20 {
            for (client, sent) in clients.iter_mut().zip(&mut sent) {
                client.send(rig.address, BATCHES, LEN);
                *sent += BATCHES * BATCH;
            }
            while sent != received && Instant::now() < deadline {
                rig.turn();
                for (client, received) in clients.iter_mut().zip(&mut received) {
                    *received += client.receive(false, &[LEN]);
                }
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(sent, received, "every request has one reply, of its length");
    rig.settle();
}
