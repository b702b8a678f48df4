//! Accelerators of one's own: the C++ attach library (`lib/src/attach`) and its example, blocks on plain threads, against the
//! real engine and against engines that are none. The program runs with the address and undefined behaviour sanitizers.
//! And the example in Rust.

mod common;
#[path = "../../runtime/examples/own_accelerator.rs"]
mod in_rust;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;

use common::offers::{Offers, at_a_false_engine};
use common::*;
use mqueue::abi::{state, stop};
use mqueue::{MappedMemory, Region};
use runtime::{self, AttachRequest, End};
use sys::local::LocalListener;
use sys::readiness::wait_readable;
use wire::DropReason;
use wire::attach::{FromEngine, PARAM_TEXT, ParamValue, VERSION};

/// Where the programs are: built once.
static PROGRAMS: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("attach");
    for (source, target) in [("lib", "attach-tests"), ("examples/03_own_accelerator", "all")] {
        let output = Command::new("make")
            .args(["--no-print-directory", "-C"])
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(source))
            .args([target.to_owned(), format!("BUILD={}", folder.display())])
            .output()
            .expect("make has to be installed");
        let said = [output.stdout, output.stderr].concat();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
    }
    folder
});

/// A path that no other test uses.
fn path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("serval-own-{}-{name}", std::process::id()))
}

fn served(name: &str, at: &Path) -> Served {
    // Building takes longer than a test waits.
    LazyLock::force(&PROGRAMS);
    let config = format!(
        "[[accelerator]]\nname = \"own\"\nkind = \"process\"\nlaunch = \"external\"\nattach = \"{}\"\nheartbeat_ms = 2000\n\
         [[service]]
name = \"reverse\"
listen = \"udp://127.0.0.1:0\"
accelerator = \"own\"
kernel = \"reverse\"
\
         mqueues = 3
max_message_bytes = 900
max_reply_bytes = 890
request_timeout_ms = 15000
",
        at.display()
    );
    Served::start(name, "", &config)
}

/// The program, and what it prints.
struct Program {
    process: Peer,
    output: BufReader<ChildStdout>,
    errors: PathBuf,
}

impl Program {
    fn start(name: &str, at: &Path) -> Self {
        Self::run(name, Command::new(PROGRAMS.join("threads.san")).arg(at))
    }

    fn run(name: &str, command: &mut Command) -> Self {
        let errors = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("own-program-{name}.log"));
        command.stdout(Stdio::piped()).stderr(fs::File::create(&errors).unwrap());
        let mut process = Peer::start(command, "the test builds it");
        let output = BufReader::new(process.0.stdout.take().unwrap());
        Self { process, output, errors }
    }

    /// Its next line, for which it has to be serving.
    fn line(&mut self) -> String {
        let file = self.output.get_ref().as_fd();
        let said = !self.output.buffer().is_empty() || wait_readable(&[file], Some(PATIENCE))[0];
        assert!(said, "it says nothing");
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line
    }

    /// Whether there is a next line already.
    fn has_said_more(&self) -> bool {
        let file = self.output.get_ref().as_fd();
        !self.output.buffer().is_empty() || wait_readable(&[file], Some(Duration::ZERO))[0]
    }

    /// How it ends, and what it had to say.
    fn end(mut self) -> (Option<i32>, String) {
        let mut status = None;
        eventually("the program ends", || {
            status = self.process.0.try_wait().unwrap();
            status.is_some()
        });
        let said = fs::read_to_string(&self.errors).unwrap();
        fs::remove_file(&self.errors).unwrap();
        (status.unwrap().code(), said)
    }
}

/// Messages of many lengths are returned in reverse order, once the engine has a runtime.
fn reverses(served: &Served) {
    eventually("the engine has heard of it", || life(served, "up") == 1);
    let client = udp_client(served.services[0][0]);
    for salt in 0..60 {
        let message = pattern(salt * 15, salt);
        let expected: Vec<u8> = message.iter().rev().copied().collect();
        assert_eq!(ask(&client, &message), expected);
    }
}

fn life(served: &Served, what: &str) -> u64 {
    served.metric(&format!("serval_accelerator_{what}{{service=\"reverse\",accelerator=\"own\"}}"))
}

