//! The scoreboard and the flows on devices that fail in every way: short reads and writes, interruptions, full sockets, resets,
//! files that end early, full disks, peers that never come back. Everything is decided by the input of the property, so a failure
//! can be repeated.

mod common;

use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::sync::{Arc, Mutex, MutexGuard};

use proptest::prelude::*;
use transfer::command::device::{Blocked, End};
use transfer::command::limits::{CHUNK_BYTES, EMPTY_MEMBERS_MAX};
use transfer::command::pipeline::{TimeLimits, WhenBlocked};
use transfer::engine::scoreboard::{EntryId, Expired, GivenBack, Scoreboard, Work};
use transfer::run::apart::{Apart, run_together};
use transfer::run::flow::Flow;
use transfer::run::plan::{Cut, Plan};
use transfer::stages::buffer::Buffers;
use transfer::stages::compress::{Compressor, Expander, MEMBERS_OF_RUN_MAX};
use transfer::{
    Cipher, Device, Devices, DigestKind, ExpandLimits, Format, HEAD_MAX, Key, Report, SearchKind,
    SearchSpec, StageKind, StageSpec, TransferError,
};

const KEY: [u8; 32] = [9; 32];
/// What is searched: as a text, and as an expression.
const PATTERN: &[u8] = b"ab";
const STALL_NS: u64 = 1_000_000_000;

/// Where a device fails for good.
#[derive(Clone, Copy, Debug)]
enum Fault {
    None,
    /// The file ends at this byte, or the peer closes there.
    Ends(usize),
    /// EIO, or a reset.
    Breaks(usize),
    /// No space at this byte: ENOSPC, or EDQUOT if it is odd.
    Full(usize),
    /// The socket is never ready again.
    Stalls(usize),
    /// This byte of the source is another one. Only where that is noticed.
    Changed(usize),
}

/// A file and a socket, which a part of a transfer that is sent apart has, too.
#[derive(Clone)]
struct Sim(Arc<Mutex<SimState>>);

impl Sim {
    fn state(&self) -> MutexGuard<'_, SimState> {
        self.0.lock().unwrap()
    }
}

impl Devices for Sim {
    fn read_at(&mut self, parts: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize> {
        self.state().read_at(parts, offset)
    }

    fn write_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        self.state().write_at(bytes, offset)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.state().sync()
    }

    fn send(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.state().send(bytes)
    }

    fn sender(&self) -> Option<Arc<transfer::command::device::SocketSender>> {
        let shared = self.clone();
        Some(Arc::new(move |bytes| shared.state().send(bytes)))
    }

    fn receive(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.state().receive(into)
    }
}

/// `turns` says how much each call may move; 0 is an interruption or a socket that is not ready.
struct SimState {
    source: Vec<u8>,
    fault: Fault,
    turns: Vec<usize>,
    at: usize,
    /// What the sink got.
    sink: Vec<u8>,
    received: usize,
    /// The socket was not ready at the last call.
    blocked: bool,
    synced: bool,
}

impl SimState {
    fn turn(&mut self) -> usize {
        self.at += 1;
        self.turns[self.at % self.turns.len()]
    }

    fn read_at(&mut self, parts: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize> {
        let offset = offset as usize;
        let room: usize = parts.iter().map(|part| part.len()).sum();
        let mut most = self.turn().min(room);
        if most == 0 {
            return Err(io::ErrorKind::Interrupted.into());
        }
        match self.fault {
            Fault::Breaks(at) if offset >= at => return Err(io::Error::from_raw_os_error(5)),
            Fault::Breaks(at) | Fault::Ends(at) => most = most.min(at.saturating_sub(offset)),
            _ => {}
        }
        let mut from = &self.source[offset.min(self.source.len())..];
        from = &from[..most.min(from.len())];
        let read = from.len();
        for part in parts {
            let (now, later) = from.split_at(part.len().min(from.len()));
            part[..now.len()].copy_from_slice(now);
            from = later;
        }
        Ok(read)
    }

    fn write_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        assert_eq!(offset as usize, self.sink.len(), "the file has no holes");
        let mut most = self.turn().min(bytes.len());
        if most == 0 {
            return Err(io::ErrorKind::Interrupted.into());
        }
        match self.fault {
            Fault::Full(at) if self.sink.len() >= at => {
                return Err(io::Error::from_raw_os_error(if at % 2 == 0 { 28 } else { 122 }));
            }
            Fault::Full(at) => most = most.min(at - self.sink.len()),
            _ => {}
        }
        self.sink.extend(&bytes[..most]);
        Ok(most)
    }

