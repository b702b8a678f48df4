//! The client flows of a proxy over UDP: a bounded table, and the requests in flight of each.
//!
//! A *flow* is a client's address and port, the port it sends to, and the address it sends to where the port has several. Each
//! has a socket of its own to the upstream server, so that the server sees clients apart, and an answer finds its client by the
//! socket it arrives on. The table is pure: the caller opens and closes sockets.
//!
//! *Requests are counted, not stored.* Datagrams carry nothing that tells which request one answers, so an answer ends the oldest
//! request in flight of its flow. A flow has a count for each quarter of the time-out in which it may still have requests; the
//! answer is taken from the oldest count that is not 0. When a quarter is over for good, what is left in its count has timed out:
//! no request times out early, and none later than one and a quarter of the time-out and a millisecond. No memory depends on the
//! number of requests.
//!
//! *Answers of several datagrams* are those of memcached, whose frame says how many there are. The first one that comes ends the request; `parts.rs`
//! says which others belong to it.
//!
//! *A full table.* Every flow is in one of three lists, each in the order in which it came there:
//!
//! | list | flows |
//! |---|---|
//! | idle | nothing is in flight |
//! | unprotected | something is in flight, and the flow is not protected |
//! | protected | something is in flight, the server has answered since the flow was opened and since a request of it timed out, and the client's address had fewer than a quarter of all flows when it was opened |
//!
//! A new flow takes the place of the one that has been idle for longest, else of the first unprotected one, whose requests are
//! dropped; protected flows are never closed for one. So addresses that a stranger invents take places from each other: a client that
//! is being answered keeps its flow, and one that asks again within the time in which the stranger fills the table, too. A host that
//! opens flows with its own address, and is answered, has at most a quarter of the table for good. A client whose idle flow was closed
//! gets another one with its next request.
//!
//! *Answers after the end of a flow.* A flow that is closed while answers may still come has its port reserved until twice the time
//! after its last request in which a request is answered or times out: the next socket with that port could belong to another client.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};

use wire::admission::host_of;
use wire::framing::UdpHeader;
use wire::nic::{Close, StreamKey};
use wire::session::Origin;

use super::parts::{Part, Parts};

const NIL: u32 = u32::MAX;
/// Counts of a flow: the quarters of a time-out, and the one that is running.
const QUARTERS: u64 = 4;
const COUNTS: usize = QUARTERS as usize + 1;
/// The part of the table that the flows of one address have for good.
const SHARE: u32 = 4;

/// See the module's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum List {
    Idle,
    Unprotected,
    Protected,
}

const LISTS: usize = 3;

/// One flow.
#[derive(Debug)]
pub(super) struct Flow {
    /// A datagram's: where answers go.
    pub(super) origin: Origin,
    /// Of its socket.
    pub(super) key: StreamKey,
    /// It is among those that can be read.
    pub(super) is_ready: bool,
    /// Its socket reported that the server's host refuses datagrams.
    pub(super) bounced: bool,
    /// Bytes of requests that no answer has been charged to: what the ratio of answers to requests is taken of.
    pub(super) unspent: u64,
    /// Requests that have timed out, whose answers may still come.
    late: u32,
    /// Answers of which further datagrams are expected.
    parts: Parts,
    /// Requests in flight by quarter; the quarter of the newest.
    asked: [u32; COUNTS],
    quarter: u64,
    in_flight: u32,
    /// It is not closed for another one while something is in flight.
    is_protected: bool,
    /// Its address had more than its share of the table.
    is_extra: bool,
    /// When it last was used.
    used_ns: u64,
    list: List,
    previous: u32,
    next: u32,
}

/// What an answer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ends {
    /// The oldest request in flight.
    Request,
    /// One that has timed out.
    Late,
    /// Nothing: it continues the answer that came last.
    Further,
    /// Nothing.
    Nothing,
}

