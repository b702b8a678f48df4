//! Why a transfer ended early, or was not started.

use std::io;

use mqueue::codes::reason;

use crate::command::compression::Format;

/// Why a transfer ended early, or was not started. [`Self::name`] is the label of its counter.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransferError {
    /// The caller cancelled it, or went away.
    #[error("the transfer was cancelled")]
    Cancelled,
    /// Nothing moved for as long as the command allows.
    #[error(
        "almost nothing moved for {0} ms: the peer neither reads nor sends, or raise the stall time"
    )]
    Stalled(u64),
    /// A read or write of the file did not return.
    #[error("the file did not answer for {0} ms: its disk or file system hangs")]
    FileStalled(u64),
    /// The command's deadline passed.
    #[error("the transfer took longer than its {0} ms")]
    Deadline(u64),
    /// The peer reset the connection.
    #[error("the peer reset the connection")]
    Reset,
    /// The peer closed the connection before the end of the transfer.
    #[error("the peer closed the connection before the end of the transfer")]
    Closed,
    /// The file is shorter than the range of the command.
    #[error("the file ends at byte {at}, before the end of the transfer at byte {end}")]
    FileEnded {
        /// The file's end.
        at: u64,
        /// The end of the range.
        end: u64,
    },
    /// There is no space for the file.
    #[error("the disk is full, or the quota of the file's owner is used up")]
    DiskFull,
    /// The file would be longer than the host kernel or a limit allows.
    #[error("the file would be longer than the file system or `ulimit -f` allows")]
    FileTooLong,
    /// Another error of the host kernel.
    #[error("{what} failed: {}", io::Error::from_raw_os_error(*errno))]
    Host {
        /// The operation.
        what: &'static str,
        /// The host kernel's error number.
        errno: i32,
    },
    /// A descriptor is not what the command needs.
    #[error("the {role} is {found}: it has to be {needed}")]
    WrongKind {
        /// Which descriptor: "source" or "sink".
        role: &'static str,
        /// What it is.
        found: &'static str,
        /// What it has to be.
        needed: &'static str,
    },
    /// A descriptor was opened without the access that the command needs.
    #[error("the {role} was not opened for {access}")]
    Access {
        /// Which descriptor.
        role: &'static str,
        /// "reading" or "writing".
        access: &'static str,
    },
    /// The sink is a file opened with `O_APPEND`, where offsets have no effect.
    #[error("the sink was opened with O_APPEND, which ignores offsets: open it without")]
    Appends,
    /// A file was opened with `O_DIRECT`, which needs buffers and ranges that are aligned.
    #[error(
        "the {role} was opened with O_DIRECT, which transfers do not align to: open it without"
    )]
    Direct {
        /// Which descriptor.
        role: &'static str,
    },
    /// A descriptor is closed or invalid.
    #[error("the {role} is not an open descriptor")]
    Invalid {
        /// Which descriptor.
        role: &'static str,
    },
    /// The source and the sink are one file.
    #[error("the source and the sink are the same file: choose another sink")]
    SameFile,
    /// The stages are in an order that makes no sense.
    #[error("the order of the stages is wrong: {0}")]
    Order(String),
    /// What is to be opened is no sealed stream.
    #[error(
        "the source is no sealed stream of this cipher: it does not begin with the header of one"
    )]
    NotSealed,
    /// A record of a sealed stream does not open.
    #[error(
        "record {0} of the sealed stream does not open: it was changed, exchanged or cut off, or the key is another one"
    )]
    NotVerified(u64),
    /// A sealed stream ends between two records, before its last one.
    #[error("the sealed stream was cut off: it ends before its last record")]
    CutOff,
    /// Compressed data is not what its format allows.
    #[error("the data is corrupt, or is not {0}")]
    Corrupt(Format),
    /// Compressed data has too many members or frames in a row that expand to nothing.
    #[error(
        "the {0} data has more than {max} members or frames in a row without content, which no program writes: leave them out",
        max = crate::command::limits::EMPTY_MEMBERS_MAX
    )]
    EmptyMembers(Format),
    /// Compressed data ends too early.
    #[error("the {0} data was cut off: it ends before its end is complete")]
    Truncated(Format),
    /// An expansion passes its limits.
    #[error(
        "the {0} data expands to more bytes, a higher ratio or a larger window than the limits allow: raise them if you trust its author"
    )]
    ExpandsTooMuch(Format),
    /// A search cannot be done.
    #[error("the pattern cannot be used: {0}")]
    Pattern(String),
    /// A line is longer than a search by lines holds.
    #[error(
        "a line is longer than 1 MiB, which a search by lines does not hold: search for a text"
    )]
    LineTooLong,
    /// Another transfer uses the same direction of the same socket, or the same memory of an accelerator.
    #[error(
        "another transfer uses this socket in the same direction, or this memory of an accelerator: wait until it has ended"
    )]
    Busy,
    /// The command's numbers are out of range.
    #[error("the range of bytes ends after 2^63 - 1")]
    Range,
    /// A range is not in the memory of an accelerator.
    #[error("the range ends after byte {0}, the end of the accelerator's memory")]
    OutsideMemory(u64),
    /// A copy from or to the memory of an accelerator failed.
    #[error("the accelerator did not copy: {0}")]
    CopyFailed(String),
    /// A kernel that is a stage failed.
    #[error("the kernel did not do its part: {0}")]
    Kernel(String),
    /// The scoreboard, or the caller's share of it, is full.
    #[error("{0} transfers are in flight, which is the limit: wait until one has ended")]
    TooMany(u32),
    /// The transfer needs more memory than is left of the engine's limit.
    #[error(
        "{needed_kib} KiB of memory are not left of the {most_mib} MiB of all transfers: wait until one has ended, or raise transfer.memory_mib"
    )]
    TooMuchMemory {
        /// What it needs.
        needed_kib: u64,
        /// The limit of all transfers.
        most_mib: u32,
    },
    /// The engine stops.
    #[error("the transfer engine stops")]
    Stopping,
    /// A message of a caller in another process cannot be used.
    #[error("the request cannot be used: {0}")]
    BadRequest(String),
    /// The caller is of another user; why that one is not served.
    #[error("{0}")]
    NotAdmitted(&'static str),
    /// The process that makes the system calls of a user's transfers cannot be started, or has ended.
    #[error("{0}")]
    UserProcess(String),
    /// There are too many callers.
    #[error(
        "programs have as many connections to the transfer engine as they may have, of {0} in all: close some, or raise transfer.clients"
    )]
    TooManyClients(u32),
}

