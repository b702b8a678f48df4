//! What this host supports, for `serval doctor`: every capability with its state, the reason and the
//! remedy.
//!
//! A probe performs the real operation on a small scale where that is harmless (opens the socket, seals a
//! page), and otherwise reads what the host kernel reports. No probe loads an accelerator's driver:
//! libraries are located, not opened. Only what this version uses has a probe.

use std::env;
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;

use libc::c_int;
use wire::nic::Transport;

use crate::affinity::{allowed_cores, numa_nodes};
use crate::memory::{HUGE_PAGE_BYTES, Pages, RegionOptions, SharedMemory, page_bytes};
use crate::os::{own, set_option, zeroed};
use crate::process;
use crate::socket_nic::{PortSpec, SocketNic, SocketOptions};

/// To what extent a capability is available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Fully available.
    Available,
    /// Available with reduced speed or capacity.
    Degraded,
    /// Unavailable; Serval works without it.
    Off,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Available => "available",
            Self::Degraded => "degraded",
            Self::Off => "off",
        })
    }
}

/// One capability of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capability {
    /// Stable lower-case name.
    pub name: &'static str,
    /// Its state.
    pub state: State,
    /// What was found.
    pub why: String,
    /// How to enable it; empty if there is nothing to do.
    pub remedy: String,
}

/// The result of a probe: the state, the reason, and the remedy.
type Finding = (State, String, &'static str);
/// A capability's name and its probe.
type Probe = (&'static str, fn() -> Finding);

/// Runs every probe; takes milliseconds.
pub fn probe_all() -> Vec<Capability> {
    let probes: [Probe; 13] = [
        ("cores", cores),
        ("numa", numa),
        ("sealed-memory", sealed_memory),
        ("huge-pages", huge_pages),
        ("granule16", granule16),
        ("descriptors", descriptors),
        ("shared-ports", shared_ports),
        ("socket-buffers", socket_buffers),
        ("udp-segmentation", udp_segmentation),
        ("udp-receive-offload", udp_receive_offload),
        ("drop-counts", drop_counts),
        ("ipv6", ipv6),
        ("cuda", cuda),
    ];
    let run = |(name, probe): Probe| {
        let (state, why, remedy) = probe();
        let remedy = if state == State::Available { "" } else { remedy };
        Capability { name, state, why, remedy: remedy.to_owned() }
    };
    probes.into_iter().map(run).collect()
}

/// `Available`, or `Off` with the error.
fn works<T, E: fmt::Display>(result: Result<T, E>, why: &str, remedy: &'static str) -> Finding {
    match result {
        Ok(_) => (State::Available, why.to_owned(), remedy),
        Err(error) => (State::Off, error.to_string(), remedy),
    }
}

fn cores() -> Finding {
    let cores = allowed_cores().unwrap_or_default();
    let why = format!("{} usable: {cores:?}", cores.len());
    let state = if cores.len() >= 2 { State::Available } else { State::Degraded };
    (state, why, "give the engine a core of its own: more CPUs, or a wider cpuset")
}

fn numa() -> Finding {
    match numa_nodes().len() {
        1 => (State::Available, "one node: no placement needed".into(), ""),
        count => (
            State::Available,
            format!("{count} nodes: regions are allocated on the worker's node"),
            "",
        ),
    }
}

fn sealed_memory() -> Finding {
    let region = SharedMemory::create("serval:probe", page_bytes(), &RegionOptions::default());
    works(
        region,
        "memfd with size seals",
        "run on Linux 3.17 or newer; allow memfd_create in seccomp",
    )
}

fn huge_pages() -> Finding {
    let remedy = "run on Linux 6.1 or newer: regions of many mqueues are slower without huge pages";
    match SharedMemory::create("serval:probe", 2 * HUGE_PAGE_BYTES, &RegionOptions::default()) {
        Ok(region) if region.pages() == Pages::Huge => {
            (State::Available, "regions are collapsed into pages of 2 MiB".into(), remedy)
        }
        Ok(_) => (State::Degraded, "this host kernel lacks MADV_COLLAPSE".into(), remedy),
        Err(error) => (State::Off, error.to_string(), remedy),
    }
}

fn granule16() -> Finding {
    let remedy = "use an x86 CPU (or virtual CPU model) with AVX; 8-byte units are used without";
    match mqueue::memory::unit16_is_atomic() {
        true => (State::Available, "aligned 16-byte accesses are atomic".into(), remedy),
        false => (State::Degraded, "aligned 16-byte accesses may tear".into(), remedy),
    }
}

fn descriptors() -> Finding {
    const ENOUGH: u64 = 16_384 + 1024;
    let (soft, hard) = process::descriptor_limit();
    let why = format!("limit {soft}, hard limit {hard} (the engine raises it to the hard limit)");
    let state = if hard >= ENOUGH { State::Available } else { State::Degraded };
    (state, why, "raise `ulimit -Hn` above limits.connections, or lower limits.connections")
}

fn loopback(transport: Transport, ip: &str) -> Option<PortSpec> {
    let address = format!("{ip}:0").parse().ok()?;
    Some(PortSpec { transport, address })
}

fn shared_ports() -> Finding {
    let ports: Vec<_> = [Transport::Udp, Transport::Tcp]
        .into_iter()
        .filter_map(|transport| loopback(transport, "127.0.0.1"))
        .collect();
    let shared = SocketNic::open(&ports, SocketOptions::default())
        .and_then(|first| first.sibling().map(|_| ()));
    works(shared, "workers share a port (SO_REUSEPORT)", "run one worker: engine.workers = 1")
}

fn socket_buffers() -> Finding {
    let remedy =
        "sysctl net.core.rmem_max=8388608 net.core.wmem_max=8388608 (as root), or CAP_NET_ADMIN";
    let options = SocketOptions::default();
    let wanted = options.receive_buffer_bytes;
    let nic = loopback(Transport::Udp, "127.0.0.1")
        .and_then(|port| SocketNic::open(&[port], options).ok());
    let Some((receive, send)) = nic.and_then(|nic| nic.effective_buffers(0)) else {
        return (State::Off, "no UDP socket on 127.0.0.1".into(), "bring the loopback device up");
    };
    let why = format!("{} KiB receive, {} KiB send", receive >> 10, send >> 10);
    let state = if receive >= wanted { State::Available } else { State::Degraded };
    (state, why, remedy)
}

/// Sets a UDP socket option that takes an integer.
fn udp_option(level: c_int, name: c_int, value: c_int) -> io::Result<()> {
    // SAFETY: no pointers.
    let socket =
        own(unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) })?;
    set_option(socket.as_fd(), level, name, value)
}

