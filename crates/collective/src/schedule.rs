//! Schedules: what one rank sends, receives and adds in a call, step by step.
//!
//! A schedule is a pure function of the operation, the number of ranks, the rank and the length. All transfers of a step run at
//! the same time; the next step starts when they are complete.
//!
//! | operation  | ranks               | bytes           | algorithm                                                          |
//! |------------|---------------------|-----------------|--------------------------------------------------------------------|
//! | all-reduce | 2                   | up to 64 KiB    | exchange: both send everything                                     |
//! | all-reduce | 3, 4                | up to 4 KiB     | exchange: all send everything to all, and add in the order of ranks |
//! | all-reduce | 3 to 8              | up to 32 KiB    | recursive doubling                                                 |
//! | all-reduce | 2, 4, 8             | up to 1 MiB     | Rabenseifner: recursive halving, then doubling                     |
//! | all-reduce | 3, 5, 6, 7          | up to 256 KiB   | Rabenseifner, after pairs of ranks have been folded into one       |
//! | all-reduce | 2 to 8              | above           | ring                                                               |
//! | broadcast  | 2 to 8              | up to 64 KiB    | binomial tree                                                      |
//! | broadcast  | 2 to 8              | above           | chain of segments                                                  |
//! | barrier    | 2 to 8              | -               | dissemination                                                      |
//!
//! Why results are the same on all ranks: in a ring and in Rabenseifner's algorithm each element is summed on one rank and copied
//! to the others. In recursive doubling all ranks add the same two partial sums in each step, some in the other order; addition of
//! two numbers is commutative. In an exchange of more than two every rank adds in the order of ranks.

use std::ops::Range;

/// Most ranks of a group.
pub const RANKS_MAX: usize = 8;

/// Up to this length two ranks, and three or four, exchange everything in one step.
const EXCHANGE_TWO_BYTES_MAX: usize = 64 << 10;
const EXCHANGE_BYTES_MAX: usize = 4 << 10;
/// Up to this length recursive doubling is used.
const DOUBLING_BYTES_MAX: usize = 32 << 10;
/// Up to this length Rabenseifner's algorithm is used, if the number of ranks is a power of two and if not.
const HALVING_BYTES_MAX: usize = 1 << 20;
const FOLDED_HALVING_BYTES_MAX: usize = 256 << 10;
/// Up to this length a broadcast uses a tree; above, a chain of segments of this length.
const SEGMENT_BYTES: usize = 64 << 10;

/// The type of the elements of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// Bytes that are only copied.
    Byte,
    /// IEEE 754 single precision. The sum of a NaN and anything is the NaN 0x7fc00000.
    Float32,
    /// Signed 32-bit integers; sums wrap.
    Int32,
}

impl Element {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Byte => 1,
            Self::Float32 | Self::Int32 => 4,
        }
    }

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Byte => "byte",
            Self::Float32 => "float32",
            Self::Int32 => "int32",
        }
    }
}

/// What the ranks do together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Every rank gets the sum of all ranks' elements.
    AllReduce,
    /// Every rank gets the data of the root.
    Broadcast {
        /// The rank that has the data.
        root: usize,
    },
    /// No rank returns before all ranks have called.
    Barrier,
}

/// How a schedule does it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// One rank: there is nothing to do.
    Alone,
    /// Everything to everyone in one step.
    Exchange,
    /// Recursive doubling.
    Doubling,
    /// Rabenseifner: recursive halving, then doubling.
    Halving,
    /// A reduce-scatter and an all-gather around a ring.
    Ring,
    /// A binomial tree.
    Tree,
    /// A chain of segments.
    Chain,
    /// Dissemination.
    Dissemination,
}

/// What happens with bytes that arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// They replace those at their place.
    Copy,
    /// They are added to those at their place.
    Add,
}

/// The two memories of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// The caller's data.
    Data,
    /// Temporary memory of [`Schedule::scratch_bytes`].
    Scratch,
}

/// A range of the data goes to another rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Send {
    /// To whom.
    pub peer: usize,
    /// Bytes of the data.
    pub range: Range<usize>,
}

/// A range arrives from another rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Receive {
    /// From whom.
    pub peer: usize,
    /// Where it goes.
    pub memory: Memory,
    /// Bytes of that memory.
    pub range: Range<usize>,
    /// What happens with it.
    pub effect: Effect,
    /// The same range is sent by the step's only send: what arrives may be used only as far as that send has gone.
    pub behind_send: bool,
}

/// A range of one memory changes another one, after the transfers of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Local {
    /// From where.
    pub from: (Memory, Range<usize>),
    /// To where; as long, and not overlapping.
    pub to: (Memory, Range<usize>),
    /// What happens there.
    pub effect: Effect,
}

