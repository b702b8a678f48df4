//! The compiler of modules in a running server: whom it holds up, and with whom it ends. A script takes its place, which is as slow as a test wants.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use common::running::{Running, table};
use common::*;

/// A stand-in for the compiler, which does not end, and the files by which it says that it has started.
struct Slow(PathBuf);

impl Slow {
    fn new(name: &str) -> Self {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("compiler-{name}"));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        let text =
            format!("#!/bin/sh\n: >{}/$$.started\nexec /bin/sleep 100000\n", folder.display());
        // By another process: no fork of this one has it open for writing when it is started.
        let mut writer = Command::new("/bin/sh");
        writer.args(["-c", "printf '%s' \"$1\" >\"$2\" && chmod 755 \"$2\"", "sh", &text]);
        assert!(writer.arg(folder.join("slow")).status().unwrap().success());
        Self(folder)
    }

    fn server(&self, name: &str) -> (Running, u16) {
        let port = free_port();
        let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
        command.env("SERVAL_COMPILE", self.0.join("slow"));
        (Running::start_with(name, &table("echo", port, "echo", ""), command), port)
    }

    /// The processes that have been started.
    fn started(&self) -> Vec<u32> {
        let names = fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().file_name());
        let names = names.map(|name| name.into_string().unwrap());
        names.filter_map(|name| name.strip_suffix(".started")?.parse().ok()).collect()
    }

    fn one_starts(&self, known: &[u32]) -> u32 {
        let mut found = None;
        eventually("a compiler starts", || {
            found = self.started().into_iter().find(|process| !known.contains(process));
            found.is_some()
        });
        found.unwrap()
    }
}

/// Whether a process has ended; who has to reap it may not have done so.
fn has_ended(process: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").map(|(_, rest)| rest.as_bytes()[0]);
    matches!(state, None | Some(b'Z' | b'X'))
}

fn module() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../functions/threshold.wasm")
}

/// A client that attaches a module, and waits.
fn attach(server: &Running, name: &str, module: &Path) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
    command.args(["fn", "attach", "echo", name]).arg(module).arg("--server").arg(&server.socket);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn said(client: Child) -> (Option<i32>, String) {
    let output = client.wait_with_output().unwrap();
    let text = [output.stdout.as_slice(), &output.stderr].concat();
    (output.status.code(), String::from_utf8(text).unwrap())
}

fn list(server: &Running) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
    let output = command.args(["--json", "fn", "list", "--server"]).arg(&server.socket).output();
    String::from_utf8(output.unwrap().stdout).unwrap()
}

#[test]
fn a_compile_holds_up_nobody_and_ends_with_its_client() {
    let slow = Slow::new("client");
    let (server, port) = slow.server("compiler-client");
    let mut waits = attach(&server, "first", &module());
    let first = slow.one_starts(&[]);
    // Other requests, a reload and clients of the service do not wait.
    assert!(list(&server).contains("\"functions\":[]"), "{}", list(&server));
    let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
    command.args(["fn", "attach", "echo", "plain", "passthrough", "--server"]).arg(&server.socket);
    assert!(command.status().unwrap().success());
    server.write("", &table("echo", port, "echo", "mqueues = 2"));
    let (code, output, _) = server.reload();
    assert!(code == 0 && output.contains("\"changed\""), "{output}");
    assert_eq!(ask(&udp_client(([127, 0, 0, 1], port).into()), b"x"), b"x");
    // Another module of the same tenant waits for its turn.
    let second_waits = attach(&server, "second", &module());
    eventually("its request is there", || list(&server).contains("plain"));
    assert_eq!((slow.started(), has_ended(first)), (vec![first], false));
    waits.kill().unwrap();
    waits.wait().unwrap();
    eventually("the compiler ends with its client", || has_ended(first));
    let second = slow.one_starts(&[first]);
    // A compiler that is killed is one sentence, and the server goes on.
    assert!(Command::new("kill").args(["-9", &second.to_string()]).status().unwrap().success());
    let (code, text) = said(second_waits);
    assert!(code == Some(1) && text.contains("was ended by SIGKILL"), "{code:?} {text}");
    let listed = list(&server);
    assert!(!listed.contains("first") && !listed.contains("second"), "{listed}");
    assert_eq!(ask(&udp_client(([127, 0, 0, 1], port).into()), b"x"), b"x");
    assert_eq!(server.end(), 0);
}

