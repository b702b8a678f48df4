//! Checks that this machine has what a configuration needs: cores, folders of sockets, descriptors, secrets.

use std::path::{Path, PathBuf};

use engine::topology::{AcceleratorKind, Backend, Service, Sockets, Topology};
use runtime::kinds;
use transfer::ServiceLimits;
use wire::nic::Transport;

use crate::config::{Config, Origin, Setting};
use crate::transfers::read_key;

/// Descriptors that do not depend on the load: the metrics endpoint with its clients, the control side of shared
/// memory, the log, kernel libraries while they are opened.
const OTHER_DESCRIPTORS: u64 = 128;
/// Descriptors of a shared-memory client: its socket, its region and a wake-up descriptor for each side.
const MEMORY_CLIENT_DESCRIPTORS: u64 = 4;

/// What this machine lacks; one sentence that names the key.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct MachineError(String);

/// Rejects cores that do not exist: a worker without its core would work, but slowly and without a visible reason.
pub fn use_cores(config: &mut Config) -> Result<(), MachineError> {
    let Ok(allowed) = sys::affinity::allowed_cores() else { return Ok(()) };
    config.use_cores(&allowed, sys::affinity::is_usable).map_err(MachineError)
}

/// Reports sockets in folders that do not exist, with their key.
pub fn missing_folders(config: &Config) -> Vec<String> {
    let missing = |(key, path): (String, &Path)| {
        let folder = path.parent().unwrap_or(Path::new("/"));
        matches!(folder.try_exists(), Ok(false)).then(|| {
            format!(
                "{key}: cannot listen at {path:?}: the folder {folder:?} does not exist; create it, or choose another path"
            )
        })
    };
    config.sockets().filter_map(missing).collect()
}

/// Raises the limit of open descriptors and applies it to `limits.connections`: a configured number that exceeds it
/// is rejected, the default is lowered. A default equal to `running` is kept: another number would be rejected as a
/// change.
pub fn fit_connections(config: &mut Config, running: Option<&Config>) -> Result<(), MachineError> {
    let asked = asks_for_connections(config);
    if let Some(running) = running
        && !asked
        && !asks_for_connections(running)
    {
        config.topology.limits.connections = running.topology.limits.connections;
        return Ok(());
    }
    let limit = sys::process::raise_descriptor_limit().unwrap_or_else(|error| {
        tracing::warn!(%error, "the limit of open descriptors could not be raised");
        sys::process::descriptor_limit().0
    });
    let own = own_descriptors(&config.topology) + transfer_descriptors(config);
    let each = connection_descriptors(&config.topology);
    let room = u32::try_from(limit.saturating_sub(own) / each).unwrap_or(u32::MAX);
    let wanted = config.topology.limits.connections;
    if wanted <= room {
        return Ok(());
    }
    if asked || room == 0 {
        let or = match room {
            0 => String::new(),
            room => format!(", or set limits.connections to {room} or less"),
        };
        return Err(MachineError(format!(
            "limits.connections = {wanted} cannot be had: this process may have {limit} descriptors \
             open and needs {own} itself and {each} for a connection; raise the limit \
             (`ulimit -Hn`, LimitNOFILE= of a unit) to {}{or}",
            own + each * u64::from(wanted)
        )));
    }
    // The default is lowered without an error.
    tracing::info!(
        connections = room,
        descriptors = limit,
        "limits.connections is lower than its default: the limit of open descriptors allows no more; raise it \
         (`ulimit -n {}`, LimitNOFILE= of a unit) if more clients are expected",
        own + each * u64::from(wanted)
    );
    config.topology.limits.connections = room;
    Ok(())
}

/// The files with secrets that `serval serve` would refuse as they are here, and why.
pub fn unusable_secrets(config: &Config) -> Vec<(PathBuf, String)> {
    let Topology { accelerators, services, .. } = &config.topology;
    let of_links = accelerators.iter().filter_map(|accelerator| match &accelerator.kind {
        AcceleratorKind::Process { device, .. } => kinds::find(device.kind)?.secret(device),
        AcceleratorKind::Cpu { .. } => None,
    });
    let files = services.iter().flat_map(|service| &service.files);
    let of_transfers = files.filter_map(|file| file.key.as_ref());
    let of_transfers = of_transfers.map(|path| (path.clone(), read_key(path).map(drop)));
    let all = of_links.chain(of_transfers);
    all.filter_map(|(path, read)| read.err().map(|why| (path, why))).collect()
}

/// Whether `limits.connections` was configured.
fn asks_for_connections(config: &Config) -> bool {
    let key = |s: &&Setting| (s.section.as_str(), s.key.as_str()) == ("limits", "connections");
    config.settings.iter().find(key).is_some_and(|s| s.origin != Origin::Default)
}

