//! Links whose other side is authenticated and hostile: each breach ends that link with its reason, on both sides.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use mqueue::abi::{kind, reason, stop};
use mqueue::{
    Consumer, Head, MappedMemory, MqueuePlan, Producer, Region, RegionPlan, RingPlan, Words,
};
use remote::{Control, Ends, Greeted, Greeter, Mirror, Secret, Side, connect};
use runtime::far::{self, Terms};
use runtime::{Device, End, Failure, HostDevice, Job, kinds};
use sys::readiness::{WakeFd, wait_readable};
use sys::{RegionOptions, SharedMemory};
use wire::attach::{Bye, FromEngine, FromRuntime, Offer, Ready};
use wire::link::{DIGEST_BYTES, Frame, MessageHead, MqueueShape, RingShape, Shape};

const PATIENCE: Duration = Duration::from_secs(30);
const SECRET: &str = "a secret of the tests, of at least 32 bytes";
const DEPTH: u32 = 8;
const LONGEST: u32 = 4096;

fn secret_file(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("serval-remote-{}-{name}", std::process::id()));
    fs::write(&path, SECRET).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path
}

/// A region of two blocks like that of [`shape`], and its engine.
struct Rings {
    region: Region<MappedMemory>,
    memory: Arc<SharedMemory>,
}

impl Rings {
    fn new() -> Self {
        let ring = RingPlan { protocol: 1, message_bytes_max: LONGEST, arena_bytes: 4 * 4096 };
        let mqueue = MqueuePlan { depth: DEPTH, rx: ring, tx: ring };
        let plan = RegionPlan::of_blocks(2, &[mqueue], 7);
        let bytes = plan.bytes().unwrap() as usize;
        let memory = SharedMemory::create("remote-test", bytes, &RegionOptions::default());
        let memory = Arc::new(memory.unwrap());
        let region = Region::format(MappedMemory::new(memory.clone()), &plan).unwrap();
        Self { region, memory }
    }

    fn accelerator_ends(&mut self) -> Vec<Ends> {
        let ends = |mqueue| {
            let (source, sink) = self.region.accelerator_ends(mqueue);
            Ends { source, sink, depth: DEPTH, arena_bytes: 4 * 4096 }
        };
        (0..2).map(ends).collect()
    }

    fn engine_ends(&mut self) -> Vec<(Producer<MappedMemory>, Consumer<MappedMemory>)> {
        (0..2).map(|mqueue| self.region.engine_ends(mqueue)).collect()
    }

    fn job(&self) -> Job {
        Job {
            memory: self.memory.clone(),
            words: self.region.words(),
            wake_fd: Arc::new(WakeFd::new().unwrap()),
            blocks: 2,
            service: "s".to_owned(),
            accelerator: "a".to_owned(),
            kernel: "echo".to_owned(),
            file: None,
            file_is_tried: false,
            params: Vec::new(),
            generation: 7,
            heartbeat: Duration::from_secs(10),
        }
    }
}

/// Turns a mirror until `found` says so.
fn turn_until(
    mirror: &mut Mirror,
    mut found: impl FnMut(Control<'_>) -> bool,
) -> Result<(), remote::Broken> {
    let deadline = Instant::now() + PATIENCE;
    let mut over = false;
    while !over {
        assert!(Instant::now() < deadline, "nothing arrives");
        let turned = mirror.turn(Instant::now(), &mut |control| {
            over |= found(control);
            Ok(())
        });
        if !over {
            turned?;
            wait_readable(&[mirror.as_fd()], Some(Duration::from_millis(5)));
        }
    }
    Ok(())
}

/// Sets a flag however the scope ends, so that threads that wait for it end.
struct SetAtEnd<'a>(&'a AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The accelerator's side in threads of this process, until `play` returns.
fn with_far(terms: &Terms<'_>, play: impl FnOnce(&str)) {
    let greeter = Greeter::bind("tcp://127.0.0.1:0", Secret::of(SECRET.as_bytes())).unwrap();
    let address = format!("tcp://{}", greeter.local_address().unwrap());
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let listening = scope.spawn(|| far::listen(greeter, terms, &over));
        let over = SetAtEnd(&over);
        play(&address);
        drop(over);
        assert_eq!(listening.join().unwrap().unwrap(), End::Stopped);
    });
}

