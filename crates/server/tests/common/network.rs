//! Network namespaces of tests.

use std::io::Read as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use super::Peer;

/// A network namespace with a loopback device that is up, for as long as this exists.
pub(crate) struct Network(Peer);

impl Network {
    pub(crate) fn new() -> Option<Self> {
        let mut command = Command::new("unshare");
        let script = "ip link set lo up && echo up && exec sleep 600";
        command.args(["--net", "sh", "-c", script]).stdout(Stdio::piped());
        let mut network = Self(Peer(command.spawn().ok()?));
        let mut said = String::new();
        let mut output = network.0.0.stdout.take().unwrap().take(3);
        output.read_to_string(&mut said).unwrap();
        (said == "up\n").then_some(network)
    }

    pub(crate) fn path(&self) -> PathBuf {
        format!("/proc/{}/ns/net", self.0.0.id()).into()
    }

    /// Gives its loopback device another address.
    pub(crate) fn add(&self, address: &str) {
        let add = || Command::new("ip").args(["addr", "add", address, "dev", "lo"]).status();
        let added = sys::netns::within(&self.path(), add).unwrap().unwrap();
        assert!(added.success(), "{address}: {added}");
    }
}
