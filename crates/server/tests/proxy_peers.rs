//! Proxies in front of unmodified servers, asked by stock clients.

mod common;

use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

use common::*;
use engine::topology::{Service, Topology};
use onpath::Spec;

/// Where Debian installs dnsmasq is in the path of root only.
const DNSMASQ: &[&str] = &["dnsmasq", "/usr/sbin/dnsmasq"];
const GET: &str = "install dnsmasq-base and dnsperf (make setup-test does)";
/// Names that the DNS server knows; as many again have no address.
const NAMES: usize = 300;

/// An unmodified DNS server that knows [`NAMES`] names.
struct Dnsmasq {
    process: Child,
    address: SocketAddr,
    folder: std::path::PathBuf,
}

fn ip_of(name: usize) -> [u8; 4] {
    [10, 1, (name >> 8) as u8, name as u8]
}

impl Dnsmasq {
    fn start() -> Self {
        // The port was free a moment ago: if another program took it meanwhile, the next one is tried.
        (0..10).find_map(|_| Self::start_on(free_port())).expect("dnsmasq starts")
    }

    fn start_on(port: u16) -> Option<Self> {
        let folder = std::env::temp_dir().join(format!("serval-dns-{}-{port}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let line = |name: usize| {
            let [a, b, c, d] = ip_of(name);
            format!("{a}.{b}.{c}.{d} n{name}.test\n")
        };
        let hosts = folder.join("hosts");
        std::fs::write(&hosts, (0..NAMES).map(line).collect::<String>()).unwrap();
        let start = |program: &&str| {
            let mut command = Command::new(program);
            command.args(["--no-daemon", "--conf-file=/dev/null", "--pid-file", "--no-hosts"]);
            command.args(["--listen-address=127.0.0.1", "--bind-interfaces", "--no-resolv"]);
            // It stays what it is, and answers for all names below `test`.
            command.args(["--user=", "--group=", "--local=/test/", "--log-facility=/dev/null"]);
            command.arg(format!("--port={port}")).arg(format!("--addn-hosts={}", hosts.display()));
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()
        };
        let process = DNSMASQ.iter().find_map(start).expect(GET);
        let address = ([127, 0, 0, 1], port).into();
        let mut server = Self { process, address, folder };
        let client = udp_client(address);
        client.set_read_timeout(Some(std::time::Duration::from_millis(50))).unwrap();
        for _ in 0..400 {
            if server.process.try_wait().unwrap().is_some() {
                return None;
            }
            let answered =
                client.send(&question(0, 0)).is_ok() && client.recv(&mut [0; 512]).is_ok();
            if answered {
                return Some(server);
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        None
    }
}

impl Drop for Dnsmasq {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// A question for the address of a name (RFC 1035, 4.1).
fn question(id: u16, name: usize) -> Vec<u8> {
    let label = format!("n{name}");
    let mut message = id.to_be_bytes().to_vec();
    message.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0, label.len() as u8]);
    message.extend(label.as_bytes());
    message.extend(b"\x04test\0\0\x01\0\x01");
    message
}

fn server(upstream: SocketAddr, workers: usize) -> server::Server {
    let mut service = Service::proxy("dns", vec![udp()], upstream);
    // On the path of every message: a function that lets everything pass, and one that counts.
    service.functions = vec![Spec::new("first", "passthrough"), Spec::new("limits", "threshold")];
    for spec in &mut service.functions {
        // The machine is busy.
        spec.deadline_us = onpath::spec::DEADLINE_US_MAX;
    }
    let mut topology = Topology { accelerators: Vec::new(), ..topology(vec![service]) };
    topology.engine.workers = workers;
    start(topology)
}

#[test]
fn every_answer_of_a_dns_server_is_the_one_that_it_gives_directly() {
    let dnsmasq = Dnsmasq::start();
    let server = server(dnsmasq.address, 2);
    let direct = udp_client(dnsmasq.address);
    let clients: Vec<_> = (0..7).map(|_| udp_client(address(&server, 0))).collect();
    for name in 0..2 * NAMES {
        let question = question(name as u16, name);
        let answer = ask(&clients[name % clients.len()], &question);
        assert_eq!(answer, ask(&direct, &question), "n{name}.test");
        assert_eq!(answer.ends_with(&ip_of(name)), name < NAMES, "{answer:02x?}");
    }
    assert_accounts(&server);
    let counted = server.metrics().service(0);
    assert_eq!((counted.received, counted.replied), (2 * NAMES as u64, 2 * NAMES as u64));
    let read = server.functions.read(&server.engine, "dns", "limits").unwrap();
    let count = read.iter().find(|(name, _)| name == "count").expect("it counts");
    assert_eq!(count.1, 2 * NAMES as u64, "the chain has seen every request");
    assert!(server.shutdown().is_clean());
}

#[test]
fn dnsperf_finds_every_answer() {
    let dnsmasq = Dnsmasq::start();
    let server = server(dnsmasq.address, 1);
    let questions = dnsmasq.folder.join("questions");
    let lines = (0..2 * NAMES).map(|name| format!("n{name}.test A\n"));
    std::fs::write(&questions, lines.collect::<String>()).unwrap();
    let port = address(&server, 0).port().to_string();
    // Few at a time, which no socket is too small for: what is lost here was lost by the proxy.
    let run = Command::new("dnsperf")
        .args(["-s", "127.0.0.1", "-p", &port, "-q", "20", "-c", "4", "-n", "3", "-t", "30"])
        .arg("-d")
        .arg(&questions)
        .stdin(Stdio::null())
        .output()
        .expect(GET);
    let text = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{text}{}", String::from_utf8_lossy(&run.stderr));
    let line = |what: &str| {
        let found = text.lines().find_map(|line| line.trim().strip_prefix(what));
        found.unwrap_or_else(|| panic!("no {what:?} in\n{text}")).trim().to_owned()
    };
    assert!(line("Queries sent:").starts_with("1800"), "{text}");
    assert!(line("Queries completed:").starts_with("1800 "), "{text}");
    assert!(
        line("Response codes:").contains("NOERROR 900 (50.00%), NXDOMAIN 900 (50.00%)"),
        "{text}"
    );
    assert_accounts(&server);
    assert_eq!(server.metrics().service(0).upstream_flows_opened, 4);
    assert!(server.shutdown().is_clean());
}
