//! `serval demo lenet`: held-out digits over UDP and TCP, then the contest.

use engine::topology::Service;
use serde_json::json;
use std::fmt::Write as _;
use wire::framing::Framing;

use super::bench::Contest;
use super::{DemoError, HostCentric, Report, Stage, accounts, perfect};
use crate::client::{self, Load, Stream, Workload};
use crate::screen::Tone;

/// Pictures that took no part in training: magic, u32 LE count, then label and 784 bytes each
/// (device/models/README.md).
const HELD_OUT: &[u8] = include_bytes!("../../../../device/models/digits_heldout.bin");
const MAGIC: &[u8] = b"SVDIGIT1";
const PICTURE_BYTES: usize = 784;
const REPLY_BYTES: usize = 44;
/// Share of right answers below which something must be broken.
const ACCURACY_MIN: f64 = 0.97;

/// A labelled picture.
#[derive(Clone, Copy)]
struct Digit<'a> {
    label: u8,
    picture: &'a [u8],
}

/// Reads a file of digits; `None` when it is none.
fn parse(file: &[u8]) -> Option<Vec<Digit<'_>>> {
    let rest = file.strip_prefix(MAGIC)?;
    let (count, rest) = rest.split_first_chunk::<4>()?;
    let count = u32::from_le_bytes(*count) as usize;
    let records = rest.chunks_exact(1 + PICTURE_BYTES);
    let sound = count > 0 && records.len() == count && records.remainder().is_empty();
    sound.then(|| records.map(|r| Digit { label: r[0], picture: &r[1..] }).collect())
}

/// Asks for the digits in turn. The first answers are kept; with `expected`, all must be those.
struct Reading<'a> {
    digits: &'a [Digit<'a>],
    expected: Option<&'a [Vec<u8>]>,
    answers: Vec<Vec<u8>>,
}

impl<'a> Reading<'a> {
    fn new(digits: &'a [Digit<'a>], expected: Option<&'a [Vec<u8>]>) -> Self {
        Self { digits, expected, answers: vec![Vec::new(); digits.len()] }
    }

    fn right(&self) -> usize {
        let hits = self.digits.iter().zip(&self.answers);
        hits.filter(|(digit, answer)| answer.first() == Some(&digit.label)).count()
    }
}

impl Workload for Reading<'_> {
    fn request(&mut self, index: u64, into: &mut Vec<u8>) {
        into.extend_from_slice(self.digits[index as usize % self.digits.len()].picture);
    }

    fn accepts(&mut self, index: u64, reply: &[u8]) -> bool {
        let at = index as usize % self.digits.len();
        match self.expected {
            Some(expected) => reply == expected[at],
            None => {
                self.answers[at] = reply.to_vec();
                reply.len() == REPLY_BYTES && reply[0] < 10 && reply[1..4] == [0; 3]
            }
        }
    }
}