/// A flow that was closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Closed {
    pub(super) key: StreamKey,
    /// How its socket is closed.
    pub(super) how: Close,
    /// Requests that were in flight.
    pub(super) in_flight: u32,
}

/// The two ends of a list.
#[derive(Clone, Copy, Debug)]
struct Ring {
    first: u32,
    last: u32,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Flows {
    entries: Vec<Option<Flow>>,
    free: Vec<u32>,
    by_origin: HashMap<Origin, u32>,
    /// How many flows each address has.
    by_host: HashMap<IpAddr, u32>,
    /// The flow that was found last: the datagrams of a client often come in a row.
    last: Option<(Origin, u32)>,
    lists: [Ring; LISTS],
    in_flight: u64,
    quarter_ns: u64,
    /// The quarter in which time-outs were last looked for.
    looked_in: u64,
}

impl Flows {
    /// A table for at most `max` flows, whose requests time out after `timeout_ns`. Nothing is allocated later.
    pub(super) fn new(max: u32, timeout_ns: u64) -> Self {
        Self {
            entries: (0..max).map(|_| None).collect(),
            free: (0..max).rev().collect(),
            // A map that is at most half full uses the places of removed entries again.
            by_origin: HashMap::with_capacity(2 * max as usize),
            by_host: HashMap::with_capacity(2 * max as usize),
            last: None,
            lists: [Ring { first: NIL, last: NIL }; LISTS],
            in_flight: 0,
            quarter_ns: (timeout_ns / QUARTERS).max(1),
            looked_in: 0,
        }
    }

    /// Requests in flight.
    pub(super) fn in_flight(&self) -> u64 {
        self.in_flight
    }

    /// The most flows.
    pub(super) fn max(&self) -> u32 {
        self.entries.len() as u32
    }

    /// An open flow.
    pub(super) fn get(&mut self, flow: u32) -> Option<&mut Flow> {
        self.entries.get_mut(flow as usize)?.as_mut()
    }

    /// The flow of a client.
    #[inline]
    pub(super) fn find(&mut self, origin: &Origin) -> Option<u32> {
        if let Some((last, flow)) = &self.last
            && last == origin
        {
            return Some(*flow);
        }
        let flow = *self.by_origin.get(origin)?;
        self.last = Some((*origin, flow));
        Some(flow)
    }

    /// Whether there is room for a flow; otherwise the one that makes room if it is closed.
    pub(super) fn room(&self) -> Result<(), Option<u32>> {
        if !self.free.is_empty() {
            return Ok(());
        }
        let first =
            |list: List| Some(self.lists[list as usize].first).filter(|first| *first != NIL);
        Err(first(List::Idle).or(first(List::Unprotected)))
    }

    /// The number that the next flow will have if there is room for it.
    pub(super) fn next(&self) -> Option<u32> {
        self.free.last().copied()
    }

    /// Whether a request of this moment is in flight on a flow.
    pub(super) fn was_asked(&mut self, flow: u32, now_ns: u64) -> bool {
        self.get(flow).is_some_and(|flow| flow.in_flight > 0 && flow.used_ns == now_ns)
    }

    /// A client comes that has no flow, with this socket.
    pub(super) fn open(&mut self, origin: Origin, key: StreamKey, now_ns: u64) -> u32 {
        let flow = self.free.pop().expect("the caller has made room");
        let share = (self.max() / SHARE).max(1);
        let flows = self.by_host.entry(host(&origin)).or_insert(0);
        let is_extra = *flows >= share;
        *flows += 1;
        self.entries[flow as usize] = Some(Flow {
            origin,
            key,
            is_ready: false,
            bounced: false,
            unspent: 0,
            late: 0,
            parts: Parts::default(),
            asked: [0; COUNTS],
            quarter: now_ns / self.quarter_ns,
            in_flight: 0,
            is_protected: false,
            is_extra,
            used_ns: now_ns,
            list: List::Idle,
            previous: NIL,
            next: NIL,
        });
        self.by_origin.insert(origin, flow);
        self.append(flow, List::Idle);
        flow
    }

