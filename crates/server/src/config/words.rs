//! Words of the configuration that resemble a mistaken one.

/// The choice for which people often write a certain other word, which may resemble a third one.
pub(super) fn suggestion(given: &str, words: &[&'static str]) -> Option<&'static str> {
    const OTHER_NAMES: [(&str, &str); 5] = [
        ("gpu", "cuda"),
        ("nvidia", "cuda"),
        ("host", "cpu"),
        ("thread", "threads"),
        ("external", "process"),
    ];
    let given = given.to_ascii_lowercase();
    let (_, word) =
        OTHER_NAMES.iter().find(|(other, word)| *other == given && words.contains(word))?;
    Some(word)
}

/// The most similar word: at most one mistake, in long words one in three letters.
pub(crate) fn nearest<'w>(
    given: &str,
    words: impl IntoIterator<Item = &'w str>,
) -> Option<&'w str> {
    let plain = |word: &str| word.to_ascii_lowercase().replace('-', "_");
    let given = plain(given);
    words
        .into_iter()
        .filter(|word| word.len() > 2)
        .map(|word| (strsim::osa_distance(&given, &plain(word)), word))
        .filter(|(distance, word)| *distance <= ((word.len().max(given.len()) - 1) / 3).max(1))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, word)| word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_word_is_near() {
        let words = ["workers", "cores", "polling", "round-robin"];
        assert_eq!(nearest("workrs", words), Some("workers"));
        assert_eq!(nearest("Workers", words), Some("workers"));
        assert_eq!(nearest("owrkers", words), Some("workers"));
        assert_eq!(nearest("round_robin", words), Some("round-robin"));
        assert_eq!(nearest("threads", words), None);
        assert_eq!(nearest("", words), None);
        assert_eq!(nearest("x", []), None);
    }
}
