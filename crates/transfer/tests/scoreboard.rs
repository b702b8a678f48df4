//! The scoreboard without devices: whose turn it is, steps that hang, and peers that are slow.

use transfer::command::device::{Blocked, End};
use transfer::command::pipeline::TimeLimits;
use transfer::engine::scoreboard::{
    ABANDON_NS, Expired, GivenBack, SLOW_MAX, SLOW_NS, Scoreboard, Work,
};
use transfer::stages::buffer::Buffers;
use transfer::{Device, TransferError};

const STALL_NS: u64 = 1_000_000_000;

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
    let limits = TimeLimits { stall_ns: STALL_NS, deadline_ns: None };
    for _ in 0..3 {
        board.insert(Chunks(0), limits, 0).ok().unwrap();
    }
    assert!(board.insert(Chunks(0), limits, 0).is_err(), "it is full");
    let mut last = None;
    let mut order = Vec::new();
    for _ in 0..12 {
        let (id, end, mut work) = board.take(last, 0).unwrap();
        order.push((id.to_bits() as u32, end));
        work.0 += 1;
        board.give_back(id, work, false, 1000, &mut Buffers::default(), 0);
        last = Some(id);
    }
    let round = [0, 0, 1, 1, 2, 2];
    assert_eq!(order.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [round, round].concat());
    assert!(order.chunks(2).all(|pair| pair[0].1 == End::Source && pair[1].1 == End::Sink));
}

#[test]
fn a_socket_that_was_ready_once_is_not_tried_again_and_again() {
    struct Sender;
    impl Work for Sender {
        type Handle = ();
        fn handle(&self) {}
        fn next(&self, blocked: Blocked) -> Option<End> {
            (!blocked.sink).then_some(End::Sink)
        }
        fn device(&self, _: End) -> Device {
            Device::Socket
        }
    }
    let mut board = Scoreboard::new(1, 4);
    let limits = TimeLimits { stall_ns: STALL_NS, deadline_ns: None };
    board.insert(Sender, limits, 0).ok().unwrap();
    let mut buffers = Buffers::default();
    let (id, end, work) = board.take(None, 0).unwrap();
    // A chunk is in its stages all the time.
    board.begin_part(id);
    board.give_back(id, work, true, 0, &mut buffers, 0);
    for _ in 0..3 {
        assert!(board.take(None, 0).is_none(), "the socket is full");
        board.ready(id, end);
        let mut tries = 0;
        while let Some((id, _, work)) = board.take(None, 0) {
            tries += 1;
            assert!(tries <= 2, "its event is used up");
            board.give_back(id, work, true, 0, &mut buffers, 0);
        }
        assert!(tries > 0, "it was ready");
    }
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
    let limits = TimeLimits { stall_ns: STALL_NS, deadline_ns: Some(2 * STALL_NS) };
    let long_limits = TimeLimits { stall_ns: 9 * STALL_NS, deadline_ns: None };
    board.insert(Reader, long_limits, 0).ok().unwrap();
    let second = board.insert(Reader, limits, 0).ok().unwrap();
    let (first, _, work) = board.take(None, 0).unwrap();
    assert!(board.take(None, 0).is_none() && !board.has_work());
    // The second waits for the file queue no longer than its time.
    assert_eq!(board.next_deadline_ns(), Some(STALL_NS));
    assert_eq!(board.expire(STALL_NS).len(), 1);
    assert!(board.cancel(second).is_none());
    assert!(board.cancel(first).is_none(), "it runs");
    assert!(matches!(
        board.give_back(first, work, false, 1000, &mut Buffers::default(), 0),
        GivenBack::Ended(_, Err(TransferError::Cancelled))
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
    let limits = TimeLimits { stall_ns: STALL_NS, deadline_ns: None };
    let ids: Vec<_> =
        (0..count).map(|name| board.insert(Named(name), limits, 0).ok().unwrap()).collect();
    let (mut taken, mut buffers) = (Vec::new(), Buffers::default());
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
    assert!(matches!(
        board.give_back(ids[0], first, true, 1000, &mut buffers, SLOW_NS),
        GivenBack::Kept
    ));
    let (id, _, last) = board.take(None, SLOW_NS).unwrap();
    assert_eq!(id, ids[SLOW_MAX]);
    board.give_back(id, last, true, 1000, &mut buffers, SLOW_NS);
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
    assert!(matches!(
        board.give_back(id, late, true, 1000, &mut buffers, STALL_NS),
        GivenBack::Kept
    ));
    // What comes back is dropped.
    assert_eq!(board.slow_steps(), SLOW_MAX - 1);
    for (work, id) in taken.into_iter().zip(&ids[1..]) {
        assert!(matches!(
            board.give_back(*id, work, false, 1000, &mut buffers, STALL_NS),
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
        let limits = TimeLimits { stall_ns: 30 * STALL_NS, deadline_ns: None };
        let id = board.insert(Named(0), limits, 0).ok().unwrap();
        let mut now_ns = 0;
        for _ in 0..10 {
            let (_, _, work) = board.take(None, now_ns).unwrap();
            now_ns += 29 * STALL_NS;
            board.give_back(id, work, true, bytes, &mut Buffers::default(), now_ns);
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

/// Ten thousand transfers take turns: none gets a second chunk before all have had one, and any of them can be cancelled.
#[test]
fn ten_thousand_entries_take_turns() {
    const COUNT: usize = 10_000;
    let (mut board, mut buffers) = (Scoreboard::new(COUNT, 1), Buffers::default());
    let limits = TimeLimits { stall_ns: STALL_NS, deadline_ns: None };
    let ids: Vec<_> =
        (0..COUNT).map(|name| board.insert(Named(name), limits, 0).ok().unwrap()).collect();
    assert!(board.insert(Named(COUNT), limits, 0).is_err());
    for _ in 0..2 {
        for expected in &ids {
            let (id, _, work) = board.take(None, 0).unwrap();
            assert_eq!(id, *expected);
            board.give_back(id, work, false, 4096, &mut buffers, 0);
        }
    }
    for id in ids.iter().step_by(2) {
        assert!(board.cancel(*id).is_some());
    }
    let (id, ..) = board.take(None, 0).unwrap();
    assert_eq!((id, board.len()), (ids[1], COUNT / 2));
    // All end when their time is over, also the one that runs and does not come back.
    assert_eq!(board.expire(STALL_NS).len(), COUNT / 2);
}
