//! `listen` and `connect` addresses: `udp://127.0.0.1:9000`, `tcp://[::1]:9000`, `shm:///run/digits`.
//!
//! A listening host is an IP address, since a name could resolve to another interface later; `localhost` is
//! 127.0.0.1. `0.0.0.0` means all IPv4 addresses of the machine and `[::]` all IPv6 addresses (and no IPv4 ones). A
//! backend may also be a name, which is resolved once, at start.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};

use engine::topology::SocketAt;
use sys::local::PATH_BYTES_MAX;
use wire::nic::Transport;

use super::words::nearest;

/// Why a text is not a valid address, and the fix.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Wrong {
    pub(super) what: String,
    pub(super) right: String,
}

fn wrong<T>(what: impl Into<String>, right: impl Into<String>) -> Result<T, Wrong> {
    Err(Wrong { what: what.into(), right: right.into() })
}

/// A listening address; port 0 lets the host kernel choose.
pub(super) fn listen(url: &str) -> Result<(Transport, SocketAddr), Wrong> {
    let (transport, host, port) = split(url, "udp://127.0.0.1:9000")?;
    let Some(ip) = literal(host) else {
        return match host {
            "*" | "" => wrong(
                format!("`{host}` is not an address to listen on"),
                "write 0.0.0.0 for every IPv4 address, [::] for every IPv6 address",
            ),
            _ => wrong(
                format!("`{host}` is not an IP address"),
                "listen on the address itself, such as 127.0.0.1 or [::1]",
            ),
        };
    };
    one_machine(host, ip, "listen on an address of this machine, such as 127.0.0.1")?;
    Ok((transport, SocketAddr::new(ip, port)))
}

/// Rejects addresses of more than one machine: a service replies from the address at which it received the request,
/// and these cannot be source addresses.
fn one_machine(host: &str, ip: IpAddr, right: &str) -> Result<(), Wrong> {
    let broadcast = match ip {
        IpAddr::V4(ip) => ip.is_broadcast() || ip == Ipv4Addr::new(127, 255, 255, 255),
        IpAddr::V6(_) => false,
    };
    match ip.to_canonical().is_multicast() {
        true => wrong(format!("`{host}` is a multicast address"), right),
        false if broadcast => wrong(format!("`{host}` is a broadcast address"), right),
        false => Ok(()),
    }
}

/// The path of a shared-memory port (`shm:///run/digits`); `None` if the text is of another scheme.
pub(super) fn memory_port(url: &str) -> Option<Result<PathBuf, Wrong>> {
    path_of(url, "shm")
}

/// The path of a Unix socket of kernels (`unix:///run/digits`); `None` if the text is of another scheme.
fn unix_socket(url: &str) -> Option<Result<PathBuf, Wrong>> {
    path_of(url, "unix")
}

fn path_of(url: &str, scheme: &str) -> Option<Result<PathBuf, Wrong>> {
    let path = url.strip_prefix(scheme)?.strip_prefix("://")?;
    if !path.starts_with('/') || path.len() < 2 || path.ends_with('/') {
        let what = format!("`{url}` is not the absolute path of a socket");
        return Some(wrong(what, format!("such as \"{scheme}:///run/digits\"")));
    }
    if path.len() > PATH_BYTES_MAX {
        let right = format!("a socket's path has at most {PATH_BYTES_MAX} bytes");
        return Some(wrong(format!("`{path}` is too long"), right));
    }
    Some(Ok(PathBuf::from(path)))
}

/// The address of a stream socket, at which a kernel listens or to which it connects. `datagrams` is the problem of `udp://`, and its fix.
pub(super) fn stream(url: &str, listens: bool, datagrams: (&str, &str)) -> Result<SocketAt, Wrong> {
    let at = match unix_socket(url) {
        Some(path) => return path.map(SocketAt::Unix),
        None if listens => listen(url)?,
        None => connect(url)?,
    };
    match at {
        (Transport::Tcp, address) => Ok(SocketAt::Tcp(address)),
        (Transport::Udp, _) => wrong(datagrams.0, datagrams.1),
    }
}

/// The path of a shared-memory port as a URL.
pub fn memory_url(path: &Path) -> String {
    format!("shm://{}", path.display())
}

/// The path of a Unix socket as a URL.
pub fn unix_url(path: &Path) -> String {
    format!("unix://{}", path.display())
}

/// A backend's address. A name is resolved; its first address is used.
pub(super) fn connect(url: &str) -> Result<(Transport, SocketAddr), Wrong> {
    let (transport, host, port) = split(url, "tcp://127.0.0.1:11211")?;
    Ok((transport, destination(host, port, "backend")?))
}