    fn sync(&mut self) -> io::Result<()> {
        assert!(!self.synced, "it is synced once");
        if self.turn() == 0 {
            return Err(io::Error::from_raw_os_error(5));
        }
        self.synced = true;
        Ok(())
    }

    fn send(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut most = self.turn().min(bytes.len());
        match self.fault {
            Fault::Stalls(at) => most = most.min(at.saturating_sub(self.sink.len())),
            Fault::Full(at) if self.sink.len() >= at => {
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            Fault::Full(at) => most = most.min(at - self.sink.len()),
            _ => {}
        }
        self.blocked = most == 0;
        if self.blocked {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.sink.extend(&bytes[..most]);
        Ok(most)
    }

    fn receive(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut most = self.turn().min(into.len()).min(self.source.len() - self.received);
        match self.fault {
            Fault::Stalls(at) => most = most.min(at.saturating_sub(self.received)),
            Fault::Ends(at) if self.received >= at => return Ok(0),
            Fault::Breaks(at) if self.received >= at => {
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            Fault::Ends(at) | Fault::Breaks(at) => most = most.min(at - self.received),
            _ => {}
        }
        if self.received == self.source.len() {
            return Ok(0);
        }
        self.blocked = most == 0;
        if self.blocked {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        into[..most].copy_from_slice(&self.source[self.received..self.received + most]);
        self.received += most;
        Ok(most)
    }
}

struct Job {
    index: usize,
    flow: Flow<Sim>,
}

impl Work for Job {
    type Handle = ();
    fn handle(&self) {}
    fn next(&self, blocked: Blocked) -> Option<End> {
        self.flow.next(blocked)
    }

    fn device(&self, end: End) -> Device {
        self.flow.device(end)
    }

    fn batches(&self) -> bool {
        self.flow.batches()
    }

    fn has_fresh(&self) -> bool {
        self.flow.has_fresh()
    }

    fn part_for_stages(&mut self, most: usize) -> Option<Apart> {
        self.flow.part_for_stages(most)
    }

    fn join(&mut self, apart: Apart, buffers: &mut Buffers) -> u64 {
        self.flow.join(apart, buffers)
    }

    fn ended(&self) -> Option<Result<(), TransferError>> {
        self.flow.ended()
    }
}

/// What threads have apart, oldest first.
#[derive(Default)]
struct Away(VecDeque<Vec<(EntryId, Apart)>>);

impl Away {
    /// The oldest of them come back.
    fn give_back(
        &mut self,
        board: &mut Scoreboard<Job>,
        ends: &mut [Option<Ended>],
        buffers: &mut Buffers,
        now_ns: u64,
    ) {
        let Some(mut parts) = self.0.pop_front() else { return };
        let stages = parts.iter_mut().filter_map(|(_, part)| match part {
            Apart::Stages(stages) => Some(stages),
            Apart::Send(_) => None,
        });
        run_together(&mut stages.collect::<Vec<_>>());
        let mut back = Vec::new();
        for (id, mut part) in parts {
            let blocked = match &mut part {
                Apart::Send(send) => send.run(),
                Apart::Stages(_) => false,
            };
            back.push((id, part, blocked));
        }
        for (job, result) in board.give_parts_back(back, buffers, now_ns) {
            end(ends, job, result, buffers);
        }
    }
}

#[derive(Clone, Debug)]
struct Case {
    source: Device,
    sink: Device,
    len: usize,
    stages: Vec<StageSpec>,
    fault: Fault,
    turns: Vec<usize>,
    cancel_after: Option<usize>,
    sync: bool,
}

impl Case {
    fn opens(&self) -> Option<Cipher> {
        match self.stages.first() {
            Some(StageSpec::Open(cipher, _)) => Some(*cipher),
            _ => None,
        }
    }

    fn expands(&self) -> Option<Format> {
        self.stages.iter().find_map(|stage| match stage {
            StageSpec::Expand(format, _) => Some(*format),
            _ => None,
        })
    }

    fn compresses(&self) -> Option<Format> {
        self.stages.iter().find_map(|stage| match stage {
            StageSpec::Compress(how) => Some(how.format()),
            _ => None,
        })
    }

    fn seals(&self) -> Option<Cipher> {
        match self.stages.last() {
            Some(StageSpec::Seal(cipher, _)) => Some(*cipher),
            _ => None,
        }
    }

    /// Bytes of a source of this length that its caller has received before.
    fn head(&self, source: usize) -> usize {
        match (self.source, self.fault) {
            (Device::Socket, Fault::None | Fault::Full(_)) => {
                self.turns[0].min(source).min(HEAD_MAX)
            }
            _ => 0,
        }
    }

    fn plain(&self, index: usize) -> Vec<u8> {
        (0..self.len).map(|at| (at.wrapping_mul(31) ^ (at >> 8) ^ index) as u8).collect()
    }

    /// What is to be expanded.
    fn packed(&self, index: usize) -> Vec<u8> {
        let plain = self.plain(index);
        self.expands().map_or(plain.clone(), |format| compress(format, &plain))
    }

    fn transforms(&self) -> bool {
        self.stages
            .iter()
            .any(|stage| !matches!(stage, StageSpec::Digest(_) | StageSpec::Search(_)))
    }

    /// What the source has.
    fn content(&self, index: usize) -> Vec<u8> {
        let packed = self.packed(index);
        let mut content = match self.opens() {
            None => packed,
            Some(Cipher::Aes256Gcm) => common::seal(&KEY, &packed),
            Some(Cipher::Aes256Ctr) => common::seal_ctr(&KEY, &packed),
        };
        if let Fault::Changed(at) = self.fault {
            let at = at % content.len();
            content[at] ^= 1;
        }
        content
    }
}

fn compress(format: Format, plain: &[u8]) -> Vec<u8> {
    let (mut state, mut made, mut at) = (Compressor::new(format.into()).unwrap(), Vec::new(), 0);
    let mut out = vec![0; 1 << 16];
    loop {
        let ran = state.run(&plain[at..], true, &mut out).unwrap();
        made.extend(&out[..ran.made]);
        at += ran.taken;
        if ran.done {
            return made;
        }
    }
}

fn expand(format: Format, data: &[u8]) -> Option<Vec<u8>> {
    let mut state = Expander::new(format, ExpandLimits::default()).unwrap();
    let (mut made, mut at, mut out) = (Vec::new(), 0, vec![0; 1 << 16]);
    loop {
        let ran = state.run(&data[at..], true, &mut out).ok()?;
        made.extend(&out[..ran.made]);
        at += ran.taken;
        if ran.done {
            return Some(made);
        }
    }
}

struct Ended {
    synced: bool,
    result: Result<(), TransferError>,
    report: Report,
    sink: Vec<u8>,
    source: Vec<u8>,
}

fn fault() -> impl Strategy<Value = Fault> {
    let at = 0..3 * CHUNK_BYTES;
    prop_oneof![
        2 => Just(Fault::None),
        1 => at.clone().prop_map(Fault::Ends),
        1 => at.clone().prop_map(Fault::Breaks),
        1 => at.clone().prop_map(Fault::Full),
        1 => at.clone().prop_map(Fault::Stalls),
        1 => at.prop_map(Fault::Changed),
    ]
}

fn case() -> impl Strategy<Value = Case> {
    let turn = prop_oneof![Just(0), 1..5000usize, Just(65_536), Just(usize::MAX)];
    // At least one turn moves something.
    let turns = prop::collection::vec(turn, 1..8).prop_map(|mut turns| {
        turns.push(70_000);
        turns
    });
    let cipher = || prop::option::of(prop::sample::select(Cipher::ALL.to_vec()));
    let digest = prop::sample::select(DigestKind::ALL.to_vec()).prop_map(StageSpec::Digest);
    let search = prop::sample::select(SearchKind::ALL.to_vec()).prop_map(|kind| {
        let pattern = PATTERN.to_vec();
        StageSpec::Search(SearchSpec { kind, pattern, offsets: 100 })
    });
    let digests = prop::collection::vec(prop_oneof![3 => digest, 1 => search], 0..3);
    let format = || prop::option::of(prop::sample::select(Format::ALL.to_vec()));
    let stages = (cipher(), format(), digests, format(), cipher());
    let stages = stages.prop_map(|(opens, expands, digests, compresses, seals)| {
        let open = opens.map(|cipher| StageSpec::Open(cipher, Key::new(KEY)));
        let seal = seals.map(|cipher| StageSpec::Seal(cipher, Key::new(KEY)));
        let expand = expands.map(|format| StageSpec::Expand(format, ExpandLimits::default()));
        let compress = compresses.map(|format| StageSpec::Compress(format.into()));
        let plain = open.into_iter().chain(expand).chain(digests);
        plain.chain(compress).chain(seal).collect::<Vec<_>>()
    });
    let device = || prop::sample::select(vec![Device::File, Device::Socket]);
    let len = prop_oneof![0..200usize, 0..3 * CHUNK_BYTES, Just(65_520), Just(8 * 65_520)];
    let cancel = prop::option::weighted(0.1, 0..30usize);
    (device(), device(), len, stages, fault(), turns, cancel, any::<bool>()).prop_map(
        |(source, sink, len, stages, fault, turns, cancel_after, sync)| {
            let mut case = Case { source, sink, len, stages, fault, turns, cancel_after, sync };
            // A cipher that notices changes, or none was made.
            if matches!(fault, Fault::Changed(_)) && case.opens() != Some(Cipher::Aes256Gcm) {
                case.fault = Fault::None;
            }
            case
        },
    )
}

/// Runs all cases at once on one scoreboard, until all have ended.
fn run(cases: &[Case], threads: usize) -> Vec<Ended> {
    let mut board = Scoreboard::new(cases.len(), threads);
    let mut ends: Vec<Option<Ended>> = cases.iter().map(|_| None).collect();
    let mut buffers = Buffers::default();
    let mut ids: Vec<Option<EntryId>> = Vec::new();
    let mut now_ns = 0;
    let limits = TimeLimits { stall_ns: STALL_NS, deadline_ns: None };
    for (index, case) in cases.iter().enumerate() {
        let mut head = case.content(index);
        let source = head.split_off(case.head(head.len()));
        let sim = SimState {
            source,
            fault: case.fault,
            turns: case.turns.clone(),
            at: 0,
            sink: Vec::new(),
            received: 0,
            blocked: false,
            synced: false,
        };
        // A file whose length is not known has the same end.
        let known = !matches!(case.fault, Fault::None) || index % 2 == 0;
        let plan = Plan {
            source: case.source,
            sink: case.sink,
            from: 0,
            bytes: known.then_some(sim.source.len() as u64),
            to: 0,
            head,
            stages: case.stages.clone(),
            when_blocked: WhenBlocked::Wait,
            sync: case.sync && case.sink == Device::File,
            part: None,
            cut: Cut::No,
            parts_max: 1,
        };
        let flow = Flow::new(&plan, Sim(Arc::new(Mutex::new(sim)))).unwrap();
        let ended = flow.ended();
        let job = Job { index, flow };
        match ended {
            Some(result) => {
                end(&mut ends, job, result, &mut buffers);
                ids.push(None);
            }
            None => ids.push(Some(board.insert(job, limits, now_ns).ok().unwrap())),
        }
    }
    assert_eq!(board.len(), ids.iter().flatten().count());
    let (mut last, mut away) = (None, Away::default());
    for turn in 0..1_000_000 {
        now_ns += 1000;
        for (case, id) in cases.iter().zip(&ids) {
            if let (Some(after), Some(id)) = (case.cancel_after, id)
                && after == turn
                && let Some(job) = board.cancel(*id)
            {
                end(&mut ends, job, Err(TransferError::Cancelled), &mut buffers);
            }
        }
        let parts = board.take_parts(turn % 2 == 0);
        if !parts.is_empty() {
            away.0.push_back(parts);
            continue;
        }
        if turn % 3 == 0 {
            away.give_back(&mut board, &mut ends, &mut buffers, now_ns);
        }
        let Some((id, at, mut job)) = board.take(last.take(), now_ns) else {
            if !away.0.is_empty() {
                away.give_back(&mut board, &mut ends, &mut buffers, now_ns);
                continue;
            }
            if board.is_empty() {
                break;
            }
            // All wait: every socket that can become ready does, and the others run out of time.
            let mut is_ready = false;
            for (case, id) in cases.iter().zip(&ids) {
                if let Some(id) = id
                    && !matches!(case.fault, Fault::Stalls(_))
                {
                    board.ready(*id, End::Source);
                    board.ready(*id, End::Sink);
                    is_ready = true;
                }
            }
            if !board.has_work() || !is_ready {
                now_ns = board.next_deadline_ns().expect("waiting entries have deadlines");
                // Sockets that stall at a later byte are ready until then.
                for (case, id) in cases.iter().zip(&ids) {
                    if let (Fault::Stalls(_), Some(id)) = (case.fault, id) {
                        board.ready(*id, End::Source);
                        board.ready(*id, End::Sink);
                    }
                }
                for expired in board.expire(now_ns) {
                    let Expired::Ended(job, error) = expired else { panic!("nothing runs") };
                    end(&mut ends, job, Err(error), &mut buffers);
                }
            }
            continue;
        };
        let apart = if at == End::Sink && job.flow.device(at) == Device::Socket && turn % 2 == 0 {
            job.flow.part_for_socket()
        } else {
            None
        };
        if let Some(apart) = apart {
            board.begin_part(id);
            let given = board.give_back(id, job, false, 0, &mut buffers, now_ns);
            assert!(matches!(given, GivenBack::Kept), "a part of it is away");
            away.0.push_back(vec![(id, apart)]);
            continue;
        }
        let step = job.flow.step(at, &mut buffers);
        match step.ended {
            Some(result) => {
                board.finish(id);
                end(&mut ends, job, result, &mut buffers);
            }
            None => {
                let given =
                    board.give_back(id, job, step.blocked, step.moved, &mut buffers, now_ns);
                match given {
                    GivenBack::Kept => {}
                    GivenBack::Ended(job, result) => {
                        end(&mut ends, job, result, &mut buffers);
                    }
                    GivenBack::Abandoned(_) => panic!("no step is slow"),
                }
            }
        }
        last = Some(id);
    }
    assert!(board.is_empty(), "every transfer ends");
    assert!(!board.has_work());
    assert_eq!(board.next_deadline_ns(), None);
    ends.into_iter().map(|ended| ended.expect("it ended")).collect()
}

fn end(
    ends: &mut [Option<Ended>],
    job: Job,
    result: Result<(), TransferError>,
    buffers: &mut Buffers,
) {
    let sim = job.flow.devices().state();
    let (sink, source, synced) = (sim.sink.clone(), sim.source.clone(), sim.synced);
    drop(sim);
    let report = job.flow.report(&result, buffers);
    assert!(ends[job.index].is_none(), "it ends once");
    ends[job.index] = Some(Ended { synced, result, report, sink, source });
}

fn count(kind: SearchKind, text: &[u8]) -> u64 {
    let has = |part: &[u8]| part.windows(PATTERN.len()).filter(|at| *at == PATTERN).count();
    match kind {
        SearchKind::Text => has(text) as u64,
        SearchKind::Lines => {
            text.split(|byte| *byte == b'\n').filter(|line| has(line) > 0).count() as u64
        }
    }
}

fn check(case: &Case, index: usize, ended: &Ended) {
    let Ended { synced, result, report, sink, source } = ended;
    let syncs = case.sync && case.sink == Device::File;
    assert!(
        *synced == (syncs && result.is_ok()) || matches!(result, Err(TransferError::Cancelled))
    );
    let plain = case.plain(index);
    let content = case.content(index).len();
    let head = case.head(content) as u64;
    assert_eq!(report.written, sink.len() as u64, "the count is what the sink got");
    let opened = match case.seals() {
        None => Some(sink.clone()),
        Some(Cipher::Aes256Gcm) => common::open(&KEY, sink),
        Some(Cipher::Aes256Ctr) => common::open_ctr(&KEY, sink),
    };
    if let (Some(opened), None) = (&opened, case.compresses()) {
        assert!(plain.starts_with(opened), "the sink has a prefix of the plain bytes");
    }
    if !case.transforms() {
        assert!(head + report.read >= report.written);
    }
    match result {
        Ok(()) => {
            let opened = opened.expect("the stream opens");
            let expanded = match case.compresses() {
                Some(format) => expand(format, &opened).expect("it expands"),
                None => opened.clone(),
            };
            assert!(expanded == plain, "the sink has all");
            let packed = case.packed(index).len();
            assert_eq!(
                (report.read, source.len()),
                (content as u64 - head, content - head as usize)
            );
            for stage in &report.stages {
                let (taken, made) = match stage.kind {
                    StageKind::Open(_) => (content, packed),
                    StageKind::Expand(_) => (packed, plain.len()),
                    StageKind::Digest(_) | StageKind::Search(_) => (plain.len(), plain.len()),
                    StageKind::Compress(_) => (plain.len(), opened.len()),
                    StageKind::Seal(_) => (opened.len(), sink.len()),
                    StageKind::Kernel | StageKind::SealOn => unreachable!("none is a kernel"),
                };
                assert_eq!((stage.bytes, stage.made), (taken as u64, made as u64));
                let digest = stage.digest.map(|digest| digest.bytes().to_vec());
                let expected = match stage.kind {
                    StageKind::Digest(kind) => Some(common::digest_of(kind, &plain)),
                    _ => None,
                };
                assert_eq!(digest, expected);
                let found = stage.found.as_ref().map(|found| found.count);
                let expected = match stage.kind {
                    StageKind::Search(kind) => Some(count(kind, &plain)),
                    _ => None,
                };
                assert_eq!(found, expected);
            }
            let kinds = report.stages.iter().map(|stage| stage.kind);
            assert!(kinds.eq(case.stages.iter().map(StageSpec::kind)));
        }
        Err(error) => {
            assert_eq!(report.digest(), None);
            // All may be there when the transfer ends, but for what syncs it.
            if case.seals() == Some(Cipher::Aes256Gcm) && !syncs {
                assert!(opened.is_none(), "a stream that was cut off does not open");
            }
            match (case.fault, error) {
                (_, TransferError::Host { what: "syncing the file", errno: 5 }) => {
                    assert!(syncs && opened.is_some(), "all is there");
                    return;
                }
                (_, TransferError::Cancelled) => assert!(case.cancel_after.is_some()),
                (Fault::Ends(_), TransferError::FileEnded { .. } | TransferError::Closed)
                | (Fault::Breaks(_), TransferError::Host { errno: 5, .. } | TransferError::Reset)
                | (Fault::Full(_), TransferError::DiskFull | TransferError::Reset)
                | (Fault::Stalls(_), TransferError::Stalled(1000))
                | (Fault::Changed(_), TransferError::NotSealed | TransferError::NotVerified(_)) => {
                }
                (fault, error) => panic!("{error} after {fault:?}"),
            }
        }
    }
    if let (Fault::Changed(_), None) = (case.fault, case.cancel_after) {
        assert!(result.is_err(), "a change is noticed");
    }
    // What was read before the source failed reaches the sink.
    if !case.transforms()
        && let (Fault::Ends(at) | Fault::Breaks(at), None) = (case.fault, case.cancel_after)
    {
        assert_eq!(sink.len(), at.min(case.len));
    }
    let stalls = case.sink == Device::Socket;
    match (case.fault, case.cancel_after) {
        (Fault::Full(at), None) => assert!(sink.len() <= at || result.is_ok()),
        (Fault::Stalls(at), None) if stalls => assert!(sink.len() <= at || result.is_ok()),
        _ => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_transfer_ends_with_exact_counts(
        cases in prop::collection::vec(case(), 1..6),
        threads in 1..4usize,
    ) {
        let ends = run(&cases, threads);
        for (index, (case, ended)) in cases.iter().zip(&ends).enumerate() {
            check(case, index, ended);
        }
    }
}

/// The sink is synced after the last chunk has come back from its digest, and not when those before it are written.
#[test]
fn a_file_is_synced_when_all_of_it_is_there() {
    let key = Key::new(KEY);
    let stages = vec![
        StageSpec::Digest(DigestKind::Md5),
        StageSpec::Compress(Format::Zstd.into()),
        StageSpec::Seal(Cipher::Aes256Gcm, key),
    ];
    let case = |len, stages, sync| Case {
        source: Device::File,
        sink: Device::File,
        len,
        stages,
        fault: Fault::None,
        turns: vec![0, 70_000],
        cancel_after: None,
        sync,
    };
    let cases = [case(0, Vec::new(), false), case(524_160, stages, true)];
    for (index, ended) in run(&cases, 1).iter().enumerate() {
        check(&cases[index], index, ended);
    }
}

#[test]
fn members_without_content_take_several_steps_and_end_with_a_reason() {
    for (format, source) in
        [(Format::Gzip, Device::File), (Format::Gzip, Device::Socket), (Format::Zstd, Device::File)]
    {
        let most = MEMBERS_OF_RUN_MAX as usize;
        let of =
            |empty: usize| [compress(format, &[]).repeat(empty), compress(format, b"x")].concat();
        let run = |data: Vec<u8>| {
            let plan = Plan {
                source,
                sink: Device::Socket,
                from: 0,
                bytes: Some(data.len() as u64),
                to: 0,
                head: Vec::new(),
                stages: vec![StageSpec::Expand(format, ExpandLimits::default())],
                when_blocked: WhenBlocked::Wait,
                sync: false,
                part: None,
                cut: Cut::No,
                parts_max: 1,
            };
            let sim = SimState {
                source: data,
                fault: Fault::None,
                turns: vec![usize::MAX],
                at: 0,
                sink: Vec::new(),
                received: 0,
                blocked: false,
                synced: false,
            };
            let (mut flow, mut buffers) =
                (Flow::new(&plan, Sim(Arc::new(Mutex::new(sim)))).unwrap(), Buffers::default());
            // Steps that are not the last one, and move nothing.
            let mut still = 0;
            loop {
                let end = flow.next(Blocked::default()).expect("no socket is full");
                let step = flow.step(end, &mut buffers);
                if let Some(result) = step.ended {
                    return (still, result, flow.devices().state().sink.clone());
                }
                still += usize::from(step.moved == 0);
            }
        };
        let (still, result, sink) = run(of(3 * most));
        assert_eq!((result, sink), (Ok(()), b"x".to_vec()));
        assert!((2..=3).contains(&still), "{still} steps");
        let (_, result, sink) = run(of(EMPTY_MEMBERS_MAX as usize + 1));
        assert_eq!((result, sink), (Err(TransferError::EmptyMembers(format)), Vec::new()));
    }
}
