//! Groups over TCP: what strangers, mistakes and ranks that end do to them.

mod processes;

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use collective::frame::{Header, Hello, NOTICE_BYTES, Purpose, VERSION, WELCOME_BYTES, Welcome};
use collective::{ClosedConnections, CollectiveError, Element, Group, Loss, Member, Operation};
use processes::{LIMIT, check_operations, ints, listeners, member, tcp_group as group};

#[test]
fn sums_broadcasts_and_barriers() {
    check_operations(&[1, 2, 3, 8], &[0, 1, 9, 70_000], |ranks, work| group(ranks, work));
}

#[test]
fn a_rank_that_disagrees_ends_the_group_on_all_with_a_reason() {
    let errors = group(4, |mut group| {
        let count = if group.rank() == 2 { 5 } else { 4 };
        let error = group.all_reduce(Element::Int32, &mut ints(count, 1)).unwrap_err();
        let over = group.barrier().unwrap_err();
        assert_eq!(over, CollectiveError::Over(Box::new(error.clone())));
        error
    });
    let named = |error: &CollectiveError| {
        matches!(error, CollectiveError::Disagreement { what: "count", .. })
    };
    assert!(errors.iter().any(named), "{errors:?}");
    let about_the_call = |error: &CollectiveError| named(error) || error.name() == "group_ended";
    assert!(errors.iter().all(about_the_call), "{errors:?}");
}

/// One rank has a long transfer, whose bytes take another connection, and the other one a short one.
#[test]
fn ranks_that_disagree_about_a_long_transfer_notice_it() {
    let errors = group(2, |mut group| {
        let count = if group.rank() == 0 { 4 } else { 1 << 20 };
        group.all_reduce(Element::Int32, &mut ints(count, 1)).unwrap_err()
    });
    let about_the_call =
        |error: &CollectiveError| ["disagreement", "group_ended"].contains(&error.name());
    assert!(errors.iter().all(about_the_call), "{errors:?}");
    assert!(errors.iter().any(|error| error.name() == "disagreement"), "{errors:?}");
}

#[test]
fn a_call_ends_at_its_deadline_and_names_the_rank_it_waited_for() {
    let (listeners, addresses) = listeners(2);
    thread::scope(|scope| {
        let other = scope.spawn(|| Group::connect(&member(2, 1), &listeners[1], &addresses, LIMIT));
        let mut group = Group::connect(&member(2, 0), &listeners[0], &addresses, LIMIT).unwrap();
        let _silent = other.join().unwrap().unwrap();
        let limit = Duration::from_millis(30);
        group.set_limit(limit);
        let error = group.barrier().unwrap_err();
        assert_eq!(error, CollectiveError::Deadline { rank: 1, sequence: 1, limit });
    });
}

#[test]
fn a_rank_that_leaves_in_order_is_named_and_earlier_results_are_kept() {
    let results = group(3, |mut group| {
        let mut data = ints(100_000, 1);
        group.all_reduce(Element::Int32, &mut data).unwrap();
        if group.rank() == 2 {
            return None;
        }
        group.all_reduce(Element::Int32, &mut data).err()
    });
    let left = |error: &CollectiveError| {
        // The first that notices tells the other one.
        *error == CollectiveError::Lost(Loss::Left(2)) || error.name() == "group_ended"
    };
    assert!(results[..2].iter().all(|error| error.as_ref().is_some_and(left)), "{results:?}");
}

/// Strangers that say nothing, or anything, at a listener that waits for its group.
#[test]
fn strangers_do_not_stop_a_group_from_forming() {
    let (listeners, addresses) = listeners(2);
    let silent: Vec<TcpStream> =
        (0..40).map(|_| TcpStream::connect(addresses[0]).unwrap()).collect();
    let mut http = TcpStream::connect(addresses[0]).unwrap();
    http.write_all(&[b'G'; 500]).unwrap();
    let hello = |change: fn(&mut [u8])| {
        let hello =
            Hello { purpose: Purpose::Data, ranks: 2, from: 1, to: 0, name: "test".to_owned() };
        let mut bytes = hello.encode();
        change(&mut bytes);
        let mut socket = TcpStream::connect(addresses[0]).unwrap();
        socket.write_all(&bytes).unwrap();
        socket
    };
    let refused = [
        (hello(|bytes| bytes[8] = 99), Some(Welcome::OtherVersion(VERSION))),
        (hello(|bytes| bytes[16] = b'T'), Some(Welcome::OtherName)),
        (hello(|bytes| bytes[11] = 3), Some(Welcome::OtherRanks(2))),
        (hello(|bytes| bytes[0] = 0), None),
        (hello(|bytes| bytes[14] = 200), None),
        (hello(|bytes| bytes[12] = 0), None),
    ];
    thread::scope(|scope| {
        let first = scope.spawn(|| {
            let mut group = Group::connect(&member(2, 0), &listeners[0], &addresses, LIMIT)?;
            group.barrier()
        });
        for (mut socket, expected) in refused {
            socket.set_read_timeout(Some(LIMIT)).unwrap();
            let mut answer = [0; WELCOME_BYTES];
            let got = socket.read_exact(&mut answer).ok().and_then(|()| Welcome::decode(&answer));
            assert_eq!(got, expected);
        }
        let mut other = Group::connect(&member(2, 1), &listeners[1], &addresses, LIMIT).unwrap();
        other.barrier().unwrap();
        first.join().unwrap().unwrap();
    });
    drop(silent);
}

