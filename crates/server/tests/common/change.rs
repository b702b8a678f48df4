//! What the tests of changes share: services that change while others are asked.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use engine::topology::{Listen, Service, Topology};
use server::{Server, ServiceAction};
use wire::framing::Framing;
use wire::nic::Transport;

use super::{
    Random, address, ask, assert_accounts, eventually, exchange, free_port, tcp_client, udp_client,
};

pub(crate) fn never() -> bool {
    false
}

pub(crate) fn service(name: &str, listen: Vec<Listen>, kernel: &str) -> Service {
    let mut service = Service::new(name, listen, kernel);
    service.framing = Framing::Fixed(32);
    // As `topology` has it, so that a service is the same before and behind it.
    service.request_timeout_ms = 60_000;
    service
}

pub(crate) fn at(transport: Transport, port: u16) -> Listen {
    Listen { transport, address: ([127, 0, 0, 1], port).into() }
}

pub(crate) fn both(port: u16) -> Vec<Listen> {
    vec![at(Transport::Udp, port), at(Transport::Tcp, port)]
}

/// 32 bytes, all the same.
pub(crate) fn message(byte: u8) -> [u8; 32] {
    [byte; 32]
}

/// Sends a request and returns its reply.
pub(crate) type Asking = Box<dyn FnMut(&[u8; 32]) -> Vec<u8> + Send>;

/// Clients that ask without a pause and check every reply; a missing one fails the test.
pub(crate) struct Askers {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    threads: Vec<JoinHandle<()>>,
}

impl Askers {
    pub(crate) fn start(udp: SocketAddr, tcp: SocketAddr) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let answered = Arc::new(AtomicU64::new(0));
        let loops: [Asking; 2] = [
            {
                let client = udp_client(udp);
                Box::new(move |request| ask(&client, request))
            },
            {
                let mut stream = tcp_client(tcp);
                Box::new(move |request| exchange(&mut stream, request, 32))
            },
        ];
        let thread = |mut once: Asking| {
            let (stop, answered) = (stop.clone(), answered.clone());
            std::thread::spawn(move || {
                let mut byte = 0u8;
                while !stop.load(Ordering::Relaxed) {
                    byte = byte.wrapping_add(1);
                    assert_eq!(once(&message(byte)), message(byte));
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            })
        };
        let threads = loops.into_iter().map(thread).collect();
        Self { stop, answered, threads }
    }

    /// Waits until there were some more answers.
    pub(crate) fn go_on(&self) {
        let before = self.answered.load(Ordering::Relaxed);
        eventually("the others are still answered", || {
            self.answered.load(Ordering::Relaxed) >= before + 4
        });
    }

    pub(crate) fn finish(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().expect("every request was answered rightly");
        }
        self.answered.load(Ordering::Relaxed)
    }
}

pub(crate) fn change(server: &mut Server, services: Vec<Service>) -> Vec<(String, ServiceAction)> {
    let wanted = Topology { services, ..server.topology().clone() };
    let report = server.change(wanted, &never).expect("it can be done");
    assert!(report.services.iter().all(|s| s.unanswered == 0 && !s.left_behind), "{report:?}");
    report.services.into_iter().map(|s| (s.name, s.action)).collect()
}

/// Adds, changes and removes the service `b` many times, while `a` is asked. `b` is on one of the accelerators `on` after
/// the other.
pub(crate) fn change_under_load(mut server: Server, rounds: usize, on: &[usize]) {
    let (first, second) = (free_port(), free_port());
    let askers = Askers::start(address(&server, 0), address(&server, 1));
    let a = server.topology().services[0].clone();
    let mut random = Random::new(7);
    let mut resources = Vec::new();
    let mut b: Option<Service> = None;
    for round in 0..rounds {
        let mut next =
            service("b", both(if random.below(2) == 0 { first } else { second }), "echo");
        next.kernel = ["echo", "delay"][random.below(2)].into();
        next.params = vec![("microseconds".into(), (random.below(50) as f64).into())];
        next.mqueues = 1 + random.below(6) as u32;
        next.slots = 8 << random.below(3);
        next.max_message_bytes = 64 << random.below(4);
        next.accelerators = vec![on[round % on.len()]];
        let next = (round % 4 != 3).then_some(next);
        let services = [Some(a.clone()), next.clone()].into_iter().flatten().collect();
        let actions = change(&mut server, services);
        assert_eq!(actions[0], ("a".into(), ServiceAction::Unchanged));
        let expected = match (&b, &next) {
            (None, Some(_)) => Some(ServiceAction::Added),
            (Some(old), Some(new)) => Some(ServiceAction::Changed {
                keeps_connections: true,
                keeps_memory_clients: old.max_message_bytes == new.max_message_bytes,
            }),
            (Some(_), None) => Some(ServiceAction::Removed),
            (None, None) => None,
        };
        assert_eq!(actions.get(1).map(|f| f.1), expected);
        b = next;
        if b.is_some() {
            let (udp, tcp) = (address(&server, 2), address(&server, 3));
            let byte = random.below(256) as u8;
            assert_eq!(ask(&udp_client(udp), &message(byte)), message(byte));
            assert_eq!(exchange(&mut tcp_client(tcp), &message(byte), 32), message(byte));
        }
        askers.go_on();
        if round % 4 == 3 {
            // The sockets of clients that have gone may still be there for a moment.
            eventually("connections of b end", || {
                server.metrics().workers().map(|w| w.connections.value()).sum::<u64>() <= 1
            });
            // A region is unmapped beside the workers, once none of them holds it.
            eventually("no region of b is mapped", || maps("serval:b:") == 0);
            resources.push((sys::process::open_descriptors(), threads()));
        }
    }
    let answered = askers.finish();
    assert_accounts(&server);
    let a = server.metrics().service(0);
    assert_eq!((a.received, a.replied), (answered, answered));
    assert_eq!(a.dropped_requests(), 0);
    let (first, last) = (resources[0], resources[resources.len() - 1]);
    assert_eq!(first, last, "descriptors and threads: {resources:?}");
    assert!(server.shutdown().is_clean());
}

pub(crate) fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// Mappings of this process whose name contains this.
pub(crate) fn maps(name: &str) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains(name)).count()
}
