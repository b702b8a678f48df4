//! `serval fn new`, `build`, `test` and `bench`: projects of functions, without a server and attached to one.

mod common;

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use common::running::{Running, table};
use common::*;

fn folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("project-{name}"));
    // Of an earlier run.
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// `serval fn` in a folder, with one variable of the environment.
fn serval_with(at: &PathBuf, arguments: &[&str], (name, value): (&str, &str)) -> (i32, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
    command.arg("fn").args(arguments).current_dir(at).env(name, value);
    let output = command.output().unwrap();
    let text = [output.stdout.as_slice(), &output.stderr].concat();
    (output.status.code().unwrap(), String::from_utf8(text).unwrap())
}

fn serval_fn(at: &PathBuf, arguments: &[&str]) -> (i32, String) {
    serval_with(at, arguments, ("SERVAL_LOG", "off"))
}

#[track_caller]
fn says(at: &PathBuf, arguments: &[&str], code: i32, expected: &str) -> String {
    let said = serval_fn(at, arguments);
    assert!(said.0 == code && said.1.contains(expected), "{arguments:?}: {} {}", said.0, said.1);
    said.1
}

fn has_rust_target() -> bool {
    let output = Command::new("rustc").args(["--print", "sysroot"]).output().unwrap();
    let root = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim());
    root.join("lib/rustlib/wasm32-unknown-unknown/lib").is_dir()
}

/// Makes a project, changes it, and sees what its tests say.
fn a_project_is_made_and_tested(language: &str, source: &str) {
    let at = folder(&format!("new-{}", language.replace('+', "p")));
    says(&at, &["new", "mine", "--language", language], 0, "next: cd mine && serval fn test");
    says(&at, &["new", "mine", "--language", language], 1, "exists already: name another folder");
    let mine = at.join("mine");
    says(&mine, &["build"], 0, "mine.wasm: version 0.1.0, ");
    let module = fs::read(mine.join("mine.wasm")).unwrap();
    let manifest = onpath::wasm::Manifest::of_module(&module).unwrap().unwrap();
    assert_eq!((&*manifest.name, &*manifest.version), ("mine", "0.1.0"));
    says(&mine, &["test"], 0, "6 messages, in batches and one by one: as expected");
    says(
        &at,
        &["test", "mine/mine.wasm", "--param", "longest=2"],
        1,
        "line 2, in batches: expected",
    );
    let measured = says(&at, &["bench", "mine", "--milliseconds", "10", "--json"], 0, "\"ns\"");
    let measured: serde_json::Value = serde_json::from_str(&measured).unwrap();
    assert!(measured["functions"][0]["ns"].as_f64().unwrap() > 0.0, "{measured}");
    let built_in = ["bench", "threshold", "--bytes", "64", "--milliseconds", "10", "--json"];
    let built_in: serde_json::Value =
        serde_json::from_str(&says(&at, &built_in, 0, "\"rate\"")).unwrap();
    let figure = |name: &str| built_in[name].as_f64().unwrap();
    assert!(figure("ns") > 0.0 && figure("failures") == 0.0, "{built_in}");
    assert!((figure("rate") * figure("path_ns") - 1e9).abs() < 1e3, "{built_in}");
    let text = fs::read_to_string(mine.join(source)).unwrap();
    assert!(text.contains("pong"));
    fs::write(mine.join(source), text.replace("pong", "gnop")).unwrap();
    let said = says(&mine, &["test"], 1, "line 3, in batches: expected reply \"pong\"");
    assert!(
        said.contains("line 3, one by one: ") && said.contains("found reply \"gnop\""),
        "{said}"
    );
    fs::write(mine.join(source), text + "\n}").unwrap();
    says(&mine, &["build"], 1, &format!("{source} cannot be compiled:"));
    assert!(mine.join("mine.wasm").exists(), "the module before stays");
    assert!(!mine.join(".mine.wasm").exists());
}

#[test]
fn a_project_in_c_is_made_and_tested() {
    a_project_is_made_and_tested("c", "function.c");
}

#[test]
fn a_project_in_cpp_is_made_and_tested() {
    a_project_is_made_and_tested("c++", "function.cpp");
}

/// Where the compiler has no library for the target, `serval` says how to get it.
#[test]
fn a_project_in_rust_is_made_and_tested() {
    if has_rust_target() {
        return a_project_is_made_and_tested("rust", "function.rs");
    }
    let at = folder("no-rust");
    says(&at, &["new", "mine", "--language", "rust"], 0, "next");
    says(&at, &["build", "mine"], 1, "rustup target add wasm32-unknown-unknown");
}

