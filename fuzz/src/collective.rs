//! What ranks of a collective send to each other: messages are decoded as encoded, or refused; a call notices every wrong header, ends, and
//! reads no byte of the next call.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use collective::call::{Call, Progress};
use collective::frame::{HEADER_BYTES, Header, Hello, Notice, Welcome};
use collective::schedule::{Algorithm, Schedule};
use collective::transport::Wants;
use collective::{CollectiveError, Element, Loss, Operation, RANKS_MAX, Transport};

/// The first bytes of an input name a call and a byte that is spoiled.
const PLAN_BYTES: usize = 12;
/// What comes after the call on each stream: a rank may look at a header of the next call.
const NEXT_BYTES: usize = 64;
/// Times that a call may find nothing to move although something is there: a stream gives nothing at times.
const IDLE_MAX: usize = 1000;

/// Each message, if the input is one, and a call that other ranks may spoil.
pub fn message(input: &[u8]) {
    if let Ok(bytes) = input.try_into()
        && let Ok(hello) = Hello::decode(bytes)
    {
        assert_eq!(hello.encode(), *bytes, "a hello has one encoding");
    }
    if let Ok(bytes) = input.try_into()
        && let Some(welcome) = Welcome::decode(bytes)
    {
        assert_eq!(welcome.encode(), *bytes, "a welcome has one encoding");
    }
    if let Ok(bytes) = input.try_into()
        && let Some(header) = Header::decode(bytes)
    {
        assert_eq!(header.encode(), *bytes, "a header has one encoding");
    }
    if let Ok(bytes) = input.try_into()
        && let Some(notice) = Notice::decode(bytes)
    {
        assert_eq!(notice.encode(), *bytes, "a notice has one encoding");
    }
    if let Some((plan, sizes)) = input.split_first_chunk::<PLAN_BYTES>() {
        call(plan, sizes);
    }
}

