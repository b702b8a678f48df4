//! Services on several accelerators, of the same and of different kinds: requests go where there is credit, and
//! what happens to one accelerator is not the others' business.

mod common;

use std::path::Path;
use std::process::{Command, Stdio};

use common::*;
use server::Server;
use server::config::{Config, Overrides};
use wire::DropReason;

/// A service called "a" on these accelerators.
fn service(accelerators: &str, kernel: &str, more: &str) -> String {
    format!(
        "[[service]]\nname = \"a\"\nlisten = \"udp://127.0.0.1:0\"\naccelerator = {accelerators}\n\
         request_timeout_ms = 60000\nkernel = \"{kernel}\"\n{more}\n"
    )
}

fn process(name: &str, more: &str) -> String {
    format!("[[accelerator]]\nname = \"{name}\"\nkind = \"process\"\n{more}\n")
}

const INSIDE: &str = "[[accelerator]]\nname = \"inside\"\n";
const BESIDE: &str = "[[accelerator]]\nname = \"beside\"\nplacement = \"threads\"\nthreads = 2\n";

fn start_here(engine: &str, config: &str) -> Server {
    let text = format!("schema = 1\n[engine]\n{engine}\n{config}");
    let config = Config::parse("several.toml", &text, Path::new(""), &Overrides::default());
    start(config.unwrap_or_else(|error| panic!("{error}")).topology)
}

/// The metrics of the service on an accelerator in a separate process.
fn of(served: &Served, what: &str, accelerator: &str) -> u64 {
    let labels = format!("{{service=\"a\",accelerator=\"{accelerator}\"}}");
    served.metric(&format!("serval_accelerator_{what}{labels}"))
}

fn lost(served: &Served) -> u64 {
    served.dropped("a", DropReason::AcceleratorLost)
}

fn exchange_many(served: &Served, count: usize) {
    let socket = udp_client(served.services[0][0]);
    for n in 0..count {
        let message = pattern(1 + n * 7 % 1000, n);
        assert_eq!(ask(&socket, &message), message, "message {n}");
    }
}

#[test]
fn each_accelerator_has_its_configured_mqueues_and_all_serve() {
    for workers in 1..=3 {
        for dispatch in ["round-robin", "least-loaded", "flow-hash", "key-hash\"\nkey = \"0:2"] {
            let more = format!(
                "mqueues = [2, 5]\nparams = {{ microseconds = 1000 }}\ndispatch = \"{dispatch}\"\n"
            );
            let service = service("[\"inside\", \"beside\"]", "delay", &more);
            let server =
                start_here(&format!("workers = {workers}"), &format!("{INSIDE}{BESIDE}{service}"));
            eventually("every mqueue has had a request", || {
                // Others each time, and all at once: some policies look at the client, some at who is busy.
                let clients: Vec<_> = (0..30).map(|_| udp_client(address(&server, 0))).collect();
                for (salt, client) in clients.iter().enumerate() {
                    client.send(&pattern(100, salt)).unwrap();
                }
                for (salt, client) in clients.iter().enumerate() {
                    let mut reply = [0; 200];
                    let len = client.recv(&mut reply).expect("a reply in time");
                    assert_eq!(reply[..len], pattern(100, salt), "{workers} {dispatch}");
                }
                server.received_by_block(0).iter().all(|received| *received > 0)
            });
            assert_eq!(server.received_by_block(0).len(), 7, "two and five");
            assert_accounts(&server);
            assert!(server.shutdown().is_clean());
        }
    }
}

#[test]
fn one_accelerator_is_killed_repeatedly_and_the_other_keeps_serving() {
    let config = INSIDE.to_owned()
        + &process("apart", "")
        + &service(
            "[\"inside\", \"apart\"]",
            "delay",
            "mqueues = [1, 2]\nslots = 16\nparams = { microseconds = 2000 }\n",
        );
    let served = Served::start("several-killed", "workers = 2", &config);
    for round in 0..3 {
        let before = lost(&served);
        let clients: Vec<_> = (0..24).map(|_| udp_client(served.services[0][0])).collect();
        eventually("requests end with their runtime", || {
            eventually("the runtime serves", || of(&served, "up", "apart") == 1);
            let ended = of(&served, "restarts_total", "apart");
            for (number, client) in clients.iter().enumerate() {
                client.send(&pattern(40, number)).unwrap();
            }
            children(served.process.0.id()).into_iter().for_each(|runtime| signal(runtime, "KILL"));
            eventually("the engine has noticed", || of(&served, "restarts_total", "apart") > ended);
            lost(&served) > before
        });
        // Requests are answered now, whether it is present or not.
        exchange_many(&served, 100);
        assert_eq!(served.dropped("a", DropReason::NoAccelerator), 0, "round {round}");
    }
    eventually("the runtime serves again", || of(&served, "up", "apart") == 1);
    exchange_many(&served, 50);
    assert_eq!(served.dropped("a", DropReason::RequestTimeout), 0);
    assert_eq!(served.drain(), 0);
}

#[test]
fn an_absent_accelerator_is_not_waited_for_and_serves_after_it_attaches() {
    let path = std::env::temp_dir().join(format!("serval-several-{}", std::process::id()));
    let external = format!("launch = \"external\"\nattach = \"{}\"", path.display());
    // The mqueue inside takes one request at a time.
    let more = "mqueues = [1, 3]\nslots = 1\nparams = { microseconds = 20000 }\n";
    let config = INSIDE.to_owned()
        + &process("late", &external)
        + &service("[\"inside\", \"late\"]", "delay", more);
    let served = Served::start("several-late", "", &config);
    exchange_many(&served, 5);
    let clients: Vec<_> = (0..4).map(|_| udp_client(served.services[0][0])).collect();
    let shed = || served.dropped("a", DropReason::NoCredit);
    let ask_all = || {
        for client in &clients {
            client.send(b"at once").unwrap();
        }
    };
    eventually("there is credit for one only", || {
        ask_all();
        shed() > 0
    });
    let mut attach = Command::new(env!("CARGO_BIN_EXE_serval"));
    attach.arg("attach").arg(&path).stderr(Stdio::null());
    let runtime = Peer::start(&mut attach, "cargo builds it");
    eventually("it serves", || of(&served, "up", "late") == 1);
    eventually("there is credit for four", || {
        let outstanding = served.metric("serval_outstanding_requests{service=\"a\"}");
        let before = (shed(), outstanding);
        ask_all();
        eventually("all have an outcome", || {
            served.metric("serval_outstanding_requests{service=\"a\"}") == 0
        });
        before == (shed(), 0)
    });
    assert_eq!(served.dropped("a", DropReason::NoAccelerator), 0);
    assert_eq!(served.drain(), 0);
    drop(runtime);
}
