//! Groups in memory: all ranks in one thread, in a random order, over streams that take and give as little as they like.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use collective::call::{Call, Progress};
use collective::frame::Notice;
use collective::schedule::Schedule;
use collective::transport::Wants;
use collective::{CollectiveError, Element, Loss, Operation, Reason, Transport};

/// A small generator (xorshift64*), so that a seed reproduces a run.
#[derive(Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}

/// The streams between all ranks.
pub(crate) struct Net {
    streams: Vec<Vec<VecDeque<u8>>>,
    capacity: usize,
    random: Random,
    /// Ranks whose process has ended.
    pub(crate) dead: Vec<bool>,
    /// Changes what a rank sends, from its first byte on.
    pub(crate) spoil: Option<Spoil>,
    notices: Vec<Option<Notice>>,
}

/// A byte that the rank `from` sends to the rank `to` is changed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spoil {
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// Bytes before it; `usize::MAX` after it has been sent.
    pub(crate) at: usize,
    pub(crate) mask: u8,
}

/// One rank's end of the streams.
pub(crate) struct End {
    net: Rc<RefCell<Net>>,
    rank: usize,
}

impl Transport for End {
    fn send(&mut self, peer: usize, head: &[u8], body: &[u8], _: bool) -> Result<usize, Loss> {
        let net = &mut *self.net.borrow_mut();
        if net.dead[peer] {
            return Err(Loss::Ended(peer));
        }
        let stream = &mut net.streams[self.rank][peer];
        let room = net.capacity - stream.len();
        let most = room.min(head.len() + body.len());
        let count = net.random.below(most + 1);
        stream.extend(head.iter().chain(body).take(count));
        if let Some(spoil) = &mut net.spoil
            && (spoil.from, spoil.to) == (self.rank, peer)
        {
            let first = stream.len() - count;
            match spoil.at.checked_sub(count) {
                Some(later) if spoil.at != usize::MAX => spoil.at = later,
                None => {
                    stream[first + spoil.at] ^= spoil.mask;
                    spoil.at = usize::MAX;
                }
                Some(_) => {}
            }
        }
        Ok(count)
    }

    fn receive(&mut self, peer: usize, into: &mut [u8], _: bool) -> Result<usize, Loss> {
        let net = &mut *self.net.borrow_mut();
        let stream = &mut net.streams[peer][self.rank];
        if stream.is_empty() && net.dead[peer] {
            return Err(Loss::Ended(peer));
        }
        let most = stream.len().min(into.len());
        let count = net.random.below(most + 1);
        into.iter_mut().zip(stream.drain(..count)).for_each(|(to, from)| *to = from);
        Ok(count)
    }

    fn wait(&mut self, _: &Wants, _: Duration, _: Duration) -> Result<(), Loss> {
        let net = self.net.borrow();
        for rank in 0..net.dead.len() {
            match net.notices[rank] {
                Some(Notice::End(why)) => return Err(Loss::Told { by: rank, why }),
                _ if net.dead[rank] => return Err(Loss::Ended(rank)),
                _ => {}
            }
        }
        Ok(())
    }

    fn end(&mut self, notice: Notice) {
        self.net.borrow_mut().notices[self.rank] = Some(notice);
    }
}

/// What a rank calls.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Order {
    pub(crate) operation: Operation,
    pub(crate) element: Element,
}

/// All ranks of a group.
pub(crate) struct World {
    pub(crate) net: Rc<RefCell<Net>>,
    ends: Vec<End>,
    calls: Vec<Call>,
    random: Random,
}

impl World {
    /// Streams that hold `capacity` bytes, at least 8.
    pub(crate) fn new(ranks: usize, capacity: usize, seed: u64) -> Self {
        let net = Rc::new(RefCell::new(Net {
            streams: vec![vec![VecDeque::new(); ranks]; ranks],
            capacity,
            random: Random::new(seed),
            dead: vec![false; ranks],
            spoil: None,
            notices: vec![None; ranks],
        }));
        Self {
            ends: (0..ranks).map(|rank| End { net: net.clone(), rank }).collect(),
            net,
            calls: (0..ranks).map(|_| Call::default()).collect(),
            random: Random::new(!seed),
        }
    }

    /// One call on all ranks, each with its own arguments. `kill`: this rank ends after as many advances. The results of the
    /// ranks in order; `None` for the killed one.
    pub(crate) fn call(
        &mut self,
        orders: &[Order],
        data: &mut [Vec<u8>],
        kill: Option<(usize, usize)>,
    ) -> Vec<Option<Result<(), CollectiveError>>> {
        let ranks = orders.len();
        for (rank, order) in orders.iter().enumerate() {
            let bytes = data[rank].len();
            let schedule = Schedule::new(order.operation, order.element, ranks, rank, bytes);
            self.calls[rank].start(order.operation, order.element, bytes, Arc::new(schedule));
        }
        let mut results: Vec<Option<Result<(), CollectiveError>>> = vec![None; ranks];
        let mut active: Vec<usize> = (0..ranks).collect();
        let (mut idle, mut advances) = (0, 0);
        while !active.is_empty() {
            let index = self.random.below(active.len());
            let rank = active[index];
            if let Some((victim, at)) = kill
                && victim == rank
            {
                if advances == at {
                    self.net.borrow_mut().dead[rank] = true;
                    active.swap_remove(index);
                    continue;
                }
                advances += 1;
            }
            let result = match self.calls[rank].advance(&mut self.ends[rank], &mut data[rank]) {
                Ok(Progress::Moved) => {
                    idle = 0;
                    continue;
                }
                Ok(Progress::Stuck { moved: true, .. }) => {
                    idle = 0;
                    continue;
                }
                Ok(Progress::Stuck { wants, .. }) => {
                    assert_ne!(wants, Wants::default(), "it waits for no rank");
                    idle += 1;
                    assert!(idle < 10_000, "rank {rank} waits for {wants:?}, and nothing moves");
                    let limit = Duration::from_secs(1);
                    let others = ((1u16 << ranks) - 1) as u8 & !(1 << rank);
                    let (call, end) = (&mut self.calls[rank], &mut self.ends[rank]);
                    let waited = end.wait(&wants, limit, limit).map_err(CollectiveError::from);
                    match waited.and_then(|()| call.look_around(end, others & !wants.receive)) {
                        Ok(()) => continue,
                        Err(error) => Err(error),
                    }
                }
                Ok(Progress::Done) => Ok(()),
                Err(error) => Err(error),
            };
            idle = 0;
            let why = match &result {
                Err(CollectiveError::Disagreement { rank, .. }) => {
                    Some(Reason::Disagreement(*rank))
                }
                Err(CollectiveError::Lost(Loss::Garbage(rank))) => Some(Reason::Garbage(*rank)),
                _ => None,
            };
            if let Some(why) = why {
                self.ends[rank].end(Notice::End(why));
            }
            results[rank] = Some(result);
            active.swap_remove(index);
        }
        results
    }
}
