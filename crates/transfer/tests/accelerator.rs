//! Transfers from and to memory that is reached only by copies, which end late, fail or never end.

use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mqueue::staging::{CopyFailed, Direction, Staging};
use proptest::prelude::*;
use transfer::{
    AcceleratorMemory, Cipher, DigestKind, Engine, Key, Limits, Place, Source, StageSpec,
    TransferError,
};

const PATIENCE: Duration = Duration::from_secs(60);

/// What the test sees of the memory while transfers use it.
#[derive(Default)]
struct Device {
    array: Vec<u8>,
    /// Copies in progress now, and the most there have been.
    in_progress: usize,
    together: usize,
    /// Copies end only while it is false.
    hangs: bool,
    /// Nor do those of what lies from here on.
    hangs_from: usize,
    /// Copies that succeed before one fails.
    good: usize,
}

/// Memory whose copies take effect when they are asked for the third time.
struct Late {
    device: Arc<Mutex<Device>>,
    slots: Vec<(Vec<u8>, Option<Started>)>,
}

struct Started {
    direction: Direction,
    range: Range<usize>,
    asked: u32,
}

impl Late {
    fn new(array: Vec<u8>, slot_bytes: usize) -> (Self, Arc<Mutex<Device>>) {
        let (mut lanes, device) = Self::lanes(array, slot_bytes, 1);
        (lanes.remove(0), device)
    }

    fn lanes(array: Vec<u8>, slot_bytes: usize, count: usize) -> (Vec<Self>, Arc<Mutex<Device>>) {
        let device =
            Device { array, good: usize::MAX, hangs_from: usize::MAX, ..Device::default() };
        let device = Arc::new(Mutex::new(device));
        let slots = || (0..2).map(|_| (vec![0; slot_bytes], None)).collect();
        let lane = |_| Self { device: device.clone(), slots: slots() };
        ((0..count).map(lane).collect(), device.clone())
    }
}

impl Staging for Late {
    fn bytes(&self) -> usize {
        self.device.lock().unwrap().array.len()
    }

    fn slot_bytes(&self) -> usize {
        self.slots[0].0.len()
    }

    fn begin(
        &mut self,
        direction: Direction,
        slot: usize,
        range: Range<usize>,
    ) -> Result<(), CopyFailed> {
        let mut device = self.device.lock().unwrap();
        let Some(good) = device.good.checked_sub(1) else {
            return Err(CopyFailed("it is broken".into()));
        };
        assert!(self.slots[slot].1.is_none(), "a copy of the slot is in progress");
        assert!(
            !range.is_empty()
                && range.end <= device.array.len()
                && range.len() <= self.slots[slot].0.len()
        );
        device.good = good;
        device.in_progress += 1;
        device.together = device.together.max(device.in_progress);
        self.slots[slot].1 = Some(Started { direction, range, asked: 0 });
        Ok(())
    }

    fn is_done(&mut self, slot: usize) -> Result<bool, CopyFailed> {
        let mut device = self.device.lock().unwrap();
        let (memory, copy) = &mut self.slots[slot];
        let Some(Started { direction, range, asked }) = copy else { return Ok(true) };
        *asked += 1;
        if *asked < 3 || device.hangs || range.start >= device.hangs_from {
            return Ok(false);
        }
        let near = &mut memory[..range.len()];
        match direction {
            Direction::In => device.array[range.clone()].copy_from_slice(near),
            Direction::Out => near.copy_from_slice(&device.array[range.clone()]),
        }
        device.in_progress -= 1;
        *copy = None;
        Ok(true)
    }

    fn slot(&mut self, slot: usize) -> &mut [u8] {
        assert!(self.slots[slot].1.is_none(), "a copy of the slot is in progress");
        &mut self.slots[slot].0
    }
}

fn content(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes).map(|at| ((at as u64 * 0x9e37_79b9) >> 11) as u8 ^ seed).collect()
}

fn file_of(bytes: &[u8]) -> File {
    let mut file = empty();
    file.write_all(bytes).unwrap();
    file
}

