//! Failing starts: on one worker while another one starts, and their error messages.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use engine::accelerator::{Blocks, StartError};
use engine::metrics::ServiceMetrics;
use engine::topology::{
    Accelerator, AcceleratorKind, CpuPlacement, EngineSettings, Limits, Listen, STACK_KIB, Service,
    Topology,
};
use engine::{Attachment, ServiceInstall};
use onpath::Spec;
use wire::nic::{NicError, Transport};

use super::*;
use crate::change::install::{Occasion, install};
use crate::functions::{Place, RegisterAction, Target};

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
    let error = install(
        &server.engine,
        &mut server.workers,
        &service,
        installs,
        Occasion::Start,
        &mut late,
    );
    let error = error.unwrap_err();
    assert!(matches!(error, ChangeError::Start(ServerError::Panicked)), "{error}");
}

/// While it is set, the worker of [`Stuck`] blocks does not return from them.
static HOLD: AtomicBool = AtomicBool::new(false);
/// It is inside of them.
static HELD: AtomicBool = AtomicBool::new(false);

/// Blocks that do not return.
struct Stuck;

impl Blocks for Stuck {
    fn start(&mut self) -> Result<(), StartError> {
        Ok(())
    }

    fn drive(&mut self, _: u64, _: &[u32], _: &mut Vec<u32>) {
        while HOLD.load(Ordering::Relaxed) {
            HELD.store(true, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn wake_at(&self) -> u64 {
        0
    }

    fn ended(&mut self, _: &mut Vec<(u32, u64)>) {}
}

/// A server with a service, whose worker is inside of blocks while [`HOLD`] is set.
fn with_stuck_worker() -> Server {
    let listen = Listen { transport: Transport::Udp, address: ([127, 0, 0, 1], 0).into() };
    let kind = AcceleratorKind::Cpu { placement: CpuPlacement::Worker, stack_kib: STACK_KIB };
    let mut server = Server::start(Topology {
        engine: EngineSettings { workers: 1, ..EngineSettings::default() },
        limits: Limits::default(),
        accelerators: vec![Accelerator { name: "acc0".into(), kind }],
        tenants: Vec::new(),
        services: vec![Service::new("a", vec![listen], "echo")],
    })
    .unwrap();
    let service = Service::new("b", Vec::new(), "echo");
    let counters = ServiceMetrics::new("b".into(), 1);
    let share = vec![Attachment { blocks: Box::new(Stuck), ends: Vec::new(), pool: None }];
    let installs = ServiceInstall::for_workers(1, &service, &counters, vec![share]);
    install(&server.engine, &mut server.workers, &service, installs, Occasion::Start, &mut || {
        false
    })
    .unwrap();
    server
}

#[test]
fn a_function_that_is_attached_to_a_stuck_worker_is_in_one_place() {
    let mut server = with_stuck_worker();
    let engine = Caller::engine();
    let spec = Spec::new("late", "passthrough");
    let id = server.functions.create(&server.engine, engine, &spec, None, false).unwrap();
    let places = |server: &Server| -> Vec<Option<String>> {
        let functions = server.functions.list(&server.engine, Caller::engine()).into_iter();
        functions.filter(|function| function.id == id).map(|function| function.service).collect()
    };
    assert_eq!(places(&server), [None]);
    HOLD.store(true, Ordering::Relaxed);
    let deadline = Instant::now() + Duration::from_secs(60);
    while !HELD.load(Ordering::Relaxed) {
        assert!(Instant::now() < deadline, "the worker takes no turn");
        std::thread::sleep(Duration::from_millis(1));
    }
    server.engine.timeouts.step = Duration::from_millis(200);
    let late = server
        .functions
        .attach_created(&server.engine, engine, id, "a", &Place::Default)
        .err()
        .unwrap();
    assert!(matches!(late, FunctionError::Stuck(_)), "{late}");
    let attached = Some("a".to_owned());
    assert_eq!(places(&server), std::slice::from_ref(&attached), "the worker attaches it later");
    let destroyed = server.functions.destroy(&server.engine, engine, id).unwrap_err().to_string();
    assert!(destroyed.contains("is attached to service \"a\": detach it first"), "{destroyed}");
    HOLD.store(false, Ordering::Relaxed);
    server.engine.timeouts.step = Duration::from_secs(30);
    let target = Target::Id(id);
    assert_eq!(
        server.functions.registers(&server.engine, engine, &target, &RegisterAction::Read).unwrap(),
        []
    );
    assert_eq!(places(&server), [attached]);
    server.functions.detach(&server.engine, engine, &target).unwrap();
    assert_eq!(places(&server), [None]);
    server.functions.destroy(&server.engine, engine, id).unwrap();
    assert_eq!(places(&server), []);
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
