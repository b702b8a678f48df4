//! How fast the ways of [`sys::digests`] are: `digest_rate` prints GB/s of all streams together, for 1 to 16 streams of 128 KiB.

use std::time::Instant;

use sys::digests::{MD5_START, Run, SHA256_START, Way, md5_ways, sha256_ways};

fn rate<const WORDS: usize>(way: &Way<WORDS>, start: [u32; WORDS], streams: usize) -> f64 {
    let content: Vec<Vec<u8>> = (0..streams).map(|n| vec![n as u8; 128 << 10]).collect();
    let mut states = vec![start; streams];
    let mut best = f64::MAX;
    for _ in 0..30 {
        let began = Instant::now();
        let mut runs: Vec<_> = states
            .iter_mut()
            .zip(&content)
            .map(|(state, blocks)| Run { state, blocks: blocks.as_slice() })
            .collect();
        way.run(&mut runs);
        best = best.min(began.elapsed().as_secs_f64());
    }
    std::hint::black_box(&states);
    (streams * (128 << 10)) as f64 / best / 1e9
}

fn show<const WORDS: usize>(name: &str, ways: &[Way<WORDS>], start: [u32; WORDS]) {
    for way in ways {
        let rates = [1, 2, 3, 4, 6, 8, 12, 16].map(|streams| rate(way, start, streams));
        println!("{name} {:18} {rates:5.2?}", way.name());
    }
}

fn main() {
    println!("streams                   1     2     3     4     6     8    12    16");
    show("MD5    ", md5_ways(), MD5_START);
    show("SHA-256", sha256_ways(), SHA256_START);
}
