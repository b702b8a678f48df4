//! Configuration texts: a topology that the engine accepts, or errors with positions inside the text.

use server::config::{Config, Overrides};

const FILE: &str = "fuzz.toml";

/// The topology of a valid text.
pub(crate) fn topology(text: &str) -> engine::topology::Topology {
    let overrides = Overrides { environment: Vec::new(), sets: Vec::new(), inspect: None };
    let config = Config::parse(FILE, text, "nowhere".as_ref(), &overrides);
    config.unwrap_or_else(|error| panic!("{}", error.render(false))).topology
}

/// A file's text; after a zero byte the values of `--set`, one per line.
pub fn text(input: &[u8]) {
    let (text, sets) = match input.iter().position(|byte| *byte == 0) {
        Some(at) => (&input[..at], &input[at + 1..]),
        None => (input, &[][..]),
    };
    // A file that is not UTF-8 is refused before it is parsed.
    let Ok(text) = std::str::from_utf8(text) else { return };
    let sets = String::from_utf8_lossy(sets).lines().map(str::to_owned).collect();
    let overrides = Overrides { environment: Vec::new(), sets, inspect: None };
    match Config::parse(FILE, text, "nowhere".as_ref(), &overrides) {
        Ok(config) => {
            config.topology.check().expect("an accepted configuration is valid");
            assert!(!config.settings.is_empty());
            assert!(config.json().is_object());
        }
        Err(error) => {
            let entries = error.entries();
            assert!(!entries.is_empty(), "an error without a problem");
            for entry in entries {
                assert!(!entry.what.is_empty());
                if entry.source == FILE {
                    let lines: Vec<&str> = text.split('\n').collect();
                    assert!((1..=lines.len()).contains(&entry.line), "{entry:?}");
                    let columns = lines[entry.line - 1].chars().count() + 1;
                    assert!((1..=columns).contains(&entry.column), "{entry:?}");
                }
            }
            let shown = error.render(false);
            let steers = |c: char| c.is_control() && c != '\n';
            assert!(!shown.contains(steers), "control characters on the terminal: {shown:?}");
            assert!(error.render(true).len() >= shown.len());
        }
    }
}
