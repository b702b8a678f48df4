//! Faulty engines: their offers to a runtime that attaches, and the errors it should report.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;
use std::thread;

use engine::topology::{AcceleratorKind, DeviceSpec, Launch, Service};
use mqueue::{MappedMemory, Region, RegionPlan};
use sys::local::{LocalListener, LocalSocket};
use sys::readiness::{WakeFd, WakeSender};
use sys::{RegionOptions, SharedMemory};
use wire::attach::{FromEngine, MAGIC, Offer, ParamValue, VERSION};

use super::eventually;

/// Valid and invalid offers.
pub(crate) struct Offers {
    bytes: usize,
    pub(crate) good: Arc<SharedMemory>,
    /// A region of another generation than in the offer.
    later: Arc<SharedMemory>,
    /// Memory that is not a region.
    bare: SharedMemory,
    wake_fd: WakeFd,
    _pull: WakeSender,
}

/// A part of the expected error, the message, and its descriptors.
pub(crate) type Case<'a> = (&'static str, Vec<u8>, Vec<BorrowedFd<'a>>);

impl Offers {
    pub(crate) fn new() -> Self {
        let kind = AcceleratorKind::Process {
            launch: Launch::External { attach: "/unused".into() },
            heartbeat_ms: 1_000,
            device: DeviceSpec::host(),
        };
        let plan = |generation| RegionPlan {
            generation,
            ..Service::new("a", vec![], "echo").region_plan(0, &kind, 1, 1)
        };
        let bytes = plan(1).bytes().unwrap().next_multiple_of(4096) as usize;
        let create = || SharedMemory::create("serval-test", bytes, &RegionOptions::default());
        let region = |generation| {
            let memory = Arc::new(create().unwrap());
            Region::format(MappedMemory::new(memory.clone()), &plan(generation)).unwrap();
            memory
        };
        let (pull, wake_fd) = WakeSender::new().unwrap();
        let bare = create().unwrap();
        Self { bytes, good: region(1), later: region(2), bare, wake_fd, _pull: pull }
    }

    /// An offer of the first generation with this region size, 0 for the correct one.
    pub(crate) fn offer(&self, kernel: &str, region_bytes: usize) -> Vec<u8> {
        self.offer_with(kernel, region_bytes, Vec::new())
    }

    /// The same, with parameters for the kernel.
    pub(crate) fn offer_with(
        &self,
        kernel: &str,
        region_bytes: usize,
        params: Vec<(String, ParamValue)>,
    ) -> Vec<u8> {
        let region_bytes = if region_bytes == 0 { self.bytes } else { region_bytes };
        let offer = Offer {
            generation: 1,
            region_bytes: region_bytes as u64,
            blocks: 4,
            heartbeat_ms: 1000,
            service: "a".into(),
            accelerator: "acc0".into(),
            kernel: kernel.into(),
            params,
        };
        FromEngine::Offer(offer).encode()
    }

    /// What a good offer comes with.
    pub(crate) fn good(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.good.fd(), self.wake_fd.as_fd()]
    }

    pub(crate) fn cases(&self) -> Vec<Case<'_>> {
        let offer = || self.offer("echo", 0);
        let with = |region| vec![region, self.wake_fd.as_fd()];
        let mut newer = offer();
        newer[8] = VERSION as u8 + 1;
        vec![
            ("without the 2 descriptors", offer(), vec![]),
            ("without the 2 descriptors", offer(), vec![self.good.fd()]),
            ("not a region", offer(), with(self.wake_fd.as_fd())),
            ("over the limit", self.offer("echo", 4096), self.good()),
            ("not a Serval region", offer(), with(self.bare.fd())),
            ("of another life", offer(), with(self.later.fd())),
            ("use matching builds", newer, self.good()),
            ("attach protocol", MAGIC.to_le_bytes().to_vec(), vec![]),
            ("refuses: come later", FromEngine::Refuse("come later".into()).encode(), vec![]),
            ("stopping", FromEngine::Stop { drain_ms: 1 }.encode(), vec![]),
            ("the engine is gone", Vec::new(), vec![]),
        ]
    }
}

/// The connection of the runtime that comes next.
pub(crate) fn arrival(listener: &LocalListener) -> LocalSocket {
    let mut socket = None;
    eventually("the runtime comes", || {
        socket = listener.accept().unwrap();
        socket.is_some()
    });
    socket.unwrap()
}

/// What came of `attach`, a runtime that finds an engine that says this and nothing else; one that says nothing closes the
/// connection.
pub(crate) fn at_a_false_engine<T: Send>(
    listener: &LocalListener,
    message: &[u8],
    descriptors: &[BorrowedFd<'_>],
    attach: impl FnOnce() -> T + Send,
) -> T {
    thread::scope(|scope| {
        let runtime = scope.spawn(attach);
        let mut socket = Some(arrival(listener));
        if !message.is_empty() {
            socket.as_ref().unwrap().send(message, descriptors).unwrap();
        } else {
            drop(socket.take());
        }
        runtime.join().unwrap()
    })
}
