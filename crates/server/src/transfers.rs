//! Transfers that kernels ask for: they are done by the threads of a transfer engine, never by a worker.
//!
//! A worker passes a checked order on and goes on: a thread of this module, the *submitter*, makes a command of it and submits it, because
//! a submission takes locks and calls the host kernel. Each peer to which transfers connect has a submitter of its own, so one that does not
//! answer delays no other transfer. The engine's threads put the result into a queue of the block, which its worker looks at. Both queues
//! are bounded and have room for all that can be in flight. Handing over an order wakes a submitter that sleeps: for that the worker takes the
//! lock of the queue's waiters, which is held for no longer than that, and calls the host kernel once.
//!
//! When a block ends, its [`Executor`] is dropped, and what it had in flight is cancelled.

mod files;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use engine::BlockEnds;
use engine::topology::{Backend, Service, Tenant};
use engine::transfers::{self, TransferOrder, TransferPlace, refused};
use mqueue::abi::{TransferDone, transfer_stage, transfer_status as status};
use sys::SharedMemory;
use transfer::TransferHandle;
use transfer::{
    Account, Cipher, Command, DigestKind, Engine, ExpandLimits, Format, Outcome, Place, StageSpec,
    TransferError,
};
use wire::nic::LentStream;

pub(crate) use self::files::read_key;
use self::files::{OpenFile, OpenFiles, PeerError};
use crate::base::error::ServerError;

/// Most orders that wait for a submitter; further ones are answered as `EXHAUSTED`.
const ORDERS_MAX: usize = 4096;

/// The engine that does transfers of kernels: started when the first service asks for it.
#[derive(Default)]
pub(crate) struct Transfers {
    engine: Option<Arc<Engine>>,
}

impl Transfers {
    /// With an engine that exists already, if there is one.
    pub(crate) fn new(engine: Option<Arc<Engine>>) -> Self {
        Self { engine }
    }

    /// What does the transfers of a service's kernels, if they ask for any.
    pub(crate) fn of(
        &mut self,
        service: &Service,
    ) -> Result<Option<Arc<ServiceTransfers>>, ServerError> {
        if !service.backends.iter().any(Backend::does_transfers) {
            return Ok(None);
        }
        if self.engine.is_none() {
            let started = Engine::start(transfer::Limits::default());
            self.engine = Some(Arc::new(started.map_err(ServerError::no_thread("transfer"))?));
        }
        let engine = self.engine.as_ref().expect("it is started above");
        ServiceTransfers::start(service, engine).map(Some)
    }

    /// The counters of transfers of kernels, if one was ever asked for.
    pub(crate) fn counters(&self) -> Option<Arc<transfer::Counters>> {
        self.engine.as_ref().map(|engine| engine.counters())
    }

    /// The tenants of now, with their weights and users.
    pub(crate) fn set_tenants(&self, tenants: &[Tenant]) {
        let Some(engine) = &self.engine else { return };
        let share = |tenant: &Tenant| transfer::TenantShare {
            name: tenant.name.clone(),
            weight: tenant.weight,
            users: tenant.users.clone(),
        };
        engine.set_tenants(tenants.iter().map(share).collect());
    }
}

/// The transfers of one version of a service.
pub(crate) struct ServiceTransfers {
    files: Arc<OpenFiles>,
    /// By submitter: the first one has those without a peer, the others those of one peer each.
    submitters: Vec<SyncSender<Message>>,
    backends: Vec<Backend>,
}

impl ServiceTransfers {
    /// Opens the files of a service and starts its submitters.
    pub(crate) fn start(service: &Service, engine: &Arc<Engine>) -> Result<Arc<Self>, ServerError> {
        let files = OpenFiles::open(&service.files);
        let files =
            files.map_err(|why| ServerError::File { service: service.name.clone(), why })?;
        let mut submitters = Vec::new();
        for _ in 0..=files.peers() {
            let (sender, orders) = sync_channel(ORDERS_MAX);
            let (engine, tenant) = (engine.clone(), service.tenant.clone());
            let builder = std::thread::Builder::new().name("serval-orders".into());
            let started = builder.spawn(move || carry(&engine, &tenant, &orders));
            started.map_err(ServerError::no_thread("orders"))?;
            submitters.push(sender);
        }
        let (files, backends) = (Arc::new(files), service.backends.clone());
        Ok(Arc::new(Self { files, submitters, backends }))
    }

