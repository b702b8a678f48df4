//! WebAssembly modules as functions: the threshold of `functions/`, and modules that do wrong.

use std::path::{Path, PathBuf};
use std::process::Command as Process;
use std::sync::Arc;

use builtins::Code;
use onpath::dictionary::Dictionary;
use onpath::wasm::Module;
use onpath::{
    Chain, Command, CommandError, Counters, Direction, Function, Link, Messages, OnFailure,
    Outcome, Policy, RequestId, Sizes, Spec,
};
use proptest::prelude::*;
use wire::DropReason;
use wire::session::{EndpointKind, Origin, ReplyTo};

const SIZES: Sizes = Sizes { message_bytes: 256, reply_bytes: 256 };

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../functions")
}

fn threshold() -> Vec<u8> {
    std::fs::read(folder().join("threshold.wasm")).unwrap()
}

/// A function that may take long, since the machine may be busy.
fn patient(function: &str) -> Spec {
    Spec { deadline_us: onpath::spec::DEADLINE_US_MAX, ..Spec::new("f", function) }
}

fn instance(module: &[u8], params: &[(&str, u64)]) -> Box<dyn Function> {
    let mut spec = patient("f.wasm");
    spec.params =
        params.iter().map(|(name, value)| ((*name).to_owned(), (*value).into())).collect();
    Code::open(&spec, module).unwrap().instance(&spec, SIZES).unwrap()
}

fn batch(messages: &[Vec<u8>]) -> Messages {
    let mut batch = Messages::new(SIZES.message_bytes, SIZES.reply_bytes);
    messages.iter().for_each(|message| batch.push(message));
    batch
}

fn outcomes(function: &mut dyn Function, messages: &[Vec<u8>]) -> Vec<Outcome> {
    let mut batch = batch(messages);
    function.decide(Direction::Requests, &mut batch).unwrap();
    (0..batch.len()).map(|index| batch.outcome(index)).collect()
}

/// Restarts a function that has failed: another thread makes the next instance.
fn restart(function: &mut dyn Function) {
    while !function.restart().unwrap() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Whether two modules, or a module and the built-in function, do the same.
fn compare(one: &mut dyn Function, other: &mut dyn Function, batches: &[Vec<Vec<u8>>]) {
    for messages in batches {
        let found = outcomes(other, messages).into_iter().map(|outcome| match outcome {
            // A module has no reasons of its own.
            Outcome::Drop(_) => Outcome::Drop(DropReason::FunctionDrop),
            outcome => outcome,
        });
        let expected = outcomes(one, messages).into_iter().map(|outcome| match outcome {
            Outcome::Drop(_) => Outcome::Drop(DropReason::FunctionDrop),
            outcome => outcome,
        });
        assert!(expected.eq(found), "{messages:?}");
        assert_eq!(one.registers(), other.registers());
        assert_eq!(one.read(), other.read());
    }
    one.reset().unwrap();
    other.reset().unwrap();
    assert_eq!(one.read(), other.read());
}

fn builtin(params: &[(&str, u64)]) -> Box<dyn Function> {
    let mut spec = Spec::new("f", "threshold");
    spec.params =
        params.iter().map(|(name, value)| ((*name).to_owned(), (*value).into())).collect();
    Code::open(&spec, &[]).unwrap().instance(&spec, SIZES).unwrap()
}

fn any_batches() -> impl Strategy<Value = Vec<Vec<Vec<u8>>>> {
    prop::collection::vec(
        prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..40),
        1..4,
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..Default::default() })]
    /// The committed module does what the built-in function does.
    #[test]
    fn the_threshold_module_is_the_threshold_function(
        batches in any_batches(),
        (low, high) in any::<(u32, u32)>(),
    ) {
        let params = [("offset", 2), ("low", low.into()), ("high", high.into())];
        compare(&mut *builtin(&params), &mut *instance(&threshold(), &params), &batches);
    }
}

fn hyperloglog() -> Vec<u8> {
    std::fs::read(folder().join("hyperloglog.wasm")).unwrap()
}