#[test]
fn a_program_serves_is_killed_restarts_and_ends_with_its_engine() {
    let at = path("lives");
    let served = served("own-lives", &at);
    let mut first = Program::start("first", &at);
    assert_eq!(first.line(), "serving reverse, generation 1\n");
    reverses(&served);
    first.process.stop();
    eventually("its end is noticed", || life(&served, "up") == 0);
    let client = udp_client(served.services[0][0]);
    client.send(b"no runtime").unwrap();
    eventually("that is counted", || served.dropped("reverse", DropReason::NoAccelerator) == 1);

    // It is turned away as long as the place is not free again.
    let mut second = None;
    eventually("there is a place", || {
        let mut program = Program::start("second", &at);
        if program.line() == "serving reverse, generation 2\n" {
            second = Some(program);
            return true;
        }
        let (code, said) = program.end();
        assert!(code == Some(1) && said.contains("the engine refuses: "), "{code:?}: {said}");
        false
    });
    reverses(&served);
    assert_eq!(served.drain(), 0, "nothing was left unanswered");
    assert_eq!(second.unwrap().end(), (Some(0), String::new()));
}

#[test]
fn a_suspended_program_loses_its_runtime_slot_and_notices() {
    let at = path("still");
    let served = served("own-still", &at);
    let mut program = Program::start("still", &at);
    assert_eq!(program.line(), "serving reverse, generation 1\n");
    program.process.suspend();
    eventually("it is lost", || life(&served, "up") == 0);
    program.process.signal("CONT");
    let (code, said) = program.end();
    assert_eq!(code, Some(1), "{said}");
    assert!(said.starts_with("the engine is gone: ") && said.lines().count() == 1, "{said}");
    assert_eq!(served.drain(), 0);
}

#[test]
fn a_program_whose_engine_is_killed_reports_it_and_ends() {
    let at = path("orphan");
    let mut served = served("own-orphan", &at);
    let mut program = Program::start("orphan", &at);
    assert_eq!(program.line(), "serving reverse, generation 1\n");
    reverses(&served);
    served.process.stop();
    let (code, said) = program.end();
    assert_eq!(code, Some(1), "{said}");
    assert!(said.starts_with("the engine is gone: ") && said.lines().count() == 1, "{said}");
    let _ = fs::remove_file(&at);
}

#[test]
fn the_example_in_rust_does_the_same() {
    let at = path("rust");
    let served = served("own-rust", &at);
    let cancel = AtomicBool::new(false);
    thread::scope(|scope| {
        let program = scope.spawn(|| {
            let mut device = in_rust::Reverser::default();
            runtime::attach(&at, &AttachRequest::default(), &mut device, true, &cancel)
        });
        // Should an assertion fail, the thread has to end all the same.
        let stop = Stop(&cancel);
        reverses(&served);
        let client = udp_client(served.services[0][0]);
        client.send(&pattern(900, 0)).unwrap();
        let too_long = || served.dropped("reverse", DropReason::ReplyTooLong) == 1;
        eventually("a reply that is too long is a drop", too_long);
        assert_eq!(ask(&client, b"abc"), b"cba");
        assert_eq!(served.drain(), 0, "nothing was left unanswered");
        assert_eq!(program.join().unwrap().unwrap(), End::Stopped);
        drop(stop);
    });
}

/// The error of the program for the engine at `at`: one line, and no sanitizer output.
fn refusal(at: &Path) -> String {
    let done = Command::new(PROGRAMS.join("threads.san")).arg(at).output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.code() == Some(1) && said.lines().count() == 1, "{said}");
    said
}

#[test]
fn invalid_engines_are_distinguished() {
    let at = path("false-engine");
    let said = refusal(&at);
    assert!(said.starts_with("no engine listens at ") && said.contains("No such file"), "{said}");
    let listener = LocalListener::bind(&at).unwrap();
    let offers = Offers::new();
    for (why, message, descriptors) in offers.cases() {
        let said = at_a_false_engine(&listener, &message, &descriptors, || refusal(&at));
        assert!(said.contains(why), "{said:?} says {why:?}");
    }
    // What is right but for its length is impossible at every one, and so is what the fields cannot hold.
    let offer = offers.offer("echo", 0);
    let mut wrong: Vec<Vec<u8>> =
        (0..offer.len()).step_by(3).skip(1).map(|len| offer[..len].to_vec()).collect();
    wrong.push([&offer[..], b"x"].concat());
    wrong.push([&offer[..], &[b'x'; 5000]].concat());
    // The length and the first byte of the service's name, and the number of parameters.
    for (at, byte) in
        [(40, 65), (41, 255), (42, 0xff), (42, 0), (offer.len() - 4, 33), (offer.len() - 1, 255)]
    {
        let mut message = offer.clone();
        message[at] = byte;
        wrong.push(message);
    }
    for message in wrong {
        let said = at_a_false_engine(&listener, &message, &[], || refusal(&at));
        assert!(said.contains("attach protocol"), "{said:?} about {message:?}");
    }
    // Refusals of every version are read; what they say steers no terminal.
    let mut refuse = FromEngine::Refuse("not\n\u{1b}[2Jyou".into()).encode();
    refuse[8] = VERSION as u8 + 1;
    let said = at_a_false_engine(&listener, &refuse, &[], || refusal(&at));
    assert_eq!(said, "the engine refuses: not??[2Jyou\n");
}

