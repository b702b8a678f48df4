//! The model of what moves bytes for kernels ([`engine::transfers::Transfers`]), and of kernels that ask for it.
//!
//! An executor takes its time, refuses, fails, repeats an end, ends what nothing has started, and forgets transfers until it is dropped. A kernel sends
//! commands that are right, and beside them the same once more with the same tag, commands with random fields, and messages that are none. The
//! key of a command is an offset in it, and comes back with its end, so answers that were exchanged are found.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

use engine::topology::{FileAt, FileSpec};
use engine::transfers::{TransferOrder, TransferPlace, Transfers};
use mqueue::abi::{
    SlotHeader, TransferCommand, TransferDone, status as message_status, transfer_place,
    transfer_status as status,
};
use wire::nic::LentStream;

use crate::conn::Lent;
use crate::rng::Rng;
use crate::shared::lock;

/// Behaviour of executors and of kernels with transfers. Rates are per mille of the transfers, or of the commands.
#[derive(Clone, Copy, Debug, Default)]
pub struct TransferBehaviour {
    /// Least and most time until a transfer has ended, in nanoseconds.
    pub takes_ns: (u64, u64),
    /// It is refused, as by an engine that is busy, full or stopping.
    pub refuse: u32,
    /// It ends with a failure, or because its time is over.
    pub fail: u32,
    /// Its end is reported twice.
    pub repeat: u32,
    /// Beside it another one ends, which nothing has started.
    pub unknown: u32,
    /// It does not end before it is cancelled.
    pub hang: u32,
    /// Beside a command of a kernel: two equal ones with one tag.
    pub twice: u32,
    /// Beside a command: one with random fields.
    pub forge: u32,
    /// Beside a command: a message of another length.
    pub garble: u32,
}

/// What has happened to the transfers of a service.
#[derive(Clone, Debug, Default)]
pub struct TransferBooks {
    /// Transfers that executors have started, and those whose end they have reported.
    pub started: u64,
    /// See `started`.
    pub ended: u64,
    /// Those that were in flight when their executor was dropped.
    pub cancelled: u64,
    /// Orders that an executor has refused.
    pub refused: u64,
    /// Lies of executors: ends that were repeated, and those that nothing has started.
    pub lies: u64,
    /// The time of the world.
    pub now_ns: u64,
    /// Executors that exist.
    pub executors: u64,
    /// Commands that kernels have sent, of them those that need not be right.
    pub asked: u64,
    /// See `asked`.
    pub wild: u64,
    /// Answers of ends, by their status.
    pub answers: BTreeMap<u32, u64>,
    /// Answers to commands that waited for their turn until their time was over.
    pub expired: u64,
    /// The first broken promise.
    pub wrong: Option<String>,
    /// What files have where transfers to sockets begin.
    pub(crate) contents: BTreeMap<u64, Vec<u8>>,
}

impl TransferBooks {
    fn must(&mut self, holds: bool, text: impl FnOnce() -> String) {
        if !holds && self.wrong.is_none() {
            self.wrong = Some(text());
        }
    }

    /// Commands that have an answer.
    pub fn answered(&self) -> u64 {
        self.answers.values().sum::<u64>() + self.expired
    }
}

/// The transfers of a service: how they behave, and what has happened.
#[derive(Clone, Debug, Default)]
pub struct TransferSetup {
    /// How they behave.
    pub behaviour: TransferBehaviour,
    /// What has happened.
    pub books: Arc<Mutex<TransferBooks>>,
}

/// What a kernel knows of a backend that does transfers.
#[derive(Clone, Debug)]
pub(crate) struct Disk {
    pub(crate) setup: TransferSetup,
    pub(crate) files: Vec<FileSpec>,
    pub(crate) memory_bytes: u64,
}

/// See the module's text.
pub(crate) struct Executor {
    disk: Disk,
    in_flight_max: usize,
    rng: Rng,
    /// Number, when it ends (none: it does not by itself), and how.
    running: Vec<(u64, Option<u64>, TransferDone)>,
    /// Connections of those whose sinks are sockets, by number.
    lent: BTreeMap<u64, Lent>,
    /// Ends that are to be reported, and whether they are true.
    due: VecDeque<(u64, TransferDone, bool)>,
}

