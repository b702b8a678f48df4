// See serval_ikernel.h. A call is a connection to the control socket, a request of one line, and the line that answers it.
#define _GNU_SOURCE
#include "serval_ikernel.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

// As crates/server/src/control/protocol.rs has them.
#define REQUEST_BYTES_MAX 16384
#define TEXT_BYTES_MAX 64
#define PATH_BYTES_MAX 4096
#define ANSWER_BYTES_MAX (1 << 20)
#define PATIENCE_MS 90000

struct ik {
  struct sockaddr_un server;
  char function[PATH_BYTES_MAX + 1];
  char name[TEXT_BYTES_MAX + 1];
  char service[TEXT_BYTES_MAX + 1];  // empty: it is not attached
  struct ik_attrs attrs;
  char error[1024];
  char* answer;  // ANSWER_BYTES_MAX + 1 bytes
};

// Texts go into JSON as they are: quotes, backslashes and control characters are refused.
static int is_text(const char* text, size_t bytes_max) {
  size_t length = text ? strnlen(text, bytes_max + 1) : 0;
  if (length == 0 || length > bytes_max) return 0;
  for (; *text; text++)
    if (*text == '"' || *text == '\\' || (unsigned char)*text < 32 || *text == 127) return 0;
  return 1;
}

int ik_create(const char* server, const char* function, const char* name,
              const struct ik_attrs* attrs, struct ik** ik) {
  struct ik* made;
  if (!ik || !is_text(function, PATH_BYTES_MAX) || !is_text(name, TEXT_BYTES_MAX)) return -EINVAL;
  if (!server || !*server || strlen(server) >= sizeof(made->server.sun_path)) return -EINVAL;
  made = calloc(1, sizeof(*made));
  if (made) made->answer = malloc(ANSWER_BYTES_MAX + 1);
  if (!made || !made->answer) {
    free(made);
    return -ENOMEM;
  }
  made->server.sun_family = AF_UNIX;
  strcpy(made->server.sun_path, server);
  strcpy(made->function, function);
  strcpy(made->name, name);
  if (attrs) made->attrs = *attrs;
  *ik = made;
  return 0;
}

// Sends the line and receives the answer, a string.
static int exchange(struct ik* ik, const char* line, size_t length) {
  struct pollfd poll_fd = {.events = POLLIN};
  // Connecting waits while many others do, and sending while the server reads nothing.
  struct timeval limit = {PATIENCE_MS / 1000, PATIENCE_MS % 1000 * 1000};
  ssize_t received;
  int result = 0, ready, fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (fd < 0) return -errno;
  poll_fd.fd = fd;
  if (setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit)) < 0 ||
      connect(fd, (struct sockaddr*)&ik->server, sizeof(ik->server)) < 0) {
    result = -errno;
  } else if (send(fd, line, length, MSG_NOSIGNAL) < 0) {
    result = -errno;
  } else {
    do ready = poll(&poll_fd, 1, PATIENCE_MS);
    while (ready < 0 && errno == EINTR);
    received = ready > 0 ? recv(fd, ik->answer, ANSWER_BYTES_MAX, 0) : 0;
    if (ready == 0) result = -ETIMEDOUT;
    else if (ready < 0 || received < 0) result = -errno;
    else if (received == 0) result = -ECONNRESET;
    else ik->answer[received] = '\0';
  }
  close(fd);
  return result;
}

// The value of a key at the beginning of the answer's object, or of the object `registers` in it. Keys have no escapes; a text
// cannot be taken for a key, since a quote in it has a backslash before it.
static const char* value_of(const char* answer, const char* key) {
  char quoted[TEXT_BYTES_MAX + 8];
  const char* found;
  snprintf(quoted, sizeof(quoted), "\"%s\":", key);
  found = strstr(answer, quoted);
  return found && (found[-1] == '{' || found[-1] == ',') ? found + strlen(quoted) : NULL;
}