fn link(address: &str) -> Mirror {
    let secret = Secret::of(SECRET.as_bytes());
    Mirror::new(connect(address, &secret, PATIENCE).unwrap(), Side::Engine)
}

fn offer() -> Offer {
    Offer {
        generation: 7,
        region_bytes: 1 << 20,
        blocks: 2,
        heartbeat_ms: 10_000,
        service: "s".to_owned(),
        accelerator: "a".to_owned(),
        kernel: "echo".to_owned(),
        params: Vec::new(),
    }
}

fn shape() -> Shape {
    let ring = RingShape { protocol: 1, message_bytes_max: LONGEST, arena_bytes: 4 * 4096 };
    Shape { blocks: 2, mqueues: vec![MqueueShape { depth: DEPTH, rings: [ring; 2] }] }
}

fn send_offer(mirror: &mut Mirror, offer: &Offer, shape: &Shape) {
    mirror.send(&Frame::Attach(&FromEngine::Offer(offer.clone()).encode()));
    mirror.send(&Frame::Shape(shape.clone()));
}

/// The runtime's next message; `None`: it closed the connection without one.
fn heard(mirror: &mut Mirror) -> Option<FromRuntime> {
    let mut said = None;
    let turned = turn_until(mirror, |control| match control {
        Control::Attach(bytes) => {
            said = Some(FromRuntime::decode(bytes).unwrap());
            true
        }
        _ => false,
    });
    turned.ok().and(said)
}

fn bye(mirror: &mut Mirror) -> Bye {
    match heard(mirror) {
        Some(FromRuntime::Bye(bye)) => bye,
        other => panic!("{other:?}"),
    }
}

fn host() -> Result<Box<dyn Device>, String> {
    Ok(Box::new(HostDevice::new(1, Vec::new())))
}

fn terms(kernels: &[&str]) -> Terms<'static> {
    let kernels = kernels.iter().map(|kernel| (*kernel).to_owned()).collect();
    Terms { kernels, device: &host, exclusive: false, once: false, hang: PATIENCE }
}

/// What an offer has instead of what is right.
type Change = fn(&mut Offer, &mut Shape);

#[test]
fn offers_that_cannot_be_are_refused_in_one_sentence() {
    let cases: [(&str, Change); 10] = [
        ("no kernel `quantum` is built in", |offer, _| offer.kernel = "quantum".to_owned()),
        ("with --kernel FILE", |offer, _| offer.kernel = "/tmp/k.so".to_owned()),
        ("differ", |offer, _| offer.blocks = 3),
        ("block_count", |offer, shape| (offer.blocks, shape.blocks) = (0, 0)),
        ("block_count", |offer, shape| (offer.blocks, shape.blocks) = (u32::MAX, u32::MAX)),
        ("power of two", |_, shape| shape.mqueues[0].depth = 3),
        ("protocol", |_, shape| shape.mqueues[0].rings[1].protocol = 9),
        ("arena", |_, shape| shape.mqueues[0].rings[0].arena_bytes = u64::MAX),
        ("arena", |_, shape| shape.mqueues[0].rings[1].arena_bytes = 8),
        ("more than the 1024 MiB", |offer, shape| {
            (offer.blocks, shape.blocks) = (64, 64);
            shape.mqueues[0].rings[0].message_bytes_max = 8 << 20;
            shape.mqueues[0].rings[0].arena_bytes = 64 << 20;
        }),
    ];
    with_far(&terms(&[]), |address| {
        for (why, change) in cases {
            let (mut offer, mut shape) = (offer(), shape());
            change(&mut offer, &mut shape);
            let mut mirror = link(address);
            send_offer(&mut mirror, &offer, &shape);
            let Bye { reason, text } = bye(&mut mirror);
            assert!(reason == reason::REFUSED && text.contains(why), "{why}: {text}");
        }
        // Nothing but an offer may come first.
        let mut mirror = link(address);
        mirror.send(&Frame::Message(MessageHead::default(), b"x"));
        assert!(bye(&mut mirror).text.contains("mqueue 0"));
        let mut mirror = link(address);
        mirror.send(&Frame::Attach(b"no message of the attach protocol"));
        assert_eq!(bye(&mut mirror).reason, reason::REFUSED);
    });
    with_far(&terms(&["scale"]), |address| {
        let mut mirror = link(address);
        send_offer(&mut mirror, &offer(), &shape());
        assert!(bye(&mut mirror).text.contains("runs the kernel \"scale\""));
    });
}

