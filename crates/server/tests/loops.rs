//! Datagrams with forged sources that would make services answer each other.

mod common;

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::Command;

use common::change::{at, change, service};
use common::*;
use engine::topology::Service;
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
    from.sin_addr.s_addr = to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    from.sin_port = htons(atoi(argv[1]));
    to.sin_port = htons(atoi(argv[2]));
    int one = 1, udp = socket(AF_INET, SOCK_DGRAM, 0);
    if (setsockopt(udp, SOL_SOCKET, SO_REUSEPORT, &one, sizeof one)) return 1;
    if (bind(udp, (struct sockaddr*)&from, sizeof from)) return 2;
    for (int n = 0; n < 20; n++)
        if (sendto(udp, "a forged request of thirty-two b", 32, 0, (struct sockaddr*)&to, sizeof to) != 32) return 3;
    return 0;
}
"#;

fn forger() -> std::path::PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let source = folder.join(format!("forger-{}.c", std::process::id()));
    let program = source.with_extension("");
    std::fs::write(&source, FORGER).unwrap();
    let built = Command::new("cc").arg("-o").arg(&program).arg(&source).output();
    let built = built.unwrap_or_else(|error| panic!("cc does not start ({error}): install gcc"));
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    program
}

#[test]
fn a_forged_datagram_starts_no_loop() {
    let forger = forger();
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
            let [from_port, to_port] = [from, to].map(|n: usize| addresses[n].to_string());
            let sent = Command::new(&forger).args([&from_port, &to_port]).status().unwrap();
            assert!(sent.success(), "{sent}");
            // provokes: looped_source
            eventually("all are dropped", || {
                let dropped = dropped(&server, to, DropReason::LoopedSource);
                dropped == before.dropped(DropReason::LoopedSource) + 20
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
    std::fs::remove_file(&forger).unwrap();
}