/// The built-in function, with the parameters that the module has.
fn sketch(params: &[(&str, u64)]) -> Box<dyn Function> {
    let mut spec = Spec::new("f", "hyperloglog");
    spec.params =
        params.iter().map(|(name, value)| ((*name).to_owned(), (*value).into())).collect();
    Code::open(&spec, &[]).unwrap().instance(&spec, SIZES).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..Default::default() })]
    /// The committed module does what the built-in function does, and each merges the state of the other.
    #[test]
    fn the_hyperloglog_module_is_the_hyperloglog_function(
        batches in any_batches(),
        precision in prop::sample::select(vec![4u64, 9, 14, 18]),
        item_bytes in prop::sample::select(vec![0u64, 4, 8]),
        (offset, length) in (0u64..3, 0u64..18),
        seed: u32,
    ) {
        let params = [
            ("precision", precision), ("item_bytes", item_bytes), ("offset", offset), ("length", length),
            ("seed", seed.into()),
        ];
        let (mut native, mut module) = (sketch(&params), instance(&hyperloglog(), &params));
        compare(&mut *native, &mut *module, &batches);
        for messages in &batches {
            outcomes(&mut *native, messages);
            outcomes(&mut *module, messages);
        }
        let state = native.state().unwrap();
        prop_assert!(state == module.state().unwrap());
        let (mut other, mut further) = (sketch(&params), instance(&hyperloglog(), &params));
        further.merge(&state).unwrap();
        other.merge(&further.state().unwrap()).unwrap();
        prop_assert!(other.state().unwrap() == state);
        prop_assert_eq!(other.read().unwrap()[0], module.read().unwrap()[0]);
        prop_assert_eq!(further.read().unwrap()[0], module.read().unwrap()[0]);
        // Something else is refused, and the instance is replaced.
        prop_assert!(further.merge(&state[1..]).is_err());
    }
}

/// A chunk of a client's connection.
fn show_chunk(function: &mut dyn Function, (key, generation): (u32, u32), bytes: &[u8]) {
    let client = ReplyTo { endpoint: EndpointKind::Tcp, worker: 0, key, generation };
    let request = RequestId { origin: Origin::Client(client), number: 0 };
    let mut chunk = Messages::new(SIZES.message_bytes, SIZES.reply_bytes);
    chunk.set_chunks();
    let filled = chunk.push_with(&request, bytes.len(), |to| {
        to.copy_from_slice(bytes);
        true
    });
    assert!(filled);
    function.decide(Direction::Requests, &mut chunk).unwrap();
    assert_eq!(chunk.outcome(0), Outcome::Pass);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..Default::default() })]
    /// On byte streams the module counts the items that chunks cut, as the built-in function does.
    #[test]
    fn the_hyperloglog_module_continues_items_of_byte_streams(
        item_bytes in prop::sample::select(vec![0u64, 4, 8]),
        (offset, length) in (0u64..20, 0u64..70),
        chunks in prop::collection::vec(
            ((0u32..5, 0u32..2), prop::collection::vec(any::<u8>(), 0..150)), 1..40,
        ),
    ) {
        let params = [("item_bytes", item_bytes), ("offset", offset), ("length", length)];
        let (mut native, mut module) = (sketch(&params), instance(&hyperloglog(), &params));
        for (at, ((key, closes), bytes)) in chunks.iter().enumerate() {
            // Some are chunks of another connection with the same key.
            let connection = (*key, 1 + at as u32 / 16 * closes);
            show_chunk(&mut *native, connection, bytes);
            show_chunk(&mut *module, connection, bytes);
            prop_assert_eq!(native.read(), module.read());
        }
        prop_assert!(native.state() == module.state());
        // Other settings begin with a whole item.
        for function in [&mut native, &mut module] {
            function.write(6, offset + 1).unwrap();
            show_chunk(&mut **function, (0, 1), &[7; 200]);
        }
        prop_assert_eq!(native.read(), module.read());
        prop_assert!(native.state() == module.state());
    }
}