/// The kernels that a [`Loading`] was to run, with the contents of their files.
type Ran = Arc<Mutex<Vec<(String, Vec<u8>)>>>;

/// A device that records its kernel.
struct Loading(Ran);

impl Device for Loading {
    fn kind(&self) -> &str {
        "loading"
    }

    fn start(&mut self, jobs: &[Job]) -> Result<(), Failure> {
        let [job] = jobs else { panic!("{} jobs", jobs.len()) };
        let copy = job.file.as_ref().expect("a copy of the file");
        assert!(!job.file_is_tried, "a crash of its constructors would end all links");
        self.0.lock().unwrap().push((job.kernel.clone(), copy.bytes().to_vec()));
        Ok(())
    }

    fn health(&mut self) -> Result<(), Failure> {
        Ok(())
    }

    fn ended(&mut self) -> bool {
        true
    }

    fn stop(&mut self, _: Duration) -> Result<(), Failure> {
        Ok(())
    }
}

/// The file is replaced after its digest was compared and before the device loads it.
#[test]
fn the_bytes_that_were_digested_are_those_that_run() {
    let path = std::env::temp_dir().join(format!("serval-remote-{}-kernel.so", std::process::id()));
    fs::write(&path, "the kernel of both machines").unwrap();
    let ran = Ran::default();
    let device = || {
        fs::write(&path, "another kernel").unwrap();
        Ok(Box::new(Loading(ran.clone())) as Box<dyn Device>)
    };
    let own = path.to_str().unwrap().to_owned();
    let kernels = vec![own.clone()];
    let terms = Terms { kernels, device: &device, exclusive: false, once: false, hang: PATIENCE };
    with_far(&terms, |address| {
        let offer = Offer { kernel: "/elsewhere/kernel.so".to_owned(), ..offer() };
        let digest = remote::digest_of(b"the kernel of both machines");
        let mut mirror = link(address);
        mirror.send(&Frame::Kernel(digest));
        send_offer(&mut mirror, &offer, &shape());
        assert!(matches!(heard(&mut mirror), Some(FromRuntime::Ready(_))));
        // The next link compares the file of now.
        let mut mirror = link(address);
        mirror.send(&Frame::Kernel(digest));
        send_offer(&mut mirror, &offer, &shape());
        assert!(bye(&mut mirror).text.contains("copy the file of one machine"));
        // None without a digest.
        let mut mirror = link(address);
        send_offer(&mut mirror, &offer, &shape());
        assert!(bye(&mut mirror).text.contains("no digest"));
    });
    assert_eq!(*ran.lock().unwrap(), [(own, b"the kernel of both machines".to_vec())]);
    fs::remove_file(path).unwrap();
}

/// A device whose block works on a message for as long as it may.
struct Busy<'a> {
    stopped: &'a AtomicBool,
}