/// The address of an upstream server: `127.0.0.1:11211`. A name is looked up; its first address is taken.
pub(super) fn upstream(text: &str) -> Result<SocketAddr, Wrong> {
    if text.contains("://") {
        let right = "write HOST:PORT: a proxy asks by the transport by which it is asked";
        return wrong(format!("`{text}` has a scheme"), right);
    }
    let (host, port) = host_and_port(text, "127.0.0.1:11211")?;
    destination(host, port, "upstream server")
}

/// The address of a server, which is called so in messages.
fn destination(host: &str, port: u16, server: &str) -> Result<SocketAddr, Wrong> {
    if port == 0 {
        let what = match server {
            "backend" => "a backend cannot have port 0",
            _ => "an upstream server cannot have port 0",
        };
        return wrong(what, "write the port it listens on");
    }
    if let Some(ip) = literal(host) {
        if ip.is_unspecified() {
            let right = format!("write the {server}'s address");
            return wrong(format!("`{host}` is not a destination"), right);
        }
        one_machine(host, ip, &format!("write the {server}'s own address"))?;
        return Ok(SocketAddr::new(ip, port));
    }
    let printable =
        host.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_'));
    if host.is_empty() || !printable {
        return wrong(format!("`{host}` is not a host"), "write an IP address or a host name");
    }
    match (host, port).to_socket_addrs().map(|mut found| found.next()) {
        Ok(Some(address)) => Ok(address),
        _ => wrong(
            format!("the host name `{host}` has no address"),
            "write an IP address, or a name that this machine can resolve",
        ),
    }
}

/// `127.0.0.1:9464`: the address of the metrics endpoint.
pub(super) fn plain(text: &str) -> Result<SocketAddr, Wrong> {
    let (host, port) = host_and_port(text, "127.0.0.1:9464")?;
    match literal(host) {
        Some(ip) => {
            one_machine(host, ip, "such as \"127.0.0.1:9464\"")?;
            Ok(SocketAddr::new(ip, port))
        }
        None => wrong(format!("`{host}` is not an IP address"), "such as \"127.0.0.1:9464\""),
    }
}

/// An address as a URL.
pub fn url(transport: Transport, address: SocketAddr) -> String {
    let scheme = match transport {
        Transport::Udp => "udp",
        Transport::Tcp => "tcp",
    };
    format!("{scheme}://{address}")
}

fn split<'u>(url: &'u str, example: &str) -> Result<(Transport, &'u str, u16), Wrong> {
    let Some((scheme, rest)) = url.split_once("://") else {
        return wrong(format!("`{url}` has no scheme"), format!("such as \"{example}\""));
    };
    let transport = match scheme {
        "udp" => Transport::Udp,
        "tcp" => Transport::Tcp,
        "shm" => {
            return wrong(
                "shared memory (shm://) is for clients, not for backends",
                "use udp:// or tcp://",
            );
        }
        "unix" => {
            return wrong(
                "Unix sockets (unix://) are for sockets of kernels",
                "use udp:// or tcp://, or [[service.socket]]",
            );
        }
        _ => {
            let right = match nearest(scheme, ["udp", "tcp", "shm"]) {
                Some(near) => format!("did you mean {near}://?"),
                None => "use udp:// or tcp://".to_owned(),
            };
            return wrong(format!("`{scheme}://` is not a transport"), right);
        }
    };
    if rest.contains(['/', '?', '#', '@']) {
        return wrong(
            format!("`{url}` has more than a host and a port"),
            format!("such as \"{example}\""),
        );
    }
    let (host, port) = host_and_port(rest, example)?;
    Ok((transport, host, port))
}

