//! Bundles in a table of requests, against a model that keeps every message apart.

use std::net::SocketAddr;

use proptest::prelude::*;
use wire::framing::Expects;
use wire::session::{BundleRequests, Origin, Request, Sessions, Token};

const MQUEUES: u32 = 3;
const CLIENTS: u16 = 3;
const SINGLES: u32 = 12;
const BUNDLES: u32 = 5;

fn origin(client: u16) -> Origin {
    let peer = SocketAddr::from(([127, 0, 0, 1], 7000 + client));
    Origin::Datagram { port: 0, peer, local: None }
}

/// A message of a bundle, or a single one.
#[derive(Clone, Copy, Debug)]
struct Message {
    token: Token,
    request: Request,
    client: u16,
    /// Of a bundle: its number among all bundles.
    bundle: Option<u64>,
    live: bool,
    held: bool,
}

#[derive(Clone, Debug)]
enum Step {
    Single {
        mqueue: u32,
        client: u16,
    },
    Bundle {
        mqueue: u32,
        client: u16,
        count: u32,
        len: u32,
    },
    /// Ends messages of the bundle that one of the messages so far belongs to, on this mqueue.
    End {
        message: prop::sample::Index,
        bits: u64,
        mqueue: Option<u32>,
    },
    EndSingle {
        message: prop::sample::Index,
    },
    /// Replies leave from the buffer of the bundle that a message belongs to.
    Hold {
        message: prop::sample::Index,
    },
    /// Some that leave have left.
    Release {
        one: prop::sample::Index,
    },
    Expire {
        age_ns: u64,
    },
    Kill {
        mqueue: u32,
    },
    Forget {
        mqueue: u32,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let count = prop_oneof![3 => 1u32..=64, 1 => Just(64u32), 1 => Just(1u32)];
    let bits = prop_oneof![any::<u64>(), Just(u64::MAX), (0u32..64).prop_map(|bit| 1 << bit)];
    prop_oneof![
        3 => (0..MQUEUES, 0..CLIENTS).prop_map(|(mqueue, client)| Step::Single { mqueue, client }),
        4 => (0..MQUEUES, 0..CLIENTS, count, 0u32..100)
            .prop_map(|(mqueue, client, count, len)| Step::Bundle { mqueue, client, count, len }),
        6 => (any::<prop::sample::Index>(), bits, prop::option::weighted(0.1, 0..MQUEUES))
            .prop_map(|(message, bits, mqueue)| Step::End { message, bits, mqueue }),
        3 => any::<prop::sample::Index>().prop_map(|message| Step::EndSingle { message }),
        3 => any::<prop::sample::Index>().prop_map(|message| Step::Hold { message }),
        2 => any::<prop::sample::Index>().prop_map(|one| Step::Release { one }),
        1 => (0u64..40).prop_map(|age_ns| Step::Expire { age_ns }),
        1 => (0..MQUEUES).prop_map(|mqueue| Step::Kill { mqueue }),
        1 => (0..MQUEUES).prop_map(|mqueue| Step::Forget { mqueue }),
    ]
}

/// Everything that was ever issued, by message.
struct Model {
    sessions: Sessions,
    messages: Vec<Message>,
    now_ns: u64,
    bundles: u64,
    /// Leases whose buffers are in use.
    leased: Vec<u64>,
    /// Tokens of messages from whose bundle's buffer replies leave.
    leaving: Vec<(u64, Token)>,
}

impl Model {
    fn of_bundle(&self, bundle: u64) -> Vec<usize> {
        let of_it = |at: &usize| self.messages[*at].bundle == Some(bundle);
        (0..self.messages.len()).filter(of_it).collect()
    }

    fn issue_bundle(&mut self, mqueue: u32, client: u16, count: u32, len: u32) {
        let lease = self.bundles;
        let requests = BundleRequests {
            origin: origin(client),
            number: 100 * lease,
            mqueue,
            count,
            len,
            last_len: len / 2,
            received_ns: self.now_ns,
            expects: Expects::Reply,
            reply_at: 64,
            reply_bytes: 7,
        };
        let Some(first) = self.sessions.issue_bundle(&requests) else {
            assert_eq!(self.leased.len(), BUNDLES as usize, "no entry is free");
            return;
        };
        // The numbers of every other bundle are listed.
        let listed: Vec<u64> =
            (0..count).map(|i| u64::from(i).wrapping_mul(lease << 40 | 7)).collect();
        if lease % 2 == 0 {
            self.sessions.set_numbers(first, &listed);
        }
        let numbers = self.sessions.numbers_of(first).map(<[u64]>::to_vec);
        assert_eq!(numbers, (lease % 2 == 0).then(|| listed.clone()));
        assert_eq!(self.sessions.find_message(first, mqueue, count), None);
        for message in 0..count {
            let token = Token(first.0 + u64::from(message));
            assert!(token.is_of_bundle() && token.message() == message);
            let new = self.messages.iter().all(|m| m.token != token);
            assert!(new, "a token is issued once");
            let len = if message + 1 == count { len / 2 } else { len };
            let number = match lease % 2 {
                0 => listed[message as usize],
                _ => requests.number + u64::from(message),
            };
            let BundleRequests { origin, received_ns, expects, .. } = requests;
            let request = Request { origin, number, mqueue, len, received_ns, expects };
            assert_eq!(self.sessions.find_message(first, mqueue, message), Some(request));
            let bundle = Some(lease);
            let message = Message { token, request, client, bundle, live: true, held: true };
            self.messages.push(message);
        }
        self.leased.push(lease);
        self.bundles += 1;
    }

