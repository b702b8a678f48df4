// A key-value server of 100 lines that knows nothing of Serval: store PORT serves get, set, delete and mg of memcached's text protocol over TCP.
#include <arpa/inet.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { ITEMS = 4096, KEY = 251, VALUE = 1024, CLIENTS = 256, REQUEST = 4096 };

static struct item {
  char key[KEY], value[VALUE];
  int length, version;  // length -1: it was deleted
} items[ITEMS];
static struct client {
  size_t length;
  char bytes[REQUEST];
} clients[CLIENTS];

static struct item* find(const char* key) {
  unsigned hash = 5381;
  for (const char* at = key; *at; at++) hash = hash * 33 + (unsigned char)*at;
  for (unsigned i = 0; i < ITEMS; i++) {
    struct item* item = &items[(hash + i) % ITEMS];
    if (!*item->key || !strcmp(item->key, key)) return item;
  }
  return NULL;
}

static void send_value(int fd, const char* head, const struct item* item, const char* end) {
  char answer[2 * REQUEST];
  int length = snprintf(answer, sizeof answer, "%s\r\n", head);
  memcpy(answer + length, item->value, (size_t)item->length);
  length += item->length;
  length += snprintf(answer + length, sizeof answer - (size_t)length, "\r\n%s", end);
  send(fd, answer, (size_t)length, MSG_NOSIGNAL);
}

static void send_text(int fd, const char* text) { send(fd, text, strlen(text), MSG_NOSIGNAL); }

// The meta command: the flags of the request, in its order, with what is to be known.
static void meta_get(int fd, const struct item* item, char* flags) {
  int found = item && *item->key && item->length >= 0;
  char head[REQUEST];
  size_t length = (size_t)(found ? snprintf(head, sizeof head, "VA %d", item->length) : snprintf(head, sizeof head, "EN"));
  for (char* flag = strtok(flags, " "); flag; flag = strtok(NULL, " ")) {
    char text[KEY + 16] = "";
    if (*flag == 'O') snprintf(text, sizeof text, " %s", flag);
    if (found && *flag == 'k') snprintf(text, sizeof text, " k%s", item->key);
    if (found && *flag == 'f') snprintf(text, sizeof text, " f0");
    if (found && *flag == 'c') snprintf(text, sizeof text, " c%d", item->version);
    if (found && *flag == 't') snprintf(text, sizeof text, " t-1");
    length += (size_t)snprintf(head + length, sizeof head - length, "%s", text);
  }
  if (found) return send_value(fd, head, item, "");
  strcat(head, "\r\n");
  send_text(fd, head);
}

// Serves the first request of `bytes`. Returns its length; 0: it is not whole.
static size_t serve(int fd, char* bytes, size_t length) {
  char *end = memmem(bytes, length, "\r\n", 2), name[8] = "", key[KEY] = "", head[KEY + 32];
  if (!end) return 0;
  *end = 0;
  int count = 0, read = 0;
  size_t line = (size_t)(end + 2 - bytes);
  sscanf(bytes, "%7s %250s%n", name, key, &read);
  struct item* item = find(key);
  if (!strcmp(name, "set") && sscanf(bytes + read, " %*u %*d %d", &count) == 1 && count >= 0 && count < VALUE && item) {
    if (length < line + (size_t)count + 2) return *end = '\r', 0;
    strcpy(item->key, key);
    memcpy(item->value, end + 2, (size_t)count);
    item->length = count, item->version++;
    send_text(fd, "STORED\r\n");
    return line + (size_t)count + 2;
  }
  int found = item && *item->key && item->length >= 0;
  snprintf(head, sizeof head, "VALUE %s 0 %d", key, found ? item->length : 0);
  if (!strcmp(name, "mg")) meta_get(fd, item, bytes + read);
  else if (!strcmp(name, "get") && found) send_value(fd, head, item, "END\r\n");
  else if (!strcmp(name, "get")) send_text(fd, "END\r\n");
  else if (!strcmp(name, "delete") && found) item->length = -1, send_text(fd, "DELETED\r\n");
  else send_text(fd, strcmp(name, "delete") ? "ERROR\r\n" : "NOT_FOUND\r\n");
  return line;
}

int main(int argc, char** argv) {
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)(argc > 1 ? atoi(argv[1]) : 0)), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  struct pollfd fds[CLIENTS] = {{.fd = socket(AF_INET, SOCK_STREAM, 0), .events = POLLIN}};
  for (int i = 1; i < CLIENTS; i++) fds[i] = (struct pollfd){.fd = -1, .events = POLLIN};
  if (bind(fds[0].fd, (struct sockaddr*)&at, sizeof at) || listen(fds[0].fd, 64)) return perror("bind"), 1;
  while (poll(fds, CLIENTS, -1) > 0) {
    for (int i = 1, at_once = fds[0].revents; i < CLIENTS; i++) {
      struct client* client = &clients[i];
      if (fds[i].fd < 0 && at_once) fds[i].fd = accept(fds[0].fd, NULL, NULL), fds[i].revents = 0, client->length = 0, at_once = 0;
      if (fds[i].fd < 0 || !fds[i].revents) continue;
      ssize_t got = recv(fds[i].fd, client->bytes + client->length, REQUEST - 1 - client->length, 0);
      if (got > 0) client->length += (size_t)got;
      for (size_t used; got > 0 && (used = serve(fds[i].fd, client->bytes, client->length)); client->length -= used)
        memmove(client->bytes, client->bytes + used, client->length - used);
      if (got <= 0) close(fds[i].fd), fds[i].fd = -1;
    }
  }
}
