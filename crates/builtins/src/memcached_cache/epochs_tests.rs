//! The epoch table by one thread. Not in its file, which loom compiles as well.

use super::atomic::Ordering;
use super::epochs::*;

#[test]
fn an_entry_is_valid_until_a_write_of_its_slot_begins() {
    let epochs = Epochs::new(4);
    let words = epochs.words(3).unwrap();
    assert!(epochs.is_valid(3, &words, 1));
    epochs.begin(Scope::Slot(3));
    assert!(epochs.words(3).is_none() && !epochs.is_valid(3, &words, 1));
    assert!(epochs.words(4).is_some(), "another slot");
    epochs.begin(Scope::Slot(3));
    epochs.end(Scope::Slot(3));
    assert!(epochs.words(3).is_none(), "one of two is pending");
    epochs.end(Scope::Slot(3));
    let next = epochs.words(3).unwrap();
    assert!(next != words && !epochs.is_valid(3, &words, 1) && epochs.is_valid(3, &next, 1));
    epochs.begin(Scope::Whole);
    assert!((0..16).all(|slot| epochs.words(slot).is_none()));
    epochs.end(Scope::Whole);
    assert!(!epochs.is_valid(3, &next, 1) && epochs.words(3).is_some());
}

#[test]
fn the_word_of_a_slot_survives_the_end_of_its_epochs() {
    let epochs = Epochs::new(0);
    epochs.slots[0].store(!PENDING_MASK, Ordering::Relaxed);
    let words = epochs.words(0).unwrap();
    epochs.begin(Scope::Slot(0));
    assert!(epochs.words(0).is_none());
    epochs.end(Scope::Slot(0));
    assert!(epochs.words(0).is_some_and(|next| next != words));
}

#[test]
fn a_window_that_begins_raises_the_floor_to_its_end() {
    let epochs = Epochs::new(0);
    let words = epochs.words(0).unwrap();
    epochs.add_window(0, 50, 80);
    epochs.add_window(0, 20, 30);
    let valid = |now_ns, asked_ns| {
        epochs.open_windows(now_ns);
        epochs.is_valid(0, &words, asked_ns)
    };
    assert!(valid(19, 1));
    assert!(!valid(20, 1) && !valid(20, 30) && valid(31, 31));
    assert!(valid(49, 31) && !valid(50, 31) && !valid(50, 80) && valid(81, 81));
    epochs.add_window(90, 90, 100);
    assert!(!valid(90, 100) && valid(101, 101), "one that has begun");
    for _ in 0..WINDOWS {
        epochs.add_window(100, 200, 210);
    }
    assert!(valid(199, 101));
    epochs.add_window(100, 300, 310);
    assert!(!valid(199, 101), "there are too many");
    assert!(valid(400, 311) && valid(400, 400));
    epochs.add_window(400, 500, 510);
    assert!(valid(499, 400) && !valid(500, 400), "those that have passed make room");
}
