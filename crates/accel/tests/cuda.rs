//! The `cuda` accelerator without a GPU: its host side with a fake driver that runs blocks as threads
//! (`kernels/fake_driver.cpp`), the test as the engine. The fake driver ends the process where a real one would wait
//! forever. `make test-gpu` tests the kernels on a real GPU.

mod common;
mod fake;

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use accel::cuda::{CudaAccelerator, Ended, Gpu, Options, Service, StagedArray, survey};
use accel::{AccelError, CudaError};
use common::{Engine, Shape, payload};
use engine::commands::Outcome;
use fake::driver;
use mqueue::abi::{MESSAGE_BYTES_MAX, kind, protocol, reason, state, status, stop};
use mqueue::command::{Copy, Direction};
use mqueue::staging::Direction as Way;
use mqueue::staging::Staging as _;

const PATIENCE: Duration = Duration::from_secs(60);

/// Removes a function's name from a library, before it is loaded.
fn hide(library: &Path, function: &[u8]) {
    let mut bytes = fs::read(library).unwrap();
    for at in 0..bytes.len() - function.len() {
        if bytes[at..].starts_with(function) {
            bytes[at] = b'_';
        }
    }
    fs::write(library, bytes).unwrap();
}

fn service(engine: &Engine, image: &str, kernel: &str, params: &[(&str, f64)]) -> Service {
    let params = common::params(params);
    let region = engine.memory.clone();
    let (name, kernel) = (format!("the {kernel}"), format!("{image}:{kernel}"));
    Service { name, region, kernel, file: None, params, threads: None }
}

fn start(behaviour: &str, engine: &Engine, kernel: &str) -> Result<CudaAccelerator, AccelError> {
    let (library, image) = driver(behaviour);
    let gpu = Gpu::open(0, Some(&library))?;
    let options = Options { start_within: Duration::from_secs(20), ..Options::default() };
    gpu.start(&[service(engine, &image, kernel, &[])], options)
}

/// The error of a start that is refused.
fn refusal(behaviour: &str, engine: &Engine, kernel: &str) -> String {
    start(behaviour, engine, kernel).err().expect("it is refused").to_string()
}

fn pop(engine: &mut Engine, mqueue: u32) -> common::Got {
    let begin = Instant::now();
    loop {
        if let Some(got) = engine.pop(mqueue) {
            return got;
        }
        assert!(begin.elapsed() < PATIENCE, "a reply is missing");
        // Blocks that see no heartbeat for seconds consider the engine lost.
        engine.words.set_engine_heartbeat(begin.elapsed().as_nanos() as u64);
        std::thread::sleep(Duration::from_micros(50));
    }
}

fn join(mut accelerator: CudaAccelerator, expected: usize) -> Vec<Ended> {
    assert!(accelerator.join(PATIENCE).unwrap(), "blocks did not end");
    let mut ended = Vec::new();
    accelerator.poll(&mut ended).unwrap();
    accelerator.poll(&mut ended).unwrap();
    assert_eq!(ended.len(), expected, "each end is reported once: {ended:?}");
    ended
}

/// The texts of parameters are copied to the memory of the device with the table.
#[test]
fn texts_reach_kernels_on_a_device() {
    let mut engine = Engine::new(&Shape { blocks: 2, ..Shape::default() });
    let (library, image) = driver("texts");
    let (params, expected) = common::texts();
    let service = Service { params, ..service(&engine, &image, "param_text", &[]) };
    let options = Options { start_within: Duration::from_secs(20), ..Options::default() };
    let accelerator = Gpu::open(0, Some(&library)).unwrap().start(&[service], options).unwrap();
    engine.push(1, 1, b"").unwrap();
    assert_eq!(pop(&mut engine, 1).payload, expected);
    engine.words.set_stop(stop::NOW);
    join(accelerator, 2);
}

/// The copy engines work beside blocks that run, on every service's own stream.
#[test]
fn copies_go_on_while_blocks_run() {
    let shape = Shape { blocks: 4, staging_bytes: 1024, ..Shape::default() };
    let mut engine = Engine::new(&shape);
    let accelerator = start("copies", &engine, "echo").unwrap();
    for n in 0..3u64 {
        engine.copies_work(accel::copy::BUFFER_BYTES as u64);
        engine.push(2, n, b"beside").unwrap();
        assert_eq!(pop(&mut engine, 2).payload, b"beside");
    }
    engine.words.set_stop(stop::NOW);
    join(accelerator, 4);
}

