//! All-reduce over memory of an accelerator: here of one that copies as late and in as odd an order as a copy engine may.

mod processes;

use std::ops::Range;
use std::time::Duration;

use collective::staged::{CopyFailed, Direction, SLOTS};
use collective::{CollectiveError, Element, Staging};
use processes::{ints, tcp_group};

/// How a copier fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fails {
    Never,
    /// The copy of this number, from 0, cannot be started.
    ToBegin(usize),
    /// This copy ends with an error.
    Later(usize),
    /// This copy never ends.
    ToEnd(usize),
}

/// A copy in progress.
#[derive(Clone)]
struct InProgress {
    direction: Direction,
    range: Range<usize>,
    number: usize,
    /// How often it is to be asked for.
    asks: usize,
}

/// Copies when it has been asked a few times whether it is done. Until then the memory that it writes to has other bytes.
struct Late {
    array: Vec<u8>,
    slots: Vec<Vec<u8>>,
    /// By slot.
    copies: Vec<Option<InProgress>>,
    begun: usize,
    fails: Fails,
    /// The largest number of copies that were in progress together.
    together: usize,
}

impl Late {
    fn new(array: Vec<u8>, slot_bytes: usize, fails: Fails) -> Self {
        let (slots, copies) = (vec![vec![0xee; slot_bytes]; SLOTS], vec![None; SLOTS]);
        Self { array, slots, copies, begun: 0, fails, together: 0 }
    }
}

impl Staging for Late {
    fn bytes(&self) -> usize {
        self.array.len()
    }

    fn slot_bytes(&self) -> usize {
        self.slots[0].len()
    }

    fn begin(
        &mut self,
        direction: Direction,
        slot: usize,
        range: Range<usize>,
    ) -> Result<(), CopyFailed> {
        assert!(self.copies[slot].is_none(), "a copy of the slot is in progress");
        assert!(!range.is_empty() && range.len() <= self.slot_bytes());
        let number = self.begun;
        self.begun += 1;
        if self.fails == Fails::ToBegin(number) {
            return Err(CopyFailed("it has fallen off the bus".to_owned()));
        }
        if direction == Direction::Out {
            self.slots[slot].fill(0xee);
        }
        let asks = 1 + number * 7 % 5;
        self.copies[slot] = Some(InProgress { direction, range, number, asks });
        self.together = self.together.max(self.copies.iter().flatten().count());
        Ok(())
    }

    fn is_done(&mut self, slot: usize) -> Result<bool, CopyFailed> {
        let Some(copy) = &mut self.copies[slot] else { return Ok(true) };
        let InProgress { direction, range, number, asks } = copy;
        if self.fails == Fails::ToEnd(*number) {
            return Ok(false);
        }
        if self.fails == Fails::Later(*number) {
            return Err(CopyFailed("its memory failed".to_owned()));
        }
        *asks -= 1;
        if *asks > 0 {
            return Ok(false);
        }
        let (array, slot_bytes) =
            (&mut self.array[range.clone()], &mut self.slots[slot][..range.len()]);
        match direction {
            Direction::Out => slot_bytes.copy_from_slice(array),
            Direction::In => array.copy_from_slice(slot_bytes),
        }
        self.copies[slot] = None;
        Ok(true)
    }

    fn slot(&mut self, slot: usize) -> &mut [u8] {
        assert!(self.copies[slot].is_none(), "a copy of the slot is in progress");
        &mut self.slots[slot]
    }
}

#[test]
fn pieces_are_summed_while_others_are_copied() {
    for (ranks, counts) in [(2, &[0, 1, 16, 17, 32, 33, 100, 1000][..]), (3, &[1, 100]), (5, &[80])]
    {
        for &count in counts {
            let arrays = tcp_group(ranks, |mut group| {
                let mut staged = Late::new(ints(count, group.rank() as i32), 64, Fails::Never);
                // Twice: nothing of the first call is left over.
                for _ in 0..2 {
                    group.all_reduce_staged(Element::Int32, &mut staged).unwrap();
                    assert!(staged.copies.iter().all(Option::is_none));
                }
                assert_eq!(staged.begun, 2 * 2 * count.div_ceil(16));
                let expected = if count > 32 { SLOTS } else { count.div_ceil(16).min(2) };
                assert!(staged.together >= expected.min(2), "{} together", staged.together);
                staged.array
            });
            let sum = |at: usize| (0..ranks).map(|rank| (rank + at) as i32).sum::<i32>();
            let word = |at: usize| (sum(at) * ranks as i32).to_ne_bytes();
            let expected: Vec<u8> = (0..count).flat_map(word).collect();
            assert!(arrays.iter().all(|array| *array == expected), "{ranks} ranks, {count}");
        }
    }
}

#[test]
fn a_broadcast_is_copied_out_of_the_root_and_into_the_others() {
    for (ranks, bytes) in [(2, 0), (2, 1), (2, 64), (3, 65), (4, 1000), (5, 777)] {
        for root in [0, ranks - 1] {
            let arrays = tcp_group(ranks, |mut group| {
                let fill = |at: usize| (at * 7 + 13 * group.rank()) as u8;
                let mut staged = Late::new((0..bytes).map(fill).collect(), 64, Fails::Never);
                for _ in 0..2 {
                    group.broadcast_staged(root, &mut staged).unwrap();
                    assert!(staged.copies.iter().all(Option::is_none));
                }
                // Out of the root, and into the others.
                assert_eq!(staged.begun, 2 * bytes.div_ceil(64));
                assert_eq!(
                    group.broadcast_staged(ranks, &mut staged).unwrap_err().name(),
                    "argument"
                );
                group.barrier().unwrap();
                staged.array
            });
            let expected: Vec<u8> = (0..bytes).map(|at| (at * 7 + 13 * root) as u8).collect();
            assert!(arrays.iter().all(|array| *array == expected), "{ranks} ranks, {bytes} bytes");
        }
    }
}

