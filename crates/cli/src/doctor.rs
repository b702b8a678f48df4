//! What this machine supports, and the paths of a service's messages.
//!
//! [`capabilities`] examines the machine: every capability with its state, what was found, and how to improve it.
//! [`service_paths`] examines a configuration: the ports, workers, rings, accelerators and backends of each service,
//! after all choices that Serval makes automatically, so that no choice is hidden.

pub(crate) mod gpus;

use std::env;

use accel::compile::{self, BuildError, CUDA_REMEDY, NvrtcError};
use engine::topology::{
    AcceleratorKind, CpuPlacement, Dispatch, Launch, Polling, Service, Topology,
};
use mqueue::abi::protocol;
use sys::local::LocalListener;
use sys::probe::{Capability, State, probe_all};
use sys::process::find_program;
use sys::{OpenPort, PortSpec, SocketNic, SocketOptions};
use wire::nic::Transport;

use crate::sdk;
use runtime::kinds;
use server::config::{Config, memory_url, unix_url, url};

/// Every capability of this machine. Takes milliseconds and changes nothing.
pub fn capabilities() -> Vec<Capability> {
    let mut all = probe_all();
    all.push(compiler());
    all.push(cuda_compiler());
    all.push(module_compiler());
    all.push(match sdk::rust_target() {
        Ok(path) => found("function-rust", &path),
        Err(why) => {
            missing("function-rust", why, &format!("for functions in Rust: {}", sdk::RUST_REMEDY))
        }
    });
    let memcached = "optional, for `serval demo faces`: apt install memcached";
    let sockperf = "optional, a third-party load generator: apt install sockperf";
    all.push(tool("memcached", memcached));
    all.push(tool("sockperf", sockperf));
    all
}

fn compiler() -> Capability {
    let named = env::var("CXX").ok().filter(|name| !name.trim().is_empty());
    let candidates = match &named {
        Some(name) => vec![name.split_whitespace().next().unwrap_or_default()],
        None => vec!["c++", "g++", "clang++"],
    };
    let remedy = "to build kernels of your own: apt install g++, or set CXX";
    match candidates.iter().find_map(|name| find_program(name)) {
        Some(path) => found("kernel-build", &path),
        None => missing("kernel-build", format!("no {} on PATH", candidates.join(", ")), remedy),
    }
}

/// The compiler and the linker of functions in C and C++.
fn module_compiler() -> Capability {
    let name = "function-c";
    let remedy = format!("for functions in C and C++: {}", sdk::CLANG_REMEDY);
    match ["wasm-ld", "clang"].map(|tool| (tool, find_program(tool))) {
        [(_, Some(_)), (_, Some(clang))] => found(name, &clang),
        tools => {
            let missed: Vec<_> = tools.iter().filter(|(_, at)| at.is_none()).collect();
            let names: Vec<&str> = missed.into_iter().map(|(tool, _)| *tool).collect();
            missing(name, format!("no {} on PATH", names.join(" and no ")), &remedy)
        }
    }
}

fn cuda_compiler() -> Capability {
    let name = "kernel-build-gpu";
    match compile::cuda_compiler() {
        Ok((what, None)) => {
            let why = find_program(&what).map_or(what, |path| path.display().to_string());
            Capability { name, state: State::Available, why, remedy: String::new() }
        }
        // The error states what is missing and the fix.
        Ok((why, Some(lacks @ NvrtcError::NoPacker { .. }))) => {
            Capability { name, state: State::Degraded, why, remedy: lacks.to_string() }
        }
        Ok((why, Some(lacks))) => missing(name, why, &lacks.to_string()),
        Err(BuildError::NoCudaCompiler { tried }) => {
            let remedy = format!("to build kernels for GPUs: {CUDA_REMEDY}");
            missing(name, format!("none of {tried}"), &remedy)
        }
        Err(error) => missing(name, error.to_string(), "see `serval kernel build --help`"),
    }
}

fn tool(name: &'static str, remedy: &str) -> Capability {
    match find_program(name) {
        Some(path) => found(name, &path),
        None => missing(name, "not on PATH".to_owned(), remedy),
    }
}

fn found(name: &'static str, path: &std::path::Path) -> Capability {
    let why = path.display().to_string();
    Capability { name, state: State::Available, why, remedy: String::new() }
}

fn missing(name: &'static str, why: String, remedy: &str) -> Capability {
    Capability { name, state: State::Off, why, remedy: remedy.to_owned() }
}

/// The path of a service's messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePath {
    /// Name of the service.
    pub service: String,
    /// Its ports, each with the reason if it cannot be opened now.
    pub ports: Vec<(String, Option<String>)>,
    /// The workers that receive and send.
    pub workers: String,
    /// Mqueues, their rings and the rings' memory.
    pub rings: String,
    /// Kernel and accelerators.
    pub accelerators: Vec<String>,
    /// Backends.
    pub backends: Vec<String>,
}

