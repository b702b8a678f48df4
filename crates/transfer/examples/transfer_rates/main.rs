//! How fast transfers are and what they cost, against the loops that people write: with OpenSSL (`benches/transfer/loops_openssl.c`) and with
//! aws-lc, the library of the engine.
//!
//! `transfer_rates [--pairs N] [--mib N] [--loops PROGRAM] [--json FILE] [--core N] [ROW...]` prints a table, and with `--json` one
//! object for each comparison. Both sides run in interleaved pairs; a ratio is the median over the pairs. Ratios of rates above 1 and of CPU time below 1
//! mean that the engine is better. CPU time is that of the caller and of the engine's process, or of the loop; peers are not counted. What arrives
//! is compared with what was sent once for each row and side, and digests in every transfer. Needs no network and no other file than the two programs.

mod loops;
mod roles;
mod rows;

use std::fs;
use std::path::PathBuf;

use rows::{Bench, ROWS};

const USAGE: &str = "usage: transfer_rates [--pairs N] [--mib N] [--loops PROGRAM] [--json FILE] [--core N] [ROW...]";

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if roles::run(&arguments) {
        return;
    }
    let beside = std::env::current_exe().expect("the program has a path");
    let beside = beside.with_file_name("loops_openssl");
    let built = PathBuf::from("target/transfer-bench/loops_openssl");
    let mut bench = Bench {
        pairs: 9,
        bytes: 64 << 20,
        loops: if beside.exists() { beside } else { built },
        core: 0,
        folder: std::env::temp_dir().join(format!("serval-transfer-rates-{}", std::process::id())),
        memory: PathBuf::from(format!("/dev/shm/serval-transfer-rates-{}", std::process::id())),
        lines: Vec::new(),
    };
    let (mut json, mut chosen) = (None, Vec::new());
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().expect(USAGE);
        match argument.as_str() {
            "--pairs" => bench.pairs = value().parse().expect(USAGE),
            "--mib" => bench.bytes = value().parse::<usize>().expect(USAGE) << 20,
            "--loops" => bench.loops = value().into(),
            "--json" => json = Some(value()),
            "--core" => bench.core = value().parse().expect(USAGE),
            row if ROWS.iter().any(|(name, _)| *name == row) => chosen.push(row.to_owned()),
            _ => {
                let names: Vec<&str> = ROWS.iter().map(|(name, _)| *name).collect();
                panic!("{USAGE}\nrows: {}", names.join(" "));
            }
        }
    }
    assert!(bench.loops.exists(), "build the loops first: make -C benches/transfer");
    fs::create_dir_all(&bench.folder).expect("the temporary folder is writable");
    for (name, row) in ROWS {
        if chosen.is_empty() || chosen.iter().any(|chosen| chosen == name) {
            row(&mut bench);
        }
    }
    if let Some(path) = json {
        fs::write(path, bench.lines.join("\n") + "\n").expect("the output can be written");
    }
    bench.clean();
}
