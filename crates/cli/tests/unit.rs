//! docs/serval.service: what it forbids, and that it leaves what Serval needs.

use std::process::Command;

const UNIT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/serval.service");

/// The values of a directive, in order.
fn values<'a>(unit: &'a str, directive: &str) -> Vec<&'a str> {
    let lines = unit.lines().filter_map(|line| line.split_once('='));
    lines.filter(|(name, _)| *name == directive).map(|(_, value)| value).collect()
}

#[test]
fn the_unit_is_hardened_and_leaves_what_serval_needs() {
    let unit = std::fs::read_to_string(UNIT).unwrap();
    for directive in [
        "NoNewPrivileges",
        "PrivateDevices",
        "PrivateTmp",
        "ProtectClock",
        "ProtectControlGroups",
        "ProtectHome",
        "ProtectHostname",
        "ProtectKernelLogs",
        "ProtectKernelModules",
        "ProtectKernelTunables",
        "RestrictNamespaces",
        "RestrictRealtime",
        "RestrictSUIDSGID",
        "LockPersonality",
        "MemoryDenyWriteExecute",
    ] {
        assert_eq!(values(&unit, directive), ["yes"], "{directive}");
    }
    for (directive, expected) in [
        ("CapabilityBoundingSet", &[""][..]),
        ("ProtectSystem", &["strict"]),
        ("SystemCallArchitectures", &["native"]),
        ("SystemCallFilter", &["@system-service", "~@privileged"]),
        // Ports; the sockets of control, attach and shm:// ports; the addresses of this machine.
        ("RestrictAddressFamilies", &["AF_INET AF_INET6 AF_UNIX AF_NETLINK"]),
        ("RuntimeDirectory", &["serval"]),
        ("User", &["serval"]),
        // It finds the socket with and without `engine.control`.
        ("ExecReload", &["/usr/local/bin/serval reload --config /etc/serval/serval.toml"]),
    ] {
        assert_eq!(values(&unit, directive), expected, "{directive}");
    }
    // Runtimes find the engine in /proc, and the engine limits and clocks of the machine there; a network of its own
    // would have no clients, and users of its own would make every peer a stranger.
    for directive in
        ["ProcSubset", "PrivateNetwork", "PrivateUsers", "IPAddressDeny", "RootDirectory"]
    {
        assert!(values(&unit, directive).is_empty(), "{directive}");
    }
}

/// Where systemd is, it says how exposed the service is: 0 is not at all, 10 entirely.
#[test]
fn systemd_finds_the_unit_little_exposed() {
    let mut command = Command::new("systemd-analyze");
    command.args(["security", "--offline=true", "--no-pager", UNIT]);
    let Ok(said) = command.output() else {
        println!("SKIPPED: no systemd-analyze here");
        return;
    };
    if said.stdout.is_empty() {
        let why = String::from_utf8_lossy(&said.stderr);
        println!("SKIPPED: this systemd-analyze cannot do it (before systemd 250): {}", why.trim());
        return;
    }
    let text = String::from_utf8_lossy(&said.stdout).into_owned();
    let level = text.split("Overall exposure level for serval.service: ").nth(1);
    let level = level.and_then(|rest| rest.split(' ').next()?.parse::<f64>().ok());
    let level = level.unwrap_or_else(|| panic!("no level in {text}"));
    assert!(level <= 3.0, "{text}");
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operations.md");
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("systemd-analyze security --offline=true"), "{level}");
}