/// More than the rank keeps, and they stay: some say nothing, some a part of a hello, some something else.
#[test]
fn a_flood_of_strangers_does_not_keep_the_ranks_apart() {
    let (listeners, addresses) = listeners(2);
    thread::scope(|scope| {
        let first = scope.spawn(|| {
            let mut group = Group::connect(&member(2, 0), &listeners[0], &addresses, LIMIT)?;
            group.barrier().map(|()| group.closed_connections())
        });
        let stranger = |number: usize| {
            let mut socket = TcpStream::connect(addresses[0]).unwrap();
            match number % 3 {
                0 => {}
                1 => socket.write_all(b"servalcg").unwrap(),
                // It may have been closed for a newer one.
                _ => drop(socket.write_all(&[0xff; 200])),
            }
            socket
        };
        let strangers: Vec<TcpStream> = (0..450).map(stranger).collect();
        let mut other = Group::connect(&member(2, 1), &listeners[1], &addresses, LIMIT).unwrap();
        other.barrier().unwrap();
        assert_eq!(other.closed_connections(), ClosedConnections::default());
        let closed = first.join().unwrap().unwrap();
        // Connections are accepted in order, so all of these came before the other rank.
        assert_eq!(closed.refused, 0);
        assert!(closed.garbage >= 150, "{closed:?}");
        assert!(closed.displaced + closed.silent >= 300 - 128, "{closed:?}");
        drop(strangers);
    });
}

/// A rank that waits for a lower one answers everything that connects to it, so that its backlog does not fill up.
#[test]
fn a_rank_that_waits_for_a_lower_one_answers_the_higher_ones() {
    let (mut listeners, addresses) = listeners(3);
    // Nothing listens there any more.
    drop(listeners.remove(0));
    let gives_up = std::sync::atomic::AtomicBool::new(false);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let mut interrupt = || gives_up.load(std::sync::atomic::Ordering::Relaxed);
            let member = member(3, 1);
            Group::connect_unless(&member, &listeners[0], &addresses, LIMIT, &mut interrupt).err()
        });
        let strangers: Vec<TcpStream> =
            (0..300).map(|_| TcpStream::connect(addresses[1]).unwrap()).collect();
        for purpose in [Purpose::Control, Purpose::Data, Purpose::Bulk] {
            let hello = Hello { purpose, ranks: 3, from: 2, to: 1, name: "test".to_owned() };
            let mut socket = TcpStream::connect(addresses[1]).unwrap();
            socket.set_read_timeout(Some(LIMIT)).unwrap();
            socket.write_all(&hello.encode()).unwrap();
            let mut answer = [0; WELCOME_BYTES];
            socket.read_exact(&mut answer).unwrap();
            assert_eq!(Welcome::decode(&answer), Some(Welcome::Accepted));
        }
        gives_up.store(true, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(waiting.join().unwrap(), Some(CollectiveError::Interrupted(1)));
        drop(strangers);
    });
}

#[test]
fn a_group_that_is_not_formed_says_what_else_connected() {
    let (listeners, addresses) = listeners(2);
    let mut garbage = TcpStream::connect(addresses[0]).unwrap();
    garbage.write_all(&[b'G'; 500]).unwrap();
    let _silent = TcpStream::connect(addresses[0]).unwrap();
    let limit = Duration::from_millis(300);
    let error = Group::connect(&member(2, 0), &listeners[0], &addresses, limit).err().unwrap();
    let sentence = error.to_string();
    assert!(sentence.contains("did not connect in time: 1 (other connections"), "{sentence}");
    assert!(sentence.contains("1 with something else than a hello"), "{sentence}");
}

/// Whatever a rank waits for: that another one comes, listens, or answers.
#[test]
fn forming_ends_when_its_caller_wants_it_to() {
    let (mut listeners, addresses) = listeners(3);
    let silent = listeners.remove(0);
    let ends = |listener: &TcpListener, rank| {
        let mut asked = 0;
        let mut interrupt = || {
            asked += 1;
            asked == 3
        };
        let member = member(3, rank);
        let ended =
            Group::connect_unless(&member, listener, &addresses, 10 * LIMIT, &mut interrupt);
        assert_eq!(ended.err(), Some(CollectiveError::Interrupted(rank)));
        assert_eq!(asked, 3);
    };
    ends(&silent, 0);
    ends(&listeners[0], 1);
    drop(silent);
    ends(&listeners[1], 2);
}