    /// Gives each client mqueue that is for transfers its executor.
    pub(crate) fn equip(&self, ends: &mut BlockEnds, memory: &Arc<SharedMemory>) {
        for (backend, ends) in self.backends.iter().zip(&mut ends.clients) {
            if !backend.does_transfers() {
                continue;
            }
            let room = backend.in_flight as usize;
            let (answers, done) = sync_channel(room);
            let block = Arc::new(BlockTransfers {
                files: self.files.clone(),
                memory: memory.clone(),
                staging: ends.staging.0,
                limit: Duration::from_millis(backend.timeout_ms),
                answers,
                is_gone: AtomicBool::new(false),
                in_flight: Mutex::default(),
            });
            let submitters = self.submitters.clone();
            ends.transfers = Some(Box::new(Executor { block, submitters, done }));
        }
    }
}

/// What goes to a submitter.
enum Message {
    Start(Arc<BlockTransfers>, Start),
    /// The block is gone.
    Cancel(Arc<BlockTransfers>),
}

/// A transfer to be started.
struct Start {
    number: u64,
    order: TransferOrder,
    /// Its sink, if that is a socket of the block.
    socket: Option<LentStream>,
    /// When it was asked for: its limit counts from then on.
    asked: Instant,
}

/// The transfers of one block of one generation.
struct BlockTransfers {
    files: Arc<OpenFiles>,
    memory: Arc<SharedMemory>,
    /// Where its memory begins in the region.
    staging: u64,
    limit: Duration,
    answers: SyncSender<(u64, TransferDone)>,
    is_gone: AtomicBool,
    /// By number. Never locked by a worker.
    in_flight: Mutex<HashMap<u64, Option<TransferHandle>>>,
}

/// The worker's side.
struct Executor {
    block: Arc<BlockTransfers>,
    submitters: Vec<SyncSender<Message>>,
    done: Receiver<(u64, TransferDone)>,
}

impl transfers::Transfers for Executor {
    fn start(&mut self, number: u64, order: &TransferOrder, socket: Option<LentStream>) -> bool {
        let submitter = self.block.files.submitter(order);
        let start = Start { number, order: *order, socket, asked: Instant::now() };
        let message = Message::Start(self.block.clone(), start);
        self.submitters[submitter].try_send(message).is_ok()
    }

    fn next(&mut self) -> Option<(u64, TransferDone)> {
        self.done.try_recv().ok()
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        self.block.is_gone.store(true, Ordering::Release);
        for submitter in &self.submitters {
            // A submitter whose queue is full takes the orders of this block, and sees that it is gone; those in flight end by their limits.
            let _ = submitter.try_send(Message::Cancel(self.block.clone()));
        }
    }
}

/// The loop of a submitter. It ends when the service and its blocks are gone.
fn carry(engine: &Engine, tenant: &str, orders: &Receiver<Message>) {
    while let Ok(message) = orders.recv() {
        match message {
            // Its weight may have changed.
            Message::Start(block, start) => block.start(engine, &engine.tenant(tenant), start),
            Message::Cancel(block) => block.cancel(),
        }
    }
}

