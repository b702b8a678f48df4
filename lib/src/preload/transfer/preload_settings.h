// Which engine a program's transfers go to, if any: from the environment, or from a file that names
// programs.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <sys/un.h>

// Shorter calls are faster without the way to another process.
#define SETTINGS_BYTES_DEFAULT ((size_t)64 << 10)
// A file that is longer is not read.
#define SETTINGS_FILE_BYTES_MAX ((size_t)64 << 10)

struct settings {
    // Whether the program's transfers go to an engine.
    bool on;
    // The path of the engine's socket.
    char engine[sizeof((struct sockaddr_un*)0)->sun_path];
    // Calls for fewer bytes are libc's.
    size_t bytes_min;
    // Whether calls on non-blocking sockets go to the engine.
    bool nonblocking;
    // Whether the library makes the TLS records that the program asks the kernel for.
    bool tls;
    // Whether the library says on standard error when it makes records for the first time.
    bool verbose;
    // Why the settings cannot be used; empty if they can.
    char error[512];
};

// Reads the settings of this process.
void settings_load(struct settings* settings);
// Reads them for the program with this path from the text of a file; `name` is the file's, for
// errors.
void settings_parse(struct settings* settings, const char* name, char* text, const char* program);
