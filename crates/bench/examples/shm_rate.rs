//! Speed of a shared-memory port: rate with a full window, latency with a window of one.
//!
//! `cargo run --release --example shm_rate -- [SECONDS [MQUEUES [WINDOW]]]`: the engine with its echo blocks on core
//! 0, the client on core 1. The client checks every reply's tag and first word. Besides the rate of the whole run it
//! prints that of the fastest slices of a millisecond (the 95th percentile and the best): on a shared machine these
//! are the slices in which both sides had their cores.

use std::time::Duration;

use bench::client::shm::{Client, Options};
use engine::topology::{
    Accelerator, AcceleratorKind, CpuPlacement, EngineSettings, Limits, Polling, STACK_KIB,
    Service, Topology,
};
use server::Server;

const BYTES: usize = 64;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let seconds = arguments.next().map_or(Ok(0.5), |text| text.parse::<f64>())?;
    let span = Duration::from_secs_f64(seconds);
    let mqueues = arguments.next().map(|text| text.parse().map(|n| vec![n])).transpose()?;
    let windows = arguments.next().map(|text| text.parse().map(|n| vec![n])).transpose()?;
    sys::affinity::pin_current_thread(1)?;
    for mqueues in mqueues.unwrap_or(vec![1, 28, 240]) {
        let path = std::env::temp_dir().join(format!("serval-shm-rate-{}", std::process::id()));
        let mut service = Service::new("echo", Vec::new(), "echo");
        service.memory_ports = vec![path.clone()];
        service.mqueues = mqueues;
        service.slots = if mqueues == 1 { 1024 } else { 64 };
        service.max_message_bytes = BYTES as u32;
        service.max_reply_bytes = BYTES as u32;
        let kind = AcceleratorKind::Cpu { placement: CpuPlacement::Worker, stack_kib: STACK_KIB };
        let server = Server::start(Topology {
            engine: EngineSettings {
                cores: vec![0],
                polling: Polling::Spin,
                ..EngineSettings::default()
            },
            limits: Limits::default(),
            accelerators: vec![Accelerator { name: "acc0".into(), kind }],
            services: vec![service],
            tenants: Vec::new(),
        })?;
        let options = Options { depth: 1024, ..Options::default() };
        let mut client = Client::connect(&path, &options)?;
        for window in windows.clone().unwrap_or(vec![1, 16, 64, 256, 512]) {
            let found = run(&mut client, window, span)?;
            println!("{mqueues:4} mqueues, window {window:4}: {found}");
        }
        drop(client);
        assert!(server.shutdown().is_clean());
    }
    Ok(())
}

/// Runs a closed loop; returns the results as a line.
fn run(
    client: &mut Client,
    window: usize,
    span: Duration,
) -> Result<String, Box<dyn std::error::Error>> {
    const SLICE_NS: u64 = 1_000_000;
    let began_ns = sys::time::monotonic_ns();
    let (mut sent, mut received) = (0_u64, 0_u64);
    let mut message = [0x5a; BYTES];
    let mut reply = [0; BYTES];
    let mut latency = hdrhistogram::Histogram::<u64>::new(3)?;
    let mut slices = hdrhistogram::Histogram::<u64>::new(3)?;
    let (mut slice_ns, mut slice_received) = (began_ns, 0);
    let mut sent_ns = 0;
    let mut open = true;
    while open || received < sent {
        let now_ns = sys::time::monotonic_ns();
        open = now_ns - began_ns < span.as_nanos() as u64;
        if now_ns - slice_ns >= SLICE_NS {
            slices.record((received - slice_received) * SLICE_NS / (now_ns - slice_ns))?;
            (slice_ns, slice_received) = (now_ns, received);
        }
        while open && sent - received < window as u64 {
            message[..8].copy_from_slice(&sent.to_le_bytes());
            client.try_send(sent, &message)?;
            sent += 1;
            sent_ns = now_ns;
        }
        client.publish();
        let before = received;
        while let Some(answer) = client.try_receive(&mut reply)? {
            assert_eq!(reply[..8], answer.tag.to_le_bytes());
            assert!(answer.lost.is_none());
            received += 1;
        }
        // Only if one request is one latency: replies may come in any order.
        if window == 1 && received > before {
            latency.record(sys::time::monotonic_ns() - sent_ns)?;
        }
    }
    let elapsed_ns = sys::time::monotonic_ns() - began_ns;
    // Replies per millisecond are thousands per second.
    let slice = |quantile| slices.value_at_quantile(quantile) as f64 / 1e3;
    let rate = received as f64 * 1e3 / elapsed_ns as f64;
    let mut line = format!("{rate:6.2} M/s, slices {:6.2} {:6.2} M/s", slice(0.95), slice(1.0));
    if window == 1 {
        let us = |quantile| latency.value_at_quantile(quantile) as f64 / 1e3;
        line += &format!(", round trip p10 {:.2} p50 {:.2} us", us(0.1), us(0.5));
    }
    Ok(line)
}