    /// Closes a flow.
    pub(super) fn close(&mut self, flow: u32, now_ns: u64) -> Option<Closed> {
        self.get(flow)?;
        self.unlink(flow);
        let entry = self.entries[flow as usize].take()?;
        self.by_origin.remove(&entry.origin);
        let host = host(&entry.origin);
        if let Some(flows) = self.by_host.get_mut(&host) {
            *flows -= 1;
            if *flows == 0 {
                self.by_host.remove(&host);
            }
        }
        self.last = None;
        self.free.push(flow);
        self.in_flight -= u64::from(entry.in_flight);
        let time_ns = (QUARTERS + 1).saturating_mul(self.quarter_ns);
        let until_ns = entry.used_ns.saturating_add(time_ns.saturating_mul(2));
        let how = match until_ns.saturating_sub(now_ns) {
            ns if ns > 0 && (entry.in_flight > 0 || entry.late > 0 || entry.parts.awaits()) => {
                Close::ReservePort { ns }
            }
            _ => Close::Reset,
        };
        Some(Closed { key: entry.key, how, in_flight: entry.in_flight })
    }

    /// Requests of a flow are sent, of `bytes` together. Returns how many older ones have timed out.
    #[inline]
    pub(super) fn ask(&mut self, flow: u32, requests: u32, bytes: u64, now_ns: u64) -> u32 {
        let expired = self.expire_of(flow, now_ns);
        let Some(entry) = self.get(flow) else { return expired };
        entry.asked[(entry.quarter % COUNTS as u64) as usize] += requests;
        entry.in_flight += requests;
        entry.unspent = entry.unspent.saturating_add(bytes);
        entry.used_ns = now_ns;
        self.in_flight += u64::from(requests);
        self.sort_in(flow);
        expired
    }

    /// The server has answered: what that ends.
    #[inline]
    pub(super) fn answer(&mut self, flow: u32, now_ns: u64) -> Ends {
        let Some(entry) = self.get(flow) else { return Ends::Nothing };
        entry.is_protected = !entry.is_extra;
        entry.used_ns = now_ns;
        if entry.in_flight == 0 {
            let late = entry.late > 0;
            entry.late -= u32::from(late);
            return if late { Ends::Late } else { Ends::Nothing };
        }
        let oldest =
            (1..=COUNTS as u64).map(|ago| ((entry.quarter + ago) % COUNTS as u64) as usize);
        if let Some(count) = oldest.into_iter().find(|count| entry.asked[*count] > 0) {
            entry.asked[count] -= 1;
        }
        entry.in_flight -= 1;
        self.in_flight -= 1;
        self.sort_in(flow);
        Ends::Request
    }

    /// A request with this id in the frame of memcached is sent.
    pub(super) fn ask_with_id(&mut self, flow: u32, id: u16) {
        if let Some(entry) = self.get(flow) {
            entry.parts.ask(id);
        }
    }

    /// What a datagram with the frame of memcached ends, and this content behind it.
    pub(super) fn answer_in_part(
        &mut self,
        flow: u32,
        header: UdpHeader,
        body: &[u8],
        now_ns: u64,
    ) -> Ends {
        let timeout_ns = QUARTERS.saturating_mul(self.quarter_ns);
        let Some(entry) = self.get(flow) else { return Ends::Nothing };
        let part = match mutants::on("first_datagram_only") {
            true => Part::First,
            false => entry.parts.take(header, body, (now_ns, timeout_ns)),
        };
        match part {
            Part::First => {
                let ends = self.answer(flow, now_ns);
                let delivered = ends == Ends::Request;
                if let Some(entry) = self.get(flow)
                    && !mutants::on("first_datagram_only")
                {
                    entry.parts.begin(header, body, delivered, now_ns);
                }
                ends
            }
            Part::Further { delivered } => {
                entry.used_ns = now_ns;
                if delivered { Ends::Further } else { Ends::Nothing }
            }
            Part::Useless => Ends::Nothing,
        }
    }

