//! The engine's side of a block's sockets against a block that keeps the contract, and against blocks that do not.

use mqueue::abi::{SocketMessage, kind, socket_event, socket_op, status};
use mqueue::{
    ByteReader, ByteWriter, Consumer, Head, HeapMapping, MappedMemory, MqueuePlan, Producer,
    Region, RegionPlan, RingPlan, Role,
};
use proptest::prelude::*;
use sockets::{BlockSockets, Books, Command, Direction, State};

const SLOTS: u32 = 2;
const CAPACITY: u64 = 4096;
/// What the service listens at and connects to.
const SOCKETS: usize = 2;

/// The block's side.
struct Block {
    events: Consumer<MappedMemory>,
    commands: Producer<MappedMemory>,
    streams: Vec<(ByteReader<MappedMemory>, ByteWriter<MappedMemory>)>,
}

impl Block {
    fn command(&mut self, token: u64, op: u32, slot: u32, generation: u32, value: u32) -> bool {
        let message = SocketMessage { op, slot, generation, value };
        let head = Head { token, tag: 0, kind: kind::MESSAGE, status: status::OK };
        let written = self.commands.push(head, &message.to_bytes()).is_ok();
        self.commands.publish();
        written
    }

    /// The next completion or event, with the number of the command.
    fn event(&mut self) -> Option<(u64, SocketMessage)> {
        let header = self.events.peek().unwrap()?;
        let mut bytes = [0; size_of::<SocketMessage>()];
        assert!(self.events.copy_out(&header, &mut bytes));
        self.events.advance();
        self.events.release();
        Some((header.token, SocketMessage::from_bytes(bytes)))
    }

    /// The slot and generation of the next completion, which must be a success.
    fn opened(&mut self, token: u64) -> (u32, u32) {
        let (of, done) = self.event().expect("a completion");
        assert_eq!((of, done.op, done.value), (token, socket_event::DONE, u32::from(status::OK)));
        self.streams[done.slot as usize].0.forget();
        self.streams[done.slot as usize].1.forget();
        (done.slot, done.generation)
    }
}

fn ends() -> (BlockSockets<MappedMemory>, Block) {
    let ring = RingPlan::doorbell(32, 0);
    let mqueue = MqueuePlan { depth: 2, rx: ring, tx: ring };
    let plan = RegionPlan::of_blocks(1, &[mqueue], 1).with_sockets(SLOTS, CAPACITY, 16);
    let memory = HeapMapping::memory(plan.bytes().unwrap() as usize);
    let mut near = Region::format(memory.clone(), &plan).unwrap();
    let mut far = Region::join(memory).unwrap();
    let mqueue = *near.mqueues_of(0).last().unwrap();
    assert_eq!(near.role(mqueue), (0, Role::Sockets));
    let (events, commands) = near.engine_ends(mqueue);
    let engine = BlockSockets::new(events, commands, near.engine_streams(0), SOCKETS);
    let (events, commands) = far.accelerator_ends(mqueue);
    let streams = far.block_streams(0);
    (engine, Block { events, commands, streams })
}

/// A connection that the engine accepted for the block.
fn accepted(engine: &mut BlockSockets<MappedMemory>, block: &mut Block) -> (u32, u32) {
    assert!(block.command(7, socket_op::ACCEPT, 0, 0, 0));
    assert_eq!(engine.next_command(), Some(Command::Accept { token: 7, socket: 0 }));
    assert!(engine.accepts(0));
    let slot = engine.lease(State::Open).unwrap();
    let token = engine.take_accept(0).unwrap();
    engine.opened(slot, token);
    engine.publish();
    block.opened(7)
}

fn books(engine: &BlockSockets<MappedMemory>, slot: u32, direction: Direction) -> [u64; 4] {
    let books: Books = engine.slots()[slot as usize].books(direction);
    [books.taken, books.delivered, books.dropped, books.outstanding()]
}