#[test]
fn what_is_wrong_with_a_project_is_said_in_one_sentence() {
    let at = folder("wrong");
    says(&at, &["new", "a b"], 1, "a function cannot be called \"a b\"");
    says(&at, &["build", "nothing"], 1, "`serval fn new` makes a project");
    says(&at, &["new", "mine"], 0, "next");
    let said = serval_with(&at, &["build", "mine"], ("CLANG", "/nowhere/clang"));
    assert!(said.0 == 1 && said.1.contains("cannot be started"), "{}", said.1);
    assert!(said.1.contains("apt install clang lld"), "{}", said.1);
    let file = at.join("mine/function.toml");
    let manifest = fs::read_to_string(&file).unwrap();
    for (from, to, expected) in [
        ("language = \"c\"", "language = \"d\"", "[build] is wrong"),
        ("[build]", "[make]", "it has no [build]"),
        ("\"mergeable\"", "\"merged\"", "`state` of the manifest is \"merged\""),
        ("name = \"mine\"", "name = \"../mine\"", "`name` of the manifest is \"../mine\""),
        ("function.c\"", "nothing.c\"", "nothing.c cannot be compiled"),
        ("function.c\"", "../function.c\"", "is not a file in the project's folder"),
        ("function.c\"", "/dev/null\"", "is not a file in the project's folder"),
        ("function.c\"", "@options\"", "@options cannot be compiled"),
        ("function.c\"", "--version\"", "--version cannot be compiled"),
    ] {
        assert!(manifest.contains(from), "{manifest}");
        fs::write(&file, manifest.replace(from, to)).unwrap();
        says(&at, &["build", "mine"], 1, expected);
    }
    fs::write(&file, manifest).unwrap();
    // What a symbolic link in the place of an output points to is not overwritten.
    let other = at.join("other");
    fs::write(&other, "kept").unwrap();
    for output in ["mine/mine.wasm", "mine/.mine.wasm"] {
        let _ = fs::remove_file(at.join(output));
        std::os::unix::fs::symlink(&other, at.join(output)).unwrap();
        says(&at, &["build", "mine"], 0, "mine.wasm: version 0.1.0, ");
        assert_eq!(fs::read_to_string(&other).unwrap(), "kept");
    }
    fs::write(at.join("mine/messages.txt"), "request \"a\" pas\n").unwrap();
    says(&at, &["test", "mine"], 1, "line 1: a verdict is pass, drop");
    fs::write(at.join("mine/messages.txt"), "read nothing 1\n").unwrap();
    says(&at, &["test", "mine"], 1, "it has no register \"nothing\": it has pings");
    says(&at, &["bench", "mine"], 1, "has no request");
    fs::write(at.join("not.wasm"), "text").unwrap();
    says(&at, &["test", "not.wasm"], 1, "messages.txt cannot be read");
    says(&at, &["bench", "not.wasm", "--bytes", "64"], 1, "it is no WebAssembly module");
    says(&at, &["bench", "mine", "--bytes", "64", "--native", "none"], 2, "no built-in function");
    says(&at, &["bench", "coap-auth", "--bytes", "64"], 1, "coap-auth cannot be read");
}

/// A pcap file of datagrams from one port to another.
fn pcap(datagrams: &[(u16, u16, &[u8])]) -> Vec<u8> {
    let words = [0xa1b2_c3d4u32, 0x0004_0002, 0, 0, 65_535, 101];
    let mut file: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
    for (from, to, payload) in datagrams {
        let len = 28 + payload.len() as u16;
        let mut packet = vec![0u8; 28];
        (packet[0], packet[9]) = (0x45, 17);
        packet[2..4].copy_from_slice(&len.to_be_bytes());
        packet[20..22].copy_from_slice(&from.to_be_bytes());
        packet[22..24].copy_from_slice(&to.to_be_bytes());
        packet[24..26].copy_from_slice(&(len - 20).to_be_bytes());
        packet.extend_from_slice(payload);
        let record = [0, 0, u32::from(len), u32::from(len)];
        file.extend(record.into_iter().flat_map(u32::to_le_bytes));
        file.extend(packet);
    }
    file
}

