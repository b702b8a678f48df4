// peer_address: each reply is where its request came from, in 20 bytes, and the request.
#include <serval/kernel.h>

SERVAL_KERNEL(peer_address) (serval::Block& block, serval::Mqueue& q) {
    while (auto msg = q.recv(block)) {
        const serval::Peer peer = msg.peer();
        auto reply = q.reply(block, msg, 20 + msg.request_len());
        if (reply && block.rank() == 0) {
            uint8_t* to = reply.as<uint8_t>();
            for (unsigned i = 0; i < 16; i++) to[i] = peer.address[i];
            to[16] = static_cast<uint8_t>(peer.port), to[17] = static_cast<uint8_t>(peer.port >> 8);
            to[18] = static_cast<uint8_t>(peer.family), to[19] = static_cast<uint8_t>(peer.family >> 8);
            for (uint32_t i = 0; i < msg.request_len(); i++) to[20 + i] = msg.request<uint8_t>()[i];
        }
        q.send(block, reply);
    }
}
