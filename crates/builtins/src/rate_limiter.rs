//! Drops requests above a rate: of the service, of each client, or of each value of a range of bytes.
//!
//! The rule is the generic cell rate algorithm (ATM Forum, 1996), a token bucket in one word: the time at which the bucket would be full. All
//! workers share the buckets, so the rate is that of the whole service. A datagram's client is its address without the port, of IPv6 the first 64
//! bits, which identify a host; any other client is its connection.
//!
//! Buckets are in a table of fixed size. A bucket that is full again says nothing, so its place may be taken. If there is none near the place
//! of a new one, requests use one common bucket: a client that sends from many addresses gets the rate of one more client.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use wire::DropReason;
use wire::admission::host_of;
use wire::session::Origin;

use crate::instances::Memory;
use onpath::Messages;
use onpath::{Direction, Failure, Function, Merge, Register};
use onpath::{Param, Spec};

/// Buckets of a function, and how many places each can have.
const BUCKETS: usize = 1 << 16;
const NEAR: usize = 8;
const SECOND_NS: u64 = 1_000_000_000;
const RATE_MAX: u64 = SECOND_NS;
const BURST_MAX: u64 = 1 << 32;

const REGISTERS: [(&str, Merge); 8] = [
    ("passed", Merge::Sum),
    ("limited", Merge::Sum),
    ("crowded", Merge::Sum),
    ("short", Merge::Sum),
    ("rate", Merge::Setting),
    ("burst", Merge::Setting),
    ("offset", Merge::Setting),
    ("length", Merge::Setting),
];
const AT_RATE: usize = 4;
const AT_BURST: usize = 5;
const AT_OFFSET: usize = 6;

/// Whose requests a bucket counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Service,
    Client,
    Range,
}

/// A bucket: whose it is, and when it is full.
#[derive(Default)]
struct Bucket {
    /// A hash, never 0; 0: it has no owner.
    owner: AtomicU64,
    full_ns: AtomicU64,
}

/// The buckets of all workers.
struct Buckets {
    common: Bucket,
    table: OnceLock<Box<[Bucket]>>,
    hasher: RandomState,
}

/// The instances of one function: they share its buckets.
pub(crate) fn rate_limiters() -> crate::instances::Instances {
    let buckets = || {
        let (common, table) = (Bucket::default(), OnceLock::new());
        Arc::new(Buckets { common, table, hasher: RandomState::new() })
    };
    let shared = buckets();
    Arc::new(move || {
        let own = mutants::on("limit_each_worker");
        Box::new(RateLimiter::new(if own { buckets() } else { shared.clone() }))
    })
}

/// Buckets of clients or values, unless the service has one.
pub(crate) fn rate_limiter_memory(spec: &Spec) -> Memory {
    let by_service = spec
        .params
        .iter()
        .all(|(name, value)| name != "by" || matches!(value, Param::Text(by) if by == "service"));
    Memory::of_all(if by_service { 0 } else { (BUCKETS * size_of::<Bucket>()) as u64 })
}

/// See the module's text.
struct RateLimiter {
    by: By,
    rate: u64,
    burst: u64,
    offset: usize,
    length: usize,
    counted: Counted,
    buckets: Arc<Buckets>,
    registers: Vec<Register>,
}

#[derive(Clone, Copy, Default)]
struct Counted {
    passed: u64,
    limited: u64,
    crowded: u64,
    short: u64,
}

impl Bucket {
    /// Takes one message out of the bucket. False: there is none.
    fn take(&self, now_ns: u64, interval_ns: u64, tolerance_ns: u64) -> bool {
        // Each bucket is one word, and says nothing about other memory.
        let take = |full_ns: u64| {
            let full_ns = full_ns.max(now_ns);
            (full_ns - now_ns <= tolerance_ns).then(|| full_ns + interval_ns)
        };
        self.full_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }
}