impl BlockTransfers {
    fn in_flight(&self) -> MutexGuard<'_, HashMap<u64, Option<TransferHandle>>> {
        self.in_flight.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(self: &Arc<Self>, engine: &Engine, tenant: &Account, start: Start) {
        if self.is_gone.load(Ordering::Acquire) {
            return;
        }
        let number = start.number;
        let command = match self.command(start) {
            Ok(command) => command,
            Err(status) => return self.answer(number, refused(status)),
        };
        self.in_flight().insert(number, None);
        let block = self.clone();
        let submitted = engine.submit_for(tenant, command, move |outcome| {
            block.in_flight().remove(&number);
            block.answer(number, done(&outcome));
        });
        match submitted {
            Ok(submitted) => {
                if let Some(entry) = self.in_flight().get_mut(&number) {
                    *entry = Some(submitted);
                }
                if self.is_gone.load(Ordering::Acquire) {
                    self.cancel();
                }
            }
            Err(error) => {
                self.in_flight().remove(&number);
                self.answer(number, refused(status_of(&error)));
            }
        }
    }

    fn cancel(&self) {
        let submitted: Vec<_> = self.in_flight().values().flatten().cloned().collect();
        submitted.iter().for_each(TransferHandle::cancel);
    }

    /// There is room for it: a block has no more in flight. Nothing waits for it if the block is gone.
    fn answer(&self, number: u64, done: TransferDone) {
        let _ = self.answers.try_send((number, done));
    }

    /// What is left of the limit of an order, if anything: it may have waited behind others whose peer does not answer.
    fn left(&self, asked: Instant) -> Result<Duration, u32> {
        let left = self.limit.checked_sub(asked.elapsed());
        left.filter(|left| !left.is_zero()).ok_or(status::TIMEOUT)
    }

    fn command(&self, start: Start) -> Result<Command, u32> {
        let Start { order, socket, asked, .. } = start;
        let stages = self.stages(&order)?;
        let place = |at| self.place(at, self.left(asked)?);
        let source = place(order.source)?;
        let sink = match socket {
            Some(socket) => {
                let socket = socket.downcast::<OwnedFd>().map_err(|_| status::NOT_ALLOWED)?;
                Place::Socket(*socket)
            }
            None => place(order.sink)?,
        };
        let left = self.left(asked)?;
        let command = Command::new(source, order.bytes, stages, sink);
        Ok(command.stall(left).deadline(left))
    }

    fn place(&self, at: TransferPlace, left: Duration) -> Result<Place, u32> {
        let clone = |file: std::io::Result<OwnedFd>| file.map_err(|_| status::EXHAUSTED);
        match at {
            TransferPlace::Socket { .. } => Err(status::NOT_ALLOWED),
            TransferPlace::Memory { offset } => {
                let memory = clone(self.memory.fd().try_clone_to_owned())?;
                Ok(Place::File(memory, self.staging + offset))
            }
            TransferPlace::File { file, offset } => match self.files.of(file) {
                OpenFile::File(file) => {
                    Ok(Place::File(clone(file.try_clone().map(OwnedFd::from))?, offset))
                }
                OpenFile::Peer(..) => Err(status::NOT_ALLOWED),
            },
            TransferPlace::Connection { file } => match self.files.of(file) {
                OpenFile::Peer(_, peer) => match peer.connect(left, &self.is_gone) {
                    Ok(socket) => Ok(Place::Socket(socket)),
                    Err(PeerError::Refused) => Err(status::REFUSED),
                    Err(PeerError::TimedOut) => Err(status::TIMEOUT),
                },
                OpenFile::File(_) => Err(status::NOT_ALLOWED),
            },
        }
    }

