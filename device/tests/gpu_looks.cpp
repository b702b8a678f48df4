// gpu_looks: an echo kernel that measures the cost of polling (crates/accel/examples/gpu): its blocks, one warp each, always poll their rings
// with the same strategy, unlike the library's, which adapt. `units`: 1 polls only the first unit of a message, 0 its line.
// `rest_ns`: pause of a block between two polls. Serves granule16 messages that end in one line.
#include "../kernels/send_back.h"

namespace serval {
namespace detail {

struct Inspector {
    static SERVAL_DEVICE Look look(Channel& channel, bool units, Header& h) {
        const Consumer::Spot at = channel.rx_.spot();
        return units && !at.peep<Granule16>() ? Look::NONE : channel.rx_.judge(at, at.ask<Granule16>(), channel.in_, h);
    }

    // The next message. Nothing if the service stops.
    static SERVAL_DEVICE Message recv(Block& block, Mqueue& q, bool units, unsigned rest) {
        Channel& channel = q.channel_;
        Message m;
        Header h = {};
        for (unsigned tries = 1; look(channel, units, h) != Look::FOUND; tries++) {
            if (block.poll_engine(tries) != SERVAL_STOP_RUN || block.broken()) {
                block.end(SERVAL_REASON_STOPPED);
                return m;
            }
            if (rest) rest_ns(rest);
        }
        if (leader()) {
            channel.rx_.next++;
            channel.release_if(false);
        }
        crew_sync();
        m.data_ = channel.in_;
        m.token_ = h.token;
        m.len_ = h.len;
        return m;
    }
};

}  // namespace detail
}  // namespace serval

SERVAL_KERNEL(gpu_looks) (serval::Block& block, serval::Mqueue& q) {
    const bool units = block.param("units", 0) != 0;
    const unsigned rest = static_cast<unsigned>(block.param("rest_ns", 0));
    while (auto msg = serval::detail::Inspector::recv(block, q, units, rest)) send_back(block, q, msg);
}
