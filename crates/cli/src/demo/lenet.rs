//! `serval demo lenet`: held-out digits over UDP and TCP, then a comparison: the GPU against the CPU, or without a
//! GPU Serval against a host-centric server.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use engine::topology::Service;
use serde_json::json;
use wire::framing::Framing;

use super::bench::Comparison;
use super::{DemoError, DemoGpu, HostCentric, Report, Served, Stage, accounts, check_complete};
use crate::screen::Tone;
use bench::client::workload::{Digit, Digits};
use bench::client::{self, Load, Stream};
use server::Server;

/// Minimum share of correct answers.
const ACCURACY_MIN: f64 = 0.97;
/// Mqueues: the number of digits that are read concurrently.
const MQUEUES: u32 = 4;
const MQUEUES_ON_GPU: u32 = 64;

/// The two servers that are compared.
struct Servers {
    serval: Served,
    other: Other,
    /// The GPU of the first server's kernel, or the reason why none is used.
    gpu: Result<String, String>,
}

enum Other {
    HostCentric(HostCentric),
    OnCpu(Box<Served>),
}

impl Other {
    fn udp(&self) -> SocketAddr {
        match self {
            Self::HostCentric(server) => server.address(),
            Self::OnCpu(served) => served.1,
        }
    }
}

impl Servers {
    /// On the GPU, if there is one on which the service starts.
    fn start(stage: &Stage<'_>, service: &Service) -> Result<Self, DemoError> {
        let why_not = match &stage.options.gpu {
            Ok(gpu) => {
                let on_gpu = with_mqueues(stage, service.clone(), MQUEUES_ON_GPU);
                let (kind, on_gpu) = gpu.place(on_gpu);
                match stage.serve_on(kind, on_gpu) {
                    Ok(serval) => return Self::beside_cpu(stage, gpu, serval, service),
                    Err(DemoError::Server(why)) => {
                        format!("GPU {} ({}): {why}", gpu.index, gpu.name)
                    }
                    Err(error) => return Err(error),
                }
            }
            Err(why) => why.clone(),
        };
        let service = with_mqueues(stage, service.clone(), MQUEUES);
        let core = stage.cores.map(|c| c.server);
        let other = HostCentric::start(&service, stage.options.workers, core)?;
        Ok(Self {
            serval: stage.serve(service)?,
            other: Other::HostCentric(other),
            gpu: Err(why_not),
        })
    }

    fn beside_cpu(
        stage: &Stage<'_>,
        gpu: &DemoGpu,
        serval: Served,
        service: &Service,
    ) -> Result<Self, DemoError> {
        let on_cpu = stage.serve(with_mqueues(stage, service.clone(), MQUEUES))?;
        Ok(Self { serval, other: Other::OnCpu(Box::new(on_cpu)), gpu: Ok(gpu.name.clone()) })
    }

    fn comparison(&self, stage: &Stage<'_>, stream: Stream) -> Comparison {
        let (_, udp, tcp) = self.serval;
        let workers = stage.options.workers;
        let other = self.other.udp();
        let Ok(gpu) = &self.gpu else {
            return Comparison::with_host_centric((udp, tcp), stream, other, workers);
        };
        let plural = if workers == 1 { "" } else { "s" };
        let about = format!(
            "Serval with {workers} worker{plural}, twice: its kernel on {gpu}, and the same source compiled for\n  \
             the CPU inside the worker{plural}."
        );
        Comparison { names: ["GPU", "CPU"], about, udp, tcp, stream, other }
    }

    /// One line about where the kernel runs.
    fn introduction(&self) -> String {
        match &self.gpu {
            Ok(gpu) => {
                let blocks = self.serval.0.topology().services[0].mqueues;
                format!("  The kernel runs on a GPU: {gpu}, {blocks} blocks.\n")
            }
            Err(why) => format!("  The kernel runs on the engine's core. No GPU is used: {why}.\n"),
        }
    }

    /// Stops a server whose counters are not checked.
    fn shutdown(self) -> Result<(), DemoError> {
        let mut servers: Vec<Server> = vec![self.serval.0];
        if let Other::OnCpu(served) = self.other {
            servers.push(served.0);
        }
        if servers.into_iter().all(|server| server.shutdown().is_clean()) {
            return Ok(());
        }
        Err(DemoError::Wrong("the server did not end cleanly".to_owned()))
    }
}

fn with_mqueues(stage: &Stage<'_>, mut service: Service, usual: u32) -> Service {
    service.mqueues = stage.options.mqueues.unwrap_or(usual);
    service
}

