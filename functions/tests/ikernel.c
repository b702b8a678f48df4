// Uses every call against a running server: ikernel SOCKET SERVICE FUNCTION. Prints what is wrong and exits with 1.
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "serval_ikernel.h"

static int wrong;

static void check(const char* what, int right) {
  if (!right) {
    printf("wrong: %s\n", what);
    wrong = 1;
  }
}

int main(int argc, char** argv) {
  struct ik* ik = NULL;
  struct ik_attrs attrs = {.on_failure_open = 1, .deadline_us = 1000000, .memory_mib = 8};
  uint64_t value = 7;
  if (argc != 4) return 2;
  const char *server = argv[1], *service = argv[2], *function = argv[3];

  check("a server is needed", ik_create("", function, "f", NULL, &ik) == -EINVAL);
  check("a name without quotes", ik_create(server, function, "f\"", NULL, &ik) == -EINVAL);
  check("create", ik_create(server, function, "f", &attrs, &ik) == 0);
  check("it is not attached", ik_command(ik, IK_READ, "high", &value) == -ENOTCONN);
  check("it is not attached", ik_detach(ik) == -ENOTCONN);
  check("unknown service", ik_attach(ik, "none") == -EREMOTEIO);
  check("a sentence", strstr(ik_error(ik), "there is no service \"none\"") != NULL);
  check("attach", ik_attach(ik, service) == 0);
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
  check("destroy", ik_destroy(ik) == 0);
  check("nothing", ik_destroy(NULL) == 0);

  for (int round = 0; round < 10000; round++) {
    check("create", ik_create(server, function, "f", NULL, &ik) == 0);
    if (round % 100 == 0) check("attach", ik_attach(ik, service) == 0);
    check("destroy", ik_destroy(ik) == 0);
  }
  check("create", ik_create("/nowhere/control.sock", function, "f", NULL, &ik) == 0);
  check("no server", ik_attach(ik, service) == -ENOENT);
  check("destroy", ik_destroy(ik) == 0);
  return wrong;
}
