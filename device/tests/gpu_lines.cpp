// gpu_lines: measures how fast a host thread reads lines that a GPU has just written (crates/accel/examples/gpu). For a message without
// payload the block writes its share of the TX ring's arena in 16-byte units, as granules are written; for one with payload
// it reads the RX ring's arena, so that the host's next write finds lines that the GPU has had. It replies when that is done.
#include <serval/kernel.h>

namespace serval {
namespace detail {

struct Inspector {
    static SERVAL_DEVICE void write(Mqueue& q, uint32_t round) {
        const Ring& ring = q.channel_.tx_.ring;
        for (uint64_t at = Granule16::BYTES * block_rank(); at + Granule16::BYTES <= ring.arena_bytes; at += Granule16::BYTES * block_size())
            Granule16{{round, round, round}, round}.store(ring.arena + at);
    }
    static SERVAL_DEVICE uint32_t read(Mqueue& q) {
        const Ring& ring = q.channel_.rx_.ring;
        uint32_t all = 0;
        for (uint64_t at = Granule16::BYTES * block_rank(); at + Granule16::BYTES <= ring.arena_bytes; at += Granule16::BYTES * block_size())
            all += Granule16::load(ring.arena + at).data[0];
        return all;
    }
};

}  // namespace detail
}  // namespace serval

SERVAL_KERNEL(gpu_lines) (serval::Block& block, serval::Mqueue& q) {
    uint32_t round = 0, read = 0;
    while (auto msg = q.recv(block)) {
        round++;
        if (msg.len())
            read += serval::detail::Inspector::read(q);
        else
            serval::detail::Inspector::write(q, round);
        block.sync();
        auto reply = q.reply(block, msg, 8);
        if (block.rank() == 0) reply.as<uint32_t>()[0] = read;
        q.send(block, reply);
    }
}
