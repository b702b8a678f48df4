//! The ledger: records what crosses the boundary of the engine, and checks the consequences.
//!
//! The engine counts its own messages; the ledger counts them again from outside, at the network and
//! in the kernels, and checks each one. The first error becomes the *violation* of
//! the run. It checks that:
//!
//! * a reply to a datagram goes to the client that sent the request, from the port and address it used, with
//!   the one correct content, at most once for each time the request was received;
//! * no such reply is larger than the port's ratio allows;
//! * a kernel sees a request at most as often as it was received, unchanged, and any other
//!   datagram at most as often and with the very same bytes;
//! * a key (or flow) always goes to the same mqueue if the dispatch policy requires it;
//! * the engine's counters of received and sent messages match what crossed its boundary.
//!
//! The model clients check replies on streams, because they know the order of their requests.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use engine::metrics::ServiceSnapshot;
use engine::topology::Dispatch;
use sockets::Books;
use wire::DropReason;
use wire::admission::{bucket, key_hash};
use wire::framing::Framing;
use wire::nic::PortIndex;

use crate::message::{Body, FromStream, ReplyStream, decode_reply, decode_request, key_bytes};

/// The properties of a service that the ledger needs.
#[derive(Clone, Debug)]
pub struct ServiceRules {
    /// How its messages are delimited.
    pub framing: Framing,
    /// The payload of its own error reply, if it has one: no reply of a kernel is the same.
    pub error_reply: Vec<u8>,
    /// Its dispatch policy.
    pub dispatch: Dispatch,
    /// Its mqueues, over all accelerators and workers.
    pub mqueues: u32,
    /// Whether the content of its replies is checked: not if kernels write arbitrary data.
    pub judged: bool,
    /// Whether it has shared-memory ports.
    pub memory: bool,
    /// Whether it has stream ports.
    pub streams: bool,
}

/// Source and destination of a datagram: a reply must take exactly the reverse route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Route {
    /// The client.
    pub peer: SocketAddr,
    /// The port.
    pub port: PortIndex,
    /// The port's address, if it has several.
    pub local: Option<IpAddr>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Exchange {
    delivered: u64,
    replied: u64,
}

#[derive(Clone, Debug)]
struct Asked {
    service: usize,
    body: Body,
    /// `None`: on a stream.
    route: Option<Route>,
    /// Payload bytes as received.
    len: usize,
    delivered: u64,
    seen: u64,
    replied: u64,
}

/// See [`OfService::sockets`].
#[derive(Clone, Copy, Debug, Default)]
struct SocketBytes {
    from_peers: u64,
    to_peers: u64,
    moved: u64,
}

#[derive(Clone, Debug)]
struct OfService {
    rules: ServiceRules,
    /// Complete datagrams passed to the engine.
    datagrams_in: u64,
    truncated: u64,
    own_sources: u64,
    privileged: u64,
    overflowed: u64,
    datagrams_out: u64,
    /// Complete replies written to streams.
    stream_replies: u64,
    /// Bytes of sockets: that the engine read from connections and wrote to them, and that blocks have moved from ring to ring.
    sockets: SocketBytes,
    /// The engine's counters matched, and nothing has crossed since.
    audited: bool,
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Ledger {
    services: Vec<OfService>,
    asked: BTreeMap<(u32, u32), Asked>,
    exchanges: BTreeMap<Route, Exchange>,
    /// Datagrams that are not a [`Body`], by service: delivered, seen by kernels, returned.
    strange: BTreeMap<(usize, Vec<u8>), [u64; 3]>,
    /// Clients that overwrite their own requests, and their services.
    outlaws: BTreeSet<u32>,
    lawless: BTreeSet<usize>,
    /// Mqueue of each flow, by service and client.
    flows: BTreeMap<(usize, u32), u32>,
    violation: Option<String>,
}

/// How the engine must treat a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intake {
    /// A request.
    Request,
    /// Dropped: it was truncated.
    Truncated,
    /// Dropped: its source is a port of the server.
    OwnSource,
    /// Dropped: its source port is below 1024.
    Privileged,
}