fn udp_segmentation() -> Finding {
    let option = udp_option(libc::SOL_UDP, libc::UDP_SEGMENT, 1000);
    works(
        option,
        "batches of datagrams are sent as one message (UDP_SEGMENT)",
        "run on Linux 4.18 or newer",
    )
}

fn udp_receive_offload() -> Finding {
    let option = udp_option(libc::SOL_UDP, libc::UDP_GRO, 1);
    works(
        option,
        "batches of datagrams are received in one buffer (UDP_GRO)",
        "run on Linux 5.0 or newer",
    )
}

fn drop_counts() -> Finding {
    let option = udp_option(libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 1);
    works(
        option,
        "the host kernel reports the datagrams it drops (SO_RXQ_OVFL)",
        "run on Linux 2.6.33 or newer",
    )
}

fn ipv6() -> Finding {
    let nic = loopback(Transport::Udp, "[::1]").map(|port| {
        SocketNic::open(&[port], SocketOptions::default())
            .map(drop)
            .map_err(|error| error.to_string())
    });
    let result = nic.unwrap_or_else(|| Err("no loopback address".into()));
    works(
        result,
        "[::1] can be bound",
        "sysctl net.ipv6.conf.all.disable_ipv6=0, or listen on IPv4 only",
    )
}

fn cuda() -> Finding {
    let remedy = "install the NVIDIA driver and make /dev/nvidia* visible (`--gpus all` for a \
                  container); cpu accelerators work without";
    let device = fs::exists("/dev/nvidiactl").unwrap_or(false);
    match (find_library("libcuda.so.1"), device) {
        (Some(path), true) => {
            (State::Available, format!("driver library {}", path.display()), remedy)
        }
        // Some machines provide the GPU elsewhere; only the driver can tell.
        (Some(path), false) => {
            let why = format!("driver library {}, but no /dev/nvidiactl", path.display());
            (State::Degraded, why, remedy)
        }
        (None, true) => {
            (State::Off, "/dev/nvidiactl exists, but libcuda.so.1 does not".into(), remedy)
        }
        (None, false) => (State::Off, "no libcuda.so.1 and no /dev/nvidiactl".into(), remedy),
    }
}

