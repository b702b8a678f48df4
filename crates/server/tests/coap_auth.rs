//! The function `coap-auth` in front of a UDP server that knows nothing of it.

mod common;

use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aws_lc_rs::hmac;
use common::change::never;
use common::*;
use engine::topology::{Service, Topology};
use onpath::{Param, Spec};
use server::Server;

/// A key and a token of `crates/builtins/tests/functions/coap_auth.rs`, and another key.
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
    spec.deadline_us = onpath::spec::DEADLINE_US_MAX;
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
    let read = server.functions.read(&server.engine, "coap", "auth").unwrap();
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

fn base64(bytes: &[u8]) -> String {
    let alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let digit = |at: usize| {
        let bit = 6 * at;
        let word = (0..2).map(|next| bytes.get(bit / 8 + next).copied().unwrap_or(0));
        let word = word.fold(0u16, |word, byte| word << 8 | u16::from(byte));
        char::from(alphabet[usize::from(word >> (10 - bit % 8) & 63)])
    };
    (0..(8 * bytes.len()).div_ceil(6)).map(digit).collect()
}

/// A token that was issued now, signed with [`KEY`].
fn token(number: u32) -> String {
    let key: Vec<u8> = (0..64).collect();
    let key = hmac::Key::new(hmac::HMAC_SHA256, &key);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let body = format!("{{\"iat\":{now},\"jti\":{number}}}");
    let text = format!("{}.{}", base64(br#"{"alg":"HS256","typ":"JWT"}"#), base64(body.as_bytes()));
    let signature = hmac::sign(&key, text.as_bytes());
    format!("{text}.{}", base64(signature.as_ref()))
}

/// RFC 7252, section 4.2: a client that reads no acknowledgement sends the same message again, up to four times. That is no replay of
/// its token; another message with it is.
#[test]
fn a_message_sent_four_times_passes_and_another_one_with_its_token_does_not() {
    let _alone = alone();
    for workers in [1, 2] {
        let plain = Plain::start();
        let keys = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("coap-once.keys");
        std::fs::write(&keys, format!("a {KEY}\n")).unwrap();
        let mut wanted = topology_of(&plain, &keys);
        wanted.engine.workers = workers;
        let params = &mut wanted.services[0].functions[0].params;
        params.push(("once".into(), Param::Integer(1)));
        params.push(("window_s".into(), Param::Integer(3600)));
        let server = start(wanted);
        let (client, other) = (udp_client(address(&server, 0)), udp_client(address(&server, 0)));
        let seen = || plain.seen.load(Ordering::Relaxed);
        // One after the other, and all of them in flight together.
        let (first, second) = (token(1), token(2));
        for _ in 0..4 {
            assert_eq!(ask(&client, &post(1, &first)), post(1, &first));
        }
        (0..4).for_each(|_| assert!(client.send(&post(2, &second)).is_ok()));
        for _ in 0..4 {
            let mut bytes = [0; 2048];
            let len = client.recv(&mut bytes).expect("a reply in time");
            assert_eq!(bytes[..len], post(2, &second));
        }
        assert_eq!((seen(), counted(&server, "passed"), counted(&server, "replayed")), (8, 8, 0));
        // The token with another message ID, of this client and of another one. Of a message 12 bits of a hash are remembered, so one of
        // 4096 passes: two of 16 do not.
        let is_refused = |id: &u16| {
            let who = if id % 2 == 0 { &client } else { &other };
            let answer = ask(who, &post(*id, &first));
            let passes = answer == post(*id, &first);
            assert!(passes || answer == [0x60, 0x81, 0, *id as u8], "{answer:?}");
            !passes
        };
        let refused = (100..116).filter(is_refused).count() as u64;
        assert!(refused >= 15, "{refused} of 16 are refused");
        assert_eq!((seen(), counted(&server, "replayed")), (8 + 16 - refused, refused));
        // The first message goes on.
        assert_eq!(ask(&client, &post(1, &first)), post(1, &first));
        assert_accounts(&server);
        assert!(server.shutdown().is_clean());
    }
}
