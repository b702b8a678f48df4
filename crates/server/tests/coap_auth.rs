//! The function `coap-auth` in front of a UDP server that knows nothing of it.

mod common;

use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use common::change::never;
use common::*;
use engine::topology::{Service, Topology};
use onpath::{Param, Spec};
use server::Server;

/// A key and a token of `crates/onpath/tests/functions/coap_auth.rs`, and another key.
const KEY: &str =
    "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vMDEyMzQ1Njc4OTo7PD0-Pw";
const OTHER_KEY: &str =
    "AyM1SysPpbyDfgZld3umj1qzKObwVMkoqQ-EstJQLr_T-1qS0gZH75aKtMN3Yj0iPS4hcgUuTwjAzZr1Z9CAow";
const TOKEN: &str = "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NSIsImlhdCI6MTcwMDAwMDAwMH0.YnoXAwK6S6sCjzL3mxzVJFAs92FIOMoHshFld8ugC_Q";

/// A server that answers each datagram with its own bytes, and counts them.
struct Plain {
    socket: Arc<UdpSocket>,
    seen: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Plain {
    fn start() -> Self {
        let socket = Arc::new(UdpSocket::bind("127.0.0.1:0").unwrap());
        socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let (seen, stop) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (own, count, end) = (socket.clone(), seen.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            let mut bytes = [0; 2048];
            while !end.load(Ordering::Relaxed) {
                if let Ok((len, from)) = own.recv_from(&mut bytes) {
                    count.fetch_add(1, Ordering::Relaxed);
                    own.send_to(&bytes[..len], from).unwrap();
                }
            }
        });
        Self { socket, seen, stop, thread: Some(thread) }
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().map(JoinHandle::join);
    }
}

/// A confirmable POST with this token and number.
fn post(number: u16, token: &str) -> Vec<u8> {
    let id = number.to_be_bytes();
    let head = [0x40, 2, id[0], id[1], 0xff, 0xa2, 0x65];
    let mut bytes = [&head[..], b"token", &[0x78, token.len() as u8], token.as_bytes()].concat();
    bytes.extend_from_slice(b"\x67payload\x18\x2a");
    bytes
}

fn topology_of(plain: &Plain, keys: &Path) -> Topology {
    let mut spec = Spec::new("auth", "coap-auth");
    // The machine is busy.
    spec.deadline_us = onpath::library::DEADLINE_US_MAX;
    spec.params = vec![
        ("keys".into(), Param::Text(keys.to_string_lossy().into_owned())),
        ("refuse".into(), "answer".into()),
    ];
    let service = Service {
        functions: vec![spec],
        request_timeout_ms: 20_000,
        ..Service::proxy("coap", vec![udp()], plain.socket.local_addr().unwrap())
    };
    Topology { accelerators: Vec::new(), ..topology(vec![service]) }
}

fn counted(server: &Server, register: &str) -> u64 {
    let read = server.read_function("coap", "auth").unwrap();
    read.iter().find(|(name, _)| name == register).expect("it has this register").1
}

#[test]
fn forged_requests_do_not_reach_the_server() {
    let _alone = alone();
    let plain = Plain::start();
    let keys = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("coap.keys");
    std::fs::write(&keys, format!("a {KEY}\n")).unwrap();
    let wanted = topology_of(&plain, &keys);
    let mut server = start(wanted.clone());
    let client = udp_client(address(&server, 0));
    let mut forged = TOKEN.to_owned();
    forged.replace_range(TOKEN.len() - 43..TOKEN.len() - 42, "Z");
    // Ten forged requests for each good one, all in flight together.
    for number in 0..20 {
        for _ in 0..10 {
            client.send(&post(number, &forged)).unwrap();
        }
        client.send(&post(number, TOKEN)).unwrap();
        let (mut refused, mut answered) = (0, 0);
        let mut bytes = [0; 2048];
        while refused + answered < 11 {
            let len = client.recv(&mut bytes).expect("a reply in time");
            let id = number.to_be_bytes();
            if bytes[..len] == [0x60, 0x81, id[0], id[1]] {
                refused += 1;
            } else {
                assert_eq!(bytes[..len], post(number, TOKEN));
                answered += 1;
            }
        }
        assert_eq!((refused, answered), (10, 1));
    }
    assert_eq!(plain.seen.load(Ordering::Relaxed), 20, "the server has seen the good ones");
    assert_eq!((counted(&server, "passed"), counted(&server, "bad_signature")), (20, 200));
    assert_eq!(ask(&client, &[0x40, 0, 1, 2]), [0x70, 0, 1, 2], "a ping");
    // A reload reads the file again.
    std::fs::write(&keys, format!("b {OTHER_KEY}\n")).unwrap();
    server.change(wanted.clone(), &never).unwrap();
    assert_eq!(ask(&client, &post(7, TOKEN)), [0x60, 0x81, 0, 7]);
    assert_eq!((counted(&server, "passed"), counted(&server, "bad_signature")), (0, 1));
    // A wrong file changes nothing, and its content is in no error.
    std::fs::write(&keys, "b secret\n").unwrap();
    let error = server.change(wanted, &never).expect_err("a key is too short").to_string();
    let text = format!("{error:?}");
    assert!(!text.contains("secret"), "{text}");
    assert_eq!(ask(&client, &post(7, TOKEN)), [0x60, 0x81, 0, 7]);
    assert_eq!(plain.seen.load(Ordering::Relaxed), 20);
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}