/// A copy that never ends holds nothing up but the copies behind it. What it uses is not released: the driver would end this process.
#[test]
fn a_copy_that_does_not_end_has_failed() {
    let mut engine = Engine::new(&Shape { staging_bytes: 1024, ..Shape::default() });
    let accelerator = start("stuck", &engine, "echo").unwrap();
    let copy = Copy {
        direction: Direction::ToBuffer,
        staging_offset: 0,
        buffer: 0,
        buffer_offset: 0,
        bytes: 64,
    };
    assert_eq!(engine.copy(copy), Outcome::Failed);
    assert_eq!(engine.copy(copy), Outcome::Failed);
    engine.push(0, 1, b"beside").unwrap();
    assert_eq!(pop(&mut engine, 0).payload, b"beside");
    engine.words.set_stop(stop::NOW);
    join(accelerator, 1);
}

#[test]
fn a_copy_agent_that_cannot_start_does_not_stop_its_service() {
    let mut engine = Engine::new(&Shape { staging_bytes: 1024, ..Shape::default() });
    let accelerator = start("agentless", &engine, "echo").unwrap();
    engine.push(0, 1, b"without").unwrap();
    assert_eq!(pop(&mut engine, 0).payload, b"without");
    engine.words.set_stop(stop::NOW);
    join(accelerator, 1);
}

/// An array on the GPU: copies of its slots are in progress together, also while blocks run, and what is written is read again.
#[test]
fn an_array_in_gpu_memory_passes_through_slots() {
    let (library, _) = driver("array");
    let open = || Gpu::open(0, Some(&library)).unwrap();
    let mut array = StagedArray::new(open(), 1000, 3, 256).unwrap();
    let mut engine = Engine::new(&Shape::default());
    let accelerator = start("array", &engine, "echo").unwrap();
    let sent: Vec<u8> = (0..1000).map(|at| (at * 7 % 251) as u8).collect();
    let mut back = vec![0; 1000];
    array.write(&sent).unwrap();
    array.read(&mut back).unwrap();
    assert!(back == sent);
    let ranges = [0..256, 744..1000, 500..600];
    for (slot, range) in ranges.iter().enumerate() {
        array.begin(Way::Out, slot, range.clone()).unwrap();
    }
    for (slot, range) in ranges.into_iter().enumerate() {
        while !array.is_done(slot).unwrap() {}
        assert_eq!(array.slot(slot)[..range.len()], sent[range.clone()]);
        array.slot(slot).fill(slot as u8);
        array.begin(Way::In, slot, range).unwrap();
    }
    let outside = |array: &mut StagedArray, range| {
        catch_unwind(AssertUnwindSafe(|| array.begin(Way::In, 0, range))).is_err()
    };
    assert!(outside(&mut array, 0..8), "its copy is in progress");
    while !(0..3).all(|slot| array.is_done(slot).unwrap()) {}
    assert!(outside(&mut array, 0..257) && outside(&mut array, 1000..1001));
    array.read(&mut back).unwrap();
    for at in 0..1000 {
        let expected = match at {
            0..256 => 0,
            744.. => 1,
            500..600 => 2,
            _ => sent[at],
        };
        assert_eq!(back[at], expected, "{at}");
    }
    engine.push(0, 1, b"beside").unwrap();
    assert_eq!(pop(&mut engine, 0).payload, b"beside");
    engine.words.set_stop(stop::NOW);
    join(accelerator, 1);
    // It is released only now: that would wait for the blocks.
    drop(array);
    let mut empty = StagedArray::new(open(), 0, 3, 256).unwrap();
    empty.write(&[]).unwrap();
    empty.read(&mut []).unwrap();
}