#[test]
fn bytes_go_both_ways_and_are_in_the_books() {
    let (mut engine, mut block) = ends();
    let (slot, generation) = accepted(&mut engine, &mut block);
    engine.room(slot).unwrap();
    engine.receive(slot, b"hello").unwrap();
    engine.publish();
    assert_eq!(block.event().unwrap().1.op, socket_event::EVENT);
    assert_eq!(books(&engine, slot, Direction::Receive), [5, 0, 0, 5]);
    let mut got = [0; 8];
    assert_eq!(block.streams[slot as usize].0.read(&mut got), Ok(5));
    assert_eq!(&got[..5], b"hello");
    engine.room(slot).unwrap();
    assert_eq!(books(&engine, slot, Direction::Receive), [5, 5, 0, 0]);
    block.streams[slot as usize].1.write(&[], b"good day").unwrap();
    assert!(block.command(0, socket_op::NOTIFY, slot, generation, 0));
    assert_eq!(engine.next_command(), Some(Command::Notify { slot }));
    let mut sent = [0; 3];
    assert_eq!(engine.peek(slot, &mut sent), Ok(3));
    engine.sent(slot, 3);
    assert_eq!(books(&engine, slot, Direction::Send), [8, 3, 0, 5]);
    assert!(block.command(0, socket_op::CLOSE, slot, generation, 1));
    assert_eq!(engine.next_command(), Some(Command::Close { slot, reset: true }));
    engine.free(slot);
    assert_eq!(books(&engine, slot, Direction::Send), [8, 3, 5, 0]);
    assert_eq!(engine.leased().count(), 0);
}

#[test]
fn the_end_of_a_peer_comes_after_its_bytes() {
    let (mut engine, mut block) = ends();
    let (slot, _) = accepted(&mut engine, &mut block);
    engine.room(slot).unwrap();
    engine.receive(slot, b"last").unwrap();
    engine.finish_receiving(slot);
    let reader = &mut block.streams[slot as usize].0;
    assert_eq!(reader.ended(), Ok(None), "bytes are left");
    assert_eq!(reader.read(&mut [0; 16]), Ok(4));
    assert_eq!(reader.ended(), Ok(Some(status::CLOSED.into())));
    // A later reset does not change how the stream ended, and the block's bytes have no place any more.
    engine.end(slot, status::RESET);
    assert_eq!(block.streams[slot as usize].0.ended(), Ok(Some(status::CLOSED.into())));
    assert_eq!(block.streams[slot as usize].1.reader_end(), status::RESET.into());
}

#[test]
fn what_a_block_may_not_do_costs_it_a_status_or_a_count() {
    let (mut engine, mut block) = ends();
    let (slot, generation) = accepted(&mut engine, &mut block);
    let refused = [(socket_op::ACCEPT, SOCKETS as u32), (socket_op::CONNECT, u32::MAX)];
    for (token, (op, socket)) in (20..).zip(refused) {
        assert!(block.command(token, op, 0, 0, socket));
        assert_eq!(engine.next_command(), Some(Command::NoEffect));
        engine.publish();
        let (of, done) = block.event().unwrap();
        assert_eq!((of, done.value), (token, u32::from(status::NOT_ALLOWED)));
    }
    let stale = [
        (socket_op::NOTIFY, slot, generation + 1, 0),
        (socket_op::NOTIFY, slot, generation.wrapping_sub(1), 0),
        (socket_op::NOTIFY, SLOTS, generation, 0),
        (socket_op::CLOSE, u32::MAX, generation, 0),
        (socket_op::CLOSE, slot, generation, 2),
        (socket_op::NOTIFY, 1 - slot, 0, 0),
        (99, slot, generation, 0),
    ];
    for (op, slot, generation, value) in stale {
        assert!(block.command(1, op, slot, generation, value));
        let next = engine.next_command();
        assert_eq!(next, Some(Command::NoEffect), "{op} {slot} {generation} {value}");
        assert_eq!(engine.take_bad(), 1, "{op} {slot} {generation} {value}");
    }
    // A second accept for the same listener, while the first waits.
    assert!(block.command(30, socket_op::ACCEPT, 0, 0, 0));
    assert!(block.command(31, socket_op::ACCEPT, 0, 0, 0));
    assert_eq!(engine.next_command(), Some(Command::Accept { token: 30, socket: 0 }));
    assert_eq!(engine.next_command(), Some(Command::NoEffect));
    engine.publish();
    assert_eq!(block.event().unwrap().0, 31);
    assert_eq!(engine.take_accept(0), Some(30));
    assert!(!engine.is_corrupt());
}

#[test]
fn a_lease_that_is_over_cannot_be_used() {
    let (mut engine, mut block) = ends();
    let (slot, first) = accepted(&mut engine, &mut block);
    assert!(block.command(0, socket_op::CLOSE, slot, first, 0));
    assert_eq!(engine.next_command(), Some(Command::Close { slot, reset: false }));
    engine.free(slot);
    let (again, second) = accepted(&mut engine, &mut block);
    assert_eq!(again, slot);
    assert_ne!(first, second);
    assert!(block.command(0, socket_op::CLOSE, slot, first, 0));
    assert_eq!(engine.next_command(), Some(Command::NoEffect));
    assert_eq!((engine.take_bad(), engine.leased().count()), (1, 1));
}