#[test]
fn blocks_that_end_before_the_engine_says_that_it_stops_end_in_order() {
    let at = path("early");
    LazyLock::force(&PROGRAMS);
    let listener = LocalListener::bind(&at).unwrap();
    let offers = Offers::new();
    let mut program = Program::start("early", &at);
    let mut socket = None;
    eventually("the program comes", || {
        socket = listener.accept().unwrap();
        socket.is_some()
    });
    let socket = socket.unwrap();
    socket.send(&offers.offer("echo", 0), &offers.good()).unwrap();
    assert_eq!(program.line(), "serving a, generation 1\n");
    let region = Region::join(MappedMemory::new(offers.good.clone())).unwrap();
    let words = region.words();
    words.set_stop(stop::DRAIN);
    let ended = |block| words.block(block).state == state::ENDED;
    eventually("all blocks have ended", || (0..region.block_count()).all(ended));
    // So that the program has seen it too.
    thread::sleep(Duration::from_millis(400));
    socket.send(&FromEngine::Stop { drain_ms: 1000 }.encode(), &[]).unwrap();
    assert_eq!(program.end(), (Some(0), String::new()));
}

#[test]
fn a_program_detects_a_hung_block_and_continues() {
    let at = path("hung");
    let served = served("own-hung", &at);
    let mut command = Command::new(PROGRAMS.join("hung.san"));
    let mut program = Program::run("hung", command.arg(&at).arg("1500"));
    assert_eq!(program.line(), "serving\n");
    eventually("the engine has heard of it", || life(&served, "up") == 1);
    let client = udp_client(served.services[0][0]);
    for round in 0..2 {
        // Blocks that work do not hang, nor do those that have nothing to do.
        for salt in 0..40 {
            let message = [b"quick ", &pattern(salt * 15, salt)[..]].concat();
            assert_eq!(ask(&client, &message), message);
        }
        thread::sleep(Duration::from_millis(2500));
        assert!(!program.has_said_more(), "round {round}: {}", program.line());
        // It holds its block up until that was noticed, which takes others that lie behind it.
        client.send(b"Hang").unwrap();
        for _ in 0..6 {
            client.send(b"behind").unwrap();
        }
        let said = program.line();
        let block = said.strip_prefix("block ").and_then(|rest| rest.strip_suffix(" hangs\n"));
        assert!(block.is_some_and(|block| ["0", "1", "2"].contains(&block)), "{said}");
        let mut reply = [0; 8];
        let lengths: usize = (0..7).map(|_| client.recv(&mut reply).expect("it goes on")).sum();
        assert_eq!(lengths, 4 + 6 * 6);
        assert_eq!(program.line(), "all go on\n");
    }
    // The engine has noticed nothing, because the program beat.
    assert_eq!((life(&served, "up"), life(&served, "generation")), (1, 1));
    assert_eq!(served.drain(), 0);
    assert_eq!(program.end(), (Some(0), String::new()));
}

/// Numbers and texts of `params` reach a program with an accelerator of its own.
#[test]
fn a_program_gets_the_parameters_of_its_kernel() {
    let path = path("params");
    let listener = LocalListener::bind(&path).unwrap();
    let offers = Offers::new();
    let said = |params: Vec<(String, ParamValue)>| {
        let offer = offers.offer_with("own", 0, params);
        let attach = || Command::new(PROGRAMS.join("params.san")).arg(&path).output().unwrap();
        let done = at_a_false_engine(&listener, &offer, &offers.good(), attach);
        assert!(done.stderr.is_empty(), "{done:?}");
        (done.status.code(), String::from_utf8(done.stdout).unwrap())
    };
    let named = |name: &str, value: ParamValue| (name.to_owned(), value);
    let longest = "é".repeat(127) + "!";
    let texts = (0..32).map(|n| named(&format!("p{n}"), longest.as_str().into())).collect();
    let lines = (0..32).map(|n| format!("p{n} \"{longest}\"\n")).collect();
    assert_eq!(said(texts), (Some(0), lines));
    let both = vec![named("n", 3.0.into()), named("name", "a text".into()), named("e", "".into())];
    assert_eq!(said(both), (Some(0), "n 3\nname \"a text\"\ne \"\"\n".into()));
    let (code, why) = said(vec![named("n", f64::from_bits(PARAM_TEXT | 1 << 32 | 8).into())]);
    assert!(code == Some(1) && why.contains("a parameter has no value"), "{why}");
}

#[test]
fn a_runtime_joins_once() {
    let done = Command::new(PROGRAMS.join("twice.san")).output().unwrap();
    assert!(done.status.success(), "{done:?}");
}