    fn issue_single(&mut self, mqueue: u32, client: u16) {
        let request = Request {
            origin: origin(client),
            number: 0,
            mqueue,
            len: 1,
            received_ns: self.now_ns,
            expects: Expects::Reply,
        };
        let Some(token) = self.sessions.issue(request) else {
            let live = self.messages.iter().filter(|m| m.live && m.bundle.is_none()).count();
            assert_eq!(live, SINGLES as usize);
            return;
        };
        assert!(!token.is_of_bundle());
        let message = Message { token, request, client, bundle: None, live: true, held: false };
        self.messages.push(message);
    }

    /// The accelerator ends messages of a bundle.
    fn end(&mut self, at: usize, bits: u64, mqueue: Option<u32>) {
        let Message { token, request, bundle, .. } = self.messages[at];
        let on = mqueue.unwrap_or(request.mqueue);
        let Some(bundle) = bundle else {
            assert!(self.sessions.find_bundle(token, on).is_none());
            return;
        };
        let of_it = self.of_bundle(bundle);
        let held = of_it.iter().any(|at| self.messages[*at].held);
        let found = self.sessions.find_bundle(token, on).cloned();
        assert_eq!(found.is_some(), held && on == request.mqueue);
        let (awaited, returned) = self.sessions.end_of_bundle(token, on, bits);
        let mut expected = 0;
        if found.is_some() {
            for (bit, at) in of_it.iter().enumerate().filter(|(bit, _)| bits >> bit & 1 != 0) {
                expected |= u64::from(self.messages[*at].live) << bit;
                (self.messages[*at].live, self.messages[*at].held) = (false, false);
            }
        }
        assert_eq!(awaited, expected);
        let leaves = self.leaving.iter().any(|(of, _)| *of == bundle);
        let returns = found.is_some() && !leaves && of_it.iter().all(|at| !self.messages[*at].held);
        assert_eq!(returned, returns);
        self.leased.retain(|leased| !(returns && *leased == bundle));
    }

    fn hold(&mut self, at: usize) {
        let Message { token, request, bundle, .. } = self.messages[at];
        let Some(bundle) = bundle else { return };
        if self.sessions.find_bundle(token, request.mqueue).is_some() {
            self.sessions.hold_bundle(token);
            self.leaving.push((bundle, token));
        }
    }

    fn release(&mut self, number: usize) {
        let (bundle, token) = self.leaving.remove(number);
        let mut of_it = self.of_bundle(bundle).into_iter();
        let held = of_it.any(|at| self.messages[at].held);
        let returns = !held && self.leaving.iter().all(|(of, _)| *of != bundle);
        assert_eq!(self.sessions.release_bundle(token), returns);
        self.leased.retain(|leased| !(returns && *leased == bundle));
    }

    /// Whether a request of the table is the next of these that the model has.
    fn decided(&mut self, request: Request) {
        let is_it = |m: &&mut Message| m.live && m.request == request;
        let message = self.messages.iter_mut().find(is_it).expect("it was in flight");
        message.live = false;
    }

    fn expire(&mut self, age_ns: u64) {
        let before_ns = self.now_ns.saturating_sub(age_ns);
        let mut last_ns = 0;
        while let Some(request) = self.sessions.expire(before_ns) {
            assert!(request.received_ns >= last_ns, "the oldest expires first");
            last_ns = request.received_ns;
            self.decided(request);
        }
        assert!(self.messages.iter().all(|m| !m.live || m.request.received_ns >= before_ns));
    }

    fn kill(&mut self, mqueue: u32) {
        let mut pass = self.sessions.pass();
        while let Some(request) = self.sessions.end_next(&mut pass, |of| of == mqueue) {
            self.decided(request);
        }
        assert!(self.messages.iter().all(|m| !m.live || m.request.mqueue != mqueue));
    }

    fn forget(&mut self, mqueue: u32) {
        self.kill(mqueue);
        while let Some(number) = self.leaving.iter().position(|(bundle, _)| {
            self.messages.iter().any(|m| m.bundle == Some(*bundle) && m.request.mqueue == mqueue)
        }) {
            self.release(number);
        }
        self.sessions.forget_bundles(&(mqueue..mqueue + 1), |_| ());
        for message in self.messages.iter_mut().filter(|m| m.request.mqueue == mqueue) {
            message.held = false;
        }
        let messages = &self.messages;
        let leaving = &self.leaving;
        self.leased.retain(|lease| {
            messages.iter().any(|m| m.held && m.bundle == Some(*lease))
                || leaving.iter().any(|(bundle, _)| bundle == lease)
        });
    }