#[test]
fn a_state_is_inside_the_memory() {
    let whole =
        r#"(func (export "serval_requests") (param i32 i32 i32 i32) (result i32) (i32.const 0))"#;
    let of = |state: &str| {
        module(&format!(
            "{whole} (data (i32.const 16) \"\\20\\00\\00\\00\\ff\\ff\\ff\\7f\")
             (func (export \"serval_state\") (result i32) {state})
             (func (export \"serval_merge\") (param i32 i32) (result i32) (i32.const 1))"
        ))
    };
    let failure = |bytes: &[u8]| instance(bytes, &[]).state().unwrap_err().to_string();
    for state in ["(i32.const 16)", "(i32.const -1)", "(i32.const -8)"] {
        assert_eq!(failure(&of(state)), "its state is outside of its memory");
    }
    assert!(failure(&of("unreachable")).starts_with("it trapped"));
    // Eight zero bytes: no state.
    assert_eq!(instance(&of("(i32.const 64)"), &[]).state(), Ok(Vec::new()));
    let refused = instance(&of("(i32.const 64)"), &[]).merge(b"x").unwrap_err().to_string();
    assert_eq!(refused, "it does not take the state of another instance");
    let huge = vec![0; 1 << 20];
    assert!(instance(&of("(i32.const 64)"), &[]).merge(&huge).is_err());
    let half =
        module(&format!("{whole} (func (export \"serval_state\") (result i32) (i32.const 0))"));
    let why = Code::open(&patient("f.wasm"), &half).err().unwrap().to_string();
    assert!(why.contains("only together"), "{why}");
}

/// Compiles a module of `functions/`.
fn compiled(name: &str) -> Vec<u8> {
    let found =
        |tool: &str| Process::new(tool).arg("--version").output().is_ok_and(|o| o.status.success());
    let lld = ["wasm-ld", "wasm-ld-14"].into_iter().any(found);
    assert!(found("clang") && lld, "install clang and lld: apt-get install clang lld");
    let made = std::env::temp_dir().join(format!("serval-{name}-{}.wasm", std::process::id()));
    let mut clang = Process::new("clang");
    clang.args([
        "--target=wasm32",
        "-O2",
        "-nostdlib",
        "-Wl,--no-entry",
        "-Wall",
        "-Wextra",
        "-Werror",
    ]);
    clang.arg("-I").arg(folder().join("include")).arg("-o").arg(&made);
    assert!(clang.arg(folder().join(format!("{name}.c"))).status().unwrap().success());
    let bytes = std::fs::read(&made).unwrap();
    std::fs::remove_file(&made).unwrap();
    bytes
}

#[test]
fn the_committed_modules_are_made_from_their_sources() {
    let bytes = compiled("threshold");
    let params = [("offset", 0), ("low", 5), ("high", 9)];
    let messages = |n: u8| (0..n).map(|i| vec![0, 0, 0, i, i]).chain([vec![1]]).collect();
    compare(
        &mut *instance(&threshold(), &params),
        &mut *instance(&bytes, &params),
        &[messages(1), messages(32), messages(3)],
    );
    let params = [("precision", 7), ("item_bytes", 4)];
    compare(
        &mut *instance(&hyperloglog(), &params),
        &mut *instance(&compiled("hyperloglog"), &params),
        &[messages(1), messages(32), messages(3)],
    );
}

/// The committed module of benches/coap.
#[test]
fn the_application_of_the_coap_benchmark_answers_requests() {
    let module = std::fs::read(folder().join("../benches/coap/answer.wasm")).unwrap();
    let request = |first: u8| vec![first, 2, 0x12, 0x34, 7, 8, 0xff, 1];
    let messages = [request(0x42), request(0x52), request(0x62), vec![0x49; 20], vec![0x42; 5]];
    let mut batch = batch(&messages);
    instance(&module, &[]).decide(Direction::Requests, &mut batch).unwrap();
    let answers = [&b"\x62\x45\x12\x34\x07\x08\xffdone"[..], b"\x52\x45\x12\x34\x07\x08\xffdone"];
    for (index, answer) in answers.into_iter().enumerate() {
        assert_eq!((batch.outcome(index), batch.bytes(index)), (Outcome::Reply, answer));
    }
    // An acknowledgement, a token that is too long, and one that is not there.
    for index in 2..messages.len() {
        assert_eq!(batch.outcome(index), Outcome::Drop(DropReason::FunctionDrop));
    }
}

/// A module with these parts for a version of the interface.
fn of_version(version: u32, parts: &str) -> Vec<u8> {
    let memory = r#"(memory (export "memory") 1)"#;
    let abi = format!(r#"(func (export "serval_abi") (result i32) (i32.const {version}))"#);
    wat::parse_str(format!("(module {memory} {abi} {parts})")).unwrap()
}

/// Modules that were compiled for earlier minor versions of the interface, from `functions/`.
#[test]
fn modules_of_earlier_minor_versions_work() {
    let former = |name: &str, minor: u16| {
        let file = format!("tests/abi/{name}-1.{minor}.wasm");
        std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap()
    };
    let batches: [Vec<Vec<u8>>; 1] = [(0..40).map(|i| vec![0, 0, 0, i, i, i, i, 3 * i]).collect()];
    for minor in [0, 1] {
        let params = [("offset", 0), ("low", 5), ("high", 9)];
        let (old, new) = (former("threshold", minor), threshold());
        assert!(old != new, "they differ at least in their version");
        compare(&mut *builtin(&params), &mut *instance(&old, &params), &batches);
        compare(&mut *instance(&new, &params), &mut *instance(&old, &params), &batches);
        let params = [("precision", 9), ("item_bytes", 4)];
        let old = former("hyperloglog", minor);
        let (mut native, mut module) = (sketch(&params), instance(&old, &params));
        compare(&mut *instance(&hyperloglog(), &params), &mut *instance(&old, &params), &batches);
        outcomes(&mut *native, &batches[0]);
        outcomes(&mut *module, &batches[0]);
        assert_eq!(native.state(), module.state());
    }
}

/// A module of version 1.1 and later gets the number of a chunk's connection, one of version 1.0 zeros, and messages have none.
#[test]
fn chunks_have_the_number_of_their_connection() {
    // It answers with the words that it finds there.
    let body = r#"(func (export "serval_requests") (param $m i32) (param $count i32) (param $scratch i32) (param $bytes i32) (result i32)
        (i32.store (local.get $scratch) (i32.load offset=12 (local.get $m)))
        (i32.store offset=4 (local.get $scratch) (i32.load offset=20 (local.get $m)))
        (i32.store offset=8 (local.get $m) (i32.const 3))
        (i32.store offset=16 (local.get $m) (local.get $scratch))
        (i32.store offset=20 (local.get $m) (i32.const 8))
        (i32.const 0))"#;
    let to = ReplyTo { endpoint: EndpointKind::Tcp, worker: 0, key: 6, generation: 3 };
    let request = RequestId { origin: Origin::Client(to), number: 9 };
    for (version, chunks, expected) in [
        (1 | 2 << 16, true, [7, 3]),
        (1 | 1 << 16, true, [7, 3]),
        (1 | 1 << 16, false, [0, 0]),
        (1, true, [0, 0]),
    ] {
        let mut batch = Messages::new(SIZES.message_bytes, SIZES.reply_bytes);
        batch.push_of(&request, b"a chunk");
        if chunks {
            batch.set_chunks();
        }
        let module = of_version(version, body);
        instance(&module, &[]).decide(Direction::Requests, &mut batch).unwrap();
        let words = expected.map(u32::to_le_bytes).concat();
        assert_eq!(batch.bytes(0), words, "version {version:#x}, chunks: {chunks}");
    }
}

/// A module with these parts and what every module has.
fn module(parts: &str) -> Vec<u8> {
    let abi = r#"(func (export "serval_abi") (result i32) (i32.const 1))"#;
    let memory = r#"(memory (export "memory") 1)"#;
    wat::parse_str(format!("(module {memory} {abi} {parts})")).unwrap()
}

/// One whose `serval_requests` has this body.
fn requests(body: &str) -> Vec<u8> {
    module(&format!(
        r#"(func (export "serval_requests") (param $m i32) (param $count i32) (param $scratch i32) (param $bytes i32)
            (result i32) {body})"#
    ))
}

/// Stores into the first descriptor: verdict, argument, address, length.
fn writes(verdict: u32, argument: u32, address: i64, length: i64) -> Vec<u8> {
    requests(&format!(
        "(i32.store offset=8 (local.get $m) (i32.const {verdict}))
         (i32.store offset=12 (local.get $m) (i32.const {argument}))
         (i32.store offset=16 (local.get $m) (i32.const {address}))
         (i32.store offset=20 (local.get $m) (i32.const {length}))
         (i32.const 0)"
    ))
}

#[test]
fn a_module_passes_rewrites_answers_and_steers() {
    let messages = [b"abc".to_vec(), b"defg".to_vec()];
    let decided = |module: &[u8]| {
        let mut batch = batch(&messages);
        instance(module, &[]).decide(Direction::Requests, &mut batch).unwrap();
        let first = (batch.outcome(0), batch.bytes(0).to_vec());
        assert_eq!((batch.outcome(1), batch.bytes(1)), (Outcome::Pass, &b"defg"[..]));
        first
    };
    assert_eq!(decided(&writes(0, 7, 7, 7)), (Outcome::Pass, b"abc".to_vec()));
    assert_eq!(decided(&writes(2, 0, 16, 3)), (Outcome::Reply, vec![0; 3]));
    assert_eq!(decided(&writes(3, 0, 16, 2)), (Outcome::Pass, vec![0; 2]));
    assert_eq!(decided(&writes(4, 9, 0, 0)), (Outcome::Steer(9), b"abc".to_vec()));
    let long = decided(&writes(2, 0, 16, 257));
    assert_eq!(long.0, Outcome::Drop(DropReason::ReplyTooLong));
}

#[test]
fn replies_pass_a_module_that_has_nothing_for_them() {
    let mut batch = batch(&[b"reply".to_vec()]);
    instance(&writes(1, 0, 0, 0), &[]).decide(Direction::Replies, &mut batch).unwrap();
    assert_eq!(batch.outcome(0), Outcome::Pass);
}

/// Modules that fail when they are called, and what is said of each.
fn failing() -> Vec<(Vec<u8>, &'static str)> {
    vec![
        (requests("unreachable"), "it trapped: wasm `unreachable` instruction executed"),
        (requests("(loop $l (br $l)) (i32.const 0)"), "it exceeded its deadline"),
        (requests("(i32.const 3)"), "it returned 3"),
        (requests("(i32.load (i32.const -4))"), "it trapped: out of bounds memory access"),
        (requests("(i32.div_u (i32.const 1) (i32.const 0))"), "it trapped: integer divide by zero"),
        (writes(6, 0, 0, 0), "it wrote the verdict 6, which does not exist"),
        (writes(2, 0, -1, 2), "it wrote 2 bytes at 4294967295, which is outside of its memory"),
        (writes(3, 0, 0, 0x7fff_ffff), "bytes at 0, which is outside of its memory"),
        (
            module(
                r#"(func $deep (param i32) (result i32) (call $deep (i32.add (local.get 0) (i32.const 1))))
               (func (export "serval_requests") (param i32 i32 i32 i32) (result i32) (call $deep (i32.const 0)))"#,
            ),
            "it trapped: call stack exhausted",
        ),
    ]
}

#[test]
fn a_module_that_fails_is_not_called_again_before_a_restart_and_loses_no_message() {
    for (module, why) in failing() {
        for on_failure in [OnFailure::Open, OnFailure::Closed] {
            let mut spec = Spec::new("f", "f.wasm");
            // On a busy machine a module that traps may take long as well.
            spec.deadline_us =
                if why.contains("deadline") { 1000 } else { onpath::spec::DEADLINE_US_MAX };
            let function = Code::open(&spec, &module).unwrap().instance(&spec, SIZES).unwrap();
            let counters = Arc::<Counters>::default();
            let policy = Policy { on_failure, deadline_ns: spec.deadline_us * 1000 };
            let mut chain = Chain::new(vec![Link::new(1, function, policy, counters.clone())]);
            let mut asked = 0;
            while counters.failures.value() < 2 {
                let mut batch = batch(&[b"abc".to_vec()]);
                chain.decide(Direction::Requests, &mut batch, &|| 0);
                let expected = match on_failure {
                    OnFailure::Open => Outcome::Pass,
                    OnFailure::Closed => Outcome::Drop(DropReason::FunctionFailed),
                };
                assert_eq!((batch.outcome(0), batch.bytes(0)), (expected, &b"abc"[..]), "{why}");
                asked += 1;
                if asked > 1 {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
            }
            assert!(counters.last_failure().contains(why), "{} {why}", counters.last_failure());
            assert_eq!((counters.failures.value(), counters.restarts.value()), (2, 1), "{why}");
            assert_eq!(counters.batches.value(), 2, "{why}");
            assert!(chain.command(1, Command::Read).is_err());
        }
    }
}

#[test]
fn a_message_that_makes_a_module_fail_is_the_only_one_that_is_lost() {
    // Counts messages, and traps at those that begin with `b`.
    let module = module(
        r#"(func (export "serval_requests") (param $m i32) (param $count i32) (param i32 i32) (result i32)
             (local $i i32)
             (loop $l
               (if (i32.eq (i32.load8_u (i32.load (local.get $m))) (i32.const 98)) (then unreachable))
               (local.set $m (i32.add (local.get $m) (i32.const 24)))
               (local.set $i (i32.add (local.get $i) (i32.const 1)))
               (br_if $l (i32.lt_u (local.get $i) (local.get $count))))
             (i32.const 0))"#,
    );
    let counters = Arc::<Counters>::default();
    let policy = Policy { on_failure: OnFailure::Closed, deadline_ns: 1_000_000_000 };
    let mut chain =
        Chain::new(vec![Link::new(1, instance(&module, &[]), policy, counters.clone())]);
    let messages = ["a", "c", "b", "d", "e"].map(|text| text.as_bytes().to_vec());
    let lost = Outcome::Drop(DropReason::FunctionFailed);
    for round in 1u64.. {
        let mut batch = batch(&messages);
        // A minute later each time: what failures have cost is forgotten.
        chain.decide(Direction::Requests, &mut batch, &|| round * 60_000_000_000);
        let found: Vec<_> = (0..5).map(|index| batch.outcome(index)).collect();
        assert_eq!(found[2], lost);
        // Two instances are kept ready; on a busy machine they may not have been made yet.
        if found == [Outcome::Pass, Outcome::Pass, lost, Outcome::Pass, Outcome::Pass] {
            break;
        }
        assert!(round < 600, "{found:?}");
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
}

#[test]
fn an_instance_that_starts_slowly_is_made_by_another_thread() {
    let module = module(
        r#"(func (export "_initialize") (local $i i32)
             (loop $l (local.set $i (i32.add (local.get $i) (i32.const 1)))
               (br_if $l (i32.lt_u (local.get $i) (i32.const 10000000)))))
           (func (export "serval_requests") (param $m i32) (param i32 i32 i32) (result i32)
             (i32.eqz (i32.load offset=4 (local.get $m))))"#,
    );
    let mut spec = Spec::new("f", "f.wasm");
    // Less than a start takes: that has a second, and is on no worker.
    spec.deadline_us = 1000;
    let mut function = Code::open(&spec, &module).unwrap().instance(&spec, SIZES).unwrap();
    for _ in 0..3 {
        assert!(function.decide(Direction::Requests, &mut batch(&[Vec::new()])).is_err());
        let why = function.read().unwrap_err().to_string();
        assert_eq!(why, "it is not restarted yet");
        restart(&mut *function);
        assert_eq!(function.read(), Ok(Vec::new()));
    }
    // An instance that is being made does not outlive the last one of its module.
    drop(function);
}

#[test]
fn a_setting_that_is_written_while_a_function_fails_holds_after_its_restart() {
    // A message without bytes fails; a read fails while the setting is 7, and the setting is at most 9.
    let module = module(
        r#"(data (i32.const 64) "\50\00\00\00\03\00\00\00\00\00\00\00\00\00\00\00limit\00")
           (func (export "serval_requests") (param $m i32) (param i32 i32 i32) (result i32)
             (i32.eqz (i32.load offset=4 (local.get $m))))
           (func (export "serval_registers") (result i32) (i32.const 64))
           (func (export "serval_read") (param i32) (result i64)
             (if (i64.eq (i64.load (i32.const 8)) (i64.const 7)) (then unreachable))
             (i64.load (i32.const 8)))
           (func (export "serval_reset"))
           (func (export "serval_write") (param i32 i64) (result i32)
             (if (i64.gt_u (local.get 1) (i64.const 9)) (then (return (i32.const 1))))
             (i64.store (i32.const 8) (local.get 1)) (i32.const 0))"#,
    );
    let counters = Arc::<Counters>::default();
    let policy = Policy { on_failure: OnFailure::Closed, deadline_ns: 1_000_000_000 };
    let function = instance(&module, &[("limit", 5)]);
    let mut chain = Chain::new(vec![Link::new(1, function, policy, counters.clone())]);
    let ask = |chain: &mut Chain, message: &[u8], at_ms: u64| {
        let mut batch = batch(&[message.to_vec()]);
        chain.decide(Direction::Requests, &mut batch, &|| at_ms * 1_000_000);
        batch.outcome(0) == Outcome::Pass
    };
    let ask_restarted = |chain: &mut Chain| {
        while !ask(chain, b"a", 1) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    };
    let write = |value| Command::Write { register: 0, value };
    assert!(matches!(chain.command(1, write(10)), Err(CommandError::Refused(_))));
    assert_eq!(
        chain.command(1, Command::Read).map(|read| read.values),
        Ok(vec![5]),
        "a refusal is no failure"
    );
    assert!(!ask(&mut chain, b"", 1));
    assert_eq!(chain.command(1, write(6)), Err(CommandError::Deferred));
    ask_restarted(&mut chain);
    assert_eq!(chain.command(1, Command::Read).map(|read| read.values), Ok(vec![6]));
    // A command that fails begins the back-off, so no batch fails because of it.
    assert!(matches!(chain.command(1, write(7)), Err(CommandError::Failed(_))));
    assert_eq!(chain.command(1, Command::Read), Err(CommandError::Failing));
    assert_eq!((counters.failures.value(), counters.restarts.value()), (2, 1));
    ask_restarted(&mut chain);
    assert_eq!((counters.failures.value(), counters.restarts.value()), (2, 2));
}

#[test]
fn after_a_restart_settings_have_the_values_that_were_written() {
    // Fails if a message has no bytes; `limit` is in memory, and so lost with it.
    let module = module(
        r#"(data (i32.const 64) "\50\00\00\00\03\00\00\00\00\00\00\00\00\00\00\00limit\00")
           (func (export "serval_requests") (param $m i32) (param i32 i32 i32) (result i32)
             (i32.eqz (i32.load offset=4 (local.get $m))))
           (func (export "serval_registers") (result i32) (i32.const 64))
           (func (export "serval_read") (param i32) (result i64) (i64.load (i32.const 8)))
           (func (export "serval_reset"))
           (func (export "serval_write") (param i32 i64) (result i32)
             (i64.store (i32.const 8) (local.get 1)) (i64.gt_u (local.get 1) (i64.const 9)))"#,
    );
    let mut function = instance(&module, &[("limit", 5)]);
    assert_eq!(function.read(), Ok(vec![5]));
    assert!(function.write(0, 10).unwrap_err().to_string().contains("does not take 10 as limit"));
    function.write(0, 6).unwrap();
    assert!(function.decide(Direction::Requests, &mut batch(&[vec![]])).is_err());
    assert!(function.read().is_err(), "it has failed");
    restart(&mut *function);
    assert_eq!(function.read(), Ok(vec![6]));
    let mut spec = Spec::new("f", "f.wasm");
    let refused = |spec: &Spec| {
        Code::open(spec, &module).unwrap().instance(spec, SIZES).err().unwrap().to_string()
    };
    spec.params = vec![("limt".into(), 1.into())];
    assert_eq!(refused(&spec), "the function \"f.wasm\" has no parameter \"limt\": it has limit");
    spec.params = vec![("limit".into(), 11.into())];
    assert_eq!(
        refused(&spec),
        "the function \"f.wasm\" does not take limit = 11: it does not take 11 as limit"
    );
}

/// Why a module is refused.
fn refusal(bytes: &[u8]) -> String {
    let mut spec = Spec::new("f", "f.wasm");
    spec.deadline_us = 1000;
    let made = Code::open(&spec, bytes).and_then(|code| code.instance(&spec, SIZES).map(drop));
    made.err().map_or("it is accepted".to_owned(), |error| error.to_string())
}

#[test]
fn modules_that_cannot_be_functions_are_refused_in_one_sentence() {
    let whole =
        r#"(func (export "serval_requests") (param i32 i32 i32 i32) (result i32) (i32.const 0))"#;
    let wat = |text: &str| wat::parse_str(text).unwrap();
    let with = |parts: &str| module(&format!("{whole} {parts}"));
    let table = |address: i64| {
        format!(
            r#"(func (export "serval_registers") (result i32) (i32.const {address}))
               (func (export "serval_read") (param i32) (result i64) (i64.const 0))
               (func (export "serval_reset"))"#
        )
    };
    let cases = [
        (b"".to_vec(), "it is no WebAssembly module"),
        (b"\0asm\x01\0\0\0garbage".to_vec(), "it is no WebAssembly module"),
        (vec![0; onpath::spec::MODULE_BYTES_MAX as usize + 1], "a module has at most"),
        (wat("(module)"), "it exports no 32-bit memory named \"memory\""),
        (wat(r#"(module (memory (export "memory") i64 1))"#), "it exports no 32-bit memory"),
        (
            wat(r#"(module (import "env" "f" (func)) (memory (export "memory") 1))"#),
            "it imports env.f",
        ),
        (
            module(""),
            "it does not export the function serval_requests(i32, i32, i32, i32) -> (i32)",
        ),
        (
            module(r#"(func (export "serval_requests"))"#),
            "does not export the function serval_requests(",
        ),
        (
            with(r#"(func (export "serval_replies"))"#),
            "does not export the function serval_replies(",
        ),
        (
            with(r#"(func (export "serval_reset"))"#),
            "serval_registers, serval_read, serval_reset only together",
        ),
        (
            wat(&format!(
                r#"(module (memory (export "memory") 1) {whole} (func (export "serval_abi") (result i32) (i32.const 2)))"#
            )),
            "it is for version 2.0 of the interface, and this program has version 1.2: compile it with",
        ),
        (
            of_version(1 | 3 << 16, whole),
            "it is for version 1.3 of the interface, and this program has version 1.2: use a newer Serval, or compile it with",
        ),
        (of_version(1 << 16, whole), "it is for version 0.1 of the interface, and this"),
        (with("(func $s unreachable) (start $s)"), "it trapped"),
        (with("(func $s (loop $l (br $l))) (start $s)"), "it exceeded its deadline"),
        (with(r#"(func (export "_initialize") unreachable)"#), "_initialize failed: it trapped"),
        (with("(table 1000000 funcref)"), "does not start"),
        (
            wat(&format!(
                r#"(module (memory (export "memory") 100) {whole} (func (export "serval_abi") (result i32) (i32.const 1)))"#
            )),
            "memory_mib = 4",
        ),
        (
            wat(&format!(
                r#"(module (memory (export "memory") 1 1) {whole} (func (export "serval_abi") (result i32) (i32.const 1)))"#
            )),
            "its own maximum",
        ),
        (with(&table(-8)), "its table of registers is outside of its memory"),
        (
            with(&format!(r#"(data (i32.const 8) "\ff\ff\ff\7f") {}"#, table(8))),
            "is outside of its memory",
        ),
        (
            with(&format!(r#"(data (i32.const 8) "\10\00\00\00\00\00\00\00A\00") {}"#, table(8))),
            "the name of its register 0",
        ),
        (
            with(&format!(
                r#"(data (i32.const 8) "\20\00\00\00\09\00\00\00\00\00\00\00") (data (i32.const 32) "a\00") {}"#,
                table(8)
            )),
            "has the kind 9",
        ),
        (
            with(&format!(
                r#"(data (i32.const 8) "\20\00\00\00\03\00\00\00\00\00\00\00") (data (i32.const 32) "a\00") {}"#,
                table(8)
            )),
            "does not export serval_write",
        ),
    ];
    for (bytes, why) in cases {
        let found = refusal(&bytes);
        assert!(found.contains(why), "{found} / {why}");
        assert!(!found.contains('\n'), "{found}");
    }
}

#[test]
fn the_memory_of_an_instance_is_bounded() {
    // Grows as far as it can, and says how far.
    let grows = requests(
        "(loop $l (br_if $l (i32.ne (memory.grow (i32.const 1)) (i32.const -1))))
         (memory.size)",
    );
    let mut function = instance(&grows, &[]);
    let failed = function.decide(Direction::Requests, &mut batch(&[b"x".to_vec()])).unwrap_err();
    assert_eq!(failed.to_string(), format!("it returned {}", (4 << 20) >> 16));
}

/// Mappings and descriptors of this process.
fn held() -> (usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    (maps, std::fs::read_dir("/proc/self/fd").unwrap().count())
}

#[test]
fn ten_thousand_instances_come_and_go_and_leave_nothing() {
    let module = Module::compile(&threshold()).unwrap();
    let limits =
        onpath::wasm::Limits { memory_bytes: 4 << 20, deadline_us: 1_000_000, sizes: SIZES };
    let round = |rounds: usize| {
        for _ in 0..rounds {
            let mut made = module.instance(limits, None).unwrap();
            assert_eq!(outcomes(&mut made, &[vec![0; 18]]), [Outcome::Pass]);
        }
    };
    round(100);
    let before = held();
    round(10_000);
    let after = held();
    // Other tests of this program run meanwhile.
    assert!(after.0 < before.0 + 200 && after.1 < before.1 + 50, "{before:?} {after:?}");
    // As many at a time as a server may have.
    let many: Vec<_> = (0..1000).map(|_| module.instance(limits, None).unwrap()).collect();
    drop(many);
}

/// A module that makes one call for its dictionary with these arguments, and answers with what it returns.
fn dictionary_call(name: &str, arguments: &[i64]) -> Vec<u8> {
    let params = "i32 ".repeat(arguments.len());
    let given: String = arguments.iter().map(|value| format!("(i32.const {value})")).collect();
    wat::parse_str(format!(
        r#"(module (import "serval" "dictionary_{name}" (func $call (param {params}) (result i32)))
            (memory (export "memory") 1) (data (i32.const 16) "keyvalue")
            (func (export "serval_abi") (result i32) (i32.const 65537))
            (func (export "serval_requests") (param $m i32) (param i32) (param $s i32) (param i32) (result i32)
                (i32.store (local.get $s) (call $call {given}))
                (i32.store offset=8 (local.get $m) (i32.const 3))
                (i32.store offset=16 (local.get $m) (local.get $s))
                (i32.store offset=20 (local.get $m) (i32.const 4))
                (i32.const 0)))"#
    ))
    .unwrap()
}

#[test]
fn modules_share_a_dictionary_and_cannot_leave_their_memory_with_it() {
    let dictionary = Arc::new(Dictionary::new(16));
    let mut spec = patient("f.wasm");
    spec.dictionary = Some("d".to_owned());
    let call = |name: &str, arguments: &[i64]| {
        let code = Code::open(&spec, &dictionary_call(name, arguments)).unwrap();
        let mut function = code.instance_with(&spec, SIZES, Some(Arc::clone(&dictionary))).unwrap();
        let mut batch = batch(&[vec![0; 8]]);
        let done = function.decide(Direction::Requests, &mut batch);
        done.map(|()| i32::from_le_bytes(batch.bytes(0).try_into().unwrap()))
    };
    assert_eq!(call("get", &[16, 3, 64, 8]), Ok(-1));
    assert_eq!(call("set", &[16, 3, 19, 5]), Ok(0));
    assert_eq!(dictionary.get(b"key", <[u8]>::to_vec), Some(b"value".to_vec()));
    for room in [0, 3, 100] {
        assert_eq!(call("get", &[16, 3, 64, room]), Ok(5), "the whole length");
    }
    assert_eq!(call("delete", &[16, 3]), Ok(0));
    assert_eq!(call("delete", &[16, 3]), Ok(-1));
    assert_eq!(call("set", &[0, 65, 0, 0]), Ok(-2));
    assert_eq!(call("set", &[0, 1, 0, 193]), Ok(-2));
    assert_eq!(call("get", &[0, 65, 64, 8]), Ok(-1));
    let outside = [
        ("get", &[-1, 3, 64, 8][..]),
        ("get", &[16, -1, 64, 8]),
        ("get", &[16, 3, -8, 16]),
        ("get", &[16, 3, 64, -1]),
        ("set", &[16, 3, -1, 2]),
        ("set", &[-2, 3, 16, 2]),
        ("delete", &[-2, 3]),
    ];
    for (name, arguments) in outside {
        let why = call(name, arguments).unwrap_err().to_string();
        assert!(why.contains("outside of its memory"), "{name} {arguments:?}: {why}");
    }
    assert_eq!(dictionary.used(), (0, 0));
    // Without one, and imports that do not exist.
    spec.dictionary = None;
    let code = Code::open(&spec, &dictionary_call("get", &[0; 4])).unwrap();
    let refused = code.instance(&spec, SIZES).err().unwrap().to_string();
    assert!(refused.contains("it uses a dictionary and has none"), "{refused}");
    for (name, arguments) in [("get", 3), ("clear", 2)] {
        let refused = Code::open(&spec, &dictionary_call(name, &vec![0; arguments])).err().unwrap();
        assert!(refused.to_string().contains("imports nothing but serval.dictionary_get"));
    }
}
