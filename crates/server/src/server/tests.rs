//! Failing starts: on one worker while another one starts, and their error messages.

use std::time::{Duration, Instant};

use engine::accelerator::{Blocks, StartError};
use engine::metrics::ServiceMetrics;
use engine::topology::{
    Accelerator, AcceleratorKind, CpuPlacement, EngineSettings, Limits, STACK_KIB, Service,
};
use engine::{Attachment, ServiceInstall};
use wire::nic::{NicError, Transport};

use super::change::Occasion;
use super::*;

/// Blocks that do nothing, once they have started.
struct Start(fn());

impl Blocks for Start {
    fn start(&mut self) -> Result<(), StartError> {
        self.0();
        Ok(())
    }

    fn drive(&mut self, _: u64, _: &[u32], _: &mut Vec<u32>) {}

    fn wake_at(&self) -> u64 {
        u64::MAX
    }

    fn ended(&mut self, _: &mut Vec<(u32, u64)>) {}
}

#[test]
fn a_worker_that_panics_while_it_starts_is_noticed_beside_one_that_runs() {
    let listen = Listen { transport: Transport::Udp, address: ([127, 0, 0, 1], 0).into() };
    let kind = AcceleratorKind::Cpu { placement: CpuPlacement::Worker, stack_kib: STACK_KIB };
    let mut server = Server::start(Topology {
        engine: EngineSettings { workers: 2, ..EngineSettings::default() },
        limits: Limits::default(),
        accelerators: vec![Accelerator { name: "acc0".into(), kind }],
        services: vec![Service::new("a", vec![listen], "echo")],
        tenants: Vec::new(),
    })
    .unwrap();
    // Another service is installed as at a start, with blocks of this test.
    let starts: [fn(); 2] = [|| (), || panic!("this panic is part of a test")];
    let share =
        |start| vec![Attachment { blocks: Box::new(Start(start)), ends: Vec::new(), pool: None }];
    let service = Service::new("b", Vec::new(), "echo");
    let counters = ServiceMetrics::new("b".into(), 2);
    let installs = ServiceInstall::for_workers(1, &service, &counters, starts.map(share).into());
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut late = || Instant::now() > deadline;
    let error = server.install(&service, installs, Occasion::Start, &mut late);
    let error = error.unwrap_err();
    assert!(matches!(error, ChangeError::Start(ServerError::Panicked)), "{error}");
}

#[test]
fn a_failed_install_is_reported_with_the_service_the_cause_and_the_fix() {
    let service = Service::new("digits", Vec::new(), "echo");
    let said = |error: StartError| ServerError::of_blocks(&service, error).to_string();
    let text = said(NicError::Exhausted.into());
    assert!(text.starts_with("service \"digits\": a worker cannot install it: no free"), "{text}");
    assert!(text.contains("ulimit -n"), "{text}");
    let text = said(NicError::Refused("Cannot allocate memory".into()).into());
    assert!(
        text.contains("\"digits\"") && text.contains("(Cannot allocate memory): free"),
        "{text}"
    );
    let source = std::io::Error::from(std::io::ErrorKind::WouldBlock);
    let text = ServerError::no_thread("heartbeat")(source).to_string();
    assert!(text.contains("serval-heartbeat") && text.contains("ulimit -u"), "{text}");
}