impl ServicePath {
    /// All of it in one line.
    pub fn line(&self) -> String {
        let ports: Vec<&str> = self.ports.iter().map(|(port, _)| port.as_str()).collect();
        let mut parts = vec![ports.join(" "), self.workers.clone(), self.rings.clone()];
        if !self.accelerators.is_empty() {
            parts.push(self.accelerators.join(" + "));
        }
        if !self.backends.is_empty() {
            parts.push(self.backends.join(" + "));
        }
        parts.join(" -> ")
    }
}

/// The paths of every service of a configuration. Each port is opened and closed again.
pub fn service_paths(config: &Config) -> Vec<ServicePath> {
    let topology = &config.topology;
    topology.services.iter().map(|service| service_path(topology, service)).collect()
}

fn service_path(topology: &Topology, service: &Service) -> ServicePath {
    // With the listeners of its kernel's sockets.
    let ports = service.ports().map(|(listen, _)| {
        let spec = PortSpec { transport: listen.transport, address: listen.address };
        let obstacle = SocketNic::open(&[spec], SocketOptions::default()).err();
        (url(listen.transport, listen.address), obstacle.map(|error| error.to_string()))
    });
    let memory_ports = service.memory_ports.iter().map(|path| {
        let obstacle = LocalListener::bind(path).err();
        (memory_url(path), obstacle.map(|error| error.to_string()))
    });
    let unix_ports = service.unix_ports().map(|(path, _)| {
        let obstacle = OpenPort::open_local(path, 1, &SocketOptions::default()).err();
        (unix_url(path), obstacle.map(|error| error.to_string()))
    });
    let accelerator = |(place, index): (usize, &usize)| {
        let accelerator = &topology.accelerators[*index];
        let kernel = service.kernel_on(place);
        format!("{kernel} on {} ({})", accelerator.name, placement(&accelerator.kind))
    };
    ServicePath {
        service: service.name.clone(),
        ports: ports.chain(unix_ports).chain(memory_ports).collect(),
        workers: workers(topology),
        rings: rings(service),
        accelerators: service.accelerators.iter().enumerate().map(accelerator).collect(),
        backends: service.backends.iter().map(backend).collect(),
    }
}

fn workers(topology: &Topology) -> String {
    let engine = &topology.engine;
    let polling = match engine.polling {
        Polling::Spin => "spin",
        Polling::Adaptive => "adaptive",
        Polling::Block => "block",
    };
    let pinned = match engine.cores.as_slice() {
        [] => "not pinned".to_owned(),
        cores => format!("on cores {cores:?}"),
    };
    let plural = if engine.workers == 1 { "" } else { "s" };
    format!("{} worker{plural} ({polling} polling, {pinned})", engine.workers)
}

/// The number of threads for a service's blocks, as it is configured.
fn threads_of(threads: usize) -> String {
    match threads {
        0 => "a thread for each mqueue, up to the cores,".into(),
        1 => "1 thread".into(),
        _ => format!("{threads} threads"),
    }
}

fn placement(kind: &AcceleratorKind) -> String {
    match kind {
        AcceleratorKind::Cpu { placement: CpuPlacement::Worker, .. } => {
            "cpu, inside the workers".into()
        }
        AcceleratorKind::Cpu { placement: CpuPlacement::Threads { threads, cores }, .. } => {
            let pinned =
                if cores.is_empty() { String::new() } else { format!(" on cores {cores:?}") };
            format!("cpu, {} of its own{pinned}", threads_of(*threads))
        }
        AcceleratorKind::Process { launch: Launch::Engine { threads, .. }, device, .. } => {
            if let Some(place) = kinds::find(device.kind).and_then(|kind| kind.place(device)) {
                return format!("{place}, by a process that the engine starts");
            }
            format!("cpu, {} in a process of its own, started by the engine", threads_of(*threads))
        }
        AcceleratorKind::Process { launch: Launch::External { attach }, .. } => {
            format!("in a process that attaches at {}", attach.display())
        }
    }
}

/// The dispatcher and the mqueues it chooses from, over all accelerators in order.
fn rings(service: &Service) -> String {
    if let Some(upstream) = service.upstream {
        return format!("a socket for each client to {upstream}");
    }
    let name = |ring: &mqueue::RingPlan| {
        let name = match ring.protocol {
            protocol::GRANULE16 => "granule (16-byte units)",
            protocol::GRANULE8 => "granule (8-byte units)",
            _ => "doorbell",
        };
        if ring.arena_bytes > 0 { format!("{name} with arena") } else { name.to_owned() }
    };
    let protocols = |place: usize| {
        let server = &service.mqueue_plans(place)[0];
        let (rx, tx) = (name(&server.rx), name(&server.tx));
        if rx == tx { rx } else { format!("RX {rx}, TX {tx}") }
    };
    let places = 0..service.accelerators.len();
    let mut protocols: Vec<String> = places.clone().map(protocols).collect();
    if protocols.iter().all(|other| *other == protocols[0]) {
        protocols.truncate(1);
    }
    let dispatch = match service.dispatch {
        Dispatch::RoundRobin => "round-robin".to_owned(),
        Dispatch::LeastLoaded => "least-loaded".to_owned(),
        Dispatch::FlowHash => "flow-hash".to_owned(),
        Dispatch::KeyHash(range) => format!("key-hash {range}"),
    };
    let counts: Vec<String> = places.map(|place| service.mqueues_on(place).to_string()).collect();
    let (counts, slots, protocols) = (counts.join(" + "), service.slots, protocols.join(" + "));
    format!("{dispatch} over {counts} mqueues of {slots} slots ({protocols}, host memory)")
}

