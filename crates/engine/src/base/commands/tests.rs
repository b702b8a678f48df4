use mqueue::command::{CommandReceiver, Direction};
use mqueue::{HeapMapping, MqueuePlan, RegionPlan, RingPlan};

use super::*;

const COPY: Command = Command::Copy(Copy {
    direction: Direction::ToBuffer,
    staging_offset: 0,
    buffer: 0,
    buffer_offset: 0,
    bytes: 8,
});

const REQUEST: Request = match COPY {
    Command::Copy(copy) => Request::Copy(copy),
    _ => unreachable!(),
};

fn rings() -> (CommandRings, CommandReceiver<MappedMemory>) {
    let ring = RingPlan::doorbell(32, 0);
    let plan = RegionPlan::of_blocks(1, &[MqueuePlan { depth: 2, rx: ring, tx: ring }], 1)
        .with_commands(COMMANDS_IN_FLIGHT, 64);
    let memory = HeapMapping::memory(plan.bytes().unwrap() as usize);
    let mut near = Region::format(memory.clone(), &plan).unwrap();
    let receiver = Region::join(memory).unwrap().command_receiver(0);
    (CommandRings::take(&mut near), receiver)
}

fn polled(rings: &mut CommandRings, now_ns: u64) -> Vec<(u64, Outcome)> {
    let mut done = Vec::new();
    rings.poll(now_ns, &mut done, 100);
    done.into_iter().map(|done| (done.number, done.outcome)).collect()
}

#[test]
fn every_command_ends_once_with_the_status_that_came_back() {
    let (mut rings, mut receiver) = rings();
    let statuses = [
        (command_status::OK, Outcome::Done),
        (command_status::RANGE, Outcome::Range),
        (command_status::UNKNOWN, Outcome::Unknown),
        (command_status::TIMEOUT, Outcome::Failed),
        (command_status::FAILED, Outcome::Failed),
        (200, Outcome::Failed),
    ];
    for (status, outcome) in statuses {
        let number = rings.submit(0, &COPY, 10).unwrap();
        assert_eq!(polled(&mut rings, 9), []);
        let (asked, command) = receiver.command().unwrap().expect("it was submitted");
        assert_eq!((asked, Ok(REQUEST)), (number, command));
        receiver.complete(&Done::of(number, status)).unwrap();
        assert_eq!(polled(&mut rings, 9), [(number, outcome)]);
        assert_eq!(polled(&mut rings, 1000), []);
    }
    assert_eq!(rings.submit(1, &COPY, 10), Err(SubmitError::Unusable));
}

#[test]
fn a_deadline_ends_a_command_but_its_place_is_free_only_when_it_is_completed() {
    let (mut rings, mut receiver) = rings();
    let numbers: Vec<u64> =
        (0..COMMANDS_IN_FLIGHT).map(|n| rings.submit(0, &COPY, n.into()).unwrap()).collect();
    assert_eq!(rings.submit(0, &COPY, 100), Err(SubmitError::Full));
    let mut done = Vec::new();
    rings.poll(100, &mut done, 3);
    assert_eq!(done.len(), 3, "limited by the budget");
    rings.poll(100, &mut done, 100);
    let ended: Vec<u64> = done.iter().map(|done| done.number).collect();
    assert!(ended == numbers && done.iter().all(|done| done.outcome == Outcome::Timeout));
    assert_eq!(rings.submit(0, &COPY, 200), Err(SubmitError::Full));
    while let Some((number, _)) = receiver.command().unwrap() {
        receiver.complete(&Done::of(number, command_status::OK)).unwrap();
    }
    assert_eq!(polled(&mut rings, 101), [], "a late completion is not reported again");
    assert!(rings.submit(0, &COPY, 200).is_ok());
}

#[test]
fn an_unknown_completion_makes_the_ring_unusable() {
    for forged in [0, 3, u64::MAX] {
        let (mut rings, mut receiver) = rings();
        let numbers = [1, 2].map(|_| rings.submit(0, &COPY, 10).unwrap());
        receiver.complete(&Done::of(forged, command_status::OK)).unwrap();
        let lost = numbers.map(|number| (number, Outcome::Lost));
        assert_eq!(polled(&mut rings, 0), lost);
        assert_eq!(polled(&mut rings, 100), []);
        assert_eq!(rings.submit(0, &COPY, 10), Err(SubmitError::Unusable));
    }
    let (mut rings, mut receiver) = rings();
    let number = rings.submit(0, &COPY, 10).unwrap();
    receiver.complete(&Done::of(number, command_status::OK)).unwrap();
    receiver.complete(&Done::of(number, command_status::OK)).unwrap();
    assert_eq!(polled(&mut rings, 0), [(number, Outcome::Done)], "the command ends once");
    assert_eq!(rings.submit(0, &COPY, 10), Err(SubmitError::Unusable));
}

