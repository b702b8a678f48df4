//! Answers of memcached that have several datagrams: which datagram belongs to which answer.
//!
//! The frame of a datagram has the id of its request, its number and how many there are. memcached 1.6 numbers the datagrams of each value by
//! themselves: of a request for several keys the answer is a datagram 0 of 1 for each key, or 0 of n and so on if the value is long, and one
//! without content for a key that it does not have. Where such an answer ends is in its content: the last value has `END` behind it.
//!
//! A few answers of a flow are followed at a time: memcached's threads answer one client at the same time. If the first datagram that comes is not
//! number 0, its request must be one of the last ones that were asked.

use wire::framing::UdpHeader;
use wire::framing::memcached::bytes_left;

/// Answers that are followed.
const ANSWERS: usize = 4;
/// Requests whose ids are known.
const ASKED: usize = 8;
/// Datagrams of an answer beside the first: a mebibyte, memcached's longest value, in datagrams of 1400 bytes.
const FURTHER_MAX: u32 = 1024;

/// What a datagram is to the answers before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// The first one that came of its answer.
    First,
    /// It continues an answer, which ended a request, or none.
    Further { delivered: bool },
    /// There are as many as the frame said.
    Useless,
}

/// An answer of which more is expected.
#[derive(Clone, Copy, Debug)]
struct Answer {
    id: u16,
    /// Numbered datagrams that are missing.
    missing: u32,
    /// The datagram 0 is one of them.
    misses_first: bool,
    /// Bytes of the value that are missing; less than 0 if something is behind it. `None`: it does not begin with a value, or is not known.
    left: Option<i64>,
    /// Datagrams that it may still have.
    budget: u32,
    delivered: bool,
    used_ns: u64,
}

impl Answer {
    /// A datagram came.
    fn take(&mut self, header: UdpHeader, body: &[u8]) {
        self.budget = self.budget.saturating_sub(1);
        if header.sequence == 0 {
            self.misses_first = false;
            self.left = bytes_left(body).map(|left| left + self.left.unwrap_or(0));
        } else {
            self.left = Some(self.left.unwrap_or(0) - body.len() as i64);
        }
    }

    /// Whether another value follows: all of this one has come, and nothing behind it.
    fn is_list(&self) -> bool {
        self.missing == 0 && self.left == Some(0) && !mutants::on("first_value_only")
    }
}

/// See the module's text.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Parts {
    answers: [Option<Answer>; ANSWERS],
    /// The ids of the last requests that have no answer, and where the next one is put.
    asked: [Option<u16>; ASKED],
    next: u8,
}

impl Parts {
    /// Whether a datagram may still come.
    pub(super) fn awaits(&self) -> bool {
        self.answers.iter().any(Option::is_some)
    }

    /// A request with this id is sent.
    pub(super) fn ask(&mut self, id: u16) {
        self.asked[usize::from(self.next) % ASKED] = Some(id);
        self.next = self.next.wrapping_add(1);
    }

    /// The same is not awaited any more. Whether it was.
    fn forget(&mut self, id: u16) -> bool {
        let place = self.asked.iter_mut().find(|asked| **asked == Some(id));
        place.is_some_and(|place| place.take().is_some())
    }

    /// A datagram came, at most `timeout_ns` after the one before it if it belongs to the same answer.
    pub(super) fn take(
        &mut self,
        header: UdpHeader,
        body: &[u8],
        (now_ns, timeout_ns): (u64, u64),
    ) -> Part {
        let is_over = |answer: &Answer| now_ns.saturating_sub(answer.used_ns) > timeout_ns;
        for place in &mut self.answers {
            place.take_if(|answer| is_over(answer));
        }
        let found = self.answers.iter().position(|a| a.is_some_and(|a| a.id == header.id));
        let Some((place, answer)) = found.and_then(|at| {
            let place = &mut self.answers[at];
            Some((at, place.as_mut()?))
        }) else {
            let is_first = self.forget(header.id) || header.sequence == 0;
            return if is_first { Part::First } else { Part::Useless };
        };
        if answer.is_list() {
            // The next value, with whichever of its datagrams has come first.
            answer.missing = u32::from(header.total).saturating_sub(1);
            answer.misses_first = header.sequence > 0;
            answer.left = None;
        } else if header.sequence == 0 && !answer.misses_first {
            // An answer to the next request with this id.
            self.answers[place] = None;
            self.forget(header.id);
            return Part::First;
        } else if answer.missing == 0 {
            return Part::Useless;
        } else {
            answer.missing -= 1;
        }
        answer.take(header, body);
        answer.used_ns = now_ns;
        let further = Part::Further { delivered: answer.delivered };
        Self::end_if_whole(&mut self.answers[place]);
        further
    }

    /// A [`Part::First`] was delivered, or was not.
    pub(super) fn begin(&mut self, header: UdpHeader, body: &[u8], delivered: bool, now_ns: u64) {
        let mut answer = Answer {
            id: header.id,
            missing: u32::from(header.total).saturating_sub(1).min(FURTHER_MAX),
            misses_first: header.sequence > 0,
            left: None,
            budget: FURTHER_MAX + 1,
            delivered,
            used_ns: now_ns,
        };
        answer.take(header, body);
        let mut place = Some(answer);
        Self::end_if_whole(&mut place);
        if place.is_none() {
            return;
        }
        let used = |place: &&mut Option<Answer>| place.map(|answer| answer.used_ns);
        let oldest = self.answers.iter_mut().min_by_key(used);
        if let Some(oldest) = oldest {
            *oldest = place;
        }
    }