/// The driver ends a process that releases memory of a copy in flight, and one that leaves anything behind otherwise.
#[test]
fn an_array_that_cannot_be_made_leaves_nothing_and_one_that_is_stuck_keeps_its_memory() {
    for (behaviour, said) in [
        ("full-array", "free memory on the GPU"),
        ("unpinned-array", "the host cannot pin"),
        ("agentless-array", "create a stream"),
    ] {
        let (library, _) = driver(behaviour);
        let gpu = Gpu::open(0, Some(&library)).unwrap();
        let error = StagedArray::new(gpu, 1000, 3, 256).err().unwrap().to_string();
        assert!(error.contains(said), "{error}");
    }
    let (library, _) = driver("stuck-array");
    let mut array = StagedArray::new(Gpu::open(0, Some(&library)).unwrap(), 1000, 3, 256).unwrap();
    array.begin(Way::Out, 1, 0..256).unwrap();
    assert!(!array.is_done(1).unwrap() && array.is_done(0).unwrap());
}

#[test]
fn every_message_is_echoed_through_every_protocol() {
    for protocol in [protocol::DOORBELL, protocol::GRANULE8, protocol::GRANULE16] {
        // Small messages: the staging of all blocks is in shared memory.
        let mut engine = Engine::new(&Shape { blocks: 20, protocol, ..Shape::default() });
        let accelerator = start("echo", &engine, "echo").unwrap();
        for n in 0..50u64 {
            for mqueue in 0..20 {
                let sent = payload(mqueue, n, (n as usize * 37) % 257);
                engine.push(mqueue, n, &sent).unwrap();
            }
            for mqueue in 0..20 {
                let got = pop(&mut engine, mqueue);
                assert_eq!(got.token, n);
                assert_eq!(got.payload, payload(mqueue, n, (n as usize * 37) % 257));
            }
        }
        engine.words.set_stop(stop::DRAIN);
        let ended = join(accelerator, 20);
        assert!(ended.iter().all(|end| end.reason == reason::STOPPED), "{ended:?}");
        assert_eq!(engine.words.block(4).state, state::ENDED);
        assert_eq!(engine.words.block(4).sent, 50);
    }
}

#[test]
fn long_messages_and_backends_get_staging_of_their_size() {
    let shape = Shape { blocks: 2, backends: 1, bytes_max: 100_000, ..Shape::default() };
    let mut engine = Engine::new(&shape);
    let accelerator = start("long", &engine, "echo").unwrap();
    for len in [100_000, 1, 1536, 1537] {
        let sent = payload(2, 1, len);
        engine.push(2, 7, &sent).unwrap();
        assert_eq!(pop(&mut engine, 2).payload, sent);
    }
    engine.words.set_stop(stop::NOW);
    join(accelerator, 2);
}

/// A request to the kernel `as_asked`.
fn ask_for(len: u32) -> Vec<u8> {
    [len.to_le_bytes(), [9; 4]].concat()
}

#[test]
fn a_reply_that_is_too_long_is_a_drop_however_long_it_is() {
    let mut engine = Engine::new(&Shape::default());
    let accelerator = start("sink", &engine, "as_asked").unwrap();
    for (n, len) in (0..).zip([257, 1 << 20, 1 << 28, u32::MAX]) {
        engine.push(0, n, &ask_for(len)).unwrap();
        let got = pop(&mut engine, 0);
        assert_eq!((got.token, got.kind, got.status), (n, kind::DROP, status::TOO_LONG), "{len}");
        engine.push(0, n, &ask_for(4)).unwrap();
        assert_eq!(pop(&mut engine, 0).payload, [9; 4]);
    }
    engine.words.set_stop(stop::DRAIN);
    join(accelerator, 1);
}

/// If the driver cannot map memory the sink is a buffer, here large enough for all requests of the test.
#[test]
fn a_driver_that_maps_no_memory_has_a_sink_of_twice_the_longest_message() {
    let mut engine = Engine::new(&Shape::default());
    let accelerator = start("unmapped", &engine, "as_asked").unwrap();
    for len in [257, 2 * MESSAGE_BYTES_MAX - 16] {
        engine.push(0, 1, &ask_for(len)).unwrap();
        assert_eq!(pop(&mut engine, 0).status, status::TOO_LONG);
    }
    engine.words.set_stop(stop::DRAIN);
    join(accelerator, 1);
}

