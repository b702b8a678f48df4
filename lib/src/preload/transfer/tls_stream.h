// What a program writes to a TLS connection, as records in a socket: with the order, counts and
// errors of a kernel that does TLS.
#pragma once

#include "preload/transfer/tls_record.h"

#include <sys/types.h>
#include <sys/uio.h>

// Where records go: send and preadv of the host, or those of a test.
struct tls_host {
    ssize_t (*send)(int, const void*, size_t, int);
    ssize_t (*preadv)(int, const struct iovec*, int, off_t);
};

struct tls_stream {
    struct tls_keys keys;
    // A record of which a part has been sent: its other bytes are the next ones.
    uint8_t* rest;
    size_t rest_at, rest_bytes;
    // The plain bytes of that record, or of one that has been sent since: the program has not been
    // told that they are sent, so it repeats them, and they are not sent again. Either bytes, or a
    // range of a file.
    size_t owed;
    uint8_t* owed_bytes;
    dev_t owed_device;
    ino_t owed_inode;
    off_t owed_offset;
    // The same for a record of another type, which is repeated whole.
    uint8_t* owed_message;
    size_t owed_message_bytes;
    uint8_t owed_type;
    // The peer has been told that other keys follow, which have not come.
    bool wants_keys;
    // The stream cannot be continued.
    bool broken;
};

void tls_stream_clear(struct tls_stream* stream);
// New keys, which records from here on have. False: they are unknown, or a record has been sent in
// part.
bool tls_stream_set_keys(struct tls_stream* stream, const struct tls_crypto* crypto,
                         const void* info, size_t len);
// As sendmsg(2), with data.
ssize_t tls_stream_write(struct tls_stream* stream, const struct tls_host* host, int fd,
                         const struct iovec* parts, size_t count, int flags);
// One record of another type, sent whole, or not: then the program repeats it.
ssize_t tls_stream_message(struct tls_stream* stream, const struct tls_host* host, int fd,
                           uint8_t type, const struct iovec* parts, size_t count, int flags);
// As sendfile(2).
ssize_t tls_stream_sendfile(struct tls_stream* stream, const struct tls_host* host, int fd,
                            int file, off_t* offset, size_t bytes);
