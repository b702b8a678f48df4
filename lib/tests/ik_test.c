// Uses every call against a running server: ik_test SOCKET SERVICE FUNCTION PORT. Prints what is
// wrong and exits with 1. The service has a function "file".
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "serval/ik.h"

static int wrong;

static void check(const char* what, int right) {
    if (!right) {
        printf("wrong: %s\n", what);
        wrong = 1;
    }
}

static void calls(const char* server, const char* service, const char* function) {
    struct ik *ik = NULL, *other = NULL;
    struct ik_attrs attrs = {.on_failure_open = 1, .deadline_us = 1000000, .memory_mib = 8};
    uint64_t value = 7;

    check("a server is needed", ik_create("", function, "f", NULL, &ik) == -EINVAL);
    check("a name without quotes", ik_create(server, function, "f\"", NULL, &ik) == -EINVAL);
    check("no server", ik_create("/nowhere/control.sock", function, "f", NULL, &ik) == -ENOENT);
    check("no module", ik_create(server, "/nowhere/f.wasm", "f", NULL, &ik) == -ENOENT);
    check("unknown function", ik_create(server, "nothing", "f", NULL, &ik) == -EREMOTEIO);
    check("a sentence", strstr(ik_error(NULL), "no built-in function \"nothing\"") != NULL);
    attrs.dictionary = "a b";
    check("no name", ik_create(server, function, "f", &attrs, &ik) == -EREMOTEIO);
    check("a sentence", strstr(ik_error(NULL), "is no name") != NULL);
    attrs.dictionary = "a\"";
    check("a name without quotes", ik_create(server, function, "f", &attrs, &ik) == -EINVAL);
    attrs.dictionary = "known";
    attrs.dictionary_kib = 32;
    check("create", ik_create(server, function, "f", &attrs, &ik) == 0);
    check("no sentence", !*ik_error(NULL) && !*ik_error(ik));
    check("the name is taken", ik_create(server, function, "f", &attrs, &other) == -EREMOTEIO);
    check("not attached", ik_command(ik, IK_READ, "high", &value) == -ENOTCONN);
    check("not attached", ik_detach(ik) == -ENOTCONN);
    check("unknown service", ik_attach(ik, "none") == -EREMOTEIO);
    check("a sentence", strstr(ik_error(ik), "there is no service \"none\"") != NULL);
    check("no neighbour", ik_attach_at(ik, service, IK_BEFORE, "none") == -EREMOTEIO);
    check("attach", ik_attach_at(ik, service, IK_BEFORE, "file") == 0);
    check("twice", ik_attach(ik, service) == -EALREADY);
    check("read", ik_command(ik, IK_READ, "high", &value) == 0 && value == 0xffffffff);
    value = 12;
    check("write", ik_command(ik, IK_WRITE, "high", &value) == 0 && value == 12);
    check("reset", ik_command(ik, IK_RESET, "count", &value) == 0 && value == 0);
    check("no register", ik_command(ik, IK_READ, "nothing", &value) == -ENOENT);
    value = 1;
    check("no setting", ik_command(ik, IK_WRITE, "count", &value) == -EREMOTEIO);
    check("a sentence", strstr(ik_error(ik), "has no setting \"count\"") != NULL);
    check("detach", ik_detach(ik) == 0);
    check("attach again", ik_attach(ik, service) == 0);
    check("its settings", ik_command(ik, IK_READ, "high", &value) == 0 && value == 12);
    uint64_t first = ik_id(ik);
    check("destroy", ik_destroy(ik) == 0);
    check("nothing", ik_destroy(NULL) == 0 && ik_release(NULL) == 0);
    check("create", ik_create(server, function, "f", NULL, &ik) == 0);
    check("another id", ik_id(ik) != first);
    check("release", ik_release(ik) == 0);
}