impl TransferError {
    /// A stable number of the reason, from 1.
    pub fn code(&self) -> u8 {
        match self {
            Self::Cancelled => reason::CANCELLED,
            Self::Stalled(_) => reason::STALLED,
            Self::Deadline(_) => reason::DEADLINE,
            Self::Reset => reason::RESET,
            Self::Closed => reason::CLOSED,
            Self::FileEnded { .. } => reason::FILE_ENDED,
            Self::DiskFull => reason::DISK_FULL,
            Self::FileTooLong => reason::FILE_TOO_LONG,
            Self::Host { .. } => reason::HOST_ERROR,
            Self::WrongKind { .. } => reason::WRONG_KIND,
            Self::Access { .. } => reason::ACCESS,
            Self::Appends => reason::APPENDS,
            Self::Invalid { .. } => reason::INVALID,
            Self::Busy => reason::BUSY,
            Self::Range => reason::RANGE,
            Self::TooMany(_) => reason::TOO_MANY,
            Self::Stopping => reason::STOPPING,
            Self::BadRequest(_) => reason::BAD_REQUEST,
            Self::NotAdmitted(_) => reason::NOT_ADMITTED,
            Self::TooManyClients(_) => reason::TOO_MANY_CLIENTS,
            Self::FileStalled(_) => reason::FILE_STALLED,
            Self::Direct { .. } => reason::DIRECT,
            Self::SameFile => reason::SAME_FILE,
            Self::Order(_) => reason::ORDER,
            Self::NotSealed => reason::NOT_SEALED,
            Self::NotVerified(_) => reason::NOT_VERIFIED,
            Self::CutOff => reason::CUT_OFF,
            Self::Corrupt(_) | Self::EmptyMembers(_) => reason::CORRUPT,
            Self::Truncated(_) => reason::TRUNCATED,
            Self::ExpandsTooMuch(_) => reason::EXPANDS_TOO_MUCH,
            Self::Pattern(_) => reason::PATTERN,
            Self::LineTooLong => reason::LINE_TOO_LONG,
            Self::TooMuchMemory { .. } => reason::TOO_MUCH_MEMORY,
            Self::OutsideMemory(_) => reason::OUTSIDE_MEMORY,
            Self::CopyFailed(_) => reason::COPY_FAILED,
            Self::Kernel(_) => reason::KERNEL,
            Self::UserProcess(_) => reason::USER_PROCESS,
        }
    }