    fn stages(&self, order: &TransferOrder) -> Result<Vec<StageSpec>, u32> {
        let has = |stage: u8| order.stages & stage != 0;
        let key = |at: TransferPlace| self.files.key(at).ok_or(status::NOT_ALLOWED);
        let mut stages = Vec::new();
        if has(transfer_stage::OPEN) {
            stages.push(StageSpec::Open(Cipher::Aes256Gcm, key(order.source)?));
        }
        let limits = ExpandLimits::default();
        let limits = ExpandLimits { bytes: limits.bytes.min(order.most), ..limits };
        if has(transfer_stage::EXPAND_GZIP) {
            stages.push(StageSpec::Expand(Format::Gzip, limits));
        }
        if has(transfer_stage::EXPAND_ZSTD) {
            stages.push(StageSpec::Expand(Format::Zstd, limits));
        }
        stages.extend(DigestKind::numbered(order.digest).map(StageSpec::Digest));
        if has(transfer_stage::COMPRESS_GZIP) {
            stages.push(StageSpec::Compress(Format::Gzip.into()));
        }
        if has(transfer_stage::COMPRESS_ZSTD) {
            stages.push(StageSpec::Compress(Format::Zstd.into()));
        }
        if has(transfer_stage::SEAL) {
            stages.push(StageSpec::Seal(Cipher::Aes256Gcm, key(order.sink)?));
        }
        Ok(stages)
    }
}

/// The answer to a block.
fn done(outcome: &Outcome) -> TransferDone {
    let mut done = refused(outcome.result.as_ref().map_or_else(status_of, |()| status::OK));
    (done.read, done.written) = (outcome.report.read, outcome.report.written);
    if let Some(digest) = outcome.report.digest() {
        done.digest_bytes = digest.bytes().len() as u32;
        done.digest[..digest.bytes().len()].copy_from_slice(digest.bytes());
    }
    done
}

fn status_of(error: &TransferError) -> u32 {
    use TransferError as E;
    match error {
        E::Stalled(_) | E::FileStalled(_) | E::Deadline(_) => status::TIMEOUT,
        E::Reset | E::Closed => status::CLOSED,
        E::FileEnded { .. } => status::FILE_ENDED,
        E::DiskFull | E::FileTooLong => status::DISK_FULL,
        E::SameFile | E::Order(_) => status::BAD_COMMAND,
        E::NotSealed
        | E::NotVerified(_)
        | E::CutOff
        | E::Corrupt(_)
        | E::EmptyMembers(_)
        | E::Truncated(_)
        | E::ExpandsTooMuch(_) => status::CORRUPT,
        E::Range => status::RANGE,
        E::TooMany(_) | E::TooMuchMemory { .. } | E::Busy => status::EXHAUSTED,
        other => {
            // A kernel can make any number of them.
            tracing::debug!("a transfer of a kernel failed: {other}");
            status::FAILED
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::net::TcpListener;

    use engine::topology::FileSpec;

    use super::*;

    #[test]
    fn the_limit_of_an_order_counts_from_when_it_was_asked_for() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let peer = FileSpec::connection(listener.local_addr().unwrap());
        let memory = SharedMemory::create("serval:test", 4096, &sys::RegionOptions::default());
        let limit = Duration::from_secs(600);
        let block = BlockTransfers {
            files: Arc::new(OpenFiles::open(&[peer]).unwrap()),
            memory: Arc::new(memory.unwrap()),
            staging: 0,
            limit,
            answers: sync_channel(1).0,
            is_gone: AtomicBool::new(false),
            in_flight: Mutex::default(),
        };
        let order = TransferOrder {
            source: TransferPlace::Memory { offset: 0 },
            sink: TransferPlace::Connection { file: 0 },
            bytes: Some(1),
            most: u64::MAX,
            digest: 0,
            stages: 0,
        };
        // It waited in the queue for all of its time.
        let past = Instant::now().checked_sub(limit).expect("the clock is old enough");
        let start = |asked| Start { number: 1, order, socket: None, asked };
        assert_eq!(block.command(start(past)).err(), Some(status::TIMEOUT));
        let accepted = listener.accept().map(drop).map_err(|error| error.kind());
        assert_eq!(accepted, Err(ErrorKind::WouldBlock), "nothing connects for it");
        assert!(block.command(start(Instant::now())).is_ok());
        let half = Instant::now() - limit / 2;
        assert!(block.left(half).unwrap() <= limit / 2);
        // One of those that connected.
        listener.set_nonblocking(false).unwrap();
        listener.accept().unwrap();
    }
}