#[test]
fn a_module_runs_on_the_datagrams_of_a_file() {
    let at = folder("pcap");
    says(&at, &["new", "mine"], 0, "next");
    let long = [b'x'; 1025];
    let datagrams: [(u16, u16, &[u8]); 5] = [
        (4000, 9000, b"ping"),
        (9000, 4000, b"pong"),
        (4000, 9000, &long),
        (4000, 9001, b"other"),
        (4000, 9000, b"hello\x00"),
    ];
    fs::write(at.join("traffic.pcap"), pcap(&datagrams)).unwrap();
    let run = ["test", "mine", "--pcap", "traffic.pcap", "--port", "9000", "--write", "made.txt"];
    let said = says(&at, &run, 0, "1 other packets");
    let rows: Vec<Vec<&str>> =
        said.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(
        rows[..4],
        [
            ["reply", "pass", "1"],
            ["request", "drop", "1"],
            ["request", "pass", "1"],
            ["request", "reply", "1"]
        ]
    );
    let made = fs::read_to_string(at.join("made.txt")).unwrap();
    assert!(made.contains("request \"ping\" reply \"pong\"\nreply \"pong\" pass\n"), "{made}");
    says(&at, &["test", "mine", "--messages", "made.txt"], 0, "4 messages, in batches");
    fs::write(at.join("text.pcap"), "this is no file of packets, but a text").unwrap();
    says(&at, &["test", "mine", "--pcap", "text.pcap"], 1, "it is no pcap file");
}

#[test]
fn a_project_is_built_and_attached_to_a_server() {
    let at = folder("attach");
    says(&at, &["new", "mine"], 0, "next");
    let port = free_port();
    let server = Running::start("fn-project", &table("echo", port, "echo", ""));
    let socket = server.socket.to_str().unwrap();
    let attach = ["attach", "echo", "mine", "mine", "--server", socket, "--deadline-us", "1000000"];
    says(&at, &attach, 0, "attached");
    let client = udp_client(([127, 0, 0, 1], port).into());
    assert_eq!(ask(&client, b"ping"), b"pong");
    assert_eq!(ask(&client, b"hello"), b"hello");
    assert_eq!(server.end(), 0);
}

/// The interface for Rust finds two mistakes when a function is compiled: replies that would be left out, and answers without room that
/// would let a message pass. (The compiler for this machine is enough to see that.)
#[test]
fn the_rust_interface_finds_replies_that_are_left_out_and_results_that_are_not_used() {
    let at = folder("rust-interface");
    let interface = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../functions/include");
    fs::copy(interface.join("serval_function.rs"), at.join("serval_function.rs")).unwrap();
    let function = |body: &str, more: &str| {
        format!(
            "use serval_function::*;\nmod serval_function;\n#[derive(Default)]\nstruct A;\n\
             impl Function for A {{ fn requests(&mut self, batch: &mut Batch<'_>) {{ {body} }} }}\n{more}\n"
        )
    };
    let replies =
        "impl Replies for A { fn replies(&mut self, batch: &mut Batch<'_>) { batch.drop(0) } }";
    let closed = "batch.reply_or_drop(0, b\"a\"); batch.rewrite_or_drop(1, b\"b\");";
    for (name, source, error) in [
        ("requests", function(closed, "serval_function!(A);"), None),
        (
            "both",
            function("batch.drop(0)", &format!("{replies}\nserval_function!(A, replies);")),
            None,
        ),
        (
            "left-out",
            function("batch.drop(0)", &format!("{replies}\nserval_function!(A);")),
            Some("write serval_function!(Type, replies)"),
        ),
        (
            "reply",
            function("batch.reply(0, b\"a\");", "serval_function!(A);"),
            Some("reply_or_drop"),
        ),
        (
            "rewrite",
            function("batch.rewrite(0, b\"a\");", "serval_function!(A);"),
            Some("rewrite_or_drop"),
        ),
    ] {
        let file = at.join(format!("{name}.rs"));
        fs::write(&file, source).unwrap();
        let mut compiler = Command::new("rustc");
        compiler.args(["--edition", "2024", "--crate-type", "lib", "--emit", "metadata"]);
        compiler.args(["-D", "unused_must_use", "--crate-name", "function", "-o"]);
        let output = compiler.arg(at.join("out.rmeta")).arg(&file).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.success(), error.is_none(), "{name}: {said}");
        assert!(said.contains(error.unwrap_or_default()), "{name}: {said}");
    }
}
