//! What the reply to a request says that was refused or lost.

/// The content of an error reply. See [`crate::framing::Framing::error_reply`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorReply {
    /// The request is malformed, with the words of memcached.
    Command(CommandError),
    /// No such command.
    UnknownCommand,
    /// The request is malformed.
    BadCommand,
    /// The data of the request does not have the announced length.
    BadDataBlock,
    /// The request is too long.
    TooLong,
    /// The service has no room for the request at present.
    OutOfCapacity,
    /// The request was accepted but its reply did not arrive in time.
    Timeout,
    /// The request was accepted and then lost or refused for another reason.
    Failed,
}

macro_rules! command_errors {
    ($( $(#[doc = $doc:literal])+ $variant:ident = $text:literal; )+) => {
        /// What is wrong with a command line of memcached, where memcached 1.6.18 has words for it.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum CommandError { $( $(#[doc = $doc])+ $variant, )+ }

        impl CommandError {
            /// All of them.
            pub const ALL: &'static [Self] = &[ $( Self::$variant, )+ ];

            /// The error line.
            pub const fn reply(self) -> &'static [u8] {
                match self { $( Self::$variant => concat!("CLIENT_ERROR ", $text, "\r\n").as_bytes(), )+ }
            }
        }
    };
}

command_errors! {
    /// The expiry time of `touch`, `gat` and `gats`, or the delay of `flush_all`.
    Exptime = "invalid exptime argument";
    /// The amount of `incr` and `decr`.
    Delta = "invalid numeric delta argument";
    /// What follows the key of `delete`.
    Delete = "bad command line format.  Usage: delete <key> [noreply]";
    /// Too many flags of `mg`.
    MetaGetFlags = "options flags are too long";
    /// Too many flags of another meta command.
    MetaFlags = "options flags too long";
    /// A flag twice.
    DuplicateFlag = "duplicate flag";
    /// An unknown flag.
    InvalidFlag = "invalid flag";
    /// One of these, of `md` and `ma`.
    AnyFlag = "invalid or duplicate flag";
    /// A key that is not in base64.
    Key = "error decoding key";
    /// The number of a flag.
    FlagValue = "bad token in command line format";
    /// The length of a mode.
    ModeLength = "incorrect length for M token";
    /// The mode of `ms`.
    SetMode = "invalid mode for ms M token";
    /// The mode of `ma`.
    ArithmeticMode = "invalid mode for ma M token";
    /// The first value of `ma`.
    Initial = "invalid numeric initial value";
    /// The amount of `ma`.
    DeltaValue = "invalid numeric delta value";
    /// The length of an opaque.
    Opaque = "opaque token too long";
}