    /// The requests in flight of a flow are given up, but for the `newest` ones, which were asked in this turn; how many there
    /// were. Their answers are not expected.
    pub(super) fn give_up(&mut self, flow: u32, newest: u32) -> u32 {
        let Some(entry) = self.get(flow) else { return 0 };
        let given_up = entry.in_flight.saturating_sub(newest);
        entry.in_flight -= given_up;
        entry.asked = [0; COUNTS];
        entry.asked[(entry.quarter % COUNTS as u64) as usize] = entry.in_flight;
        self.in_flight -= u64::from(given_up);
        self.sort_in(flow);
        given_up
    }

    /// The same for all flows.
    pub(super) fn give_up_all(&mut self) -> u64 {
        let mut given_up = 0;
        for list in [List::Unprotected, List::Protected] {
            while self.lists[list as usize].first != NIL {
                given_up += u64::from(self.give_up(self.lists[list as usize].first, 0));
            }
        }
        given_up
    }

    /// Requests that were asked in this turn could not be sent.
    pub(super) fn withdraw(&mut self, flow: u32, requests: u32) {
        let Some(entry) = self.get(flow) else { return };
        let newest = &mut entry.asked[(entry.quarter % COUNTS as u64) as usize];
        let withdrawn = requests.min(*newest);
        *newest -= withdrawn;
        entry.in_flight -= withdrawn;
        self.in_flight -= u64::from(withdrawn);
        self.sort_in(flow);
    }

    /// Ends the requests of a flow whose time is over; how many.
    fn expire_of(&mut self, flow: u32, now_ns: u64) -> u32 {
        let quarter = now_ns / self.quarter_ns;
        let Some(entry) = self.get(flow) else { return 0 };
        if entry.quarter >= quarter {
            return 0;
        }
        let mut expired = 0;
        let passed = (quarter - entry.quarter).min(COUNTS as u64);
        for later in 1..=passed {
            let count = ((entry.quarter + later) % COUNTS as u64) as usize;
            expired += std::mem::take(&mut entry.asked[count]);
        }
        entry.quarter = quarter;
        if expired > 0 {
            entry.in_flight -= expired;
            entry.late = entry.late.saturating_add(expired);
            entry.is_protected = false;
            self.in_flight -= u64::from(expired);
            self.sort_in(flow);
        }
        expired
    }

    /// Once a millisecond: ends what has timed out; how many requests.
    pub(super) fn expire(&mut self, now_ns: u64) -> u64 {
        let quarter = now_ns / self.quarter_ns;
        if std::mem::replace(&mut self.looked_in, quarter) == quarter || self.in_flight == 0 {
            return 0;
        }
        let mut expired = 0;
        for list in [List::Unprotected, List::Protected] {
            let mut at = self.lists[list as usize].first;
            while at != NIL {
                let next = self.entries[at as usize].as_ref().map_or(NIL, |flow| flow.next);
                expired += u64::from(self.expire_of(at, now_ns));
                at = next;
            }
        }
        expired
    }

    /// The flow that has been idle for longest, if it was not used after `before_ns`.
    pub(super) fn idle_since(&mut self, before_ns: u64) -> Option<u32> {
        let first = self.lists[List::Idle as usize].first;
        self.get(first).is_some_and(|flow| flow.used_ns <= before_ns).then_some(first)
    }

    /// Some open flow.
    pub(super) fn any(&self) -> Option<u32> {
        self.lists.iter().map(|list| list.first).find(|first| *first != NIL)
    }

    /// When time-outs are looked for next; `u64::MAX` if nothing is in flight.
    pub(super) fn wake_at(&self) -> u64 {
        let next_ns = || (self.looked_in + 1).saturating_mul(self.quarter_ns);
        if self.in_flight > 0 { next_ns() } else { u64::MAX }
    }