/// `scale` is a kernel of warps: three of them share a block of the grid here, and the last block has a surplus warp.
#[test]
fn blocks_that_are_warps_share_blocks_of_the_grid() {
    let mut engine = Engine::new(&Shape { blocks: 20, ..Shape::default() });
    let accelerator = start("warps", &engine, "scale").unwrap();
    for mqueue in 0..20 {
        engine.push(mqueue, 1, &(mqueue as f32).to_le_bytes()).unwrap();
        assert_eq!(pop(&mut engine, mqueue).payload, (3.0 * mqueue as f32).to_le_bytes());
    }
    engine.words.set_stop(stop::DRAIN);
    join(accelerator, 20);
    let (library, image) = driver("warps");
    let gpu = Gpu::open(0, Some(&library)).unwrap();
    // Beside a service whose blocks have the number of threads set for the accelerator.
    let mut engines = [Engine::new(&Shape::default()), Engine::new(&Shape::default())];
    let services = [(0, "scale"), (1, "echo")].map(|(at, kernel)| Service {
        threads: Some(64),
        ..service(&engines[at], &image, kernel, &[])
    });
    let accelerator = gpu.start(&services, Options::default()).unwrap();
    engines[0].push(0, 1, &2.5f32.to_le_bytes()).unwrap();
    assert_eq!(pop(&mut engines[0], 0).payload, 7.5f32.to_le_bytes());
    for engine in &engines {
        engine.words.set_stop(stop::DRAIN);
    }
    join(accelerator, 2);
}

#[test]
fn a_kernel_of_warps_is_refused_more_backends_than_a_warp_serves() {
    let engine = |backends| Engine::new(&Shape { backends, ..Shape::default() });
    let three = engine(3);
    let sentence = refusal("warp-backends", &three, "scale");
    for part in ["`scale`", "at most 2 backends", "has 3", "SERVAL_KERNEL instead"] {
        assert!(sentence.contains(part), "{part} in: {sentence}");
    }
    assert_eq!(three.words.block(0).state, state::ABSENT, "nothing was started");
    for (backends, kernel) in [(2, "scale"), (3, "echo")] {
        let engine = engine(backends);
        let accelerator = start("warp-backends", &engine, kernel).unwrap();
        engine.words.set_stop(stop::NOW);
        join(accelerator, 1);
    }
}

/// Its code would read the arguments of a launch in another layout.
#[test]
fn a_kernel_of_another_region_abi_is_refused_before_it_is_launched() {
    let engine = Engine::new(&Shape::default());
    for kernel in ["echo", "scale"] {
        let sentence = refusal("alien", &engine, kernel);
        for part in [kernel, "k.fatbin", "another region ABI", "run `serval kernel build` again"] {
            assert!(sentence.contains(part), "{part} in: {sentence}");
        }
    }
    assert_eq!(engine.words.block(0).state, state::ABSENT, "nothing was started");
}

/// A driver without `cuFuncLoad`: kernels are then loaded at their first launch.
#[test]
fn a_driver_that_loads_lazily_is_recognised() {
    let [(library, _), (lazy, image)] = ["loads", "loads-lazily"].map(driver);
    hide(&lazy, b"cuFuncLoad");
    assert!(!Gpu::open(0, Some(&library)).unwrap().found().lazy);
    let gpu = Gpu::open(0, Some(&lazy)).unwrap();
    assert!(gpu.found().lazy);
    let mut engine = Engine::new(&Shape::default());
    let echo = [service(&engine, &image, "echo", &[])];
    let accelerator = gpu.start(&echo, Options::default()).unwrap();
    engine.push(0, 1, b"hello").unwrap();
    assert_eq!(pop(&mut engine, 0).payload, b"hello");
    engine.words.set_stop(stop::DRAIN);
    join(accelerator, 1);
}