impl Executor {
    pub(crate) fn new(disk: Disk, in_flight_max: usize, rng: Rng) -> Self {
        lock(&disk.setup.books).executors += 1;
        Self {
            disk,
            in_flight_max,
            rng,
            running: Vec::new(),
            lent: BTreeMap::new(),
            due: VecDeque::new(),
        }
    }

    fn in_flight(&self) -> usize {
        self.running.len() + self.due.iter().filter(|(.., is_true)| *is_true).count()
    }

    /// Writes the content of its file to the connection, or a part of it if it fails.
    fn write(&mut self, number: u64, done: &mut TransferDone) {
        let Some(lent) = self.lent.remove(&number) else { return };
        let content = lock(&self.disk.setup.books).contents.remove(&done.read).unwrap_or_default();
        let is_whole = done.status == status::OK;
        let count = if is_whole { content.len() } else { content.len() / 2 };
        done.written = count as u64;
        if !lent.write(&content[..count]) {
            (done.status, done.written) = (status::CLOSED, 0);
        }
    }

    fn end(&mut self, number: u64, mut done: TransferDone) {
        self.write(number, &mut done);
        let TransferBehaviour { repeat, unknown, .. } = self.disk.setup.behaviour;
        self.due.push_back((number, done, true));
        if self.rng.chance(repeat) {
            self.due.push_back((number, done, false));
        }
        if self.rng.chance(unknown) {
            self.due.push_front((number + 1_000_000, done, false));
        }
    }
}

/// The key of an order: where it begins in the file that it reads, or writes.
fn key_of(order: &TransferOrder) -> u64 {
    let places = [order.source, order.sink].into_iter();
    let offset = |place| match place {
        TransferPlace::File { offset, .. } => Some(offset),
        TransferPlace::Memory { .. }
        | TransferPlace::Connection { .. }
        | TransferPlace::Socket { .. } => None,
    };
    places.filter_map(offset).next().unwrap_or(0)
}

/// Whether an order stays within what its service has.
fn is_allowed(order: &TransferOrder, disk: &Disk) -> bool {
    let has = |place, writes: bool| match place {
        TransferPlace::Memory { offset } => {
            let bytes = if writes { order.most } else { order.bytes.unwrap_or(u64::MAX) };
            offset.checked_add(bytes).is_some_and(|end| end <= disk.memory_bytes)
        }
        TransferPlace::File { file, .. } => disk.files.get(usize::from(file)).is_some_and(|spec| {
            matches!(spec.at, FileAt::File { .. }) && (!writes || spec.is_writable())
        }),
        TransferPlace::Connection { file } => disk
            .files
            .get(usize::from(file))
            .is_some_and(|spec| !matches!(spec.at, FileAt::File { .. })),
        // The worker has looked for it.
        TransferPlace::Socket { .. } => writes,
    };
    has(order.source, false) && has(order.sink, true)
}

impl Transfers for Executor {
    fn start(&mut self, number: u64, order: &TransferOrder, socket: Option<LentStream>) -> bool {
        let behaviour = self.disk.setup.behaviour;
        let in_flight = self.in_flight();
        let mut books = lock(&self.disk.setup.books);
        books.must(is_allowed(order, &self.disk), || format!("{order:?} was not refused"));
        let most = self.in_flight_max;
        books.must(in_flight < most, || format!("{in_flight} of {most} are in flight, and more"));
        let is_new = self.running.iter().all(|(running, ..)| *running != number);
        books.must(is_new, || format!("transfer {number} is started twice"));
        if self.rng.chance(behaviour.refuse) {
            books.refused += 1;
            return false;
        }
        books.started += 1;
        let now_ns = books.now_ns;
        drop(books);
        let failure = [status::FAILED, status::TIMEOUT][self.rng.below(2) as usize];
        let status = if self.rng.chance(behaviour.fail) { failure } else { status::OK };
        let done = TransferDone {
            status,
            digest_bytes: 0,
            read: key_of(order),
            written: order.bytes.unwrap_or(0),
            digest: [0; 32],
            reserved: 0,
        };
        let (least, most) = behaviour.takes_ns;
        let end_ns = now_ns + self.rng.between(least, most);
        let hangs = self.rng.chance(behaviour.hang);
        self.running.push((number, (!hangs).then_some(end_ns), done));
        let lent = socket.and_then(|socket| socket.downcast::<Lent>().ok());
        self.lent.extend(lent.map(|lent| (number, *lent)));
        true
    }