impl Ledger {
    /// An empty ledger for these services.
    pub fn new(rules: Vec<ServiceRules>) -> Self {
        let of_service = |rules| OfService {
            rules,
            datagrams_in: 0,
            truncated: 0,
            own_sources: 0,
            privileged: 0,
            overflowed: 0,
            datagrams_out: 0,
            stream_replies: 0,
            sockets: SocketBytes::default(),
            audited: false,
        };
        Self {
            services: rules.into_iter().map(of_service).collect(),
            asked: BTreeMap::new(),
            exchanges: BTreeMap::new(),
            strange: BTreeMap::new(),
            outlaws: BTreeSet::new(),
            lawless: BTreeSet::new(),
            flows: BTreeMap::new(),
            violation: None,
        }
    }

    /// The first violation found.
    pub fn violation(&self) -> Option<&str> {
        self.violation.as_deref()
    }

    /// Records a violation; only the first one counts.
    pub fn violate(&mut self, text: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some(text());
        }
    }

    pub(crate) fn must(&mut self, holds: bool, text: impl FnOnce() -> String) {
        if !holds {
            self.violate(text);
        }
    }

    /// How many services there are.
    pub fn services(&self) -> usize {
        self.services.len()
    }

    /// The properties of a service.
    pub fn rules(&self, service: usize) -> &ServiceRules {
        &self.services[service].rules
    }

    /// Records a request that a client is about to send; `route` is `None` on a stream.
    pub fn ask(&mut self, service: usize, body: Body, route: Option<Route>) {
        let asked = Asked { service, body, route, len: 0, delivered: 0, seen: 0, replied: 0 };
        let before = self.asked.insert((body.client, body.sequence), asked);
        assert!(before.is_none(), "a client numbers its requests");
    }

    /// Something of a service crosses the boundary of the engine.
    fn crosses(&mut self, service: usize) -> &mut OfService {
        let of_service = &mut self.services[service];
        of_service.audited = false;
        of_service
    }

    /// A datagram was handed to the engine.
    pub fn datagram_in(&mut self, service: usize, route: Route, payload: &[u8], intake: Intake) {
        let of_service = self.crosses(service);
        match intake {
            Intake::Request => {}
            Intake::Truncated => return of_service.truncated += 1,
            Intake::Privileged => return of_service.privileged += 1,
            Intake::OwnSource => return of_service.own_sources += 1,
        }
        of_service.datagrams_in += 1;
        let framing = of_service.rules.framing;
        self.exchanges.entry(route).or_default().delivered += 1;
        let Some((body, _)) = decode_request(framing, payload) else {
            self.strange.entry((service, payload.to_vec())).or_default()[0] += 1;
            return;
        };
        if let Some(asked) = self.asked.get_mut(&(body.client, body.sequence)) {
            asked.delivered += 1;
            asked.len = payload.len();
        }
    }

    /// Whether a kernel may see (1) or return (2) these bytes, which are not a [`Body`], once more.
    fn is_strange(&mut self, service: usize, payload: &[u8], what: usize) -> bool {
        let Some(counts) = self.strange.get_mut(&(service, payload.to_vec())) else { return false };
        counts[what] += 1;
        counts[what] <= counts[0]
    }

    /// From now on a client writes anything into the rings of its own region: kernels may get its requests
    /// garbled or repeatedly.
    pub fn outlaw(&mut self, service: usize, client: u32) {
        self.outlaws.insert(client);
        self.lawless.insert(service);
    }

    /// The engine got the count of datagrams that arrived at a full socket.
    pub fn overflow(&mut self, service: usize, count: u64) {
        if count > 0 {
            self.crosses(service).overflowed += count;
        }
    }

    /// The engine sent a datagram from a port that limits replies to `ratio` times the bytes of
    /// their requests (0: no limit).
    pub fn datagram_out(&mut self, service: usize, route: Route, payload: &[u8], ratio: usize) {
        self.crosses(service).datagrams_out += 1;
        let exchange = self.exchanges.entry(route).or_default();
        exchange.replied += 1;
        let within = exchange.replied <= exchange.delivered;
        self.must(within, || format!("an unsolicited reply leaves by {route:?}"));
        let ServiceRules { framing, judged, .. } = self.services[service].rules;
        if !judged {
            return;
        }
        let reply = match framing {
            Framing::Raw => Body::of_request(payload),
            _ => decode_reply(framing, payload),
        };
        let Some(reply) = reply else {
            if framing == Framing::Raw && self.is_strange(service, payload, 2) {
                return;
            }
            return self.violate(|| format!("a garbled reply leaves by {route:?}: {payload:02x?}"));
        };
        let Some(asked) = self.asked.get_mut(&(reply.client, reply.sequence)) else {
            return self.violate(|| format!("a reply to no request leaves: {reply:?}"));
        };
        asked.replied += 1;
        let asked = asked.clone();
        let right = if framing == Framing::Raw { asked.body } else { asked.body.reply() };
        self.must(asked.route == Some(route), || {
            format!("a reply to {:?} leaves by {route:?}", asked.route)
        });
        self.must(asked.service == service, || format!("{reply:?} leaves from another service"));
        self.must(asked.replied <= asked.delivered, || format!("a second reply to {reply:?}"));
        self.must(reply == right, || format!("the reply is {reply:?}, should be {right:?}"));
        self.must(ratio == 0 || payload.len() <= ratio * asked.len, || {
            format!("{} bytes answer {}, more than {ratio} times", payload.len(), asked.len)
        });
    }

    /// A stream of a service took bytes; `tail` keeps those of an incomplete reply.
    pub fn stream_out(&mut self, service: usize, tail: &mut ReplyStream, bytes: &[u8]) {
        let of_service = self.crosses(service);
        let framing = of_service.rules.framing;
        if framing == Framing::Raw || !of_service.rules.judged {
            return;
        }
        tail.push(bytes);
        while let Some(what) = tail.next(framing) {
            let own = &of_service.rules.error_reply;
            let is_error = match what {
                FromStream::Error => true,
                FromStream::Reply(payload) => !own.is_empty() && payload == own,
            };
            of_service.stream_replies += u64::from(!is_error);
        }
    }

    /// The engine read bytes from a connection of a block.
    pub(crate) fn socket_in(&mut self, service: usize, count: u64) {
        self.services[service].sockets.from_peers += count;
    }

    /// A connection of a block took bytes from the engine.
    pub(crate) fn socket_out(&mut self, service: usize, count: u64) {
        self.services[service].sockets.to_peers += count;
    }

    /// A block read bytes from one ring and wrote them to another.
    pub(crate) fn socket_moved(&mut self, service: usize, count: u64) {
        self.services[service].sockets.moved += count;
    }

    /// Compares the engine's books of the bytes of sockets with what crossed its boundary. Of each direction, to blocks and from
    /// them: the books, and the bytes in rings. `judged`: blocks do not overwrite the words of their rings.
    pub(crate) fn audit_sockets(&mut self, service: usize, of: [(Books, u64); 2], judged: bool) {
        let crossed = self.services[service].sockets;
        let [(received, _), (sent, _)] = of;
        for (what, (books, in_rings)) in ["received", "sent"].into_iter().zip(of) {
            self.must(books.taken == books.delivered + books.dropped + in_rings, || {
                format!("service {service}: {what} {books:?}, {in_rings} bytes in rings")
            });
        }
        self.must(received.taken == crossed.from_peers, || {
            format!("service {service}: {received:?}, {crossed:?}")
        });
        self.must(sent.delivered == crossed.to_peers, || {
            format!("service {service}: {sent:?}, {crossed:?}")
        });
        let most = received.delivered.max(sent.taken);
        self.must(!judged || most <= crossed.moved, || {
            format!("service {service}: received {received:?}, sent {sent:?}, {crossed:?}")
        });
    }

    /// A kernel read a message from the RX ring of `mqueue` (numbered over all workers).
    pub fn seen(&mut self, service: usize, mqueue: u32, payload: &[u8]) {
        let ServiceRules { framing, dispatch, mqueues, judged, streams, .. } =
            self.services[service].rules.clone();
        let Some((body, _)) = decode_request(framing, payload) else {
            let fragments = framing == Framing::Raw && streams;
            let anything = fragments || self.lawless.contains(&service);
            let right = anything || self.is_strange(service, payload, 1);
            return self.must(right || !judged, || {
                format!("mqueue {mqueue} of service {service} got a garbled message {payload:02x?}")
            });
        };
        if let Dispatch::KeyHash(_) = dispatch
            && let Some(key) = key_bytes(framing, payload)
        {
            let right = bucket(key_hash(key), mqueues);
            self.must(mqueue == right, || {
                format!("key {:#x} met mqueue {mqueue}, should meet {right}", body.key)
            });
        }
        if dispatch == Dispatch::FlowHash && framing != Framing::Raw {
            let first = *self.flows.entry((service, body.client)).or_insert(mqueue);
            self.must(mqueue == first, || {
                format!("the flow of client {} met mqueue {first}, then {mqueue}", body.client)
            });
        }
        let Some(asked) = self.asked.get_mut(&(body.client, body.sequence)) else {
            return self.violate(|| format!("a kernel got an unsolicited request: {body:?}"));
        };
        asked.seen += 1;
        let asked = asked.clone();
        if !judged || self.outlaws.contains(&body.client) {
            return;
        }
        let most = if asked.route.is_some() { asked.delivered } else { 1 };
        self.must(asked.seen <= most, || format!("{body:?} reached kernels {} times", asked.seen));
        self.must(asked.service == service && asked.body == body, || {
            format!("a kernel of service {service} got {body:?}, asked was {asked:?}")
        });
    }

    /// The request of a client, by its number.
    pub fn asked(&self, client: u32, sequence: u32) -> Option<Body> {
        self.asked.get(&(client, sequence)).map(|asked| asked.body)
    }

    /// Whether nothing of a service has crossed since its last audit.
    pub fn is_audited(&self, service: usize) -> bool {
        self.services[service].audited
    }

    /// Compares the engine's counters of a service with what crossed its boundary. `datagrams_only`: the service
    /// has no stream ports.
    pub fn audit(&mut self, service: usize, counted: &ServiceSnapshot, datagrams_only: bool) {
        self.services[service].audited = true;
        let of_service = self.services[service].clone();
        let mut equal = |what: &str, engine: u64, outside: u64| {
            self.must(engine == outside, || {
                format!("service {service}: the engine counts {engine} {what}, {outside} crossed")
            });
        };
        equal("overflows", counted.dropped(DropReason::SocketOverflow), of_service.overflowed);
        equal("truncations", counted.dropped(DropReason::Truncated), of_service.truncated);
        equal("own sources", counted.dropped(DropReason::LoopedSource), of_service.own_sources);
        equal(
            "sources of low ports",
            counted.dropped(DropReason::PrivilegedSource),
            of_service.privileged,
        );
        let rules = &of_service.rules;
        if rules.memory {
            // Requests and replies of shared-memory clients are in their rings.
            return;
        }
        if datagrams_only {
            equal("requests", counted.received, of_service.datagrams_in);
        }
        if datagrams_only || (rules.judged && rules.framing != Framing::Raw) {
            let crossed = of_service.datagrams_out + of_service.stream_replies;
            equal("replies", counted.replied, crossed);
        }
    }
}