#[test]
fn two_services_run_together_with_their_parameters() {
    let (library, image) = driver("two");
    let mut engines = [Engine::new(&Shape::default()), Engine::new(&Shape::default())];
    let delay = [("microseconds", 30_000.0)];
    let services =
        [service(&engines[0], &image, "scale", &[]), service(&engines[1], &image, "delay", &delay)];
    let gpu = Gpu::open(0, Some(&library)).unwrap();
    assert_eq!(gpu.found().capability, (9, 0));
    let accelerator = gpu.start(&services, Options::default()).unwrap();
    engines[0].push(0, 1, &2.5f32.to_le_bytes()).unwrap();
    assert_eq!(pop(&mut engines[0], 0).payload, 7.5f32.to_le_bytes());
    let begin = Instant::now();
    engines[1].push(0, 1, b"hello").unwrap();
    assert_eq!(pop(&mut engines[1], 0).payload, b"hello");
    assert!(begin.elapsed() >= Duration::from_millis(29), "it was given its delay");
    for engine in &engines {
        engine.words.set_stop(stop::DRAIN);
    }
    let mut ended = join(accelerator, 2);
    ended.sort_by_key(|end| end.service);
    assert_eq!((ended[0].service, ended[1].service), (0, 1));
}

#[test]
fn blocks_that_do_not_fit_are_refused_with_the_arithmetic() {
    let engine = Engine::new(&Shape { blocks: 3, ..Shape::default() });
    let sentence = refusal("small", &engine, "echo");
    for part in ["3 blocks of `echo`", "2 multiprocessors", "2 in all", "mqueues or fewer threads"]
    {
        assert!(sentence.contains(part), "{part} in: {sentence}");
    }
    // If a block is a warp, the number of threads is fixed.
    let warps = Engine::new(&Shape { blocks: 17, ..Shape::default() });
    let sentence = refusal("small", &warps, "scale");
    assert!(sentence.contains("17 blocks of `scale`"), "{sentence}");
    assert!(sentence.ends_with("so use fewer mqueues"), "{sentence}");
    assert_eq!(engine.words.block(0).state, state::ABSENT, "nothing was started");
    // Each of two services would fit alone.
    let (library, image) = driver("small");
    let engines = [1, 2].map(|blocks| Engine::new(&Shape { blocks, ..Shape::default() }));
    let services =
        [(0, "scale"), (1, "echo")].map(|(at, kernel)| service(&engines[at], &image, kernel, &[]));
    let started = Gpu::open(0, Some(&library)).unwrap().start(&services, Options::default());
    let sentence = started.err().expect("it is refused").to_string();
    let parts = [
        "1 blocks of `scale` (service `the scale`)",
        "2 blocks of `echo` (service `the echo`)",
        "no more than 2 x (1 - 1/1) = 0.00 multiprocessors, and they may take 2.00",
    ];
    for part in parts {
        assert!(sentence.contains(part), "{part} in: {sentence}");
    }
    let two = Engine::new(&Shape { blocks: 2, ..Shape::default() });
    let accelerator = start("small", &two, "echo").unwrap();
    two.words.set_stop(stop::NOW);
    join(accelerator, 2);
}

#[test]
fn a_gpu_that_cannot_serve_is_refused_in_one_sentence() {
    let engine = Engine::new(&Shape { bytes_max: 20_000, ..Shape::default() });
    let sentence = refusal("full", &engine, "echo");
    assert!(
        sentence.contains("cannot allocate GPU memory: CUDA_ERROR_OUT_OF_MEMORY"),
        "{sentence}"
    );
    let sentence = refusal("unpinned", &engine, "echo");
    for part in ["cannot register the region", "CUDA_ERROR_OUT_OF_MEMORY", "the host", "ulimit -l"]
    {
        assert!(sentence.contains(part), "{part} in: {sentence}");
    }
    let sentence = refusal("taken", &engine, "echo");
    for part in ["has the GPU to itself", "`nvidia-smi -i 0000:65:00.0 -c DEFAULT`"] {
        assert!(sentence.contains(part), "{part} in: {sentence}");
    }
    let sentence = refusal("any", &engine, "nonsense");
    assert!(sentence.contains("no kernel `nonsense`"), "{sentence}");
    let (library, _) = driver("number");
    let error = Gpu::open(3, Some(&library)).err().expect("there is one");
    assert!(matches!(error, CudaError::NoGpu { index: 3, count: 1 }), "{error}");
    let found = survey(Some(&library)).unwrap();
    assert_eq!((found.len(), found[0].name.as_str(), found[0].driver), (1, "fake GPU", (13, 0)));
    assert_eq!(found[0].unfit, None);
    let (library, image) = driver("threads");
    for threads in [0, 31, 48, 512] {
        let mut service = service(&engine, &image, "echo", &[]);
        service.threads = Some(threads);
        let gpu = Gpu::open(0, Some(&library)).unwrap();
        let refused = gpu.start(&[service], Options::default()).err().expect("refused");
        assert!(matches!(refused, AccelError::Range { .. }), "{threads}: {refused}");
    }
}

