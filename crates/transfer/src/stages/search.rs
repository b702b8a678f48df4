//! Search: how often a text occurs, or which lines match a regular expression, in a stream that comes in parts.
//!
//! * *Text*: bytes, anywhere, also over line ends. Occurrences do not overlap: after one the search goes on behind it.
//! * *Lines*: a regular expression (the syntax of the crate `regex`, with ASCII classes), looked for in each line as `grep` does. Its engine
//!   takes time linear in the line, whatever the expression. `\A` and `\z` are refused, because `^` and `$` are the ends of a line.
//!
//! The parts of a stream make no difference. For that a search holds the begin of an occurrence, or of a line, which may have
//! [`LINE_BYTES_MAX`].
//!
//! Ranges of a file can be searched at the same time. What a range has at its ends, which may belong to a line or an occurrence of two
//! of them, is searched when all have ended.

use memchr::{memchr, memmem, memrchr};
use regex::bytes::{Regex, RegexBuilder};
use regex_syntax::hir::{Class, Hir, HirKind, Look};

use crate::command::error::TransferError;
use crate::command::limits::{
    CACHE_BYTES_MAX, LINE_BYTES_MAX, OFFSETS_MAX, PATTERN_BYTES_MAX, PROGRAM_BYTES_MAX,
};
use crate::command::stage::{Edges, Found, SearchKind, SearchSpec};

/// A search at work.
pub struct Searcher {
    state: State,
    offsets_max: u16,
    found: Found,
    /// The begin of an occurrence or of a line.
    carry: Vec<u8>,
    /// Bytes before the carry.
    passed: u64,
    /// Of a range that is searched beside others.
    range: Option<Range>,
}

struct Range {
    /// What [`Edges::head`] becomes.
    head: Vec<u8>,
    /// More of it may come.
    head_goes_on: bool,
    is_last: bool,
}

#[derive(Clone)]
enum State {
    Text(Box<memmem::Finder<'static>>),
    /// `one_by_one`: a match could pass the end of a line.
    Lines {
        regex: Regex,
        one_by_one: bool,
    },
}

impl Searcher {
    /// For one stream.
    pub fn new(spec: &SearchSpec) -> Result<Self, TransferError> {
        let refused = |why: &str| TransferError::Pattern(why.to_owned());
        if spec.pattern.is_empty() || spec.pattern.len() > PATTERN_BYTES_MAX {
            return Err(refused("it has to have 1 to 512 bytes"));
        }
        if spec.offsets > OFFSETS_MAX {
            return Err(refused("at most 1024 offsets can be reported"));
        }
        let state = match spec.kind {
            SearchKind::Text => {
                State::Text(Box::new(memmem::Finder::new(&spec.pattern).into_owned()))
            }
            SearchKind::Lines => {
                let text = std::str::from_utf8(&spec.pattern)
                    .map_err(|_| refused("an expression has to be UTF-8"))?;
                compile(text)?
            }
        };
        Ok(Self::with(state, spec.offsets))
    }

    /// Another one for the same search, which is not compiled again.
    pub(crate) fn another(&self) -> Self {
        Self::with(self.state.clone(), self.offsets_max)
    }

    fn with(state: State, offsets_max: u16) -> Self {
        let (found, carry) = (Found::default(), Vec::new());
        Self { state, offsets_max, found, carry, passed: 0, range: None }
    }

    /// For a range of the stream that begins with its byte `start`, while others search the other ranges.
    pub(crate) fn begin_range(&mut self, start: u64, is_last: bool) {
        self.passed = start;
        self.range = Some(Range { head: Vec::new(), head_goes_on: start > 0, is_last });
    }