    fn next(&mut self) -> Option<(u64, TransferDone)> {
        if let Some((number, done, is_true)) = self.due.pop_front() {
            let mut books = lock(&self.disk.setup.books);
            *(if is_true { &mut books.ended } else { &mut books.lies }) += 1;
            return Some((number, done));
        }
        let now_ns = lock(&self.disk.setup.books).now_ns;
        let is_over = |end_ns: &Option<u64>| end_ns.is_some_and(|end_ns| end_ns <= now_ns);
        let ended: Vec<_> = self.running.extract_if(.., |(_, end_ns, _)| is_over(end_ns)).collect();
        if ended.is_empty() {
            return None;
        }
        ended.into_iter().for_each(|(number, _, done)| self.end(number, done));
        self.next()
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        let in_flight = self.in_flight() as u64;
        let mut books = lock(&self.disk.setup.books);
        books.cancelled += in_flight;
        books.executors -= 1;
    }
}

/// Commands of a kernel without an answer.
#[derive(Debug, Default)]
pub(crate) struct Commands {
    /// Tags of those beside the right ones, and how often they were sent.
    extras: BTreeMap<u64, u32>,
}

/// Tags of extras.
const EXTRA: u64 = 1 << 62;

impl Commands {
    pub(crate) fn open(&self) -> usize {
        self.extras.values().map(|count| *count as usize).sum()
    }

    /// A command that is right, with this key.
    pub(crate) fn right(disk: &Disk, key: u32, rng: &mut Rng) -> Vec<u8> {
        let offset = rng.below(disk.memory_bytes);
        let bytes = rng.between(0, disk.memory_bytes - offset);
        let memory = (transfer_place::MEMORY, 0, offset);
        let is_file = |spec: &FileSpec| matches!(spec.at, FileAt::File { .. });
        let find = |wanted: &dyn Fn(&FileSpec) -> bool| {
            disk.files.iter().position(wanted).map(|at| at as u16)
        };
        let reads = find(&|spec| is_file(spec)).map(|at| (transfer_place::FILE, at, key.into()));
        let reads = reads.expect("the service has a file");
        let writes = find(&|spec| is_file(spec) && spec.is_writable());
        let writes = writes.map(|at| (transfer_place::FILE, at, u64::from(key)));
        let peer = find(&|spec| !is_file(spec)).map(|at| (transfer_place::CONNECTION, at, 0));
        let (source, sink) = match (rng.below(3), writes, peer) {
            (0, Some(file), _) => (memory, file),
            (1, _, Some(peer)) => (reads, peer),
            _ => (reads, memory),
        };
        command(source, sink, bytes).to_bytes().to_vec()
    }

    /// The messages that a kernel sends beside a right one, with their tags.
    pub(crate) fn extras(
        &mut self,
        disk: &Disk,
        right: &[u8],
        rng: &mut Rng,
    ) -> Vec<(u64, Vec<u8>)> {
        let TransferBehaviour { twice, forge, garble, .. } = disk.setup.behaviour;
        let mut extras = Vec::new();
        let tag = EXTRA | rng.below(1 << 40);
        if rng.chance(twice) {
            extras.extend([(tag, right.to_vec()), (tag, right.to_vec())]);
        }
        if rng.chance(forge) {
            extras.push((tag + 1, forged(disk, rng)));
        }
        if rng.chance(garble) {
            let bytes = rng.below(size_of::<TransferCommand>() as u64) as usize;
            extras.push((tag + 2, (0..bytes).map(|_| rng.below(256) as u8).collect()));
        }
        extras
    }

    /// One of them has been sent.
    pub(crate) fn sent(&mut self, disk: &Disk, tag: u64) {
        *self.extras.entry(tag).or_default() += 1;
        let mut books = lock(&disk.setup.books);
        books.asked += 1;
        books.wild += 1;
    }