/// Searches a library like the dynamic linker: LD_LIBRARY_PATH, then its cache, then the default
/// directories. Nothing is loaded.
fn find_library(name: &str) -> Option<PathBuf> {
    let listed = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let folders: Vec<_> = env::split_paths(&listed).collect();
    let defaults = ["/lib", "/usr/lib", "/lib64", "/usr/lib64", "/usr/local/lib"];
    // The cache is a table of offsets into NUL-terminated strings; the paths are among them.
    let cache = fs::read("/etc/ld.so.cache").unwrap_or_default();
    let cached = cache
        .split(|&byte| byte == 0)
        .filter_map(|text| std::str::from_utf8(text).ok())
        .filter(|text| text.starts_with('/') && text.ends_with(&format!("/{name}")))
        .map(PathBuf::from);
    let mut candidates = (folders.into_iter().map(|folder| folder.join(name)))
        .chain(cached)
        .chain(defaults.iter().map(|folder| PathBuf::from(folder).join(name)));
    candidates.find(|path| path.exists())
}

/// The host kernel's release, for example `6.1.0-18-amd64`.
pub fn host_kernel_release() -> String {
    // SAFETY: byte arrays, for which zero is a value.
    let mut names: libc::utsname = unsafe { zeroed() };
    // SAFETY: `names` outlives the call.
    unsafe { libc::uname(&raw mut names) };
    let bytes = names.release.iter().take_while(|&&byte| byte != 0).map(|&byte| byte as u8);
    String::from_utf8_lossy(&bytes.collect::<Vec<_>>()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_capability_is_explained() {
        let found = probe_all();
        let names: HashSet<_> = found.iter().map(|capability| capability.name).collect();
        assert_eq!(names.len(), found.len());
        for capability in &found {
            assert!(!capability.why.is_empty(), "{}", capability.name);
            let silent = capability.remedy.is_empty();
            assert_eq!(silent, capability.state == State::Available, "{capability:?}");
        }
        let state = |name| found.iter().find(|capability| capability.name == name).unwrap().state;
        // Serval requires these.
        assert_eq!(state("sealed-memory"), State::Available);
        assert_eq!(state("shared-ports"), State::Available);
        assert_eq!(state("drop-counts"), State::Available);
    }

    #[test]
    fn nothing_is_advertised_that_no_code_uses() {
        let unused = ["io_uring", "io-uring", "xdp", "ucx", "transparent", "hugetlb", "locked"];
        for capability in probe_all() {
            let text = format!("{} {} {}", capability.name, capability.why, capability.remedy);
            let text = text.to_lowercase();
            assert!(!unused.iter().any(|word| text.contains(word)), "{text}");
        }
    }

    #[test]
    fn libraries_are_found_and_not_loaded() {
        let libc = find_library("libc.so.6").expect("the C library is installed");
        assert!(libc.is_file());
        assert_eq!(find_library("libserval-no-such.so.1"), None);
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        probe_all();
        assert!(!maps.contains("libcuda"));
        assert!(!fs::read_to_string("/proc/self/maps").unwrap().contains("libcuda"));
    }

    #[test]
    fn the_host_kernel_has_a_release() {
        assert!(host_kernel_release().contains('.'));
    }
}