// A process that ends without a word leaves nothing; with `keep` the function stays, and this
// process destroys it.
static void ends(const char* server, const char* service, const char* function) {
    for (int keep = 0; keep <= 1; keep++) {
        struct ik_attrs attrs = {.keep = keep};
        struct ik* ik = NULL;
        uint64_t value = 0;
        int tries, status = 1;
        pid_t child = fork();
        if (child == 0) {
            struct ik* own = NULL;
            _exit(ik_create(server, function, keep ? "kept" : "ends", &attrs, &own) != 0 ||
                  ik_attach(own, service) != 0 || ik_command(own, IK_READ, "high", &value) != 0);
        }
        check("the child", child > 0 && waitpid(child, &status, 0) == child && status == 0);
        if (keep) {
            check("it is there", ik_create(server, function, "kept", NULL, &ik) == -EREMOTEIO);
            continue;
        }
        // The server may see the end later.
        for (tries = 0; tries < 3000 && ik_create(server, function, "ends", NULL, &ik) != 0;
             tries++)
            usleep(10000);
        check("it has ended", ik != NULL);
        check("its name in the chain is free", ik_attach(ik, service) == 0);
        check("destroy", ik_destroy(ik) == 0);
    }
}

// Datagrams that this process sends to a service whose function delivers them: in order, with the
// sender; and those that find no room.
static void ring(const char* server, const char* service, int port) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)}, own;
    socklen_t length = sizeof(own);
    struct custom_ring_message message;
    struct custom_ring* ring = NULL;
    struct ik* ik = NULL;
    struct ik_attrs attrs = {.deadline_us = 1000000};
    uint32_t number, buffer[16];
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    check("a socket", fd >= 0 && connect(fd, (struct sockaddr*)&to, sizeof(to)) == 0 &&
                          getsockname(fd, (struct sockaddr*)&own, &length) == 0);
    check("create", ik_create(server, "deliver", "ring", &attrs, &ik) == 0);
    check("no power of two", custom_ring_create(ik, 3, 64, &ring) == -EREMOTEIO);
    check("a sentence", strstr(ik_error(ik), "not a power of two") != NULL);
    check("a ring", custom_ring_create(ik, 8, 64, &ring) == 0);
    check("attach", ik_attach(ik, service) == 0);
    check("not while it is attached", custom_ring_create(ik, 8, 64, &ring) == -EREMOTEIO);
    check("nothing", custom_ring_read(ring, buffer, sizeof(buffer), &message) == -EAGAIN);
    check("time-out", custom_ring_wait(ring, 1) == -ETIMEDOUT);
    for (number = 0; number < 1000; number++) {
        check("send", send(fd, &number, sizeof(number), 0) == sizeof(number));
        check("wait", custom_ring_wait(ring, 60000) == 0);
        check("too short", custom_ring_read(ring, buffer, 3, &message) == -EMSGSIZE);
        check("read", custom_ring_read(ring, buffer, sizeof(buffer), &message) == 0);
        check("it is that one", message.length == sizeof(number) && buffer[0] == number);
        check("its number", message.number == number && message.worker == 0);
        check("its client", message.has_client && message.client_port == ntohs(own.sin_port) &&
                                message.client_ipv4 == INADDR_LOOPBACK);
        if (wrong) break;
    }
    for (number = 0; number < 20; number++)
        check("send", send(fd, &number, sizeof(number), 0) == sizeof(number));
    for (number = 0; number < 8; number++) {
        check("wait", custom_ring_wait(ring, 60000) == 0);
        // Places are given back, so more than eight may find room meanwhile, and none is out of
        // order.
        check("read", custom_ring_read(ring, buffer, sizeof(buffer), &message) == 0);
        check("in order", message.number == 1000 + buffer[0] && buffer[0] >= number);
    }
    custom_ring_destroy(ring);
    custom_ring_destroy(NULL);
    check("destroy", ik_destroy(ik) == 0);
    close(fd);
}

int main(int argc, char** argv) {
    struct ik* ik = NULL;
    if (argc != 5) return 2;
    ring(argv[1], argv[2], atoi(argv[4]));
    calls(argv[1], argv[2], argv[3]);
    ends(argv[1], argv[2], argv[3]);
    for (int round = 0; round < 50; round++) {
        check("create", ik_create(argv[1], argv[3], "f", NULL, &ik) == 0);
        if (round % 10 == 0) check("attach", ik_attach(ik, argv[2]) == 0);
        check("destroy", ik_destroy(ik) == 0);
    }
    return wrong;
}
