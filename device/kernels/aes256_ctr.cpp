// aes256_ctr: encrypts or decrypts pieces of streams with AES-256 in counter mode (FIPS 197, NIST SP 800-38A). It is the stage of
// transfers that seals on an accelerator (docs/transfer.md).
//
// Request: piece u64 | offset u64 | key (32 bytes) | bytes of the piece, from a multiple of 16 bytes of the stream on. Reply: the bytes, combined
// with the key stream from counter block offset / 16 on; the counter is one big-endian number of 16 bytes that starts at 0.
#include <serval/kernel.h>

#include "../models/aes.h"

SERVAL_KERNEL(aes256_ctr) (serval::Block& block, serval::Mqueue& q) {
    SERVAL_SHARED serval_aes::Tables tables;
    SERVAL_SHARED serval_aes::Schedule schedule;
    serval_aes::make_tables(block.rank(), block.size(), tables);
    block.sync();
    while (auto msg = q.recv(block)) {
        if (msg.len() < serval_aes::PIECE_HEADER_BYTES) {
            q.drop(block, msg, serval::BAD_LENGTH);
            continue;
        }
        const uint8_t* request = msg.as<const uint8_t>();
        uint64_t offset = 0;
        for (unsigned i = 0; i < 8; i++) offset |= uint64_t(request[8 + i]) << (8 * i);
        const uint32_t bytes = msg.len() - serval_aes::PIECE_HEADER_BYTES;
        auto reply = q.reply(block, msg, bytes);
        if (reply) {
            // Nothing of the last piece's key is in use.
            block.sync();
            if (block.rank() == 0) serval_aes::expand(request + 16, tables, schedule);
            block.sync();
            const uint8_t* in = request + serval_aes::PIECE_HEADER_BYTES;
            uint8_t* out = reply.as<uint8_t>();
            for (uint32_t at = 16 * block.rank(); at < bytes; at += 16 * block.size())
                serval_aes::combine(tables, schedule, offset / 16 + at / 16, in + at, out + at, bytes - at < 16 ? bytes - at : 16);
        }
        q.send(block, reply);
    }
}