#[test]
fn a_call_that_waits_asks_whether_it_is_interrupted_and_tells_the_others() {
    let over = std::sync::Barrier::new(2);
    let errors = group(2, |mut group| {
        if group.rank() == 0 {
            let mut asked = 0;
            group.set_interrupt(move || {
                asked += 1;
                asked == 2
            });
        } else {
            over.wait();
        }
        // What the first rank had sent is enough for one call of the other.
        let again = usize::from(group.rank() == 1);
        let error = (0..=again).try_for_each(|_| group.barrier()).unwrap_err();
        if group.rank() == 0 {
            over.wait();
        }
        error
    });
    assert_eq!(errors[0], CollectiveError::Interrupted(0));
    assert!(matches!(errors[1], CollectiveError::Lost(Loss::Told { by: 0, .. })), "{errors:?}");
}

/// Every byte wakes the rank, and its caller is not asked each time: in Python that would take the interpreter's lock.
#[test]
fn a_call_that_is_woken_often_asks_seldom_whether_it_is_interrupted() {
    let header = Header {
        operation: Operation::Broadcast { root: 1 },
        element: Element::Byte,
        part: 0,
        sequence: 1,
        count: 100,
        bytes: 100,
    };
    let (listeners, addresses) = listeners(2);
    thread::scope(|scope| {
        let victim = scope.spawn(|| {
            let mut group = Group::connect(&member(2, 0), &listeners[0], &addresses, LIMIT)?;
            let asked = std::sync::Arc::new(std::sync::atomic::AtomicU32::new(0));
            let asks = asked.clone();
            group.set_interrupt(move || {
                asks.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                false
            });
            let began = std::time::Instant::now();
            group.broadcast(1, &mut [0; 100])?;
            let often = asked.load(std::sync::atomic::Ordering::Relaxed);
            assert!(Duration::from_millis(50) * often <= began.elapsed(), "{often} times");
            assert!(often > 0);
            Ok::<(), CollectiveError>(())
        });
        let mut sockets = [Purpose::Control, Purpose::Data, Purpose::Bulk].map(|purpose| {
            let hello = Hello { purpose, ranks: 2, from: 1, to: 0, name: "test".to_owned() };
            let mut socket = TcpStream::connect(addresses[0]).unwrap();
            socket.write_all(&hello.encode()).unwrap();
            socket.read_exact(&mut [0; WELCOME_BYTES]).unwrap();
            socket
        });
        for byte in header.encode().iter().chain(&[7; 100]) {
            sockets[1].write_all(&[*byte]).unwrap();
            thread::sleep(Duration::from_millis(2));
        }
        victim.join().unwrap().unwrap();
    });
}

#[test]
fn mistakes_of_the_configuration_have_an_error_each() {
    let (listeners, addresses) = listeners(2);
    let short = Duration::from_millis(60);
    let forming = |name: &str, ranks: usize, rank: usize| {
        let member = Member { name: name.to_owned(), ranks, rank };
        let error = Group::connect(&member, &listeners[rank % 2], &addresses, short).err();
        error.unwrap().to_string()
    };
    assert!(forming("", 2, 0).contains("1 to 64 bytes"));
    assert!(forming("x", 9, 0).contains("1 to 8 ranks"));
    assert!(forming("x", 2, 2).contains("rank 2 is not in 0..2"));
    assert!(forming("x", 3, 0).contains("2 addresses for 3 ranks"));
    assert!(forming("x", 2, 0).contains("did not connect in time: 1"));
    // The backlog takes the connection, and no process answers.
    assert!(forming("x", 2, 1).contains("rank 0 at"));
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let limit = Duration::from_secs(2);
            Group::connect(&member(2, 0), &listeners[0], &addresses, limit).err()
        });
        let other = Member { name: "other".to_owned(), ranks: 2, rank: 1 };
        let error = Group::connect(&other, &listeners[1], &addresses, LIMIT).err().unwrap();
        assert!(error.to_string().contains("a group of another name"), "{error}");
        assert!(waiting.join().unwrap().is_some());
    });
}

/// A connection of rank 1 of two to rank 0, which listens there, and the answer to it.
fn join(address: SocketAddr, purpose: Purpose) -> (TcpStream, Welcome) {
    let hello = Hello { purpose, ranks: 2, from: 1, to: 0, name: "test".to_owned() };
    let mut socket = TcpStream::connect(address).unwrap();
    socket.write_all(&hello.encode()).unwrap();
    let mut answer = [0; WELCOME_BYTES];
    socket.read_exact(&mut answer).unwrap();
    (socket, Welcome::decode(&answer).unwrap())
}

