//! The addresses of this machine, in the network namespace of the engine and in those of tenants.
//!
//! Workers drop datagrams whose source is a port of this server; see `engine/src/endpoint/sources.rs`. A port that
//! listens on every address of its namespace has all of them, so the addresses of each namespace with ports are listed.

use std::io;
use std::net::IpAddr;
use std::os::linux::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use engine::topology::Topology;

/// What was found in the network namespace of a file.
struct Found {
    path: PathBuf,
    /// The inode of the namespace: the file can name another one later, while ports of the former one stay open.
    namespace: u64,
    addresses: Vec<IpAddr>,
}

/// The addresses that were found last.
#[derive(Default)]
pub(crate) struct LocalAddresses {
    /// In the engine's own namespace.
    own: Vec<IpAddr>,
    /// Those of tenants with services.
    others: Vec<Found>,
}

/// The inode of a namespace, and its addresses.
fn addresses_in(netns: &Path) -> io::Result<(u64, Vec<IpAddr>)> {
    sys::netns::within(netns, || {
        let namespace = std::fs::metadata("/proc/thread-self/ns/net")?.st_ino();
        Ok((namespace, sys::addresses::local_addresses()?))
    })?
}

impl LocalAddresses {
    /// Lists the addresses for the ports of this topology, without duplicates.
    pub(crate) fn refresh(&mut self, topology: &Topology) -> Vec<IpAddr> {
        let tenants = topology.tenants.iter();
        let used = tenants.filter(|tenant| topology.has_services_of(&tenant.name));
        let mut used: Vec<&Path> =
            used.filter_map(|tenant| tenant.confinement.netns.as_deref()).collect();
        used.sort_unstable();
        used.dedup();
        self.collect(&used, sys::addresses::local_addresses(), addresses_in)
    }

    /// The same, of the namespaces of these files. What cannot be listed keeps its last addresses.
    fn collect(
        &mut self,
        used: &[&Path],
        own: io::Result<Vec<IpAddr>>,
        list: impl Fn(&Path) -> io::Result<(u64, Vec<IpAddr>)>,
    ) -> Vec<IpAddr> {
        match own {
            Ok(own) => self.own = own,
            Err(error) => tracing::warn!(
                %error,
                "cannot list this machine's addresses: datagrams whose source is a port of this server are dropped \
                 only where that port listens on one address, or the source is the address they were sent to"
            ),
        }
        self.others.retain(|found| used.contains(&found.path.as_path()));
        for path in used {
            match list(path) {
                Ok((namespace, addresses)) => {
                    let is_same = |of: &Found| of.path == *path && of.namespace == namespace;
                    self.others.retain(|found| !is_same(found));
                    self.others.push(Found { path: path.to_path_buf(), namespace, addresses });
                }
                Err(error) => tracing::warn!(
                    %error,
                    netns = %path.display(),
                    "cannot list the addresses of this network namespace: those that were found last are used"
                ),
            }
        }
        let others = self.others.iter().flat_map(|found| &found.addresses);
        let mut all: Vec<IpAddr> = self.own.iter().chain(others).copied().collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ips(text: &str) -> Vec<IpAddr> {
        text.split_whitespace().map(|ip| ip.parse().unwrap()).collect()
    }

    #[test]
    fn addresses_of_all_namespaces_with_ports_are_listed() {
        let [blue, red] = ["/run/netns/blue", "/run/netns/red"].map(Path::new);
        let refused = || io::Error::from(io::ErrorKind::NotFound);
        let mut known = LocalAddresses::default();
        let list = |path: &Path| match path == blue {
            true => Ok((1, ips("127.0.0.1 10.1.0.1 10.1.0.2"))),
            false => Ok((2, ips("127.0.0.1 10.1.0.1 fd00::1"))),
        };
        let own = || Ok(ips("127.0.0.1 10.9.0.1"));
        assert_eq!(known.collect(&[], own(), list), ips("10.9.0.1 127.0.0.1"));
        let all = ips("10.1.0.1 10.1.0.2 10.9.0.1 127.0.0.1 fd00::1");
        assert_eq!(known.collect(&[blue, red], own(), list), all);
        // What cannot be listed keeps its addresses.
        assert_eq!(known.collect(&[blue, red], Err(refused()), |_| Err(refused())), all);
        // Addresses that are gone, and a namespace without ports.
        let fewer = |_: &Path| Ok((1, ips("10.1.0.2")));
        assert_eq!(known.collect(&[blue], own(), fewer), ips("10.1.0.2 10.9.0.1 127.0.0.1"));
        // Another namespace has the name: ports can still be open in the former one.
        let another = |_: &Path| Ok((3, ips("10.1.0.3")));
        let both = ips("10.1.0.2 10.1.0.3 10.9.0.1 127.0.0.1");
        assert_eq!(known.collect(&[blue], own(), another), both);
        assert_eq!(known.collect(&[], own(), list), ips("10.9.0.1 127.0.0.1"));
    }
}
