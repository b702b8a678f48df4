use proptest::prelude::*;

use super::*;

/// The same as the map, without tables.
#[derive(Default)]
struct Model(Vec<(u32, Buffer)>);

impl Model {
    fn register(&self, owner: u32, address: u64, bytes: u64) -> Result<(), RegisterError> {
        if bytes == 0 || bytes > BUFFER_BYTES_MAX {
            return Err(RegisterError::Size);
        }
        if (address | bytes) % 8 != 0 {
            return Err(RegisterError::Unaligned);
        }
        let Some(end) = address.checked_add(bytes) else { return Err(RegisterError::Wraps) };
        if self.0.iter().any(|(_, other)| other.address < end && address < other.end()) {
            return Err(RegisterError::Overlap);
        }
        let new = Buffer { owner, address, bytes };
        let of_page = |page: u64| {
            let has = |buffer: &Buffer| {
                (buffer.address / PAGE_BYTES..=(buffer.end() - 1) / PAGE_BYTES).contains(&page)
            };
            assert!(has(&new));
            self.0.iter().filter(|(_, buffer)| has(buffer)).count()
        };
        let crowded = [address, end - 1].map(|at| of_page(at / PAGE_BYTES) >= PER_PAGE_MAX);
        if crowded.contains(&true) { Err(RegisterError::PageFull) } else { Ok(()) }
    }

    fn at(&self, address: u64) -> Option<&(u32, Buffer)> {
        self.0.iter().find(|(_, b)| b.address <= address && address < b.end())
    }

    /// The buffers of the range, at every address where one begins or ends.
    fn translate(&self, owner: u32, address: u64, bytes: u64) -> Result<Vec<Run>, TranslateError> {
        if bytes == 0 {
            return Err(TranslateError::Empty);
        }
        let Some(end) = address.checked_add(bytes) else { return Err(TranslateError::Wraps) };
        let (mut at, mut runs) = (address, Vec::new());
        while at < end {
            match self.at(at) {
                None if at == address => return Err(TranslateError::Unknown),
                None => return Err(TranslateError::BeyondEnd),
                Some((_, buffer)) if buffer.owner != owner => return Err(TranslateError::Foreign),
                Some((number, buffer)) => {
                    let bytes = end.min(buffer.end()) - at;
                    runs.push(Run { buffer: *number, offset: at - buffer.address, bytes });
                    at += bytes;
                }
            }
        }
        Ok(runs)
    }
}

fn translated(
    map: &AddressMap,
    owner: u32,
    address: u64,
    bytes: u64,
) -> Result<Vec<Run>, TranslateError> {
    map.translate(owner, address, bytes).map(Iterator::collect)
}

#[derive(Clone, Debug)]
enum Step {
    Register(u32, u64, u64),
    Unregister(u32, usize),
    Translate(u32, u64, u64),
}

