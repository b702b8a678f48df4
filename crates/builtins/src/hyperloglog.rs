//! Estimates how many different items clients have sent: HyperLogLog on the requests of a service.
//!
//! An item is a range of bytes of a request, or each word of it (the operation of NICA and FpgaNIC on a stream). On a byte stream all items have
//! one length, and go on from one chunk to the next. Everything passes. The sketch of
//! each worker is a part of the whole: `estimate` is read from all of them, merged.

use crate::instances::Memory;
use crate::sketch::Instructions;
use crate::sketch::hyperloglog::{HyperLogLog, PRECISION_MAX, PRECISION_MIN, Settings};
use crate::sketch::stream_items::StreamItems;
use onpath::Messages;
use onpath::Spec;
use onpath::{Direction, Failure, Function, Merge, Register, RequestId};

/// The seed of FpgaNIC's HyperLogLog.
const SEED: u32 = 0xbaad_f00d;
const PRECISION: u8 = 14;

const REGISTERS: [(&str, Merge); 9] = [
    ("estimate", Merge::State),
    ("items", Merge::Sum),
    ("short", Merge::Sum),
    ("precision", Merge::Setting),
    ("hash_bits", Merge::Setting),
    ("item_bytes", Merge::Setting),
    ("offset", Merge::Setting),
    ("length", Merge::Setting),
    ("seed", Merge::Setting),
];
const AT_PRECISION: usize = 3;
const AT_HASH_BITS: usize = 4;
const AT_ITEM_BYTES: usize = 5;
const AT_OFFSET: usize = 6;
const AT_LENGTH: usize = 7;

/// See the module's text.
pub struct HyperLogLogFunction {
    sketch: HyperLogLog,
    streams: StreamItems,
    offset: usize,
    /// 0: up to the end.
    length: usize,
    items: u64,
    short: u64,
    registers: Vec<Register>,
}

impl HyperLogLogFunction {
    /// Its sketch.
    pub(crate) fn memory(spec: &Spec) -> Memory {
        let precision = spec.setting("precision", PRECISION.into());
        Memory::of_worker(1 << precision.min(PRECISION_MAX.into()))
    }
}

impl Default for HyperLogLogFunction {
    /// Each request is an item.
    fn default() -> Self {
        let settings = Settings { precision: PRECISION, wide: true, item_bytes: 0, seed: SEED };
        Self {
            sketch: HyperLogLog::new(settings, Instructions::best()),
            streams: StreamItems::default(),
            offset: 0,
            length: 0,
            items: 0,
            short: 0,
            registers: Register::list(&REGISTERS),
        }
    }
}

impl HyperLogLogFunction {
    fn add(&mut self, request: &[u8]) {
        let range = crate::instances::range(request, self.offset, self.length);
        let Some(bytes) = range else {
            self.short += 1;
            return;
        };
        match self.sketch.settings().item_bytes {
            0 => {
                self.sketch.add(bytes);
                self.items += 1;
            }
            item_bytes => {
                self.sketch.add_words(bytes);
                self.items += (bytes.len() / usize::from(item_bytes)) as u64;
            }
        }
    }
}

impl HyperLogLogFunction {
    /// Adds a chunk of a byte stream.
    fn add_chunk(&mut self, request: &RequestId, chunk: &[u8]) {
        let Self { sketch, streams, items, .. } = self;
        let word = usize::from(sketch.settings().item_bytes);
        let item = if word > 0 { word } else { self.length };
        let skip = u32::try_from(self.offset).unwrap_or(u32::MAX);
        let split = streams.split(request, (skip, item), chunk, |bytes| {
            *items += (bytes.len() / item) as u64;
            match word {
                0 => bytes.chunks_exact(item).for_each(|item| sketch.add(item)),
                _ => sketch.add_words(bytes),
            }
        });
        self.short += u64::from(!split);
    }
}

impl Function for HyperLogLogFunction {
    fn decide(&mut self, direction: Direction, messages: &mut Messages) -> Result<(), Failure> {
        if direction == Direction::Requests {
            let chunks = messages.are_chunks();
            for index in 0..messages.len() {
                if messages.is_open(index) {
                    match chunks {
                        true => self.add_chunk(messages.request(index), messages.bytes(index)),
                        false => self.add(messages.bytes(index)),
                    }
                }
            }
        }
        Ok(())
    }

    fn registers(&self) -> &[Register] {
        &self.registers
    }

    fn read(&mut self) -> Result<Vec<u64>, Failure> {
        let Settings { precision, wide, item_bytes, seed } = self.sketch.settings();
        let hash_bits = if wide { 64 } else { 32 };
        let estimate = self.sketch.estimate().round() as u64;
        let (offset, length) = (self.offset as u64, self.length as u64);
        let settings = [u64::from(precision), hash_bits, item_bytes.into(), offset, length];
        Ok([&[estimate, self.items, self.short], &settings[..], &[seed.into()]].concat())
    }

    fn state(&mut self) -> Result<Vec<u8>, Failure> {
        Ok(self.sketch.state())
    }

    fn merge(&mut self, state: &[u8]) -> Result<(), Failure> {
        self.sketch.merge(state).map_err(|why| Failure(why.to_string()))
    }

    fn reset(&mut self) -> Result<(), Failure> {
        self.sketch.clear();
        (self.items, self.short) = (0, 0);
        Ok(())
    }

    /// A sketch of other items begins, if the value is another one.
    fn write(&mut self, register: usize, value: u64) -> Result<(), Failure> {
        if self.read()?[register] == value {
            return Ok(());
        }
        let mut settings = self.sketch.settings();
        match register {
            AT_PRECISION => {
                let precisions = u64::from(PRECISION_MIN)..=u64::from(PRECISION_MAX);
                if !precisions.contains(&value) {
                    let why = format!("precision is from {PRECISION_MIN} to {PRECISION_MAX}");
                    return Err(Failure(why));
                }
                settings.precision = value as u8;
            }
            AT_HASH_BITS => match value {
                32 | 64 => settings.wide = value == 64,
                _ => return Err(Failure("hash_bits is 32 or 64".to_owned())),
            },
            AT_ITEM_BYTES => match value {
                0 | 4 | 8 => settings.item_bytes = value as u8,
                _ => return Err(Failure("item_bytes is 0, 4 or 8".to_owned())),
            },
            _ => {
                let name = REGISTERS[register].0;
                let Ok(value) = u32::try_from(value) else {
                    return Err(Failure(format!("{name} is at most {}", u32::MAX)));
                };
                match register {
                    AT_OFFSET => self.offset = value as usize,
                    AT_LENGTH => self.length = value as usize,
                    _ => settings.seed = value,
                }
            }
        }
        self.sketch = HyperLogLog::new(settings, Instructions::best());
        self.streams.clear();
        (self.items, self.short) = (0, 0);
        Ok(())
    }
}
