//! Control sockets: where they are, who finds them, and peers that say nothing.

mod common;

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use common::running::{Running, table};
use common::*;
use sys::local::{LocalListener, LocalSocket};

/// A folder for one test, which takes the place of `$XDG_RUNTIME_DIR`.
struct Runtime(PathBuf);

impl Runtime {
    fn new(name: &str) -> Self {
        // Paths of sockets are short.
        let folder = std::env::temp_dir().join(format!("sv-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    fn serval(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
        command.env("XDG_RUNTIME_DIR", &self.0);
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.serval().args(arguments).output().unwrap()
    }

    /// A server with these keys of `[engine]`, and its configuration.
    fn serve(&self, name: &str, engine: &str) -> (Peer, PathBuf) {
        let file = self.0.join(format!("{name}.toml"));
        let service = table(name, free_port(), "echo", "");
        std::fs::write(&file, format!("schema = 1\n[engine]\n{engine}\n{service}")).unwrap();
        let mut command = self.serval();
        command.args(["--json", "serve"]).arg(&file).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut server = Peer::start(&mut command, "cargo builds it");
        let mut ready = String::new();
        BufReader::new(server.0.stdout.as_mut().unwrap()).read_line(&mut ready).unwrap();
        assert!(ready.contains("\"ready\""), "{ready}");
        (server, file)
    }

    fn sockets(&self) -> Vec<PathBuf> {
        let Ok(entries) = std::fs::read_dir(self.0.join("serval")) else { return Vec::new() };
        entries.map(|entry| entry.unwrap().path()).collect()
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn said(output: &Output) -> (i32, String) {
    let text = [output.stdout.as_slice(), &output.stderr].concat();
    (output.status.code().unwrap(), String::from_utf8(text).unwrap())
}

#[test]
fn top_and_reload_find_the_one_server_that_runs() {
    let runtime = Runtime::new("one");
    let (mut first, file) = runtime.serve("first", "");
    let [socket] = &runtime.sockets()[..] else { panic!("{:?}", runtime.sockets()) };
    let mode = std::fs::metadata(socket).unwrap();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode.permissions()) & 0o777, 0o600);
    let (code, reloaded) = said(&runtime.run(&["reload"]));
    assert!(code == 0 && reloaded.contains("nothing has changed"), "{reloaded}");
    let (code, seen) = said(&runtime.run(&["top", "--json", "--interval", "0.1"]));
    assert!(code == 0 && seen.contains("\"name\":\"first\""), "{seen}");

    // Another one without a control socket changes nothing, one with makes a choice necessary.
    let (mut quiet, _) = runtime.serve("quiet", "control = \"off\"");
    assert_eq!(said(&runtime.run(&["reload"])).0, 0);
    quiet.stop();
    let (mut second, _) = runtime.serve("second", "");
    let (code, several) = said(&runtime.run(&["top", "--once"]));
    assert_eq!(code, 2, "{several}");
    assert!(several.contains("services first") && several.contains("services second"), "{several}");
    let named = socket.to_str().unwrap();
    for target in [named, file.to_str().unwrap()] {
        let (code, seen) = said(&runtime.run(&["top", target, "--json", "--interval", "0.1"]));
        assert!(code == 0 && seen.contains("\"name\":\"first\""), "{seen}");
    }
    assert_eq!(said(&runtime.run(&["reload", "--config", file.to_str().unwrap()])).0, 0);
    // Both folders are searched: the machine may have a server in the other one, but none with this file.
    let other = runtime.0.join("other.toml");
    std::fs::copy(&file, &other).unwrap();
    let (code, none) = said(&runtime.run(&["reload", "--config", other.to_str().unwrap()]));
    assert!(code == 1 && none.contains("no server answers in"), "{none}");
    let folders = format!("{:?} or \"/run/serval\"", runtime.0.join("serval"));
    assert!(none.contains(&folders), "{none}");

    // What a killed server leaves is not taken for one, and goes with the next start.
    first.signal("KILL");
    first.0.wait().unwrap();
    assert_eq!(runtime.sockets().len(), 2);
    assert_eq!(said(&runtime.run(&["reload"])).0, 0, "only the second answers");
    second.signal("TERM");
    assert!(second.0.wait().unwrap().success());
    let (_third, _) = runtime.serve("third", "");
    assert_eq!(runtime.sockets().len(), 1, "{:?}", runtime.sockets());
}

#[test]
fn a_default_that_cannot_be_made_is_a_warning_and_an_explicit_one_an_error() {
    let runtime = Runtime::new("open");
    let folder = runtime.0.join("serval");
    std::fs::create_dir(&folder).unwrap();
    let others = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(&folder, others).unwrap();
    let (_server, file) = runtime.serve("open", "");
    assert!(runtime.sockets().is_empty(), "{:?}", runtime.sockets());
    let socket = runtime.0.join("taken");
    let _taken = LocalListener::bind(&socket).unwrap();
    let set = format!("engine.control={}", socket.display());
    let port = "service.open.listen=udp://127.0.0.1:0";
    let refused = runtime.run(&["serve", file.to_str().unwrap(), "--set", &set, "--set", port]);
    let (code, why) = said(&refused);
    assert!(code == 1 && why.contains("another process listens there"), "{why}");
}

#[test]
fn silent_peers_do_not_block_others() {
    let _alone = alone();
    let running = Running::start("silent", &table("a", free_port(), "echo", ""));
    let connect = || LocalSocket::connect(&running.socket).unwrap();
    let silent: Vec<_> = (0..40).map(|_| connect()).collect();
    let (code, output, log) = running.reload();
    assert_eq!(code, 0, "{output}{log}");
    assert!(output.contains("\"unchanged\""), "{output}");
    drop(silent);
    assert_eq!(running.end(), 0);
}

#[test]
fn a_silent_server_is_given_up() {
    let runtime = Runtime::new("mute");
    let path = runtime.0.join("mute.sock");
    let listener = LocalListener::bind(&path).unwrap();
    let ask = |arguments: &[&str]| {
        let mut command = runtime.serval();
        command.args(arguments).arg(&path).stdout(Stdio::null()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let asking = [ask(&["reload"]), ask(&["top", "--once"])];
    let mut held = Vec::new();
    eventually("both have come", || {
        held.extend(listener.accept().unwrap());
        held.len() == 2
    });
    for child in asking {
        let (code, why) = said(&child.wait_with_output().unwrap());
        assert!(code == 1 && why.contains("does not answer within"), "{why}");
    }
}

#[test]
fn a_configuration_that_is_no_file_is_refused_at_a_reload_without_waiting() {
    let _alone = alone();
    let running = Running::start("fifo", &table("a", free_port(), "echo", ""));
    std::fs::remove_file(&running.file).unwrap();
    let made = Command::new("mkfifo").arg(&running.file).status().unwrap();
    assert!(made.success());
    let (code, output, _) = running.reload();
    assert!(code == 2 && output.contains("it is a FIFO, not a file"), "{output}");
    std::fs::remove_file(&running.file).unwrap();
    assert!(!Path::new(&running.file).exists());
    assert_eq!(running.end(), 0);
}