impl Device for Busy<'_> {
    fn kind(&self) -> &str {
        "busy"
    }

    fn start(&mut self, _: &[Job]) -> Result<(), Failure> {
        Ok(())
    }

    fn health(&mut self) -> Result<(), Failure> {
        Ok(())
    }

    fn ended(&mut self) -> bool {
        false
    }

    fn stop(&mut self, timeout: Duration) -> Result<(), Failure> {
        self.stopped.store(true, Ordering::Relaxed);
        let hung = Failure { reason: reason::HUNG, text: "a block hangs".to_owned() };
        if timeout < PATIENCE { Err(hung) } else { Ok(()) }
    }
}

#[test]
fn a_link_that_breaks_while_a_block_works_ends_no_other_link() {
    static STOPPED: AtomicBool = AtomicBool::new(false);
    static FIRST: AtomicBool = AtomicBool::new(true);
    let device = || match FIRST.swap(false, Ordering::Relaxed) {
        true => Ok(Box::new(Busy { stopped: &STOPPED }) as Box<dyn Device>),
        false => host(),
    };
    let kernels = Vec::new();
    let terms = Terms { kernels, device: &device, exclusive: false, once: false, hang: PATIENCE };
    with_far(&terms, |address| {
        let mut busy = link(address);
        send_offer(&mut busy, &offer(), &shape());
        assert!(matches!(heard(&mut busy), Some(FromRuntime::Ready(_))));
        drop(busy);
        let deadline = Instant::now() + PATIENCE;
        while !STOPPED.load(Ordering::Relaxed) {
            assert!(Instant::now() < deadline, "its blocks are not stopped");
            thread::sleep(Duration::from_millis(1));
        }
        let mut other = link(address);
        send_offer(&mut other, &offer(), &shape());
        assert!(matches!(heard(&mut other), Some(FromRuntime::Ready(_))));
    });
}

/// A device whose blocks see the heartbeat of an engine often.
struct Watching<'a> {
    seen: &'a AtomicU64,
    last: u64,
    job: Option<Words<MappedMemory>>,
}

