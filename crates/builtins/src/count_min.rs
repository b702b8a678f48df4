//! Counts how often each item occurs in the requests of a service, and lists the most frequent ones: a count-min sketch. Everything passes.
//!
//! `state` has the list and the counters; the registers show the counts of the first [`SHOWN`] of the list, and the first eight bytes of each as
//! a number.

use crate::instances::Memory;
use crate::sketch::count_min::{
    CountMin, DEPTH_MAX, Settings, TOP_BYTES, TOP_MAX, WIDTH_MAX, WIDTH_MIN,
};
use crate::sketch::stream_items::StreamItems;
use onpath::Messages;
use onpath::Spec;
use onpath::{Direction, Failure, Function, Merge, Register};

/// Items of the list that registers show.
const SHOWN: usize = 8;

const AT_WIDTH: usize = 2;
const AT_DEPTH: usize = 3;
const AT_TOP: usize = 4;
const AT_OFFSET: usize = 5;
const AT_LENGTH: usize = 6;
const AT_SEED: usize = 7;
const AT_SHOWN: usize = 8;

const REGISTERS: [(&str, Merge); AT_SHOWN] = [
    ("items", Merge::Sum),
    ("short", Merge::Sum),
    ("width", Merge::Setting),
    ("depth", Merge::Setting),
    ("top", Merge::Setting),
    ("offset", Merge::Setting),
    ("length", Merge::Setting),
    ("seed", Merge::Setting),
];

/// See the module's text.
pub struct CountMinFunction {
    sketch: CountMin,
    streams: StreamItems,
    offset: usize,
    /// 0: up to the end.
    length: usize,
    items: u64,
    short: u64,
    registers: Vec<Register>,
}

/// The sketch at first.
const FIRST: Settings = Settings { width: 1 << 12, depth: 4, top: 32, seed: 0 };

impl CountMinFunction {
    /// Its sketch. A register that is written makes another one while the former is there.
    pub(crate) fn memory(spec: &Spec) -> Memory {
        let setting = |name, default: u32| spec.setting(name, default.into());
        let counters = setting("width", FIRST.width).saturating_mul(setting("depth", FIRST.depth));
        let top = setting("top", FIRST.top).saturating_mul(TOP_BYTES);
        Memory::of_worker(counters.saturating_mul(8).saturating_add(top))
    }
}

impl Default for CountMinFunction {
    /// Each request is an item.
    fn default() -> Self {
        let mut registers = Register::list(&REGISTERS);
        for n in 1..=SHOWN {
            for what in ["item", "count"] {
                let name = format!("{what}_{n}").into();
                registers.push(Register { name, merge: Merge::State });
            }
        }
        let sketch = CountMin::new(FIRST);
        let streams = StreamItems::default();
        Self { sketch, streams, offset: 0, length: 0, items: 0, short: 0, registers }
    }
}

impl Function for CountMinFunction {
    fn decide(&mut self, direction: Direction, messages: &mut Messages) -> Result<(), Failure> {
        if direction == Direction::Replies {
            return Ok(());
        }
        for index in 0..messages.len() {
            if !messages.is_open(index) {
                continue;
            }
            if messages.are_chunks() {
                let Self { sketch, streams, items, length, .. } = self;
                let skip = u32::try_from(self.offset).unwrap_or(u32::MAX);
                let at = (skip, *length);
                let chunk = messages.bytes(index);
                let split = streams.split(messages.request(index), at, chunk, |bytes| {
                    bytes.chunks_exact(*length).for_each(|item| _ = sketch.add(item));
                    *items += (bytes.len() / *length) as u64;
                });
                self.short += u64::from(!split);
                continue;
            }
            match crate::instances::range(messages.bytes(index), self.offset, self.length) {
                None => self.short += 1,
                Some(item) => {
                    self.sketch.add(item);
                    self.items += 1;
                }
            }
        }
        Ok(())
    }

    fn registers(&self) -> &[Register] {
        &self.registers
    }

    fn read(&mut self) -> Result<Vec<u64>, Failure> {
        let Settings { width, depth, top, seed } = self.sketch.settings();
        let (offset, length) = (self.offset as u64, self.length as u64);
        let mut values = vec![self.items, self.short, width.into(), depth.into(), top.into()];
        values.extend([offset, length, seed.into()]);
        for item in self.sketch.top().iter().take(SHOWN) {
            let mut first = [0; 8];
            let kept = item.bytes().len().min(8);
            first[..kept].copy_from_slice(&item.bytes()[..kept]);
            values.extend([u64::from_be_bytes(first), item.count]);
        }
        values.resize(self.registers.len(), 0);
        Ok(values)
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
        let name = REGISTERS[register].0;
        let Ok(value) = u32::try_from(value) else {
            return Err(Failure(format!("{name} is at most {}", u32::MAX)));
        };
        let mut settings = self.sketch.settings();
        match register {
            AT_WIDTH => {
                if !value.is_power_of_two() || !(WIDTH_MIN..=WIDTH_MAX).contains(&value) {
                    let why = format!("width is a power of two from {WIDTH_MIN} to {WIDTH_MAX}");
                    return Err(Failure(why));
                }
                settings.width = value;
            }
            AT_DEPTH => {
                if !(1..=DEPTH_MAX).contains(&value) {
                    return Err(Failure(format!("depth is from 1 to {DEPTH_MAX}")));
                }
                settings.depth = value;
            }
            AT_TOP => {
                if value > TOP_MAX {
                    return Err(Failure(format!("top is at most {TOP_MAX}")));
                }
                settings.top = value;
            }
            AT_OFFSET => self.offset = value as usize,
            AT_LENGTH => self.length = value as usize,
            AT_SEED => settings.seed = value,
            _ => return Err(Failure("it is no setting".to_owned())),
        }
        self.sketch = CountMin::new(settings);
        self.streams.clear();
        (self.items, self.short) = (0, 0);
        Ok(())
    }
}
