//! Model clients over UDP: they send requests at their own pace and count replies. (The ledger checks
//! replies when they leave the engine.) [`crate::stream_client`] has clients over TCP.

use std::net::{IpAddr, SocketAddr};

use wire::framing::Framing;
use wire::nic::PortIndex;

use crate::fault::Fault;
use crate::message::{Ask, Body, Flavor, request_filler_max, request_payload};
use crate::net::Network;
use crate::rng::Rng;

/// Bundles begin at multiples of this.
const LINE: usize = 64;

/// The mix of a client's requests. Rates are per mille of the requests.
#[derive(Clone, Copy, Debug)]
pub struct RequestMix {
    /// How messages are delimited.
    pub framing: Framing,
    /// The service's longest request.
    pub max_message_bytes: usize,
    /// Maximum filler of a reply.
    pub reply_filler_max: usize,
    /// Number of different keys.
    pub keys: u32,
    /// Asks the kernel to ask a backend.
    pub backend: u32,
    /// Asks the kernel to drop the request.
    pub drops: u32,
    /// Asks for a reply that cannot be framed.
    pub unframable: u32,
    /// Exceeds the service's maximum.
    pub too_long: u32,
    /// Is not a [`Body`].
    pub junk: u32,
    /// Wants no reply, or leaves it to the kernel, if the framing can express that.
    pub silent: u32,
    /// Has the maximum length.
    pub heavy: u32,
}

impl RequestMix {
    /// A filler for a request of whole cache lines, if one may be as long: a GRO batch of such ones is split everywhere.
    fn whole_lines(&self, body: &Body, flavor: Flavor) -> u32 {
        let most = request_filler_max(self.framing, self.max_message_bytes).unwrap_or(0);
        let filler = (body.filler as usize..=most).find(|filler| {
            let body = Body { filler: *filler as u32, ..*body };
            request_payload(self.framing, &body, flavor).len().is_multiple_of(LINE)
        });
        filler.map_or(body.filler, |filler| filler as u32)
    }

    /// A request of `client`. Its filler is valid for the framing.
    pub fn request(&self, rng: &mut Rng, client: u32, sequence: u32) -> (Body, Flavor) {
        let ask = match () {
            () if rng.chance(self.backend) => Ask::Backend,
            () if rng.chance(self.drops) => rng.pick(&[Ask::Reject, Ask::BadLength]),
            () if rng.chance(self.unframable) => Ask::Unframable,
            () => Ask::Answer,
        };
        let flavor = match self.framing {
            Framing::Memcached if rng.chance(self.silent) => {
                rng.pick(&[Flavor::Silent, Flavor::Quiet])
            }
            Framing::Sockperf if rng.chance(self.silent) => Flavor::Silent,
            _ => Flavor::Plain,
        };
        let most = request_filler_max(self.framing, self.max_message_bytes).unwrap_or(0) as u64;
        let filler = match self.framing {
            Framing::Fixed(_) => most,
            _ if flavor == Flavor::Quiet => 0,
            _ if rng.chance(self.heavy) => most,
            // Most of the others are short.
            _ => match rng.below(8) {
                0 => rng.below(most + 1),
                _ => rng.below(most.min(40) + 1),
            },
        };
        let most = self.reply_filler_max as u64;
        let want = match rng.below(8) {
            0 => most,
            1 => rng.below(most + 1),
            _ => rng.below(most.min(60) + 1),
        };
        // Few keys get most of the requests.
        let key = rng.below(u64::from(self.keys)).min(rng.below(u64::from(self.keys))) as u32;
        let (want, filler) = (want as u32, filler as u32);
        (Body { client, sequence, key, ask, want, filler }, flavor)
    }
}

/// A client over UDP.
#[derive(Debug)]
pub struct DatagramClient {
    /// Its number.
    pub id: u32,
    /// The service it talks to.
    pub service: usize,
    /// The port of that service.
    pub port: PortIndex,
    /// Its address.
    pub peer: SocketAddr,
    /// The address it sends to, if the port has several.
    pub local: IpAddr,
    /// Its request mix.
    pub request_mix: RequestMix,
    /// Requests still to send.
    pub left: u32,
    /// Maximum number of requests per burst.
    pub burst: u32,
    /// Shortest and longest pause between bursts.
    pub pause_ns: (u64, u64),
    /// Time of its next action.
    pub next_ns: u64,
    /// Its randomness.
    pub rng: Rng,
    /// Number of its next request.
    pub sequence: u32,
    /// Datagrams received.
    pub received: u64,
    /// Rate per mille of the requests that are also sent with a port of the server as source.
    pub forges: u32,
    /// Rate per mille of the bursts whose requests have the same length.
    pub alike_chance: u32,
    /// The lengths of the requests of such a burst and of their replies, after its first.
    pub alike: Option<(u32, u32)>,
}

impl DatagramClient {
    /// Time of the client's next action.
    pub fn due_ns(&self) -> u64 {
        if self.left > 0 { self.next_ns } else { u64::MAX }
    }

    /// Reads replies, sends requests that are due.
    pub fn step(&mut self, net: &mut Network) {
        while let Some((route, _)) = net.take_datagram(self.peer) {
            self.received += 1;
            if route != net.route(self.peer, self.port, self.local) {
                let text = format!("client {} got a reply from elsewhere: {route:?}", self.id);
                net.ledger.violate(|| text);
            }
        }
        if self.left == 0 || self.next_ns > net.now_ns() {
            return;
        }
        self.next_ns = net.now_ns() + self.rng.between(self.pause_ns.0, self.pause_ns.1);
        let burst = self.rng.between(1, self.burst.into()).min(self.left.into());
        let is_alike = self.alike_chance > 0 && self.rng.chance(self.alike_chance);
        for _ in 0..burst {
            self.left -= 1;
            self.send(net);
            self.alike = self.alike.filter(|_| is_alike);
        }
        self.alike = None;
    }

    fn send(&mut self, net: &mut Network) {
        if net.fault_counts.occurs(&mut self.rng, Fault::Junk, self.request_mix.junk) {
            let len = self.rng.below(40) as usize;
            let junk: Vec<u8> = (0..len).map(|_| self.rng.draw() as u8).collect();
            return net.send_datagram(self.peer, self.port, self.local, &junk);
        }
        let (mut body, flavor) = self.request_mix.request(&mut self.rng, self.id, self.sequence);
        if flavor != Flavor::Quiet {
            let mix = &self.request_mix;
            (body.filler, body.want) =
                *self.alike.get_or_insert_with(|| (mix.whole_lines(&body, flavor), body.want));
        }
        if flavor != Flavor::Quiet
            && net.fault_counts.occurs(&mut self.rng, Fault::LongRequest, self.request_mix.too_long)
        {
            body.filler = self.request_mix.max_message_bytes as u32 + 1;
        }
        self.sequence += 1;
        let route = net.route(self.peer, self.port, self.local);
        net.ledger.ask(self.service, body, Some(route));
        let payload = request_payload(self.request_mix.framing, &body, flavor);
        if self.forges > 0 && net.fault_counts.occurs(&mut self.rng, Fault::OwnSource, self.forges)
        {
            let source = net.own_source(&mut self.rng);
            net.send_datagram(source, self.port, self.local, &payload);
        }
        net.send_datagram(self.peer, self.port, self.local, &payload);
    }
}
