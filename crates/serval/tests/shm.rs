//! Shared-memory ports: clients in rings of their own, through the real server.

mod common;

use std::path::{Path, PathBuf};
use std::time::Duration;

use common::*;
use engine::topology::Service;
use serval::client::shm::{Client, Options};
use serval::client::{self, Echo, Load};
use serval::server::Server;

/// A path that no other test uses.
fn port(name: &str) -> PathBuf {
    let folder = std::env::temp_dir();
    folder.join(format!("serval-test-{}-{name}", std::process::id()))
}

fn echo(path: &Path) -> Service {
    let mut service = Service::new("echo", Vec::new(), "echo");
    service.memory_ports = vec![path.to_owned()];
    service
}

fn serve(service: Service) -> Server {
    start(topology(vec![service]))
}

fn connect(path: &Path, depth: u32) -> Client {
    Client::connect(path, &Options { depth, timeout: PATIENCE }).expect("the client is let in")
}

fn ask_once(client: &mut Client, tag: u64, request: &[u8]) -> Vec<u8> {
    client.send(tag, request, PATIENCE).unwrap();
    let mut reply = vec![0; client.reply_bytes_max()];
    let answer = client.receive(&mut reply, PATIENCE).unwrap().expect("a reply in time");
    assert_eq!((answer.tag, answer.lost), (tag, None));
    reply.truncate(answer.len);
    reply
}

#[test]
fn messages_of_every_size_come_back() {
    let path = port("sizes");
    let mut service = echo(&path);
    service.max_message_bytes = 100_000;
    service.max_reply_bytes = 100_000;
    let server = serve(service);
    let mut client = connect(&path, 16);
    for (tag, len) in
        (0..200).chain([784, 1023, 1024, 1025, 4096, 65_536, 99_999, 100_000]).enumerate()
    {
        let request = pattern(len, tag);
        assert_eq!(ask_once(&mut client, tag as u64, &request), request, "{len} bytes");
    }
    drop(client);
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
    assert!(!path.exists(), "the socket's file goes with the server");
}

#[test]
fn a_closed_loop_gets_every_reply_right_over_1_28_and_240_mqueues() {
    for mqueues in [1, 28, 240] {
        let path = port(&format!("loop{mqueues}"));
        let mut service = echo(&path);
        service.mqueues = mqueues;
        let server = serve(service);
        let load = Load { window: 256, requests: 50_000, timeout: PATIENCE, ..Load::default() };
        let outcome = client::shm(&path, &load, &mut Echo::new(64)).unwrap();
        assert!(outcome.is_perfect(), "{mqueues} mqueues: {outcome:?}");
        assert_accounts(&server);
        assert_eq!(server.metrics().service(0).replied, 50_000);
        assert!(server.shutdown().is_clean());
    }
}

#[test]
fn an_idle_worker_is_woken_by_a_client() {
    let path = port("wake");
    let server = serve(echo(&path));
    let mut client = connect(&path, 4);
    for tag in 0..10 {
        // Longer than an adaptive worker looks for work.
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(ask_once(&mut client, tag, b"wake up"), b"wake up");
    }
    drop(client);
    assert_accounts(&server);
}