#[test]
fn an_event_is_owed_while_the_block_has_not_read_the_last_one() {
    let (mut engine, mut block) = ends();
    let (slot, _) = accepted(&mut engine, &mut block);
    for _ in 0..100 {
        engine.room(slot).unwrap();
        engine.receive(slot, b"x").unwrap();
    }
    engine.publish();
    assert!(engine.owes() && !engine.is_corrupt());
    assert_eq!(block.event().unwrap().1.op, socket_event::EVENT);
    assert!(block.event().is_none(), "one is unread at most");
    engine.send_owed();
    engine.publish();
    assert!(!engine.owes());
    assert_eq!(block.event().unwrap().1.op, socket_event::EVENT);
    assert!(block.event().is_none());
}

#[test]
fn commands_wait_while_the_block_does_not_read_their_completions() {
    let (mut engine, mut block) = ends();
    let (slot, generation) = accepted(&mut engine, &mut block);
    let (mut asked, mut refused) = (0, 0);
    // It never reads the refusals.
    while !engine.is_behind() {
        block.command(asked, socket_op::CONNECT, 0, 0, 9);
        asked += 1;
        refused += u64::from(engine.next_command() == Some(Command::NoEffect));
        assert!(asked < 100, "its completions do not fit");
    }
    assert_eq!((asked, engine.is_corrupt()), (refused + 1, false));
    // There is room for the events of its socket.
    engine.room(slot).unwrap();
    engine.receive(slot, b"x").unwrap();
    engine.publish();
    assert!(!engine.is_corrupt());
    while block.event().is_some() {}
    assert_eq!(engine.next_command(), Some(Command::NoEffect));
    assert!(block.command(0, socket_op::CLOSE, slot, generation, 0));
    assert_eq!(engine.next_command(), Some(Command::Close { slot, reset: false }));
    assert_eq!((engine.next_command(), engine.is_behind()), (None, false));
}

/// Whatever else the block asks for and does not read.
#[test]
fn completions_of_accepts_that_wait_keep_their_room() {
    let (mut engine, mut block) = ends();
    for socket in 0..SOCKETS as u32 {
        let token = u64::from(socket) + 5;
        assert!(block.command(token, socket_op::ACCEPT, 0, 0, socket));
        assert_eq!(engine.next_command(), Some(Command::Accept { token, socket }));
    }
    let mut asked = 0;
    while !engine.is_behind() {
        block.command(50, socket_op::CONNECT, 0, 0, 9);
        engine.next_command();
        asked += 1;
        assert!(asked < 100, "its completions do not fit");
    }
    for socket in 0..SOCKETS as u32 {
        let slot = engine.lease(State::Open).unwrap();
        let token = engine.take_accept(socket).unwrap();
        engine.opened(slot, token);
        engine.room(slot).unwrap();
        engine.receive(slot, b"x").unwrap();
    }
    engine.publish();
    assert!(!engine.is_corrupt(), "there is no room for what the engine has promised");
    let events = std::iter::from_fn(|| block.event());
    let opened =
        events.filter(|(_, message)| message.op == socket_event::DONE && message.value == 0);
    assert_eq!(opened.map(|(token, _)| token).collect::<Vec<_>>(), [5, 6]);
}

/// Neither the next connection in the slot nor none gets an event of the one before.
#[test]
fn an_event_that_is_owed_ends_with_its_lease() {
    let (mut engine, mut block) = ends();
    let (slot, _) = accepted(&mut engine, &mut block);
    for _ in 0..2 {
        engine.room(slot).unwrap();
        engine.receive(slot, b"x").unwrap();
    }
    assert!(engine.owes());
    engine.free(slot);
    assert!(!engine.owes());
    engine.publish();
    assert_eq!(block.event().unwrap().1.op, socket_event::EVENT);
    engine.send_owed();
    engine.publish();
    assert_eq!(block.event(), None);
    let (again, _) = accepted(&mut engine, &mut block);
    engine.send_owed();
    engine.publish();
    assert_eq!((again, block.event()), (slot, None));
}

/// An accept or a connect is given up by its number, once; others stay.
#[test]
fn a_command_is_given_up_by_its_number() {
    let (mut engine, mut block) = ends();
    assert!(block.command(5, socket_op::ACCEPT, 0, 0, 0));
    assert!(block.command(6, socket_op::ACCEPT, 0, 0, 1));
    assert!(block.command(7, socket_op::CONNECT, 0, 0, 1));
    (0..3).for_each(|_| assert_ne!(engine.next_command(), Some(Command::NoEffect)));
    let slot = engine.lease(State::Connecting { token: 7 }).unwrap();
    for token in [5, 6, 7, 8] {
        assert!(block.command(token, socket_op::CANCEL, u32::MAX, u32::MAX, u32::MAX));
        assert_eq!(engine.next_command(), Some(Command::Cancel { token }));
    }
    assert_eq!(engine.connecting(7), Some(slot));
    assert_eq!((engine.connecting(5), engine.connecting(8)), (None, None));
    let cancelled = [5, 5, 7, 8].map(|token| engine.cancel_accept(token));
    assert_eq!(cancelled, [true, false, false, false]);
    assert!(!engine.accepts(0) && engine.accepts(1));
    engine.set_state(slot, State::Open);
    assert_eq!((engine.connecting(7), engine.take_accept(1)), (None, Some(6)));
    assert_eq!(engine.take_bad(), 0);
}