    /// Looks at a part of the stream.
    pub fn update(&mut self, bytes: &[u8]) -> Result<(), TransferError> {
        let bytes = self.take_head(bytes)?;
        match &self.state {
            State::Text(finder) => {
                let keep = finder.needle().len() - 1;
                let mut from = 0;
                if !self.carry.is_empty() {
                    // Occurrences that begin in the carry end in as many bytes as one has, without its first.
                    let held = self.carry.len();
                    self.carry.extend_from_slice(&bytes[..keep.min(bytes.len())]);
                    let mut at = 0;
                    while let Some(next) = finder.find(&self.carry[at..]) {
                        self.found.add(self.passed + (at + next) as u64, self.offsets_max);
                        at += next + keep + 1;
                    }
                    if bytes.len() < keep {
                        // The carry has all of the stream so far.
                        let drop = at.max(self.carry.len().saturating_sub(keep));
                        self.carry.drain(..drop);
                        self.passed += drop as u64;
                        return Ok(());
                    }
                    from = at.saturating_sub(held);
                    self.passed += held as u64;
                    self.carry.clear();
                }
                while let Some(next) = finder.find(&bytes[from..]) {
                    self.found.add(self.passed + (from + next) as u64, self.offsets_max);
                    from += next + keep + 1;
                }
                from = from.max(bytes.len().saturating_sub(keep));
                self.carry.extend_from_slice(&bytes[from..]);
                self.passed += from as u64;
                Ok(())
            }
            State::Lines { .. } => self.update_lines(bytes),
        }
    }

    /// Keeps what the range before may need, and returns what is searched here.
    fn take_head<'b>(&mut self, bytes: &'b [u8]) -> Result<&'b [u8], TransferError> {
        let Some(range) = self.range.as_mut().filter(|range| range.head_goes_on) else {
            return Ok(bytes);
        };
        match &self.state {
            State::Text(finder) => {
                let left = finder.needle().len() - 1 - range.head.len();
                range.head.extend_from_slice(&bytes[..left.min(bytes.len())]);
                range.head_goes_on = left > bytes.len();
                Ok(bytes)
            }
            State::Lines { .. } => {
                let end = memchr(b'\n', bytes).map(|at| at + 1);
                let (head, rest) = bytes.split_at(end.unwrap_or(bytes.len()));
                if range.head.len() + head.len() > LINE_BYTES_MAX + 1 {
                    return Err(TransferError::LineTooLong);
                }
                range.head.extend_from_slice(head);
                range.head_goes_on = end.is_none();
                self.passed += head.len() as u64;
                Ok(rest)
            }
        }
    }

    fn update_lines(&mut self, bytes: &[u8]) -> Result<(), TransferError> {
        let mut rest = bytes;
        if !self.carry.is_empty() {
            let end = memchr(b'\n', bytes).map_or(bytes.len(), |at| at + 1);
            let (line, later) = bytes.split_at(end);
            self.hold(line)?;
            rest = later;
            if line.last() != Some(&b'\n') {
                return Ok(());
            }
            let line = std::mem::take(&mut self.carry);
            self.search_lines(&line);
            self.carry = line;
            self.carry.clear();
        }
        let whole = memrchr(b'\n', rest).map_or(0, |at| at + 1);
        let (lines, begun) = rest.split_at(whole);
        self.search_lines(lines);
        self.hold(begun)
    }

    fn hold(&mut self, part: &[u8]) -> Result<(), TransferError> {
        if self.carry.len() + part.len() > LINE_BYTES_MAX + 1 {
            return Err(TransferError::LineTooLong);
        }
        self.carry.extend_from_slice(part);
        Ok(())
    }

    /// Looks at whole lines; the last one may have no end.
    fn search_lines(&mut self, lines: &[u8]) {
        let State::Lines { regex, one_by_one } = &self.state else { unreachable!("a text") };
        let mut at = 0;
        while at < lines.len() {
            let mut from = at;
            if !one_by_one {
                // A place in the next match in all lines: matches pass no end of a line, so nothing is looked at twice. Where the match
                // begins does not matter, and to know it takes another pass.
                let Some(end) = regex.shortest_match_at(lines, at) else { break };
                from = end;
                if from == lines.len() && lines.ends_with(b"\n") {
                    break;
                }
            }
            let start = memrchr(b'\n', &lines[..from]).map_or(0, |end| end + 1);
            let end = memchr(b'\n', &lines[from..]).map_or(lines.len(), |len| from + len);
            if !one_by_one || regex.is_match(&lines[start..end]) {
                self.found.add(self.passed + start as u64, self.offsets_max);
            }
            at = end + 1;
        }
        self.passed += lines.len() as u64;
    }

    /// The stream has ended.
    pub fn finish(mut self) -> Found {
        let (line, range) = (std::mem::take(&mut self.carry), self.range.take());
        let is_last = range.as_ref().is_none_or(|range| range.is_last);
        let head = range.map(|range| range.head);
        if !is_last {
            let (head, tail_at) = (head.unwrap_or_default(), self.passed);
            self.found.edges = Some(Box::new(Edges { head, tail: line, tail_at }));
            return self.found;
        }
        if matches!(self.state, State::Lines { .. }) {
            self.search_lines(&line);
        }
        self.found.edges = head.map(|head| Box::new(Edges { head, ..Edges::default() }));
        self.found
    }
}