impl Device for Watching<'_> {
    fn kind(&self) -> &str {
        "watching"
    }

    fn start(&mut self, jobs: &[Job]) -> Result<(), Failure> {
        self.job = Some(jobs[0].words.clone());
        Ok(())
    }

    fn health(&mut self) -> Result<(), Failure> {
        let beat = self.job.as_ref().expect("it was started").engine_heartbeat();
        if beat != self.last {
            self.last = beat;
            self.seen.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    fn ended(&mut self) -> bool {
        false
    }

    fn stop(&mut self, _: Duration) -> Result<(), Failure> {
        Ok(())
    }
}

#[test]
fn blocks_see_heartbeats_as_long_as_the_link_lives_though_the_engine_sends_none() {
    static SEEN: AtomicU64 = AtomicU64::new(0);
    let device = || Ok(Box::new(Watching { seen: &SEEN, last: 0, job: None }) as Box<dyn Device>);
    let kernels = Vec::new();
    let terms = Terms { kernels, device: &device, exclusive: false, once: false, hang: PATIENCE };
    with_far(&terms, |address| {
        let mut mirror = link(address);
        // Longer than blocks wait for a heartbeat, and than this test takes.
        send_offer(&mut mirror, &Offer { heartbeat_ms: 600_000, ..offer() }, &shape());
        assert!(matches!(heard(&mut mirror), Some(FromRuntime::Ready(_))));
        let deadline = Instant::now() + PATIENCE;
        while SEEN.load(Ordering::Relaxed) < 4 {
            assert!(Instant::now() < deadline, "the blocks would take the engine for lost");
            thread::sleep(Duration::from_millis(5));
        }
    });
}

#[test]
fn an_engine_that_breaks_the_protocol_ends_only_its_link() {
    let head = |mqueue, kind| MessageHead { mqueue, token: 1, tag: 0, kind, status: 0 };
    let long = vec![0; LONGEST as usize + 1];
    let message = Frame::Message(head(1, kind::MESSAGE), b"x");
    let flood: Vec<Frame<'_>> = vec![message.clone(); 100_000];
    let cases: [(&str, &[Frame<'_>]); 10] = [
        ("mqueue 2", &[Frame::Message(head(2, kind::MESSAGE), b"x")]),
        ("too long", &[Frame::Message(head(0, kind::MESSAGE), &long)]),
        ("unknown kind", &[Frame::Message(head(0, kind::DROP), b"x")]),
        ("unknown kind", &[Frame::Message(head(0, 0), b"x")]),
        ("never got", &[message.clone(), Frame::Released(1, 2)]),
        ("mqueue 9", &[Frame::Released(9, 0)]),
        ("the stop word 9", &[Frame::Stop(9)]),
        ("a second shape", &[Frame::Shape(shape())]),
        ("the digest of a kernel", &[Frame::Kernel([0; DIGEST_BYTES])]),
        // The replies' slots are never released, so the blocks cannot go on.
        ("without a free slot", &flood),
    ];
    with_far(&terms(&[]), |address| {
        let mut good = link(address);
        send_offer(&mut good, &offer(), &shape());
        assert!(matches!(heard(&mut good), Some(FromRuntime::Ready(_))));
        for (why, frames) in cases {
            let mut mirror = link(address);
            send_offer(&mut mirror, &offer(), &shape());
            assert_eq!(
                heard(&mut mirror),
                Some(FromRuntime::Ready(Ready { generation: 7, blocks: 2 }))
            );
            let mut rings = Rings::new();
            mirror.install(rings.accelerator_ends());
            frames.iter().for_each(|frame| mirror.send(frame));
            let Bye { reason, text } = bye(&mut mirror);
            assert!(reason == reason::LINK_LOST && text.contains(why), "{why}: {text}");
        }
        good.send(&Frame::Stop(stop::NOW as u32));
        assert_eq!(bye(&mut good), Bye { reason: reason::STOPPED, text: String::new() });
    });
}

/// What a hostile accelerator's side does after its blocks are ready.
type Play<'a> = &'a (dyn Fn(&mut Mirror) + Sync);

/// Starts the engine's end against this play; the failure with which it ends.
fn near_against(name: &str, ready: &FromRuntime, play: Play<'_>) -> Failure {
    let file = secret_file(name);
    let mut greeter = Greeter::bind("tcp://127.0.0.1:0", Secret::of(SECRET.as_bytes())).unwrap();
    let address = format!("tcp://{}", greeter.local_address().unwrap());
    let given =
        [("address".to_owned(), address), ("secret_file".to_owned(), file.display().to_string())];
    let spec = kinds::device_spec("remote", &given).unwrap();
    let options = kinds::Options {
        threads: 1,
        cores: Vec::new(),
        stack_kib: 64,
        hung_after: Duration::from_secs(10),
    };
    let mut device = kinds::find("remote").unwrap().device(&spec, options).unwrap();
    let mut rings = Rings::new();
    let mut ends = rings.engine_ends();
    // A request that is never answered: it is in the ring before the link.
    let head = Head { token: 5, tag: 0, kind: kind::MESSAGE, status: 0 };
    ends[0].0.push(head, b"request").unwrap();
    ends[0].0.publish();
    let over = AtomicBool::new(false);
    let failure = thread::scope(|scope| {
        scope.spawn(|| {
            let channel = loop {
                match greeter.advance(Duration::from_millis(50)).pop() {
                    Some(Greeted::Link(channel, _)) => break channel,
                    Some(Greeted::Refused(_, error)) => panic!("{error}"),
                    None => {}
                }
            };
            let mut mirror = Mirror::new(channel, Side::Accelerator);
            turn_until(&mut mirror, |control| matches!(control, Control::Shape(_))).unwrap();
            mirror.send(&Frame::Attach(&ready.encode()));
            play(&mut mirror);
            // Until the other side has gone.
            while !over.load(Ordering::Relaxed)
                && mirror.turn(Instant::now(), &mut |_| Ok(())).is_ok()
            {
                thread::sleep(Duration::from_millis(1));
            }
        });
        let over = SetAtEnd(&over);
        let started = device.start(&[rings.job()]);
        let deadline = Instant::now() + PATIENCE;
        let failure = started.err().unwrap_or_else(|| {
            loop {
                if let Err(failure) = device.health() {
                    break failure;
                }
                assert!(Instant::now() < deadline, "{name}: it goes on");
                thread::sleep(Duration::from_millis(1));
            }
        });
        rings.region.words().set_stop(stop::NOW);
        device.stop(PATIENCE).unwrap();
        drop(over);
        failure
    });
    fs::remove_file(file).unwrap();
    failure
}

#[test]
fn an_accelerator_that_breaks_the_protocol_is_a_lost_link_and_the_engine_learns_why() {
    let ready = FromRuntime::Ready(Ready { generation: 7, blocks: 2 });
    let head = |mqueue| MessageHead { mqueue, token: 1, tag: 0, kind: kind::MESSAGE, status: 0 };
    let long = vec![0; LONGEST as usize + 1];
    let send = |frame: Frame<'static>| move |mirror: &mut Mirror| mirror.send(&frame);
    let cases: [(&str, Play<'_>); 10] = [
        ("mqueue 2", &send(Frame::Message(head(2), b"x"))),
        ("too long", &|mirror| mirror.send(&Frame::Message(head(0), &long))),
        ("never got", &send(Frame::Released(1, 1))),
        ("never got", &send(Frame::Released(0, u64::MAX))),
        ("message of an engine", &send(Frame::Stop(1))),
        ("message of an engine", &send(Frame::Shape(shape()))),
        ("message of an engine", &send(Frame::Kernel([0; DIGEST_BYTES]))),
        ("may not send now", &|mirror| mirror.send(&Frame::Attach(&ready.encode()))),
        ("of the attach protocol", &send(Frame::Attach(b"SERVALAT but no message"))),
        ("without a free slot", &|mirror| {
            (0..100).for_each(|_| mirror.send(&Frame::Message(head(1), b"reply")));
        }),
    ];
    for (why, play) in cases {
        let Failure { reason, text } = near_against("breach", &ready, play);
        assert!(reason == reason::LINK_LOST && text.contains(why), "{why}: {text}");
    }
    for ready in [Ready { generation: 8, blocks: 2 }, Ready { generation: 7, blocks: 3 }] {
        let failure = near_against("other", &FromRuntime::Ready(ready), &|_| {});
        assert!(failure.text.contains("another region"), "{failure}");
    }
    // Its own reasons are passed on.
    let bye = Bye { reason: reason::HUNG, text: "block 1 hangs".to_owned() };
    let failure = near_against("bye", &ready, &|mirror| {
        mirror.send(&Frame::Attach(&FromRuntime::Bye(bye.clone()).encode()));
    });
    assert_eq!(failure, Failure { reason: bye.reason, text: bye.text.clone() });
    let failure = near_against("early", &FromRuntime::Bye(bye.clone()), &|_| {});
    assert_eq!(failure, Failure { reason: bye.reason, text: bye.text.clone() });
}

#[test]
fn secrets_that_others_can_read_or_guess_are_refused() {
    let file = secret_file("open");
    assert!(Secret::read(&file).is_ok());
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
    let refused = |file: &PathBuf| Secret::read(file).err().unwrap().to_string();
    assert!(refused(&file).contains("chmod 600"));
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(&file, "short\n").unwrap();
    assert!(refused(&file).contains("has 5 bytes"));
    fs::write(&file, [b'x'; 5000]).unwrap();
    assert!(refused(&file).contains("must have 32 to 4096"));
    fs::remove_file(&file).unwrap();
    assert!(refused(&file).contains("cannot be read"));
}