pub(super) fn run(stage: &Stage<'_>) -> Result<Report, DemoError> {
    let digits = Digit::held_out();
    let mut service = Service::new("digits", Vec::new(), "lenet");
    service.framing = Framing::Fixed(Digits::PICTURE_BYTES as u32);
    let servers = Servers::start(stage, &service)?;
    let (_, udp, tcp) = servers.serval;
    let stream = Stream {
        connections: 4,
        framing: Framing::Fixed(Digits::PICTURE_BYTES as u32),
        reply_framing: Framing::Fixed(Digits::REPLY_BYTES as u32),
    };

    let load = Load {
        window: 8,
        requests: digits.len() as u64,
        // Every request must be answered, even if the core is busy for a while.
        timeout: Duration::from_secs(10),
        cancel: stage.options.cancel.clone(),
        ..Load::default()
    };
    let bar = stage.progress("reading held-out digits", 3);
    let read = |what: &str, over_tcp: bool, address| {
        let mut reading = Digits::new(&digits, None);
        let mut spoiled = stage.spoiled(&mut reading);
        let outcome = if over_tcp {
            client::tcp(address, &stream, &load, &mut spoiled)?
        } else {
            client::udp(address, &load, &mut spoiled)?
        };
        stage.check_interrupted()?;
        check_complete(what, &outcome)?;
        bar.inc(1);
        Ok::<_, DemoError>(reading)
    };
    let over_udp = read("digits over UDP", false, udp)?;
    let over_tcp = read("digits over TCP", true, tcp)?;
    let by_other = read("digits of the other server", false, servers.other.udp())?;
    bar.finish_and_clear();
    let right = [over_udp.right(), over_tcp.right()];
    check(&over_udp, &over_tcp, &by_other)?;

    let comparison = servers.comparison(stage, stream);
    let answers = over_udp.answers();
    let verdict = stage.compare(&comparison, || Box::new(Digits::new(&digits, Some(answers))))?;

    let screen = &stage.options.screen;
    let mut text = format!("{}\n", screen.paint(Tone::Bold, "LeNet-5 behind a port"));
    let _ = writeln!(text, "{}", servers.introduction());
    for (name, right) in ["UDP", "TCP"].into_iter().zip(right) {
        let share = 100.0 * right as f64 / digits.len() as f64;
        let _ = writeln!(
            text,
            "  {name}: {right} of {} held-out digits right ({share:.1} %)",
            digits.len()
        );
    }
    let _ = writeln!(text, "  {} gave the same answers.", verdict.other_name());
    let _ = writeln!(text, "\n{}\n{}", verdict.table(screen), stage.caption(&verdict));
    let _ = writeln!(text, "  {}", accounts(&servers.serval.0));
    let json = json!({
        "demo": "lenet", "digits": digits.len(), "right_udp": right[0], "right_tcp": right[1],
        "gpu": servers.gpu.as_ref().ok(), "no_gpu_because": servers.gpu.as_ref().err(),
        "comparison": verdict.json(),
    });
    let whereabouts = servers.gpu.as_deref().unwrap_or("the engine's core");
    let title = format!("LeNet-5 on {whereabouts}: latency of a digit");
    let chart = verdict.chart(&title, stage);
    servers.shutdown()?;
    Ok(Report { text, json, chart: Some(chart), failure: None })
}

/// Checks that both transports and both servers give the same answers, with enough correct ones.
fn check(
    over_udp: &Digits<'_>,
    over_tcp: &Digits<'_>,
    by_other: &Digits<'_>,
) -> Result<(), DemoError> {
    if over_udp.answers() != over_tcp.answers() {
        return Err(DemoError::Wrong(
            "UDP and TCP gave different answers to the same digits".into(),
        ));
    }
    if over_udp.answers() != by_other.answers() {
        return Err(DemoError::Wrong(
            "the two servers gave different answers to the same digits".into(),
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
    use bench::client::Workload as _;

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
        assert!(check(&good, &answered(&|label| label), &good).is_ok());
        let refused = |udp: &Digits<'_>, tcp: &Digits<'_>, other: &Digits<'_>| {
            check(udp, tcp, other).unwrap_err().to_string()
        };
        assert!(refused(&poor, &answered(&|_| 3), &poor).contains("only 10.0 %"));
        assert!(refused(&good, &poor, &good).contains("UDP and TCP gave different answers"));
        assert!(refused(&good, &good, &poor).contains("two servers gave different answers"));
    }
}