fn backend(backend: &engine::topology::Backend) -> String {
    let at = url(backend.transport, backend.address);
    match backend.transport {
        Transport::Udp => format!("{} {at} (a socket for each mqueue)", backend.name),
        Transport::Tcp => {
            let (framing, count) = (backend.framing, backend.connections);
            let plural = if count == 1 { "" } else { "s" };
            format!("{} {at} ({framing}, {count} connection{plural} a worker)", backend.name)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use server::config::Overrides;

    fn config(text: &str) -> Config {
        Config::parse("a.toml", text, std::path::Path::new(""), &Overrides::default()).unwrap()
    }

    #[test]
    fn missing_capabilities_have_a_remedy() {
        let all = capabilities();
        for capability in &all {
            assert!(!capability.why.is_empty(), "{capability:?}");
            assert_eq!(
                capability.state == State::Available,
                capability.remedy.is_empty(),
                "{capability:?}"
            );
        }
        let names = ["cores", "kernel-build", "kernel-build-gpu", "function-c", "function-rust"];
        for name in names.into_iter().chain(["memcached", "sockperf", "cuda"]) {
            assert!(all.iter().any(|c| c.name == name), "{name}");
        }
    }

    #[test]
    fn programs_are_found_as_a_shell_finds_them() {
        assert!(find_program("sh").is_some());
        assert!(find_program("/bin/sh").is_some());
        assert!(find_program("no-such-program").is_none());
        assert!(find_program("/etc/passwd").is_none());
    }

    #[test]
    fn the_path_of_a_service_is_one_line() {
        let config = config(
            "schema = 1\n[engine]\nworkers = 2\n[[service]]\nname = \"a\"\nlisten = [\"udp://127.0.0.1:0\", \"tcp://[::1]:0\"]\n\
             kernel = \"echo\"\nmax_message_bytes = 4000\nrings = \"granule8\"\ndispatch = \"key-hash\"\nkey = \"0:4\"\n\
             [[service.backend]]\nname = \"db\"\nconnect = \"tcp://127.0.0.1:11211\"\nframing = \"memcached\"\n",
        );
        let path = &service_paths(&config)[0];
        assert_eq!(
            path.line(),
            "udp://127.0.0.1:0 tcp://[::1]:0 -> 2 workers (adaptive polling, not pinned) -> \
             key-hash 0:4 over 4 mqueues of 64 slots (RX doorbell with arena, TX granule (8-byte units), host memory) -> \
             echo on acc0 (cpu, inside the workers) -> \
             db tcp://127.0.0.1:11211 (memcached, 1 connection a worker)"
        );
    }

    #[test]
    fn a_port_in_use_is_reported() {
        let taken = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap();
        let text = format!(
            "schema = 1\n[[service]]\nname = \"a\"\nlisten = \"udp://{address}\"\nkernel = \"echo\"\n"
        );
        let obstacle = service_paths(&config(&text))[0].ports[0].1.clone();
        assert!(obstacle.expect("the port is taken").contains(&address.to_string()));
    }

    #[test]
    fn listeners_of_kernels_are_tried() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap();
        let folder = std::env::temp_dir().join(format!("serval-doctor-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (free, used) = (folder.join("free"), folder.join("used"));
        let _other = std::os::unix::net::UnixListener::bind(&used).unwrap();
        let listeners = [
            format!("tcp://{address}"),
            "tcp://127.0.0.1:0".to_owned(),
            format!("unix://{}", used.display()),
            format!("unix://{}", free.display()),
        ];
        let service = |(number, listener): (usize, &String)| {
            format!(
                "[[service]]\nname = \"s{number}\"\nkernel = \"stream_echo\"\n\
                 [[service.socket]]\nname = \"clients\"\nlisten = \"{listener}\"\n"
            )
        };
        let services: String = listeners.iter().enumerate().map(service).collect();
        let paths = service_paths(&config(&format!("schema = 1\n{services}")));
        let ports: Vec<_> = paths.iter().flat_map(|path| &path.ports).collect();
        let shown: Vec<&str> = ports.iter().map(|(port, _)| port.as_str()).collect();
        assert_eq!(shown, listeners);
        let is_taken: Vec<bool> = ports.iter().map(|(_, obstacle)| obstacle.is_some()).collect();
        assert_eq!(is_taken, [true, false, true, false], "{ports:?}");
        assert!(!free.exists() && used.exists());
        std::fs::remove_dir_all(folder).unwrap();
    }
}
