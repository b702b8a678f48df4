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
//! *A full table.* Every flow is in one of three lists, each in the order in which it came there:
//!
//! | list | flows |
//! |---|---|
//! | idle | nothing is in flight |
//! | unanswered | something is in flight, and nothing was ever answered |
//! | active | something is in flight, and the server has answered before |
//!
//! A new flow takes the place of the one that has been idle for longest, else of the first unanswered one, whose requests are
//! dropped; active flows are never closed for one. So addresses that a stranger invents take places from each other: a client that
//! is being answered keeps its flow, and one that asks again within the time in which the stranger fills the table, too. A client
//! whose idle flow was closed gets another one with its next request.

use std::collections::HashMap;

use wire::nic::StreamKey;
use wire::session::Origin;

const NIL: u32 = u32::MAX;
/// Counts of a flow: the quarters of a time-out, and the one that is running.
const QUARTERS: u64 = 4;
const COUNTS: usize = QUARTERS as usize + 1;

/// See the module's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum List {
    Idle,
    Unanswered,
    Active,
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
    /// Requests in flight by quarter; the quarter of the newest.
    asked: [u32; COUNTS],
    quarter: u64,
    in_flight: u32,
    answered: bool,
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
    /// Nothing.
    Nothing,
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
        Err(first(List::Idle).or(first(List::Unanswered)))
    }

    /// The number that the next flow will have. There is [room](Self::room).
    pub(super) fn next(&self) -> u32 {
        *self.free.last().expect("the caller has made room")
    }

    /// A client comes that has no flow, with this socket.
    pub(super) fn open(&mut self, origin: Origin, key: StreamKey, now_ns: u64) -> u32 {
        let flow = self.free.pop().expect("the caller has made room");
        self.entries[flow as usize] = Some(Flow {
            origin,
            key,
            is_ready: false,
            bounced: false,
            unspent: 0,
            late: 0,
            asked: [0; COUNTS],
            quarter: now_ns / self.quarter_ns,
            in_flight: 0,
            answered: false,
            used_ns: now_ns,
            list: List::Idle,
            previous: NIL,
            next: NIL,
        });
        self.by_origin.insert(origin, flow);
        self.append(flow, List::Idle);
        flow
    }

    /// Closes a flow: its socket, and how many requests were in flight.
    pub(super) fn close(&mut self, flow: u32) -> Option<(StreamKey, u32)> {
        self.get(flow)?;
        self.unlink(flow);
        let entry = self.entries[flow as usize].take()?;
        self.by_origin.remove(&entry.origin);
        self.last = None;
        self.free.push(flow);
        self.in_flight -= u64::from(entry.in_flight);
        Some((entry.key, entry.in_flight))
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
        entry.answered = true;
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
        for list in [List::Unanswered, List::Active] {
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
        for list in [List::Unanswered, List::Active] {
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
        let list = match (entry.in_flight, entry.answered) {
            (0, _) => List::Idle,
            (_, false) => List::Unanswered,
            (_, true) => List::Active,
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

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use proptest::prelude::*;

    use super::*;

    fn origin(client: u16) -> Origin {
        let peer = SocketAddr::from(([10, 0, (client >> 8) as u8, client as u8], 1));
        Origin::Datagram { port: 0, peer, local: None }
    }

    /// The same table, without its lists and counts.
    #[derive(Default)]
    struct Model {
        /// By client: when its requests in flight were sent, whether it was ever answered, since when it is in its list.
        flows: HashMap<u16, (Vec<u64>, bool, u64)>,
        changes: u64,
    }

    impl Model {
        fn victim(&self) -> Option<u16> {
            let first = |wanted: fn(&(Vec<u64>, bool, u64)) -> bool| {
                let of_list = self.flows.iter().filter(|(_, flow)| wanted(flow));
                of_list.min_by_key(|(_, flow)| flow.2).map(|(client, _)| *client)
            };
            first(|flow| flow.0.is_empty()).or_else(|| first(|flow| !flow.1))
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

    proptest! {
        #[test]
        fn the_table_is_what_a_simple_model_says(steps in steps()) {
            let mut flows = Flows::new(MAX, TIMEOUT_NS);
            let mut model = Model::default();
            let mut now_ns = 1_000_000;
            for step in steps {
                model.changes += 1;
                let at = model.changes;
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
                                    let (_, in_flight) = flows.close(victim).unwrap();
                                    let (lost, ..) = model.flows.remove(&expected).unwrap();
                                    prop_assert_eq!(in_flight as usize, lost.len());
                                }
                                model.flows.insert(client, (Vec::new(), false, at));
                                flows.open(origin(client), 7, now_ns)
                            }
                        };
                        let expired = flows.ask(flow, 1, 10, now_ns);
                        let (asked, _, since) = model.flows.get_mut(&client).unwrap();
                        prop_assert!(expired as usize <= asked.len());
                        asked.drain(..expired as usize);
                        // It may have been idle for a moment; then it is at the end of its list.
                        *since = if asked.is_empty() { at } else { *since };
                        asked.push(now_ns);
                    }
                    Step::Answer(client) => {
                        let Some(flow) = flows.find(&origin(client)) else { continue };
                        let (asked, answered, since) = model.flows.get_mut(&client).unwrap();
                        let ends = flows.answer(flow, now_ns);
                        prop_assert_eq!(ends == Ends::Request, !asked.is_empty());
                        let was = (asked.is_empty(), *answered);
                        if !asked.is_empty() {
                            asked.remove(0);
                            *since = if was != (asked.is_empty(), true) { at } else { *since };
                        }
                        *answered = true;
                    }
                    Step::Refuse(client) => {
                        let Some(flow) = flows.find(&origin(client)) else { continue };
                        let (asked, _, since) = model.flows.get_mut(&client).unwrap();
                        prop_assert_eq!(flows.give_up(flow, 0) as usize, asked.len());
                        *since = if asked.is_empty() { *since } else { at };
                        asked.clear();
                    }
                    Step::Pass(ns) => {
                        now_ns += ns;
                        let before = flows.in_flight();
                        let expired = flows.expire(now_ns);
                        prop_assert_eq!(flows.in_flight(), before - expired);
                        // Idle at the same moment: in the order of the lists that they were in.
                        let mut ended: Vec<u16> = Vec::new();
                        for answered in [false, true] {
                            let mut of_list: Vec<_> = model.flows.iter().collect();
                            of_list.retain(|(_, f)| f.1 == answered && !f.0.is_empty());
                            of_list.sort_by_key(|(_, flow)| flow.2);
                            ended.extend(of_list.iter().map(|(client, _)| **client));
                        }
                        let mut gone = 0;
                        for client in ended {
                            let flow = flows.find(&origin(client)).unwrap();
                            let left = flows.get(flow).unwrap().in_flight as usize;
                            let (asked, _, since) = model.flows.get_mut(&client).unwrap();
                            let expired = asked.len() - left;
                            gone += expired as u64;
                            for asked_ns in asked.drain(..expired) {
                                prop_assert!(now_ns - asked_ns > TIMEOUT_NS, "too early");
                            }
                            for asked_ns in &*asked {
                                prop_assert!(now_ns - asked_ns <= TIMEOUT_NS * 5 / 4, "too late");
                            }
                            if left == 0 {
                                model.changes += 1;
                                *since = model.changes;
                            }
                        }
                        prop_assert_eq!(gone, expired);
                    }
                }
                let in_flight: usize = model.flows.values().map(|flow| flow.0.len()).sum();
                prop_assert_eq!(flows.in_flight(), in_flight as u64);
            }
            while let Some(flow) = flows.any() {
                flows.close(flow);
            }
            prop_assert_eq!((flows.in_flight(), flows.free.len()), (0, MAX as usize));
        }
    }
}