/// What happens at the same time, and what follows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// What leaves.
    pub sends: Vec<Send>,
    /// What arrives.
    pub receives: Vec<Receive>,
    /// What is done when all has arrived, in order.
    pub locals: Vec<Local>,
}

/// All steps of one rank in one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// How.
    pub algorithm: Algorithm,
    /// Temporary memory that it needs.
    pub scratch_bytes: usize,
    /// In order.
    pub steps: Vec<Step>,
}

impl Schedule {
    /// The schedule of `rank` out of `ranks` for `bytes` bytes of data, a multiple of the element's length.
    pub fn new(
        operation: Operation,
        element: Element,
        ranks: usize,
        rank: usize,
        bytes: usize,
    ) -> Self {
        assert!((1..=RANKS_MAX).contains(&ranks) && rank < ranks, "rank {rank} of {ranks}");
        assert!(bytes % element.bytes() == 0, "{bytes} bytes are not whole elements");
        let place = Place { ranks, rank, bytes, element };
        let algorithm = choose(operation, ranks, bytes);
        let steps = match (algorithm, operation) {
            (Algorithm::Alone, _) => Vec::new(),
            (Algorithm::Tree, Operation::Broadcast { root }) => place.tree(root),
            (Algorithm::Chain, Operation::Broadcast { root }) => place.chain(root),
            (Algorithm::Dissemination, _) => place.dissemination(),
            (Algorithm::Doubling, _) => place.folded(|group| place.doubling(group)),
            (Algorithm::Halving, _) => place.folded(|group| place.halving(group)),
            (Algorithm::Ring, _) => place.ring(),
            _ => place.exchange(),
        };
        let is_shared = algorithm == Algorithm::Exchange && ranks > 2;
        Self { algorithm, scratch_bytes: if is_shared { ranks * bytes } else { 0 }, steps }
    }
}

fn choose(operation: Operation, ranks: usize, bytes: usize) -> Algorithm {
    let halving_max =
        if ranks.is_power_of_two() { HALVING_BYTES_MAX } else { FOLDED_HALVING_BYTES_MAX };
    let exchange_max = match ranks {
        2 => EXCHANGE_TWO_BYTES_MAX,
        3 | 4 => EXCHANGE_BYTES_MAX,
        _ => 0,
    };
    match operation {
        _ if ranks == 1 => Algorithm::Alone,
        Operation::Barrier => Algorithm::Dissemination,
        Operation::Broadcast { .. } if bytes <= SEGMENT_BYTES => Algorithm::Tree,
        Operation::Broadcast { .. } => Algorithm::Chain,
        Operation::AllReduce if bytes <= exchange_max => Algorithm::Exchange,
        Operation::AllReduce if bytes <= DOUBLING_BYTES_MAX => Algorithm::Doubling,
        Operation::AllReduce if bytes <= halving_max => Algorithm::Halving,
        Operation::AllReduce => Algorithm::Ring,
    }
}

/// One rank and its data.
#[derive(Clone, Copy)]
struct Place {
    ranks: usize,
    rank: usize,
    bytes: usize,
    element: Element,
}

/// The ranks that take part in an algorithm for a power of two, by their number in it.
struct Folded {
    ranks: usize,
    number: usize,
    rank_of: fn(number: usize, extra: usize) -> usize,
    extra: usize,
}

impl Folded {
    fn rank(&self, number: usize) -> usize {
        (self.rank_of)(number, self.extra)
    }
}

impl Place {
    /// The bytes of the parts `parts` of `count` parts whose lengths differ by at most one element.
    fn part(&self, parts: Range<usize>, count: usize) -> Range<usize> {
        let size = self.element.bytes();
        let at = |part: usize| self.bytes / size * part / count * size;
        at(parts.start)..at(parts.end)
    }

    fn exchange(&self) -> Vec<Step> {
        let all = 0..self.bytes;
        let others = || (0..self.ranks).filter(|peer| *peer != self.rank);
        let sends = others().map(|peer| Send { peer, range: all.clone() }).collect();
        if self.ranks == 2 {
            let receive = Receive {
                peer: 1 - self.rank,
                memory: Memory::Data,
                range: all,
                effect: Effect::Add,
                behind_send: true,
            };
            return vec![Step { sends, receives: vec![receive], locals: Vec::new() }];
        }
        let slot = |of: usize| of * self.bytes..(of + 1) * self.bytes;
        let receives = others().map(|peer| Receive {
            peer,
            memory: Memory::Scratch,
            range: slot(peer),
            effect: Effect::Copy,
            behind_send: false,
        });
        let receives = receives.collect();
        // Rank 0's slot becomes the sum.
        let own = || (Memory::Data, all.clone());
        let add = |from, effect| Local { from, to: (Memory::Scratch, slot(0)), effect };
        let mut locals = Vec::with_capacity(self.ranks + 1);
        if self.rank == 0 {
            locals.push(add(own(), Effect::Copy));
        }
        for of in 1..self.ranks {
            let from = if of == self.rank { own() } else { (Memory::Scratch, slot(of)) };
            locals.push(add(from, Effect::Add));
        }
        let from = (Memory::Scratch, slot(0));
        locals.push(Local { from, to: own(), effect: Effect::Copy });
        vec![Step { sends, receives, locals }]
    }