static void note_error(struct ik* ik, const char* text) {
  size_t length = 0;
  for (text++; *text && *text != '"' && length + 1 < sizeof(ik->error); text++) {
    if (*text == '\\' && text[1]) text++;
    ik->error[length++] = (unsigned char)*text < 32 ? '?' : *text;
  }
  ik->error[length] = '\0';
}

__attribute__((format(printf, 2, 3))) static int ask(struct ik* ik, const char* format, ...) {
  char line[REQUEST_BYTES_MAX];
  const char* error;
  va_list arguments;
  int length, result;
  va_start(arguments, format);
  length = vsnprintf(line, sizeof(line), format, arguments);
  va_end(arguments);
  ik->error[0] = '\0';
  if (length < 0 || length >= (int)sizeof(line)) return -EINVAL;
  result = exchange(ik, line, (size_t)length);
  if (result) return result;
  if (ik->answer[0] != '{') return -EPROTO;
  error = value_of(ik->answer, "error");
  if (error && *error == '"') {
    note_error(ik, error);
    return -EREMOTEIO;
  }
  return value_of(ik->answer, "result") ? 0 : -EPROTO;
}

int ik_attach(struct ik* ik, const char* service) {
  char more[96] = "";
  int result, at = 0;
  if (!ik || !is_text(service, TEXT_BYTES_MAX)) return -EINVAL;
  if (ik->service[0]) return -EALREADY;
  if (ik->attrs.deadline_us) at = sprintf(more, ",\"deadline_us\":%u", ik->attrs.deadline_us);
  if (ik->attrs.memory_mib) sprintf(more + at, ",\"memory_mib\":%u", ik->attrs.memory_mib);
  result = ask(ik,
               "{\"command\":\"functions\",\"do\":\"attach\",\"service\":\"%s\",\"name\":\"%s\","
               "\"function\":\"%s\",\"on_failure\":\"%s\"%s}",
               service, ik->name, ik->function, ik->attrs.on_failure_open ? "open" : "closed", more);
  if (result == 0) strcpy(ik->service, service);
  return result;
}

int ik_command(struct ik* ik, enum ik_operation operation, const char* reg, uint64_t* value) {
  const char* found;
  char* end;
  int result;
  if (!ik || !value || !is_text(reg, TEXT_BYTES_MAX)) return -EINVAL;
  if (!ik->service[0]) return -ENOTCONN;
  if (operation == IK_WRITE)
    result = ask(ik,
                 "{\"command\":\"functions\",\"do\":\"write\",\"service\":\"%s\",\"name\":\"%s\","
                 "\"register\":\"%s\",\"value\":%llu}",
                 ik->service, ik->name, reg, (unsigned long long)*value);
  else if (operation == IK_READ || operation == IK_RESET)
    result = ask(ik,
                 "{\"command\":\"functions\",\"do\":\"%s\",\"service\":\"%s\",\"name\":\"%s\"}",
                 operation == IK_READ ? "read" : "reset", ik->service, ik->name);
  else
    return -EINVAL;
  if (result) return result;
  found = value_of(ik->answer, "registers");
  found = found ? value_of(found, reg) : NULL;
  if (!found) return -ENOENT;
  errno = 0;
  *value = strtoull(found, &end, 10);
  return errno || end == found ? -EPROTO : 0;
}

int ik_detach(struct ik* ik) {
  int result;
  if (!ik) return -EINVAL;
  if (!ik->service[0]) return -ENOTCONN;
  result = ask(ik,
               "{\"command\":\"functions\",\"do\":\"detach\",\"service\":\"%s\",\"name\":\"%s\"}",
               ik->service, ik->name);
  if (result == 0) ik->service[0] = '\0';
  return result;
}

int ik_destroy(struct ik* ik) {
  int result = 0;
  if (!ik) return 0;
  if (ik->service[0]) result = ik_detach(ik);
  free(ik->answer);
  free(ik);
  return result;
}

const char* ik_error(const struct ik* ik) { return ik ? ik->error : ""; }
