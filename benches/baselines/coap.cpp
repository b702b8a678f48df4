// A CoAP server of libcoap that authenticates each request with OpenSSL, as Serval's function `coap-auth` does, and answers "done", or 4.01.
//
// One thread, which spins: libcoap reads and answers one datagram with a system call each. Its sessions, retransmissions and options are what
// a server made of it has.
#include <coap3/coap.h>
#include <netinet/in.h>

#include "token.h"

namespace {

const char HELP[] =
    "usage: coap [FLAGS]   a CoAP server that checks a token in each request\n"
    "  --key KEY          the key of the tokens in base64url (that of the workload `coap`)\n"
    "  --port N           port of 127.0.0.1; 0 takes a free one (0)\n"
    "  --core N           run on this core (not pinned)\n"
    "  --blocking         sleep while idle instead of spinning\n";

const char KEY[] = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vMDEyMzQ1Njc4OTo7PD0-Pw";

Verifier* verifier;
Account account;

void answer(coap_resource_t*, coap_session_t*, const coap_pdu_t* request, const coap_string_t*, coap_pdu_t* response) {
    Text payload;
    account.messages++;
    if (!coap_get_data(request, &payload.bytes, &payload.at) || !verifier->accepts(payload)) {
        coap_pdu_set_code(response, COAP_RESPONSE_CODE_UNAUTHORIZED);
        return;
    }
    coap_pdu_set_code(response, COAP_RESPONSE_CODE_CONTENT);
    coap_add_data(response, 4, reinterpret_cast<const uint8_t*>("done"));
}

// A port that is free: libcoap does not say which one it took.
uint16_t free_port() {
    const int fd = socket(AF_INET, SOCK_DGRAM, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    if (fd < 0 || bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) ||
        getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length))
        fail("find a free port");
    close(fd);
    return ntohs(address.sin_port);
}

}  // namespace

int main(int argc, char** argv) {
    Flags flags(argc, argv, HELP);
    const std::string key = flags.text("--key", KEY);
    auto port = uint16_t(flags.number("--port", 0, 0, 65535));
    const auto cores = flags.cores("--core");
    const bool blocking = flags.on("--blocking");
    flags.end();
    if (!cores.empty()) pin(cores[0]);
    if (!port) port = free_port();
    Verifier made(key);
    verifier = &made;
    stop_on_signals();
    coap_startup();
    coap_set_log_level(LOG_EMERG);
    coap_context_t* context = coap_new_context(nullptr);
    coap_address_t address;
    coap_address_init(&address);
    address.size = sizeof address.addr.sin;
    address.addr.sin.sin_family = AF_INET;
    address.addr.sin.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.addr.sin.sin_port = htons(port);
    if (!context || !coap_new_endpoint(context, &address, COAP_PROTO_UDP)) fail("bind port " + std::to_string(port));
    coap_resource_t* root = coap_resource_init(coap_make_str_const(""), 0);
    coap_register_handler(root, COAP_REQUEST_POST, answer);
    coap_add_resource(context, root);
    ready("coap", "udp://127.0.0.1:" + std::to_string(port));
    Turns turns(account);
    while (going()) {
        const uint64_t before = account.messages;
        // 100 ms: a signal ends the wait.
        if (coap_io_process(context, blocking ? 100 : COAP_IO_NO_WAIT) < 0) fail("serve");
        turns.end(account.messages != before);
    }
    coap_free_context(context);
    coap_cleanup();
    return report({account});
}
