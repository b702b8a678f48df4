//! A rank's view of its group.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sys::process::fork_generation;

use crate::admission::ClosedConnections;
use crate::call::{Call, Progress};
use crate::error::CollectiveError;
use crate::frame::Notice;
use crate::schedule::{Element, Operation, Schedule};
use crate::transport::Transport;

/// How long a call may take unless [`Group::set_limit`] is called.
pub const LIMIT: Duration = Duration::from_secs(60);
/// Schedules that are kept for the next call with the same arguments.
const SCHEDULES_MAX: usize = 8;
/// Interval at which a waiting call asks whether it is interrupted.
pub(crate) const INTERRUPT_PAUSE: Duration = Duration::from_millis(50);

/// A call looks at the clock after this number of rounds at the latest, also while bytes arrive one by one.
const ROUNDS_UNTIMED: u32 = 1000;
/// How long a call waits before it looks whether other ranks make another call.
const LOOK_AROUND_AFTER: Duration = Duration::from_millis(10);

type Interrupt = Box<dyn FnMut() -> bool + Send>;
type Arguments = (Operation, Element, usize);

/// One rank of a group. All ranks make the same calls in the same order; each call blocks until this rank's part is complete.
///
/// A call that fails ends the group: the other ranks' calls fail within a second, with a reason. Dropping a group between calls
/// leaves it in order. The group belongs to the process that formed it: in a fork of that process every call is refused, and
/// dropping the copy closes its descriptors without a word to the other ranks.
pub struct Group {
    ranks: usize,
    rank: usize,
    limit: Duration,
    interrupt: Interrupt,
    call: Call,
    schedules: Vec<(Arguments, Arc<Schedule>)>,
    /// Of the process that formed it.
    generation: u64,
    closed: ClosedConnections,
    /// `Err` after a failure.
    transport: Result<Box<dyn Transport + Send>, CollectiveError>,
}

impl Group {
    /// A group over connections to all other ranks.
    pub fn new(ranks: usize, rank: usize, transport: impl Transport + Send + 'static) -> Self {
        Self {
            ranks,
            rank,
            limit: LIMIT,
            interrupt: Box::new(|| false),
            call: Call::default(),
            schedules: Vec::new(),
            generation: fork_generation(),
            closed: ClosedConnections::default(),
            transport: Ok(Box::new(transport)),
        }
    }

    /// Connections at this rank's listener that were closed while the group formed.
    pub fn closed_connections(&self) -> ClosedConnections {
        self.closed
    }

    pub(crate) fn with_closed(self, closed: ClosedConnections) -> Self {
        let mut this = self;
        this.closed = closed;
        this
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How long each later call may take.
    pub fn set_limit(&mut self, limit: Duration) {
        self.limit = limit;
    }

    /// A function that a call asks about twenty times a second, first after 50 ms; if it returns true the call fails, which ends the
    /// group.
    pub fn set_interrupt(&mut self, interrupt: impl FnMut() -> bool + Send + 'static) {
        self.interrupt = Box::new(interrupt);
    }

    /// Replaces `data` by the sum over all ranks, element by element. `data` is an array of `element` (float32 or int32) in the
    /// machine's byte order; its length and type are the same on all ranks. The result has the same bits on all of them.
    pub fn all_reduce(&mut self, element: Element, data: &mut [u8]) -> Result<(), CollectiveError> {
        Self::check_all_reduce(element, data.len())?;
        self.run(Operation::AllReduce, element, data, None)
    }

    pub(crate) fn check_all_reduce(element: Element, bytes: usize) -> Result<(), CollectiveError> {
        let argument = |why: String| Err(CollectiveError::Argument(why));
        if element == Element::Byte {
            return argument("an all-reduce needs float32 or int32 elements, not bytes".to_owned());
        }
        if bytes % element.bytes() != 0 {
            let name = element.name();
            return argument(format!("{bytes} bytes are not an array of {name}"));
        }
        Ok(())
    }

    /// Replaces `data` by the data of the rank `root`; its length is the same on all ranks. The root's call ends when its data is
    /// on the way, so it does not notice ranks that disagree; the next call does.
    pub fn broadcast(&mut self, root: usize, data: &mut [u8]) -> Result<(), CollectiveError> {
        self.check_root(root)?;
        self.run(Operation::Broadcast { root }, Element::Byte, data, None)
    }

    pub(crate) fn check_root(&self, root: usize) -> Result<(), CollectiveError> {
        if root < self.ranks {
            return Ok(());
        }
        let last = self.ranks - 1;
        Err(CollectiveError::Argument(format!("the root {root} is not in 0..={last}")))
    }

    /// Returns after all ranks have called it.
    pub fn barrier(&mut self) -> Result<(), CollectiveError> {
        self.run(Operation::Barrier, Element::Byte, &mut [], None)
    }

    /// `started`: when its time began, if not now.
    pub(crate) fn run(
        &mut self,
        operation: Operation,
        element: Element,
        data: &mut [u8],
        started: Option<Instant>,
    ) -> Result<(), CollectiveError> {
        self.check_open()?;
        let arguments = (operation, element, data.len());
        let schedule = match self.schedules.iter().find(|(known, _)| *known == arguments) {
            Some((_, schedule)) => schedule.clone(),
            None => {
                let schedule = Schedule::new(operation, element, self.ranks, self.rank, data.len());
                let schedule = Arc::new(schedule);
                if self.schedules.len() == SCHEDULES_MAX {
                    self.schedules.remove(0);
                }
                self.schedules.push((arguments, schedule.clone()));
                schedule
            }
        };
        self.call.start(operation, element, data.len(), schedule);
        let transport = &mut **self.transport.as_mut().expect("the group is open");
        let (rank, interrupt) = (self.rank, &mut self.interrupt);
        let check = || match interrupt() {
            true => Err(CollectiveError::Interrupted(rank)),
            false => Ok(()),
        };
        let others = ((1u16 << self.ranks) - 1) as u8 & !(1 << rank);
        let ran = execute(&mut self.call, transport, data, self.limit, started, others, check);
        ran.inspect_err(|error| self.end(error))
    }

    /// The number of the last call.
    pub(crate) fn sequence(&self) -> u64 {
        self.call.sequence()
    }

    /// An error if an earlier call has failed, or in a fork.
    pub(crate) fn check_open(&self) -> Result<(), CollectiveError> {
        if self.is_forked() {
            let why = "the group belongs to the process that formed it, not to its fork: form another group here";
            return Err(CollectiveError::Argument(why.to_owned()));
        }
        match &self.transport {
            Ok(_) => Ok(()),
            Err(error) => Err(CollectiveError::Over(Box::new(error.clone()))),
        }
    }

    /// Ends the group because of this error, if it has not ended, and tells the other ranks.
    pub(crate) fn end(&mut self, error: &CollectiveError) {
        if self.is_forked() {
            return;
        }
        let Ok(transport) = &mut self.transport else { return };
        if let Some(reason) = error.reason() {
            transport.end(Notice::End(reason));
        }
        // Closes the connections.
        self.transport = Err(error.clone());
    }

    /// How long each call may take.
    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }

    /// An error if the caller wants the call to end.
    pub(crate) fn check_interrupt(&mut self) -> Result<(), CollectiveError> {
        match (self.interrupt)() {
            true => Err(CollectiveError::Interrupted(self.rank)),
            false => Ok(()),
        }
    }

    /// Whether this process is a fork of the one that formed the group.
    fn is_forked(&self) -> bool {
        self.generation != fork_generation()
    }
}

fn execute(
    call: &mut Call,
    transport: &mut dyn Transport,
    data: &mut [u8],
    limit: Duration,
    mut started: Option<Instant>,
    others: u8,
    mut check: impl FnMut() -> Result<(), CollectiveError>,
) -> Result<(), CollectiveError> {
    let (mut stuck_since, mut looks, mut untimed, mut checked) = (None, 0, 0, None);
    loop {
        let wants = match call.advance(transport, data)? {
            Progress::Done => {
                transport.wake();
                return Ok(());
            }
            Progress::Moved => None,
            Progress::Stuck { wants, moved } => {
                if moved {
                    (stuck_since, looks) = (None, 0);
                }
                if looks < transport.looks() && untimed < ROUNDS_UNTIMED {
                    looks += 1;
                    untimed += 1;
                    std::hint::spin_loop();
                    continue;
                }
                Some(wants)
            }
        };
        (looks, untimed) = (0, 0);
        transport.wake();
        let now = Instant::now();
        let left = limit.saturating_sub(now - *started.get_or_insert(now));
        if left.is_zero() {
            let rank = wants.and_then(|wants| wants.first()).unwrap_or(0);
            return Err(CollectiveError::Deadline { rank, sequence: call.sequence(), limit });
        }
        if now - *checked.get_or_insert(now) >= INTERRUPT_PAUSE {
            checked = Some(now);
            check()?;
        }
        match wants {
            None => stuck_since = None,
            Some(wants) => {
                let since = *stuck_since.get_or_insert(now);
                transport.wait(&wants, now - since, left)?;
                if now - since >= LOOK_AROUND_AFTER {
                    call.look_around(transport, others & !wants.receive)?;
                }
            }
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let is_forked = self.is_forked();
        if let (Ok(transport), false) = (&mut self.transport, is_forked) {
            transport.end(Notice::Leave);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Loss;
    use crate::frame::Header;
    use crate::transport::Wants;

    /// The other rank's bytes arrive one by one, each before this rank stops looking.
    struct Trickle {
        head: Vec<u8>,
        turns: u64,
    }

    impl Transport for Trickle {
        fn send(&mut self, _: usize, head: &[u8], body: &[u8], _: bool) -> Result<usize, Loss> {
            Ok(head.len() + body.len())
        }

        fn receive(&mut self, _: usize, into: &mut [u8], _: bool) -> Result<usize, Loss> {
            if !self.head.is_empty() {
                let count = self.head.len().min(into.len());
                into[..count].copy_from_slice(&self.head[..count]);
                self.head.drain(..count);
                return Ok(count);
            }
            self.turns += 1;
            std::thread::sleep(Duration::from_micros(3));
            Ok(usize::from(self.turns.is_multiple_of(2)))
        }

        fn looks(&self) -> u32 {
            50
        }

        fn wait(&mut self, _: &Wants, _: Duration, _: Duration) -> Result<(), Loss> {
            Ok(())
        }

        fn end(&mut self, _: Notice) {}
    }

    /// All of it takes at least 0.3 seconds.
    #[test]
    fn a_rank_that_sends_byte_by_byte_puts_off_neither_the_deadline_nor_an_interrupt() {
        const BYTES: usize = 64 << 10;
        let operation = Operation::Broadcast { root: 0 };
        let (element, count) = (Element::Byte, BYTES as u64);
        let header = Header { operation, element, part: 0, sequence: 1, count, bytes: count };
        let head = header.encode().to_vec();
        let mut data = vec![0; BYTES];
        let mut slow = Group::new(2, 1, Trickle { head: head.clone(), turns: 0 });
        slow.set_limit(Duration::from_millis(5));
        assert_eq!(slow.broadcast(0, &mut data).unwrap_err().name(), "deadline");
        let mut slow = Group::new(2, 1, Trickle { head, turns: 0 });
        slow.set_interrupt(|| true);
        assert_eq!(slow.broadcast(0, &mut data), Err(CollectiveError::Interrupted(1)));
    }
}