/// Maximum number of descriptors of a client's connection: any of them may use shared memory if there is such a port.
fn connection_descriptors(topology: &Topology) -> u64 {
    let listens_at_tcp = |s: &Service| s.listen.iter().any(|l| l.transport == Transport::Tcp);
    let proxied = topology.services.iter().any(|s| s.upstream.is_some() && listens_at_tcp(s));
    match topology.memory_ports().next().is_some() {
        true => MEMORY_CLIENT_DESCRIPTORS,
        // The client's and the server's side.
        false => 1 + u64::from(proxied),
    }
}

/// The most descriptors that the transfer engine has open: two for each transfer, and its connections.
fn transfer_descriptors(config: &Config) -> u64 {
    let of = |limits: &ServiceLimits| 2 * u64::from(limits.in_flight) + u64::from(limits.clients);
    config.transfer.as_ref().map_or(0, |transfer| of(&transfer.limits))
}

/// Maximum number of descriptors of this topology besides its clients' connections.
fn own_descriptors(topology: &Topology) -> u64 {
    let backends = |service: &Service| -> u64 {
        let blocks = service.mqueues_total();
        // Each worker has its own pool.
        let of_workers = |sockets: u32| topology.engine.workers as u64 * u64::from(sockets);
        let sockets = |backend: &Backend| match (backend.transport, backend.sockets) {
            // The two ends of each.
            _ if backend.does_transfers() => 2 * blocks * u64::from(backend.in_flight),
            (Transport::Tcp, Sockets::Persistent) => of_workers(backend.connections),
            (Transport::Tcp, Sockets::PerRequest) => of_workers(backend.in_flight),
            // A client mqueue has one socket at a time, also with one socket per request.
            (Transport::Udp, _) => blocks,
        };
        let proxied = service.listen.iter().any(|l| l.transport == Transport::Udp);
        let flows = match service.upstream {
            Some(_) if proxied => of_workers(service.upstream_flows),
            _ => 0,
        };
        let slots = match service.sockets.is_empty() {
            true => 0,
            false => blocks * u64::from(service.sockets_per_block),
        };
        flows
            + service.backends.iter().map(sockets).sum::<u64>()
            + slots
            + service.accelerators.len() as u64
    };
    // A worker's ports, its epoll set, its waker and its reserve.
    let worker = (topology.ports().count() + topology.unix_ports().count()) as u64 + 3;
    let services: u64 = topology.services.iter().map(backends).sum();
    topology.engine.workers as u64 * worker + services + OTHER_DESCRIPTORS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Overrides;

    #[test]
    fn descriptors_of_backends_are_counted_as_their_sockets_are_opened() {
        let own = |backend: &str| {
            let text = format!(
                "schema = 1\n[engine]\nworkers = 2\n[[service]]\nname = \"a\"\nlisten = \"udp://127.0.0.1:9000\"\n\
                 kernel = \"echo\"\nmqueues = 6\n{backend}"
            );
            let config = Config::parse("a.toml", &text, Path::new("."), &Overrides::default());
            own_descriptors(&config.unwrap().topology)
        };
        let socket = |at: &str| {
            let text = format!(
                "schema = 1\n[engine]\nworkers = 2\n[[service]]\nname = \"a\"\nkernel = \"stream_echo\"\nmqueues = 6\n\
                 sockets_per_block = 5\n[[service.socket]]\nname = \"in\"\nlisten = \"{at}\"\n"
            );
            let config = Config::parse("a.toml", &text, Path::new("."), &Overrides::default());
            own_descriptors(&config.unwrap().topology)
        };
        // Instead of a port: a port, and all sockets of the blocks.
        assert_eq!(socket("tcp://127.0.0.1:9000") - own(""), 6 * 5);
        assert_eq!(socket("unix:///run/a") - own(""), 6 * 5);
        let with = |scheme: &str, more: &str| {
            let backend =
                format!("connect = \"{scheme}://127.0.0.1:1\"\nin_flight = 100\n{more}\n");
            own(&format!("[[service.backend]]\nname = \"db\"\n{backend}")) - own("")
        };
        assert_eq!(with("tcp", "connections = 3"), 2 * 3);
        let proxy = |listen: &str| {
            let text = format!(
                "schema = 1\n[engine]\nworkers = 2\n[[service]]\nname = \"a\"\nlisten = \"{listen}://127.0.0.1:9000\"\n\
                 upstream = \"127.0.0.1:1\"\nframing = \"line\"\nupstream_flows = 50\n"
            );
            let config = Config::parse("a.toml", &text, Path::new("."), &Overrides::default());
            let topology = config.unwrap().topology;
            (own_descriptors(&topology), connection_descriptors(&topology))
        };
        let (udp, tcp) = (proxy("udp"), proxy("tcp"));
        assert_eq!((udp.0 - tcp.0, udp.1, tcp.1), (2 * 50, 1, 2));
        assert_eq!(with("tcp", "sockets = \"per-request\""), 2 * 100);
        assert_eq!(with("udp", ""), 6);
        assert_eq!(with("udp", "sockets = \"per-request\""), 6);
    }
}