    /// An algorithm for a power of two. Of the first ranks, as many pairs as necessary are folded into their odd one.
    fn folded(&self, steps: impl Fn(&Folded) -> Vec<Step>) -> Vec<Step> {
        let ranks = 1 << self.ranks.ilog2();
        let extra = self.ranks - ranks;
        let rank_of = |number, extra| if number < extra { 2 * number + 1 } else { number + extra };
        let all = 0..self.bytes;
        let number = match self.rank {
            rank if rank >= 2 * extra => rank - extra,
            rank if rank % 2 == 1 => rank / 2,
            rank => {
                let send = Step::send(rank + 1, all.clone());
                return vec![send, Step::receive(rank + 1, all, Effect::Copy)];
            }
        };
        let mut all_steps = steps(&Folded { ranks, number, rank_of, extra });
        if self.rank < 2 * extra {
            all_steps.insert(0, Step::receive(self.rank - 1, all.clone(), Effect::Add));
            all_steps.push(Step::send(self.rank - 1, all));
        }
        all_steps
    }

    fn doubling(&self, group: &Folded) -> Vec<Step> {
        let masks = (0..group.ranks.ilog2()).map(|bit| 1 << bit);
        let step = |mask| {
            let peer = group.rank(group.number ^ mask);
            let mut step = Step::send(peer, 0..self.bytes);
            step.receives.push(Receive {
                peer,
                memory: Memory::Data,
                range: 0..self.bytes,
                effect: Effect::Add,
                behind_send: true,
            });
            step
        };
        masks.map(step).collect()
    }

    fn halving(&self, group: &Folded) -> Vec<Step> {
        let (mut own, mut steps) = (0..group.ranks, Vec::new());
        let part = |parts: &Range<usize>| self.part(parts.clone(), group.ranks);
        let mut gathers = Vec::new();
        while own.len() > 1 {
            let mask = own.len() / 2;
            let middle = own.start + mask;
            let (keep, give) = match group.number & mask {
                0 => (own.start..middle, middle..own.end),
                _ => (middle..own.end, own.start..middle),
            };
            let peer = group.rank(group.number ^ mask);
            let mut scatter = Step::send(peer, part(&give));
            scatter.receives.push(Receive::to(peer, part(&keep), Effect::Add));
            steps.push(scatter);
            let mut gather = Step::send(peer, part(&keep));
            gather.receives.push(Receive::to(peer, part(&give), Effect::Copy));
            gathers.push(gather);
            own = keep;
        }
        steps.extend(gathers.into_iter().rev());
        steps
    }

    fn ring(&self) -> Vec<Step> {
        let (ranks, rank) = (self.ranks, self.rank);
        let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        let part = |index: usize| self.part(index % ranks..index % ranks + 1, ranks);
        let step = |send: usize, effect| {
            let mut step = Step::send(next, part(send));
            step.receives.push(Receive::to(before, part(send + ranks - 1), effect));
            step
        };
        let scatters = (0..ranks - 1).map(|turn| step(rank + ranks - turn, Effect::Add));
        let gathers = (0..ranks - 1).map(|turn| step(rank + 1 + ranks - turn, Effect::Copy));
        scatters.chain(gathers).collect()
    }

    /// A rank's distance from the root, and the rank at a distance.
    fn distance(&self, root: usize) -> (usize, impl Fn(usize) -> usize) {
        let ranks = self.ranks;
        ((self.rank + ranks - root) % ranks, move |distance| (root + distance) % ranks)
    }

    fn tree(&self, root: usize) -> Vec<Step> {
        let (distance, rank_at) = self.distance(root);
        let all = 0..self.bytes;
        let mut steps = Vec::new();
        // The lowest set bit says who sends to this rank; below it are those to which it sends.
        let low = match distance {
            0 => self.ranks.next_power_of_two(),
            _ => 1 << distance.trailing_zeros(),
        };
        if distance > 0 {
            steps.push(Step::receive(rank_at(distance - low), all.clone(), Effect::Copy));
        }
        let masks = (0..low.ilog2()).rev().map(|bit| 1 << bit);
        let below = masks.map(|mask| distance + mask).filter(|below| *below < self.ranks);
        let sends: Vec<Send> =
            below.map(|below| Send { peer: rank_at(below), range: all.clone() }).collect();
        if !sends.is_empty() {
            steps.push(Step { sends, ..Step::default() });
        }
        steps
    }

