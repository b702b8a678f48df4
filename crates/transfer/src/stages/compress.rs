//! Compression: gzip (RFC 1952) and Zstandard (RFC 8878).
//!
//! An expansion takes any number of members or frames one after the other, as `gzip -d` and `zstd -d` do, and checks their
//! checksums. It ends with a reason when the data is corrupt, when it ends too early, and when it expands to more than
//! [`ExpandLimits`] allow. Zstandard may ask for a window of [`WINDOW_LOG_MAX`] at most, so the memory is bounded, too.
//!
//! The author of the data chooses how many members there are, and each costs time, whatever it holds. So a run ends after
//! [`MEMBERS_OF_RUN_MAX`], and the thread looks at deadlines and at other transfers. More than [`EMPTY_MEMBERS_MAX`] in a row that
//! expand to nothing are refused: they would keep a transfer busy without anything for its sink.

use flate2::{Compress, Decompress, FlushCompress, FlushDecompress, Status};
use zstd::stream::raw::{CParameter, DParameter, Decoder, Encoder, InBuffer, Operation, OutBuffer};

use crate::command::compression::{Compression, ExpandLimits, Format};
use crate::command::error::TransferError;
use crate::command::limits::{EMPTY_MEMBERS_MAX, WINDOW_LOG_MAX};
use crate::stages::Ran;

/// Members or frames that may end in one run of an expansion.
pub const MEMBERS_OF_RUN_MAX: u32 = 1024;
/// Bytes that may come out before their ratio is looked at.
const RATIO_FREE_BYTES: u64 = 1 << 20;
/// log2 of the window of gzip.
const GZIP_WINDOW_LOG: u8 = 15;

/// The library has no memory.
const NO_MEMORY: TransferError = TransferError::Host { what: "setting up compression", errno: 12 };

/// Compresses a stream that comes in parts of any length.
pub struct Compressor(Compressing);

enum Compressing {
    Gzip(Compress),
    Zstd(Encoder<'static>),
}

impl Compressor {
    /// For one stream.
    pub fn new(how: Compression) -> Result<Self, TransferError> {
        let level = how.level();
        Ok(Self(match how.format() {
            Format::Gzip => {
                let level = flate2::Compression::new(level.into());
                Compressing::Gzip(Compress::new_gzip(level, GZIP_WINDOW_LOG))
            }
            Format::Zstd => {
                let mut encoder = Encoder::new(level.into()).map_err(|_| NO_MEMORY)?;
                let set = encoder.set_parameter(CParameter::ChecksumFlag(true));
                set.map_err(|_| NO_MEMORY)?;
                Compressing::Zstd(encoder)
            }
        }))
    }

    /// Takes plain bytes and makes compressed ones; `last`: no more come after these.
    pub fn run(&mut self, input: &[u8], last: bool, out: &mut [u8]) -> Result<Ran, TransferError> {
        match &mut self.0 {
            Compressing::Gzip(state) => {
                let before = (state.total_in(), state.total_out());
                let flush = if last { FlushCompress::Finish } else { FlushCompress::None };
                let status = state.compress(input, out, flush).map_err(|_| NO_MEMORY)?;
                Ok(Ran {
                    taken: (state.total_in() - before.0) as usize,
                    made: (state.total_out() - before.1) as usize,
                    done: status == Status::StreamEnd,
                })
            }
            Compressing::Zstd(encoder) => {
                let (mut from, mut to) = (InBuffer::around(input), OutBuffer::around(out));
                encoder.run(&mut from, &mut to).map_err(|_| NO_MEMORY)?;
                let mut done = false;
                if last && from.pos() == input.len() {
                    done = encoder.finish(&mut to, true).map_err(|_| NO_MEMORY)? == 0;
                }
                Ok(Ran { taken: from.pos(), made: to.pos(), done })
            }
        }
    }
}

/// Expands a stream that comes in parts of any length.
pub struct Expander {
    format: Format,
    state: Expanding,
    limits: ExpandLimits,
    taken: u64,
    made: u64,
    /// A member or frame has ended, and no other has begun.
    between: bool,
    /// Members or frames in a row that have made nothing, and whether the one that has begun has made something.
    empty: u32,
    has_content: bool,
    /// Zeros have followed a member of gzip, as tapes and programs that write whole blocks leave them: nothing but zeros comes now.
    is_padding: bool,
}

enum Expanding {
    Gzip(Decompress),
    Zstd(Decoder<'static>),
}

impl Expander {
    /// For one stream.
    pub fn new(format: Format, limits: ExpandLimits) -> Result<Self, TransferError> {
        let state = match format {
            Format::Gzip => Expanding::Gzip(Decompress::new_gzip(GZIP_WINDOW_LOG)),
            Format::Zstd => {
                let mut decoder = Decoder::new().map_err(|_| NO_MEMORY)?;
                let set = decoder.set_parameter(DParameter::WindowLogMax(WINDOW_LOG_MAX));
                set.map_err(|_| NO_MEMORY)?;
                Expanding::Zstd(decoder)
            }
        };
        Ok(Self {
            format,
            state,
            limits,
            taken: 0,
            made: 0,
            between: false,
            empty: 0,
            has_content: false,
            is_padding: false,
        })
    }