/// Two buffers of 4096 and 64 bytes, one after the other, then one of 4096 elsewhere.
const RANGES: [BufferRange; 3] = [
    BufferRange { address: 1 << 20, bytes: 4096 },
    BufferRange { address: (1 << 20) + 4096, bytes: 64 },
    BufferRange { address: 1 << 40, bytes: 4096 },
];

fn describe_all(rings: &mut CommandRings, receiver: &mut CommandReceiver<MappedMemory>) {
    for (buffer, range) in (0..).zip(RANGES) {
        let number = rings.submit(0, &Command::Describe(buffer), 10).unwrap();
        let asked = receiver.command().unwrap();
        assert_eq!(asked, Some((number, Ok(Request::Describe(buffer)))));
        receiver.complete(&Done { range: Some(range), ..Done::of(number, 0) }).unwrap();
        assert_eq!(polled(rings, 0), [(number, Outcome::Done)]);
        assert_eq!(rings.buffer(0, buffer), Some(range));
    }
    assert_eq!(rings.buffer(0, 3), None);
}

fn at(staging_offset: u64, address: u64, bytes: u64) -> Command {
    let direction = Direction::FromBuffer;
    Command::CopyAt(AddressCopy { direction, staging_offset, address, bytes })
}

#[test]
fn a_copy_by_address_is_one_command_that_ends_when_all_its_parts_have() {
    for (statuses, outcome) in [
        ([command_status::OK, command_status::OK], Outcome::Done),
        ([command_status::RANGE, command_status::OK], Outcome::Range),
        ([command_status::OK, command_status::FAILED], Outcome::Failed),
    ] {
        let (mut rings, mut receiver) = rings();
        describe_all(&mut rings, &mut receiver);
        let number = rings.submit(0, &at(8, RANGES[1].address - 16, 32), 10).unwrap();
        let part = |buffer, buffer_offset, staging_offset| {
            let direction = Direction::FromBuffer;
            Request::Copy(Copy { direction, staging_offset, buffer, buffer_offset, bytes: 16 })
        };
        assert_eq!(receiver.command().unwrap(), Some((number, Ok(part(0, 4080, 8)))));
        assert_eq!(receiver.command().unwrap(), Some((number, Ok(part(1, 0, 24)))));
        for status in statuses {
            assert_eq!(polled(&mut rings, 0), []);
            receiver.complete(&Done::of(number, status)).unwrap();
        }
        assert_eq!(polled(&mut rings, 0), [(number, outcome)]);
        let bytes = rings.counters.bytes();
        let delivered = if outcome == Outcome::Done { 32 } else { 0 };
        let dropped = 32 - delivered;
        assert_eq!(bytes, CopyBytes { taken: 32, delivered, dropped, outstanding: 0 });
    }
}

#[test]
fn an_address_that_cannot_be_translated_is_refused_and_nothing_is_sent() {
    use address_map::TranslateError::*;
    let (mut rings, mut receiver) = rings();
    describe_all(&mut rings, &mut receiver);
    let base = RANGES[0].address;
    for (command, why) in [
        (at(0, base, 0), Refused::Address(Empty)),
        (at(0, base - 8, 16), Refused::Address(Unknown)),
        (at(0, base + 4096 + 64, 8), Refused::Address(Unknown)),
        (at(0, base + 4096 + 56, 16), Refused::Address(BeyondEnd)),
        (at(0, RANGES[2].address, 4104), Refused::Address(BeyondEnd)),
        (at(0, u64::MAX - 7, 8), Refused::Address(Wraps)),
        (at(0, base, u64::MAX), Refused::Address(Wraps)),
        (at(0, base, 72), Refused::Staging),
        (at(8, base, 64), Refused::Staging),
        (at(u64::MAX, base, 8), Refused::Staging),
        (at(4, base, 8), Refused::Unaligned),
        (at(0, base + 4, 8), Refused::Unaligned),
        (at(0, base, 12), Refused::Unaligned),
    ] {
        let before = rings.counters.refused(why);
        assert_eq!(rings.submit(0, &command, 10), Err(why.into()), "{command:?}");
        assert_eq!(rings.counters.refused(why), before + 1);
        assert_eq!(receiver.command(), Ok(None));
    }
    assert_eq!(rings.counters.bytes(), CopyBytes::default());
    assert!(rings.submit(0, &at(0, base, 64), 10).is_ok());
}

