//! A list of transfers in flight and of devices, as the text of the parent module describes it.

use super::{MessageError, Rest, device_code};
use crate::command::device::Device;
use crate::command::limits::STAGES_MAX;
use crate::command::stage::StageKind;
use crate::engine::DeviceQueue;
use crate::engine::counters::DeviceLoad;
use crate::engine::scoreboard::Activity;

/// Transfers that a list has.
pub const LISTED_MAX: usize = 512;
/// Devices that a list has.
pub const QUEUES_MAX: usize = 128;
pub(super) const LISTED_BYTES: usize = 56;
const NO_BLOCK: u64 = u64::MAX;

/// A transfer in flight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its caller's number.
    pub id: u64,
    /// Its caller's process; 0: of another container.
    pub process: u32,
    /// What the source is.
    pub source: Device,
    /// What the sink is.
    pub sink: Device,
    /// What it does.
    pub activity: Activity,
    /// Bytes read from the source.
    pub read: u64,
    /// Bytes that the sink has.
    pub written: u64,
    /// How long ago it was started, in milliseconds.
    pub age_ms: u64,
    /// The stages in their order.
    pub stages: Vec<StageKind>,
}

impl Listed {
    pub(super) fn decode(rest: &mut Rest<'_>) -> Result<Self, MessageError> {
        let (id, process) = (rest.u64()?, rest.u32()?);
        let (source, sink) = (rest.device("source")?, rest.device("sink")?);
        let activity = match rest.u8()? {
            1 => Activity::Queued,
            2 => Activity::Running,
            3 => Activity::Waiting,
            _ => return Err(MessageError::Field("activity")),
        };
        let count = usize::from(rest.u8()?);
        let (read, written, age_ms) = (rest.u64()?, rest.u64()?, rest.u64()?);
        if count > STAGES_MAX {
            return Err(MessageError::Field("stages"));
        }
        let stages = (0..count).map(|_| rest.kind()).collect::<Result<_, _>>()?;
        rest.reserved(2 * (STAGES_MAX - count))?;
        Ok(Self { id, process, source, sink, activity, read, written, age_ms, stages })
    }

    pub(super) fn encode(&self, bytes: &mut Vec<u8>) {
        bytes.extend(self.id.to_le_bytes());
        bytes.extend(self.process.to_le_bytes());
        let activity = match self.activity {
            Activity::Queued => 1,
            Activity::Running => 2,
            Activity::Waiting => 3,
        };
        let count = self.stages.len() as u8;
        bytes.extend([device_code(self.source), device_code(self.sink), activity, count]);
        for value in [self.read, self.written, self.age_ms] {
            bytes.extend(value.to_le_bytes());
        }
        self.stages.iter().for_each(|stage| bytes.extend(stage.codes()));
        bytes.extend(std::iter::repeat_n(0, 2 * (STAGES_MAX - self.stages.len())));
    }
}

pub(super) fn decode_queues(rest: &mut Rest<'_>) -> Result<Vec<DeviceQueue>, MessageError> {
    let count = usize::from(rest.u16()?);
    rest.reserved(6)?;
    if count > QUEUES_MAX {
        return Err(MessageError::Field("queues"));
    }
    let queue = |_| {
        let device = match rest.u8()? {
            3 => Device::Accelerator,
            2 => Device::Socket,
            1 => Device::File,
            _ => return Err(MessageError::Field("device")),
        };
        rest.reserved(7)?;
        let block = Some(rest.u64()?).filter(|block| *block != NO_BLOCK);
        let (queued, running, waiting) = (rest.u64()?, rest.u64()?, rest.u64()?);
        let (bytes_in_flight, taken, given) = (rest.u64()?, rest.u64()?, rest.u64()?);
        let load = DeviceLoad { device, queued, running, bytes_in_flight, taken, given };
        Ok(DeviceQueue { block, load, waiting })
    };
    (0..count).map(queue).collect()
}

pub(super) fn encode_queues(queues: &[DeviceQueue], bytes: &mut Vec<u8>) {
    debug_assert!(queues.len() <= QUEUES_MAX, "the engine counts fewer apart");
    bytes.extend((queues.len() as u16).to_le_bytes());
    bytes.extend([0; 6]);
    for DeviceQueue { block, load, waiting } in queues {
        bytes.extend([device_code(load.device), 0, 0, 0, 0, 0, 0, 0]);
        let block = block.unwrap_or(NO_BLOCK);
        let (queued, running, waiting) = (load.queued, load.running, *waiting);
        let moved = [load.bytes_in_flight, load.taken, load.given];
        for value in [block, queued, running, waiting].into_iter().chain(moved) {
            bytes.extend(value.to_le_bytes());
        }
    }
}
