//! Runs every input of the committed fuzz corpus once, without a fuzzer.

use std::fs;
use std::path::{Path, PathBuf};

fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries =
        fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

#[test]
fn every_target_passes_its_corpus() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus");
    for (name, target) in serval_fuzz::TARGETS {
        let inputs = entries(&corpus.join(name));
        assert!(!inputs.is_empty(), "fuzz/corpus/{name} is empty");
        for input in inputs {
            // If the target panics, this line precedes the panic message.
            println!("{}", input.display());
            target(&fs::read(&input).unwrap());
        }
    }
}

/// Regions of another version would be refused before the code under test has seen them.
#[test]
fn regions_of_the_corpus_can_be_joined() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/region");
    for input in entries(&folder) {
        let bytes = fs::read(&input).unwrap();
        let version =
            bytes.get(8..12).map(|version| u32::from_le_bytes(version.try_into().unwrap()));
        assert_eq!(version, Some(mqueue::abi::ABI_VERSION), "{}", input.display());
    }
}

#[test]
fn every_corpus_and_every_program_has_its_target() {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz");
    for path in [entries(&fuzz.join("corpus")), entries(&fuzz.join("fuzz_targets"))].concat() {
        let name = path.file_stem().unwrap().to_str().unwrap();
        let known = serval_fuzz::TARGETS.iter().any(|(target, _)| *target == name);
        assert!(known, "{}: add {name:?} to TARGETS in fuzz/src/lib.rs", path.display());
    }
}