#[test]
fn blocks_that_never_begin_are_given_up() {
    let (library, image) = driver("silent");
    let engine = Engine::new(&Shape::default());
    let options = Options { start_within: Duration::from_millis(200), ..Options::default() };
    let gpu = Gpu::open(0, Some(&library)).unwrap();
    let started = gpu.start(&[service(&engine, &image, "echo", &[])], options);
    let error = started.err().expect("nothing began").to_string();
    assert!(error.contains("1 of 1 blocks of service `the echo`"), "{error}");
    // One of two services: the other one is not named.
    let (library, image) = driver("tardy");
    let engines = [1, 3].map(|blocks| Engine::new(&Shape { blocks, ..Shape::default() }));
    let services =
        [(0, "scale"), (1, "echo")].map(|(at, kernel)| service(&engines[at], &image, kernel, &[]));
    let options = Options { start_within: Duration::from_secs(3), ..Options::default() };
    let started = Gpu::open(0, Some(&library)).unwrap().start(&services, options);
    let error = started.err().expect("not all began").to_string();
    assert!(error.contains("3 of 3 blocks of service `the echo` (kernel `echo`)"), "{error}");
    assert!(!error.contains("scale"), "{error}");
    engines[0].words.set_stop(stop::NOW);
}

/// A kernel with a SERVAL_BLOCK_THREADS_MAX below the default number of threads.
#[test]
fn a_kernel_of_few_threads_has_no_more_unless_they_are_asked_for() {
    let (library, image) = driver("narrow");
    let engine = Engine::new(&Shape::default());
    let lenet = |threads| Service { threads, ..service(&engine, &image, "lenet", &[]) };
    let start = |threads| {
        Gpu::open(0, Some(&library)).unwrap().start(&[lenet(threads)], Options::default())
    };
    let error = start(Some(128)).err().expect("refused").to_string();
    assert!(error.contains("is 128, must be in [32, 64]"), "{error}");
    let accelerator = start(None).unwrap();
    engine.words.set_stop(stop::NOW);
    join(accelerator, 1);
}

