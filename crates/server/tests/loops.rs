//! Datagrams with forged sources that would make services answer each other.

mod common;

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use common::change::{at, change, service};
use common::network::Network;
use common::*;
use engine::topology::{Service, Tenant, Topology};
use server::Server;
use wire::DropReason;
use wire::nic::Transport;

/// Sends datagrams of 32 bytes from an address that another socket of this user has, as a forger elsewhere would.
const FORGER: &str = r#"
#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
int main(int argc, char** argv) {
    (void)argc;
    struct sockaddr_in from = {0}, to = {0};
    from.sin_family = to.sin_family = AF_INET;
    from.sin_addr.s_addr = inet_addr(argv[1]);
    from.sin_port = htons(atoi(argv[2]));
    to.sin_addr.s_addr = inet_addr(argv[3]);
    to.sin_port = htons(atoi(argv[4]));
    int one = 1, udp = socket(AF_INET, SOCK_DGRAM, 0);
    if (setsockopt(udp, SOL_SOCKET, SO_REUSEPORT, &one, sizeof one)) return 1;
    if (bind(udp, (struct sockaddr*)&from, sizeof from)) return 2;
    for (int n = 0; n < 20; n++)
        if (sendto(udp, "a forged request of thirty-two b", 32, 0, (struct sockaddr*)&to, sizeof to) != 32) return 3;
    return 0;
}
"#;

/// A program from [`FORGER`].
struct Forger(PathBuf);

impl Forger {
    fn new() -> Self {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let source = folder.join(format!("forger-{}-{number}.c", std::process::id()));
        let program = source.with_extension("");
        std::fs::write(&source, FORGER).unwrap();
        let built = Command::new("cc").arg("-o").arg(&program).arg(&source).output();
        let built =
            built.unwrap_or_else(|error| panic!("cc does not start ({error}): install gcc"));
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        Self(program)
    }

    /// Sends [`FORGED`] datagrams.
    fn send(&self, from: SocketAddr, to: SocketAddr) {
        let ends = [from, to].map(|end| [end.ip().to_string(), end.port().to_string()]);
        let sent = Command::new(&self.0).args(ends.as_flattened()).status().unwrap();
        assert!(sent.success(), "{from} to {to}: {sent}");
    }
}

impl Drop for Forger {
    fn drop(&mut self) {
        _ = std::fs::remove_file(&self.0);
    }
}

const FORGED: u64 = 20;

#[test]
fn a_forged_datagram_starts_no_loop() {
    let forger = Forger::new();
    for (ip, workers) in [([127, 0, 0, 1], 1), ([0, 0, 0, 0], 2)] {
        let listen = |port| {
            let mut listen = at(Transport::Udp, port);
            listen.address.set_ip(IpAddr::from(ip));
            vec![listen]
        };
        let mut topology = topology(vec![service("first", listen(0), "echo")]);
        topology.engine.workers = workers;
        let mut server = start(topology);
        // The other service comes with a reload: all workers know its port.
        let port = free_port();
        let mut services = server.topology().services.clone();
        services.push(Service { ..service("second", listen(port), "echo") });
        change(&mut server, services);
        let addresses = [0, 1].map(|n| address(&server, n).port());
        for (from, to) in [(0, 1), (1, 0)] {
            let before = server.metrics().service(to);
            let loopback = |n: usize| SocketAddr::from(([127, 0, 0, 1], addresses[n]));
            forger.send(loopback(from), loopback(to));
            // provokes: looped_source
            eventually("all are dropped", || {
                let dropped = dropped(&server, to, DropReason::LoopedSource);
                dropped == before.dropped(DropReason::LoopedSource) + FORGED
            });
            assert_eq!(server.metrics().service(to).received, before.received);
        }
        // Other clients are answered.
        for port in addresses {
            let client = udp_client(SocketAddr::from(([127, 0, 0, 1], port)));
            assert_eq!(ask(&client, &[7; 32]), [7; 32]);
        }
        assert_accounts(&server);
        assert!(server.shutdown().is_clean());
    }
}

/// Ports on all addresses of a network namespace. The engine's own namespace does not have them.
#[test]
fn a_forged_datagram_starts_no_loop_in_the_namespace_of_a_tenant() {
    let _alone = alone();
    let Some(network) = Network::new() else {
        println!("SKIPPED: network namespaces are refused here (unshare --net), or there is no ip");
        return;
    };
    let path = network.path();
    network.add("198.18.0.1/32");
    network.add("198.18.0.2/32");
    let mut there = service("there", vec![at(Transport::Udp, 0)], "echo");
    there.listen[0].address.set_ip([0, 0, 0, 0].into());
    there.tenant = "blue".into();
    let mut blue = Tenant::new("blue");
    blue.confinement.netns = Some(path.clone());
    let mut server = start(Topology { tenants: vec![blue], ..topology(vec![there]) });
    let port = address(&server, 0).port();
    let forger = Forger::new();
    let forge = |from: u8, to: u8| {
        let [from, to] = [from, to].map(|last| SocketAddr::from(([198, 18, 0, last], port)));
        sys::netns::within(&path, || forger.send(from, to)).unwrap();
    };
    let all_are_dropped = |server: &Server, sent: u64| {
        eventually("all are dropped", || dropped(server, 0, DropReason::LoopedSource) == sent);
        assert_eq!(server.metrics().service(0).received, 0);
    };
    forge(2, 1);
    all_are_dropped(&server, FORGED);
    // An address that comes later counts from the next change on.
    network.add("198.18.0.3/32");
    let mut services = server.topology().services.clone();
    services.push(service("here", vec![udp()], "echo"));
    change(&mut server, services);
    forge(3, 1);
    all_are_dropped(&server, 2 * FORGED);
    // Other clients are answered.
    let client = sys::netns::within(&path, || udp_client(([198, 18, 0, 1], port).into())).unwrap();
    assert_eq!(ask(&client, &[7; 32]), [7; 32]);
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}