pub(super) fn run(stage: &Stage<'_>) -> Result<Report, DemoError> {
    let digits = parse(HELD_OUT).expect("the built-in pictures are whole");
    let mut service = Service::new("digits", Vec::new(), "lenet");
    service.framing = Framing::Fixed(PICTURE_BYTES as u32);
    service.mqueues = stage.options.mqueues.unwrap_or(4);
    let other = HostCentric::start(&service, stage.options.workers, stage.cores.map(|c| c.server))?;
    let (server, udp, tcp) = stage.serve(service)?;
    let stream = Stream {
        connections: 4,
        framing: Framing::Fixed(PICTURE_BYTES as u32),
        reply_framing: Framing::Fixed(REPLY_BYTES as u32),
    };

    let load = Load {
        window: 8,
        requests: digits.len() as u64,
        cancel: stage.options.cancel.clone(),
        ..Load::default()
    };
    let bar = stage.progress("reading held-out digits", 2);
    let mut over_udp = Reading::new(&digits, None);
    let outcome = client::udp(udp, &load, &mut over_udp)?;
    stage.go_on()?;
    perfect("digits over UDP", &outcome)?;
    bar.inc(1);
    let mut over_tcp = Reading::new(&digits, None);
    let outcome = client::tcp(tcp, &stream, &load, &mut over_tcp)?;
    stage.go_on()?;
    perfect("digits over TCP", &outcome)?;
    bar.finish_and_clear();
    let right = [over_udp.right(), over_tcp.right()];
    check(&over_udp, &over_tcp)?;

    let contest = Contest { udp, tcp, stream, other: &other };
    let answers = &over_udp.answers;
    let verdict = stage.compare(&contest, || Box::new(Reading::new(&digits, Some(answers))))?;

    let screen = &stage.options.screen;
    let mut text = format!("{}\n\n", screen.paint(Tone::Bold, "LeNet-5 behind a port"));
    for (name, right) in ["UDP", "TCP"].into_iter().zip(right) {
        let share = 100.0 * right as f64 / digits.len() as f64;
        let _ = writeln!(
            text,
            "  {name}: {right} of {} held-out digits right ({share:.1} %)",
            digits.len()
        );
    }
    let _ = writeln!(text, "\n{}\n{}", verdict.table(screen), stage.caption(&verdict));
    let _ = writeln!(text, "  {}", accounts(&server));
    let report = server.shutdown();
    if !report.is_clean() {
        return Err(DemoError::Wrong("the server did not end cleanly".to_owned()));
    }
    let json = json!({
        "demo": "lenet", "digits": digits.len(), "right_udp": right[0], "right_tcp": right[1],
        "comparison": verdict.json(),
    });
    Ok(Report { text, json })
}

/// Both transports give the same answers, and good ones.
fn check(over_udp: &Reading<'_>, over_tcp: &Reading<'_>) -> Result<(), DemoError> {
    if over_udp.answers != over_tcp.answers {
        return Err(DemoError::Wrong(
            "UDP and TCP gave different answers to the same digits".into(),
        ));
    }
    let share = over_udp.right() as f64 / over_udp.digits.len() as f64;
    if share < ACCURACY_MIN {
        return Err(DemoError::Wrong(format!(
            "only {:.1} % of the digits were read right, {:.0} % are expected",
            100.0 * share,
            100.0 * ACCURACY_MIN
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_digits_are_whole_and_damaged_files_are_refused() {
        let digits = parse(HELD_OUT).unwrap();
        assert!(digits.len() >= 100 && digits.iter().all(|d| d.label < 10));
        assert!((0..10).all(|label| digits.iter().any(|d| d.label == label)));
        assert!(parse(&HELD_OUT[..HELD_OUT.len() - 1]).is_none());
        assert!(parse(b"SVDIGIT1\0\0\0\0").is_none());
        assert!(parse(b"something else").is_none());
    }

    #[test]
    fn poor_or_different_answers_fail_the_demo() {
        let picture = [0; PICTURE_BYTES];
        let digits: Vec<Digit<'_>> =
            (0..10).map(|label| Digit { label, picture: &picture }).collect();
        let answered = |labels: &dyn Fn(u8) -> u8| {
            let mut reading = Reading::new(&digits, None);
            for index in 0..10 {
                let mut reply = [0; REPLY_BYTES];
                reply[0] = labels(index);
                assert!(reading.accepts(index.into(), &reply));
            }
            reading
        };
        let (good, poor) = (answered(&|label| label), answered(&|_| 3));
        assert!(check(&good, &answered(&|label| label)).is_ok());
        assert!(check(&poor, &answered(&|_| 3)).unwrap_err().to_string().contains("only 10.0 %"));
        assert!(check(&good, &poor).unwrap_err().to_string().contains("different answers"));
    }

    #[test]
    fn malformed_replies_are_not_accepted() {
        let picture = [0; PICTURE_BYTES];
        let digits = [Digit { label: 0, picture: &picture }];
        let mut reading = Reading::new(&digits, None);
        assert!(!reading.accepts(0, &[0; 43]));
        assert!(!reading.accepts(0, &[1; 44]));
        assert!(!reading.accepts(0, &[10; 44]));
    }
}