#[test]
fn a_kernel_that_faults_is_reported_and_nothing_waits_for_it() {
    let engine = Engine::new(&Shape::default());
    let mut accelerator = start("faulty", &engine, "echo").unwrap();
    let begin = Instant::now();
    let error = loop {
        if let Err(error) = accelerator.poll(&mut Vec::new()) {
            break error.to_string();
        }
        assert!(begin.elapsed() < PATIENCE, "the fault is not reported");
    };
    assert!(error.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
    assert!(error.contains("compute-sanitizer"), "{error}");
    // The driver would end this process if anything were released now.
    drop(accelerator);
    engine.words.set_stop(stop::NOW);
}

/// For longer than `hung_after`: a block makes slow progress, its neighbour is idle; then its
/// replies are not taken, and more requests wait.
#[test]
fn slow_and_waiting_blocks_do_not_count_as_hung() {
    let (library, image) = driver("slow");
    let depth = 4;
    let mut engine = Engine::new(&Shape { blocks: 2, depth, ..Shape::default() });
    let hung_after = Duration::from_secs(4);
    let options = Options { hung_after, ..Options::default() };
    let spin = [("microseconds", 1_200_000.0)];
    let gpu = Gpu::open(0, Some(&library)).unwrap();
    let mut accelerator = gpu.start(&[service(&engine, &image, "spin", &spin)], options).unwrap();
    let (mut ended, mut beat) = (Vec::new(), 0);
    let words = engine.words.clone();
    let mut watch = |time: Duration| {
        let begin = Instant::now();
        while begin.elapsed() < time {
            // Blocks that see no heartbeat for seconds consider the engine lost.
            beat += 1;
            words.set_engine_heartbeat(beat);
            accelerator.poll(&mut ended).unwrap();
            assert!(ended.is_empty(), "{ended:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    let tokens = 0..u64::from(depth);
    tokens.clone().for_each(|token| engine.push(1, token, b"slow").unwrap());
    watch(hung_after + Duration::from_secs(2));
    // Its replies fill their ring, and there is room for requests again.
    tokens.for_each(|token| engine.push(1, token, b"waits").unwrap());
    watch(hung_after + Duration::from_secs(2));
    let (mut replies, begin) = (0, Instant::now());
    while replies < 2 * depth {
        replies += u32::from(engine.pop(1).is_some());
        watch(Duration::from_millis(20));
        assert!(begin.elapsed() < PATIENCE, "{replies} replies");
    }
    engine.words.set_stop(stop::DRAIN);
    assert_eq!(join(accelerator, 2).iter().filter(|end| end.reason != reason::STOPPED).count(), 0);
}

/// The driver's message when it ends a process that does this, and the exit code: runs this test again as a child.
fn ended_by_the_driver(what: &str) -> (Option<i32>, String) {
    let mut own = Command::new(std::env::current_exe().unwrap());
    own.args(["--exact", "the_driver_ends_a_process_that_breaks_a_rule"]).env("BREAK", what);
    own.env("DRIVER", driver("breaks").0);
    if what == "carveout" {
        // Its blocks exist but never begin.
        own.env("FAKE_GPU", "silent");
    }
    let output = own.output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// The driver of a process that [`ended_by_the_driver`] started, and a file that looks like a fatbin.
fn given_driver() -> (PathBuf, String) {
    let library = PathBuf::from(std::env::var_os("DRIVER").expect("it is given"));
    let image = library.with_file_name("k.fatbin").display().to_string();
    (library, image)
}

/// Every other test relies on that.
#[test]
fn the_driver_ends_a_process_that_breaks_a_rule() {
    match std::env::var("BREAK").as_deref() {
        Ok("nothing") => return,
        Ok("running") => {
            let (library, image) = given_driver();
            let engine = Engine::new(&Shape::default());
            let echo = [service(&engine, &image, "echo", &[])];
            let open = || Gpu::open(0, Some(&library)).unwrap();
            let _running = open().start(&echo, Options::default()).unwrap();
            let _ = open().start(&echo, Options::default());
            return;
        }
        Ok(how) => return launch_by_hand(how),
        Err(_) => {}
    }
    assert_eq!(ended_by_the_driver("nothing").0, Some(0));
    let rules = [
        ("running", "cuMemCreate would wait for a kernel that is running"),
        ("carveout", "cuLaunchKernel came beside a kernel before both preferred"),
        ("copy", "cuLaunchKernel came while a copy was in flight"),
        ("cuMemFree", "cuMemFree came while a copy was in flight"),
        ("cuStreamDestroy", "cuStreamDestroy came while a copy was in flight"),
        ("cuMemHostUnregister", "cuMemHostUnregister came while a copy was in flight"),
    ];
    for (rule, sentence) in rules {
        let (code, said) = ended_by_the_driver(rule);
        assert!(code == Some(70) && said.contains(sentence), "{rule}: {code:?}: {said}");
    }
}

/// Calls the driver as the accelerator does, except for the part that is left out.
fn launch_by_hand(left_out: &str) {
    const CARVEOUT: c_int = 9;
    type Address = u64;
    let (library, _) = given_driver();
    // SAFETY: it runs no code as it is loaded.
    let library = unsafe { libloading::Library::new(library) }.unwrap();
    macro_rules! call {
        ($name:literal ($($argument:expr => $type:ty),*)) => {{
            // SAFETY: `fake_driver.cpp` defines it so, and the arguments are its earlier results.
            let code = unsafe {
                library.get::<unsafe extern "C" fn($($type),*) -> c_int>($name).unwrap()($($argument),*)
            };
            assert_eq!(code, 0, "{left_out}");
        }};
    }
    let (mut module, mut function, mut stream) = (0usize, 0usize, 0usize);
    let (mut arguments, name): (Address, _) = (0, c"serval_kernel_echo");
    call!("cuModuleLoadData"(&mut module => *mut usize, 0 => usize));
    call!("cuModuleGetFunction"(&mut function => *mut usize, module => usize, name.as_ptr() => *const c_char));
    if left_out == "copy" {
        call!("cuFuncSetAttribute"(function => usize, CARVEOUT => c_int, 100 => c_int));
    }
    call!("cuStreamCreate"(&mut stream => *mut usize, 1 => c_uint));
    call!("cuMemAlloc_v2"(&mut arguments => *mut Address, 64 => usize));
    let given = [0u8; 64];
    call!("cuMemcpyHtoDAsync_v2"(
        arguments => Address, given.as_ptr() => *const u8, given.len() => usize, stream => usize));
    match left_out {
        "cuMemFree" => call!("cuMemFree_v2"(arguments => Address)),
        "cuStreamDestroy" => call!("cuStreamDestroy_v2"(stream => usize)),
        "cuMemHostUnregister" => call!("cuMemHostUnregister"(arguments => Address)),
        _ => {}
    }
    let mut first = (&raw mut arguments).cast::<c_void>();
    if left_out == "carveout" {
        call!("cuStreamSynchronize"(stream => usize));
    }
    // The first one is alone.
    for _ in 0..2 {
        call!("cuLaunchKernel"(function => usize, 1 => c_uint, 1 => c_uint, 1 => c_uint, 32 => c_uint, 1 => c_uint,
            1 => c_uint, 0 => c_uint, stream => usize, &mut first => *mut *mut c_void, 0 => usize));
    }
}

fn first_to_end(accelerator: &mut CudaAccelerator) -> Vec<Ended> {
    let (mut ended, begin) = (Vec::new(), Instant::now());
    while ended.is_empty() {
        accelerator.poll(&mut ended).unwrap();
        assert!(begin.elapsed() < PATIENCE, "the hung block is not reported");
        std::thread::sleep(Duration::from_millis(10));
    }
    ended
}

/// The engine takes no request whose answer has no room, so it owes this block nothing.
#[test]
fn a_hung_block_with_requests_that_cannot_be_taken_is_reported() {
    let (library, image) = driver("asks");
    let shape = Shape { blocks: 1, backends: 1, depth: 2, ..Shape::default() };
    let mut engine = Engine::new(&shape);
    let options = Options { hung_after: Duration::from_secs(1), ..Options::default() };
    let computes = [("microseconds", 6_000_000.0)];
    let gpu = Gpu::open(0, Some(&library)).unwrap();
    let service = service(&engine, &image, "asks_and_computes", &computes);
    let mut accelerator = gpu.start(&[service], options).unwrap();
    engine.push(0, 1, b"a").unwrap();
    engine.push(0, 2, b"b").unwrap();
    for _ in 0..2 {
        let question = pop(&mut engine, 1);
        engine.push(1, 0, &question.payload).unwrap();
    }
    let ended = first_to_end(&mut accelerator);
    assert_eq!(ended, [Ended { service: 0, block: 0, reason: reason::HUNG }]);
    engine.words.set_stop(stop::NOW);
    drop(accelerator);
}

#[test]
fn a_block_that_hangs_is_reported_once_and_left_alone() {
    let (library, image) = driver("hang");
    let mut engine = Engine::new(&Shape { blocks: 2, ..Shape::default() });
    let hung_after = Duration::from_millis(300);
    let options = Options { hung_after, ..Options::default() };
    // Long enough that it still hangs at the next check.
    let spin = [("microseconds", 4_000_000.0)];
    let gpu = Gpu::open(0, Some(&library)).unwrap();
    let mut accelerator = gpu.start(&[service(&engine, &image, "spin", &spin)], options).unwrap();
    // One is being computed, the other waits behind it.
    engine.push(1, 1, b"a").unwrap();
    engine.push(1, 2, b"b").unwrap();
    let mut ended = first_to_end(&mut accelerator);
    assert_eq!(ended, [Ended { service: 0, block: 1, reason: reason::HUNG }]);
    // It hangs for as long again, and longer, and is not reported again.
    let told = Instant::now();
    while told.elapsed() < 3 * hung_after {
        accelerator.poll(&mut ended).unwrap();
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(ended.len(), 1, "{ended:?}");
    assert!(!accelerator.join(Duration::from_millis(50)).unwrap());
    drop(accelerator);
    engine.words.set_stop(stop::NOW);
}