    /// Takes compressed bytes and makes plain ones; `last`: no more come after these. After [`MEMBERS_OF_RUN_MAX`] members it leaves
    /// the rest for the next call, also if nothing was made.
    pub fn run(&mut self, input: &[u8], last: bool, out: &mut [u8]) -> Result<Ran, TransferError> {
        let mut ran = Ran::default();
        let mut members = 0;
        loop {
            let rest = &input[ran.taken..];
            if rest.is_empty() && self.between {
                ran.done = last;
                break;
            }
            let ends_member = self.between && self.format == Format::Gzip;
            self.is_padding |= ends_member && rest[0] == 0;
            if self.is_padding {
                if rest.iter().any(|byte| *byte != 0) {
                    return Err(TransferError::Corrupt(self.format));
                }
                ran.taken = input.len();
                continue;
            }
            let (taken, made) = self.step(rest, &mut out[ran.made..])?;
            ran.taken += taken;
            ran.made += made;
            self.taken += taken as u64;
            self.made += made as u64;
            self.check_limits()?;
            if self.between && taken > 0 {
                members += 1;
            }
            self.count_empty(made > 0)?;
            let is_full = ran.made == out.len();
            if taken == 0 && made == 0 && !is_full {
                match (rest.is_empty(), last) {
                    (true, true) => return Err(TransferError::Truncated(self.format)),
                    (true, false) => break,
                    // The library wants no input and makes no output.
                    (false, _) => return Err(TransferError::Corrupt(self.format)),
                }
            }
            // The end of the input is seen above.
            if is_full || (members >= MEMBERS_OF_RUN_MAX && ran.taken < input.len()) {
                break;
            }
        }
        Ok(ran)
    }

    /// One call of the library. Returns what it took and made.
    fn step(&mut self, input: &[u8], out: &mut [u8]) -> Result<(usize, usize), TransferError> {
        let corrupt = TransferError::Corrupt(self.format);
        match &mut self.state {
            Expanding::Gzip(state) => {
                self.between = false;
                let before = (state.total_in(), state.total_out());
                let status = state.decompress(input, out, FlushDecompress::None);
                let status = status.map_err(|_| corrupt)?;
                let taken = (state.total_in() - before.0) as usize;
                let made = (state.total_out() - before.1) as usize;
                if status == Status::StreamEnd {
                    // The next one has a header, too.
                    state.reset(true);
                    self.between = true;
                }
                Ok((taken, made))
            }
            Expanding::Zstd(decoder) => {
                let ran = decoder.run_on_buffers(input, out).map_err(|error| {
                    // The library has no other sign for it.
                    if error.to_string().contains("too much memory") {
                        TransferError::ExpandsTooMuch(self.format)
                    } else {
                        corrupt
                    }
                })?;
                self.between = ran.remaining == 0;
                Ok((ran.bytes_read, ran.bytes_written))
            }
        }
    }