fn call(plan: &[u8; PLAN_BYTES], sizes: &[u8]) {
    let ranks = 2 + usize::from(plan[0]) % (RANKS_MAX - 1);
    let rank = usize::from(plan[1]) % ranks;
    let root = usize::from(plan[2] >> 4) % ranks;
    let (operation, element) = match plan[2] & 3 {
        0 => (Operation::Broadcast { root }, Element::Byte),
        1 => (Operation::Barrier, Element::Byte),
        2 => (Operation::AllReduce, Element::Float32),
        _ => (Operation::AllReduce, Element::Int32),
    };
    let count = match operation {
        Operation::Barrier => 0,
        _ => usize::from(u16::from_le_bytes([plan[3], plan[4]])),
    };
    let len = count * element.bytes();
    let schedule = Arc::new(Schedule::new(operation, element, ranks, rank, len));

    // What honest ranks send, except for one byte.
    let mut streams = vec![Vec::new(); ranks];
    let mut headers = vec![Vec::new(); ranks];
    for receive in schedule.steps.iter().flat_map(|step| &step.receives) {
        let (stream, starts) = (&mut streams[receive.peer], &mut headers[receive.peer]);
        let (part, bytes) = (starts.len() as u32, receive.range.len());
        starts.push(stream.len());
        let header = Header {
            operation,
            element,
            part,
            sequence: 1,
            count: count as u64,
            bytes: bytes as u64,
        };
        stream.extend_from_slice(&header.encode());
        stream.extend((0..bytes).map(|at| (at * 7) as u8));
    }
    let (peer, mask) = (usize::from(plan[5]) % ranks, plan[6]);
    let at = u32::from_le_bytes([plan[7], plan[8], plan[9], plan[10]]) as usize;
    let mut is_header_wrong = false;
    if let Some(at) = at.checked_rem(streams[peer].len()) {
        streams[peer][at] ^= mask;
        let mut starts = headers[peer].iter();
        is_header_wrong =
            mask != 0 && starts.any(|start| (*start..start + HEADER_BYTES).contains(&at));
    }
    let body = streams[rank ^ 1 & (ranks - 1)].get(HEADER_BYTES..).unwrap_or_default().to_vec();
    let next = Header { operation, element, part: 0, sequence: 2, count: count as u64, bytes: 0 };
    let next = [next.encode(), next.encode()].concat();
    let mut end = End {
        streams: streams.into_iter().map(|stream| [stream, next.clone()].concat().into()).collect(),
        sizes: if sizes.is_empty() { &[255] } else { sizes },
        turn: 0,
    };

    let given: Vec<u8> = (0..len).map(|at| (at * 3) as u8).collect();
    let mut data = given.clone();
    let mut call = Call::default();
    call.start(operation, element, len, schedule.clone());
    let mut idle = 0;
    let result = loop {
        match call.advance(&mut end, &mut data) {
            Ok(Progress::Done) => break Ok(()),
            Ok(Progress::Moved | Progress::Stuck { moved: true, .. }) => idle = 0,
            Ok(Progress::Stuck { wants, .. }) => {
                assert_ne!(wants, Wants::default(), "it waits for no rank");
                idle += 1;
                assert!(idle < IDLE_MAX, "it waits for {wants:?}, although everything is there");
                let others = ((1u16 << ranks) - 1) as u8 & !(1 << rank);
                if let Err(error) = call.look_around(&mut end, others & !wants.receive) {
                    break Err(error);
                }
            }
            Err(error) => break Err(error),
        }
    };
    if is_header_wrong {
        let noticed = matches!(
            result,
            Err(CollectiveError::Disagreement { rank, .. } | CollectiveError::Lost(Loss::Garbage(rank)))
                if rank == peer
        );
        assert!(noticed, "a wrong header of rank {peer} was not noticed: {result:?}");
        return;
    }
    assert_eq!(result, Ok(()), "nothing was wrong");
    for (peer, rest) in end.streams.iter().enumerate() {
        let read = NEXT_BYTES.checked_sub(rest.len());
        assert!(read.is_some_and(|read| read <= HEADER_BYTES), "the next call of {peer}: {read:?}");
    }
    if ranks == 2 && element == Element::Int32 && schedule.algorithm == Algorithm::Exchange {
        let words = given.as_chunks::<4>().0.iter().zip(body.as_chunks::<4>().0);
        let sums = words
            .map(|(own, other)| i32::from_ne_bytes(*own).wrapping_add(i32::from_ne_bytes(*other)));
        assert!(sums.flat_map(i32::to_ne_bytes).eq(data), "the sum is wrong");
    }
}

/// Streams that give and take as few bytes at a time as the input says.
struct End<'a> {
    streams: Vec<VecDeque<u8>>,
    sizes: &'a [u8],
    turn: usize,
}

impl End<'_> {
    /// Small for small bytes of the input, else long; never always 0.
    fn size(&mut self, most: usize) -> usize {
        self.turn += 1;
        let size = usize::from(self.sizes[self.turn % self.sizes.len()]);
        match self.turn % 8 {
            0 => most,
            _ if size < 128 => most.min(size),
            _ => most.min(1 << (size & 15)),
        }
    }
}

impl Transport for End<'_> {
    fn send(&mut self, _: usize, head: &[u8], body: &[u8], _: bool) -> Result<usize, Loss> {
        assert!(head.len() <= HEADER_BYTES);
        Ok(self.size(head.len() + body.len()))
    }

    fn receive(&mut self, peer: usize, into: &mut [u8], _: bool) -> Result<usize, Loss> {
        let count = self.size(into.len()).min(self.streams[peer].len());
        into.iter_mut().zip(self.streams[peer].drain(..count)).for_each(|(to, from)| *to = from);
        Ok(count)
    }

    fn wait(&mut self, _: &Wants, _: Duration, _: Duration) -> Result<(), Loss> {
        unreachable!("a call has no clock")
    }

    fn end(&mut self, _: Notice) {}
}