    fn check(&self) {
        let live = |m: &&Message| m.live;
        assert_eq!(self.sessions.live() as usize, self.messages.iter().filter(live).count());
        assert_eq!(self.sessions.bundles() as usize, self.leased.len());
        for message in &self.messages {
            let Message { token, request, client, .. } = *message;
            let others = self.messages.iter().filter(|m| m.live && m.client == client).count();
            if message.bundle.is_none() {
                assert_eq!(self.sessions.find(token, request.mqueue).is_some(), message.live);
                assert!(!message.live || self.sessions.has_others(token) == (others > 1));
                continue;
            }
            assert_eq!(self.sessions.find(token, request.mqueue), None, "it is not a single one");
            let bundle = self.sessions.find_bundle(token, request.mqueue);
            let bit = |bits: u64| bits >> token.message() & 1 != 0;
            assert_eq!(bundle.is_some_and(|b| bit(b.live())), message.live);
            assert_eq!(bundle.is_some_and(|b| bit(b.held())), message.held);
            if let Some(bundle) = bundle {
                let all = bundle.live().count_ones() as usize;
                assert_eq!(self.sessions.has_others_than(bundle, u64::MAX), others > all);
            }
        }
    }
}

proptest! {
    #[test]
    fn a_table_with_bundles_matches_the_model(steps in prop::collection::vec(step(), 1..60)) {
        let sessions = Sessions::new(SINGLES, 1).with_bundles(BUNDLES, 1);
        let mut model =
            Model {
                sessions,
                messages: Vec::new(),
                now_ns: 1,
                bundles: 0,
                leased: Vec::new(),
                leaving: Vec::new(),
            };
        for step in steps {
            model.now_ns += 1;
            let at = |index: prop::sample::Index, of: &Model| {
                (!of.messages.is_empty()).then(|| index.index(of.messages.len()))
            };
            match step {
                Step::Single { mqueue, client } => model.issue_single(mqueue, client),
                Step::Bundle { mqueue, client, count, len } => {
                    model.issue_bundle(mqueue, client, count, len);
                }
                Step::End { message, bits, mqueue } => {
                    if let Some(at) = at(message, &model) {
                        model.end(at, bits, mqueue);
                    }
                }
                Step::EndSingle { message } => {
                    if let Some(at) = at(message, &model) {
                        let Message { token, request, live, bundle, .. } = model.messages[at];
                        let ended = model.sessions.end(token, request.mqueue);
                        prop_assert_eq!(ended.is_some(), live && bundle.is_none());
                        model.messages[at].live &= ended.is_none();
                    }
                }
                Step::Hold { message } => {
                    if let Some(at) = at(message, &model) {
                        model.hold(at);
                    }
                }
                Step::Release { one } if !model.leaving.is_empty() => {
                    model.release(one.index(model.leaving.len()));
                }
                Step::Release { .. } => {}
                Step::Expire { age_ns } => model.expire(age_ns),
                Step::Kill { mqueue } => model.kill(mqueue),
                Step::Forget { mqueue } => model.forget(mqueue),
            }
            model.check();
        }
        // Whatever is left ends, and all buffers come back.
        model.now_ns += 1;
        model.expire(0);
        model.check();
        for at in 0..model.messages.len() {
            model.end(at, u64::MAX, None);
        }
        while !model.leaving.is_empty() {
            model.release(0);
            model.check();
        }
        prop_assert_eq!((model.sessions.live(), model.sessions.bundles()), (0, 0));
    }
}

#[test]
fn tokens_of_no_bundle_are_not_found() {
    let mut sessions = Sessions::new(4, 1).with_bundles(1, 1);
    for token in [0, 1 << 31, 1 << 32 | 1 << 31 | 64, u64::MAX, u64::MAX - 1] {
        assert!(sessions.find_bundle(Token(token), 0).is_none(), "{token:#x}");
        assert_eq!(sessions.end_of_bundle(Token(token), 0, u64::MAX), (0, false));
    }
    // Without room nothing is issued.
    let mut none = Sessions::new(4, 1);
    let requests = BundleRequests {
        origin: origin(0),
        number: 0,
        mqueue: 0,
        count: 1,
        len: 1,
        last_len: 1,
        received_ns: 1,
        expects: Expects::Reply,
        reply_at: 0,
        reply_bytes: 0,
    };
    assert_eq!(none.issue_bundle(&requests), None);
    assert!(sessions.issue_bundle(&requests).is_some());
    assert_eq!(sessions.issue_bundle(&requests), None);
}