fn empty() -> File {
    let path = std::env::temp_dir().join(format!(
        "serval-accelerator-{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    ));
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    file
}

fn engine() -> Engine {
    Engine::start(Limits::default()).unwrap()
}

fn read_all(mut file: &File) -> Vec<u8> {
    let mut bytes = Vec::new();
    file.rewind().unwrap();
    file.read_to_end(&mut bytes).unwrap();
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// A file goes to the memory, and from there to another file, with slots of any size and any ranges.
    #[test]
    fn what_goes_in_comes_out(
        bytes in 0..1_500_000_usize,
        slot_bytes in prop::sample::select(vec![4096, 65_520, 100_000, 524_288, 1 << 20]),
        before in 0..5000_usize,
        after in 0..5000_usize,
    ) {
        let plain = content(bytes, 1);
        let (late, device) = Late::new(vec![0xee; before + bytes + after], slot_bytes);
        let memory = AcceleratorMemory::new(late);
        let engine = engine();
        let into = Source::file(file_of(&plain), 0, None).digest(DigestKind::Crc32c);
        let outcome = engine.submit(into.accelerator(memory.clone(), before as u64)).unwrap().wait();
        prop_assert_eq!(outcome.result, Ok(()));
        prop_assert_eq!(outcome.report.written, bytes as u64);
        prop_assert!(!memory.is_busy());
        {
            let device = device.lock().unwrap();
            prop_assert_eq!(device.in_progress, 0);
            prop_assert!(device.array[before..before + bytes] == plain[..]);
            let around = device.array[..before].iter().chain(&device.array[before + bytes..]);
            prop_assert!(around.copied().all(|byte| byte == 0xee));
        }
        let sink = empty();
        let from = Source::accelerator(memory, before as u64, Some(bytes as u64));
        let back = from.digest(DigestKind::Crc32c).file(sink.try_clone().unwrap(), 0);
        let back = engine.submit(back).unwrap().wait();
        prop_assert_eq!(back.result, Ok(()));
        prop_assert_eq!(back.report.digest(), outcome.report.digest());
        prop_assert!(read_all(&sink) == plain);
        // A copy is in progress while the part before it goes on.
        if bytes > 2 * slot_bytes {
            prop_assert_eq!(device.lock().unwrap().together, 2);
        }
    }
}

#[test]
fn a_long_plain_transfer_uses_lanes_at_the_same_time() {
    let bytes = 9_500_003;
    let plain = content(bytes, 3);
    let (lanes, device) = Late::lanes(vec![0; bytes + 10], 1 << 18, 3);
    let memory = AcceleratorMemory::with_lanes(lanes);
    assert_eq!(memory.lanes(), 3);
    let engine = engine();
    let into = Source::file(file_of(&plain), 0, None).accelerator(memory.clone(), 10);
    let into = engine.submit(into).unwrap();
    let outcome = into.wait_for(PATIENCE).unwrap();
    assert_eq!((outcome.result, outcome.report.written), (Ok(()), bytes as u64));
    assert_eq!(into.progress().written(), bytes as u64);
    assert!(device.lock().unwrap().array[10..] == plain);
    assert!(!memory.is_busy());
    let sink = empty();
    let from = Source::accelerator(memory, 10, None).file(sink.try_clone().unwrap(), 7);
    assert_eq!(engine.submit(from).unwrap().wait().result, Ok(()));
    assert!(read_all(&sink)[7..] == plain);
    let counters = engine.counters();
    let counted = (counters.started(), counters.succeeded(), counters.written());
    assert_eq!(counted, (2, 2, 2 * bytes as u64), "parts are not transfers");
    assert_eq!(engine.in_flight(), 0);
}

#[test]
fn large_slots_are_filled_and_several_threads_get_them() {
    use transfer::command::accelerator::{SLOT_BYTES, good_slot_bytes};
    use transfer::command::limits::MOVED_MAX;
    assert_eq!([1, 2].map(|lanes| good_slot_bytes(1 << 30, lanes)), [SLOT_BYTES; 2]);
    assert_eq!([4, 8].map(|lanes| good_slot_bytes(1 << 30, lanes)), [MOVED_MAX; 2]);
    assert_eq!(good_slot_bytes(8 << 20, 8), SLOT_BYTES);
    assert_eq!(good_slot_bytes(64 << 20, 8), 1 << 20);
    let plain = content(3 * MOVED_MAX, 5);
    let (memory, device) = Late::new(vec![0; plain.len()], 2 << 20);
    let memory = AcceleratorMemory::new(memory);
    let engine = engine();
    let good = device.lock().unwrap().good;
    let into = Source::file(file_of(&plain), 0, None).accelerator(memory.clone(), 0);
    assert_eq!(engine.submit(into).unwrap().wait().result, Ok(()));
    assert!(device.lock().unwrap().array == plain);
    // A copy for each slot that was full.
    assert_eq!(good - device.lock().unwrap().good, 6);
    let sink = empty();
    let from = Source::accelerator(memory, 0, None).file(sink.try_clone().unwrap(), 0);
    assert_eq!(engine.submit(from).unwrap().wait().result, Ok(()));
    assert!(read_all(&sink) == plain);
    assert_eq!(good - device.lock().unwrap().good, 12);
}

#[test]
fn a_part_that_fails_ends_the_others_and_a_cancelled_whole_ends_once() {
    let bytes = 40 << 20;
    let file = file_of(&content(bytes, 4));
    let start = |engine: &Engine| {
        let (lanes, device) = Late::lanes(vec![0; bytes], 1 << 18, 2);
        let memory = AcceleratorMemory::with_lanes(lanes);
        let source = Source::file(file.try_clone().unwrap(), 0, None);
        device.lock().unwrap().hangs = true;
        (engine.submit(source.accelerator(memory.clone(), 0)).unwrap(), memory, device)
    };
    let engine = engine();
    let (fails, memory, device) = start(&engine);
    device.lock().unwrap().good = 20;
    device.lock().unwrap().hangs = false;
    let outcome = fails.wait();
    assert_eq!(outcome.result, Err(TransferError::CopyFailed("it is broken".into())));
    // Copies of what was counted may not have ended.
    let deadline = Instant::now() + PATIENCE;
    while memory.is_busy() {
        assert!(Instant::now() < deadline, "its copies have ended");
        std::thread::yield_now();
    }
    let array = device.lock().unwrap().array.clone();
    let written = outcome.report.written as usize;
    assert!(written < bytes && array[..written] == content(bytes, 4)[..written]);

    let (cancelled, memory, device) = start(&engine);
    assert_eq!(engine.in_flight(), 1);
    cancelled.cancel();
    device.lock().unwrap().hangs = false;
    assert_eq!(cancelled.wait().result, Err(TransferError::Cancelled));
    let deadline = Instant::now() + PATIENCE;
    while memory.is_busy() || engine.in_flight() > 0 {
        assert!(Instant::now() < deadline, "it has ended");
        std::thread::yield_now();
    }
    let failed: Vec<_> = engine.counters().failed().filter(|(_, count)| *count > 0).collect();
    assert_eq!(failed, [("cancelled", 1), ("copy_failed", 1)]);
}

#[test]
fn a_part_that_hangs_ends_when_its_time_is_over_also_after_the_first_one() {
    let bytes = 9 << 20;
    let (lanes, device) = Late::lanes(vec![0; bytes], 1 << 18, 2);
    let memory = AcceleratorMemory::with_lanes(lanes);
    // The second part's copies do not end.
    device.lock().unwrap().hangs_from = bytes / 2 + (1 << 20);
    let engine = engine();
    let source = Source::file(file_of(&content(bytes, 5)), 0, None);
    let command = source.accelerator(memory, 0).stall(Duration::from_secs(2));
    let outcome = engine.submit(command).unwrap().wait_for(PATIENCE).expect("it ends");
    // One step reads the file and starts the copy.
    assert!(matches!(outcome.result, Err(TransferError::FileStalled(2000))), "{outcome:?}");
    device.lock().unwrap().hangs_from = usize::MAX;
}

#[test]
fn sealed_out_of_one_memory_and_opened_into_another() {
    let plain = content(3_000_001, 2);
    let (from, _) = Late::new(plain.clone(), 1 << 19);
    let (to, opened) = Late::new(vec![0; plain.len()], 1 << 19);
    let engine = engine();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let key = || Key::new([7; 32]);
    let sealed = Source::accelerator(AcceleratorMemory::new(from), 0, None).seal(key());
    let sent = engine.submit(sealed.socket(ours)).unwrap();
    let open = Source::socket(theirs, None).open(key()).digest(DigestKind::Sha256);
    let received = engine.submit(open.accelerator(AcceleratorMemory::new(to), 0)).unwrap();
    assert_eq!(sent.wait().result, Ok(()));
    let outcome = received.wait();
    assert_eq!((outcome.result, outcome.report.written), (Ok(()), plain.len() as u64));
    assert!(opened.lock().unwrap().array == plain);
}

#[test]
fn ranges_outside_of_the_memory_are_refused_and_a_stream_that_is_too_long_ends() {
    let engine = engine();
    let memory = AcceleratorMemory::new(Late::new(vec![0; 1000], 4096).0);
    let refused = |command| engine.submit(command).err().unwrap();
    let out = |from, bytes| Source::accelerator(memory.clone(), from, bytes).file(empty(), 0);
    for (from, bytes) in [(0, Some(1001)), (1, Some(1000)), (1001, None), (u64::MAX, Some(1))] {
        let error = refused(out(from, bytes));
        assert!(
            matches!(error, TransferError::OutsideMemory(1000) | TransferError::Range),
            "{error}"
        );
    }
    let file = || file_of(&content(600, 3));
    let into = |at| Source::file(file(), 0, None).accelerator(memory.clone(), at);
    assert_eq!(refused(into(401)), TransferError::OutsideMemory(1000));
    assert_eq!(refused(into(401)).name(), "outside_memory");
    assert!(!memory.is_busy(), "what was refused does not use it");
    assert_eq!(engine.submit(into(400)).unwrap().wait().result, Ok(()));

    let (mut ours, theirs) = UnixStream::pair().unwrap();
    ours.write_all(&content(1500, 4)).unwrap();
    drop(ours);
    let long = engine.submit(Source::socket(theirs, None).accelerator(memory.clone(), 0)).unwrap();
    let outcome = long.wait();
    assert_eq!(outcome.result, Err(TransferError::OutsideMemory(1000)));
    assert_eq!(outcome.report.written, 1000);
}

#[test]
fn one_transfer_at_a_time_uses_a_memory_also_while_a_copy_of_a_cancelled_one_is_in_progress() {
    let engine = engine();
    let (late, device) = Late::new(vec![0; 1 << 20], 1 << 18);
    let memory = AcceleratorMemory::new(late);
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let first = engine.submit(Source::socket(theirs, None).accelerator(memory.clone(), 0)).unwrap();
    let second =
        || Source::file(file_of(&content(1 << 20, 6)), 0, None).accelerator(memory.clone(), 0);
    assert_eq!(engine.submit(second()).err(), Some(TransferError::Busy));
    device.lock().unwrap().hangs = true;
    ours.write_all(&content(1000, 5)).unwrap();
    let deadline = Instant::now() + PATIENCE;
    while device.lock().unwrap().in_progress == 0 {
        assert!(Instant::now() < deadline, "nothing was copied");
        std::thread::yield_now();
    }
    first.cancel();
    assert_eq!(first.wait().result, Err(TransferError::Cancelled));
    assert!(memory.is_busy(), "its copy has not ended");
    assert_eq!(engine.submit(second()).err(), Some(TransferError::Busy));
    device.lock().unwrap().hangs = false;
    while memory.is_busy() {
        assert!(Instant::now() < deadline, "the copy has ended");
        std::thread::yield_now();
    }
    assert_eq!(engine.submit(second()).unwrap().wait().result, Ok(()));
    assert!(device.lock().unwrap().array == content(1 << 20, 6));
}

#[test]
fn an_accelerator_that_fails_ends_its_transfer_with_the_reason() {
    for into in [true, false] {
        let (late, device) = Late::new(content(1 << 20, 8), 1 << 16);
        device.lock().unwrap().good = 5;
        let memory = AcceleratorMemory::new(late);
        let engine = engine();
        let command = if into {
            Source::file(file_of(&content(1 << 20, 9)), 0, None).accelerator(memory, 0)
        } else {
            Source::accelerator(memory, 0, None).file(empty(), 0)
        };
        let outcome = engine.submit(command).unwrap().wait();
        assert_eq!(outcome.result, Err(TransferError::CopyFailed("it is broken".into())));
        assert!(outcome.report.written <= 5 << 16, "{}", outcome.report.written);
        assert_eq!(
            engine.counters().failed().find(|(_, count)| *count > 0),
            Some(("copy_failed", 1))
        );
    }
}

#[test]
fn an_accelerator_that_hangs_delays_no_other_transfer() {
    let engine = engine();
    let (late, device) = Late::new(content(1 << 20, 8), 1 << 16);
    device.lock().unwrap().hangs = true;
    let hangs = Source::accelerator(AcceleratorMemory::new(late), 0, None).file(empty(), 0);
    let hangs = engine.submit(hangs.stall(Duration::from_secs(2))).unwrap();
    // Over files, a socket and another accelerator, while the first one hangs.
    let sink = empty();
    let other =
        Source::file(file_of(&content(100_000, 1)), 0, None).file(sink.try_clone().unwrap(), 0);
    assert_eq!(engine.submit(other).unwrap().wait().result, Ok(()));
    assert!(read_all(&sink) == content(100_000, 1));
    let memory = AcceleratorMemory::new(Late::new(vec![0; 100_000], 4096).0);
    let other = Source::file(file_of(&content(100_000, 2)), 0, None).accelerator(memory, 0);
    assert_eq!(engine.submit(other).unwrap().wait().result, Ok(()));
    let outcome = hangs.wait();
    let Err(TransferError::CopyFailed(why)) = outcome.result else { panic!("{outcome:?}") };
    assert!(why.contains("did not answer"), "{why}");
}

#[test]
fn a_command_for_another_process_names_no_accelerator() {
    let stages = vec![StageSpec::Seal(Cipher::Aes256Gcm, Key::new([1; 32]))];
    let memory = AcceleratorMemory::new(Late::new(vec![0; 10], 64).0);
    let command = transfer::Command::new(
        Place::Accelerator(memory, 0),
        None,
        stages,
        Place::File(empty().into(), 0),
    );
    let directory = std::env::temp_dir().join(format!("serval-accelerator-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let path = directory.join("engine");
    let listener = sys::local::LocalListener::bind(&path).unwrap();
    let _service = transfer::Service::start(listener, transfer::ServiceLimits::default()).unwrap();
    let error = transfer::Client::connect(&path).unwrap().submit(command).err().unwrap();
    assert!(matches!(error, transfer::ClientError::Accelerator), "{error}");
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn lanes_whose_buffers_do_not_fit_the_memory_of_a_tenant_become_one() {
    const LANES: usize = 40;
    let limits = Limits { threads: LANES as u32, memory_mib: 64, ..Limits::default() };
    let engine = Engine::start(limits).unwrap();
    let bytes = content(LANES * (4 << 20), 5);
    let (lanes, device) = Late::lanes(vec![0; bytes.len()], 512 << 10, LANES);
    let memory = AcceleratorMemory::with_lanes(lanes);
    let (ended, outcome) = std::sync::mpsc::channel();
    let copy = Source::file(file_of(&bytes), 0, None).accelerator(memory, 0);
    let done = move |outcome| ended.send(outcome).unwrap();
    // A tenant gets half of the memory, and each lane needs 1 MiB.
    engine.submit_for(&engine.tenant("one"), copy, done).unwrap();
    assert_eq!(outcome.recv_timeout(PATIENCE).unwrap().result, Ok(()));
    assert!(device.lock().unwrap().array == bytes);
}