    /// Moves a flow to the list where it belongs.
    #[inline]
    fn sort_in(&mut self, flow: u32) {
        let Some(entry) = self.entries[flow as usize].as_ref() else { return };
        let list = match (entry.in_flight, entry.is_protected) {
            (0, _) => List::Idle,
            (_, false) => List::Unprotected,
            (_, true) => List::Protected,
        };
        if list != entry.list {
            self.unlink(flow);
            self.append(flow, list);
        }
    }

    fn append(&mut self, flow: u32, list: List) {
        let last = std::mem::replace(&mut self.lists[list as usize].last, flow);
        match self.get(last) {
            None => self.lists[list as usize].first = flow,
            Some(last) => last.next = flow,
        }
        if let Some(entry) = self.get(flow) {
            (entry.list, entry.previous, entry.next) = (list, last, NIL);
        }
    }

    fn unlink(&mut self, flow: u32) {
        let Some(entry) = self.get(flow) else { return };
        let (list, previous, next) = (entry.list as usize, entry.previous, entry.next);
        match self.get(previous) {
            None => self.lists[list].first = next,
            Some(previous) => previous.next = next,
        }
        match self.get(next) {
            None => self.lists[list].last = previous,
            Some(next) => next.previous = previous,
        }
    }
}

/// What an origin's address says about its host.
fn host(origin: &Origin) -> IpAddr {
    let Origin::Datagram { peer, .. } = origin else { return Ipv6Addr::UNSPECIFIED.into() };
    host_of(peer.ip())
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use proptest::prelude::*;

    use super::*;

    /// Two clients have an address.
    fn origin(client: u16) -> Origin {
        let peer =
            SocketAddr::from(([10, 0, (client >> 9) as u8, (client >> 1) as u8], client & 1));
        Origin::Datagram { port: 0, peer, local: None }
    }

    /// A flow of the model.
    struct Known {
        /// When its requests in flight were sent.
        asked: Vec<u64>,
        answered: bool,
        extra: bool,
        /// Since when it is in its list.
        since: u64,
    }

    impl Known {
        fn list(&self) -> List {
            match (self.asked.is_empty(), self.answered && !self.extra) {
                (true, _) => List::Idle,
                (false, false) => List::Unprotected,
                (false, true) => List::Protected,
            }
        }
    }

    /// The same table, without its lists and counts.
    #[derive(Default)]
    struct Model {
        flows: HashMap<u16, Known>,
        changes: u64,
    }

    impl Model {
        fn victim(&self) -> Option<u16> {
            let first = |wanted: List| {
                let of_list = self.flows.iter().filter(|(_, flow)| flow.list() == wanted);
                of_list.min_by_key(|(_, flow)| flow.since).map(|(client, _)| *client)
            };
            first(List::Idle).or_else(|| first(List::Unprotected))
        }

        fn open(&mut self, client: u16) {
            let of_host = self.flows.keys().filter(|other| **other >> 1 == client >> 1).count();
            let extra = of_host >= (MAX / SHARE) as usize;
            let (asked, since) = (Vec::new(), self.changes);
            self.flows.insert(client, Known { asked, answered: false, extra, since });
        }

        /// What a client does may move its flow to another list.
        fn change<T>(&mut self, client: u16, what: impl FnOnce(&mut Known) -> T) -> T {
            self.changes += 1;
            let flow = self.flows.get_mut(&client).unwrap();
            let before = flow.list();
            let result = what(flow);
            flow.since = if flow.list() == before { flow.since } else { self.changes };
            result
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Ask(u16),
        Answer(u16),
        Refuse(u16),
        Pass(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let client = 0u16..8;
        let step = prop_oneof![
            4 => client.clone().prop_map(Step::Ask),
            3 => client.clone().prop_map(Step::Answer),
            1 => client.prop_map(Step::Refuse),
            2 => (0u64..300).prop_map(Step::Pass),
        ];
        prop::collection::vec(step, 1..200)
    }

    const TIMEOUT_NS: u64 = 400;
    const MAX: u32 = 4;

    /// What has timed out and what has not.
    fn check_expired(flow: &mut Known, expired: usize, now_ns: u64) -> Result<(), TestCaseError> {
        for asked_ns in flow.asked.drain(..expired) {
            prop_assert!(now_ns - asked_ns > TIMEOUT_NS, "too early");
        }
        for asked_ns in &flow.asked {
            prop_assert!(now_ns - asked_ns <= TIMEOUT_NS * 5 / 4, "too late");
        }
        flow.answered &= expired == 0;
        Ok(())
    }

    proptest! {
        #[test]
        fn the_table_is_what_a_simple_model_says(steps in steps()) {
            let mut flows = Flows::new(MAX, TIMEOUT_NS);
            let mut model = Model::default();
            let mut now_ns = 1_000_000;
            for step in steps {
                match step {
                    Step::Ask(client) => {
                        let flow = match flows.find(&origin(client)) {
                            Some(flow) => flow,
                            None => {
                                prop_assert!(!model.flows.contains_key(&client));
                                if let Err(victim) = flows.room() {
                                    let expected = model.victim();
                                    let found = victim.and_then(|v| flows.get(v).map(|f| f.origin));
                                    prop_assert_eq!(found, expected.map(origin));
                                    let (Some(victim), Some(expected)) = (victim, expected) else {
                                        continue;
                                    };
                                    let closed = flows.close(victim, now_ns).unwrap();
                                    let lost = model.flows.remove(&expected).unwrap().asked;
                                    prop_assert_eq!(closed.in_flight as usize, lost.len());
                                    if let Some(last) = lost.last() {
                                        let Close::ReservePort { ns } = closed.how else {
                                            panic!("an answer may come")
                                        };
                                        prop_assert!(now_ns + ns >= last + TIMEOUT_NS * 5 / 2);
                                    }
                                }
                                model.open(client);
                                flows.open(origin(client), 7, now_ns)
                            }
                        };
                        let expired = flows.ask(flow, 1, 10, now_ns) as usize;
                        // It may be idle for a moment; then it goes to the end of its list.
                        model.change(client, |flow| check_expired(flow, expired, now_ns))?;
                        model.change(client, |flow| flow.asked.push(now_ns));
                    }
                    Step::Answer(client) => {
                        let Some(flow) = flows.find(&origin(client)) else { continue };
                        let ends = flows.answer(flow, now_ns);
                        model.change(client, |flow| {
                            prop_assert_eq!(ends == Ends::Request, !flow.asked.is_empty());
                            flow.asked.drain(..usize::from(ends == Ends::Request));
                            flow.answered = true;
                            Ok(())
                        })?;
                    }
                    Step::Refuse(client) => {
                        let Some(flow) = flows.find(&origin(client)) else { continue };
                        let given_up = flows.give_up(flow, 0) as usize;
                        let asked = model.change(client, |flow| std::mem::take(&mut flow.asked));
                        prop_assert_eq!(given_up, asked.len());
                    }
                    Step::Pass(ns) => {
                        now_ns += ns;
                        let before = flows.in_flight();
                        let expired = flows.expire(now_ns);
                        prop_assert_eq!(flows.in_flight(), before - expired);
                        // Those that change at the same moment: in the order of the lists that they were in.
                        let mut gone = 0;
                        let mut due: Vec<_> = model.flows.iter().map(|(c, f)| (*c, f)).collect();
                        due.retain(|(_, flow)| flow.list() != List::Idle);
                        due.sort_by_key(|(_, flow)| (flow.list() == List::Protected, flow.since));
                        let due: Vec<u16> = due.into_iter().map(|(client, _)| client).collect();
                        for client in due {
                            let flow = flows.find(&origin(client)).unwrap();
                            let left = flows.get(flow).unwrap().in_flight as usize;
                            let expired = model.flows[&client].asked.len() - left;
                            gone += expired as u64;
                            model.change(client, |flow| check_expired(flow, expired, now_ns))?;
                        }
                        prop_assert_eq!(gone, expired);
                    }
                }
                let in_flight: usize = model.flows.values().map(|flow| flow.asked.len()).sum();
                prop_assert_eq!(flows.in_flight(), in_flight as u64);
            }
            while let Some(flow) = flows.any() {
                flows.close(flow, now_ns);
            }
            prop_assert_eq!((flows.in_flight(), flows.free.len()), (0, MAX as usize));
            prop_assert!(flows.by_host.is_empty() && flows.by_origin.is_empty());
        }
    }

    /// One host asks from many ports, is answered, and asks on.
    #[test]
    fn a_host_has_a_quarter_of_the_table_for_good() {
        let from = |address: [u8; 4], port| Origin::Datagram {
            port: 0,
            peer: SocketAddr::from((address, port)),
            local: None,
        };
        let (hog, other) = ([10, 0, 0, 1], [10, 0, 0, 2]);
        let mut flows = Flows::new(16, TIMEOUT_NS);
        let busy = |flows: &mut Flows, origin| {
            let flow = flows.open(origin, 7, 0);
            flows.ask(flow, 2, 10, 0);
            assert_eq!(flows.answer(flow, 0), Ends::Request);
            flow
        };
        for port in 0..16 {
            busy(&mut flows, from(hog, port));
        }
        let mut victims = 0;
        while let Err(Some(victim)) = flows.room() {
            flows.close(victim, 0).unwrap();
            busy(&mut flows, from(other, victims));
            victims += 1;
            // Those of the second host beyond its share give way to each other.
            if victims == 40 {
                break;
            }
        }
        let of = |flows: &Flows, address: [u8; 4]| flows.by_host[&IpAddr::from(address)];
        assert_eq!((of(&flows, hog), of(&flows, other)), (4, 12));
    }

    #[test]
    fn a_host_is_an_ipv4_address_or_half_an_ipv6_address() {
        let of = |peer: &str| {
            host(&Origin::Datagram { port: 0, peer: peer.parse().unwrap(), local: None })
        };
        assert_eq!(of("[2001:db8:1:2:3:4:5:6]:7"), of("[2001:db8:1:2:6::]:8"));
        assert_ne!(of("[2001:db8:1:2::]:7"), of("[2001:db8:1:3::]:7"));
        assert_eq!(of("[::ffff:10.0.0.1]:7"), of("10.0.0.1:8"));
        assert_ne!(of("[::ffff:10.0.0.1]:7"), of("[::ffff:10.0.0.2]:7"));
    }

    #[test]
    fn a_port_is_reserved_while_answers_may_come() {
        let mut flows = Flows::new(4, TIMEOUT_NS);
        let close = |flows: &mut Flows, asked, answered, after_ns: u64| {
            let flow = flows.open(origin(0), 7, 1000);
            flows.ask(flow, asked, 10, 1000);
            (0..answered).for_each(|_| _ = flows.answer(flow, 1000));
            flows.expire(1000 + after_ns);
            flows.close(flow, 1000 + after_ns).unwrap().how
        };
        let reserved = |ns| Close::ReservePort { ns };
        assert_eq!(close(&mut flows, 2, 1, 0), reserved(1000));
        assert_eq!(close(&mut flows, 2, 1, 300), reserved(700));
        // Late ones too.
        assert_eq!(close(&mut flows, 1, 0, 600), reserved(400));
        assert_eq!(close(&mut flows, 1, 0, 1000), Close::Reset);
        assert_eq!(close(&mut flows, 3, 3, 0), Close::Reset);
    }
}
