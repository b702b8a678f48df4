// The file that names programs for the library for LD_PRELOAD: what it says, and the error of each
// line that says nothing.
#define _GNU_SOURCE
#include "preload/transfer/preload_settings.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s is not true (error: %s)\n", __FILE__, __LINE__, #condition, \
                    found.error);                                                                  \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static struct settings found;

static void parse(const char* text) {
    // Of exactly the text's length, so that the sanitizer sees a step too far.
    char* copy = strdup(text);
    settings_parse(&found, "file", copy, "/usr/sbin/nginx");
    free(copy);
}

#define NGINX "[[program]]\npath = \"/usr/sbin/nginx\"\nengine = \"/run/engine\"\n"
#define OTHER "[[program]]\npath = \"/usr/bin/other\"\nengine = \"/run/other\"\n"

static void finds_its_program(void) {
    parse(NGINX);
    CHECK(found.on && !found.error[0] && strcmp(found.engine, "/run/engine") == 0);
    CHECK(found.bytes_min == SETTINGS_BYTES_DEFAULT && !found.nonblocking);
    parse(OTHER "min_bytes = 7\nnonblocking = true\n# and\n\n" NGINX
                "  min_bytes=1000000 # many\r\n\tnonblocking\t=\ttrue#yes\n" OTHER);
    CHECK(found.on && strcmp(found.engine, "/run/engine") == 0 && found.bytes_min == 1000000 &&
          found.nonblocking);
    CHECK(!found.tls);
    // TLS needs no engine.
    parse("[[program]]\npath = \"/usr/sbin/nginx\"\ntls = true\n" OTHER);
    CHECK(!found.on && found.tls && !found.error[0]);
    parse(NGINX "tls = true\n");
    CHECK(found.on && found.tls);
    parse(OTHER "tls = true\n" NGINX "tls = false\n");
    CHECK(found.on && !found.tls);
    // Other programs, and a file that names none.
    for (const char** text = (const char*[]){OTHER, "", "\n# nothing\n", NULL}; *text; text++) {
        parse(*text);
        CHECK(!found.on && !found.error[0]);
    }
}

// Only 1 switches it on: 0, false and no are for programs that are not to have it.
static void reads_the_environment(void) {
    setenv("SERVAL_TRANSFER_CONFIG", "/nonexistent", 1);
    for (const char** value = (const char*[]){"1", "", "0", "false", "no", "11", NULL}; *value;
         value++) {
        setenv("SERVAL_TRANSFER_TLS", *value, 1);
        settings_load(&found);
        CHECK(found.tls == (strcmp(*value, "1") == 0) && !found.on);
    }
    unsetenv("SERVAL_TRANSFER_TLS");
    setenv("SERVAL_TRANSFER_SOCKET", "/run/engine", 1);
    settings_load(&found);
    CHECK(found.on && strcmp(found.engine, "/run/engine") == 0 && !found.nonblocking);
    setenv("SERVAL_TRANSFER_NONBLOCKING", "0", 1);
    settings_load(&found);
    CHECK(!found.nonblocking);
    setenv("SERVAL_TRANSFER_NONBLOCKING", "1", 1);
    settings_load(&found);
    CHECK(found.nonblocking);
    unsetenv("SERVAL_TRANSFER_NONBLOCKING");
    unsetenv("SERVAL_TRANSFER_SOCKET");
}

static void says_what_is_wrong(void) {
    static const struct {
        const char *text, *error;
    } cases[] = {
        {"path = \"/a\"\n",
         "file: line 1: a file has tables [[program]], and in them lines of the form key = value"},
        {"[[program]]\nnonsense\n",
         "file: line 2: a file has tables [[program]], and in them lines of the form key = value"},
        {"[[program]]\nsize = 1\n",
         "file: line 2: a [[program]] has the keys path, engine, min_bytes, nonblocking and tls"},
        {"[[program]]\npath = \"nginx\"\n",
         "file: line 2: path is the absolute path of an executable file, in quotes"},
        {"[[program]]\npath = \"/a\\n\"\n",
         "file: line 2: path is the absolute path of an executable file, in quotes"},
        {"[[program]]\npath = \"/a\n",
         "file: line 2: path is the absolute path of an executable file, in quotes"},
        {"[[program]]\npath = \"/a\" b\n",
         "file: line 2: path is the absolute path of an executable file, in quotes"},
        {"[[program]]\npath = \"/a\"\npath = \"/a\"\n",
         "file: line 3: path is the absolute path of an executable file, in quotes"},
        {"[[program]]\nengine =\n",
         "file: line 2: engine is the absolute path of an engine's socket, in quotes, of at most "
         "107 bytes"},
        {NGINX "min_bytes = 0\n", "file: line 4: min_bytes is a number of bytes, 1 at least"},
        {NGINX "min_bytes = -1\n", "file: line 4: min_bytes is a number of bytes, 1 at least"},
        {NGINX "min_bytes = 99999999999999999999\n",
         "file: line 4: min_bytes is a number of bytes, 1 at least"},
        {NGINX "min_bytes = 64k\n", "file: line 4: min_bytes is a number of bytes, 1 at least"},
        {NGINX "nonblocking = yes\n", "file: line 4: nonblocking is true or false"},
        {NGINX "tls = 1\n", "file: line 4: tls is true or false"},
        {NGINX "tls = true\ntls = true\n", "file: line 5: tls is true or false"},
        {"[[program]]\npath = \"/a\"\ntls = false",
         "file: line 3: the [[program]] above has no engine, the path of an engine's socket, and "
         "no tls = true"},
        {"[[program]]\npath = \"/usr/sbin/nginx\"\ntls = true\n" NGINX,
         "file: line 7: the program of the [[program]] above is named twice"},
        {NGINX "nonblocking = true false\n", "file: line 4: nonblocking is true or false"},
        {NGINX NGINX, "file: line 7: the program of the [[program]] above is named twice"},
        {"[[program]]\nengine = \"/e\"\n",
         "file: line 3: the [[program]] above has no path, the path of an executable file"},
        {NGINX "[[program]]\npath = \"/a\"\n",
         "file: line 6: the [[program]] above has no engine, the path of an engine's socket, and "
         "no tls = true"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        parse(cases[i].text);
        CHECK(!found.on);
        if (strcmp(found.error, cases[i].error) != 0) {
            fprintf(stderr, "%s\ngives:    %s\nexpected: %s\n", cases[i].text, found.error,
                    cases[i].error);
            exit(1);
        }
    }
    char text[400] = "[[program]]\nengine = \"/";
    memset(text + strlen(text), 'e', 107);
    strcat(text, "\"\n");
    parse(text);
    CHECK(!found.on && strstr(found.error, "107 bytes"));
}

// Every beginning of a file, and every file with one byte exchanged, is read without a step too
// far.
static void survives_any_text(void) {
    static const char whole[] = OTHER NGINX "min_bytes = 12 # x\nnonblocking = true\n";
    static const char bytes[] = "\0\n\"= #\\[9\x80";
    char text[sizeof whole];
    for (size_t len = 0; len < sizeof whole; len++) {
        memcpy(text, whole, sizeof whole);
        text[len] = '\0';
        parse(text);
        for (size_t i = 0; i < sizeof bytes - 1 && len < sizeof whole - 1; i++) {
            memcpy(text, whole, sizeof whole);
            text[len] = bytes[i];
            parse(text);
            CHECK(!found.on || !found.error[0]);
        }
    }
}

int main(void) {
    finds_its_program();
    reads_the_environment();
    says_what_is_wrong();
    survives_any_text();
    printf("ok\n");
    return 0;
}