    /// Notes whether the member or frame of this call has content, and at its end how many in a row had none.
    fn count_empty(&mut self, made: bool) -> Result<(), TransferError> {
        self.has_content |= made;
        if self.has_content {
            self.empty = 0;
        }
        if !self.between {
            return Ok(());
        }
        self.empty += u32::from(!self.has_content);
        self.has_content = false;
        if self.empty > EMPTY_MEMBERS_MAX {
            return Err(TransferError::EmptyMembers(self.format));
        }
        Ok(())
    }

    fn check_limits(&self) -> Result<(), TransferError> {
        let most = self.taken.saturating_mul(self.limits.ratio.into());
        if self.made > self.limits.bytes || (self.made > RATIO_FREE_BYTES && self.made > most) {
            return Err(TransferError::ExpandsTooMuch(self.format));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    type Run<'r> = &'r mut dyn FnMut(&[u8], bool, &mut [u8]) -> Result<Ran, TransferError>;

    /// Passes `input` in parts of this length, with this much room.
    fn pass(
        input: &[u8],
        part: usize,
        room: usize,
        run: Run<'_>,
    ) -> Result<Vec<u8>, TransferError> {
        let (mut made, mut out, mut at) = (Vec::new(), vec![0; room], 0usize);
        loop {
            let end = at.saturating_add(part).min(input.len());
            let ran = run(&input[at..end], end == input.len(), &mut out)?;
            made.extend(&out[..ran.made]);
            at += ran.taken;
            if ran.done {
                assert_eq!(at, input.len());
                return Ok(made);
            }
        }
    }

    #[test]
    fn every_level_expands_again_and_levels_differ() {
        let text = (0..20_000)
            .flat_map(|n: u32| format!("line {} of {}\n", n * n % 7919, n / 3).into_bytes());
        let plain: Vec<u8> = text.collect();
        for format in Format::ALL {
            let lengths = format.levels().map(|level| {
                let mut compressor =
                    Compressor::new(Compression::new(format, level).unwrap()).unwrap();
                let run: Run<'_> = &mut |input, last, out| compressor.run(input, last, out);
                let packed = pass(&plain, 70_000, 9_000, run).unwrap();
                assert_eq!(expand(format, &packed, 1 << 20).unwrap(), plain, "{format} {level}");
                packed.len()
            });
            let lengths: Vec<usize> = lengths.collect();
            let different: std::collections::HashSet<_> = lengths.iter().collect();
            assert!(different.len() > 3, "{format}: {lengths:?}");
        }
    }

    #[test]
    fn memory_of_levels_is_within_what_is_reserved() {
        use zstd::zstd_safe::{CCtx, CParameter as P, InBuffer, OutBuffer};
        // Incompressible, and longer than the largest window.
        let mut state = 1u64;
        let plain: Vec<u8> = (0..9 << 20)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        for level in Format::Zstd.levels() {
            let mut context = CCtx::create();
            context.set_parameter(P::CompressionLevel(level.into())).unwrap();
            let (mut out, mut from) = (vec![0; 1 << 20], InBuffer::around(&plain));
            while from.pos() < plain.len() {
                context.compress_stream(&mut OutBuffer::around(&mut out), &mut from).unwrap();
            }
            let reserved = Compression::new(Format::Zstd, level).unwrap().memory_bytes();
            let held = context.sizeof() as u64;
            assert!(held <= reserved && reserved <= 4 * held, "{level}: {held}");
        }
    }

    fn compress(format: Format, plain: &[u8], part: usize, room: usize) -> Vec<u8> {
        let mut compressor = Compressor::new(format.into()).unwrap();
        pass(plain, part, room, &mut |input, last, out| compressor.run(input, last, out)).unwrap()
    }

    fn expand_within(
        format: Format,
        limits: ExpandLimits,
        data: &[u8],
        part: usize,
        room: usize,
    ) -> Result<Vec<u8>, TransferError> {
        let mut expander = Expander::new(format, limits).unwrap();
        pass(data, part, room, &mut |input, last, out| expander.run(input, last, out))
    }

    fn expand(format: Format, data: &[u8], part: usize) -> Result<Vec<u8>, TransferError> {
        expand_within(format, ExpandLimits::default(), data, part, 1000)
    }

    /// The format's own program.
    fn program(name: &str, arguments: &[&str], input: &[u8]) -> Vec<u8> {
        use std::io::Write as _;
        use std::process::{Command, Stdio};
        let mut child = Command::new(name)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it has to be installed");
        let mut stdin = child.stdin.take().unwrap();
        let input = input.to_vec();
        let writer = std::thread::spawn(move || stdin.write_all(&input).unwrap());
        let output = child.wait_with_output().unwrap();
        writer.join().unwrap();
        assert!(output.status.success());
        output.stdout
    }

    fn content(len: usize) -> Vec<u8> {
        (0..len).map(|at| ((at / 7 * 31) ^ (at >> 9)) as u8).collect()
    }

    #[test]
    fn gzip_agrees_with_the_program_gzip() {
        for len in [0, 1, 70_000, 1_000_000] {
            let plain = content(len);
            let ours = compress(Format::Gzip, &plain, 10_000, 4096);
            assert!(program("gzip", &["-d"], &ours) == plain);
            let theirs = program("gzip", &["-9"], &plain);
            assert!(expand(Format::Gzip, &theirs, 777).unwrap() == plain);
            // Two members are one stream.
            let both = [theirs, ours].concat();
            assert!(expand(Format::Gzip, &both, 777).unwrap() == [&plain[..], &plain].concat());
        }
    }

    #[test]
    fn zeros_behind_a_member_of_gzip_are_no_member_and_other_bytes_are_refused() {
        let plain = content(70_000);
        let packed = compress(Format::Gzip, &plain, 10_000, 4096);
        let with = |behind: &[u8]| [&packed[..], behind].concat();
        for part in [1, 777, 1 << 20] {
            for zeros in [1, 2, 511, 100_000] {
                let padded = with(&vec![0; zeros]);
                assert!(expand(Format::Gzip, &padded, part).unwrap() == plain, "{zeros} {part}");
                // The program takes the same.
                assert!(part > 1 || program("gzip", &["-dc"], &padded) == plain);
                for wrong in [&b"x"[..], &packed, &[0, 0, 1]] {
                    let wrong = [&padded[..], wrong].concat();
                    let refused = expand(Format::Gzip, &wrong, part);
                    assert_eq!(
                        refused,
                        Err(TransferError::Corrupt(Format::Gzip)),
                        "{zeros} {part}"
                    );
                }
            }
            // One that could begin a header is short of the rest.
            for (wrong, refusal) in [
                (&b"x"[..], TransferError::Truncated(Format::Gzip)),
                (&[0x1f, 0x8c, 8, 0], TransferError::Corrupt(Format::Gzip)),
                (&[255; 100], TransferError::Corrupt(Format::Gzip)),
            ] {
                assert_eq!(expand(Format::Gzip, &with(wrong), part), Err(refusal));
            }
            // Zeros alone are no stream, and no other format has them.
            let refused = expand(Format::Gzip, &[0; 100], part);
            assert_eq!(refused, Err(TransferError::Corrupt(Format::Gzip)));
            let packed = compress(Format::Zstd, &plain, 10_000, 4096);
            let refused = expand(Format::Zstd, &[&packed[..], &[0; 100]].concat(), part);
            assert_eq!(refused, Err(TransferError::Corrupt(Format::Zstd)));
        }
    }

    #[test]
    fn zstd_expands_what_its_program_made() {
        // By the program zstd 1.5.4; its checksum is right.
        let frame = [
            0x28, 0xb5, 0x2f, 0xfd, 0x04, 0x68, 0x6d, 0, 0, 0x38, 0x68, 0x65, 0x6c, 0x6c, 0x6f,
            0x20, 0x0a, 1, 0, 0x99, 0x4b, 0x11, 0xa8, 0x7c, 0x2e, 0xa8,
        ];
        let plain = &b"hello hello hello hello\n"[..];
        for part in [1, 5, 100] {
            assert_eq!(expand(Format::Zstd, &frame, part).unwrap(), plain);
            let twice = expand(Format::Zstd, &[frame, frame].concat(), part).unwrap();
            assert_eq!(twice, plain.repeat(2));
        }
        let mut wrong = frame;
        wrong[12] ^= 1;
        assert_eq!(expand(Format::Zstd, &wrong, 100), Err(TransferError::Corrupt(Format::Zstd)));
    }

    /// A stream that expands to nothing, as each format begins and ends it.
    fn empty_member(format: Format) -> Vec<u8> {
        compress(format, &[], 1, 100)
    }

    #[test]
    fn many_members_are_expanded_in_several_runs() {
        for format in Format::ALL {
            let (one, most) = (empty_member(format), MEMBERS_OF_RUN_MAX as usize);
            let data = [one.repeat(most + 1), compress(format, b"x", 1, 100)].concat();
            let mut expander = Expander::new(format, ExpandLimits::default()).unwrap();
            let mut out = [0; 1000];
            let ran = expander.run(&data, true, &mut out).unwrap();
            assert_eq!(ran, Ran { taken: most * one.len(), made: 0, done: false });
            let rest = &data[ran.taken..];
            let ran = expander.run(rest, true, &mut out).unwrap();
            assert_eq!(ran, Ran { taken: rest.len(), made: 1, done: true });
            // Of exactly as many, the end is seen.
            let mut expander = Expander::new(format, ExpandLimits::default()).unwrap();
            let data = one.repeat(most);
            let ran = expander.run(&data, true, &mut out).unwrap();
            assert_eq!(ran, Ran { taken: data.len(), made: 0, done: true });
        }
    }

    #[test]
    fn too_many_empty_members_in_a_row_are_refused() {
        for format in Format::ALL {
            let (one, full) = (empty_member(format), compress(format, b"x", 1, 100));
            let most = one.repeat(EMPTY_MEMBERS_MAX as usize);
            for part in [13, 100_000] {
                let allowed = [&most[..], &full, &most, &full].concat();
                assert_eq!(expand(format, &allowed, part).unwrap(), b"xx");
                let refused = [&full[..], &most, &one, &full].concat();
                assert_eq!(
                    expand(format, &refused, part),
                    Err(TransferError::EmptyMembers(format))
                );
            }
        }
        assert_eq!(TransferError::EmptyMembers(Format::Gzip).name(), "corrupt");
    }

    #[test]
    fn bombs_are_defused() {
        for format in Format::ALL {
            let bomb = compress(format, &vec![0; 40 << 20], 1 << 20, 1 << 16);
            let within = |bytes, ratio| {
                let limits = ExpandLimits { bytes, ratio };
                expand_within(format, limits, &bomb, 100_000, 1 << 16).map(|plain| plain.len())
            };
            let too_much = Err(TransferError::ExpandsTooMuch(format));
            assert_eq!(within(u64::MAX, 100), too_much);
            assert_eq!(within(39 << 20, u32::MAX), too_much);
            assert_eq!(within(40 << 20, u32::MAX), Ok(40 << 20));
        }
        // A frame that asks for a window of 128 MiB: magic number, descriptor, window.
        let header = [0x28, 0xb5, 0x2f, 0xfd, 0x00, 17 << 3];
        let error = expand(Format::Zstd, &[&header[..], &[1, 0, 0]].concat(), 100);
        assert_eq!(error, Err(TransferError::ExpandsTooMuch(Format::Zstd)));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn what_was_compressed_expands(
            len in 0..200_000usize, zstd: bool, part in 1..70_000usize, room in 100..70_000usize, cut: prop::sample::Index, flip in 0..8u8,
        ) {
            let format = Format::ALL[usize::from(zstd)];
            let plain = content(len);
            let data = compress(format, &plain, part, room);
            let expand_all = |data: &[u8]| expand_within(format, ExpandLimits::default(), data, part, room);
            prop_assert!(expand_all(&data) == Ok(plain.clone()));
            // Cut off, and with one bit changed: an error, or bits that mean nothing (the time in a header).
            let at = cut.index(data.len());
            let truncated = expand_all(&data[..at]);
            prop_assert_eq!(truncated.err(), Some(TransferError::Truncated(format)));
            let mut changed = data;
            changed[at] ^= 1 << flip;
            match expand_all(&changed) {
                Ok(same) => prop_assert!(same == plain),
                Err(error) => prop_assert!(matches!(
                    error,
                    TransferError::Corrupt(_) | TransferError::Truncated(_) | TransferError::ExpandsTooMuch(_)
                )),
            }
        }
    }
}
