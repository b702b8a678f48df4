//! The scoreboard and the flows on devices that fail in every way: short reads and writes, interruptions, full sockets, resets,
//! files that end early, full disks, peers that never come back. Everything is decided by the input of the property, so a failure
//! can be repeated.

mod common;

use std::io::{self, IoSliceMut};

use proptest::prelude::*;
use transfer::flow::{Buffers, CHUNK_BYTES, Device, Devices, Flow, Plan, Report};
use transfer::pipeline::{Direction, WhenBlocked};
use transfer::scoreboard::{EntryId, GivenBack, Patience, Scoreboard, Work};
use transfer::{DigestKind, Key, TransferError};

const KEY: [u8; 32] = [9; 32];
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
    direction: Direction,
}

impl Work for Job {
    fn next(&self, blocked: bool) -> Option<Device> {
        self.flow.next(blocked)
    }

    fn source(&self) -> Device {
        match self.direction {
            Direction::Send => Device::File,
            Direction::Receive => Device::Socket,
        }
    }
}

#[derive(Clone, Debug)]
struct Case {
    direction: Direction,
    len: usize,
    digest: Option<DigestKind>,
    sealed: bool,
    fault: Fault,
    turns: Vec<usize>,
    cancel_after: Option<usize>,
}

struct Ended {
    result: Result<(), TransferError>,
    report: Report,
    sink: Vec<u8>,
    source: Vec<u8>,
}

fn source(case: &Case, index: usize) -> Vec<u8> {
    (0..case.len).map(|at| (at.wrapping_mul(31) ^ (at >> 8) ^ index) as u8).collect()
}

fn fault() -> impl Strategy<Value = Fault> {
    let at = 0..3 * CHUNK_BYTES;
    prop_oneof![
        2 => Just(Fault::None),
        1 => at.clone().prop_map(Fault::Ends),
        1 => at.clone().prop_map(Fault::Breaks),
        1 => at.clone().prop_map(Fault::Full),
        1 => at.prop_map(Fault::Stalls),
    ]
}

fn case() -> impl Strategy<Value = Case> {
    let turn = prop_oneof![Just(0), 1..5000usize, Just(65_536), Just(usize::MAX)];
    // At least one turn moves something.
    let turns = prop::collection::vec(turn, 1..8).prop_map(|mut turns| {
        turns.push(70_000);
        turns
    });
    let digest = prop::option::of(prop::sample::select(DigestKind::ALL.to_vec()));
    let direction = prop::sample::select(vec![Direction::Send, Direction::Receive]);
    let len = prop_oneof![0..200usize, 0..3 * CHUNK_BYTES, Just(65_520), Just(8 * 65_520)];
    let cancel = prop::option::weighted(0.1, 0..30usize);
    (direction, len, digest, any::<bool>(), fault(), turns, cancel).prop_map(
        |(direction, len, digest, sealed, fault, turns, cancel_after)| Case {
            direction,
            len,
            digest,
            sealed: sealed && direction == Direction::Send,
            fault,
            turns,
            cancel_after,
        },
    )
}

