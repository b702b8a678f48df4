//! Sockets of blocks in a plan: the listeners and peers of some services, and their clients.

use std::net::{Ipv4Addr, SocketAddr};

use engine::topology::SocketSpec;
use wire::nic::PortIndex;

use super::Plan;
use crate::rng::Rng;
use crate::socket_block::SocketBehaviour;
use crate::socket_peer::{EchoServer, SocketLoad};

const US: u64 = 1_000;
const MS: u64 = 1_000_000;

impl Plan {
    /// Blocks of some services get sockets, of faulty ones with faults. Ports of clients are numbered afterwards.
    pub(crate) fn add_sockets(&mut self, seed: u64) {
        for service in 0..self.setup.topology.services.len() {
            // A generator of its own, so that other runs do not change.
            let mut own = Rng::named(seed, &format!("sockets of {service}"));
            if own.chance(300) {
                self.add_sockets_of(service, &mut own);
            }
        }
        self.add_socket_loads(seed);
        let peers = self.setup.socket_peers();
        let server = |(place, service): (usize, usize)| {
            // A relay resets the clients whose bytes it cannot pass on.
            let mut own = Rng::named(seed, &format!("server of sockets {place}"));
            let doors = if self.sound[service] { 0 } else { own.pick(&[0, 2, 20]) };
            let mut server = EchoServer::new(place);
            server.doors = doors;
            server
        };
        self.socket_servers = peers.into_iter().map(server).collect();
    }

    fn add_sockets_of(&mut self, service: usize, own: &mut Rng) {
        let spec = &mut self.setup.topology.services[service];
        let address = |port: usize| SocketAddr::from((Ipv4Addr::LOCALHOST, port as u16));
        for listener in 0..own.between(1, 2) as usize {
            spec.sockets.push(SocketSpec::listen(address(9500 + 10 * service + listener)));
        }
        if own.chance(400) {
            let peer = Ipv4Addr::new(203, 0, 113, 100 + service as u8);
            spec.sockets.push(SocketSpec::connect((peer, 7)));
        }
        spec.sockets_per_block = own.pick(&[2, 3, 16]);
        spec.socket_bytes = own.pick(&[4096, 4096, 65536]);
        let faulty = !self.sound[service];
        let mut rate = |rates: &[u32]| if faulty { own.pick(rates) } else { 0 };
        let (forge, scribble) = (rate(&[0, 0, 20, 300]), rate(&[0, 0, 20]));
        let (reset, idle) = (rate(&[0, 0, 5]), own.pick(&[0, 0, 300]));
        // Drawn last, so that other runs do not change.
        let close = if faulty { own.pick(&[0, 0, 20]) } else { 0 };
        let cancel = if faulty { own.pick(&[0, 0, 100]) } else { 0 };
        let idle_ms = own.pick(&[0, 0, 5]);
        spec.sockets.iter_mut().for_each(|socket| socket.idle_ms = idle_ms);
        let sockets = SocketBehaviour {
            idle,
            reset,
            close,
            cancel,
            forge,
            scribble,
            ..SocketBehaviour::default()
        };
        self.setup.behaviours[service].sockets = sockets;
    }

    fn add_socket_loads(&mut self, seed: u64) {
        let services = self.setup.topology.services.iter().enumerate();
        let ports = services.flat_map(|(service, spec)| {
            spec.ports().map(move |(_, socket)| (service, socket.is_some()))
        });
        for (port, (service, _)) in ports.enumerate().filter(|(_, (_, is_socket))| *is_socket) {
            let mut own = Rng::named(seed, &format!("peers of socket {port}"));
            let behaviour = self.setup.behaviours[service];
            let corrupts = behaviour.corrupts() || behaviour.sockets.scribble > 0;
            let mut load = SocketLoad::new(service, port as PortIndex, own.fork());
            load.left = own.between(1, 40) as u32;
            load.at_once = own.pick(&[1, 4, 20]);
            load.bytes_max = own.pick(&[1, 3000, 30_000]);
            load.pause_ns = own.pick(&[(0, 20 * US), (5 * US, 200 * US), (MS, 5 * MS)]);
            load.deaf = own.pick(&[0, 0, 200]);
            load.leaves = own.pick(&[0, 0, 300]);
            load.judged = !corrupts && behaviour.sockets.forge == 0;
            load.may_be_cut = behaviour.sockets.close > 0;
            load.next_ns = own.below(2 * MS);
            self.socket_loads.push(load);
        }
    }
}
