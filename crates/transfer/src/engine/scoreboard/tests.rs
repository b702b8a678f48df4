use super::*;
use std::sync::Arc;

use crate::command::device::{Blocked, Device, End};
use crate::command::error::TransferError;
use crate::command::pipeline::TimeLimits;
use crate::run::apart::SendApart;
use crate::stages::buffer::Buffers;
use crate::stages::chain::Chunk;

const PATIENCE: TimeLimits = TimeLimits { stall_ns: 1_000_000_000, deadline_ns: None };

/// Reads a file, and has ended after its first step if it is `brief`.
struct Reader {
    brief: bool,
    /// Chunks that have come back.
    joined: usize,
    caller: u64,
}

impl Work for Reader {
    type Handle = u64;
    fn handle(&self) -> u64 {
        self.caller
    }
    fn next(&self, _: Blocked) -> Option<End> {
        Some(End::Source)
    }
    fn device(&self, end: End) -> Device {
        if end == End::Source { Device::File } else { Device::Socket }
    }
    fn caller(&self) -> u64 {
        self.caller
    }
    fn join(&mut self, _: Apart, _: &mut Buffers) -> u64 {
        self.joined += 1;
        1000
    }
    fn ended(&self) -> Option<Result<(), TransferError>> {
        self.brief.then_some(Ok(()))
    }
}

fn reader(brief: bool, caller: u64) -> Reader {
    Reader { brief, joined: 0, caller }
}

fn chunk() -> Apart {
    let (chunk, progress) = (Chunk { buffer: Vec::new(), len: 0, done: 0 }, Arc::default());
    let send = Arc::new(|bytes: &[u8]| Ok(bytes.len()));
    Apart::Send(SendApart { chunk, send, progress, before: 0, sent: 0, error: None })
}

/// One with a chunk that another thread has.
fn with_chunk_away(brief: bool) -> (Scoreboard<Reader>, EntryId) {
    let mut board = Scoreboard::new(1, 4);
    board.insert(reader(brief, 0), PATIENCE, 0).ok().unwrap();
    let (id, _, work) = board.take(None, 0).unwrap();
    board.begin_part(id);
    let given = board.give_back(id, work, true, 1000, &mut Buffers::default(), 0);
    assert!(matches!(given, GivenBack::Kept), "a chunk is away, whose count is missing");
    (board, id)
}

fn comes_back(board: &mut Scoreboard<Reader>, id: EntryId) -> Result<(), TransferError> {
    let mut ended = board.give_parts_back(vec![(id, chunk(), false)], &mut Buffers::default(), 0);
    let (work, result) = ended.pop().expect("nothing else is away");
    assert_eq!((work.joined, ended.len(), board.len()), (1, 0, 0));
    result
}

#[test]
fn a_transfer_that_is_done_ends_when_its_chunks_have_come_back() {
    let (mut board, id) = with_chunk_away(true);
    assert_eq!(board.activity(id), Some(Activity::Running));
    assert_eq!(comes_back(&mut board, id), Ok(()));
}

#[test]
fn a_transfer_that_is_cancelled_ends_when_its_chunks_have_come_back() {
    let (mut board, id) = with_chunk_away(false);
    assert!(board.cancel(id).is_none(), "a chunk is away, whose count is missing");
    assert_eq!(board.len(), 1);
    assert_eq!(comes_back(&mut board, id), Err(TransferError::Cancelled));
}

/// Takes every step that may start. Returns how many of each caller there were.
fn take_all(board: &mut Scoreboard<Reader>, callers: usize, now_ns: u64) -> Vec<usize> {
    let mut taken = vec![0; callers];
    while let Some((_, _, work)) = board.take(None, now_ns) {
        taken[work.caller as usize] += 1;
        // None of them returns; as soon as that is known the next one starts.
        assert!(board.expire(now_ns + SLOW_NS).is_empty());
    }
    taken
}

#[test]
fn a_caller_whose_files_hang_leaves_places_to_others() {
    let mut board = Scoreboard::new(1000, 1);
    for caller in [1, 2] {
        for _ in 0..100 {
            board.insert(reader(false, caller), PATIENCE, 0).ok().unwrap();
        }
    }
    assert_eq!(take_all(&mut board, 5, 0), [0, OF_CALLER_MAX, OF_CALLER_MAX, 0, 0]);
    assert!(!board.has_work());
    // Others find places.
    let good = board.insert(reader(true, 3), PATIENCE, 0).ok().unwrap();
    assert!(board.has_work());
    let (id, _, work) = board.take(None, 0).unwrap();
    assert_eq!((id, work.caller), (good, 3));
    let ended = board.give_back(id, work, false, 1000, &mut Buffers::default(), 0);
    assert!(matches!(ended, GivenBack::Ended(..)));
    // Without a free place a caller's further transfers end when their time is over, as those that hang.
    let over = board.expire(2 * PATIENCE.stall_ns);
    assert_eq!(over.len(), 200);
    for expired in over {
        let (Expired::Ended(_, error) | Expired::Abandoned(_, error)) = expired;
        assert_eq!(error, TransferError::FileStalled(1000));
    }
    assert_eq!(board.slow_steps(), 2 * OF_CALLER_MAX, "their threads have not returned");
    // They still have their places.
    let late = 2 * PATIENCE.stall_ns;
    let mut of_one = Vec::new();
    for _ in 0..2 * OF_CALLER_MAX {
        of_one.push(board.insert(reader(false, 1), PATIENCE, late).ok().unwrap());
        board.insert(reader(false, 3), PATIENCE, late).ok().unwrap();
    }
    // The callers of a tenant have no more than their part together.
    assert_eq!(take_all(&mut board, 5, late), [0, 0, 0, OF_TENANT_MAX - 2 * OF_CALLER_MAX, 0]);
    board.insert(reader(false, 4), PATIENCE, late).ok().unwrap();
    assert!(board.take(None, late).is_none(), "the tenant has {OF_TENANT_MAX}");
    // When one goes, its places come back, though its threads do not.
    assert!(of_one.into_iter().all(|id| board.cancel(id).is_some()));
    board.forget_caller(1);
    assert_eq!(take_all(&mut board, 5, late)[4], 1);
}