/// Of any size, also that of what staged calls compare first.
#[test]
fn an_array_in_host_memory_and_one_in_an_accelerators_do_not_mix() {
    for (bytes, host) in [(8, 0), (16, 0), (16, 1), (64, 1)] {
        for broadcast in [true, false] {
            let errors = tcp_group(2, |mut group| {
                let mut data = vec![7; bytes];
                let done = if group.rank() == host {
                    match broadcast {
                        true => group.broadcast(0, &mut data),
                        false => group.all_reduce(Element::Int32, &mut data),
                    }
                } else {
                    let mut staged = Late::new(data.clone(), 64, Fails::Never);
                    match broadcast {
                        true => group.broadcast_staged(0, &mut staged),
                        false => group.all_reduce_staged(Element::Int32, &mut staged),
                    }
                };
                assert!(data.iter().all(|byte| *byte == 7), "{data:?}");
                // A root receives nothing, and learns it in its next call.
                done.and_then(|()| group.barrier()).unwrap_err()
            });
            assert!(errors.iter().any(|error| error.name() == "disagreement"), "{errors:?}");
        }
    }
}

/// The bits depend on the size of the pieces, but not on the time that copies take.
#[test]
fn sums_of_floats_have_the_same_bits_on_all_ranks_and_in_all_runs() {
    let run = |late: usize| {
        let arrays = tcp_group(3, |mut group| {
            let float = |at: usize| ((at * 31 + group.rank() * 17) as f32).sin() * 1e3;
            let array = (0..1000).flat_map(|at| float(at).to_ne_bytes()).collect();
            let mut staged = Late::new(array, 400, Fails::Never);
            staged.begun = late * group.rank();
            group.all_reduce_staged(Element::Float32, &mut staged).unwrap();
            staged.array
        });
        assert!(arrays.iter().all(|array| *array == arrays[0]));
        arrays.into_iter().next()
    };
    assert_eq!(run(0), run(3));
}

#[test]
fn a_copy_that_fails_ends_the_call_on_all_ranks_with_a_reason() {
    // 100 elements in pieces of 16 are 7 copies out and 7 in.
    let places = [0, 1, 6, 13];
    let fails =
        places.into_iter().flat_map(|at| [Fails::ToBegin(at), Fails::Later(at), Fails::ToEnd(at)]);
    for fails in fails {
        let errors = tcp_group(2, |mut group| {
            let is_broken = group.rank() == 1;
            if is_broken {
                // A copy that does not end is noticed at the deadline.
                group.set_limit(Duration::from_millis(if matches!(fails, Fails::ToEnd(_)) {
                    50
                } else {
                    60_000
                }));
            }
            let fails = if is_broken { fails } else { Fails::Never };
            let mut staged = Late::new(ints(100, 1), 64, fails);
            let result = group.all_reduce_staged(Element::Int32, &mut staged);
            if let Err(error) = &result {
                let over = group.all_reduce_staged(Element::Int32, &mut staged);
                assert_eq!(over, Err(CollectiveError::Over(Box::new(error.clone()))));
            }
            // The other rank's part may be complete before the last copy of this one.
            result.and_then(|()| group.barrier()).unwrap_err()
        });
        // On a busy machine its deadline may pass before that copy is reached.
        if matches!(fails, Fails::ToEnd(_)) && errors[1].name() == "deadline" {
            continue;
        }
        assert_eq!(errors[1].name(), "copy", "{fails:?} {errors:?}");
        let said = errors[0].to_string();
        assert!(said.contains("rank 1 cannot copy its accelerator's memory"), "{fails:?} {said}");
    }
}

#[test]
fn ranks_that_disagree_about_the_pieces_get_an_error() {
    let errors = tcp_group(2, |mut group| {
        let slot_bytes = if group.rank() == 0 { 64 } else { 128 };
        let mut staged = Late::new(ints(100, 1), slot_bytes, Fails::Never);
        group.all_reduce_staged(Element::Int32, &mut staged).unwrap_err()
    });
    assert!(
        matches!(&errors[1], CollectiveError::Disagreement { what: "size of slots", ours, theirs, .. }
            if ours == "128" && theirs == "64"),
        "{errors:?}"
    );
    tcp_group(2, |mut group| {
        for (bytes, slot_bytes) in [(3, 64), (8, 6), (8, 0)] {
            let mut staged = Late::new(vec![0; bytes], slot_bytes, Fails::Never);
            let error = group.all_reduce_staged(Element::Int32, &mut staged).unwrap_err();
            assert_eq!(error.name(), "argument", "{error}");
        }
        group.barrier().unwrap();
    });
}

#[test]
fn an_array_of_two_pieces_is_not_taken_for_two_arrays() {
    let errors = tcp_group(2, |mut group| {
        let count = if group.rank() == 0 { 32 } else { 16 };
        let mut staged = Late::new(ints(count, 1), 64, Fails::Never);
        let first = group.all_reduce_staged(Element::Int32, &mut staged);
        first.and_then(|()| group.all_reduce_staged(Element::Int32, &mut staged)).unwrap_err()
    });
    assert!(
        matches!(&errors[1], CollectiveError::Disagreement { what: "size", ours, theirs, .. }
            if ours == "64" && theirs == "128"),
        "{errors:?}"
    );
}
