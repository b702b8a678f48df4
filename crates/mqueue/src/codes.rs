//! Codes that several languages and protocols share, each declared here once.
//!
//! `cargo xtask gen-abi` writes them for programs in C (`lib/include/serval/transfer_codes.h`), for
//! kernels (`device/include/serval/abi.h`), for Python (`python/serval/_codes.py`) and for readers
//! (docs/transfer.md). The protocol of transfers uses them as they are. A code keeps its meaning; a
//! new one gets the next number. Drop reasons are the one other such table, in
//! `wire/src/drop_reason.rs`, because they have texts and scopes.

/// One code of a [`Table`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code {
    /// The name in options, messages, metrics and Python: lower case.
    pub name: &'static str,
    /// The name of the constant: upper case.
    pub constant: &'static str,
    /// The number, from 1; 0 is "none" or "success" where a field may have that.
    pub number: u8,
}

/// Codes of one kind, in the order of their numbers.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    /// The singular of what a code names, lower case.
    pub noun: &'static str,
    /// Its codes.
    pub codes: &'static [Code],
}

impl Table {
    /// The code with this number.
    pub fn numbered(&self, number: u8) -> Option<&'static Code> {
        self.codes.iter().find(|code| code.number == number)
    }

    /// The name of the code with this number.
    ///
    /// # Panics
    ///
    /// If no code has it.
    pub fn name(&self, number: u8) -> &'static str {
        self.numbered(number).expect("a code of the table").name
    }

    /// The names in a sentence: `gzip or zstd`.
    pub fn one_of(&self) -> String {
        let mut text = String::new();
        for (at, code) in self.codes.iter().enumerate() {
            text += match at {
                0 => "",
                _ if at + 1 == self.codes.len() => " or ",
                _ => ", ",
            };
            text += code.name;
        }
        text
    }
}

macro_rules! codes {
    ($(#[$doc:meta])* $noun:ident: $($constant:ident = $number:literal, $name:literal;)+) => {
        $(#[$doc])*
        pub mod $noun {
            use super::{Code, Table};

            $(#[doc = concat!("`", $name, "`")] pub const $constant: u8 = $number;)+

            /// All of them.
            pub const TABLE: Table = Table {
                noun: stringify!($noun),
                codes: &[$(Code {
                    name: $name,
                    constant: stringify!($constant),
                    number: $number,
                }),+],
            };
        }
    };
}

codes! {
    /// Digests: 16, 32, 4 (big-endian) and 20 bytes.
    digest:
    MD5 = 1, "md5";
    SHA256 = 2, "sha256";
    CRC32C = 3, "crc32c";
    SHA1 = 4, "sha1";
}

codes! {
    /// Ciphers of sealed streams.
    cipher:
    AES_256_GCM = 1, "aes-256-gcm";
    AES_256_CTR = 2, "aes-256-ctr";
}

codes! {
    /// Formats of compressed data.
    format:
    GZIP = 1, "gzip";
    ZSTD = 2, "zstd";
}

codes! {
    /// What a search looks for: a text, or lines that match a regular expression.
    search:
    TEXT = 1, "text";
    LINES = 2, "lines";
}

codes! {
    /// Kinds of stages that a program may ask for.
    stage:
    DIGEST = 1, "digest";
    OPEN = 2, "open";
    SEAL = 3, "seal";
    COMPRESS = 4, "compress";
    EXPAND = 5, "expand";
    SEARCH = 6, "search";
}

codes! {
    /// Why a transfer failed.
    reason:
    CANCELLED = 1, "cancelled";
    STALLED = 2, "stalled";
    DEADLINE = 3, "deadline";
    RESET = 4, "reset";
    CLOSED = 5, "closed";
    FILE_ENDED = 6, "file_ended";
    DISK_FULL = 7, "disk_full";
    FILE_TOO_LONG = 8, "file_too_long";
    HOST_ERROR = 9, "host_error";
    WRONG_KIND = 10, "wrong_kind";
    ACCESS = 11, "access";
    APPENDS = 12, "appends";
    INVALID = 13, "invalid";
    BUSY = 14, "busy";
    RANGE = 15, "range";
    TOO_MANY = 16, "too_many";
    STOPPING = 17, "stopping";
    BAD_REQUEST = 18, "bad_request";
    NOT_ADMITTED = 19, "not_admitted";
    TOO_MANY_CLIENTS = 20, "too_many_clients";
    FILE_STALLED = 21, "file_stalled";
    DIRECT = 22, "direct";
    SAME_FILE = 23, "same_file";
    ORDER = 24, "order";
    NOT_SEALED = 25, "not_sealed";
    NOT_VERIFIED = 26, "not_verified";
    CUT_OFF = 27, "cut_off";
    CORRUPT = 28, "corrupt";
    TRUNCATED = 29, "truncated";
    EXPANDS_TOO_MUCH = 30, "expands_too_much";
    PATTERN = 31, "pattern";
    LINE_TOO_LONG = 32, "line_too_long";
    TOO_MUCH_MEMORY = 33, "too_much_memory";
    OUTSIDE_MEMORY = 34, "outside_memory";
    COPY_FAILED = 35, "copy_failed";
    KERNEL = 36, "kernel";
    USER_PROCESS = 37, "user_process";
}

/// The tables whose codes programs in C and Python use.
pub const SHARED: [Table; 6] =
    [digest::TABLE, cipher::TABLE, format::TABLE, search::TABLE, stage::TABLE, reason::TABLE];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sentence_has_every_name() {
        assert_eq!(format::TABLE.one_of(), "gzip or zstd");
        assert_eq!(digest::TABLE.one_of(), "md5, sha256, crc32c or sha1");
    }

    #[test]
    fn numbers_count_from_one_and_names_are_different() {
        for table in SHARED {
            for (at, code) in table.codes.iter().enumerate() {
                assert_eq!(usize::from(code.number), at + 1, "{} {}", table.noun, code.name);
                assert_eq!(code.name.to_uppercase().replace('-', "_"), code.constant);
                let same = table.codes.iter().filter(|other| other.name == code.name);
                assert_eq!(same.count(), 1, "{}", code.name);
            }
        }
    }
}