#[test]
fn a_compile_ends_with_the_engine() {
    let slow = Slow::new("engine");
    // In good order.
    let (server, _) = slow.server("compiler-end");
    let waits = attach(&server, "first", &module());
    let first = slow.one_starts(&[]);
    assert_eq!(server.end(), 0);
    eventually("the compiler ends", || has_ended(first));
    assert_eq!(said(waits).0, Some(1));
    // And if it is killed.
    let (mut server, _) = slow.server("compiler-killed");
    let waits = attach(&server, "second", &module());
    let second = slow.one_starts(&[first]);
    server.process.0.kill().unwrap();
    server.process.0.wait().unwrap();
    eventually("the compiler ends with the engine", || has_ended(second));
    assert_eq!(said(waits).0, Some(1));
    let _ = fs::remove_file(&server.socket);
}

/// While a reload waits for its modules another one waits for it, and both have what the file says at last.
#[test]
fn a_reload_waits_for_its_modules_and_nothing_waits_for_it() {
    let slow = Slow::new("reload");
    let (server, port) = slow.server("compiler-reload");
    let function = format!(
        "[[service.function]]\nname = \"limits\"\nfunction = {:?}\n",
        module().canonicalize().unwrap()
    );
    let with = table("echo", port, "echo", "") + &function;
    server.write("", &with);
    let reload = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
        command.args(["--json", "reload"]).arg(&server.socket);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let first_waits = reload();
    let first = slow.one_starts(&[]);
    assert!(list(&server).contains("\"functions\":[]"));
    // The next one reads a file without the module.
    server.write("", &table("echo", port, "echo", "mqueues = 2"));
    let mut second_waits = reload();
    eventually("requests are answered", || list(&server).contains("functions"));
    assert!(second_waits.try_wait().unwrap().is_none(), "it waits for the first");
    assert!(Command::new("kill").args(["-9", &first.to_string()]).status().unwrap().success());
    let (code, text) = said(first_waits);
    assert!(code != Some(0) && text.contains("was ended by SIGKILL"), "{code:?} {text}");
    let (code, text) = said(second_waits);
    assert!(code == Some(0) && text.contains("\"changed\""), "{code:?} {text}");
    assert_eq!(slow.started(), [first]);
    assert_eq!(server.end(), 0);
}

/// A module with this number of functions, each of which does nothing.
fn empty_functions(count: u32) -> Vec<u8> {
    let number = |mut number: u32| {
        let mut bytes = Vec::new();
        while number >= 0x80 {
            bytes.push(number as u8 | 0x80);
            number >>= 7;
        }
        bytes.push(number as u8);
        bytes
    };
    let section =
        |id: u8, content: Vec<u8>| [vec![id], number(content.len() as u32), content].concat();
    let of = |entry: &[u8]| [number(count), entry.repeat(count as usize)].concat();
    [
        b"\0asm\x01\0\0\0".to_vec(),
        section(1, vec![1, 0x60, 0, 0]),
        section(3, of(&[0])),
        section(10, of(&[2, 0, 0x0b])),
    ]
    .concat()
}

#[test]
fn a_module_of_too_many_functions_is_refused_before_it_is_compiled() {
    let slow = Slow::new("many");
    let (server, _) = slow.server("compiler-many");
    for (count, said_of_it) in [
        (20_000, "it has 20000 functions, and a module has at most 10000"),
        (1_000_000, "it has 1000000 functions, and a module has at most 10000"),
    ] {
        let file = slow.0.join("many.wasm");
        fs::write(&file, empty_functions(count)).unwrap();
        let (code, text) = said(attach(&server, "many", &file));
        assert!(code == Some(1) && text.contains(said_of_it), "{count}: {code:?} {text}");
    }
    assert_eq!(slow.started(), [0; 0]);
    assert_eq!(server.end(), 0);
}

/// The compiler does not rely on the engine.
#[test]
fn the_compiler_has_the_same_limit() {
    let compiler = onpath::wasm::compiler();
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("compiler-limit.wasm");
    for (count, code) in [(10_000, 0), (10_001, 1), (1_000_000, 1)] {
        fs::write(&file, empty_functions(count)).unwrap();
        let mut command = Command::new(&compiler);
        let output = command.stdin(fs::File::open(&file).unwrap()).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{count}: {output:?}");
        assert_eq!(output.stdout.is_empty(), code == 1);
    }
}