    fn chain(&self, root: usize) -> Vec<Step> {
        let (distance, rank_at) = self.distance(root);
        let segments = self.bytes.div_ceil(SEGMENT_BYTES);
        let segment =
            |index: usize| index * SEGMENT_BYTES..((index + 1) * SEGMENT_BYTES).min(self.bytes);
        let (receives, sends) = (distance > 0, distance + 1 < self.ranks);
        // A rank that receives sends a segment while it receives the next one.
        let lag = usize::from(receives);
        (0..segments + lag)
            .map(|turn| {
                let mut step = Step::default();
                if receives && turn < segments {
                    let from = rank_at(distance - 1);
                    step.receives.push(Receive::to(from, segment(turn), Effect::Copy));
                }
                if sends && turn >= lag {
                    let range = segment(turn - lag);
                    step.sends.push(Send { peer: rank_at(distance + 1), range });
                }
                step
            })
            .collect()
    }

    fn dissemination(&self) -> Vec<Step> {
        let rounds = self.ranks.next_power_of_two().ilog2();
        let step = |distance: usize| {
            let mut step = Step::send((self.rank + distance) % self.ranks, 0..0);
            let from = (self.rank + self.ranks - distance) % self.ranks;
            step.receives.push(Receive::to(from, 0..0, Effect::Copy));
            step
        };
        (0..rounds).map(|round| step(1 << round)).collect()
    }
}

impl Step {
    fn send(peer: usize, range: Range<usize>) -> Self {
        Self { sends: vec![Send { peer, range }], ..Self::default() }
    }

    fn receive(peer: usize, range: Range<usize>, effect: Effect) -> Self {
        Self { receives: vec![Receive::to(peer, range, effect)], ..Self::default() }
    }
}

impl Receive {
    /// Into data that the step does not send.
    fn to(peer: usize, range: Range<usize>, effect: Effect) -> Self {
        Self { peer, memory: Memory::Data, range, effect, behind_send: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_choice_depends_on_ranks_and_length() {
        let choice = |ranks, bytes| choose(Operation::AllReduce, ranks, bytes);
        assert_eq!(choice(1, 64), Algorithm::Alone);
        assert_eq!(choice(2, 64 << 10), Algorithm::Exchange);
        assert_eq!(choice(2, 1 << 20), Algorithm::Halving);
        assert_eq!(choice(2, 64 << 20), Algorithm::Ring);
        assert_eq!(choice(4, 64), Algorithm::Exchange);
        assert_eq!(choice(8, 64), Algorithm::Doubling);
        assert_eq!(choice(4, 60 << 10), Algorithm::Halving);
        assert_eq!(choice(7, 60 << 10), Algorithm::Halving);
        assert_eq!(choice(7, 1 << 20), Algorithm::Ring);
        assert_eq!(choice(8, 2 << 20), Algorithm::Ring);
    }

    /// Every send of a rank is received by its peer, in the same order and with the same length.
    #[test]
    fn sends_and_receives_of_all_ranks_correspond() {
        let operations = |ranks| {
            let broadcasts = (0..ranks).map(|root| Operation::Broadcast { root });
            [Operation::AllReduce, Operation::Barrier].into_iter().chain(broadcasts)
        };
        for ranks in 1..=RANKS_MAX {
            for operation in operations(ranks) {
                for bytes in [0, 4, 20, 4096, 4100, 40_000, 300_004, 1_500_000] {
                    let schedule =
                        |rank| Schedule::new(operation, Element::Int32, ranks, rank, bytes);
                    let all: Vec<Schedule> = (0..ranks).map(schedule).collect();
                    for (from, to) in (0..ranks).flat_map(|a| (0..ranks).map(move |b| (a, b))) {
                        let steps = |rank: usize| all[rank].steps.iter();
                        let sent: Vec<usize> = steps(from)
                            .flat_map(|step| &step.sends)
                            .filter(|send| send.peer == to)
                            .map(|send| send.range.len())
                            .collect();
                        let received: Vec<usize> = steps(to)
                            .flat_map(|step| &step.receives)
                            .filter(|receive| receive.peer == from)
                            .map(|receive| receive.range.len())
                            .collect();
                        assert_eq!(sent, received, "{operation:?} {ranks} {bytes} {from}->{to}");
                    }
                }
            }
        }
    }
}