impl Buckets {
    /// The bucket of an owner; `None`: there is no place for it.
    fn of(&self, owner: u64, now_ns: u64) -> Option<&Bucket> {
        let table = self.table.get()?;
        let first = (owner >> 32) as usize % BUCKETS / NEAR * NEAR;
        let near = &table[first..first + NEAR];
        if let Some(own) = near.iter().find(|b| b.owner.load(Ordering::Relaxed) == owner) {
            return Some(own);
        }
        near.iter().find(|bucket| {
            let before = bucket.owner.load(Ordering::Relaxed);
            bucket.full_ns.load(Ordering::Relaxed) <= now_ns
                && bucket
                    .owner
                    .compare_exchange(before, owner, Ordering::Relaxed, Ordering::Relaxed)
                    .is_ok()
        })
    }
}

impl RateLimiter {
    fn new(buckets: Arc<Buckets>) -> Self {
        Self {
            by: By::Service,
            rate: 1000,
            burst: 100,
            offset: 0,
            length: 0,
            counted: Counted::default(),
            buckets,
            registers: Register::list(&REGISTERS),
        }
    }

    fn owner(&self, messages: &Messages, index: usize) -> Option<u64> {
        let hasher = &self.buckets.hasher;
        let hash = match self.by {
            By::Service => return Some(0),
            By::Client => match &messages.request(index).origin {
                Origin::Datagram { peer, .. } if mutants::on("limit_each_address") => {
                    hasher.hash_one(peer.ip())
                }
                Origin::Datagram { peer, .. } => hasher.hash_one(host_of(peer.ip())),
                Origin::Client(client) => hasher.hash_one(client),
            },
            By::Range => hasher.hash_one(crate::instances::range(
                messages.bytes(index),
                self.offset,
                self.length,
            )?),
        };
        Some(hash.max(1))
    }

    fn request(&mut self, messages: &mut Messages, index: usize) {
        let Some(owner) = self.owner(messages, index) else {
            self.counted.short += 1;
            return messages.drop(index, DropReason::TooShort);
        };
        let now_ns = messages.now_ns();
        let own = if owner == 0 { None } else { self.buckets.of(owner, now_ns) };
        self.counted.crowded += u64::from(owner != 0 && own.is_none());
        let interval_ns = SECOND_NS / self.rate;
        let bucket = own.unwrap_or(&self.buckets.common);
        if bucket.take(now_ns, interval_ns, (self.burst - 1).saturating_mul(interval_ns)) {
            self.counted.passed += 1;
        } else {
            self.counted.limited += 1;
            messages.drop(index, DropReason::FunctionDrop);
        }
    }
}

impl Function for RateLimiter {
    fn decide(&mut self, direction: Direction, messages: &mut Messages) -> Result<(), Failure> {
        if direction == Direction::Requests {
            for index in 0..messages.len() {
                if messages.is_open(index) {
                    self.request(messages, index);
                }
            }
        }
        Ok(())
    }

    fn configure(&mut self, _: &str, value: &[u8]) -> Result<(), Failure> {
        self.by = match value {
            b"service" => By::Service,
            b"client" => By::Client,
            b"range" => By::Range,
            _ => return Err(Failure("it is \"service\", \"client\" or \"range\"".to_owned())),
        };
        if self.by != By::Service {
            self.buckets.table.get_or_init(|| (0..BUCKETS).map(|_| Bucket::default()).collect());
        }
        Ok(())
    }

    fn registers(&self) -> &[Register] {
        &self.registers
    }

    fn read(&mut self) -> Result<Vec<u64>, Failure> {
        let Counted { passed, limited, crowded, short } = self.counted;
        let (offset, length) = (self.offset as u64, self.length as u64);
        Ok(vec![passed, limited, crowded, short, self.rate, self.burst, offset, length])
    }

    fn reset(&mut self) -> Result<(), Failure> {
        self.counted = Counted::default();
        Ok(())
    }

    fn write(&mut self, register: usize, value: u64) -> Result<(), Failure> {
        let range = match register {
            AT_RATE => 1..=RATE_MAX,
            AT_BURST => 1..=BURST_MAX,
            _ => 0..=u32::MAX.into(),
        };
        if !range.contains(&value) {
            let (name, least, most) = (REGISTERS[register].0, range.start(), range.end());
            return Err(Failure(format!("{name} is from {least} to {most}")));
        }
        match register {
            AT_RATE => self.rate = value,
            AT_BURST => self.burst = value,
            AT_OFFSET => self.offset = value as usize,
            _ => self.length = value as usize,
        }
        Ok(())
    }
}
