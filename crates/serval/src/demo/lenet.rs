//! `serval demo lenet`: held-out digits over UDP and TCP, then the contest.

use engine::topology::Service;
use serde_json::json;
use std::fmt::Write as _;
use wire::framing::Framing;

use super::bench::Contest;
use super::{DemoError, HostCentric, Report, Stage, accounts, perfect};
use crate::client::workload::{Digit, Digits};
use crate::client::{self, Load, Stream};
use crate::screen::Tone;

/// Share of right answers below which something must be broken.
const ACCURACY_MIN: f64 = 0.97;

pub(super) fn run(stage: &Stage<'_>) -> Result<Report, DemoError> {
    let digits = Digit::held_out();
    let mut service = Service::new("digits", Vec::new(), "lenet");
    service.framing = Framing::Fixed(Digits::PICTURE_BYTES as u32);
    service.mqueues = stage.options.mqueues.unwrap_or(4);
    let other = HostCentric::start(&service, stage.options.workers, stage.cores.map(|c| c.server))?;
    let (server, udp, tcp) = stage.serve(service)?;
    let stream = Stream {
        connections: 4,
        framing: Framing::Fixed(Digits::PICTURE_BYTES as u32),
        reply_framing: Framing::Fixed(Digits::REPLY_BYTES as u32),
    };

    let load = Load {
        window: 8,
        requests: digits.len() as u64,
        cancel: stage.options.cancel.clone(),
        ..Load::default()
    };
    let bar = stage.progress("reading held-out digits", 2);
    let mut over_udp = Digits::new(&digits, None);
    let outcome = client::udp(udp, &load, &mut over_udp)?;
    stage.go_on()?;
    perfect("digits over UDP", &outcome)?;
    bar.inc(1);
    let mut over_tcp = Digits::new(&digits, None);
    let outcome = client::tcp(tcp, &stream, &load, &mut over_tcp)?;
    stage.go_on()?;
    perfect("digits over TCP", &outcome)?;
    bar.finish_and_clear();
    let right = [over_udp.right(), over_tcp.right()];
    check(&over_udp, &over_tcp)?;

    let contest = Contest { udp, tcp, stream, other: &other };
    let answers = over_udp.answers();
    let verdict = stage.compare(&contest, || Box::new(Digits::new(&digits, Some(answers))))?;

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
    let chart = verdict.chart("LeNet-5: how long a digit takes", stage);
    Ok(Report { text, json, chart })
}

/// Both transports give the same answers, and good ones.
fn check(over_udp: &Digits<'_>, over_tcp: &Digits<'_>) -> Result<(), DemoError> {
    if over_udp.answers() != over_tcp.answers() {
        return Err(DemoError::Wrong(
            "UDP and TCP gave different answers to the same digits".into(),
        ));
    }
    let share = over_udp.right() as f64 / over_udp.answers().len() as f64;
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
    use crate::client::Workload as _;

    #[test]
    fn poor_or_different_answers_fail_the_demo() {
        let picture = [0; Digits::PICTURE_BYTES];
        let digits: Vec<Digit<'_>> =
            (0..10).map(|label| Digit { label, picture: &picture }).collect();
        let answered = |labels: &dyn Fn(u8) -> u8| {
            let mut reading = Digits::new(&digits, None);
            for index in 0..10 {
                let mut reply = [0; Digits::REPLY_BYTES];
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
}