/// Runs all cases at once on one scoreboard, until all have ended.
fn run(cases: &[Case]) -> Vec<Ended> {
    let mut board = Scoreboard::new(cases.len());
    let mut ends: Vec<Option<Ended>> = cases.iter().map(|_| None).collect();
    let mut buffers = Buffers::default();
    let mut ids: Vec<Option<EntryId>> = Vec::new();
    let mut now_ns = 0;
    let patience = Patience { stall_ns: STALL_NS, deadline_ns: None };
    for (index, case) in cases.iter().enumerate() {
        let sim = Sim {
            source: source(case, index),
            fault: case.fault,
            turns: case.turns.clone(),
            at: 0,
            sink: Vec::new(),
            received: 0,
            blocked: false,
        };
        let plan = Plan {
            direction: case.direction,
            offset: 0,
            bytes: Some(case.len as u64),
            digest: case.digest,
            seal: case.sealed.then(|| Key::new(KEY)),
            when_blocked: WhenBlocked::Wait,
        };
        let flow = Flow::new(&plan, sim).unwrap();
        let ended = flow.ended();
        let job = Job { index, flow, direction: case.direction };
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
        let Some((id, device, mut job)) = board.take(last.take()) else {
            if board.is_empty() {
                break;
            }
            // All wait: every socket that can become ready does, and the others run out of time.
            let mut is_ready = false;
            for (case, id) in cases.iter().zip(&ids) {
                if let Some(id) = id
                    && !matches!(case.fault, Fault::Stalls(_))
                {
                    board.ready(*id);
                    is_ready = true;
                }
            }
            if !board.has_work() || !is_ready {
                now_ns = board.next_deadline_ns().expect("waiting entries have deadlines");
                // Sockets that stall at a later byte are ready until then.
                for (case, id) in cases.iter().zip(&ids) {
                    if let (Fault::Stalls(_), Some(id)) = (case.fault, id) {
                        board.ready(*id);
                    }
                }
                for (job, error) in board.expire(now_ns) {
                    end(&mut ends, job, Err(error), &mut buffers);
                }
            }
            continue;
        };
        let step = job.flow.step(device, &mut buffers);
        match step.ended {
            Some(result) => {
                board.finish(id);
                end(&mut ends, job, result, &mut buffers);
            }
            None => {
                let given = board.give_back(id, job, step.blocked, step.moved, now_ns);
                if let GivenBack::Ended(job, error) = given {
                    end(&mut ends, job, Err(error), &mut buffers);
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
    let (sink, source) = (sim.sink.clone(), sim.source.clone());
    let report = job.flow.report(&result, buffers);
    assert!(ends[job.index].is_none(), "it ends once");
    ends[job.index] = Some(Ended { result, report, sink, source });
}

fn digest_of(kind: DigestKind, bytes: &[u8]) -> String {
    use sha2::Digest as _;
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    match kind {
        DigestKind::Md5 => hex(&md5::Md5::digest(bytes)),
        DigestKind::Sha256 => hex(&sha2::Sha256::digest(bytes)),
        DigestKind::Crc32c => format!("{:08x}", crc32c::crc32c(bytes)),
    }
}

fn check(case: &Case, ended: &Ended) {
    let Ended { result, report, sink, source } = ended;
    assert_eq!(report.written, sink.len() as u64, "the count is what the sink got");
    if case.sealed {
        assert!(sink.len() < 48 || sink.starts_with(b"SERVSEAL"));
    } else {
        assert!(source.starts_with(sink), "the sink has a prefix of the source");
        assert!(report.read >= report.written);
    }
    match result {
        Ok(()) => {
            let plain = if case.sealed {
                common::open(&KEY, sink).expect("the stream opens")
            } else {
                sink.clone()
            };
            assert!(plain == *source, "the sink has all");
            let digest = report.digest.map(|digest| digest.to_string());
            assert_eq!(digest, case.digest.map(|kind| digest_of(kind, source)));
            assert!(report.stages.iter().all(|stage| stage.bytes == case.len as u64));
        }
        Err(error) => {
            assert_eq!(report.digest, None);
            if case.sealed {
                assert_eq!(
                    common::open(&KEY, sink),
                    None,
                    "a stream that was cut off does not open"
                );
            }
            match (case.fault, error) {
                (_, TransferError::Cancelled) => assert!(case.cancel_after.is_some()),
                (Fault::Ends(_), TransferError::FileEnded { .. } | TransferError::Closed)
                | (Fault::Breaks(_), TransferError::Host { errno: 5, .. } | TransferError::Reset)
                | (Fault::Full(_), TransferError::DiskFull | TransferError::Reset)
                | (Fault::Stalls(_), TransferError::Stalled(1000)) => {}
                (fault, error) => panic!("{error} after {fault:?}"),
            }
        }
    }
    // What was read before the source failed reaches the sink.
    if !case.sealed
        && let (Fault::Ends(at) | Fault::Breaks(at), None) = (case.fault, case.cancel_after)
    {
        assert_eq!(sink.len(), at.min(case.len));
    }
    if let (Fault::Full(at) | Fault::Stalls(at), None) = (case.fault, case.cancel_after) {
        assert!(sink.len() <= at || result.is_ok());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_transfer_ends_with_exact_counts(cases in prop::collection::vec(case(), 1..6)) {
        let ends = run(&cases);
        for (case, ended) in cases.iter().zip(&ends) {
            check(case, ended);
        }
    }
}

#[test]
fn transfers_take_turns_by_chunk() {
    struct Chunks(usize);
    impl Work for Chunks {
        fn next(&self, _: bool) -> Option<Device> {
            Some(if self.0.is_multiple_of(2) { Device::File } else { Device::Socket })
        }
        fn source(&self) -> Device {
            Device::File
        }
    }
    let mut board = Scoreboard::new(3);
    let patience = Patience { stall_ns: STALL_NS, deadline_ns: None };
    for _ in 0..3 {
        board.insert(Chunks(0), patience, 0).ok().unwrap();
    }
    assert!(board.insert(Chunks(0), patience, 0).is_err(), "it is full");
    let mut last = None;
    let mut order = Vec::new();
    for _ in 0..12 {
        let (id, device, mut work) = board.take(last).unwrap();
        order.push((id.to_bits() as u32, device));
        work.0 += 1;
        board.give_back(id, work, false, true, 0);
        last = Some(id);
    }
    let round = [0, 0, 1, 1, 2, 2];
    assert_eq!(order.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [round, round].concat());
    assert!(order.chunks(2).all(|pair| pair[0].1 == Device::File && pair[1].1 == Device::Socket));
}

#[test]
fn one_file_step_runs_at_a_time() {
    struct Reader;
    impl Work for Reader {
        fn next(&self, _: bool) -> Option<Device> {
            Some(Device::Socket)
        }
        fn source(&self) -> Device {
            Device::File
        }
    }
    let mut board = Scoreboard::new(2);
    let patience = Patience { stall_ns: STALL_NS, deadline_ns: Some(2 * STALL_NS) };
    let [_, second] = [(); 2].map(|()| board.insert(Reader, patience, 0).ok().unwrap());
    let (first, _, work) = board.take(None).unwrap();
    assert!(board.take(None).is_none() && !board.has_work());
    // The second waits for the file queue no longer than its time, whatever the first one hangs in.
    assert_eq!(board.next_deadline_ns(), Some(STALL_NS));
    assert_eq!(board.expire(STALL_NS).len(), 1);
    assert!(board.cancel(second).is_none());
    assert!(board.cancel(first).is_none(), "it runs");
    assert!(matches!(
        board.give_back(first, work, false, true, 0),
        GivenBack::Ended(_, TransferError::Cancelled)
    ));
    assert!(board.is_empty());
}
