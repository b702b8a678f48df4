// SERVAL_TRANSFER_SOCKET names an engine for the program that has it in its environment,
// SERVAL_TRANSFER_NONBLOCKING=1 lets that engine do calls on non-blocking sockets, too, and
// SERVAL_TRANSFER_TLS=1 lets the library make the program's TLS records. Without socket and TLS a
// file names programs: /etc/serval/transfer.toml, or the one that SERVAL_TRANSFER_CONFIG names. So
// the library can be preloaded everywhere. SERVAL_TRANSFER_VERBOSE=1, with either, says on standard
// error that records are made.
//
//     [[program]]
//     path = "/usr/sbin/nginx"
//     engine = "/run/serval/transfer"
//     min_bytes = 65536
//     nonblocking = false
//     tls = false
//
// This is a part of TOML: strings have no escapes, and numbers are decimal. A call on a
// non-blocking socket only fills the socket's buffer, which libc does in less time than the way to
// another process takes, so such calls are the engine's only where it is asked for.
#define _GNU_SOURCE
#include "preload/transfer/preload_settings.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define DEFAULT_FILE "/etc/serval/transfer.toml"

// A table of the file.
struct entry {
    bool has_path, has_engine, has_bytes_min, has_nonblocking, has_tls, is_own;
    struct settings settings;
};

// Where the parser is.
struct place {
    struct settings* settings;
    const char *name, *program;
    unsigned line;
};

static bool fail(struct place* at, const char* what) {
    at->settings->on = at->settings->tls = false;
    snprintf(at->settings->error, sizeof at->settings->error, "%.300s: line %u: %s", at->name,
             at->line, what);
    return false;
}

static char* skip_spaces(char* text) {
    while (*text == ' ' || *text == '\t' || *text == '\r') text++;
    return text;
}

// Whether nothing but a comment is left of a line.
static bool is_end(char* text) {
    text = skip_spaces(text);
    return *text == '\0' || *text == '#';
}

// The end of a table.
static bool close_entry(struct place* at, const struct entry* entry) {
    if (!entry->has_path)
        return fail(at, "the [[program]] above has no path, the path of an executable file");
    if (!entry->has_engine && !entry->settings.tls)
        return fail(at,
                    "the [[program]] above has no engine, the path of an engine's socket, and no "
                    "tls = true");
    if (!entry->is_own) return true;
    if (at->settings->on || at->settings->tls)
        return fail(at, "the program of the [[program]] above is named twice");
    *at->settings = entry->settings;
    at->settings->on = entry->has_engine;
    return true;
}

// Takes a string in quotes; ends it in place.
static char* take_string(char* value) {
    if (*value != '"') return NULL;
    char* end = strchr(value + 1, '"');
    if (!end || !is_end(end + 1)) return NULL;
    *end = '\0';
    return strchr(value + 1, '\\') ? NULL : value + 1;
}

static bool take_bool(char* value, bool* result) {
    size_t len = strcspn(value, " \t\r#");
    bool yes = len == 4 && strncmp(value, "true", len) == 0,
         no = len == 5 && strncmp(value, "false", len) == 0;
    *result = yes;
    return (yes || no) && is_end(value + len);
}

static bool take_value(struct place* at, struct entry* entry, const char* key, char* value) {
    if (strcmp(key, "path") == 0) {
        char* path = take_string(value);
        if (!path || path[0] != '/' || entry->has_path)
            return fail(at, "path is the absolute path of an executable file, in quotes");
        entry->has_path = true;
        entry->is_own = strcmp(path, at->program) == 0;
        return true;
    }
    if (strcmp(key, "engine") == 0) {
        char* path = take_string(value);
        if (!path || path[0] != '/' || strlen(path) >= sizeof entry->settings.engine ||
            entry->has_engine)
            return fail(at,
                        "engine is the absolute path of an engine's socket, in quotes, of at most "
                        "107 bytes");
        entry->has_engine = true;
        strcpy(entry->settings.engine, path);
        return true;
    }
    if (strcmp(key, "min_bytes") == 0) {
        char* end;
        errno = 0;
        unsigned long long number = isdigit((unsigned char)*value) ? strtoull(value, &end, 10) : 0;
        if (number == 0 || errno || !is_end(end) || number > SIZE_MAX || entry->has_bytes_min)
            return fail(at, "min_bytes is a number of bytes, 1 at least");
        entry->has_bytes_min = true;
        entry->settings.bytes_min = (size_t)number;
        return true;
    }
    if (strcmp(key, "nonblocking") == 0) {
        if (entry->has_nonblocking || !take_bool(value, &entry->settings.nonblocking))
            return fail(at, "nonblocking is true or false");
        entry->has_nonblocking = true;
        return true;
    }
    if (strcmp(key, "tls") == 0) {
        if (entry->has_tls || !take_bool(value, &entry->settings.tls))
            return fail(at, "tls is true or false");
        entry->has_tls = true;
        return true;
    }
    return fail(at, "a [[program]] has the keys path, engine, min_bytes, nonblocking and tls");
}

