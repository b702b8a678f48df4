//! The scoreboard and the flows on devices that fail in every way: short reads and writes, interruptions, full sockets, resets,
//! files that end early, full disks, peers that never come back. Everything is decided by the input of the property, so a failure
//! can be repeated.

mod common;

use std::io::{self, IoSliceMut};

use proptest::prelude::*;
use transfer::flow::{Blocked, Buffers, CHUNK_BYTES, Device, Devices, End, Flow, Plan, Report};
use transfer::pipeline::WhenBlocked;
use transfer::scoreboard::{
    ABANDON_NS, EntryId, Expired, GivenBack, Patience, SLOW_MAX, SLOW_NS, Scoreboard, Work,
};
use transfer::{
    Cipher, DigestKind, ExpandLimits, Format, Key, SearchKind, SearchSpec, StageKind, StageSpec,
    TransferError,
    compress::{Compressor, EMPTY_MEMBERS_MAX, Expander, MEMBERS_OF_RUN_MAX},
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
    /// ENOSPC at this byte.
    Full(usize),
    /// The socket is never ready again.
    Stalls(usize),
    /// This byte of the source is another one. Only where that is noticed.
    Changed(usize),
}

/// A file and a socket. `turns` says how much each call may move; 0 is an interruption or a socket that is not ready.
struct Sim {
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

impl Sim {
    fn turn(&mut self) -> usize {
        self.at += 1;
        self.turns[self.at % self.turns.len()]
    }
}

impl Devices for Sim {
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
                return Err(io::Error::from_raw_os_error(28));
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
            StageSpec::Compress(format) => Some(*format),
            _ => None,
        })
    }

    fn seals(&self) -> Option<Cipher> {
        match self.stages.last() {
            Some(StageSpec::Seal(cipher, _)) => Some(*cipher),
            _ => None,
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
    let (mut state, mut made, mut at) = (Compressor::new(format).unwrap(), Vec::new(), 0);
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
        let compress = compresses.map(StageSpec::Compress);
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
fn run(cases: &[Case]) -> Vec<Ended> {
    let mut board = Scoreboard::new(cases.len(), 1);
    let mut ends: Vec<Option<Ended>> = cases.iter().map(|_| None).collect();
    let mut buffers = Buffers::default();
    let mut ids: Vec<Option<EntryId>> = Vec::new();
    let mut now_ns = 0;
    let patience = Patience { stall_ns: STALL_NS, deadline_ns: None };
    for (index, case) in cases.iter().enumerate() {
        let sim = Sim {
            source: case.content(index),
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
            stages: case.stages.clone(),
            when_blocked: WhenBlocked::Wait,
            sync: case.sync && case.sink == Device::File,
        };
        let flow = Flow::new(&plan, sim).unwrap();
        let ended = flow.ended();
        let job = Job { index, flow };
        match ended {
            Some(result) => {
                end(&mut ends, job, result, &mut buffers);
                ids.push(None);
            }
            None => ids.push(Some(board.insert(job, patience, now_ns).ok().unwrap())),
        }
    }
    assert_eq!(board.len(), ids.iter().flatten().count());
    let mut last = None;
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
        let Some((id, at, mut job)) = board.take(last.take(), now_ns) else {
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
        let step = job.flow.step(at, &mut buffers);
        match step.ended {
            Some(result) => {
                board.finish(id);
                end(&mut ends, job, result, &mut buffers);
            }
            None => {
                let given = board.give_back(id, job, step.blocked, step.moved, now_ns);
                match given {
                    GivenBack::Kept => {}
                    GivenBack::Ended(job, error) => {
                        end(&mut ends, job, Err(error), &mut buffers);
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
    let sim = job.flow.devices();
    let (sink, source, synced) = (sim.sink.clone(), sim.source.clone(), sim.synced);
    let report = job.flow.report(&result, buffers);
    assert!(ends[job.index].is_none(), "it ends once");
    ends[job.index] = Some(Ended { synced, result, report, sink, source });
}

fn digest_of(kind: DigestKind, bytes: &[u8]) -> String {
    use sha2::Digest as _;
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    match kind {
        DigestKind::Md5 => hex(&md5::Md5::digest(bytes)),
        DigestKind::Sha256 => hex(&sha2::Sha256::digest(bytes)),
        DigestKind::Crc32c => format!("{:08x}", crc32c::crc32c(bytes)),
        DigestKind::Sha1 => hex(&sha1::Sha1::digest(bytes)),
    }
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
        assert!(report.read >= report.written);
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
            assert_eq!(report.read, source.len() as u64);
            for stage in &report.stages {
                let (taken, made) = match stage.kind {
                    StageKind::Open(_) => (source.len(), packed),
                    StageKind::Expand(_) => (packed, plain.len()),
                    StageKind::Digest(_) | StageKind::Search(_) => (plain.len(), plain.len()),
                    StageKind::Compress(_) => (plain.len(), opened.len()),
                    StageKind::Seal(_) => (opened.len(), sink.len()),
                };
                assert_eq!((stage.bytes, stage.made), (taken as u64, made as u64));
                let digest = stage.digest.map(|digest| digest.to_string());
                let expected = match stage.kind {
                    StageKind::Digest(kind) => Some(digest_of(kind, &plain)),
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
    fn every_transfer_ends_with_exact_counts(cases in prop::collection::vec(case(), 1..6)) {
        let ends = run(&cases);
        for (index, (case, ended)) in cases.iter().zip(&ends).enumerate() {
            check(case, index, ended);
        }
    }
}

#[test]
fn transfers_take_turns_by_chunk() {
    struct Chunks(usize);
    impl Work for Chunks {
        type Handle = ();
        fn handle(&self) {}
        fn next(&self, _: Blocked) -> Option<End> {
            Some(if self.0.is_multiple_of(2) { End::Source } else { End::Sink })
        }
        fn device(&self, end: End) -> Device {
            if end == End::Source { Device::File } else { Device::Socket }
        }
    }
    let mut board = Scoreboard::new(3, 1);
    let patience = Patience { stall_ns: STALL_NS, deadline_ns: None };
    for _ in 0..3 {
        board.insert(Chunks(0), patience, 0).ok().unwrap();
    }
    assert!(board.insert(Chunks(0), patience, 0).is_err(), "it is full");
    let mut last = None;
    let mut order = Vec::new();
    for _ in 0..12 {
        let (id, end, mut work) = board.take(last, 0).unwrap();
        order.push((id.to_bits() as u32, end));
        work.0 += 1;
        board.give_back(id, work, false, 1000, 0);
        last = Some(id);
    }
    let round = [0, 0, 1, 1, 2, 2];
    assert_eq!(order.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [round, round].concat());
    assert!(order.chunks(2).all(|pair| pair[0].1 == End::Source && pair[1].1 == End::Sink));
}

#[test]
fn as_many_steps_run_as_there_are_threads() {
    struct Reader;
    impl Work for Reader {
        type Handle = ();
        fn handle(&self) {}
        fn next(&self, _: Blocked) -> Option<End> {
            Some(End::Source)
        }
        fn device(&self, end: End) -> Device {
            if end == End::Source { Device::File } else { Device::Socket }
        }
    }
    let mut board = Scoreboard::new(2, 1);
    let patience = Patience { stall_ns: STALL_NS, deadline_ns: Some(2 * STALL_NS) };
    let patient = Patience { stall_ns: 9 * STALL_NS, deadline_ns: None };
    board.insert(Reader, patient, 0).ok().unwrap();
    let second = board.insert(Reader, patience, 0).ok().unwrap();
    let (first, _, work) = board.take(None, 0).unwrap();
    assert!(board.take(None, 0).is_none() && !board.has_work());
    // The second waits for the file queue no longer than its time.
    assert_eq!(board.next_deadline_ns(), Some(STALL_NS));
    assert_eq!(board.expire(STALL_NS).len(), 1);
    assert!(board.cancel(second).is_none());
    assert!(board.cancel(first).is_none(), "it runs");
    assert!(matches!(
        board.give_back(first, work, false, 1000, 0),
        GivenBack::Ended(_, TransferError::Cancelled)
    ));
    assert!(board.is_empty());
}

/// A transfer that reads its file unless its sink is not ready, and its name as handle.
struct Named(usize);

impl Work for Named {
    type Handle = usize;
    fn handle(&self) -> usize {
        self.0
    }
    fn next(&self, blocked: Blocked) -> Option<End> {
        (blocked == Blocked::default()).then_some(End::Source)
    }
    fn device(&self, end: End) -> Device {
        if end == End::Source { Device::File } else { Device::Socket }
    }
}

#[test]
fn a_file_step_that_hangs_is_passed_by_and_abandoned() {
    let count = SLOW_MAX + 2;
    let mut board = Scoreboard::new(count, 1);
    let patience = Patience { stall_ns: STALL_NS, deadline_ns: None };
    let ids: Vec<_> =
        (0..count).map(|name| board.insert(Named(name), patience, 0).ok().unwrap()).collect();
    let mut taken = Vec::new();
    // One file step hangs after the other: the next one starts when that is known, up to a limit.
    for (at, expected) in ids.iter().enumerate().take(SLOW_MAX) {
        let (id, end, work) = board.take(None, 0).unwrap();
        assert_eq!((id, end), (*expected, End::Source));
        taken.push(work);
        assert!(!board.has_work());
        assert!(board.expire(SLOW_NS - 1).is_empty());
        assert!(!board.has_work() && board.slow_steps() == at);
        assert!(board.expire(SLOW_NS).is_empty());
        assert_eq!(board.slow_steps(), at + 1);
    }
    assert!(board.take(None, 0).is_none() && !board.has_work());
    // One returns in time, and is as any other.
    let first = taken.remove(0);
    assert!(matches!(board.give_back(ids[0], first, true, 1000, SLOW_NS), GivenBack::Kept));
    let (id, _, last) = board.take(None, SLOW_NS).unwrap();
    assert_eq!(id, ids[SLOW_MAX]);
    board.give_back(id, last, true, 1000, SLOW_NS);
    let (id, _, late) = board.take(None, STALL_NS - 1).unwrap();
    // The others are abandoned, but for the step that has just begun.
    assert!(board.cancel(ids[1]).is_none(), "it runs");
    let mut abandoned: Vec<_> = board
        .expire(STALL_NS)
        .into_iter()
        .map(|expired| match expired {
            Expired::Abandoned(name, error) => (name, error),
            Expired::Ended(Named(name), error) => panic!("{name} did not run: {error}"),
        })
        .collect();
    assert_eq!(abandoned.remove(0), (1, TransferError::Cancelled));
    let stalled = (2..SLOW_MAX).map(|name| (name, TransferError::FileStalled(1000)));
    assert!(abandoned.into_iter().eq(stalled));
    assert_eq!(board.len(), 3);
    assert!(matches!(board.give_back(id, late, true, 1000, STALL_NS), GivenBack::Kept));
    // What comes back is dropped.
    assert_eq!(board.slow_steps(), SLOW_MAX - 1);
    for (work, id) in taken.into_iter().zip(&ids[1..]) {
        assert!(matches!(
            board.give_back(*id, work, false, 1000, STALL_NS),
            GivenBack::Abandoned(_)
        ));
    }
    assert_eq!((board.slow_steps(), board.len()), (0, 3));
    // A step that hangs when everything ends.
    board.ready(ids[0], End::Source);
    let (running, _, _) = board.take(None, STALL_NS).unwrap();
    assert_eq!((running, board.clear().len()), (ids[0], 2));
    assert_eq!(board.abandon(), [0]);
    assert!(!board.finish(running) && board.is_empty());
}

#[test]
fn a_byte_now_and_then_is_no_progress() {
    let ends = |bytes: u64| {
        let mut board = Scoreboard::new(1, 1);
        let patience = Patience { stall_ns: 30 * STALL_NS, deadline_ns: None };
        let id = board.insert(Named(0), patience, 0).ok().unwrap();
        let mut now_ns = 0;
        for _ in 0..10 {
            let (_, _, work) = board.take(None, now_ns).unwrap();
            now_ns += 29 * STALL_NS;
            board.give_back(id, work, true, bytes, now_ns);
            if !board.expire(now_ns).is_empty() {
                return true;
            }
            board.ready(id, End::Source);
        }
        false
    };
    assert!(ends(1) && ends(100) && !ends(4000));
    assert_eq!(ABANDON_NS.max(SLOW_NS), ABANDON_NS, "only slow steps are abandoned");
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
                stages: vec![StageSpec::Expand(format, ExpandLimits::default())],
                when_blocked: WhenBlocked::Wait,
                sync: false,
            };
            let sim = Sim {
                source: data,
                fault: Fault::None,
                turns: vec![usize::MAX],
                at: 0,
                sink: Vec::new(),
                received: 0,
                blocked: false,
                synced: false,
            };
            let (mut flow, mut buffers) = (Flow::new(&plan, sim).unwrap(), Buffers::default());
            // Steps that are not the last one, and move nothing.
            let mut still = 0;
            loop {
                let end = flow.next(Blocked::default()).expect("no socket is full");
                let step = flow.step(end, &mut buffers);
                if let Some(result) = step.ended {
                    return (still, result, flow.devices().sink.clone());
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