    /// Whether this is the answer to one of them.
    pub(crate) fn takes(&mut self, disk: &Disk, head: &SlotHeader, payload: &[u8]) -> bool {
        let tag = head.tag;
        let Some(open) = self.extras.get_mut(&tag) else { return false };
        *open -= 1;
        if *open == 0 {
            self.extras.remove(&tag);
        }
        note(disk, head, payload);
        true
    }

    /// Judges the answer to a right command.
    pub(crate) fn judge(disk: &Disk, key: u32, head: &SlotHeader, payload: &[u8]) {
        let Some(done) = note(disk, head, payload) else { return };
        let is_refused = done.status == status::EXHAUSTED && done.read == 0;
        let has_failed = matches!(done.status, status::FAILED | status::TIMEOUT);
        let is_own = done.read == u64::from(key) && (done.status == status::OK || has_failed);
        let what = || format!("the command with key {key} is answered with {done:?}");
        lock(&disk.setup.books).must(is_refused || is_own, what);
    }
}

/// Counts an answer. `None`: its command waited for its turn until its time was over.
fn note(disk: &Disk, head: &SlotHeader, payload: &[u8]) -> Option<TransferDone> {
    let mut books = lock(&disk.setup.books);
    if head.status == message_status::TIMEOUT && payload.is_empty() {
        books.expired += 1;
        return None;
    }
    let done = payload.try_into().ok().map(TransferDone::from_bytes);
    let is_end = head.status == message_status::OK && done.is_some();
    books.must(is_end, || format!("{head:?} has {} bytes", payload.len()));
    *books.answers.entry(done.map_or(u32::MAX, |done| done.status)).or_default() += 1;
    done
}

/// A transfer that a block makes for a piece of its echo.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub(crate) slot: u32,
    pub(crate) lease: u32,
    /// Bytes of the ring before it.
    pub(crate) position: u64,
    pub(crate) bytes: Vec<u8>,
}

impl Piece {
    /// The command, whose file has the bytes at this offset.
    pub(crate) fn command(&self, disk: &Disk, key: u32) -> Vec<u8> {
        let mut books = lock(&disk.setup.books);
        books.contents.insert(key.into(), self.bytes.clone());
        books.asked += 1;
        let source = (transfer_place::FILE, 0, key.into());
        let sink = (transfer_place::SOCKET, self.slot as u16, self.position);
        let command = command(source, sink, self.bytes.len() as u64);
        TransferCommand { lease: self.lease.into(), ..command }.to_bytes().to_vec()
    }

    /// Whether the answer says that all bytes were sent.
    pub(crate) fn is_sent(disk: &Disk, head: &SlotHeader, payload: &[u8]) -> bool {
        note(disk, head, payload).is_some_and(|done| done.status == status::OK)
    }
}

fn command(source: (u8, u16, u64), sink: (u8, u16, u64), bytes: u64) -> TransferCommand {
    TransferCommand {
        source: source.0,
        sink: sink.0,
        digest: 0,
        stages: 0,
        source_file: source.1,
        sink_file: sink.1,
        source_offset: source.2,
        sink_offset: sink.2,
        bytes,
        lease: 0,
        reserved: [0; 3],
    }
}

/// A command with random fields, many of them near the limits.
fn forged(disk: &Disk, rng: &mut Rng) -> Vec<u8> {
    let number = |rng: &mut Rng| {
        let near =
            [0, disk.memory_bytes, i64::MAX as u64, u64::MAX, rng.below(2 * disk.memory_bytes)];
        near[rng.below(near.len() as u64) as usize].wrapping_add(rng.below(5)).wrapping_sub(2)
    };
    let files = disk.files.len() as u64 + 2;
    let place = |rng: &mut Rng| {
        let file = if rng.chance(50) { u16::MAX } else { rng.below(files) as u16 };
        (rng.below(5) as u8, file, number(rng))
    };
    let (source, sink) = (place(rng), place(rng));
    let mut command = command(source, sink, number(rng));
    command.digest = rng.below(6) as u8;
    command.stages = if rng.chance(500) { rng.below(256) as u8 } else { 0 };
    command.lease = if rng.chance(100) { rng.below(4) } else { 0 };
    command.reserved[2] = u64::from(rng.chance(50));
    command.to_bytes().to_vec()
}