    fn end_if_whole(place: &mut Option<Answer>) {
        place.take_if(|answer| answer.budget == 0 || answer.missing == 0 && !answer.is_list());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FURTHER: Part = Part::Further { delivered: true };

    struct Flow(Parts, u64);

    impl Flow {
        fn take(&mut self, id: u16, (sequence, total): (u16, u16), body: &str) -> Part {
            let header = UdpHeader { id, sequence, total };
            let part = self.0.take(header, body.as_bytes(), (self.1, 10));
            if part == Part::First {
                self.0.begin(header, body.as_bytes(), true, self.1);
            }
            part
        }
    }

    #[test]
    fn an_answer_to_several_keys_has_datagrams_that_are_numbered_by_themselves() {
        let mut flow = Flow(Parts::default(), 0);
        let all = [
            (0, 1, "VALUE a 0 1\r\nx\r\n", Part::First),
            // A key that memcached does not have.
            (0, 0, "", FURTHER),
            // A long value.
            (0, 3, "VALUE b 0 12\r\nabcd", FURTHER),
            (1, 3, "efgh", FURTHER),
            (2, 3, "ijkl\r\n", FURTHER),
            (0, 1, "VALUE c 0 5\r\nxEND\r\r\n", FURTHER),
            (0, 1, "VALUE d 0 1\r\nx\r\nEND\r\n", FURTHER),
            (0, 1, "VALUE d 0 1\r\nx\r\nEND\r\n", Part::First),
            (0, 0, "", Part::First),
            (0, 1, "END\r\n", FURTHER),
            (0, 1, "STORED\r\n", Part::First),
            (0, 1, "VA 1\r\nx\r\n", Part::First),
        ];
        for (sequence, total, body, part) in all {
            assert_eq!(flow.take(7, (sequence, total), body), part, "{body:?}");
        }
        assert!(!flow.0.awaits());
    }

    #[test]
    fn datagrams_of_a_later_value_come_in_any_order() {
        let mut flow = Flow(Parts::default(), 0);
        let all = [
            (0, 1, "VALUE a 0 1\r\nx\r\n", Part::First),
            (1, 3, "efgh", FURTHER),
            (0, 3, "VALUE b 0 12\r\nabcd", FURTHER),
            (2, 3, "ijkl\r\n", FURTHER),
            (0, 1, "VALUE c 0 1\r\nx\r\nEND\r\n", FURTHER),
            (1, 3, "efgh", Part::Useless),
        ];
        for (sequence, total, body, part) in all {
            assert_eq!(flow.take(7, (sequence, total), body), part, "{body:?}");
        }
        assert!(!flow.0.awaits());
    }

    #[test]
    fn datagrams_come_in_any_order_and_of_several_answers_at_once() {
        let mut flow = Flow(Parts::default(), 0);
        (1..=3).for_each(|id| flow.0.ask(id));
        let all = [
            (4, 1, 3, "not asked for", Part::Useless),
            (1, 2, 3, "ijkl\r\nEND\r\n", Part::First),
            (2, 0, 1, "VALUE a 0 1\r\nx\r\n", Part::First),
            (1, 0, 3, "VALUE b 0 12\r\nabcd", FURTHER),
            (3, 0, 1, "STORED\r\n", Part::First),
            (2, 0, 1, "VALUE a 0 1\r\nx\r\nEND\r\n", FURTHER),
            (1, 1, 3, "efgh", FURTHER),
            // All have come.
            (1, 0, 3, "VALUE b 0 12\r\nabcd", Part::First),
            (1, 1, 3, "efgh", FURTHER),
            (1, 1, 3, "efgh", FURTHER),
            (1, 1, 3, "efgh", Part::Useless),
        ];
        for (id, sequence, total, body, part) in all {
            assert_eq!(flow.take(id, (sequence, total), body), part, "{id} {sequence} {body:?}");
        }
    }

    #[test]
    fn an_answer_without_an_end_is_forgotten_and_bounded() {
        let mut flow = Flow(Parts::default(), 0);
        let value = "VALUE a 0 1\r\nx\r\n";
        assert_eq!(flow.take(1, (0, 1), value), Part::First);
        flow.1 = 10;
        assert_eq!(flow.take(1, (0, 1), value), FURTHER);
        flow.1 = 21;
        assert_eq!(flow.take(1, (0, 1), value), Part::First, "too late");
        for _ in 0..FURTHER_MAX {
            assert_eq!(flow.take(1, (0, 1), value), FURTHER);
        }
        assert_eq!(flow.take(1, (0, 1), value), Part::First, "too many");
        for id in 2..10 {
            assert_eq!(flow.take(id, (0, 1), value), Part::First);
        }
        assert_eq!(flow.take(9, (0, 1), value), FURTHER);
    }
}
