//! DICTIONARY: what a reader copies is one value that the key had, though writers change chains and use entries again meanwhile. The code is that of
//! the dictionaries of functions.

use super::orders::{self as atomic, Relaxed};
use super::*;

#[expect(
    dead_code,
    reason = "the size of entries, and the end of a dictionary, have no part in the order"
)]
#[path = "../../../onpath/src/dictionary/table.rs"]
mod table;

use table::{Bytes, Table, Unstored};

/// A key of one word, a value of two.
type Small = Table<4>;

fn bytes(words: &[u64]) -> Bytes<'_> {
    Bytes { words, len: 8 * words.len() as u8 }
}

fn set(table: &Small, key: u64, value: u64) -> Result<(), Unstored> {
    table.set(0, &bytes(&[key]), &bytes(&[value, value]))
}

/// The value of a key, both words of which are the same.
fn get(table: &Small, key: u64) -> Option<u64> {
    let mut value = [0; 2];
    let len = table.get(0, &bytes(&[key]), &mut value)?;
    assert!(len == 16 && value[0] == value[1], "a value is torn: {value:?}");
    Some(value[0])
}

/// All keys have one chain.
fn small(keys: usize, spare: usize, relaxed: Relaxed) -> Rc<Small> {
    atomic::begin(relaxed);
    Rc::new(Table::new(keys, spare, 2))
}

/// A key gets other values, in entries that are used again.
fn a_value_changes(relaxed: Relaxed) -> impl Fn() + Sync + Send {
    move || {
        let table = small(1, 1, relaxed);
        set(&table, 7, 1).unwrap();
        let writer = table.clone();
        let writes = thread::spawn(move || {
            set(&writer, 7, 2).unwrap();
            set(&writer, 7, 3).unwrap();
        });
        let value = get(&table, 7);
        assert!(matches!(value, Some(1..=3)), "a value is torn: {value:?}");
        writes.join().unwrap();
        assert_eq!(get(&table, 7), Some(3));
        assert_eq!(table.used(), (1, 24));
    }
}

/// The entry behind another one is removed, and another key gets it.
fn a_key_goes(relaxed: Relaxed) -> impl Fn() + Sync + Send {
    move || {
        let table = small(2, 1, relaxed);
        set(&table, 7, 1).unwrap();
        set(&table, 8, 5).unwrap();
        let writer = table.clone();
        let writes = thread::spawn(move || {
            assert_eq!(writer.delete(0, &bytes(&[7])), Ok(true));
            set(&writer, 9, 2).unwrap();
        });
        let value = get(&table, 7);
        assert!(matches!(value, None | Some(1)), "a value is torn: {value:?}");
        writes.join().unwrap();
        let values = [7, 8, 9].map(|key| get(&table, key));
        assert_eq!(values, [None, Some(5), Some(2)]);
        assert_eq!(table.used(), (2, 48));
    }
}

/// Two writers of one chain: none of their entries is lost or used twice.
fn two_write() {
    let table = small(2, 2, Relaxed::Nothing);
    let writer = table.clone();
    let writes = thread::spawn(move || set(&writer, 7, 1));
    let mine = set(&table, 7, 2).and(set(&table, 8, 3));
    let theirs = writes.join().unwrap();
    // One gives up if the other one does not go on.
    let none = |result| matches!(result, Err(Unstored::Full));
    assert!(!none(mine) && !none(theirs), "there is room for two keys");
    if mine.is_ok() {
        assert!(matches!(get(&table, 7), Some(1 | 2)) && get(&table, 8) == Some(3));
    }
    for key in [7, 8] {
        table.delete(0, &bytes(&[key])).unwrap();
    }
    assert_eq!(table.used(), (0, 0));
    // Both places are there again.
    assert_eq!([1, 2, 3].map(|key| set(&table, key, 4)), [Ok(()), Ok(()), Err(Unstored::Full)]);
}

holds! {
    a_value_that_changes_is_whole: a_value_changes(Relaxed::Nothing);
    a_key_that_goes_is_whole: a_key_goes(Relaxed::Nothing);
    two_writers_of_a_chain: two_write;
}

fails! {
    dictionary_without_release: a_value_changes(Relaxed::Stores), "a value is torn";
    dictionary_without_acquire: a_value_changes(Relaxed::Loads), "a value is torn";
    dictionary_removal_without_release: a_key_goes(Relaxed::Stores), "a value is torn";
    dictionary_removal_without_acquire: a_key_goes(Relaxed::Loads), "a value is torn";
}