/// One step of a random run.
#[derive(Clone, Debug)]
enum Step {
    /// The peer of a slot sends bytes.
    Receive(u32, usize),
    /// The block reads bytes of a slot.
    Read(u32, usize),
    /// The block writes bytes into a slot.
    Write(u32, usize),
    /// The host kernel takes bytes of a slot.
    Send(u32, usize),
    /// The block closes a slot, and gets another connection.
    Again(u32),
}

fn step() -> impl Strategy<Value = Step> {
    let slot = 0..SLOTS;
    let bytes = prop_oneof![0..20usize, 0..CAPACITY as usize + 1];
    prop_oneof![
        (slot.clone(), bytes.clone()).prop_map(|(slot, n)| Step::Receive(slot, n)),
        (slot.clone(), bytes.clone()).prop_map(|(slot, n)| Step::Read(slot, n)),
        (slot.clone(), bytes.clone()).prop_map(|(slot, n)| Step::Write(slot, n)),
        (slot.clone(), bytes).prop_map(|(slot, n)| Step::Send(slot, n)),
        slot.prop_map(Step::Again),
    ]
}

proptest! {
    /// Whatever happens in whatever order: bytes arrive unchanged and in order, and the books balance.
    #[test]
    fn bytes_arrive_in_order_and_the_books_balance(steps in prop::collection::vec(step(), 1..200)) {
        let (mut engine, mut block) = ends();
        let mut leases = [(0, 0); SLOTS as usize];
        for _ in 0..SLOTS {
            let (slot, generation) = accepted(&mut engine, &mut block);
            leases[slot as usize] = (slot, generation);
        }
        // Positions of the four ends of each slot, from which the bytes follow.
        let mut at = [[0usize; 4]; SLOTS as usize];
        let pattern = |from: usize, len: usize| -> Vec<u8> {
            (from..from + len).map(|n| (n * 31 + n / 256) as u8).collect()
        };
        for step in steps {
            match step {
                Step::Receive(slot, n) => {
                    let n = n.min(engine.room(slot).unwrap());
                    let from = &mut at[slot as usize][0];
                    engine.receive(slot, &pattern(*from, n)).unwrap();
                    *from += n;
                }
                Step::Read(slot, n) => {
                    let mut into = vec![0; n];
                    let n = block.streams[slot as usize].0.read(&mut into).unwrap();
                    let from = &mut at[slot as usize][1];
                    prop_assert_eq!(&into[..n], &pattern(*from, n));
                    *from += n;
                }
                Step::Write(slot, n) => {
                    let from = &mut at[slot as usize][2];
                    *from += block.streams[slot as usize].1.write(&[], &pattern(*from, n)).unwrap();
                }
                Step::Send(slot, n) => {
                    let mut into = vec![0; n];
                    let n = engine.peek(slot, &mut into).unwrap();
                    let from = &mut at[slot as usize][3];
                    prop_assert_eq!(&into[..n], &pattern(*from, n));
                    engine.sent(slot, n);
                    *from += n;
                }
                Step::Again(slot) => {
                    let (_, generation) = leases[slot as usize];
                    block.command(0, socket_op::CLOSE, slot, generation, 1);
                    prop_assert_eq!(engine.next_command(), Some(Command::Close { slot, reset: true }));
                    engine.free(slot);
                    while block.event().is_some() {}
                    leases[slot as usize] = accepted(&mut engine, &mut block);
                    at[slot as usize] = [0; 4];
                }
            }
            engine.publish();
            while block.event().is_some() {}
            for slot in 0..SLOTS {
                // Notes what the block has done.
                engine.room(slot).unwrap();
                engine.peek(slot, &mut []).unwrap();
                let [received, read, written, sent] = at[slot as usize].map(|at| at as u64);
                let [_, _, _, in_rx] = books(&engine, slot, Direction::Receive);
                let [_, _, _, in_tx] = books(&engine, slot, Direction::Send);
                prop_assert_eq!((in_rx, in_tx), (received - read, written - sent));
            }
        }
        prop_assert!(!engine.is_corrupt());
    }
}
