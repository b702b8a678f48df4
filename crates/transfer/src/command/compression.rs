//! Formats of compressed data, their levels, and limits of an expansion.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use mqueue::codes;

use super::limits::WINDOW_LOG_MAX;

/// Default level of gzip, as web servers use it: the next ones take twice the time for a few percent.
const GZIP_LEVEL: u8 = 1;
/// Default level of Zstandard, as of `zstd`.
const ZSTD_LEVEL: u8 = 3;
/// What zlib keeps: the window and the tables of a state, both with room.
const GZIP_BYTES: u64 = 512 << 10;
/// Compression of Zstandard: a window of 2 or 4 MiB, tables and a block. By level, from 1.
const ZSTD_COMPRESS_BYTES: [u64; 9] = {
    const MIB: u64 = 1 << 20;
    [4 * MIB, 4 * MIB, 4 * MIB, 8 * MIB, 8 * MIB, 8 * MIB, 12 * MIB, 12 * MIB, 24 * MIB]
};
/// Expansion of Zstandard: the largest window, blocks and tables.
const ZSTD_EXPAND_BYTES: u64 = (1 << WINDOW_LOG_MAX) + (512 << 10);

/// A format of compressed data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// RFC 1952.
    Gzip,
    /// RFC 8878.
    Zstd,
}

impl Format {
    /// Every format.
    pub const ALL: [Self; 2] = [Self::Gzip, Self::Zstd];

    /// The number in the protocol.
    pub fn number(self) -> u8 {
        match self {
            Self::Gzip => codes::format::GZIP,
            Self::Zstd => codes::format::ZSTD,
        }
    }

    /// The format with this number.
    pub fn numbered(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.number() == number)
    }

    /// The name in options and messages.
    pub fn name(self) -> &'static str {
        codes::format::TABLE.name(self.number())
    }

    /// The format of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name)
    }

    /// Levels of compression. Those of Zstandard above 9 take tens of MiB for each stream.
    pub fn levels(self) -> RangeInclusive<u8> {
        match self {
            Self::Gzip => 1..=9,
            Self::Zstd => 1..=ZSTD_COMPRESS_BYTES.len() as u8,
        }
    }

    /// Memory of an expansion at most.
    pub(crate) fn expand_bytes(self) -> u64 {
        match self {
            Self::Gzip => GZIP_BYTES,
            Self::Zstd => ZSTD_EXPAND_BYTES,
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How bytes are compressed. A [`Format`] is one with its default level: 1 of gzip, 3 of Zstandard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compression {
    format: Format,
    level: u8,
}

impl Compression {
    /// With a level of [`Format::levels`]; `None`: it is another one.
    pub fn new(format: Format, level: u8) -> Option<Self> {
        format.levels().contains(&level).then_some(Self { format, level })
    }

    /// What comes out.
    pub fn format(self) -> Format {
        self.format
    }

    /// How much time it takes to make that short.
    pub fn level(self) -> u8 {
        self.level
    }

    /// Memory of a compression at most.
    pub(crate) fn memory_bytes(self) -> u64 {
        match self.format {
            Format::Gzip => GZIP_BYTES,
            Format::Zstd => ZSTD_COMPRESS_BYTES[usize::from(self.level - 1)],
        }
    }
}

impl From<Format> for Compression {
    fn from(format: Format) -> Self {
        let level = match format {
            Format::Gzip => GZIP_LEVEL,
            Format::Zstd => ZSTD_LEVEL,
        };
        Self { format, level }
    }
}

/// `gzip` or `zstd`, or with a level as in `zstd:9`.
impl FromStr for Compression {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, level) = match text.split_once(':') {
            Some((name, level)) => (name, Some(level)),
            None => (text, None),
        };
        let wrong = || format!("{text:?} is not gzip or zstd, which may have a level as in zstd:9");
        let format = Format::named(name).ok_or_else(wrong)?;
        let Some(level) = level else { return Ok(format.into()) };
        let level = level.parse().ok().and_then(|level| Self::new(format, level));
        level.ok_or_else(|| {
            let levels = format.levels();
            format!("levels of {format} are {} to {}", levels.start(), levels.end())
        })
    }
}

/// How much may come out of an expansion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpandLimits {
    /// Bytes in all.
    pub bytes: u64,
    /// Bytes for each byte that went in, once a MiB has come out.
    pub ratio: u32,
}

impl Default for ExpandLimits {
    fn default() -> Self {
        Self { bytes: 64 << 30, ratio: 100 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_written_behind_a_colon() {
        let read = |text: &str| text.parse::<Compression>();
        assert_eq!(read("gzip"), Ok(Compression::new(Format::Gzip, 1).unwrap()));
        assert_eq!(read("zstd"), Ok(Compression::new(Format::Zstd, 3).unwrap()));
        assert_eq!(read("zstd:9").map(Compression::level), Ok(9));
        assert_eq!(read("gzip:10"), Err("levels of gzip are 1 to 9".to_owned()));
        assert_eq!(read("zstd:0"), Err("levels of zstd are 1 to 9".to_owned()));
        assert!(read("zstd:").is_err() && read("zstd:-1").is_err() && read("gzip:256").is_err());
        assert!(read("lz4:1").unwrap_err().contains("is not gzip or zstd"));
    }
}
