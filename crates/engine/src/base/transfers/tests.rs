use proptest::prelude::*;

use super::*;
use crate::base::topology::FileAccess;

const MEMORY: u64 = 1 << 16;

fn files() -> Vec<FileSpec> {
    let read = FileSpec::file("/a", FileAccess::Read);
    let keyed = |spec| FileSpec { key: Some("/k".into()), ..spec };
    let peer = FileSpec::connection("127.0.0.1:1".parse::<std::net::SocketAddr>().unwrap());
    vec![read, keyed(FileSpec::file("/b", FileAccess::Write)), peer.clone(), keyed(peer)]
}

/// Numbers near the limits that commands may break.
fn number() -> impl Strategy<Value = u64> {
    let near = prop_oneof![
        Just(0),
        Just(MEMORY),
        Just(i64::MAX as u64),
        Just(u64::MAX),
        0..2 * MEMORY,
        any::<u64>()
    ];
    (near, 0..3u64, any::<bool>())
        .prop_map(|(near, by, up)| if up { near.wrapping_add(by) } else { near.wrapping_sub(by) })
}

prop_compose! {
    fn command()(
        (source, sink, digest) in (0u8..5, 0u8..5, 0u8..6),
        stages in prop_oneof![3 => Just(0u8), 1 => any::<u8>()],
        (source_file, sink_file) in (0u16..6, 0u16..6),
        (source_offset, sink_offset, bytes) in (number(), number(), number()),
        lease in prop_oneof![Just(0u64), Just(1), Just(u64::MAX)],
        reserved in prop_oneof![20 => Just(0u64), 1 => Just(1)],
    ) -> TransferCommand {
        TransferCommand {
            source,
            sink,
            digest,
            stages,
            source_file,
            sink_file,
            source_offset,
            sink_offset,
            bytes,
            lease,
            reserved: [0, 0, reserved],
        }
    }
}

/// Whether an order may use a place for `bytes`, by the rules of the documentation.
fn is_allowed(at: TransferPlace, writes: bool, bytes: Option<u64>) -> bool {
    match at {
        TransferPlace::Memory { offset } => {
            bytes.is_none_or(|n| u128::from(offset) + u128::from(n) <= u128::from(MEMORY))
        }
        TransferPlace::File { file, .. } => file < 2 && (!writes || file == 1),
        TransferPlace::Connection { file } => file == 2 || file == 3,
        TransferPlace::Socket { lease, .. } => writes && lease != 0,
    }
}

proptest! {
    #[test]
    fn no_order_leaves_what_the_configuration_allows(command in command()) {
        let Ok(order) = TransferOrder::decode(&command.to_bytes(), &files(), MEMORY) else {
            return Ok(());
        };
        let TransferOrder { source, sink, bytes, most, .. } = order;
        prop_assert!(is_allowed(source, false, bytes));
        let grows = order.stages & ALL_STAGES != 0 || bytes.is_none();
        let at_most = bytes.filter(|_| !grows);
        prop_assert!(is_allowed(sink, true, at_most));
        if let TransferPlace::Memory { offset } = sink {
            prop_assert_eq!(offset + most, MEMORY);
            prop_assert!(order.stages & (COMPRESSIONS | transfer_stage::SEAL) == 0);
            prop_assert!(order.stages & EXPANSIONS != 0 || bytes.is_some_and(|n| n <= most));
        }
        if matches!(source, TransferPlace::Memory { .. }) {
            let is_memory = matches!(sink, TransferPlace::Memory { .. });
            prop_assert!(bytes.is_some() && !is_memory);
        }
        for (stage, at) in [(transfer_stage::OPEN, source), (transfer_stage::SEAL, sink)] {
            let keyed = matches!(
                at,
                TransferPlace::File { file: 1, .. } | TransferPlace::Connection { file: 3 }
            );
            prop_assert!(order.stages & stage == 0 || keyed);
        }
    }

    #[test]
    fn messages_of_another_length_are_no_commands(message in proptest::collection::vec(any::<u8>(), 0..200)) {
        prop_assume!(message.len() != size_of::<TransferCommand>());
        let refused = TransferOrder::decode(&message, &files(), MEMORY);
        prop_assert_eq!(refused, Err(status::BAD_COMMAND));
    }
}

#[test]
fn orders_are_what_their_commands_say() {
    let command = TransferCommand {
        source: transfer_place::FILE,
        sink: transfer_place::MEMORY,
        digest: transfer_digest::SHA256,
        stages: 0,
        source_file: 0,
        sink_file: 0,
        source_offset: 7,
        sink_offset: MEMORY - 9,
        bytes: 9,
        lease: 0,
        reserved: [0; 3],
    };
    let order = TransferOrder::decode(&command.to_bytes(), &files(), MEMORY);
    assert_eq!(
        order,
        Ok(TransferOrder {
            source: TransferPlace::File { file: 0, offset: 7 },
            sink: TransferPlace::Memory { offset: MEMORY - 9 },
            bytes: Some(9),
            most: 9,
            digest: transfer_digest::SHA256,
            stages: 0,
        })
    );
    let back = TransferCommand {
        source: transfer_place::MEMORY,
        sink: transfer_place::CONNECTION,
        source_file: 0,
        sink_file: 3,
        source_offset: 1,
        sink_offset: 0,
        stages: transfer_stage::SEAL,
        ..command
    };
    let order = TransferOrder::decode(&back.to_bytes(), &files(), MEMORY).unwrap();
    assert_eq!(order.sink, TransferPlace::Connection { file: 3 });
    assert_eq!((order.bytes, order.most), (Some(9), u64::MAX));
    let own = TransferCommand {
        sink: transfer_place::SOCKET,
        sink_file: 5,
        sink_offset: 1 << 40,
        lease: 6,
        stages: 0,
        ..back
    };
    let order = TransferOrder::decode(&own.to_bytes(), &files(), MEMORY).unwrap();
    let socket = TransferPlace::Socket { slot: 5, lease: 6, position: 1 << 40 };
    assert_eq!((order.sink, order.most), (socket, u64::MAX));
    for (wrong, why) in [
        (TransferCommand { lease: 0, ..own }, status::BAD_COMMAND),
        (TransferCommand { lease: 1 << 32, ..own }, status::NOT_ALLOWED),
        (TransferCommand { lease: 6, ..back }, status::BAD_COMMAND),
        (TransferCommand { source: transfer_place::SOCKET, ..own }, status::BAD_COMMAND),
        (TransferCommand { stages: transfer_stage::SEAL, ..own }, status::NOT_ALLOWED),
        (TransferCommand { sink_offset: u64::MAX, ..own }, status::RANGE),
    ] {
        assert_eq!(TransferOrder::decode(&wrong.to_bytes(), &files(), MEMORY), Err(why));
    }
}
