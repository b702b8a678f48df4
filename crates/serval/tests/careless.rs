//! Kernels with mistakes that people make: what a server does about each.

mod common;

use common::*;
use wire::DropReason;

/// A service on the worker's own core.
fn service(name: &str, kernel: &str, more: &str) -> String {
    let library = build_kernel("crates/serval/tests/kernels/careless.cpp");
    format!(
        "[[service]]\nname = \"{name}\"\nlisten = [\"udp://127.0.0.1:0\", \"tcp://127.0.0.1:0\"]\naccelerator = \"host\"\n\
         kernel = \"{library}:{kernel}\"\nmqueues = 2\n{more}\n"
    )
}

const HOST: &str = "[[accelerator]]\nname = \"host\"\nkind = \"cpu\"\n";

// provokes: reply_too_long
#[test]
fn a_datagram_that_makes_a_reply_too_long_costs_only_its_own_reply() {
    let sizes = "max_message_bytes = 8192\nmax_reply_bytes = 1024";
    let config =
        HOST.to_owned() + &service("twice", "twice", "") + &service("thrice", "thrice", sizes);
    let served = Served::start("careless_lengths", "", &config);
    for (at, longest) in [(0, 512), (1, 1024)] {
        let client = udp_client(served.services[at][0]);
        assert_eq!(ask(&client, &[0; 8]).len(), if at == 0 { 16 } else { 8 });
        for len in [longest + 4, 8192.min(2 * longest)] {
            client.send(&vec![1; len]).unwrap();
        }
        // What follows is answered: the server is there, and the block serves on.
        for _ in 0..20 {
            assert_eq!(ask(&client, &vec![0; longest]).len(), if at == 0 { 1024 } else { longest });
        }
    }
    for name in ["twice", "thrice"] {
        eventually("both are counted", || served.dropped(name, DropReason::ReplyTooLong) == 2);
    }
    assert_eq!(served.drain(), 0);
}

/// A kernel file that names no accelerator has a process of its own.
#[test]
fn a_crash_in_a_kernel_file_ends_no_other_service() {
    let library = build_kernel("crates/serval/tests/kernels/careless.cpp");
    let config = format!(
        "[[service]]\nname = \"other\"\nlisten = \"udp://127.0.0.1:0\"\nkernel = \"echo\"\n\
         [[service]]\nname = \"crashes\"\nlisten = \"udp://127.0.0.1:0\"\nkernel = \"{library}:crashes\"\n"
    );
    let served = Served::start("careless_crash", "", &config);
    let [other, crashes] = [0, 1].map(|at| served.services[at][0]);
    assert_eq!(ask(&udp_client(crashes), b"hello"), b"hello");
    let runtime = children(served.process.0.id());
    assert_eq!(runtime.len(), 1, "one process, for the kernel file");
    udp_client(crashes).send(b"!").unwrap();
    eventually("it is lost with its process", || {
        served.dropped("crashes", DropReason::AcceleratorLost) == 1
    });
    assert_eq!(ask(&udp_client(other), b"there"), b"there");
    eventually("the log says why", || served.log().contains("ended by signal 11 (SIGSEGV)"));
    answers_again(crashes, 1);
    assert_eq!(served.drain(), 0);
}