    /// The reason as metrics and JSON name it.
    pub fn name(&self) -> &'static str {
        reason::TABLE.name(self.code())
    }

    /// The error number that a program would have got from `sendfile` or `write`.
    pub fn errno(&self) -> i32 {
        // The values of Linux on every processor that this program is built for.
        match self {
            Self::Cancelled => 125,
            Self::Stalled(_) | Self::Deadline(_) | Self::FileStalled(_) => 110,
            Self::Reset => 104,
            Self::Closed => 32,
            Self::FileEnded { .. } => 61,
            Self::DiskFull => 28,
            Self::FileTooLong => 27,
            Self::Host { errno, .. } => *errno,
            Self::WrongKind { .. }
            | Self::Direct { .. }
            | Self::Range
            | Self::OutsideMemory(_)
            | Self::BadRequest(_)
            | Self::SameFile
            | Self::Order(_)
            | Self::Pattern(_) => 22,
            Self::NotSealed
            | Self::NotVerified(_)
            | Self::CutOff
            | Self::Corrupt(_)
            | Self::EmptyMembers(_)
            | Self::Truncated(_)
            | Self::ExpandsTooMuch(_)
            | Self::LineTooLong => 74,
            Self::NotAdmitted(_) => 13,
            Self::TooMuchMemory { .. } => 12,
            Self::Access { .. } | Self::Appends | Self::Invalid { .. } => 9,
            Self::Busy | Self::TooMany(_) | Self::TooManyClients(_) => 16,
            Self::Stopping => 108,
            Self::CopyFailed(_) | Self::Kernel(_) | Self::UserProcess(_) => 5,
        }
    }

    /// An error of a step. `what` names the operation.
    pub(crate) fn of_host(what: &'static str, error: &io::Error) -> Self {
        use io::ErrorKind as Kind;
        // A call that another process makes can fail for a reason of its own.
        let reason = error.get_ref().and_then(|reason| reason.downcast_ref::<CallError>());
        if let Some(reason) = reason {
            return reason.clone().into();
        }
        match error.kind() {
            Kind::ConnectionReset | Kind::ConnectionAborted => Self::Reset,
            Kind::BrokenPipe | Kind::NotConnected => Self::Closed,
            Kind::StorageFull | Kind::QuotaExceeded => Self::DiskFull,
            Kind::FileTooLarge => Self::FileTooLong,
            _ => Self::Host { what, errno: error.raw_os_error().unwrap_or(5) },
        }
    }
}

/// Why no process makes a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CallError {
    /// There is no process, or it has ended; one sentence.
    #[error("{0}")]
    Process(String),
    /// A file is no data but an interface of the host kernel.
    #[error("a file is an interface of the host kernel")]
    OfKernel {
        /// It is the sink, and not one of the source.
        is_sink: bool,
    },
}

impl From<CallError> for TransferError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Process(why) => Self::UserProcess(why),
            CallError::OfKernel { is_sink } => Self::WrongKind {
                role: if is_sink { "sink" } else { "source" },
                found: "an interface of the host kernel, as a file of procfs or sysfs",
                needed: "a file with data",
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_has_its_name() {
        assert_eq!(TransferError::Cancelled.name(), "cancelled");
        assert_eq!(TransferError::Host { what: "pread", errno: 5 }.name(), "host_error");
        assert_eq!(TransferError::Stopping.name(), "stopping");
        let full = io::Error::from_raw_os_error(28);
        assert_eq!(TransferError::of_host("pwrite", &full), TransferError::DiskFull);
        assert_eq!(TransferError::DiskFull.errno(), 28);
        let quota = io::Error::from_raw_os_error(122);
        assert_eq!(TransferError::of_host("pwrite", &quota), TransferError::DiskFull);
    }
}