/// Whether ranges can be searched at the same time: a text whose begin is its end, too, can occur twice in the same bytes, and which of
/// them counts depends on all that is before.
pub(crate) fn can_be_ranges(spec: &SearchSpec) -> bool {
    let text = &spec.pattern;
    let repeats = (1..text.len()).any(|len| text[..len] == text[text.len() - len..]);
    spec.kind == SearchKind::Lines || !repeats
}

/// What all ranges of this search have, in their order.
pub(crate) fn join(search: &Searcher, ranges: Vec<Found>) -> Result<Found, TransferError> {
    let mut all = Found::default();
    let (mut before, last) = (Edges::default(), ranges.len().saturating_sub(1));
    for (index, range) in ranges.into_iter().enumerate() {
        let edges = range.edges.map_or_else(Edges::default, |edges| *edges);
        let goes_on = index > 0 && index < last && !edges.head.ends_with(b"\n");
        if goes_on && matches!(search.state, State::Lines { .. }) {
            // All of the range is within one line.
            before.tail.extend(edges.head);
            continue;
        }
        let mut between = Found::default();
        if index > 0 {
            let mut searcher = search.another();
            searcher.passed = before.tail_at;
            searcher.update(&before.tail)?;
            searcher.update(&edges.head)?;
            between = searcher.finish();
        }
        for found in [between, Found { edges: None, ..range }] {
            all.count += found.count;
            let room = usize::from(search.offsets_max) - all.offsets.len();
            all.offsets.extend(found.offsets.into_iter().take(room));
        }
        before = edges;
    }
    Ok(all)
}