fn host_and_port<'u>(text: &'u str, example: &str) -> Result<(&'u str, u16), Wrong> {
    let such = || format!("such as \"{example}\"");
    if text.parse::<Ipv6Addr>().is_ok() {
        return wrong("an IPv6 address needs brackets before its port", "such as [::1]:9000");
    }
    let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((inside, rest)) if inside.parse::<Ipv6Addr>().is_ok() => {
            (&text[..inside.len() + 2], rest.strip_prefix(':'))
        }
        Some((inside, _)) => {
            return wrong(format!("`[{inside}]` is not an IPv6 address"), "such as [::1]");
        }
        None => match text.rsplit_once(':') {
            Some((host, _)) if host.contains(':') => {
                return wrong(
                    "an IPv6 address needs brackets before its port",
                    "such as [::1]:9000",
                );
            }
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let Some(port) = port.filter(|port| !port.is_empty()) else {
        return wrong(format!("`{text}` has no port"), such());
    };
    // `parse` alone would accept a sign.
    let digits = port.bytes().all(|b| b.is_ascii_digit());
    match port.parse::<u16>() {
        Ok(port) if digits => Ok((host, port)),
        _ => wrong(format!("`{port}` is not a port"), "a port is a number in [0, 65535]"),
    }
}

fn literal(host: &str) -> Option<IpAddr> {
    if host == "localhost" {
        return Some(Ipv4Addr::LOCALHOST.into());
    }
    if let Some(inside) = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        return inside.parse::<Ipv6Addr>().ok().map(IpAddr::V6);
    }
    host.parse::<Ipv4Addr>().ok().map(IpAddr::V4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_both_families_are_read() {
        let listens = [
            ("udp://127.0.0.1:9000", Transport::Udp, "127.0.0.1:9000"),
            ("tcp://[::1]:0", Transport::Tcp, "[::1]:0"),
            ("udp://0.0.0.0:53", Transport::Udp, "0.0.0.0:53"),
            ("udp://[::]:65535", Transport::Udp, "[::]:65535"),
            ("tcp://localhost:80", Transport::Tcp, "127.0.0.1:80"),
        ];
        for (text, transport, address) in listens {
            assert_eq!(listen(text), Ok((transport, address.parse().unwrap())), "{text}");
        }
        assert_eq!(plain("[::1]:9464"), Ok("[::1]:9464".parse().unwrap()));
        assert_eq!(connect("tcp://localhost:1").unwrap().1, "127.0.0.1:1".parse().unwrap());
    }

    #[test]
    fn paths_of_memory_ports_are_absolute() {
        assert!(memory_port("udp://127.0.0.1:1").is_none());
        assert_eq!(memory_port("shm:///run/digits"), Some(Ok(PathBuf::from("/run/digits"))));
        let long = format!("shm:///{}", "x".repeat(PATH_BYTES_MAX));
        for url in ["shm://run/digits", "shm://", "shm:///", "shm:///run/", &long] {
            let wrong = memory_port(url).expect("the scheme is right").unwrap_err();
            assert!(!wrong.right.is_empty(), "{url}: {wrong:?}");
        }
        assert!(connect("shm:///run/digits").unwrap_err().what.contains("not for backends"));
        assert_eq!(unix_socket("unix:///run/digits"), Some(Ok(PathBuf::from("/run/digits"))));
        assert!(unix_socket("shm:///run/digits").is_none() && unix_socket("unix:/run").is_none());
        let relative = unix_socket("unix://digits").expect("the scheme is right").unwrap_err();
        assert!(relative.right.contains("unix:///"), "{relative:?}");
        assert!(connect("unix:///run/digits").unwrap_err().right.contains("[[service.socket]]"));
    }

    #[test]
    fn errors_of_addresses_state_the_fix() {
        let cases = [
            ("127.0.0.1:9000", "no scheme"),
            ("udb://127.0.0.1:9000", "not a transport"),
            ("http://127.0.0.1:9000", "not a transport"),
            ("udp://127.0.0.1", "no port"),
            ("udp://127.0.0.1:", "no port"),
            ("udp://[::1]", "no port"),
            ("udp://::1", "brackets"),
            ("udp://::1:9000", "brackets"),
            ("udp://fe80::1:2:9000", "brackets"),
            ("udp://[::g]:9000", "not an IPv6 address"),
            ("udp://[::1]9000", "no port"),
            ("udp://*:9000", "not an address to listen on"),
            ("udp://:9000", "not an address to listen on"),
            ("udp://example.org:9000", "not an IP address"),
            ("udp://300.0.0.1:9000", "not an IP address"),
            ("udp://127.0.0.1:65536", "not a port"),
            ("udp://127.0.0.1:+80", "not a port"),
            ("udp://127.0.0.1:80/x", "more than a host"),
            ("udp://user@127.0.0.1:80", "more than a host"),
        ];
        for (text, expected) in cases {
            let wrong = listen(text).unwrap_err();
            assert!(wrong.what.contains(expected), "{text}: {wrong:?}");
            assert!(!wrong.right.is_empty());
        }
        assert!(connect("tcp://127.0.0.1:0").unwrap_err().what.contains("port 0"));
        assert!(connect("tcp://0.0.0.0:1").unwrap_err().what.contains("not a destination"));
        assert!(connect("tcp://no such host:1").unwrap_err().what.contains("not a host"));
        assert!(connect("tcp://name.invalid:1").unwrap_err().what.contains("has no address"));
    }
}