#[test]
fn a_second_process_does_not_take_the_place_of_a_rank() {
    let (listeners, addresses) = listeners(2);
    thread::scope(|scope| {
        let group = scope.spawn(|| Group::connect(&member(2, 0), &listeners[0], &addresses, LIMIT));
        let join = |purpose| join(addresses[0], purpose);
        let (_rank, answer) = join(Purpose::Control);
        let (_other, second) = join(Purpose::Control);
        let others = [Purpose::Data, Purpose::Bulk].map(join);
        assert!(group.join().unwrap().is_ok());
        assert_eq!((answer, second), (Welcome::Accepted, Welcome::Twice));
        assert!(others.iter().all(|(_, answer)| *answer == Welcome::Accepted));
    });
}

/// A peer that has joined, and then sends what it likes.
#[test]
fn a_hostile_member_gets_a_clear_status_and_no_memory() {
    let good = Header {
        operation: Operation::AllReduce,
        element: Element::Int32,
        part: 0,
        sequence: 1,
        count: 4,
        bytes: 16,
    };
    let forged: [(Vec<u8>, &str); 5] = [
        (vec![0xff; 4096], "protocol"),
        (Header { bytes: u64::MAX, ..good }.encode().to_vec(), "protocol"),
        (Header { part: 7, ..good }.encode().to_vec(), "protocol"),
        (Header { count: u64::MAX, bytes: u64::MAX, ..good }.encode().to_vec(), "disagreement"),
        // A part of a header, then the end.
        (good.encode()[..20].to_vec(), "rank_lost"),
    ];
    for (bytes, status) in forged {
        let (listeners, addresses) = listeners(2);
        thread::scope(|scope| {
            let victim = scope.spawn(|| {
                let mut group = Group::connect(&member(2, 0), &listeners[0], &addresses, LIMIT)?;
                group.set_limit(LIMIT);
                group.all_reduce(Element::Int32, &mut ints(4, 1))
            });
            let join = |purpose| join(addresses[0], purpose).0;
            let all = [Purpose::Control, Purpose::Data, Purpose::Bulk].map(join);
            let [control, mut data, bulk] = all;
            data.write_all(&bytes).unwrap();
            if status == "rank_lost" {
                drop((control, data, bulk));
                assert_eq!(victim.join().unwrap().unwrap_err().name(), status);
                return;
            }
            assert_eq!(victim.join().unwrap().unwrap_err().name(), status);
            drop((control, bulk));
        });
    }
}

#[test]
fn a_notice_that_is_none_ends_the_group() {
    let (listeners, addresses) = listeners(2);
    thread::scope(|scope| {
        let victim = scope.spawn(|| {
            let group = Group::connect(&member(2, 0), &listeners[0], &addresses, LIMIT);
            let mut group = group.unwrap();
            group.set_limit(LIMIT / 3);
            group.barrier()
        });
        let join = |purpose| join(addresses[0], purpose).0;
        let [mut control, _data, _bulk] =
            [Purpose::Control, Purpose::Data, Purpose::Bulk].map(join);
        control.write_all(&[0xff; NOTICE_BYTES]).unwrap();
        assert_eq!(victim.join().unwrap(), Err(CollectiveError::Lost(Loss::Garbage(1))));
    });
}

#[test]
fn an_end_is_noticed_by_a_rank_that_waits_for_another_one() {
    let (listeners, addresses) = listeners(3);
    thread::scope(|scope| {
        let form = |rank: usize| {
            let (listener, addresses) = (&listeners[rank], &addresses);
            scope.spawn(move || Group::connect(&member(3, rank), listener, addresses, LIMIT))
        };
        let ranks = [form(0), form(1)];
        let join = |to: u8, purpose| {
            let hello = Hello { purpose, ranks: 3, from: 2, to, name: "test".to_owned() };
            let mut socket = TcpStream::connect(addresses[usize::from(to)]).unwrap();
            socket.write_all(&hello.encode()).unwrap();
            socket.read_exact(&mut [0; WELCOME_BYTES]).unwrap();
            socket
        };
        let purposes = [Purpose::Control, Purpose::Data, Purpose::Bulk];
        let third = [0, 1].map(|to| purposes.map(|purpose| join(to, purpose)));
        let [mut first, _second] = ranks.map(|rank| rank.join().unwrap().unwrap());
        // It expects data from rank 1, which does not call.
        let call = scope.spawn(move || first.broadcast(1, &mut [0; 8]));
        drop(third);
        assert_eq!(call.join().unwrap(), Err(CollectiveError::Lost(Loss::Ended(2))));
    });
}