#[cfg(test)]
thread_local! {
    /// Expressions that this thread has compiled.
    pub(crate) static COMPILED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

fn compile(text: &str) -> Result<State, TransferError> {
    #[cfg(test)]
    COMPILED.set(COMPILED.get() + 1);
    let first_line = |error: &dyn std::fmt::Display| {
        // The last line of the explanation has the reason.
        let text = error.to_string();
        let line = text.lines().last().unwrap_or_default();
        TransferError::Pattern(line.trim_start_matches("error: ").to_owned())
    };
    let mut parser = regex_syntax::ParserBuilder::new();
    let parser = parser.unicode(false).utf8(false).multi_line(true);
    let parsed = parser.build().parse(text).map_err(|error| first_line(&error))?;
    let looks = parsed.properties().look_set();
    if looks.contains(Look::Start) || looks.contains(Look::End) {
        let why = "an expression for lines has no \\A and \\z: use ^ and $";
        return Err(TransferError::Pattern(why.to_owned()));
    }
    let mut builder = RegexBuilder::new(text);
    builder.unicode(false).multi_line(true);
    builder.size_limit(PROGRAM_BYTES_MAX).dfa_size_limit(CACHE_BYTES_MAX);
    let regex = builder.build().map_err(|error| first_line(&error))?;
    Ok(State::Lines { regex, one_by_one: may_match_line_end(&parsed) })
}

/// Whether a byte of a match may be the end of a line.
fn may_match_line_end(part: &Hir) -> bool {
    match part.kind() {
        HirKind::Empty | HirKind::Look(_) => false,
        HirKind::Literal(literal) => literal.0.contains(&b'\n'),
        HirKind::Class(Class::Bytes(class)) => {
            class.ranges().iter().any(|range| (range.start()..=range.end()).contains(&b'\n'))
        }
        HirKind::Class(Class::Unicode(class)) => {
            class.ranges().iter().any(|range| (range.start()..=range.end()).contains(&'\n'))
        }
        HirKind::Repetition(repeated) => may_match_line_end(&repeated.sub),
        HirKind::Capture(group) => may_match_line_end(&group.sub),
        HirKind::Concat(parts) | HirKind::Alternation(parts) => {
            parts.iter().any(may_match_line_end)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn search(kind: SearchKind, pattern: &[u8], parts: &[&[u8]]) -> Result<Found, TransferError> {
        let spec = SearchSpec { kind, pattern: pattern.to_vec(), offsets: OFFSETS_MAX };
        let mut searcher = Searcher::new(&spec)?;
        parts.iter().try_for_each(|part| searcher.update(part))?;
        Ok(searcher.finish())
    }

    /// By another way: position for position.
    fn occurrences(pattern: &[u8], text: &[u8]) -> Vec<u64> {
        let (mut found, mut at) = (Vec::new(), 0);
        while at + pattern.len() <= text.len() {
            let is_here = &text[at..at + pattern.len()] == pattern;
            if is_here {
                found.push(at as u64);
            }
            at += if is_here { pattern.len() } else { 1 };
        }
        found
    }

    /// By another way: each line alone.
    fn matching_lines(pattern: &str, text: &[u8]) -> Vec<u64> {
        let regex = RegexBuilder::new(pattern).unicode(false).build().unwrap();
        let (mut found, mut at) = (Vec::new(), 0);
        for line in text.split_inclusive(|byte| *byte == b'\n') {
            if regex.is_match(line.strip_suffix(b"\n").unwrap_or(line)) {
                found.push(at as u64);
            }
            at += line.len();
        }
        found
    }

    fn cut<'t>(text: &'t [u8], cuts: &[prop::sample::Index]) -> Vec<&'t [u8]> {
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
        cuts.sort_unstable();
        let starts = [0].into_iter().chain(cuts.iter().copied());
        let ends = cuts.iter().copied().chain([text.len()]);
        starts.zip(ends).map(|(start, end)| &text[start..end]).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn parts_of_a_text_make_no_difference(
            text in prop::collection::vec(prop::sample::select(&b"ab\n"[..]), 0..200),
            pattern in prop::collection::vec(prop::sample::select(&b"ab\n"[..]), 1..6),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..40),
        ) {
            let found = search(SearchKind::Text, &pattern, &cut(&text, &cuts)).unwrap();
            prop_assert_eq!(&found.offsets, &occurrences(&pattern, &text));
            prop_assert_eq!(found.count, found.offsets.len() as u64);
        }

        #[test]
        fn ranges_make_no_difference(
            text in prop::collection::vec(prop::sample::select(&b"ab\n"[..]), 0..200),
            search in prop::sample::select(vec![
                (SearchKind::Text, "ab"), (SearchKind::Text, "b"), (SearchKind::Text, "aab"), (SearchKind::Text, "a\nb"),
                (SearchKind::Lines, "a"), (SearchKind::Lines, "^$"), (SearchKind::Lines, "^b"), (SearchKind::Lines, "ab*a$"),
            ]),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..10),
            offsets in 0..20u16,
        ) {
            let spec = SearchSpec { kind: search.0, pattern: search.1.into(), offsets };
            prop_assert!(can_be_ranges(&spec));
            let mut ranges = cut(&text, &cuts);
            // An occurrence lies in two ranges at most.
            ranges.retain(|range| range.len() > 2);
            let text = ranges.concat();
            let (mut at, mut found) = (0, Vec::new());
            for (index, range) in ranges.iter().enumerate() {
                let mut searcher = Searcher::new(&spec).unwrap();
                searcher.begin_range(at, index + 1 == ranges.len());
                let (begin, end) = range.split_at(range.len() / 3);
                searcher.update(begin).unwrap();
                searcher.update(end).unwrap();
                found.push(searcher.finish());
                at += range.len() as u64;
            }
            let mut whole = Searcher::new(&spec).unwrap();
            whole.update(&text).unwrap();
            prop_assert_eq!(join(&whole.another(), found).unwrap(), whole.finish());
        }

        #[test]
        fn parts_of_lines_make_no_difference(
            text in prop::collection::vec(prop::sample::select(&b"ab \n\n\xff"[..]), 0..200),
            pattern in prop::sample::select(vec![
                "a", "ab*a", "^a", "b$", "^$", "a|b a", "[^a]b", r"\bab\b", r"\s", "(a|b)*a", "^(?:a|b)+$", "a.b", "b{2,4}", r"a\s*b",
            ]),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..40),
        ) {
            let found = search(SearchKind::Lines, pattern.as_bytes(), &cut(&text, &cuts)).unwrap();
            prop_assert_eq!(found.offsets, matching_lines(pattern, &text));
        }
    }

    #[test]
    fn wrong_expressions_are_refused_with_a_sentence() {
        let refused =
            |pattern: &str| search(SearchKind::Lines, pattern.as_bytes(), &[]).unwrap_err();
        let text = |pattern: &str| refused(pattern).to_string();
        assert_eq!(text("a("), "the pattern cannot be used: unclosed group");
        assert!(text(r"\Aa").ends_with("use ^ and $"), "{}", text(r"\Aa"));
        assert!(
            text("((a{99}){99}){99}").contains("exceeds size limit"),
            "{}",
            text("((a{99}){99}){99}")
        );
        assert!(text("").contains("1 to 512 bytes"));
    }

    #[test]
    fn a_text_that_overlaps_itself_is_searched_in_one_go() {
        let spec = |pattern: &[u8]| SearchSpec {
            kind: SearchKind::Text,
            pattern: pattern.to_vec(),
            offsets: 0,
        };
        for (pattern, can) in [("a", true), ("abc", true), ("aa", false), ("abcab", false)] {
            assert_eq!(can_be_ranges(&spec(pattern.as_bytes())), can, "{pattern}");
        }
    }

    #[test]
    fn a_line_of_two_ranges_may_be_long_but_not_endless() {
        let spec = SearchSpec { kind: SearchKind::Lines, pattern: b"a".to_vec(), offsets: 1 };
        let of = |len: usize| {
            let ranges = [0, len as u64].map(|start| {
                let mut searcher = Searcher::new(&spec).unwrap();
                searcher.begin_range(start, start > 0);
                searcher.update(&vec![b'a'; len]).unwrap();
                searcher.finish()
            });
            join(&Searcher::new(&spec).unwrap(), ranges.to_vec())
        };
        let found = Found { count: 1, offsets: vec![0], edges: None };
        assert_eq!(of(LINE_BYTES_MAX / 2), Ok(found));
        assert_eq!(of(LINE_BYTES_MAX / 2 + 1), Err(TransferError::LineTooLong));
        let mut endless = Searcher::new(&spec).unwrap();
        endless.begin_range(1, true);
        assert_eq!(
            endless.update(&vec![b'a'; LINE_BYTES_MAX + 2]),
            Err(TransferError::LineTooLong)
        );
    }

    /// Engines that backtrack take years for it.
    #[test]
    fn no_expression_is_catastrophic() {
        let line = [vec![b'a'; 100_000], b"c\n".to_vec()].concat();
        let found = search(SearchKind::Lines, b"^(a+)+$|(a*)*b", &[&line[..], &line]).unwrap();
        assert_eq!(found.count, 0);
        // A match that would pass all line ends is looked for in each line alone.
        let lines = b"ax\n".repeat(200_000);
        let found = search(SearchKind::Lines, b"(?s)a.*b", &[&lines]).unwrap();
        assert_eq!(found.count, 0);
    }

    #[test]
    fn a_line_may_be_long_but_not_endless() {
        let line = vec![b'a'; LINE_BYTES_MAX];
        let found =
            search(SearchKind::Lines, b"ab?$", &[&line[..7], &line[7..], b"\na\n"]).unwrap();
        assert_eq!((found.count, found.offsets), (2, vec![0, 1 + LINE_BYTES_MAX as u64]));
        let endless = search(SearchKind::Lines, b"a", &[&line, b"aa"]);
        assert_eq!(endless, Err(TransferError::LineTooLong));
    }
}