static bool take_line(struct place* at, struct entry* entry, bool* in_entry, char* line) {
    static const struct entry none = {.settings = {.bytes_min = SETTINGS_BYTES_DEFAULT}};
    line = skip_spaces(line);
    if (is_end(line)) return true;
    static const char head[] = "[[program]]";
    if (strncmp(line, head, sizeof head - 1) == 0 && is_end(line + sizeof head - 1)) {
        if (*in_entry && !close_entry(at, entry)) return false;
        *entry = none;
        *in_entry = true;
        return true;
    }
    char* equals = strchr(line, '=');
    if (!equals || !*in_entry)
        return fail(at, "a file has tables [[program]], and in them lines of the form key = value");
    char* end = equals;
    while (end > line && isspace((unsigned char)end[-1])) end--;
    *end = '\0';
    return take_value(at, entry, line, skip_spaces(equals + 1));
}

void settings_parse(struct settings* settings, const char* name, char* text, const char* program) {
    memset(settings, 0, sizeof *settings);
    struct place at = {settings, name, program, 0};
    struct entry entry;
    bool in_entry = false;
    for (char* line = text; line;) {
        char* end = strchr(line, '\n');
        if (end) *end = '\0';
        at.line++;
        if (!take_line(&at, &entry, &in_entry, line)) return;
        line = end ? end + 1 : NULL;
    }
    if (in_entry) close_entry(&at, &entry);
}

// Reads the file. Returns a sentence if it cannot be used.
static const char* read_file(const char* name, char* text) {
    int file = open(name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) return strerror(errno);
    const char* error = NULL;
    struct stat found;
    size_t len = 0;
    ssize_t now = 1;
    if (fstat(file, &found) < 0) {
        error = strerror(errno);
    } else if (!S_ISREG(found.st_mode)) {
        error = "it is not a regular file";
    } else if ((found.st_mode & (S_IWGRP | S_IWOTH)) ||
               (found.st_uid != 0 && found.st_uid != geteuid())) {
        // An engine gets the program's files and sockets.
        error = "only root or this user may own and write it";
    }
    while (!error && now > 0) {
        now = read(file, text + len, SETTINGS_FILE_BYTES_MAX - len);
        if (now < 0) error = strerror(errno);
        if (now > 0) len += (size_t)now;
        if (len == SETTINGS_FILE_BYTES_MAX) error = "it is too long";
    }
    close(file);
    text[error ? 0 : len] = '\0';
    if (!error && strlen(text) != len) error = "it has a zero byte";
    return error;
}

static void load(struct settings* settings) {
    memset(settings, 0, sizeof *settings);
    const char *engine = secure_getenv("SERVAL_TRANSFER_SOCKET"),
               *tls = secure_getenv("SERVAL_TRANSFER_TLS");
    const char* nonblocking = secure_getenv("SERVAL_TRANSFER_NONBLOCKING");
    settings->tls = tls && strcmp(tls, "1") == 0;
    if (settings->tls && !engine) return;
    if (engine) {
        settings->on = strlen(engine) < sizeof settings->engine;
        if (settings->on)
            strcpy(settings->engine, engine);
        else
            snprintf(settings->error, sizeof settings->error,
                     "SERVAL_TRANSFER_SOCKET is longer than a socket's path can be");
        settings->bytes_min = SETTINGS_BYTES_DEFAULT;
        settings->nonblocking = nonblocking && strcmp(nonblocking, "1") == 0;
        return;
    }
    const char* name = secure_getenv("SERVAL_TRANSFER_CONFIG");
    // A library that is preloaded for all programs affects none where there is no file.
    if (!name && access(DEFAULT_FILE, F_OK) < 0 && errno == ENOENT) return;
    if (!name) name = DEFAULT_FILE;
    char program[PATH_MAX];
    ssize_t len = readlink("/proc/self/exe", program, sizeof program - 1);
    char* text = malloc(SETTINGS_FILE_BYTES_MAX + 1);
    const char* error = !text     ? strerror(ENOMEM)
                        : len < 0 ? "the path of the program is not known (/proc)"
                                  : read_file(name, text);
    if (error) {
        snprintf(settings->error, sizeof settings->error, "%.300s: %.150s", name, error);
    } else {
        program[len] = '\0';
        settings_parse(settings, name, text, program);
    }
    if (settings->error[0]) {
        // The calls before which the error is reported.
        settings->bytes_min = SETTINGS_BYTES_DEFAULT;
        settings->nonblocking = true;
    }
    free(text);
}

void settings_load(struct settings* settings) {
    load(settings);
    // Last: what is read from a file replaces everything.
    const char* verbose = secure_getenv("SERVAL_TRANSFER_VERBOSE");
    settings->verbose = verbose && strcmp(verbose, "1") == 0;
}