/// Addresses and sizes at and near the edges of pages and entries, or anywhere.
fn number() -> impl Strategy<Value = u64> {
    let near = |unit: u64, count: u64| {
        (0..count, 0..5u64).prop_map(move |(n, by)| (unit * n + 8 * by).saturating_sub(16))
    };
    prop_oneof![
        4 => near(PAGE_BYTES, 70),
        2 => near(ENTRY_BYTES, 4),
        2 => near(4096, 40),
        1 => 0..3 * ENTRY_BYTES,
        1 => any::<u64>(),
        1 => (0..64u64).prop_map(|below| u64::MAX - below),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let owner = 0..2u32;
    prop_oneof![
        3 => (owner.clone(), number(), number()).prop_map(|(o, a, b)| Step::Register(o, a, b)),
        1 => (owner.clone(), 0..12usize).prop_map(|(o, at)| Step::Unregister(o, at)),
        5 => (owner, number(), number()).prop_map(|(o, a, b)| Step::Translate(o, a, b)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn the_map_does_what_a_list_of_buffers_does(steps in proptest::collection::vec(step(), 1..60)) {
        let (mut map, mut model) = (AddressMap::new(), Model::default());
        for step in steps {
            match step {
                Step::Register(owner, address, bytes) => {
                    let expected = model.register(owner, address, bytes);
                    // The map is limited in all bytes, which the model does not count.
                    match map.register(owner, address, bytes) {
                        Err(RegisterError::Full) => prop_assert!(bytes > 1 << 30),
                        Ok(number) => {
                            prop_assert_eq!(expected, Ok(()));
                            prop_assert!(model.0.iter().all(|(other, _)| *other != number));
                            model.0.push((number, Buffer { owner, address, bytes }));
                        }
                        Err(error) => prop_assert_eq!(Err(error), expected),
                    }
                }
                Step::Unregister(owner, at) => {
                    let number = model.0.get(at).map_or(at as u32, |(number, _)| *number);
                    let place = model.0.iter().position(|(n, b)| (*n, b.owner) == (number, owner));
                    let removed = place.map(|place| model.0.swap_remove(place).1);
                    prop_assert_eq!(map.unregister(owner, number), removed);
                }
                Step::Translate(owner, address, bytes) => {
                    let expected = model.translate(owner, address, bytes);
                    prop_assert_eq!(translated(&map, owner, address, bytes), expected);
                }
            }
            // The edges of every buffer, for both owners.
            for (_, Buffer { address, bytes, .. }) in &model.0 {
                for at in [address.wrapping_sub(1), *address, address + bytes - 1, address + bytes] {
                    for (owner, length) in [(0, 1), (1, 1), (0, 2), (0, *bytes), (1, bytes + 1)] {
                        let expected = model.translate(owner, at, length);
                        prop_assert_eq!(translated(&map, owner, at, length), expected);
                    }
                }
            }
        }
        for (number, buffer) in model.0 {
            prop_assert_eq!(map.unregister(buffer.owner, number), Some(buffer));
        }
        prop_assert!(map.main.is_empty() && map.order.is_empty() && map.bytes == 0);
        prop_assert!(map.groups.iter().flatten().all(|page| *page == EMPTY));
        prop_assert_eq!(map.free_groups.len(), map.groups.len());
    }
}

/// FpgaNIC's public code compares a page's number with the number of the last page as "less" to translate and as "greater" to
/// count a miss, so an access to the page in between is neither translated nor counted.
#[test]
fn the_last_page_of_a_buffer_is_translated_and_the_next_one_is_refused() {
    for pages in [1, 2, 31, 32, 33, 64, 65] {
        let mut map = AddressMap::new();
        let (base, bytes) = (5 * ENTRY_BYTES, pages * PAGE_BYTES);
        let buffer = map.register(1, base, bytes).unwrap();
        for page in 0..pages {
            let offset = page * PAGE_BYTES;
            let run = Run { buffer, offset, bytes: PAGE_BYTES };
            assert_eq!(translated(&map, 1, base + offset, PAGE_BYTES), Ok(vec![run]), "{page}");
        }
        let end = base + bytes;
        let last = Run { buffer, offset: bytes - 1, bytes: 1 };
        assert_eq!(translated(&map, 1, end - 1, 1), Ok(vec![last]));
        assert_eq!(translated(&map, 1, end - 1, 2), Err(TranslateError::BeyondEnd));
        assert_eq!(translated(&map, 1, end, 1), Err(TranslateError::Unknown));
        assert_eq!(translated(&map, 1, end + PAGE_BYTES, 1), Err(TranslateError::Unknown));
        assert_eq!(translated(&map, 1, base - 1, 1), Err(TranslateError::Unknown));
    }
}

/// FpgaNIC's public code counts an access that crosses a page, and does not split it.
#[test]
fn a_range_over_pages_entries_and_buffers_has_one_run_for_each_buffer() {
    let mut map = AddressMap::new();
    let base = 3 * ENTRY_BYTES - 3 * PAGE_BYTES;
    let sizes = [3 * PAGE_BYTES + 8, ENTRY_BYTES, 64, ENTRY_BYTES + PAGE_BYTES];
    let mut at = base;
    let numbers = sizes.map(|bytes| {
        let number = map.register(7, at, bytes).unwrap();
        at += bytes;
        number
    });
    let runs = translated(&map, 7, base + 16, at - base - 24).unwrap();
    let [a, b, c, d] = numbers;
    let expected = [(a, 16, sizes[0] - 16), (b, 0, sizes[1]), (c, 0, 64), (d, 0, sizes[3] - 8)];
    let run = |(buffer, offset, bytes)| Run { buffer, offset, bytes };
    assert_eq!(runs, expected.map(run));
    assert_eq!(
        map.unregister(7, c),
        Some(Buffer { owner: 7, address: at - sizes[3] - 64, bytes: 64 })
    );
    assert_eq!(translated(&map, 7, base, at - base), Err(TranslateError::BeyondEnd));
}

#[test]
fn only_the_owner_names_and_unregisters_a_buffer() {
    let mut map = AddressMap::new();
    let (first, second) =
        (map.register(1, 4096, 4096).unwrap(), map.register(2, 8192, 64).unwrap());
    assert_eq!(translated(&map, 2, 4096, 8), Err(TranslateError::Foreign));
    assert_eq!(translated(&map, 1, 8184, 16), Err(TranslateError::Foreign), "its end is another's");
    assert_eq!((map.unregister(2, first), map.unregister(1, second)), (None, None));
    assert_eq!(map.unregister(1, 9), None);
    assert!(translated(&map, 1, 4096, 4096).is_ok() && translated(&map, 2, 8192, 64).is_ok());
}

#[test]
fn what_cannot_be_registered_is_refused_and_changes_nothing() {
    let mut map = AddressMap::new();
    let top = u64::MAX - 7;
    for (address, bytes, error) in [
        (0, 0, RegisterError::Size),
        (0, BUFFER_BYTES_MAX + 8, RegisterError::Size),
        (0, u64::MAX, RegisterError::Size),
        (4, 8, RegisterError::Unaligned),
        (8, 12, RegisterError::Unaligned),
        (top, 8, RegisterError::Wraps),
        (top, 16, RegisterError::Wraps),
    ] {
        assert_eq!(map.register(0, address, bytes), Err(error), "{address:#x} {bytes:#x}");
    }
    let last = map.register(0, top - 8, 8).unwrap();
    assert_eq!(translated(&map, 0, top - 8, 8).unwrap().len(), 1);
    assert_eq!(translated(&map, 0, top - 8, 16), Err(TranslateError::Wraps));
    map.unregister(0, last).unwrap();
    for n in 0..PER_PAGE_MAX as u64 {
        map.register(0, 64 * n, 64).unwrap();
    }
    assert_eq!(map.register(0, 4096, 64), Err(RegisterError::PageFull));
    assert_eq!(map.register(0, 128, ENTRY_BYTES), Err(RegisterError::Overlap));
    for n in map.order.len() as u64..BUFFERS_MAX as u64 {
        map.register(0, PAGE_BYTES * n, 64).unwrap();
    }
    assert_eq!(map.register(0, 1 << 40, 8), Err(RegisterError::Full));
}