#[test]
fn a_range_with_more_parts_than_there_is_room_for_waits_or_is_refused() {
    let (mut rings, mut receiver) = rings();
    for buffer in 0..COMMANDS_IN_FLIGHT + 1 {
        let number = rings.submit(0, &Command::Describe(buffer), 10).unwrap();
        receiver.command().unwrap();
        // One page each.
        let range = BufferRange { address: u64::from(buffer) * 65536, bytes: 65536 };
        receiver.complete(&Done { range: Some(range), ..Done::of(number, 0) }).unwrap();
        assert_eq!(polled(&mut rings, 0), [(number, Outcome::Done)]);
    }
    // The staging is too short for all of them, which is noticed first.
    let all = at(0, 65528, 7 * 65536);
    assert_eq!(rings.submit(0, &all, 10), Err(Refused::Staging.into()));
    let all = AddressCopy {
        direction: Direction::ToBuffer,
        staging_offset: 0,
        address: 0,
        bytes: 9 << 16,
    };
    let copies = |copy: &AddressCopy| rings.buffers.copies(0, u64::MAX, copy).map(Iterator::count);
    assert_eq!(copies(&all), Err(Refused::TooManyBuffers));
    assert_eq!(copies(&AddressCopy { bytes: 8 << 16, ..all }), Ok(8));
    for _ in 0..COMMANDS_IN_FLIGHT - 1 {
        rings.submit(0, &COPY, 10).unwrap();
    }
    assert_eq!(rings.submit(0, &at(0, 65528, 16), 10), Err(SubmitError::Full));
    assert!(rings.submit(0, &at(0, 65536, 16), 10).is_ok());
}

/// A runtime may describe what it likes; nothing follows but that its own copies are refused.
#[test]
fn a_buffer_that_cannot_be_registered_is_an_outcome() {
    let (mut rings, mut receiver) = rings();
    let answers = [
        (Some(BufferRange { address: 4, bytes: 8 }), command_status::OK, Outcome::Range),
        (Some(BufferRange { address: 8, bytes: !7 }), command_status::OK, Outcome::Range),
        (Some(BufferRange { address: 0, bytes: 0 }), command_status::OK, Outcome::Range),
        (Some(RANGES[0]), command_status::RANGE, Outcome::Range),
        (None, command_status::OK, Outcome::Unknown),
        (None, command_status::UNKNOWN, Outcome::Unknown),
        (Some(RANGES[0]), command_status::OK, Outcome::Done),
        // The same buffer once more, at another place.
        (Some(RANGES[2]), command_status::OK, Outcome::Done),
    ];
    for (range, status, outcome) in answers {
        let number = rings.submit(0, &Command::Describe(0), 10).unwrap();
        receiver.command().unwrap();
        receiver.complete(&Done { number, status, range }).unwrap();
        assert_eq!(polled(&mut rings, 0), [(number, outcome)]);
    }
    assert_eq!(rings.buffer(0, 0), Some(RANGES[2]));
    let refused = Refused::Address(address_map::TranslateError::Unknown);
    assert_eq!(rings.submit(0, &at(0, RANGES[0].address, 8), 10), Err(refused.into()));
    // A range in the completion of a copy is impossible.
    let number = rings.submit(0, &COPY, 10).unwrap();
    receiver.complete(&Done { range: Some(RANGES[0]), ..Done::of(number, 0) }).unwrap();
    assert_eq!(polled(&mut rings, 0), [(number, Outcome::Lost)]);
}

/// taken = delivered + dropped + outstanding, after every step.
#[test]
fn the_books_of_copies_balance_in_bytes() {
    let (mut rings, mut receiver) = rings();
    describe_all(&mut rings, &mut receiver);
    let counters = rings.counters.clone();
    let balanced = |rings: &CommandRings| {
        let bytes = counters.bytes();
        let flying = rings.rings[0].in_flight.iter().filter(|command| !command.reported);
        let flying = flying.map(|command| match command.what {
            What::Copy(bytes) => bytes,
            What::Describe(_) => 0,
        });
        assert_eq!(bytes.outstanding, flying.sum());
        assert_eq!(bytes.taken, bytes.delivered + bytes.dropped + bytes.outstanding);
    };
    let mut random = 1u64;
    for now_ns in 0..3000u64 {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let choice = random >> 33;
        match choice % 4 {
            0 => drop(rings.submit(0, &COPY, now_ns + choice % 50)),
            1 => drop(rings.submit(0, &at(0, RANGES[1].address - 16, 32), now_ns + choice % 50)),
            2 => {
                if let Some((number, _)) = receiver.command().unwrap() {
                    let status = (choice >> 8) % 3;
                    receiver.complete(&Done::of(number, status as u8)).unwrap();
                }
            }
            _ => drop(polled(&mut rings, now_ns)),
        }
        balanced(&rings);
    }
    let bytes = counters.bytes();
    assert!(bytes.delivered > 500 && bytes.dropped > 500, "{bytes:?}");
    rings.submit(0, &COPY, u64::MAX).unwrap();
    drop(rings);
    let end = counters.bytes();
    assert_eq!((end.outstanding, end.taken), (0, end.delivered + end.dropped));
}
