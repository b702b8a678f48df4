//! The datagrams of a pcap file: what `tcpdump -w`, or `serval serve --tap`, has recorded.

/// Longest file, in bytes.
pub(crate) const FILE_BYTES_MAX: u64 = 256 << 20;
const FILE_HEADER_BYTES: usize = 24;
const RECORD_HEADER_BYTES: usize = 16;

/// A datagram.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Datagram<'a> {
    pub(crate) from: u16,
    pub(crate) to: u16,
    pub(crate) payload: &'a [u8],
}

/// The datagrams of a file, and how many packets are something else or cut off. The error says why it is no pcap file.
pub(crate) fn datagrams(file: &[u8]) -> Result<(Vec<Datagram<'_>>, usize), String> {
    let header = file.first_chunk::<FILE_HEADER_BYTES>();
    let header = header.ok_or("it is no pcap file: it has no header")?;
    let word = |bytes: &[u8], at: usize| -> [u8; 4] {
        *bytes[at..].first_chunk().expect("a header is longer")
    };
    let number: fn([u8; 4]) -> u32 = match word(header, 0) {
        [0xd4, 0xc3, 0xb2, 0xa1] | [0x4d, 0x3c, 0xb2, 0xa1] => u32::from_le_bytes,
        [0xa1, 0xb2, 0xc3, 0xd4] | [0xa1, 0xb2, 0x3c, 0x4d] => u32::from_be_bytes,
        [0x0a, 0x0d, 0x0d, 0x0a] => {
            return Err("it is a pcapng file: `editcap -F pcap` converts it".to_owned());
        }
        _ => return Err("it is no pcap file: its first bytes are others".to_owned()),
    };
    let link = number(word(header, 20)) & 0xffff;
    if !matches!(link, 0 | 1 | 101 | 113 | 276) {
        let known = "Ethernet, Linux cooked, loopback or raw IP";
        return Err(format!("its packets have the link type {link}: record {known}"));
    }
    let (mut found, mut others) = (Vec::new(), 0);
    let mut rest = &file[FILE_HEADER_BYTES..];
    while let Some(record) = rest.first_chunk::<RECORD_HEADER_BYTES>() {
        let len = number(word(record, 8)) as usize;
        let Some(packet) = rest[RECORD_HEADER_BYTES..].get(..len) else { break };
        match network(link, packet).and_then(datagram) {
            Some(datagram) => found.push(datagram),
            None => others += 1,
        }
        rest = &rest[RECORD_HEADER_BYTES + len..];
    }
    others += usize::from(!rest.is_empty());
    Ok((found, others))
}

/// The packet of the network layer.
fn network(link: u32, packet: &[u8]) -> Option<&[u8]> {
    match link {
        0 => packet.get(4..),
        // With VLAN tags.
        1 => {
            let mut at = 12;
            while matches!(packet.get(at..at + 2)?, [0x81, 0] | [0x88, 0xa8]) {
                at += 4;
            }
            packet.get(at + 2..)
        }
        113 => packet.get(16..),
        276 => packet.get(20..),
        _ => Some(packet),
    }
}

/// A whole UDP datagram of a packet of IPv4 or IPv6 without extension headers.
fn datagram(packet: &[u8]) -> Option<Datagram<'_>> {
    let udp = match packet.first()? >> 4 {
        4 => {
            let header = packet.first_chunk::<20>()?;
            let fragment = u16::from_be_bytes([header[6], header[7]]) & 0x3fff;
            let len = usize::from(u16::from_be_bytes([header[2], header[3]]));
            let start = usize::from(header[0] & 15) * 4;
            if header[9] != 17 || fragment != 0 || start < 20 {
                return None;
            }
            packet.get(start..len)?
        }
        6 => {
            let header = packet.first_chunk::<40>()?;
            let len = usize::from(u16::from_be_bytes([header[4], header[5]]));
            if header[6] != 17 {
                return None;
            }
            packet.get(40..40 + len)?
        }
        _ => return None,
    };
    let [a, b, c, d, e, f, ..] = *udp.first_chunk::<8>()?;
    let len = usize::from(u16::from_be_bytes([e, f]));
    let payload = udp.get(8..len)?;
    Some(Datagram { from: u16::from_be_bytes([a, b]), to: u16::from_be_bytes([c, d]), payload })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn udp(payload: &[u8]) -> Vec<u8> {
        let len = (8 + payload.len()) as u16;
        [&[0x10, 0x00, 0x23, 0x28][..], &len.to_be_bytes(), &[0, 0], payload].concat()
    }

    fn ip4(payload: &[u8]) -> Vec<u8> {
        let udp = udp(payload);
        let mut header = [0u8; 20];
        (header[0], header[9]) = (0x45, 17);
        header[2..4].copy_from_slice(&((20 + udp.len()) as u16).to_be_bytes());
        [&header[..], &udp].concat()
    }

    fn ip6(payload: &[u8]) -> Vec<u8> {
        let udp = udp(payload);
        let mut header = [0u8; 40];
        (header[0], header[6]) = (0x60, 17);
        header[4..6].copy_from_slice(&(udp.len() as u16).to_be_bytes());
        [&header[..], &udp].concat()
    }

    fn file(link: u32, swapped: bool, packets: &[Vec<u8>]) -> Vec<u8> {
        let number = |n: u32| if swapped { n.to_be_bytes() } else { n.to_le_bytes() };
        let words = [0xa1b2_c3d4, 0x0004_0002, 0, 0, 65535, link];
        let mut file: Vec<u8> = words.into_iter().flat_map(number).collect();
        for packet in packets {
            let len = packet.len() as u32;
            file.extend([1, 2, len, len].into_iter().flat_map(number));
            file.extend_from_slice(packet);
        }
        file
    }

    #[test]
    fn datagrams_are_found_behind_each_header() {
        let expected = || vec![Datagram { from: 0x1000, to: 9000, payload: b"hello" }];
        let headers: [(u32, Vec<u8>); 6] = [
            (1, [&[0; 12][..], &[8, 0]].concat()),
            (1, [&[0; 12][..], &[0x81, 0, 0, 5, 8, 0]].concat()),
            (101, vec![]),
            (113, vec![0; 16]),
            (276, vec![0; 20]),
            (0, vec![2, 0, 0, 0]),
        ];
        for (link, header) in headers {
            for packet in [ip4(b"hello"), ip6(b"hello")] {
                for swapped in [false, true] {
                    let packet = [&header[..], &packet, b"padding"].concat();
                    let file = file(link, swapped, &[packet]);
                    assert_eq!(datagrams(&file), Ok((expected(), 0)), "{link} {swapped}");
                }
            }
        }
    }

    #[test]
    fn what_is_no_datagram_is_counted() {
        let (mut tcp, mut fragment) = (ip4(b"x"), ip4(b"x"));
        (tcp[9], fragment[6]) = (6, 0x20);
        let cut = ip4(b"x")[..24].to_vec();
        let whole = file(101, false, &[tcp, fragment, cut, ip4(b"y"), vec![]]);
        let (found, others) = datagrams(&whole).unwrap();
        assert_eq!((found.len(), others), (1, 4));
        let (found, others) = datagrams(&whole[..whole.len() - 1]).unwrap();
        assert_eq!((found.len(), others), (1, 4), "the last record is cut off");
        for (file, expected) in [
            (vec![], "no header"),
            (vec![0; 24], "its first bytes"),
            (file(147, false, &[]), "link type 147"),
            ([&[0x0a, 0x0d, 0x0d, 0x0a][..], &[0; 20]].concat(), "pcapng"),
        ] {
            assert!(datagrams(&file).unwrap_err().contains(expected), "{expected}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(
            link in prop::sample::select(vec![0u32, 1, 101, 113, 276]),
            mut packets in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..80), 0..4),
            cut in 0usize..200,
            ip in 0u8..3,
        ) {
            for packet in &mut packets {
                let real = if ip == 0 { ip4(packet) } else { ip6(packet) };
                let at = packet.first().map_or(0, |at| usize::from(*at)) % real.len();
                let changed = [&real[..at], packet, &real[at..]].concat();
                *packet = changed;
            }
            let whole = file(link, false, &packets);
            let (found, others) = datagrams(&whole).unwrap();
            prop_assert_eq!(found.len() + others, packets.len());
            let _ = datagrams(&whole[..cut.min(whole.len())]);
        }
    }
}
